"""Any single bit of a checkpoint, wherever it lies: found, named, and passed over."""

import json
import math
import pathlib
import random

import numpy as np
import pytest
import small

import flatshard as fs
from flatshard import _core, checkpoint
from flatshard.errors import CheckpointError
from flatshard.job import local_world

pytestmark = pytest.mark.timeout(240)

FLIPS, SEED, SIZE = 200, 20240229, 3
SHAPES = {"layers.1.mlp.up_proj.weight": (512, 900), "layers.1.scale": (), "norm.weight": (5,)}


def build(world: fs.World, seed: int) -> tuple[fs.Shards, fs.AdamW]:
    """Some MB on three ranks, so that files have several blocks."""
    rng = np.random.default_rng(seed)
    shards = fs.shard({n: rng.random(s).astype(np.float32) for n, s in SHAPES.items()}, world)
    opt = fs.AdamW(shards, lr=0.1)
    for unit in reversed(shards.units):
        unit.reduce({name: np.ones(SHAPES[name], np.float32) for name in unit.names})
    opt.step()
    return shards, opt


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, tuple[str, str]]:
    """A folder with steps 1 and 2, and the hashes of step 1."""
    folder = tmp_path_factory.mktemp("flips")

    def save(world):
        for step in (1, 2):
            shards, opt = build(world, step)
            checkpoint.save(folder, shards, opt, step=step, user={"step": step})
            if step == 1:
                hashes = small.hashes(shards)
        return hashes

    return folder, local_world(SIZE).run(save)[0]


def what_lies_at(path: pathlib.Path, at: int) -> tuple[str, str, int] | None:
    """(parameter, state, row) of a byte of a file, from its header alone; None: in no tensor."""
    content = path.read_bytes()
    if path.name == "index.json":
        return None
    size = int.from_bytes(content[:8], "little")
    for key, entry in json.loads(content[8 : 8 + size]).items():
        if key == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        if begin <= at < end:
            name, state, first = key.rsplit(":", 2)
            row = math.prod(SHAPES[name][1:]) or 1
            return name, state, (int(first) + (at - begin) // 4) // row
    assert at < 8 + size
    return None


def test_every_one_of_many_random_bits(run) -> None:
    folder, expected = run
    files = sorted((folder / "step-000002").iterdir())
    draw = random.Random(SEED)
    # A third of them in the index, which is small; the others anywhere in the folder.
    sizes = [path.stat().st_size for path in files]
    flips = []
    for number in range(FLIPS):
        path = files[0] if number % 3 == 0 else draw.choices(files, sizes)[0]
        flips.append((path, draw.randrange(path.stat().st_size), draw.randrange(8)))
    assert files[0].name == "index.json"
    kinds = {"index": 0, "header": 0, "data": 0}
    for path in files[1:]:  # headers are small, too
        flips += [(path, draw.randrange(8 + 200), draw.randrange(8)) for _ in range(5)]

    def load(world):
        shards, opt = build(world, 7)
        for path, at, bit in flips:
            if world.is_main:
                where = what_lies_at(path, at)
                flip(path, at, bit)
                kinds[check(path, at, where)] += 1
            world.barrier()
            loaded = checkpoint.load(folder, shards, opt)
            assert loaded.step == 1 and loaded.user == {"step": 1}, (path.name, at, bit)
            assert len(loaded.skipped) == 1 and path.name in loaded.skipped[0], loaded.skipped
            world.barrier()
            if world.is_main:
                flip(path, at, bit)
        assert small.hashes(shards) == expected
        assert checkpoint.load(folder, shards, opt).step == 2, "flipped back, it is whole again"

    local_world(2).run(load)
    assert sum(kinds.values()) == len(flips) and min(kinds.values()) >= 10, kinds


def flip(path: pathlib.Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def check(path: pathlib.Path, at: int, where: tuple[str, str, int] | None) -> str:
    """verify names the file, and where data are hit the parameter, its rows and the rank."""
    found = checkpoint.verify(path.parent.parent)
    assert found and all(damage.file == path.name for damage in found), (path.name, at, found)
    if path.name == "index.json":
        return "index"
    rank = int(path.name.split("-")[1])
    assert all(damage.rank == rank and damage.step == 2 for damage in found)
    block = at >> 20
    assert all(damage.block == block for damage in found)
    if where is None:
        assert all("header" in str(damage) for damage in found), found
        return "header"
    name, state, row = where
    hits = [d for d in found if d.parameter == name and d.state == state]
    assert len(hits) == 1 and hits[0].rows[0] <= row <= hits[0].rows[1], (where, found)
    return "data"


def test_a_file_cut_at_every_byte_of_its_header(run, tmp_path) -> None:
    """With an index that knows its length, and without one: the reader of headers alone."""
    folder, _ = run
    path = folder / "step-000002" / "rank-00001-of-00003.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    alone = tmp_path / "model.safetensors"
    try:
        for cut in [*range(end + 1), len(content) - 1]:
            alone.write_bytes(content[:cut])
            with pytest.raises(CheckpointError, match=r"model\.safetensors"):
                _core.safetensors_header(alone)
            if cut % 16 == 0:
                path.write_bytes(content[:cut])
                found = checkpoint.verify(folder)
                assert [(d.file, d.rank, d.step) for d in found] == [(path.name, 1, 2)]
    finally:
        path.write_bytes(content)
    assert checkpoint.verify(folder) == []

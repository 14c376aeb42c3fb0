"""Damage is found, named, and passed over; hostile folders are refused before anything is read."""

import json
import logging
import os
import pathlib
import re
import shutil
import struct

import numpy as np
import pytest
import small

from flatshard import _core, _folders, checkpoint
from flatshard.errors import CheckpointError
from flatshard.job import local_world
from flatshard.optim import AdamW
from flatshard.shard import shard

pytestmark = pytest.mark.timeout(120)

BIG = {"layers.1.mlp.up_proj.weight": (1024, 600), "norm.weight": (5,)}
ROWS = re.compile(r"(\S+) rows (\d+)-(\d+), rank (\d+)")


def big(world, seed=0):
    """A model of a few blocks; two ranks own 1.2 MB each."""
    rng = np.random.default_rng(seed)
    return shard({n: rng.standard_normal(s).astype(np.float32) for n, s in BIG.items()}, world)


def saved(folder: pathlib.Path, build, steps=(1,), size=2) -> None:
    """Checkpoints of the values of seed ``step``."""

    def body(world):
        for number in steps:
            checkpoint.save(folder, build(world, seed=number), step=number)

    local_world(size).run(body)


def flip(path: pathlib.Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def tensor_at(path: pathlib.Path, name: str) -> tuple[int, int]:
    """Where a tensor whose name begins so lies in a file."""
    return next(e[3:] for e in _core.safetensors_header(path)[1] if e[0].startswith(name))


def test_a_flipped_bit_is_named_and_the_last_good_step_is_loaded(tmp_path, caplog) -> None:
    saved(tmp_path, big, steps=(10, 20))
    name = "layers.1.mlp.up_proj.weight"
    file = tmp_path / "step-000020" / "rank-00001-of-00002.safetensors"
    begin, _ = tensor_at(file, name)
    first = int(next(e[0] for e in _core.safetensors_header(file)[1] if name in e[0]).split(":")[2])
    flip(file, begin + 4 * 280_000)  # in the second block of rank 1's file
    row = (first + 280_000) // 600

    def load(world):
        shards = big(world, seed=1)
        loaded = checkpoint.load(tmp_path, shards)
        with pytest.raises(CheckpointError, match="block 1 is damaged"):
            checkpoint.load(tmp_path, shards, step=20)
        checkpoint.load(tmp_path, shards)
        return loaded, shards.full(name)

    with caplog.at_level(logging.WARNING, "flatshard"):
        results = local_world(2).run(load)
    expected = np.random.default_rng(10).standard_normal(BIG[name]).astype(np.float32)
    for loaded, weight in results:
        assert loaded.step == 10 and (weight == expected).all()
        found = ROWS.search(loaded.skipped[0])
        assert found is not None and found[1] == name and found[4] == "1", loaded.skipped
        assert int(found[2]) <= row <= int(found[3])
        assert int(found[3]) - int(found[2]) < 512, "rows, not the whole tensor"
    assert "passed over" in caplog.text and "step 10" in caplog.text

    damages = checkpoint.verify(tmp_path)
    assert [(d.step, d.block, d.parameter, d.rank) for d in damages] == [(20, 1, name, 1)]
    assert damages[0].rows == (int(found[2]), int(found[3]))
    assert ROWS.search(str(damages[0])).groups() == found.groups()


def test_every_kind_of_damage_is_found(tmp_path) -> None:
    saved(tmp_path / "good", small.build, steps=(1, 2))
    index = "step-000002/index.json"
    first, second = (f"step-000002/rank-0000{r}-of-00002.safetensors" for r in range(2))

    def cut(name, n):
        return lambda d: os.truncate(d / name, n)

    damages = {
        "header flipped": lambda d: flip(d / first, 40),
        "length flipped": lambda d: flip(d / first, 1),
        "data flipped": lambda d: flip(d / second, (d / second).stat().st_size - 1),
        "file cut": cut(second, 3000),
        "file empty": cut(first, 0),
        "file longer": lambda d: (d / first).write_bytes((d / first).read_bytes() + b"x"),
        "file gone": lambda d: (d / second).unlink(),
        "file a folder": lambda d: ((d / second).unlink(), (d / second).mkdir()),
        "files swapped": lambda d: (
            (d / first).rename(d / "t"),
            (d / second).rename(d / first),
            (d / "t").rename(d / second),
        ),
        "index flipped": lambda d: flip(d / index, 300),
        "index cut": cut(index, 500),
        "index empty": cut(index, 0),
        "index not text": lambda d: (d / index).write_bytes(b"\xff" * 100),
    }
    for what, damage in damages.items():
        folder = tmp_path / what
        shutil.copytree(tmp_path / "good", folder)
        damage(folder)

        def load(world, folder=folder, what=what):
            shards = small.build(world, seed=9)
            before = small.hashes(shards)
            with pytest.raises(CheckpointError):
                checkpoint.load(folder / "step-000002", shards)
            assert small.hashes(shards) == before, f"{what}: nothing was written"
            loaded = checkpoint.load(folder, shards)
            assert loaded.step == 1 and len(loaded.skipped) == 1
            return small.hashes(shards), small.hashes(small.build(world, seed=1))

        for got, expected in local_world(2).run(load):
            assert got == expected, what
        found = checkpoint.verify(folder)
        assert found and all("step-000002" in d.folder for d in found), what
    assert checkpoint.verify(tmp_path / "good") == []


def test_damage_without_an_older_good_checkpoint_loses_nothing(tmp_path) -> None:
    """Damage that one rank alone reads, in its last block: weights, moments, counts stay."""

    def save(world):
        shards = big(world)
        opt = AdamW(shards, lr=0.1)
        for unit in shards.units:
            unit.reduce({name: np.ones(BIG[name], np.float32) for name in unit.names})
        opt.step()
        checkpoint.save(tmp_path, shards, opt, step=1)

    local_world(2).run(save)
    file = tmp_path / "step-000001" / "rank-00001-of-00002.safetensors"
    flip(file, file.stat().st_size - 1)

    def load(world, step):
        shards = big(world, seed=5)
        opt = AdamW(shards, lr=0.2)
        before = *small.hashes(shards), opt.state()
        with pytest.raises(CheckpointError, match=r"rows \d+-\d+, rank 1"):
            checkpoint.load(tmp_path, shards, opt, step=step)
        assert (*small.hashes(shards), opt.state()) == before
        for unit in shards.units:  # and goes on as if nothing had been tried
            unit.reduce({name: np.ones(BIG[name], np.float32) for name in unit.names})
        assert opt.step().applied

    for size in (1, 2, 3):
        local_world(size).run(load, 1)
        local_world(size).run(load, "latest")


def test_every_truncation_and_every_flip_of_an_index(tmp_path) -> None:
    saved(tmp_path, small.build)
    folder = tmp_path / "step-000001"
    good = (folder / "index.json").read_bytes()
    assert _folders.read_index(str(folder)).step == 1
    for cut in range(len(good)):
        with pytest.raises(CheckpointError):
            _folders.parse_index(str(folder), good[:cut])
    rng = np.random.default_rng(0)
    for at in rng.integers(0, 8 * len(good), 1500):
        flipped = bytearray(good)
        flipped[at // 8] ^= 1 << (at % 8)
        with pytest.raises(CheckpointError):
            _folders.parse_index(str(folder), bytes(flipped))


def sealed(values) -> bytes:
    return _folders.write_index(values)


def test_an_index_that_lies_is_refused(tmp_path) -> None:
    """With a right checksum: someone who can change a file can change that too."""
    saved(tmp_path, small.build)
    good = json.loads((tmp_path / "step-000001" / "index.json").read_text())
    del good["crc32c"]
    assert _folders.parse_index("there", sealed(good)).step == 1
    file, parameter = good["files"][0], good["parameters"][0]
    lies = {
        "format 2 is newer than this version reads": {"format": 2},
        "format 0 does not exist": {"format": 0},
        "int was expected, got bool": {"format": True},
        "int was expected, got float": {"step": 1.5},
        "-1 is no size": {"serial": -1},
        "is no size": {"step": 2**63},
        "not a plain file name": {"files": [{**file, "name": "../x"}, good["files"][1]]},
        "plain file name": {"files": [{**file, "name": "/etc/passwd"}, good["files"][1]]},
        "checksums do not cover 1099511627776": {
            "files": [{**file, "nbytes": 2**40}, good["files"][1]]
        },
        "its checksums do not cover": {"files": [{**file, "crc32c": "zz"}, good["files"][1]]},
        "a name comes twice": {"files": [file, file]},
        "1 files and": {"files": [file]},
        "has too many elements": {"parameters": [{**parameter, "shape": [2**40, 2**40]}]},
        "shape": {"parameters": [{**parameter, "shape": [-1]}]},
        "a name comes twice ": {"parameters": [parameter, parameter]},
        "object was expected": {"parameters": [1]},
        "list was expected": {"parameters": {}},
    }
    for words, lie in lies.items():
        with pytest.raises(CheckpointError, match=re.escape(words.strip())):
            _folders.parse_index("there", sealed({**good, **lie}))
    with pytest.raises(CheckpointError, match="a key comes twice"):
        text = sealed(good)[: -len(b',\n "crc32c": "01234567"\n}\n')]
        text = text.replace(b'"step": 1', b'"step": 1, "step": 1')
        text += f',\n "crc32c": "{_core.crc32c(text):08x}"\n}}\n'.encode()
        _folders.parse_index("there", text)

    # Lies that only the files can disprove.
    def refused(change, words):
        values = json.loads(json.dumps(good))
        change(values)
        (tmp_path / "step-000001" / "index.json").write_bytes(sealed(values))
        assert any(words in str(d) for d in checkpoint.verify(tmp_path)), words

        def load(world):
            shards = small.build(world, seed=4)
            with pytest.raises(CheckpointError):
                checkpoint.load(tmp_path, shards)

        local_world(2).run(load)

    def rename(values):
        values["parameters"][1]["name"] = "layers.0.other"

    def shrink(values):
        values["parameters"][3]["shape"] = [6, 40]

    refused(rename, "which its index does not list")
    refused(shrink, "elements")


def mutated(values, rng: np.random.Generator):
    """The same with one node replaced, dropped or doubled; where, chance decides."""
    nodes = []

    def walk(node):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            nodes.append((node, key))
            if isinstance(value, (dict, list)):
                walk(value)

    values = json.loads(json.dumps(values))
    walk(values)
    node, key = nodes[rng.integers(len(nodes))]
    others = [
        None,
        True,
        -1,
        0,
        1,
        2**62,
        2**70,
        1.5,
        "",
        "x",
        "../x",
        [],
        {},
        [[]],
        ["a"],
        {"a": 1},
    ]
    choice = rng.integers(len(others) + 1)
    if choice == len(others):
        del node[key]
    else:
        node[key] = others[choice]
    return values


def test_indexes_that_lie_at_random_are_refused_or_harmless(tmp_path) -> None:
    """Whatever an index says under a right checksum: an error of ours, or a load that is whole."""

    def save(world):
        shards = small.build(world)
        opt = small.optimizer(shards)
        small.step(shards, opt, 1)
        checkpoint.save(tmp_path, shards, opt, step=1, user={"a": [1, 2]})
        return small.hashes(shards)

    expected = local_world(2).run(save)[0]
    path = tmp_path / "step-000001" / "index.json"
    good = json.loads(path.read_text())
    del good["crc32c"]

    def load(world):
        shards = small.build(world, seed=3)
        opt = small.optimizer(shards)
        loads = 0
        for _ in range(250):
            # Both ranks draw the same; rank 0 writes.
            text = sealed(mutated(good, rngs[world.rank]))
            world.barrier()
            if world.rank == 0:
                path.write_bytes(text)
                checkpoint.verify(tmp_path)
            world.barrier()
            try:
                checkpoint.load(tmp_path, shards, opt)
            except (CheckpointError, ValueError):
                continue
            loads += 1
            assert small.hashes(shards) == expected
        return loads

    rngs = [np.random.default_rng(17), np.random.default_rng(17)]
    loads = local_world(2).run(load)
    assert loads[0] == loads[1] and 20 < loads[0] < 200, loads


def test_a_newer_format_is_refused_by_name_and_not_passed_over(tmp_path) -> None:
    saved(tmp_path, small.build, steps=(1, 2))
    path = tmp_path / "step-000002" / "index.json"
    values = json.loads(path.read_text())
    del values["crc32c"]
    path.write_bytes(sealed({**values, "format": 7}))

    def load(world):
        with pytest.raises(CheckpointError, match="format 7 is newer than this version reads"):
            checkpoint.load(tmp_path, small.build(world))

    local_world(2).run(load)


def hostile_piece(folder: pathlib.Path, name: str, numel: int) -> None:
    """Replaces rank 0's file by one with a single piece, checksums made right."""
    path = folder / "rank-00000-of-00002.safetensors"
    path.unlink()
    _core.safetensors_write(path, (name,), (np.zeros(numel, np.float32),), {})
    content = path.read_bytes()
    values = json.loads((folder / "index.json").read_text())
    del values["crc32c"]
    crc = struct.pack("<I", _core.crc32c(content)).hex()
    values["files"][0].update(nbytes=len(content), crc32c=crc)
    (folder / "index.json").write_bytes(sealed(values))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("norm.weight", "not the name of a piece"),
        ("norm.weight:weight", "not the name of a piece"),
        ("norm.weight:weight:", "not the name of a piece"),
        ("norm.weight:weight:-1", "not the name of a piece"),
        ("norm.weight:variance:0", "not the name of a piece"),
        ("norm.weight:weight:18446744073709551616", "not the name of a piece"),
        ("norm.weight:weight:18446744073709551615", "elements 18446744073709551615 + 1 of 2"),
        ("norm.weight:weight:2", "elements 2 + 1 of 2"),
        ("other:weight:0", "which its index does not list"),
        ("layers.1.mlp.up_proj.weight:weight:2559", "is both in"),  # rank 1 has it
        ("norm.weight:weight:0", "no file holds"),
    ],
)
def test_hostile_pieces(tmp_path, name, words) -> None:
    saved(tmp_path, small.build)
    hostile_piece(tmp_path / "step-000001", name, 1)

    def load(world):
        shards = small.build(world, seed=2)
        before = small.hashes(shards)
        with pytest.raises(CheckpointError, match=re.escape(words)):
            checkpoint.load(tmp_path, shards)
        assert small.hashes(shards) == before, "nothing was written"

    local_world(2).run(load)

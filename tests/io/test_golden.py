"""A checkpoint that was written once keeps loading, bit for bit.

``python tests/io/test_golden.py FOLDER`` writes one like it. The committed one changes only
together with the format's number.
"""

import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

import flatshard as fs
from flatshard import _folders, checkpoint

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden" / "checkpoint-format-1"
STEP = 7
USER = {"data": {"position": [3, 14]}, "schedule": {"name": "cosine", "at": 7}, "text": "é"}
SHAPES = {"embed.weight": (30, 4), "layers.0.w": (9, 10), "norm.weight": (4,), "scale": ()}
STEPS = {"embed.weight": 7, "layers.0.w": 6, "scale": 7}


def value(name: str, state: int) -> np.ndarray:
    """Exact in fp32, not in bf16: element e of the state is (e + 1) / 1024 + its number."""
    n = int(np.prod(SHAPES[name], dtype=int))
    number = 3 * list(SHAPES).index(name) + state
    return (number + np.arange(1, n + 1, dtype=np.float32) / 1024).reshape(SHAPES[name])


def model(world, *, precision="bf16", **sharding):
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    params["head.weight"] = params["embed.weight"]
    shards = fs.shard(
        params,
        world,
        sharding=fs.Sharding(**sharding),
        precision=precision,
        frozen=("norm.weight",),
    )
    return shards, fs.AdamW(shards, lr=0.5, weight_decay=0.25, no_decay=("scale",))


def write(folder: pathlib.Path) -> None:
    def body(world):
        shards, opt = model(world)
        for name in SHAPES:
            shards.set_full(name, value(name, 0))
            if name in STEPS:
                shards.set_full(name, value(name, 1), "exp_avg")
                shards.set_full(name, value(name, 2), "exp_avg_sq")
        opt.restore({**opt.state(), "steps": STEPS, "applied": 7, "skipped": 2})
        checkpoint.save(folder, shards, opt, step=STEP, user=USER)

    fs.local_world(2).run(body)


@pytest.mark.parametrize(
    ("size", "sharding"),
    [
        (2, {}),
        (2, {"stage": 0, "partition": "per_parameter"}),
        (1, {}),
        (3, {"partition": "per_parameter", "gather": "copy"}),
        (5, {"stage": 1, "gather": "copy"}),
    ],
)
def test_golden_checkpoint_loads(size, sharding) -> None:
    def body(world):
        shards, opt = model(world, **sharding)
        loaded = checkpoint.load(GOLDEN, shards, opt)
        assert (loaded.step, loaded.user, loaded.skipped) == (STEP, USER, ())
        for name in SHAPES:
            want = value(name, 0)
            half = want.astype(ml_dtypes.bfloat16)
            assert shards.full(name).tobytes() == half.tobytes()
            if name in STEPS:
                assert shards.full(name, "master").tobytes() == want.tobytes()
                assert shards.full(name, "exp_avg").tobytes() == value(name, 1).tobytes()
                assert shards.full(name, "exp_avg_sq").tobytes() == value(name, 2).tobytes()
        state = opt.state()
        assert state["steps"] == STEPS and (state["applied"], state["skipped"]) == (7, 2)
        assert [(g["lr"], g["weight_decay"]) for g in state["groups"]] == [(0.5, 0.25), (0.5, 0.0)]
        world.barrier()

    fs.local_world(size).run(body)


def test_golden_checkpoint_is_whole_and_of_format_1() -> None:
    assert checkpoint.verify(GOLDEN) == []
    (folder,) = _folders.committed(str(GOLDEN))
    index = _folders.read_index(folder)
    assert index.raw["format"] == 1 and index.serial == 1 and index.world_size == 2


def test_what_is_written_today_has_the_same_pieces(tmp_path) -> None:
    """Names, ranges, dtypes and bytes of pieces; headers may differ in spaces and metadata."""
    write(tmp_path)
    for rank in range(2):
        name = f"step-{STEP:06d}/rank-{rank:05d}-of-00002.safetensors"
        old, new = (fs_pieces(root / name) for root in (GOLDEN, tmp_path))
        assert old == new
    old, new = (_folders.read_index(str(root / f"step-{STEP:06d}")) for root in (GOLDEN, tmp_path))
    assert old.parameters == new.parameters and old.users == new.users
    # Later versions may say more, never something else.
    assert old.raw.keys() <= new.raw.keys()
    groups = zip(old.optimizer.pop("groups"), new.optimizer.pop("groups"), strict=True)
    assert all(then.items() <= now.items() for then, now in groups)
    assert all(new.optimizer[key] == value for key, value in old.optimizer.items())


def fs_pieces(path: pathlib.Path) -> dict[str, tuple[str, bytes]]:
    from flatshard import _core

    content = path.read_bytes()
    return {
        name: (dtype, content[begin:end])
        for name, dtype, _, begin, end in _core.safetensors_header(path)[1]
    }


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))

"""Loading into something else: another precision, frozen, tied, new and missing parameters."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import small

import flatshard as fs
from flatshard import checkpoint
from flatshard.errors import CheckpointError
from flatshard.job import local_world

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

SPLIT = fs.MixedPrecision(param="bfloat16", master="split")
#: Precision, and the dtypes of what is written: trained weights, frozen ones, moments.
PRECISIONS = {
    "fp32": ("fp32", "float32", "float32", "float32"),
    "bf16": ("bf16", "float32", "bfloat16", "float32"),
    "fp16": ("fp16", "float32", "float16", "float32"),
    "bf16-pure": ("bf16-pure", "bfloat16", "bfloat16", "bfloat16"),
    "bf16-pure-sr": ("bf16-pure-sr", "bfloat16", "bfloat16", "bfloat16"),
    "split": (SPLIT, "float32", "bfloat16", "float32"),
}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
TRAINED = [name for name in small.SHAPES if name not in small.FROZEN]


def held(shards: fs.Shards) -> dict[str, np.ndarray]:
    """Masters, frozen weights and moments, whole."""
    found = {name: shards.full(name, "master") for name in small.SHAPES}
    found |= {f"{n} {m}": shards.full(n, m) for n in TRAINED for m in ("exp_avg", "exp_avg_sq")}
    shards.world.barrier()
    return found


@pytest.mark.parametrize(
    ("saved", "loaded"), list(itertools.product(PRECISIONS, PRECISIONS)), ids=lambda name: name
)
def test_a_precision_is_kept_or_refused_by_name(tmp_path, saved, loaded) -> None:
    """Never cast in silence: other dtypes need cast=True, and then are exact or rounded once."""

    def save(world):
        shards = small.build(world, precision=PRECISIONS[saved][0])
        opt = small.optimizer(shards)
        for number in (1, 2, 3):
            small.step(shards, opt, number)
        checkpoint.save(tmp_path, shards, opt, step=3)
        return held(shards)

    before = local_world(2).run(save)[0]
    same = PRECISIONS[saved][1:] == PRECISIONS[loaded][1:]

    def load(world):
        shards = small.build(world, precision=PRECISIONS[loaded][0], seed=5)
        opt = small.optimizer(shards)
        untouched = held(shards)
        if not same:
            with pytest.raises(CheckpointError, match=r"there and \w+ here.*cast=True"):
                checkpoint.load(tmp_path, shards, opt)
            after = held(shards)
            assert all((after[name] == untouched[name]).all() for name in after)
        checkpoint.load(tmp_path, shards, opt, cast=not same)
        assert opt.steps_applied == 3
        return held(shards)

    for after in local_world(3).run(load):
        for name, value in after.items():
            if saved == loaded or same:
                assert value.tobytes() == before[name].tobytes(), name
                continue
            part = 3 if " " in name else 2 if name in small.FROZEN else 1
            dtype = DTYPES[PRECISIONS[loaded][part]]
            expected = before[name].astype(np.float32).astype(dtype).astype(np.float32)
            assert (value.astype(np.float32) == expected).all(), name


def test_frozen_and_tied_parameters_that_changed_are_reported(tmp_path, caplog) -> None:
    def save(world):
        checkpoint.save(tmp_path, small.build(world), step=1)

    local_world(2).run(save)

    def load(world):
        params = small.values(3)
        tied = fs.shard(params, world, frozen=("norm.weight",))
        loaded = checkpoint.load(tmp_path, tied)
        assert set(loaded.changed) == {
            "layers.0.frozen is frozen there and trained here",
            "norm.weight is trained there and frozen here",
        }
        assert (tied.full("norm.weight") == small.values()["norm.weight"]).all()
        world.barrier()

        params["head.weight"] = params["embed.weight"] + 1  # a tensor of its own
        with pytest.raises(CheckpointError, match=r"lacks head.weight .tied to embed.weight there"):
            checkpoint.load(tmp_path, fs.shard(params, world, frozen=small.FROZEN))
        untied = fs.shard(params, world, frozen=small.FROZEN)
        loaded = checkpoint.load(tmp_path, untied, strict=False)
        assert loaded.missing == ("head.weight",)
        assert loaded.changed == ("embed.weight is tied to head.weight there and not tied here",)
        assert (untied.full("head.weight") == params["head.weight"]).all()
        assert (untied.full("embed.weight") == small.values()["embed.weight"]).all()

    local_world(2).run(load)
    assert "norm.weight is trained there and frozen here" in caplog.text


def test_new_and_missing_parameters(tmp_path) -> None:
    """strict: both are named and nothing is changed; without, both are returned."""

    def save(world):
        checkpoint.save(tmp_path, small.build(world), step=1)

    local_world(3).run(save)

    def load(world):
        params = small.values(4)
        del params["norm.weight"]
        params["new.weight"] = np.full((3, 2), 7, np.float32)
        shards = fs.shard(params, world, frozen=small.FROZEN)
        before = fs.weights_sha256(shards)
        with pytest.raises(CheckpointError, match=r"it lacks new.weight; it has besides norm"):
            checkpoint.load(tmp_path, shards)
        assert fs.weights_sha256(shards) == before
        loaded = checkpoint.load(tmp_path, shards, strict=False)
        assert (loaded.missing, loaded.unexpected) == (("new.weight",), ("norm.weight",))
        assert (shards.full("new.weight") == 7).all()
        name = "layers.1.mlp.up_proj.weight"
        assert (shards.full(name) == small.values()[name]).all()

    local_world(2).run(load)


def test_a_part_of_the_optimizer_is_loaded_where_only_a_part_is_there(tmp_path) -> None:
    """New and thawed parameters begin without state, the others go on with theirs."""
    moments = ("exp_avg", "exp_avg_sq")

    def save(world):
        shards = small.build(world)
        opt = small.optimizer(shards)
        for number in (1, 2, 3):
            small.step(shards, opt, number)
        checkpoint.save(tmp_path, shards, opt, step=3)
        return held(shards), opt.state()

    before, state = local_world(3).run(save)[0]

    def load(world):
        params = small.values(4)
        del params["norm.weight"]
        params["new.weight"] = np.full((3, 2), 7, np.float32)
        shards = fs.shard(params, world)  # layers.0.frozen is trained here
        opt = fs.AdamW(shards, lr=0.5, no_decay=("*.scale", "new*"))
        untouched = *small.hashes(shards), opt.state()
        with pytest.raises(CheckpointError, match=r"it lacks new\.weight"):
            checkpoint.load(tmp_path, shards, opt)
        assert (*small.hashes(shards), opt.state()) == untouched
        loaded = checkpoint.load(tmp_path, shards, opt, strict=False)
        assert loaded.stateless == ("layers.0.frozen", "new.weight")
        assert (loaded.missing, loaded.unexpected) == (("new.weight",), ("norm.weight",))
        assert loaded.changed == ("layers.0.frozen is frozen there and trained here",)
        steps = opt.state()["steps"]
        kept = [name for name in steps if name not in loaded.stateless]
        assert steps == {**{n: state["steps"][n] for n in kept}, "layers.0.frozen": 0,
                         "new.weight": 0}  # fmt: skip
        for name in kept:
            assert (shards.full(name, "master") == before[name]).all()
            for what in moments:
                assert (shards.full(name, what) == before[f"{name} {what}"]).all()
        assert (shards.full("layers.0.frozen") == before["layers.0.frozen"]).all()
        assert (shards.full("new.weight") == 7).all()
        for name in loaded.stateless:
            assert not any(shards.full(name, what).any() for what in moments)
        assert opt.lr == 0.01 and {n for g in opt.groups for n in g.params} == set(steps)
        world.barrier()
        for unit in reversed(shards.units):
            unit.reduce({n: np.ones(shards.full(n).shape, np.float32) for n in unit.names})
        assert opt.step()
        after = opt.state()["steps"]
        assert after == {name: count + 1 for name, count in steps.items()}
        world.barrier()

    local_world(2).run(load)


def test_weights_alone_need_none_of_the_optimizer(tmp_path) -> None:
    """Damaged moments are no hindrance to weights_only, and are named when they are asked for."""
    shape = {"a.weight": (1024, 600)}

    def build(world, value):
        return fs.shard({n: np.full(s, value, np.float32) for n, s in shape.items()}, world)

    def save(world):
        shards = build(world, 1.0)
        checkpoint.save(tmp_path, shards, fs.AdamW(shards, lr=0.1), step=4, user="mine")

    local_world(1).run(save)
    file = tmp_path / "step-000004" / "rank-00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    def load(world):
        shards = build(world, 2.0)
        opt = fs.AdamW(shards, lr=0.1)
        with pytest.raises(CheckpointError, match=r"a.weight moment2 rows \d+-1023"):
            checkpoint.load(tmp_path, shards, opt)
        assert (shards.full("a.weight") == 2.0).all()
        loaded = checkpoint.load(tmp_path, shards, opt, weights_only=True)
        assert (loaded.step, loaded.user, opt.steps_applied) == (4, None, 0)
        assert (shards.full("a.weight") == 1.0).all()

    local_world(2).run(load)

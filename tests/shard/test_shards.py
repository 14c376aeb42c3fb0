"""Shards as users hold them: access, views, ties, frozen parts, groups, refusals, the plan."""

import gc
from dataclasses import replace

import numpy as np
import pytest
from reference import Reference

import flatshard as fs
from flatshard.policy import PRESETS

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]


def example():
    return {
        "embed.weight": np.arange(39, dtype=np.float32).reshape(13, 3),
        "layers.0.w": np.arange(70, dtype=np.float32).reshape(7, 10) - 30,
        "layers.1.w": np.arange(70, dtype=np.float32).reshape(7, 10) - 20,
        "scale": np.float32(2.5).reshape(()),
    }


@pytest.mark.parametrize("gather", ["view", "copy"])
@pytest.mark.parametrize("partition", ["flat", "per_parameter"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_full_local_and_gathered_hold_the_values(size, partition, gather):
    def rank(world):
        params = example()
        shards = fs.shard(
            params, world, sharding=fs.Sharding(3, partition=partition, gather=gather)
        )
        for name, value in params.items():
            np.testing.assert_array_equal(shards.full(name), value)
        for unit in shards:
            with unit.gathered() as arrays:
                assert unit.state == "gathered"
                for name in unit.names:
                    np.testing.assert_array_equal(arrays[name], params[name])
                    assert not arrays[name].flags.writeable
            assert unit.state == "released"
        return {name: shards.local(name) for name in params}

    pieces = fs.local_world(size).run(rank)
    for name, value in example().items():
        flat = value.reshape(-1)
        covered = []
        for piece in pieces:
            array, (begin, end) = piece[name]
            np.testing.assert_array_equal(array, flat[begin:end])
            covered.extend(range(begin, end))
        assert sorted(covered) == list(range(flat.size))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("gather", ["view", "copy"])
def test_writing_reaches_masters_and_every_rank(gather, stage, precision):
    def rank(world):
        shards = fs.shard(example(), world, sharding=fs.Sharding(stage, gather=gather),
                          precision=precision)  # fmt: skip
        new = np.full((7, 10), 1.0 + 2**-12, np.float32)
        shards.set_full("layers.1.w", new)
        np.testing.assert_array_equal(
            shards.full("layers.1.w"), new.astype(shards.dtype("layers.1.w"))
        )
        assert (shards.full("layers.1.w", "master") == new).all()
        unit = shards.unit("layers.0")
        with unit.gathered(write=True) as arrays:
            arrays["layers.0.w"][...] = 4.0
        with unit.gathered() as arrays:
            assert (arrays["layers.0.w"].astype(np.float32) == 4.0).all()
        assert (shards.full("layers.0.w", "master") == 4.0).all()
        with pytest.raises(RuntimeError, match="on purpose"), unit.gathered(write=True) as arrays:
            arrays["layers.0.w"][...] = 5.0
            raise RuntimeError("on purpose")
        assert (shards.full("layers.0.w", "master") == 4.0).all()
        opt = fs.SGD(shards, lr=1.0)
        for u in reversed(shards.units):
            u.reduce({n: np.zeros(shards.full(n).shape, np.float32) for n in u.names})
        opt.step()
        return float(shards.full("layers.1.w", "master")[6, 9])

    for value in fs.local_world(2).run(rank):
        assert value == 1.0 + 2**-12, "the next step starts from the value that was set"


def test_moments_and_masters_are_set_and_read():
    def rank(world):
        shards = fs.shard(example(), world, precision="bf16")
        with pytest.raises(ValueError, match="exp_avg"):
            shards.full("scale", "exp_avg")
        fs.AdamW(shards, lr=0.1)
        value = np.arange(70, dtype=np.float32).reshape(7, 10)
        shards.set_full("layers.0.w", value, "exp_avg_sq")
        np.testing.assert_array_equal(shards.full("layers.0.w", "exp_avg_sq"), value)
        assert (shards.full("layers.0.w", "exp_avg") == 0).all()
        with pytest.raises(ValueError, match="momentum_buffer"):
            shards.full("layers.0.w", "momentum_buffer")
        with pytest.raises(KeyError, match="no parameter"):
            shards.full("layers.7.w")
        with pytest.raises(ValueError, match=r"shape \(3,\), expected \(7, 10\)"):
            shards.set_full("layers.0.w", np.zeros(3, np.float32))

    fs.local_world(3).run(rank)


def test_views_outlive_release_and_close():
    def rank(world):
        shards = fs.shard(example(), world, sharding=fs.Sharding(3, gather="view"))
        unit = shards.unit("layers.0")
        array = unit.gather()["layers.0.w"]
        unit.release()
        world.barrier()
        shards.close()
        shards.close()
        gc.collect()
        return float(array.sum())

    want = float(example()["layers.0.w"].sum())
    assert fs.local_world(2).run(rank) == [want, want]


def test_copies_may_not_outlive_their_buffer():
    def rank(world):
        shards = fs.shard(example(), world, sharding=fs.Sharding(3, gather="copy"))
        unit, other = shards.unit("layers.0"), shards.unit("layers.1")
        array = unit.gather()["layers.0.w"]
        with pytest.raises(BufferError, match="1 of its arrays"):
            unit.release()
        with pytest.raises(RuntimeError, match=r"held by layers\.0"):
            other.gather()
        with pytest.raises(BufferError, match="in use"):
            shards.close()
        del array
        unit.release()
        with pytest.raises(RuntimeError, match="not gathered"):
            unit.release()
        with other.gathered() as arrays:
            assert arrays["layers.1.w"][0, 0] == -20
        shards.close()
        with pytest.raises(RuntimeError, match="closed"):
            unit.gather()

    fs.local_world(2).run(rank)


def test_gathers_that_differ_between_ranks_are_found_at_the_next_fence():
    def rank(world):
        shards = fs.shard(example(), world, sharding=fs.Sharding(3, gather="copy"))
        opt = fs.SGD(shards, lr=1.0)
        if world.rank == 0:
            with shards.unit("layers.0").gathered():
                pass
        shards.unit("layers.0").reduce({"layers.0.w": np.zeros((7, 10), np.float32)})
        with pytest.raises(fs.CollectiveMismatch):
            opt.step()

    fs.local_world(2).run(rank)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_tied_names_are_one_parameter(size, stage, rng):
    table = rng.standard_normal((11, 3)).astype(np.float32)
    middle = rng.standard_normal((3, 3)).astype(np.float32)
    grads = [rng.standard_normal((11, 3)).astype(np.float32) for _ in range(2)]

    def rank(world):
        shards = fs.shard({"embed": table, "mid": middle, "head": table}, world,
                          sharding=fs.Sharding(stage))  # fmt: skip
        assert [p.names for p in shards.parameters] == [("embed", "head"), ("mid",)]
        opt = fs.AdamW(shards, lr=0.1, eps=1e-4)
        unit = shards.unit("embed")
        unit.reduce({"embed": grads[0], "head": grads[1]})
        shards.unit("mid").reduce({"mid": np.zeros((3, 3), np.float32)})
        opt.step()
        np.testing.assert_array_equal(shards.full("embed"), shards.full("head"))
        return shards.full("head")

    reference = Reference("AdamW", {"embed": table}, lr=0.1, eps=1e-4)
    reference.step({"embed": grads[0].astype(np.float64) + grads[1]})
    for head in fs.local_world(size).run(rank):
        np.testing.assert_allclose(head, reference.params["embed"], rtol=0, atol=1e-6)
        assert (head != table).any(axis=1).all(), "every row moves"


def test_frozen_parameters_stay_and_cost_nothing():
    params = {"unit.big": np.ones((100, 100), np.float32), "unit.small": np.ones(100, np.float32)}

    def rank(world):
        shards = fs.shard(params, world, frozen=["unit.big"], unit_of=lambda name: "unit")
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.5)
        with pytest.raises(ValueError, match=r"unit\.big is frozen and got a gradient"):
            shards.units[0].reduce({"unit.big": np.ones((100, 100), np.float32)})
        shards.units[0].reduce({"unit.small": np.ones(100, np.float32)})
        opt.step()
        held = world.memory()
        with pytest.raises(ValueError, match="frozen"):
            shards.full("unit.big", "exp_avg")
        world.barrier()
        return shards.full("unit.big"), shards.full("unit.small"), held

    trainable, everything = 100 * 4, 10_100 * 4
    total = 0
    for big, small, held in fs.local_world(2).run(rank):
        assert (big == 1).all()
        assert (small != 1).all()
        state = sum(sum(held[c][:2]) for c in ("gradients", "accumulators", "moments"))
        total += state
        # slots hold the trainable part alone: a hundredth, and the room of flags and alignment
        assert state < 6 * trainable + 4096
    assert total < 0.15 * 16 * everything


def test_groups_and_no_decay_keep_their_hyperparameters(rng):
    params = {
        n: rng.standard_normal(9).astype(np.float32) for n in ("a.weight", "a.bias", "b.weight")
    }
    grads = {n: rng.integers(-4, 5, 9).astype(np.float32) for n in params}

    def rank(world):
        shards = fs.shard(params, world, unit_of=lambda name: "all",
                          groups={"slow": {"match": ["b.*"], "lr": 0.01}})  # fmt: skip
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.3, eps=1e-4, no_decay=["*.bias"])
        assert {g.name: g.params for g in opt.groups} == {
            "default": ("a.weight",),
            "no_decay": ("a.bias",),
            "slow": ("b.weight",),
        }
        for step in range(20):
            shards.units[0].reduce(grads)
            opt.step(lr=0.1 if step < 10 else 0.05)
        return {n: shards.full(n) for n in params}

    options = {
        "a.weight": (0.1, 0.3, True),
        "a.bias": (0.1, 0.0, True),
        "b.weight": (0.01, 0.3, False),
    }
    for got in fs.local_world(2).run(rank):
        for name, (lr, decay, follows) in options.items():
            reference = Reference(
                "AdamW", {name: params[name]}, lr=lr, weight_decay=decay, eps=1e-4
            )
            for step in range(20):
                if follows and step >= 10:
                    reference.options["lr"] = 0.05
                reference.step({name: grads[name]})
            np.testing.assert_allclose(got[name], reference.params[name], rtol=0, atol=2e-6)


def test_an_unknown_option_of_a_group_is_named():
    def rank(world):
        shards = fs.shard({"w": np.ones(2, np.float32)}, world,
                          groups={"g": {"match": "*", "momentums": 1}})  # fmt: skip
        with pytest.raises(ValueError, match="SGD has no option momentums"):
            fs.SGD(shards, lr=1.0)

    fs.local_world(1).run(rank)


def test_a_pattern_that_matches_nothing_names_the_nearest_parameter():
    def rank(world):
        with pytest.raises(
            ValueError, match=r"no parameter matches 'hed\.\*'; the nearest name is head"
        ):
            fs.shard({"head.w": np.ones(2, np.float32), "body.w": np.ones(2, np.float32)}, world,
                     groups={"g": {"match": "hed.*", "lr": 1.0}})  # fmt: skip

    fs.local_world(2).run(rank)


@pytest.mark.torch
def test_arrays_of_other_libraries():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import ml_dtypes

    def rank(world):
        weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
        shards = fs.shard({"w": weight, "v": memoryview(bytearray(8)).cast("f")}, world)
        opt = fs.SGD(shards, lr=1.0)
        shards.unit("w").reduce({"w": torch.ones(2, 3)})
        shards.unit("v").reduce({"v": np.ones(2, ml_dtypes.bfloat16)})
        opt.step()
        assert weight[0, 1] == 1.0, "the caller's tensor is not touched"
        return shards.full("w").tolist(), shards.full("v").tolist()

    want = ([[-1.0, 0.0, 1.0], [2.0, 3.0, 4.0]], [-1.0, -1.0])
    assert fs.local_world(2).run(rank) == [want, want]


def test_rank_0_decides_where_ranks_pass_different_values(caplog):
    def rank(world):
        value = np.full(70, 1.0 + world.rank, np.float32)
        return fs.shard({"w": value}, world).full("w").tolist()

    assert fs.local_world(3).run(rank) == [[1.0] * 70] * 3
    assert "different initial values" in caplog.text


@pytest.mark.parametrize(
    "params",
    [
        ({"w": np.zeros(8, np.float32)}, {"w": np.zeros(9, np.float32)}),
        (
            {"a": np.zeros(8, np.float32), "b": np.zeros(8, np.float32)},
            {"b": np.zeros(8, np.float32), "a": np.zeros(8, np.float32)},
        ),
    ],
    ids=["sizes", "names swapped"],
)
def test_different_models_are_refused_on_all_ranks(params):
    def rank(world):
        with pytest.raises(fs.CollectiveMismatch):
            fs.shard(params[world.rank], world)

    fs.local_world(2).run(rank)


def test_bad_operands_are_refused_before_anything_moves():
    def rank(world):
        with pytest.raises(TypeError, match="w: dtype int64"):
            fs.shard({"w": np.zeros(3, np.int64)}, world)
        with pytest.raises(ValueError, match="no parameter v"):
            fs.shard({"w": np.zeros(3, np.float32)}, world, frozen=["v"])
        shards = fs.shard({"w": np.zeros(3, np.float32)}, world)
        unit = shards.units[0]
        with pytest.raises(ValueError, match=r"shape \(4,\), expected \(3,\)"):
            unit.reduce({"w": np.zeros(4, np.float32)})
        with pytest.raises(KeyError, match="no parameter"):
            unit.reduce({"v": np.zeros(3, np.float32)})
        with pytest.raises(ValueError, match="count=-1"):
            unit.reduce({"w": np.zeros(3, np.float32)}, count=-1)
        opt = fs.SGD(shards, lr=1.0)
        for bad in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="max_norm"):
                opt.step(max_norm=bad)
        opt.groups[0].lr = float("nan")
        with pytest.raises(ValueError, match="lr=nan"):
            opt.step()
        opt.lr = 1.0
        unit.reduce({"w": np.ones(3, np.float32)})
        return opt.step(max_norm=float("inf")).applied

    assert fs.local_world(2).run(rank) == [True, True]


# ---- the plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("partition", ["flat", "per_parameter"])
@pytest.mark.parametrize("size", [1, 3])
def test_the_plan_equals_the_ledger_to_the_byte(size, partition, precision):
    def rank(world, sharding):
        before = world.memory()
        shards = fs.shard(example(), world, sharding=sharding, precision=precision)
        opt = fs.AdamW(shards, lr=0.1)
        after = world.memory()
        held = {c: tuple(after[c][i] - before[c][i] for i in (0, 1, 3)) for c in after}
        planned = shards.planned()
        for unit in reversed(shards.units):
            unit.reduce({n: np.ones(shards.full(n).shape, np.float32) for n in unit.names})
        opt.step()
        assert world.memory() == after, "after open nothing allocates"
        world.barrier()
        shards.close()
        assert {c: row[:2] for c, row in world.memory().items()} == {
            c: row[:2] for c, row in before.items()
        }
        return planned, held

    for stage in range(4):
        for gather in ("view", "copy"):
            sharding = fs.Sharding(stage, partition=partition, gather=gather)
            for planned, held in fs.local_world(size).run(rank, sharding):
                for name, row in planned.items():
                    assert held[name] == row, (sharding, name)
                assert sum(map(sum, planned.values())) > 0


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adamw", "adamw-amsgrad"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_large_arrays_cost_little_more_than_they_hold(precision, optimizer):
    """Large arrays of the state begin at different places of a cache's way: 128 KiB at most."""
    numel = 1 << 26
    large, small = (
        fs.plan({"w": (n,)}, world_size=1, precision=precision, optimizer=optimizer).rank(0)
        for n in (numel, 128)
    )
    moments = {"sgd-momentum": 1, "adamw": 2, "adamw-amsgrad": 3}[optimizer]
    for name, arrays in (("accumulators", 1), ("master", 1), ("moments", moments)):
        itemsize = 2 if (precision, name) == ("bf16-pure", "moments") else 4
        if name == "master" and precision != "bf16":
            arrays = 0
        assert 0 <= large[name] - arrays * itemsize * numel <= arrays * (128 << 10), name
        assert small[name] == arrays * itemsize * 128, name


def test_bytes_per_owned_parameter():
    numel = 1 << 20

    def rank(world, precision):
        shards = fs.shard({"w": np.zeros(numel, np.float32)}, world, precision=precision)
        fs.AdamW(shards, lr=0.1)
        planned = shards.planned()
        classes = ("weights", "accumulators", "master", "moments")
        return sum(sum(planned[c]) for c in classes) / (numel / world.size)

    cases = [("fp32", 16), ("bf16", 18), ("bf16-split", 16), ("fp16", 18), ("bf16-pure", 10)]
    cases += [("bf16-pure-sr", 10)]
    # Gradients summed in bf16: two bytes less.
    cases += [
        (replace(PRESETS[preset], accumulate="bfloat16"), want - 2)
        for preset, want in cases
        if preset.startswith("bf16")
    ]
    for precision, want in cases:
        for got in fs.local_world(2).run(rank, precision):
            assert got == pytest.approx(want, rel=1e-3)

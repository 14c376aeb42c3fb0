"""Shapes over which other libraries stumbled: small, empty, scalar, huge, half frozen, used twice
or not at all, not contiguous; each with its right values."""

import mmap
import sys

import ml_dtypes
import numpy as np
import pytest
from reference import Reference

import flatshard as fs
from flatshard import _core

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

STAGES = range(4)


def f32(*values):
    return np.array(values, np.float32)


def on(size, rank, *arguments):
    return fs.local_world(size).run(rank, *arguments)


def train(world, start, grads, sharding):
    """Whole parameters and first moments after steps with the same gradients on every rank."""
    shards = fs.shard(start, world, sharding=sharding)
    opt = fs.AdamW(shards, lr=0.1, eps=1e-4)
    for step in grads:
        for unit in reversed(shards.units):
            unit.reduce({n: step[n] for n in unit.names if n in step})
        opt.step()
    found = {n: (shards.full(n), shards.full(n, "exp_avg")) for n in start}
    world.barrier()
    return found


def expect(start, grads, **options):
    reference = Reference("AdamW", start, lr=0.1, eps=1e-4, **options)
    for step in grads:
        reference.step(step)
    return reference


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "sizes", [(2,), (6, 1), (3, 1), (1, 0), (0, 5, 0)], ids=lambda sizes: "+".join(map(str, sizes))
)
def test_fewer_elements_than_ranks(sizes, stage, rng):
    """Four ranks; a bias of one, an empty parameter in the middle or at the end."""
    start = {f"u.{i}": rng.standard_normal(n).astype(np.float32) for i, n in enumerate(sizes)}
    grads = [
        {n: rng.integers(-8, 9, v.shape).astype(np.float32) for n, v in start.items()}
        for _ in range(2)
    ]
    want = expect(start, grads)
    hows = [fs.Sharding(stage), fs.Sharding(stage, partition="per_parameter")]
    hows += [fs.Sharding(3, replicate=2)] if stage == 3 else []
    alone = on(1, train, start, grads, fs.Sharding(stage))[0]
    for how in hows:
        for found in on(4, train, start, grads, how):
            for name, (weight, moment) in found.items():
                assert weight.shape == start[name].shape
                np.testing.assert_allclose(weight, want.params[name], rtol=0, atol=1e-6)
                assert weight.tobytes() == alone[name][0].tobytes()
                assert moment.tobytes() == alone[name][1].tobytes()


def test_an_empty_parameter_has_an_empty_gradient():
    """Linear 3 -> 5 beside Linear 3 -> 0, last in its unit."""

    def rank(world, stage):
        start = {"u.a": np.ones((3, 5), np.float32), "u.b": np.ones((3, 0), np.float32)}
        shards = fs.shard(start, world, sharding=fs.Sharding(stage))
        opt = fs.AdamW(shards, lr=0.5)
        shards.units[0].reduce({"u.a": np.ones((3, 5)), "u.b": np.ones((3, 0))})
        assert shards.full("u.b", "grad").shape == (3, 0)
        opt.step()
        found = shards.full("u.a").tobytes(), shards.full("u.b", "exp_avg").shape
        world.barrier()
        return found

    seen = {found for stage in STAGES for found in on(2, rank, stage)}
    assert len(seen) == 1 and seen.pop()[1] == (3, 0)


def test_a_scalar_stays_one_through_training_and_files(tmp_path):
    start = {"scale": np.array(2.0, np.float32), "w": f32(1, 2, 3)}
    grads = [{"scale": np.array(1.0, np.float32), "w": f32(1, -1, 2)}] * 2

    def save(world):
        shards = fs.shard(start, world)
        opt = fs.AdamW(shards, lr=0.1, eps=1e-4)
        for step in grads:
            for unit in reversed(shards.units):
                unit.reduce({n: step[n] for n in unit.names})
            opt.step()
        fs.checkpoint.save(tmp_path, shards, opt, step=2)

    def load(world):
        shards = fs.shard({n: np.zeros_like(v) for n, v in start.items()}, world)
        opt = fs.AdamW(shards, lr=0.1)
        fs.checkpoint.load(tmp_path, shards, opt)
        return {w: shards.full("scale", w) for w in ("weight", "exp_avg", "exp_avg_sq")}

    on(3, save)
    want = expect(start, grads)
    for found in on(2, load):
        assert {w: v.shape for w, v in found.items()} == dict.fromkeys(found, ())
        assert float(found["weight"]) == pytest.approx(float(want.params["scale"]), abs=1e-6)
        assert float(found["exp_avg"]) == pytest.approx(float(want.m["scale"]), rel=1e-6)
        assert float(found["exp_avg_sq"]) == pytest.approx(float(want.v["scale"]), rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_and_trained_in_one_unit(stage):
    start = {"u.weight": f32(1, 2, 3), "u.bias": f32(4, 5)}
    grads = [{"u.weight": f32(1, -1, 2)}] * 3

    def rank(world):
        how = fs.Sharding(stage)
        shards = fs.shard(start, world, sharding=how, frozen=["u.bias"])
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.5, eps=1e-4)
        for step in grads:
            shards.units[0].reduce(step)
            opt.step()
        for what in ("grad", "exp_avg", "exp_avg_sq"):
            with pytest.raises(ValueError, match=r"u\.bias is frozen"):
                shards.full("u.bias", what)
        found = shards.full("u.weight"), shards.full("u.bias")
        world.barrier()
        return found

    want = expect({"u.weight": start["u.weight"]}, grads, weight_decay=0.5)
    for weight, bias in on(2, rank):
        assert bias.tobytes() == start["u.bias"].tobytes()
        np.testing.assert_allclose(weight, want.params["u.weight"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_units_that_are_not_used(stage):
    """Only a in the first step, only b in the second, both in the third; different ranks use
    different ones in the fourth."""
    start = {"a.w": f32(1, 2, 3), "b.w": f32(4, 5, 6, 7, 8)}
    used = [("a.w",), ("b.w",), ("a.w", "b.w")]
    grads = [{n: np.full_like(start[n], i + 1.0) for n in names} for i, names in enumerate(used)]

    def rank(world):
        shards = fs.shard(start, world, sharding=fs.Sharding(stage))
        opt = fs.AdamW(shards, lr=0.1, eps=1e-4)
        mine = [*grads, {("a.w", "b.w")[world.rank]: np.full(3 + 2 * world.rank, 2.0, np.float32)}]
        for step in mine:
            for unit in reversed(shards.units):
                unit.reduce({n: step[n] for n in unit.names if n in step})
            opt.step()
        found = {n: shards.full(n) for n in start}, opt.state()["steps"]
        world.barrier()
        return found

    both = {n: np.ones_like(v) for n, v in start.items()}  # 2 on one rank of two
    want = expect(start, [*grads, both])
    for found, steps in on(2, rank):
        assert steps == {"a.w": 3, "b.w": 3}
        for name, weight in found.items():
            np.testing.assert_allclose(weight, want.params[name], rtol=0, atol=1e-6)


def test_a_unit_without_a_gradient_is_released_and_seen_anew():
    """Gathered, not used: nothing stays, and the next gather has what was stored meanwhile."""

    def rank(world):
        how = fs.Sharding(3, gather="copy")
        shards = fs.shard({"a.w": f32(1, 2, 3), "b.w": f32(4, 5)}, world, sharding=how)
        opt = fs.SGD(shards, lr=1.0)
        with shards.unit("a").gathered():
            pass
        with shards.unit("b").gathered() as w:
            assert w["b.w"].tolist() == [4, 5]
        shards.unit("a").reduce({"a.w": f32(1, 1, 1)})
        opt.step()
        assert [unit.state for unit in shards.units] == ["released", "released"]
        shards.set_full("b.w", f32(40, 50))
        with shards.unit("b").gathered() as w:
            return w["b.w"].tolist()

    assert on(2, rank) == [[40, 50]] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_is_used_twice(stage):
    """y = w (w x) with w = 2 and x = 3: each use gives 6, together 12."""

    def rank(world):
        w = f32(2)
        shards = fs.shard({"a.w": w, "b.w": w}, world, sharding=fs.Sharding(stage))
        opt = fs.SGD(shards, lr=1.0)
        shards.units[0].reduce({"a.w": f32(6), "b.w": f32(6)})
        norm = opt.step().grad_norm
        found = norm, shards.full("a.w").tolist(), shards.full("b.w").tolist()
        world.barrier()
        return found

    assert on(3, rank) == [(12.0, [-10.0], [-10.0])] * 3


def test_what_is_not_contiguous_is_taken_in_logical_order(tmp_path):
    """A transpose, a stride of two, one value expanded: as initial value, gradient and stored."""
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    odd = {
        "t.w": table.T,
        "s.w": np.arange(10, dtype=np.float32)[::2],
        "e.w": np.broadcast_to(np.float32(3), (2, 2)),
    }

    def rank(world):
        shards = fs.shard(odd, world)
        opt = fs.SGD(shards, lr=1.0)
        assert shards.full("t.w").ravel().tolist() == [0, 3, 1, 4, 2, 5]
        for name, value in odd.items():
            assert np.array_equal(shards.full(name), value)
        for unit in reversed(shards.units):
            unit.reduce({n: odd[n] for n in unit.names})
        opt.step()
        assert not any(shards.full(n).any() for n in odd)
        for name, value in odd.items():
            shards.set_full(name, value)
        fs.checkpoint.save(tmp_path, shards, opt, step=1)
        for name, value in odd.items():
            shards.set_full(name, np.zeros_like(value))
        fs.checkpoint.load(tmp_path, shards, opt)
        for name, value in odd.items():
            assert np.array_equal(shards.full(name), value)

    on(2, rank)


def test_no_decay_follows_names_and_not_flat_shapes():
    """A matrix and a bias in one flat unit, zero gradients, rate and decay 0.1."""

    def rank(world):
        start = {"u.weight": np.ones((2, 2), np.float32), "u.bias": np.ones(2, np.float32)}
        shards = fs.shard(start, world)
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.1, no_decay=["*.bias"])
        shards.units[0].reduce({n: np.zeros_like(v) for n, v in start.items()})
        opt.step()
        return shards.full("u.weight").ravel().tolist(), shards.full("u.bias").tolist()

    for weight, bias in on(3, rank):
        assert weight == pytest.approx([0.99] * 4, rel=1e-6) and bias == [1.0, 1.0]


def test_released_weights_are_no_placeholders():
    """With gather="copy" a released array is not silently something else: it may not outlive."""

    def rank(world):
        how = fs.Sharding(3, gather="copy")
        shards = fs.shard({"a.w": f32(1, 2, 3, 4)}, world, sharding=how)
        weights = shards.units[0].gather()
        with pytest.raises(BufferError, match="unit a is released while 1 of its arrays"):
            shards.units[0].release()
        assert (f32(1, 1, 1, 1) * weights["a.w"]).tolist() == [1, 2, 3, 4]
        weights.clear()
        shards.units[0].release()

    on(2, rank)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("partition", ["flat", "per_parameter"])
def test_lengths_of_more_than_31_bits_add_up(size, partition):
    numel = 2**31 + 5
    shape = (5, numel // 5) if partition == "per_parameter" else (numel,)
    numel = int(np.prod(shape))
    plan = fs.plan(
        {"w": shape},
        world_size=size,
        sharding=fs.Sharding(3, partition=partition),
        precision="bf16-pure",
    )
    moments = sum(plan.rank(r)["moments"] for r in range(size))
    gaps = size * 2 * (128 << 10)  # two large arrays a rank begin at places of their own
    assert 2 * 2 * numel <= moments <= 2 * 2 * (numel + 64 * size * size) + gaps


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that nothing stands behind")
def test_the_last_of_more_than_32_bits_of_elements_counts():
    """Nine gigabytes that read as zeros and take no memory: one page of them is written."""
    n = 2**32 + 1
    no_reserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    with mmap.mmap(-1, 2 * n, flags=flags) as memory:
        x = np.frombuffer(memory, ml_dtypes.bfloat16)
        kernels = _core.Kernels(threads=_core.cpu_count())
        x[-1] = 3.0
        x[2**31 + 7] = 4.0
        assert kernels.sumsq(x) == 25.0
        assert kernels.find_nonfinite(x) == n
        x[-1] = np.inf
        assert kernels.find_nonfinite(x) == n - 1
        del x

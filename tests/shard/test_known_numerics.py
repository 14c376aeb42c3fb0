"""Wrong numbers that other libraries gave, as small inputs with the right values, worked out by
hand."""

import logging
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

STAGES = range(4)


def f32(*values):
    return np.array(values, np.float32)


def on(size, rank, *arguments):
    return fs.local_world(size).run(rank, *arguments)


# ---- loss scaling and skips ---------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_is_not_scaled_and_old_gradients_are_gone(stage):
    """Two steps of lr 1/8 with gradient 3: 1, 5/8, 1/4."""

    def rank(world):
        start = {"w": np.array(1.0, np.float32)}
        shards = fs.shard(start, world, precision="bf16", sharding=fs.Sharding(stage))
        opt = fs.SGD(shards, lr=0.125)
        seen = []
        for _ in range(2):
            shards.units[0].reduce({"w": np.array(3.0, np.float32)})
            result = opt.step()
            assert (result.loss_scale, opt.loss_scale) == (1.0, 1.0)
            seen.append(float(shards.full("w", "master")))
        world.barrier()
        return seen

    assert on(2, rank) == [[0.625, 0.25]] * 2


def test_an_overflow_on_one_of_four_ranks_halves_the_scale_on_all_every_time():
    """A hundred times: 1024, 512, and back to 1024 after one clean step."""
    how = fs.MixedPrecision(
        param="float16", master="float32", loss_scale=fs.LossScale(initial=1024.0, window=1)
    )

    def rank(world):
        shards = fs.shard({"w": f32(1, 2, 3, 4, 5)}, world, precision=how)
        opt = fs.SGD(shards, lr=0.0, max_skips=200)
        start = fs.weights_sha256(shards)
        for turn in range(100):
            gradient = np.ones(5, np.float32)
            if world.rank == 2:
                gradient[turn % 5] = np.inf
            shards.units[0].reduce({"w": gradient})
            result = opt.step()
            assert not result and result.reason == "overflow" and result.nonfinite == ("w", 2)
            assert (result.loss_scale, opt.loss_scale) == (1024.0, 512.0)
            assert fs.weights_sha256(shards) == start
            shards.units[0].reduce({"w": np.ones(5, np.float32)})
            assert opt.step() and opt.loss_scale == 1024.0
            assert fs.weights_sha256(shards) == start  # the rate is 0
            world.barrier()

    on(4, rank)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro", range(3))
def test_an_overflow_in_any_micro_batch_skips_the_whole_step(micro, stage):
    how = fs.MixedPrecision(
        param="float16", reduce="float16", master="float32", loss_scale=fs.LossScale(initial=64.0)
    )

    def rank(world):
        shards = fs.shard(
            {"a.w": f32(1, 2, 3), "b.w": f32(4, 5)},
            world,
            precision=how,
            sharding=fs.Sharding(stage),
        )
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.1)
        before = fs.weights_sha256(shards), fs.state_sha256(shards), opt.state()["steps"]
        for turn in range(3):
            bad = np.inf if (turn, world.rank) == (micro, 1) else 1.0
            shards.unit("b").reduce({"b.w": f32(1, bad)}, count=2)
            shards.unit("a").reduce({"a.w": f32(1, 1, 1)}, count=2)
        result = opt.step(max_norm=1.0)
        after = fs.weights_sha256(shards), fs.state_sha256(shards), opt.state()["steps"]
        world.barrier()
        assert after == before
        return result.applied, result.reason, result.nonfinite, opt.loss_scale

    assert on(3, rank) == [(False, "overflow", ("b.w", 1), 32.0)] * 3


def test_skips_are_counted_told_once_and_move_no_schedule(caplog):
    schedule = fs.schedule.linear(1.0, warmup=4, total=10)

    def rank(world):
        shards = fs.shard({"w": f32(1, 2)}, world, precision="bf16", sharding=fs.Sharding(1))
        opt = fs.AdamW(shards, lr=1.0)
        for _ in range(5):
            value = np.nan if world.rank == 1 else 1.0
            shards.units[0].reduce({"w": f32(1, value)})
            rate = schedule(opt.steps_applied)
            assert not opt.step(lr=rate)
            assert rate == schedule(0)
        return opt.steps_skipped, opt.steps_applied, opt.state()["steps"]["w"]

    with caplog.at_level(logging.WARNING, logger="flatshard"):
        assert on(2, rank) == [(5, 0, 0)] * 2
    told = [r for r in caplog.records if "step skipped" in r.message]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("hysteresis", "scales"), [(1, [8.0, 4.0, 2.0, 1.0]), (2, [16.0, 8.0, 8.0, 4.0, 4.0, 2.0])]
)
def test_the_scale_falls_at_once_and_the_floor_is_an_error(hysteresis, scales):
    how = fs.MixedPrecision(
        param="float16",
        master="float32",
        loss_scale=fs.LossScale(initial=16.0, minimum=1.0, hysteresis=hysteresis),
    )

    def rank(world):
        shards = fs.shard({"w": f32(1)}, world, precision=how)
        opt = fs.SGD(shards, lr=1.0)
        for scale in scales:
            shards.units[0].reduce({"w": f32(np.inf)})
            assert not opt.step()
            assert opt.loss_scale == scale
        with pytest.raises(fs.NonFiniteError, match="overflow at the lowest loss scale, 1"):
            for _ in range(2 * hysteresis + 1):
                shards.units[0].reduce({"w": f32(np.inf)})
                opt.step()
        return True

    assert on(2, rank) == [True] * 2


def test_all_ranks_take_the_same_branch():
    """Not a number in what rank 2 of 3 owns, found by whoever sums it."""

    def rank(world):
        shards = fs.shard({"w": np.ones(300, np.float32)}, world)
        opt = fs.AdamW(shards, lr=0.1)
        gradient = np.ones(300, np.float32)
        _, (begin, _) = shards.local("w")
        if world.rank == 2:
            gradient[begin] = np.nan
        shards.units[0].reduce({"w": gradient})
        result = opt.step(max_norm=1.0)
        world.barrier()
        return result.applied, result.reason, result.nonfinite

    assert on(3, rank) == [(False, "nonfinite", ("w", 2))] * 3


# ---- accumulation -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_two_micro_batches_add_up_undeclared(stage):
    def rank(world):
        shards = fs.shard({"w": f32(0)}, world, sharding=fs.Sharding(stage))
        opt = fs.SGD(shards, lr=1.0)
        for gradient in (2.0, 5.0):
            shards.units[0].reduce({"w": f32(gradient)})
        opt.step()
        found = shards.full("w").tolist()
        world.barrier()
        return found

    assert on(2, rank) == [[-7.0]] * 2


def test_four_micro_batches_give_the_same_losses_at_every_stage(rng):
    """A small network of two layers, thirty steps: not one bit of a loss differs."""
    start = {
        "a.w": rng.standard_normal((5, 5)).astype(np.float32),
        "b.w": rng.standard_normal((5, 1)).astype(np.float32),
    }

    def rank(world, stage):
        shards = fs.shard(start, world, sharding=fs.Sharding(stage))
        opt = fs.AdamW(shards, lr=0.02)
        draw = np.random.default_rng(world.rank)
        losses = []
        for _ in range(30):
            for _ in range(4):
                x = draw.standard_normal((8, 5)).astype(np.float32)
                a, b = shards.full("a.w"), shards.full("b.w")
                hidden = np.tanh(x @ a)
                error = hidden @ b - x.sum(1, keepdims=True)
                losses.append(float((error**2).mean()))
                back = (2 * error / error.size) @ b.T * (1 - hidden**2)
                shards.unit("b").reduce({"b.w": hidden.T @ (2 * error / error.size)})
                shards.unit("a").reduce({"a.w": x.T @ back})
            opt.step()
        world.barrier()
        assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])
        assert all(shards.full(n).any() for n in start), "no parameter became zero"
        return losses

    runs = [on(2, rank, stage) for stage in STAGES]
    assert all(run == runs[0] for run in runs)


def test_small_contributions_of_bf16_gradients_are_kept():
    """1 and 255 times 2^-9."""

    def rank(world):
        shards = fs.shard({"w": np.ones(1, ml_dtypes.bfloat16)}, world, precision="bf16")
        fs.SGD(shards, lr=1.0)
        for turn in range(256):
            value = 1.0 if turn == 0 else 2.0**-9
            shards.units[0].reduce({"w": np.full(1, value, ml_dtypes.bfloat16)})
        shards.end_micro_batch()
        return shards.full("w", "grad").tolist()

    assert shards_reduce_as_bf16()
    assert on(1, rank) == [[1.498046875]]


def shards_reduce_as_bf16():
    """Gradients of bf16 arrays go on the wire as they are."""

    def rank(world):
        shards = fs.shard({"w": np.ones(1, ml_dtypes.bfloat16)}, world, precision="bf16")
        return shards.policy.precision.reduce

    return on(1, rank) == ["bfloat16"]


def test_eight_samples_in_any_number_of_micro_batches():
    """Each sample's gradient is 2: 1 x 8, 2 x 4 and 4 x 2 have the mean 2."""

    def rank(world, micro):
        shards = fs.shard({"w": f32(0)}, world)
        opt = fs.SGD(shards, lr=1.0)
        for _ in range(micro):
            samples = 8 // micro // world.size
            shards.units[0].reduce({"w": f32(2.0 * samples)}, count=samples)
        result = opt.step()
        return shards.full("w").tolist(), result.grad_norm, result.count

    for micro in (1, 2, 4):
        assert on(2, rank, micro) == [([-2.0], 2.0, 8)] * 2


def test_tokens_weigh_alike():
    """Three tokens with gradient 1 and one with 5: 2, not the mean of means, 3."""

    def rank(world):
        shards = fs.shard({"w": f32(0)}, world)
        opt = fs.SGD(shards, lr=1.0)
        tokens, gradient = ((3, 3.0), (1, 5.0))[world.rank]
        shards.units[0].reduce({"w": f32(gradient)}, count=tokens)
        opt.step()
        return shards.full("w").tolist()

    assert on(2, rank) == [[-2.0]] * 2


def test_a_plain_mean_is_said_once(caplog):
    def rank(world, count):
        shards = fs.shard({"w": f32(0)}, world)
        opt = fs.SGD(shards, lr=1.0)
        for _ in range(3):
            shards.units[0].reduce({"w": f32(2.0)}, count=count)
            opt.step()

    for count, said in ((None, 1), (2, 0)):
        with caplog.at_level(logging.INFO, logger="flatshard"):
            on(2, rank, count)
        told = [r for r in caplog.records if "plain mean over ranks" in r.message]
        assert len(told) == said
        caplog.clear()


def test_clipping_looks_at_the_whole_batch_once():
    """Micro-batches with gradients 3 and 1: norm 2, and a step of 1."""

    def rank(world):
        shards = fs.shard({"w": f32(0)}, world)
        opt = fs.SGD(shards, lr=1.0)
        for gradient in (3.0, 1.0):
            shards.units[0].reduce({"w": f32(gradient)}, count=1)
        result = opt.step(max_norm=1.0)
        return result.grad_norm, shards.full("w").tolist()

    for norm, (weight,) in on(1, rank):
        assert norm == 2.0 and weight == pytest.approx(-1.0, abs=1e-6)


# ---- norms --------------------------------------------------------------------------------------


def test_a_norm_is_that_of_the_mean_over_everything():
    """[1 2 3 4] and [3 2 1 0]: a mean of twos, norm 4. Sixteen ones on four ranks: 4, not 2."""

    def of_two(world):
        shards = fs.shard({"w": f32(0, 0, 0, 0)}, world, sharding=fs.Sharding(1))
        shards.units[0].reduce({"w": (f32(1, 2, 3, 4), f32(3, 2, 1, 0))[world.rank]})
        result = fs.SGD(shards, lr=1.0).step(max_norm=1.0)
        return result.grad_norm, result.clip_coef

    assert on(2, of_two) == [(4.0, 1.0 / (4.0 + 1e-6))] * 2

    def of_four(world):
        shards = fs.shard({"w": np.zeros(16, np.float32)}, world)
        shards.units[0].reduce({"w": np.ones(16, np.float32)})
        return fs.SGD(shards, lr=1.0).grad_norm()

    assert on(4, of_four) == [4.0] * 4


@pytest.mark.parametrize("how", [fs.Sharding(0), fs.Sharding(3), fs.Sharding(3, replicate=2)])
def test_what_is_replicated_counts_once(how):
    """Gradients 3 and 4, kept by one, two or all of four ranks: 5, not 7.2."""

    def rank(world):
        shards = fs.shard({"a.w": f32(0), "b.w": f32(0)}, world, sharding=how)
        shards.unit("b").reduce({"b.w": f32(4)})
        shards.unit("a").reduce({"a.w": f32(3)})
        return fs.SGD(shards, lr=1.0).grad_norm()

    assert on(4, rank) == [5.0] * 4


def test_gradients_of_several_dtypes_have_one_norm():
    """fp32 [3] and bf16 [4], clipped to 1: 0.6 and 0.8; as bf16 0.80078125."""

    def rank(world, precision):
        shards = fs.shard({"w": f32(0), "v": f32(0)}, world, precision=precision)
        opt = fs.SGD(shards, lr=1.0)
        shards.unit("w").reduce({"w": f32(3)})
        shards.unit("v").reduce({"v": np.full(1, 4, ml_dtypes.bfloat16)})
        norm = opt.step(max_norm=1.0).grad_norm
        return norm, float(shards.full("w")[0]), float(shards.full("v")[0])

    for norm, w, v in on(2, rank, "fp32"):
        assert norm == 5.0
        assert (w, v) == (pytest.approx(-0.6, rel=1e-6), pytest.approx(-0.8, rel=1e-6))
    for norm, w, v in on(2, rank, "bf16"):
        assert (norm, w, v) == (5.0, -0.6015625, -0.80078125)


# ---- rules --------------------------------------------------------------------------------------


def test_moments_are_kept_in_fp32_unless_asked_otherwise():
    """A bf16 second moment stops growing where 0.001 of the gap rounds away; 1 - 0.999^2000."""

    def rank(world, precision):
        shards = fs.shard({"w": np.ones(1, ml_dtypes.bfloat16)}, world, precision=precision)
        opt = fs.AdamW(shards, lr=1e-6)
        for _ in range(2000):
            shards.units[0].reduce({"w": np.ones(1, np.float32)})
            opt.step()
        return shards.dtype("w", "exp_avg_sq").name, float(shards.full("w", "exp_avg_sq")[0])

    ((dtype, second),) = on(1, rank, "bf16")
    assert dtype == "float32" and second == pytest.approx(1 - 0.999**2000, rel=1e-5)
    ((dtype, second),) = on(1, rank, "bf16-pure")
    assert dtype == "bfloat16" and second < 0.6


def test_decay_shrinks_the_old_weight_and_epsilon_comes_after_the_correction():
    """10 * 0.95 - 0.1 = 9.4 (9.405 otherwise); a first step of 1e-8 with eps 1e-8 is half the rate
    (0.03 otherwise)."""

    def rank(world):
        shards = fs.shard({"w": f32(10)}, world)
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.5, eps=1e-12)
        shards.units[0].reduce({"w": f32(1)})
        opt.step()
        other = fs.shard({"w": f32(0)}, world)
        small = fs.Adam(other, lr=1.0, eps=1e-8)
        other.units[0].reduce({"w": f32(1e-8)})
        small.step()
        return float(shards.full("w")[0]), float(other.full("w")[0])

    for decayed, moved in on(2, rank):
        assert decayed == pytest.approx(9.4, abs=2e-6)
        assert moved == pytest.approx(-0.5, rel=1e-5)


def test_a_step_in_pieces_has_the_bits_of_the_whole(rng):
    """Thirty elements as one parameter and as three, five steps, then a jump from step 5 to 9."""
    start = rng.standard_normal(30).astype(np.float32)
    grads = rng.standard_normal((6, 30)).astype(np.float32)

    def rank(world, pieces):
        parts = [f"{i}.w" for i in range(pieces)]
        cut = partial(np.split, indices_or_sections=pieces)
        shards = fs.shard(dict(zip(parts, cut(start), strict=True)), world)
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.1)
        seen = []
        for t in range(6):
            if t == 5:
                opt.restore({**opt.state(), "steps": dict.fromkeys(parts, 9)})
            values = dict(zip(parts, cut(grads[t]), strict=True))
            for unit in reversed(shards.units):
                unit.reduce({n: values[n] for n in unit.names})
            opt.step()
            seen.append(np.concatenate([shards.full(n) for n in parts]).tobytes())
            world.barrier()
        return seen

    assert len({tuple(seen) for pieces in (1, 3) for seen in on(2, rank, pieces)}) == 1


def test_what_is_sent_together_does_not_show(rng):
    """One unit, one for each layer, or one for each parameter: twenty steps, the same bits."""
    start = {f"{i}.{n}": rng.standard_normal(7 + i).astype(np.float32)
             for i in range(3) for n in "ab"}  # fmt: skip
    units = {"one": lambda name: "all", "layers": lambda name: name[0], "each": lambda name: name}

    def rank(world, kind, gather):
        how = fs.Sharding(3, gather=gather)
        shards = fs.shard(start, world, unit_of=units[kind], sharding=how)
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.1)
        draw = np.random.default_rng(world.rank)
        for _ in range(20):
            grads = {n: draw.standard_normal(v.shape).astype(np.float32) for n, v in start.items()}
            for unit in reversed(shards.units):
                unit.reduce({n: grads[n] for n in unit.names})
            opt.step()
        found = b"".join(shards.full(n).tobytes() for n in sorted(start))
        world.barrier()
        return found

    cases = [(kind, gather) for kind in units for gather in ("view", "copy")]
    assert len({found for case in cases for found in on(3, rank, *case)}) == 1

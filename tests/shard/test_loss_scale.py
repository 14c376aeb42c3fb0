"""Loss scaling: undone exactly, moved by all ranks alike, an error at the floor."""

import numpy as np
import pytest
from reference import Reference, clip

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]


def precision(**scale):
    return fs.MixedPrecision(
        param="float16", reduce="float16", master="float32", loss_scale=fs.LossScale(**scale)
    )


def follow(world, how, gradients):
    """[(applied, reason, scale, scale after)] for [gradient of each rank] by step."""
    shards = fs.shard({"w": np.ones(5, np.float32)}, world, precision=how)
    opt = fs.SGD(shards, lr=0.0, max_skips=100)
    seen = []
    for ranks in gradients:
        grad = np.full(5, ranks[world.rank], np.float32) * np.float32(opt.loss_scale)
        shards.units[0].reduce({"w": grad})
        result = opt.step()
        seen.append((result.applied, result.reason, result.loss_scale, opt.loss_scale))
    return seen


def test_overflow_halves_and_clean_steps_double():
    ok, bad = (1.0, 1.0, 1.0), (1.0, np.inf, 1.0)
    steps = [ok, bad, ok, ok, ok, ok, bad, ok]
    want = [
        (True, "applied", 1024.0, 1024.0),
        (False, "overflow", 1024.0, 512.0),
        (True, "applied", 512.0, 512.0),
        (True, "applied", 512.0, 512.0),
        (True, "applied", 512.0, 1024.0),
        (True, "applied", 1024.0, 1024.0),
        (False, "overflow", 1024.0, 512.0),
        (True, "applied", 512.0, 512.0),
    ]
    got = fs.local_world(3).run(follow, precision(initial=1024.0, window=3), steps)
    assert got == [want] * 3


def test_hysteresis_forgives_the_first_overflow():
    bad = (np.inf, 0.0)
    got = fs.local_world(2).run(follow, precision(initial=16.0, hysteresis=2), [bad] * 4)
    assert [[after for *_, after in rank] for rank in got] == [[16.0, 8.0, 8.0, 4.0]] * 2


def scales_with_hysteresis(flags, *, initial, window, hysteresis, consecutive):
    """The scale after each step with DeepSpeed's count of hysteresis; flags: did it overflow?

    Its releases differ in when a scale grows: after window clean steps, or one more. Here: window.
    """
    scale, left, last = initial, hysteresis, -1
    seen = []
    for iteration, overflow in enumerate(flags):
        if overflow:
            if left == 1:
                scale = max(scale / 2.0, 1.0)
            else:
                left -= 1
            last = iteration
        else:
            if consecutive:
                left = hysteresis
            if (iteration - last) % window == 0:
                if not consecutive:
                    left = hysteresis
                scale *= 2.0
        seen.append(scale)
    return seen


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_count_of_hysteresis_is_deepspeeds(consecutive, seed):
    random = np.random.default_rng(seed)
    flags = [bool(flag) for flag in random.random(60) < 0.35]
    options = {"initial": 2.0**20, "window": 3, "hysteresis": 2 + seed % 2}
    how = precision(restore="applied" if consecutive else "growth", **options)
    steps = [(np.inf if flag else 1e-6, 1e-6) for flag in flags]
    got = fs.local_world(2).run(follow, how, steps)
    want = scales_with_hysteresis(flags, consecutive=consecutive, **options)
    assert [after for *_, after in got[0]] == want


def test_the_floor_is_an_error_on_every_rank():
    def rank(world):
        shards = fs.shard({"w": np.ones(5, np.float32)}, world, precision=precision(initial=16.0))
        opt = fs.SGD(shards, lr=1.0, max_skips=100)
        scales = []
        for _ in range(4):
            shards.units[0].reduce({"w": np.full(5, np.inf, np.float32)})
            assert not opt.step()
            scales.append(opt.loss_scale)
        shards.units[0].reduce({"w": np.full(5, np.inf, np.float32)})
        with pytest.raises(fs.NonFiniteError, match="lowest loss scale, 1"):
            opt.step()
        return scales, shards.full("w", "master").tolist()

    assert fs.local_world(2).run(rank) == [([8.0, 4.0, 2.0, 1.0], [1.0] * 5)] * 2


def test_a_static_scale_stays():
    how = fs.MixedPrecision(param="float16", master="float32", loss_scale=128.0)
    got = fs.local_world(2).run(follow, how, [(1.0, np.inf), (1.0, 1.0)])
    assert got[0] == [
        (False, "overflow", 128.0, 128.0),
        (True, "applied", 128.0, 128.0),
    ]


def test_small_gradients_survive_with_scaling_and_vanish_without():
    def rank(world, scale):
        how = fs.MixedPrecision(
            param="float16", reduce="float16", master="float32", loss_scale=scale
        )
        shards = fs.shard({"w": np.zeros(5, np.float32)}, world, precision=how)
        opt = fs.SGD(shards, lr=1e6)
        shards.units[0].reduce({"w": np.full(5, 1e-8 * opt.loss_scale, np.float32)})
        opt.step()
        return shards.full("w", "master").tolist()

    for got in fs.local_world(2).run(rank, 65536.0):
        np.testing.assert_allclose(got, -1e-2, rtol=1e-3)
    for got in fs.local_world(2).run(rank, 1.0):
        assert got == [0.0] * 5


def test_norm_and_update_are_right_through_growth_and_overflow(rng):
    params = {"w": rng.standard_normal(70).astype(np.float32)}
    grads = [rng.standard_normal((2, 70)).astype(np.float32) for _ in range(50)]

    def rank(world):
        how = precision(initial=2.0**12, window=2)
        shards = fs.shard(params, world, precision=how)
        opt = fs.AdamW(shards, lr=0.01, eps=1e-4, weight_decay=0.1)
        applied, norms, scales = [], [], []
        for step, grad in enumerate(grads):
            scaled = grad[world.rank] * np.float32(opt.loss_scale)
            if step % 7 == 3 and world.rank == 1:
                scaled[11] = np.inf
            shards.units[0].reduce({"w": scaled})
            result = opt.step(max_norm=2.0)
            applied.append(result.applied)
            norms.append(result.grad_norm)
            scales.append(result.loss_scale)
        return applied, norms, scales, shards.full("w", "master")

    reference = Reference("AdamW", params, lr=0.01, eps=1e-4, weight_decay=0.1)
    first = None
    for applied, norms, scales, got in fs.local_world(2).run(rank):
        assert len(set(scales)) > 3, "the scale moved"
        if first is None:
            for step, grad in enumerate(grads):
                with np.errstate(over="ignore"):
                    wire = (grad * np.float32(scales[step])).astype(np.float16).astype(np.float64)
                # injected, or grown until 65504 was passed
                overflow = step % 7 == 3 or not np.isfinite(wire).all()
                assert applied[step] == (not overflow)
                if overflow:
                    continue
                norm, clipped = clip({"w": wire.sum(0) / 2 / scales[step]}, 2.0)
                assert norms[step] == pytest.approx(norm, rel=1e-6)
                reference.step(clipped)
            first = got
        np.testing.assert_allclose(got, reference.params["w"], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(got, first)


def test_without_fp16_nothing_is_scaled():
    # a scalar w = 1, loss 3 w, SGD lr 0.125, two steps: 0.625, then 0.25
    def rank(world):
        shards = fs.shard({"w": np.ones((), np.float32)}, world, precision="bf16")
        opt = fs.SGD(shards, lr=0.125)
        seen = []
        for _ in range(2):
            shards.units[0].reduce({"w": np.full((), 3.0 * opt.loss_scale, np.float32)})
            opt.step()
            seen.append(float(shards.full("w", "master")))
        return opt.loss_scale, seen

    assert fs.local_world(2).run(rank) == [(1.0, [0.625, 0.25])] * 2


def test_the_scale_is_saved_and_restored():
    def rank(world):
        shards = fs.shard({"w": np.ones(5, np.float32)}, world,
                          precision=precision(initial=1024.0, window=5))  # fmt: skip
        opt = fs.SGD(shards, lr=1.0)
        for value in (1.0, np.inf, 1.0, 1.0):
            shards.units[0].reduce({"w": np.full(5, value, np.float32)})
            opt.step()
        state = opt.state()
        other = fs.SGD(shards, lr=1.0)
        assert other.loss_scale == 1024.0
        other.restore(state)
        assert other.state() == state
        return other.loss_scale

    assert fs.local_world(2).run(rank) == [512.0, 512.0]

"""Steps over thread worlds against float64 references: what moves, what does not, and who says
so."""

from functools import partial

import numpy as np
import pytest
from reference import Reference, clip

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

SIZES = [1, 2, 3, 5, 8]


def make_params(rng):
    """Odd sizes, a scalar, an empty array, one with fewer elements than ranks."""
    shapes = {
        "embed.weight": (13, 5),
        "layers.0.w": (7, 9),
        "layers.0.b": (9,),
        "layers.0.scale": (),
        "layers.1.w": (9, 7),
        "layers.1.none": (0, 3),
        "layers.1.pair": (2,),
        "head.weight": (130,),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def make_grads(rng, params, size, steps):
    """Integers, so that sums over ranks are exact: [step][rank] -> {name: gradient}."""
    return [
        [
            {n: rng.integers(-8, 9, p.shape).astype(np.float32) for n, p in params.items()}
            for _ in range(size)
        ]
        for _ in range(steps)
    ]


def mean(grads):
    return {n: sum(g[n].astype(np.float64) for g in grads) / len(grads) for n in grads[0]}


def reduce_all(shards, grads, *, count=None):
    for unit in reversed(shards.units):
        unit.reduce({n: grads[n] for n in unit.names}, count=count)


def run_steps(world, params, grads, optimizer, options, *, max_norm=None, **how):
    shards = fs.shard(params, world, **how)
    opt = getattr(fs, optimizer)(shards, **options)
    results = []
    for step in grads:
        scaled = {n: g * np.float32(opt.loss_scale) for n, g in step[world.rank].items()}
        reduce_all(shards, scaled)
        results.append(opt.step(max_norm=max_norm))
    full = {n: shards.full(n, "master") for n in params}
    hashes = fs.weights_sha256(shards), fs.state_sha256(shards)
    world.barrier()
    shards.close()
    return results, full, hashes


OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4, "betas": (0.8, 0.99)},
}


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("size", SIZES)
def test_steps_equal_the_reference(size, optimizer, rng):
    params = make_params(rng)
    grads = make_grads(rng, params, size, 4)
    reference = Reference(optimizer, params, **OPTIONS[optimizer])
    norms = []
    for step in grads:
        norm, clipped = clip(mean(step), 20.0)
        norms.append(norm)
        reference.step(clipped)
    steps = partial(run_steps, max_norm=20.0)
    ranks = fs.local_world(size).run(steps, params, grads, optimizer, OPTIONS[optimizer])
    for results, full, hashes in ranks:
        assert [r.applied for r in results] == [True] * 4
        assert [r.step for r in results] == [1, 2, 3, 4]
        np.testing.assert_allclose([r.grad_norm for r in results], norms, rtol=1e-12)
        for name, want in reference.params.items():
            scale = max(1.0, float(np.abs(want).max(initial=0)))
            np.testing.assert_allclose(full[name], want, rtol=0, atol=4e-6 * scale, err_msg=name)
        assert hashes == ranks[0][2], "all ranks hold the same"
        assert [r.grad_norm for r in results] == [r.grad_norm for r in ranks[0][0]]


SHARDINGS = [
    fs.Sharding(stage, gather=gather, reshard_after_forward=reshard)
    for stage in range(4)
    for gather in ("view", "copy")
    for reshard in ((True, False) if (stage, gather) == (3, "copy") else (True,))
]


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", "bf16-split", "bf16-pure", "bf16-pure-sr", "fp16"]
)
@pytest.mark.parametrize("partition", ["flat", "per_parameter"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_same_bits_at_every_stage_and_gather(size, partition, precision, rng):
    params = make_params(rng)
    grads = make_grads(rng, params, size, 3)
    seen = set()
    replicates = [fs.Sharding(3, replicate=2), fs.Sharding(3, gather="copy", replicate=2)]
    for sharding in SHARDINGS + (replicates if size % 2 == 0 else []):
        how = fs.Sharding(**{**sharding.__dict__, "partition": partition})
        for optimizer in ("AdamW", "SGD"):
            steps = partial(run_steps, max_norm=20.0, sharding=how, precision=precision)
            ranks = fs.local_world(size).run(steps, params, grads, optimizer, OPTIONS[optimizer])
            seen.update((optimizer, hashes) for _, _, hashes in ranks)
    assert len(seen) == 2, "one set of bits for each optimizer"


@pytest.mark.parametrize("size", [2, 3])
def test_partitions_agree_bitwise_without_clipping(size, rng):
    params = make_params(rng)
    grads = make_grads(rng, params, size, 3)
    hashes = set()
    for partition in ("flat", "per_parameter"):
        how = fs.Sharding(3, partition=partition)
        steps = partial(run_steps, sharding=how)
        ranks = fs.local_world(size).run(steps, params, grads, "AdamW", OPTIONS["AdamW"])
        hashes.add(ranks[0][2])
    assert len(hashes) == 1


def test_bf16_keeps_an_fp32_master_and_rounds_it():
    import ml_dtypes

    def rank(world):
        shards = fs.shard({"w": np.ones(3, ml_dtypes.bfloat16)}, world, precision="bf16")
        opt = fs.Adam(shards, lr=1e-3)
        for _ in range(8):
            shards.units[0].reduce({"w": np.ones(3, np.float32)})
            opt.step()
        return shards.full("w", "master"), shards.full("w")

    for master, weight in fs.local_world(2).run(rank):
        np.testing.assert_allclose(master, 0.992, rtol=1e-6)
        assert (weight.astype(np.float32) == 0.9921875).all()


# ---- the verdict --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_bad_gradient_skips_the_step_on_every_rank(stage, bad, rng):
    params = make_params(rng)
    grads = make_grads(rng, params, 3, 1)[0]

    def rank(world):
        shards = fs.shard(params, world, sharding=fs.Sharding(stage))
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.1)
        reduce_all(shards, grads[world.rank])
        assert opt.step()
        before = fs.weights_sha256(shards), fs.state_sha256(shards), opt.state()["steps"]
        mine = {n: g.copy() for n, g in grads[world.rank].items()}
        if world.rank == 1:
            mine["layers.1.w"][3, 2] = bad
        reduce_all(shards, mine)
        result = opt.step(max_norm=1.0)
        after = fs.weights_sha256(shards), fs.state_sha256(shards), opt.state()["steps"]
        assert after == before
        reduce_all(shards, grads[world.rank])
        assert opt.step().step == 2, "the next step goes on"
        return result

    for result in fs.local_world(3).run(rank):
        assert not result
        assert result.reason == "nonfinite"
        assert result.nonfinite == ("layers.1.w", 1)
        assert np.isnan(result.grad_norm)
        assert result.step == 1


def test_too_many_skips_in_a_row_raise():
    def rank(world):
        shards = fs.shard({"w": np.ones(5, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0, max_skips=3)
        for attempt in range(3):
            shards.units[0].reduce({"w": np.full(5, np.nan, np.float32)})
            if attempt < 2:
                assert not opt.step()
            else:
                with pytest.raises(fs.NonFiniteError, match=r"3 steps in a row.*w is not finite"):
                    opt.step()
        return opt.steps_skipped, shards.full("w").tolist()

    assert fs.local_world(2).run(rank) == [(3, [1.0] * 5)] * 2


def test_a_rank_may_ask_for_a_skip():
    def rank(world):
        shards = fs.shard({"w": np.ones(5, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        shards.units[0].reduce({"w": np.ones(5, np.float32)})
        if world.rank == 1:
            opt.skip("out of memory in the batch")
        first = opt.step()
        shards.units[0].reduce({"w": np.ones(5, np.float32)})
        return first.reason, opt.step().applied, shards.full("w").tolist()

    assert fs.local_world(2).run(rank) == [("rank_skipped", True, [0.0] * 5)] * 2


def test_no_gradient_anywhere_raises_on_every_rank_and_moves_nothing():
    def rank(world):
        shards = fs.shard({"w": np.ones(5, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0, weight_decay=0.5)
        with pytest.raises(RuntimeError, match="without a gradient on any rank"):
            opt.step()
        return shards.full("w").tolist()

    assert fs.local_world(2).run(rank) == [[1.0] * 5] * 2


def test_clipping_in_two_phases_does_not_repeat_and_may_not_be_interleaved():
    def rank(world):
        shards = fs.shard({"w": np.zeros(4, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        shards.units[0].reduce({"w": np.full(4, 1.0 + world.rank, np.float32)})
        norm = opt.grad_norm(max_norm=1.5)
        assert opt.grad_norm(max_norm=1.5) == norm
        with pytest.raises(RuntimeError, match=r"between grad_norm\(\) and step\(\)"):
            shards.units[0].reduce({"w": np.zeros(4, np.float32)})
        with pytest.raises(RuntimeError, match=r"between grad_norm\(\) and step\(\)"):
            shards.set_full("w", np.zeros(4, np.float32))
        with pytest.raises(ValueError, match="agreed on"):
            opt.step(max_norm=2.0)
        result = opt.step()
        return norm, result.clip_coef, shards.full("w").tolist()

    for norm, coefficient, weight in fs.local_world(2).run(rank):
        assert norm == 3.0
        assert coefficient == pytest.approx(0.5, rel=1e-6)
        np.testing.assert_allclose(weight, -0.75, rtol=1e-6)


def test_huge_and_tiny_gradients_have_a_norm():
    def rank(world, value):
        shards = fs.shard({"w": np.zeros(4, np.float32)}, world)
        opt = fs.SGD(shards, lr=0.0)
        shards.units[0].reduce({"w": np.full(4, value, np.float32)})
        return opt.step().grad_norm

    for value in (1e30, 1e-30):
        for norm in fs.local_world(2).run(rank, value):
            assert norm == pytest.approx(2 * float(np.float32(value)), rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_infinity_norm_over_shards(stage, size, rng):
    """The largest magnitude of the mean, and clipping by it, as torch.nn.utils does."""
    params = make_params(rng)
    grads = make_grads(rng, params, size, 1)[0]
    want = max(float(np.abs(g).max(initial=0)) for g in mean(grads).values())
    scale = min(1.0, 2.0 / (want + 1e-6))

    def rank(world):
        shards = fs.shard(params, world, sharding=fs.Sharding(stage))
        opt = fs.SGD(shards, lr=1.0)
        reduce_all(shards, grads[world.rank])
        result = opt.step(max_norm=2.0, norm_type=np.inf)
        return result.grad_norm, result.clip_coef, {n: shards.full(n) for n in params}

    for norm, coefficient, full in fs.local_world(size).run(rank):
        assert norm == pytest.approx(want, rel=1e-15)
        assert coefficient == pytest.approx(scale, rel=1e-15)
        for name, value in full.items():
            moved = params[name] - scale * mean(grads)[name]
            np.testing.assert_allclose(value, moved, rtol=0, atol=2e-6)


def test_infinity_norm_of_huge_tiny_tied_and_frozen():
    def rank(world, value):
        tied = np.zeros(70, np.float32)
        params = {"a.w": tied, "b.w": tied, "c.frozen": np.full(3, 9.0, np.float32)}
        shards = fs.shard(params, world, frozen=["c.frozen"])
        opt = fs.SGD(shards, lr=0.0)
        norms = []
        for kind in (2.0, np.inf):
            shards.units[0].reduce({"a.w": np.full(70, value, np.float32)})
            norms.append(opt.step(norm_type=kind).grad_norm)
        return norms

    for value in (1e30, 1e-30, -3.0):
        for two, largest in fs.local_world(3).run(rank, value):
            assert largest == pytest.approx(abs(float(np.float32(value))), rel=1e-6)
            assert two == pytest.approx(largest * 70**0.5, rel=1e-6)


def test_the_norm_is_remembered_and_equal_on_every_rank():
    def rank(world):
        shards = fs.shard({"w": np.zeros(4, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        grad = np.array([1.0, -3.0, 0.0, 2.0], np.float32)
        shards.units[0].reduce({"w": grad})
        assert opt.grad_norm(max_norm=1.5, norm_type=np.inf) == 3.0
        with pytest.raises(
            ValueError, match=r"2-norm, but grad_norm\(\) agreed on the infinity-norm"
        ):
            opt.step(norm_type=2.0)
        assert opt.step().clip_coef == pytest.approx(0.5, rel=1e-6)
        shards.units[0].reduce({"w": grad})
        assert opt.step().grad_norm == 14.0**0.5, "the next step has the 2-norm again"
        for wrong in (1.0, 3.0, -np.inf, 0.0, float("nan"), "fro"):
            with pytest.raises(ValueError, match="norm_type="):
                opt.grad_norm(norm_type=wrong)
        shards.units[0].reduce({"w": np.full(4, np.nan, np.float32)})
        assert np.isnan(opt.step(norm_type=np.inf).grad_norm)
        return True

    assert fs.local_world(2).run(rank) == [True] * 2


def test_different_norms_on_two_ranks_are_a_mismatch():
    def rank(world):
        shards = fs.shard({"w": np.zeros(4, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        shards.units[0].reduce({"w": np.ones(4, np.float32)})
        with pytest.raises(fs.CollectiveMismatch):
            opt.step(norm_type=np.inf if world.rank else 2.0)
        return True

    assert fs.local_world(2).run(rank) == [True] * 2


# ---- counts and micro-batches -------------------------------------------------------------------


def test_weights_by_count():
    # rank 0: three tokens of gradient 1 each; rank 1: one token of gradient 5: the mean is 2
    def rank(world):
        shards = fs.shard({"w": np.zeros(1, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        grad, count = ((3.0, 3), (5.0, 1))[world.rank]
        shards.units[0].reduce({"w": np.full(1, grad, np.float32)}, count=count)
        result = opt.step()
        return result.count, result.grad_norm, float(shards.full("w")[0])

    assert fs.local_world(2).run(rank) == [(4, 2.0, -2.0)] * 2


def test_a_count_on_one_rank_only_is_refused_on_all():
    def rank(world):
        shards = fs.shard({"w": np.zeros(1, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        shards.units[0].reduce({"w": np.ones(1, np.float32)}, count=3 if world.rank else None)
        with pytest.raises(ValueError, match=r"rank 1 gave a count.*rank 0 ended one without"):
            opt.step()
        return float(shards.full("w")[0])

    assert fs.local_world(2).run(rank) == [0.0, 0.0]


def test_no_valid_token_anywhere_is_a_zero_gradient():
    def rank(world):
        shards = fs.shard({"w": np.ones(3, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        shards.units[0].reduce({"w": np.zeros(3, np.float32)}, count=0)
        result = opt.step(max_norm=1.0)
        return result.applied, result.grad_norm, shards.full("w").tolist()

    assert fs.local_world(2).run(rank) == [(True, 0.0, [1.0] * 3)] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_add_up(stage):
    def rank(world):
        shards = fs.shard({"a.w": np.zeros(3, np.float32), "b.w": np.zeros(70, np.float32)}, world,
                          sharding=fs.Sharding(stage))  # fmt: skip
        opt = fs.SGD(shards, lr=1.0)
        for value in (2.0, 5.0):
            for unit in reversed(shards.units):
                name = unit.names[0]
                grad = np.full(shards.parameters[shards.index(name)].shape, value, np.float32)
                unit.reduce({name: grad})
        opt.step()
        return shards.full("a.w")[0], shards.full("b.w")[69]

    assert fs.local_world(2).run(rank) == [(-7.0, -7.0)] * 2


@pytest.mark.parametrize("rounds", [(1, 3), (0, 2), (2, 0, 1)])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_different_numbers_of_micro_batches(rounds, stage):
    def rank(world):
        params = {f"layers.{i}.w": np.zeros(65 + i, np.float32) for i in range(4)}
        shards = fs.shard(params, world, sharding=fs.Sharding(stage))
        opt = fs.SGD(shards, lr=1.0)
        for step in range(2):
            for _ in range(rounds[world.rank]):
                for unit in reversed(shards.units):
                    n = unit.names[0]
                    unit.reduce(
                        {n: np.full(params[n].shape, world.rank + 1.0, np.float32)}, count=1
                    )
            result = opt.step()
            assert result.count == sum(rounds), step
        return [float(shards.full(n)[-1]) for n in params]

    total = sum(rounds)
    want = -2 * sum((r + 1.0) * n for r, n in enumerate(rounds)) / total
    for got in fs.local_world(len(rounds)).run(rank):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_units_out_of_order_and_absent(stage, rng):
    names = [f"layers.{i}.w" for i in range(6)]
    orders = [(5, 4, 3, 2, 1, 0), (2, 3, 0, 1), (0, 5, 1)]

    def rank(world):
        shards = fs.shard({n: np.zeros(33, np.float32) for n in names}, world,
                          sharding=fs.Sharding(stage))  # fmt: skip
        opt = fs.SGD(shards, lr=1.0)
        for _ in range(3):
            for u in orders[world.rank]:
                shards.units[u].reduce({names[u]: np.full(33, 3.0**u, np.float32)})
            opt.step()
        spilled = world.memory()["spill"]
        return [float(shards.full(n)[7]) for n in names], spilled

    came = [sum(u in order for order in orders) for u in range(6)]
    want = [-3 * 3.0**u * came[u] / 3 for u in range(6)]
    for got, spilled in fs.local_world(3).run(rank):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert spilled[0] == 0, "nothing stays in the spill"


def test_a_parameter_without_gradient_does_not_move_or_age():
    def rank(world):
        shards = fs.shard({"a.w": np.ones(5, np.float32), "b.w": np.ones(5, np.float32)}, world)
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.5)
        a, b = shards.units
        one = np.ones(5, np.float32)
        a.reduce({"a.w": one})
        opt.step()
        b.reduce({"b.w": one})
        opt.step()
        b.reduce({"b.w": one})
        a.reduce({"a.w": one})
        opt.step()
        return opt.state()["steps"], shards.full("a.w").tolist(), shards.full("b.w").tolist()

    for steps, a, b in fs.local_world(2).run(rank):
        assert steps == {"a.w": 2, "b.w": 2}
        assert a == b


def test_gradients_dropped_are_gone():
    def rank(world):
        shards = fs.shard({"w": np.zeros(5, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        for _ in range(2):
            shards.units[0].reduce({"w": np.full(5, 7.0, np.float32)})
            opt.zero()
        shards.units[0].reduce({"w": np.ones(5, np.float32)})
        opt.step()
        return shards.full("w").tolist()

    assert fs.local_world(3).run(rank) == [[-1.0] * 5] * 3


def test_the_sum_so_far_is_readable():
    def rank(world):
        shards = fs.shard({"w": np.zeros(70, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        assert (shards.full("w", "grad") == 0).all()
        shards.units[0].reduce({"w": np.full(70, 1.0 + world.rank, np.float32)})
        opt.grad_norm()
        world.barrier()
        return shards.full("w", "grad").tolist()

    assert fs.local_world(3).run(rank) == [[6.0] * 70] * 3

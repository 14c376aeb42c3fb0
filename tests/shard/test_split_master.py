"""Split masters: a bf16 compute copy and a remainder are bit for bit a separate fp32 master."""

import ml_dtypes
import numpy as np
import pytest
from test_step import OPTIONS, SHARDINGS, make_grads, make_params, reduce_all, run_steps

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

SPLIT = fs.MixedPrecision(param="bfloat16", master="split")
SEPARATE = fs.MixedPrecision(param="bfloat16", master="float32")


def half_away(x):
    """fp32 to bf16, to nearest, ties away from zero: in float64, from the definition."""
    wide = np.abs(x.astype(np.float64))
    with np.errstate(all="ignore"):
        quantum = np.ldexp(1.0, np.maximum(np.frexp(wide)[1] - 1, -126) - 7)
        near = np.copysign(np.floor(wide / quantum + 0.5) * quantum, x)
        near = np.where(np.isfinite(x), near, x)
        return near.astype(np.float32).astype(ml_dtypes.bfloat16)


def bits(x):
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def special(rng):
    """Random bit patterns, ties and their neighbours, subnormals, the largest, both infinities."""
    anything = rng.integers(0, 1 << 32, 20_000, np.uint64).astype(np.uint32)
    upper = rng.integers(0, 0x7F7F, 5000).astype(np.uint32) << 16
    lower = np.array([0x7FFF, 0x8000, 0x8001, 0, 0xFFFF], np.uint32)
    near = (upper[:, None] | lower).reshape(-1)
    edges = np.array([0, 0x80000000, 1, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F800000, 0xFF800000], np.uint32)
    patterns = np.concatenate([anything, near, near | 0x80000000, edges])
    values = patterns.view(np.float32)
    return values[~np.isnan(values)]


@pytest.mark.parametrize("stage", [0, 3])
def test_any_master_is_kept_and_published_half_away(stage, rng):
    values = special(rng)
    nans = np.array([0x7FC00000, 0xFFC00001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32)

    def rank(world):
        start = {"w": np.zeros(values.shape, np.float32), "n": np.zeros(5, np.float32)}
        shards = fs.shard(start, world, sharding=fs.Sharding(stage), precision=SPLIT)
        shards.set_full("w", values, "master")
        shards.set_full("n", nans.view(np.float32), "master")
        (unit,) = (u for u in shards.units if u.names == ("w",))
        got = shards.full("w", "master"), shards.full("w"), shards.full("n", "master")
        gathered = unit.gather()["w"].copy()
        unit.release()
        # A weight that is set is its own master.
        shards.set_full("w", got[1], "weight")
        again = shards.full("w", "master")
        world.barrier()
        return (*got, shards.full("n"), gathered, again)

    for master, weight, nan, nan_weight, gathered, again in fs.local_world(3).run(rank):
        assert (bits(master) == bits(values)).all()
        assert (bits(weight) == bits(half_away(values))).all()
        assert (bits(gathered) == bits(weight)).all()
        assert np.isnan(nan).all() and np.isnan(nan_weight.astype(np.float32)).all()
        assert (again == weight.astype(np.float32)).all()


@pytest.mark.parametrize("partition", ["flat", "per_parameter"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_masters_equal_separate_ones_at_every_stage_and_gather(size, partition, rng):
    """Gradients are given, so that masters do not depend on how they are published."""
    params = make_params(rng)
    grads = make_grads(rng, params, size, 4)

    def steps(world, optimizer, sharding, precision):
        results, full, hashes = run_steps(
            world, params, grads, optimizer, OPTIONS[optimizer], max_norm=20.0,
            sharding=sharding, precision=precision,
        )  # fmt: skip
        assert all(results) and {a.dtype for a in full.values()} == {np.dtype(np.float32)}
        return hashes

    replicates = [fs.Sharding(3, replicate=2), fs.Sharding(3, gather="copy", replicate=2)]
    for optimizer in ("AdamW", "SGD"):
        seen = set()
        for sharding in SHARDINGS + (replicates if size % 2 == 0 else []):
            how = fs.Sharding(**{**sharding.__dict__, "partition": partition})
            seen.update(fs.local_world(size).run(steps, optimizer, how, SPLIT))
        how = fs.Sharding(3, partition=partition)
        seen.update(fs.local_world(size).run(steps, optimizer, how, SEPARATE))
        assert len(seen) == 1


SHAPES = {"a.w": (37, 5), "b.scale": (), "c.w": (130,)}


def descend(world, shards, opt, weights, steps=30):
    """Gradients of a quadratic at the published weights, which differ from rank to rank."""
    target = {n: np.linspace(-3, 3, int(np.prod(s))).reshape(s) for n, s in SHAPES.items()}
    seen = []
    for t in range(steps):
        w = weights()
        grads = {
            n: ((w[n].astype(np.float64) - target[n]) * (1 + 0.25 * world.rank) + 0.01 * t).astype(
                np.float32
            )
            for n in SHAPES
        }
        world.barrier()
        reduce_all(shards, grads)
        assert opt.step(max_norm=2.0)
        seen.append({n: bits(shards.full(n, "master")).tolist() for n in SHAPES})
        world.barrier()
    return seen


def start_values():
    rng = np.random.default_rng(5)
    values = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    values["c.w"][:64] = 1 + 2.0**-8  # ties: to even 1, away from zero 1 + 2^-7
    return values


@pytest.mark.parametrize(
    "sharding",
    [
        fs.Sharding(0),
        fs.Sharding(0, gather="copy"),
        fs.Sharding(2),
        fs.Sharding(3, gather="copy"),
        fs.Sharding(3, replicate=2),
    ],
    ids=str,
)
def test_training_equals_separate_masters_published_half_away(sharding):
    """The gradients come from the published weights: of the split run those it gathers, of the
    other its fp32 masters rounded half away by NumPy. Every master of every step is bit-equal."""

    def split(world):
        shards = fs.shard(start_values(), world, sharding=sharding, precision=SPLIT)
        opt = fs.AdamW(shards, lr=0.02, weight_decay=0.1)

        def weights():
            found = {}
            for unit in shards.units:
                found.update({n: a.copy() for n, a in unit.gather().items()})
                unit.release()
            return found

        return descend(world, shards, opt, weights)

    def separate(world):
        shards = fs.shard(start_values(), world, precision=SEPARATE)
        opt = fs.AdamW(shards, lr=0.02, weight_decay=0.1)

        def weights():
            return {n: half_away(shards.full(n, "master")) for n in SHAPES}

        return descend(world, shards, opt, weights)

    def to_even(world):
        shards = fs.shard(start_values(), world, precision=SEPARATE)
        opt = fs.AdamW(shards, lr=0.02, weight_decay=0.1)
        return descend(world, shards, opt, lambda: {n: shards.full(n) for n in SHAPES})

    got, want = fs.local_world(4).run(split), fs.local_world(4).run(separate)
    assert got == want
    assert fs.local_world(4).run(to_even) != want, "the rounding shows, so the test can fail"


@pytest.mark.parametrize("first", [SPLIT, SEPARATE], ids=["split", "separate"])
@pytest.mark.parametrize("then", [SPLIT, SEPARATE], ids=["split", "separate"])
def test_checkpoints_hold_the_logical_master(first, then, rng, tmp_path):
    """Saved by four ranks, loaded by two at another stage, split or not; then three steps more."""
    params = make_params(rng)
    grads = make_grads(rng, params, 1, 6)

    def go(world, precision, sharding, steps, before=None, after=None):
        values = params if before is None else {n: np.zeros_like(p) for n, p in params.items()}
        shards = fs.shard(values, world, sharding=sharding, precision=precision)
        opt = fs.AdamW(shards, lr=0.01, weight_decay=0.1)
        if before is not None:
            before(shards, opt)
        for step in grads[steps]:
            reduce_all(shards, step[0])
            assert opt.step()
        if after is not None:
            after(shards, opt)
        hashes = fs.weights_sha256(shards), fs.state_sha256(shards)
        world.barrier()
        return hashes

    def save(shards, opt):
        fs.checkpoint.save(tmp_path, shards, opt, step=3)

    def load(shards, opt):
        fs.checkpoint.load(tmp_path, shards, opt)
        for name in params:
            master, weight = shards.full(name, "master"), shards.full(name)
            nearest = half_away(master) if then is SPLIT else master.astype(ml_dtypes.bfloat16)
            assert (bits(weight.reshape(-1)) == bits(nearest.reshape(-1))).all()

    # Means over two or four equal ranks are exact, so that the worlds may differ.
    whole = fs.local_world(2).run(go, SEPARATE, fs.Sharding(3), slice(None))
    fs.local_world(4).run(go, first, fs.Sharding(1, gather="copy"), slice(3), None, save)
    loaded = fs.local_world(2).run(go, then, fs.Sharding(0), slice(3, None), load)
    assert set(loaded) == set(whole) and len(set(loaded)) == 1


def test_frozen_parameters_and_writes_by_hand():
    def rank(world):
        params = {"a.w": np.full(70, 1.2345678, np.float32), "a.fixed": np.ones(9, np.float32)}
        shards = fs.shard(params, world, precision=SPLIT, frozen=["a.fixed"])
        opt = fs.SGD(shards, lr=1e-3)
        assert shards.dtype("a.w", "master") == np.float32
        assert shards.dtype("a.fixed", "master") == ml_dtypes.bfloat16
        assert (shards.full("a.w", "master") == np.float32(1.2345678)).all()
        for _ in range(8):
            shards.units[0].reduce({"a.w": np.ones(70, np.float32)})
            opt.step()
        moved = shards.full("a.w", "master")
        with shards.units[0].gathered(write=True) as arrays:
            arrays["a.w"][:] = 0.5
        world.barrier()
        return moved, shards.full("a.w", "master"), shards.full("a.fixed").astype(np.float32)

    for moved, written, fixed in fs.local_world(3).run(rank):
        np.testing.assert_allclose(moved, 1.2345678 - 0.008, rtol=1e-6)
        assert (written == 0.5).all() and (fixed == 1).all()


@pytest.mark.parametrize("sharding", [*SHARDINGS, fs.Sharding(3, replicate=2)], ids=str)
def test_the_plan_is_the_ledger_and_two_bytes_less(sharding):
    numel = 1 << 16

    def rank(world, precision):
        shards = fs.shard(
            {"w": np.zeros(numel, np.float32)}, world, sharding=sharding, precision=precision
        )
        fs.AdamW(shards, lr=0.1)
        for name, (planned, held, _) in fs.memory(shards).items():
            if name in ("weights", "master", "moments", "accumulators", "gradients", "pool"):
                assert planned == held, name
        return {name: sum(row) for name, row in shards.planned().items()}

    kept = numel if sharding.stage == 0 else numel * sharding.replicate // 4
    ranks = zip(
        fs.local_world(4).run(rank, SPLIT), fs.local_world(4).run(rank, SEPARATE), strict=True
    )
    for split, separate in ranks:
        assert separate["master"] - split["master"] == 2 * kept
        for name in separate:
            assert name == "master" or split[name] == separate[name]
    table = fs.plan({"w": (numel,)}, world_size=4, sharding=sharding, precision=SPLIT)
    assert table.rank(0)["master"] == 2 * kept


def test_describe_says_it():
    def rank(world):
        return fs.describe(fs.shard({"w": np.zeros(4, np.float32)}, world, precision=SPLIT))

    (text,) = fs.local_world(1).run(rank)
    assert "float32, split: the compute copy and a 16-bit remainder" in text
    assert "bfloat16, rounded to nearest, ties away from zero" in text
    assert "writes float32 and float32" in text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"master": "split"}, r"param='float32', master='split'"),
        (
            {"param": "float16", "loss_scale": 1.0, "master": "split"},
            r"param='float16', master='split'.*bfloat16 weight",
        ),
        (
            {"param": "bfloat16", "master": "split", "rounding": "stochastic"},
            r"master='split', rounding='stochastic'",
        ),
        ({"param": "split"}, "param='split'"),
        ({"param": "bfloat16", "moments": "split"}, "moments='split'"),
        ({"param": "bfloat16", "master": "bfloat16"}, '"float32" or "split"'),
    ],
)
def test_impossible_mixes_are_refused_by_name(fields, text):
    with pytest.raises(ValueError, match=text):
        fs.MixedPrecision(**fields)

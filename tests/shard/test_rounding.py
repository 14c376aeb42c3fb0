"""Stochastic rounding of a sharded run: what it is for, and that its bits depend on no shape."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from test_step import SHARDINGS, make_grads, make_params, reduce_all

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

STOCHASTIC = fs.MixedPrecision(param="bfloat16", moments="bfloat16", rounding="stochastic")


def run(world, params, grads, *, steps=slice(None), first=None, last=None, **how):
    shards = fs.shard(params, world, **how)
    opt = fs.AdamW(shards, lr=0.01, weight_decay=0.1)
    if first is not None:
        first(shards, opt)
    for step in grads[steps]:
        reduce_all(shards, step)
        assert opt.step()
    if last is not None:
        last(shards, opt)
    hashes = fs.weights_sha256(shards), fs.state_sha256(shards)
    world.barrier()
    shards.close()
    return hashes


@pytest.fixture
def same(rng):
    """Parameters, and gradients that are the same on every rank, so that their mean is too."""
    params = make_params(rng)
    return params, [ranks[0] for ranks in make_grads(rng, params, 1, 4)]


@pytest.mark.parametrize("partition", ["flat", "per_parameter"])
def test_one_set_of_bits_for_every_shape_of_job(partition, same):
    params, grads = same
    seen = set()
    for size in (1, 2, 4):
        replicates = [fs.Sharding(3, replicate=2), fs.Sharding(3, gather="copy", replicate=2)]
        for sharding in SHARDINGS + (replicates if size % 2 == 0 else []):
            how = fs.Sharding(**{**sharding.__dict__, "partition": partition})
            ranks = fs.local_world(size).run(
                partial(run, sharding=how, precision="bf16-pure-sr"), params, grads
            )
            seen.update(ranks)
    other = "per_parameter" if partition == "flat" else "flat"
    how = fs.Sharding(2, partition=other)
    seen.update(
        fs.local_world(2).run(partial(run, sharding=how, precision=STOCHASTIC), params, grads)
    )
    assert len(seen) == 1


def test_the_seed_and_the_kind_of_rounding_decide_the_bits(same):
    params, grads = same
    kinds = [
        "bf16-pure",
        "bf16-pure-sr",
        fs.MixedPrecision(
            param="bfloat16", moments="bfloat16", rounding="stochastic", rounding_seed=1
        ),
        fs.MixedPrecision(
            param="bfloat16", moments="bfloat16", rounding="stochastic", rounding_seed=2**64 - 1
        ),
        fs.MixedPrecision(param="bfloat16", rounding="stochastic"),
    ]
    seen = {
        hashes
        for kind in kinds
        for hashes in fs.local_world(2).run(partial(run, precision=kind), params, grads)
    }
    assert len(seen) == len(kinds)


def test_a_run_goes_on_with_the_same_numbers(same, tmp_path):
    params, grads = same

    def save(shards, opt):
        fs.checkpoint.save(tmp_path, shards, opt, step=2)

    def load(shards, opt):
        fs.checkpoint.load(tmp_path, shards, opt)

    how = partial(run, precision="bf16-pure-sr")
    whole = fs.local_world(2).run(how, params, grads)
    fs.local_world(2).run(partial(how, steps=slice(2), last=save), params, grads)
    blank = {n: np.zeros_like(p) for n, p in params.items()}
    loaded = fs.local_world(4).run(partial(how, steps=slice(2, None), first=load), blank, grads)
    assert set(whole) == set(loaded) and len(set(loaded)) == 1


def test_small_steps_move_bf16_weights_in_the_mean():
    """A thousand Adam steps of 1e-6 from 0.02, with a last place of 1.2e-4: none moves to nearest;
    at random the mean of 20,000 weights moves by 1e-3 within 4 sigma.

    Each step goes up or down by one place q with mean 1e-6, so its variance is below 1e-6 q.
    """

    def rank(world, precision):
        start = np.full(20_000, 0.02, ml_dtypes.bfloat16)
        shards = fs.shard({"w": start}, world, precision=precision)
        opt = fs.Adam(shards, lr=1e-6)
        grad = np.ones(20_000, ml_dtypes.bfloat16)
        for _ in range(1000):
            shards.units[0].reduce({"w": grad})
            opt.step()
        return float((start.astype(np.float64) - shards.full("w").astype(np.float64)).mean())

    precision = fs.MixedPrecision(param="bfloat16", rounding="stochastic")
    sigma = np.sqrt(1000 * 1e-6 * 2.0**-13 / 20_000)
    for moved in fs.local_world(2).run(rank, precision):
        assert abs(moved - 1e-3) <= 4 * sigma
    assert fs.local_world(1).run(rank, fs.MixedPrecision(param="bfloat16")) == [0.0]


def test_describe_says_it():
    def rank(world, precision):
        return fs.describe(fs.shard({"w": np.zeros(4, np.float32)}, world, precision=precision))

    (text,) = fs.local_world(1).run(rank, "bf16-pure-sr")
    assert "bfloat16, rounded at random in proportion (seed 0), moments likewise" in text
    (text,) = fs.local_world(1).run(rank, "bf16-pure")
    assert "bfloat16, rounded to nearest even" in text and "random" not in text


def test_ranks_with_different_seeds_do_not_open():
    def rank(world):
        precision = fs.MixedPrecision(
            param="bfloat16", rounding="stochastic", rounding_seed=world.rank
        )
        with pytest.raises(fs.CollectiveMismatch):
            fs.shard({"w": np.zeros(4, np.float32)}, world, precision=precision)
        return True

    assert fs.local_world(2).run(rank) == [True] * 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rounding": "up"}, "rounding='up'"),
        ({"rounding": "stochastic"}, r"param='float32', rounding='stochastic'"),
        (
            {"param": "float16", "loss_scale": 1.0, "rounding": "stochastic"},
            r"param='float16', rounding='stochastic'",
        ),
        (
            {"param": "bfloat16", "master": "float32", "rounding": "stochastic"},
            r"master='float32', rounding='stochastic'",
        ),
        ({"rounding_seed": 3}, r"rounding='nearest', rounding_seed=3"),
        ({"param": "bfloat16", "rounding": "stochastic", "rounding_seed": -1}, "rounding_seed=-1"),
    ],
)
def test_impossible_mixes_are_refused_by_name(fields, text):
    with pytest.raises(ValueError, match=text):
        fs.MixedPrecision(**fields)

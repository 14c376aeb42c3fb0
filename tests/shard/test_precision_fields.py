"""Each field of MixedPrecision changed alone changes the bits of a run, or provably must not."""

import dataclasses

import numpy as np
import pytest

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

SHAPES = {"a.w": (40, 7), "b.w": (133,)}
#: What the fields below are changed from.
BASE = {"param": "bfloat16", "master": "float32", "reduce": "float32"}
PURE = {"param": "bfloat16", "reduce": "float32", "rounding": "stochastic"}


def train(world, fields, *, gradient=1.0, sharding=fs.Sharding(2)):
    """Bits of the masters after ten steps down a quadratic, from the published weights."""
    rng = np.random.default_rng(3)
    values = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    values["b.w"][:64] = 1 + 2.0**-8  # ties: the published copy shows how they are rounded
    precision = fs.MixedPrecision(**fields)
    shards = fs.shard(values, world, sharding=sharding, precision=precision)
    opt = fs.AdamW(shards, lr=0.01, eps=1e-12)
    for t in range(10):
        noise = np.random.default_rng([t, world.rank])
        found = {n: shards.full(n).astype(np.float32) for n in SHAPES}
        world.barrier()
        for unit in reversed(shards.units):
            grads = {}
            for n in unit.names:
                slope = found[n] - 0.3 + 0.1 * noise.standard_normal(SHAPES[n])
                grads[n] = (slope * gradient * opt.loss_scale).astype(np.float32)
            unit.reduce(grads)
        for unit in reversed(shards.units):
            noisy = {n: grad_like(noise, n, gradient * opt.loss_scale) for n in unit.names}
            unit.reduce(noisy)
        assert opt.step()
    bits = b"".join(shards.full(n, "master").astype(np.float32).tobytes() for n in SHAPES)
    world.barrier()
    return bits


def grad_like(noise, name, scale):
    return (noise.standard_normal(SHAPES[name]) * 0.1 * scale).astype(np.float32)


def bits_of(fields, **changes):
    seen = set(fs.local_world(2).run(lambda world: train(world, fields, **changes)))
    assert len(seen) == 1, "both ranks read the same"
    return seen.pop()


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (BASE, {"param": "float16", "loss_scale": 1.0}),
        (BASE, {"reduce": "bfloat16"}),
        (BASE, {"reduce": "float16", "loss_scale": 1.0}),
        (BASE, {"accumulate": "bfloat16"}),
        (BASE, {"master": None}),
        (BASE, {"master": "split"}),
        (BASE, {"moments": "bfloat16"}),
        (PURE, {"rounding": "nearest"}),
        (PURE, {"rounding_seed": 1}),
        (PURE, {"moments": "bfloat16"}),
    ],
    ids=str,
)
def test_a_field_changed_alone_changes_the_bits(base, change):
    # A static loss scale of 1 changes nothing, so that it may go along with float16.
    assert bits_of(base) != bits_of({**base, **change})


def test_every_field_is_tried():
    tried = {"param", "reduce", "accumulate", "master", "moments", "rounding", "rounding_seed"}
    assert {f.name for f in dataclasses.fields(fs.MixedPrecision)} == tried | {"loss_scale"}


def test_a_loss_scale_is_undone_exactly_and_saves_small_fp16_gradients():
    """A power of two scales exactly, where nothing falls below the range of the wire."""
    assert bits_of(BASE) == bits_of({**BASE, "loss_scale": 1.0})
    assert bits_of(BASE) == bits_of({**BASE, "loss_scale": 1024.0})
    small = {"gradient": 1e-8}  # below the least fp16 number, 6e-8
    wire = {**BASE, "reduce": "float16"}
    scaled = bits_of({**wire, "loss_scale": 2.0**16}, **small)
    assert scaled != bits_of({**wire, "loss_scale": 1.0}, **small)


@pytest.mark.parametrize("fields", [BASE, {**BASE, "master": "split"}, PURE], ids=str)
def test_the_bits_do_not_depend_on_the_stage(fields):
    shardings = [
        fs.Sharding(0),
        fs.Sharding(1, gather="copy"),
        fs.Sharding(2),
        fs.Sharding(3),
        fs.Sharding(3, gather="copy"),
    ]
    assert len({bits_of(fields, sharding=sharding) for sharding in shardings}) == 1

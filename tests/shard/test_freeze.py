"""Parameters frozen and thawed between steps: against torch.optim with requires_grad toggled, at
every stage and world size; what stays, what is refused, what a checkpoint says."""

import logging
from functools import partial

import numpy as np
import pytest

import flatshard as fs

pytestmark = pytest.mark.timeout(120)

SHAPES = {
    "embed.weight": (33, 7),
    "layers.0.w": (17, 5),
    "layers.0.b": (65,),
    "layers.0.scale": (),
    "head.weight": (29, 3),
}
#: What is frozen from step (first) to step (last), exclusive: layers a while, then the embedding.
SPANS = {"layers.*": (5, 12), "embed.*": (10, 16)}
STEPS, MAX_NORM, DECAY = 24, 3.0, 0.1

OPTIONS = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4},
    "AdamW": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4},
    "Adagrad": {"lr": 0.05, "eps": 1e-4},
}

STAGES = [
    fs.Sharding(0),
    fs.Sharding(1, gather="copy"),
    fs.Sharding(2),
    fs.Sharding(3),
    fs.Sharding(3, gather="copy", partition="per_parameter"),
]


def trains(name, t):
    spans = [SPANS[p] for p in SPANS if name.startswith(p[:-1])]
    return not any(first <= t < last for first, last in spans)


def make(rng, steps=STEPS):
    """Parameters, and gradients that are multiples of 2**-10: sums over ranks are exact."""
    params = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    grads = [
        {n: (np.rint(rng.standard_normal(s) * 1024) / 1024).astype(np.float32)
         for n, s in SHAPES.items()}
        for _ in range(steps)
    ]  # fmt: skip
    return params, grads


def take_step(shards, opt, grads, names=None, **options):
    """One step with the gradients of what trains (names: of those alone)."""
    for unit in reversed(shards.units):
        some = [n for n in unit.names if (shards.trains(n) if names is None else n in names)]
        unit.reduce({n: grads[n] for n in some})
    return opt.step(**options)


def everything(shards, opt):
    return fs.weights_sha256(shards), fs.state_sha256(shards), str(opt.state())


def train(world, params, grads, rule, sharding, precision="fp32"):
    shards = fs.shard(params, world, sharding=sharding, precision=precision)
    opt = getattr(fs, rule)(shards, weight_decay=DECAY, **OPTIONS[rule])
    norms = []
    for t, step in enumerate(grads):
        for pattern, (first, last) in SPANS.items():
            if t == first:
                shards.freeze(pattern)
            if t == last:
                shards.thaw([pattern])
        for unit in reversed(shards.units):
            unit.reduce({n: step[n] for n in unit.names if trains(n, t)})
        norms.append(opt.step(max_norm=MAX_NORM).grad_norm)
    full = {n: shards.full(n, "master") for n in params}
    found = full, norms, opt.state()["steps"], everything(shards, opt)
    world.barrier()
    shards.close()
    return found


def of_torch(rule, params, grads):
    """Weights and gradient norms of torch in float64."""
    import torch

    tensors = {n: torch.nn.Parameter(torch.tensor(p.astype(np.float64))) for n, p in params.items()}
    optimizer = getattr(torch.optim, rule)(
        list(tensors.values()), weight_decay=DECAY, foreach=False, **OPTIONS[rule]
    )
    norms = []
    for t, step in enumerate(grads):
        for name, tensor in tensors.items():
            tensor.requires_grad_(trains(name, t))
        loss = sum(
            (tensor * torch.tensor(step[name].astype(np.float64))).sum()
            for name, tensor in tensors.items()
        )
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(tensors.values()), MAX_NORM)))
        optimizer.step()
    return {n: t.detach().numpy() for n, t in tensors.items()}, norms


@pytest.mark.parametrize("rule", sorted(OPTIONS))
def test_as_torch_with_requires_grad_toggled(rule, rng):
    """Weights within 2 fp32 ulp of max(|w|, 0.5) a step of float64: one rounding of the weight, and
    one of what is subtracted; with decay as a factor rounded to fp32, half an ulp more."""
    params, grads = make(rng)
    want, norms = of_torch(rule, params, grads)
    seen = set()
    for size in range(1, 5):
        for sharding in STAGES:
            ranks = fs.local_world(size).run(partial(train, sharding=sharding), params, grads, rule)
            for full, got, steps, bits in ranks:
                # A norm is summed in pieces of cuts: its last bits are those of the world and cut.
                seen.add((size, sharding.partition, bits))
                np.testing.assert_allclose(got, norms, rtol=1e-6)
                for name in params:
                    floor = np.maximum(np.abs(want[name]), 0.5).astype(np.float32)
                    ulps = np.abs(full[name] - want[name]) / np.spacing(floor)
                    assert ulps.max() <= 2.5 * STEPS, (name, ulps.max())
                    assert steps[name] == sum(trains(name, t) for t in range(STEPS))
    assert len(seen) == 4 * 2


@pytest.mark.parametrize(
    "precision", ["bf16", "bf16-pure-sr", fs.MixedPrecision(param="bfloat16", master="split")]
)
def test_frozen_is_without_a_gradient_and_nothing_else(precision, rng):
    """The bits of a run in which the same parameters are left out of the same steps."""
    params, grads = make(rng, 18)

    def plain(world):
        shards = fs.shard(params, world, precision=precision)
        opt = fs.AdamW(shards, weight_decay=DECAY, **OPTIONS["AdamW"])
        for t, step in enumerate(grads):
            names = {n for n in params if trains(n, t)}
            take_step(shards, opt, step, names, max_norm=MAX_NORM)
        return everything(shards, opt)

    def frozen(world):
        return train(world, params, grads, "AdamW", fs.Sharding(3), precision)[3]

    for size in (1, 3):
        weights, moments, _ = zip(*fs.local_world(size).run(frozen), strict=True)
        assert (weights, moments) == tuple(zip(*fs.local_world(size).run(plain), strict=True))[:2]


def test_nothing_of_a_frozen_parameter_moves_and_nothing_is_allocated(rng):
    params, grads = make(rng, 6)
    whats = ("weight", "master", "exp_avg", "exp_avg_sq")

    def rank(world):
        shards = fs.shard(params, world, precision="bf16", sharding=fs.Sharding(2))
        opt = fs.AdamW(shards, lr=0.5, weight_decay=0.5)
        take_step(shards, opt, grads[0])
        held = world.memory()
        shards.freeze(["layers.*", "head.weight"])
        assert shards.frozen == ("layers.0.w", "layers.0.b", "layers.0.scale", "head.weight")
        assert "197 more are frozen" in fs.describe(shards).replace(str(85 + 65 + 1 + 87), "197")
        before = {(n, w): shards.full(n, w).tobytes() for n in shards.frozen for w in whats}
        for step in grads[1:4]:
            assert take_step(shards, opt, step)
        assert before == {(n, w): shards.full(n, w).tobytes() for n, w in before}
        assert {opt.state()["steps"][n] for n in shards.frozen} == {1}
        shards.freeze("layers.0.b")  # twice is once
        shards.thaw()
        assert shards.frozen == ()
        take_step(shards, opt, grads[4])
        assert all(shards.full(n, w).tobytes() != bits for (n, w), bits in before.items())
        assert {k: v[:2] for k, v in world.memory().items()} == {k: v[:2] for k, v in held.items()}
        world.barrier()

    fs.local_world(2).run(rank)


def test_a_gradient_of_a_frozen_parameter_is_refused_before_any_is_taken(rng):
    params, grads = make(rng, 2)

    def rank(world):
        shards = fs.shard(params, world)
        opt = fs.SGD(shards, lr=0.1)
        shards.freeze("layers.0.b")
        (unit,) = (u for u in shards.units if u.name == "layers.0")
        with pytest.raises(ValueError, match=rf"rank {world.rank}: layers\.0\.b is frozen and got"):
            unit.reduce({n: grads[0][n] for n in unit.names})
        with pytest.raises(RuntimeError, match="without a gradient on any rank"):
            opt.step()
        shards.freeze("*")
        with pytest.raises(RuntimeError, match="without a gradient on any rank"):
            opt.step()
        shards.thaw("layers.*")
        take_step(shards, opt, grads[1])
        world.barrier()

    fs.local_world(2).run(rank)


@pytest.mark.quick
def test_between_steps_alone(rng):
    """One rank has a gradient, the other none yet: both are told, and both go on."""
    params, grads = make(rng, 2)

    def rank(world):
        shards = fs.shard(params, world)
        opt = fs.SGD(shards, lr=0.1)
        for begin, end in ((0, 1), (1, 0)):
            if world.rank == 0:
                shards.units[-1].reduce({"head.weight": grads[begin]["head.weight"]})
            with pytest.raises(RuntimeError, match="rank 0 has gradients of a step that was not"):
                shards.freeze("layers.*")
            assert shards.frozen == ()
            opt.zero() if end else opt.step()
        opt.zero()
        shards.freeze("layers.*")
        shards.units[-1].reduce({"head.weight": grads[1]["head.weight"]})
        opt.grad_norm()
        with pytest.raises(RuntimeError, match="after step"):
            shards.thaw()
        opt.step()
        shards.thaw()
        world.barrier()

    fs.local_world(2).run(rank)


@pytest.mark.quick
def test_ranks_that_freeze_different_parameters_are_told():
    def rank(world):
        shards = fs.shard({"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}, world)
        shards.freeze("a" if world.rank == 0 else "b")

    with pytest.raises(fs.CollectiveMismatch, match="freezing of parameters"):
        fs.local_world(2).run(rank)


@pytest.mark.quick
def test_patterns_that_cannot_be_meant_are_refused():
    def rank(world):
        params = {"a.weight": np.ones(3, np.float32), "b.weight": np.ones(3, np.float32)}
        shards = fs.shard(params, world, frozen=["b.weight"])
        with pytest.raises(ValueError, match=r"freeze: no parameter matches 'a\.wieght'; the near"):
            shards.freeze(["b.*", "a.wieght"])
        with pytest.raises(ValueError, match=r"thaw: no parameter matches 'c\.\*'"):
            shards.thaw("c.*")
        with pytest.raises(ValueError, match=r"thaw: b\.weight was frozen when .* open it train"):
            shards.thaw(["a.*", "b.*"])
        shards.freeze("*")
        shards.thaw("*")
        assert shards.frozen == ("b.weight",)
        assert not shards.trains("b.weight")
        assert shards.trains("a.weight")

    fs.local_world(1).run(rank)


def test_a_checkpoint_says_what_is_frozen(rng, tmp_path, caplog):
    """Saved by two ranks while frozen, loaded by three that froze something else: the same bits."""
    params, grads = make(rng, 9)

    def save(world):
        shards = fs.shard(params, world, precision="bf16")
        opt = fs.AdamW(shards, lr=0.1, weight_decay=DECAY)
        for step in grads[:3]:
            take_step(shards, opt, step)
        shards.freeze(["layers.*", "embed.weight"])
        for step in grads[3:5]:
            take_step(shards, opt, step)
        fs.checkpoint.save(tmp_path, shards, opt, step=5)
        return rest(shards, opt)

    def load(world):
        blank = {n: np.zeros_like(p) for n, p in params.items()}
        shards = fs.shard(blank, world, precision="bf16", sharding=fs.Sharding(1))
        opt = fs.AdamW(shards, lr=0.1)
        shards.freeze("head.weight")
        fs.checkpoint.load(tmp_path, shards, opt)
        assert shards.frozen == ("embed.weight", "layers.0.w", "layers.0.b", "layers.0.scale")
        return rest(shards, opt)

    def rest(shards, opt):
        for step in grads[5:7]:
            take_step(shards, opt, step)
        shards.thaw("layers.*")
        for step in grads[7:]:
            take_step(shards, opt, step)
        return everything(shards, opt)

    saved = fs.local_world(2).run(save)
    with caplog.at_level(logging.WARNING, logger="flatshard"):
        loaded = fs.local_world(3).run(load)
    assert len(set(saved + loaded)) == 1
    assert "what is frozen: ['embed.weight', 'layers.0.b'" in caplog.text

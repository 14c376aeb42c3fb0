"""A hundred steps of the optimizers beyond plain Adam, against torch.optim in float64 or the paper
in NumPy; groups, decay, parameters left out of some steps, restarts."""

from functools import partial

import numpy as np
import pytest

import flatshard as fs

pytestmark = pytest.mark.timeout(120)

STEPS = 100
#: How often a parameter is left out: every so many steps. Absent ones neither move nor age.
ABSENT = {"layers.0.b": 3, "head.weight": 5}
GROUPS = {"head": {"match": ["head.*"], "lr": 0.003, "weight_decay": 0.3}}
NO_DECAY = ("*.b",)

OPTIONS = {
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.02, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4},
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4},
    "Adam, AMSGrad": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "amsgrad": True},
    "AdamW, AMSGrad": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "amsgrad": True},
    "Lion": {"lr": 0.01, "betas": (0.9, 0.97)},
}
MOMENTS = {
    "SGD": ("momentum_buffer",),
    "Adagrad": ("sum",),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam, AMSGrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW, AMSGrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
DECAY = 0.1
RULES = sorted(OPTIONS)


def make_params(rng):
    shapes = {
        "embed.weight": (33, 31),
        "layers.0.w": (65, 17),
        "layers.0.b": (65,),
        "layers.0.scale": (),
        "head.weight": (129, 7),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def make_grads(rng, params, steps=STEPS):
    """Gradients that shrink, so that the largest second moment stays behind; multiples of 2**-12,
    so that sums over ranks are exact."""
    out = []
    for t in range(1, steps + 1):
        grads = {}
        for name, value in params.items():
            if name in ABSENT and t % ABSENT[name] == 0:
                continue
            wide = rng.standard_normal(value.shape) * (4.0 if t < 10 else 0.5)
            grads[name] = (np.rint(wide * 4096) / 4096).astype(np.float32)
        out.append(grads)
    return out


def run(world, params, grads, rule, *, first=None, sharding=fs.Sharding(), **changes):
    """All ranks have the same gradients. first: called with shards and optimizer beforehand."""
    shards = fs.shard(params, world, sharding=sharding, groups=GROUPS, **changes)
    kind = getattr(fs, rule.split(",")[0])
    opt = kind(shards, weight_decay=DECAY, no_decay=NO_DECAY, **OPTIONS[rule])
    if first is not None:
        first(shards, opt)
    for step in grads:
        for unit in reversed(shards.units):
            unit.reduce({n: step[n] for n in unit.names if n in step})
        assert opt.step()
    moments = {w: {n: shards.full(n, w) for n in params} for w in shards._moments}
    full = {n: shards.full(n, "master") for n in params}
    hashes = fs.weights_sha256(shards), fs.state_sha256(shards)
    state = opt.state()
    world.barrier()
    shards.close()
    return full, moments, hashes, state


def setting(name, key):
    if name.startswith("head.") and key in GROUPS["head"]:
        return GROUPS["head"][key]
    return 0.0 if key == "weight_decay" and name.endswith(".b") else DECAY


def of_torch(rule, params, grads):
    """(weights, moments) of torch.optim in float64."""
    import torch

    tensors = {n: torch.nn.Parameter(torch.tensor(p.astype(np.float64))) for n, p in params.items()}
    groups = [
        {
            "params": [tensor],
            "weight_decay": setting(name, "weight_decay"),
            **({"lr": GROUPS["head"]["lr"]} if name.startswith("head.") else {}),
        }
        for name, tensor in tensors.items()
    ]
    options = {"eps": 1e-10, **OPTIONS[rule]} if rule == "Adagrad" else OPTIONS[rule]
    optimizer = getattr(torch.optim, rule.split(",")[0])(groups, foreach=False, **options)
    for step in grads:
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(step[name].astype(np.float64)) if name in step else None
        optimizer.step()
    moments = {
        w: {n: optimizer.state[t][w].numpy() for n, t in tensors.items()} for w in MOMENTS[rule]
    }
    return {n: t.detach().numpy() for n, t in tensors.items()}, moments


def of_paper(params, grads):
    """Lion in float64; and how near to zero each element's blend ever came, against its terms."""
    beta1, beta2 = OPTIONS["Lion"]["betas"]
    w = {n: p.astype(np.float64) for n, p in params.items()}
    m = {n: np.zeros(p.shape) for n, p in params.items()}
    nearest = {n: np.full(p.shape, np.inf) for n, p in params.items()}
    for step in grads:
        for name, g in step.items():
            g = g.astype(np.float64)
            lr = GROUPS["head"]["lr"] if name.startswith("head.") else OPTIONS["Lion"]["lr"]
            blend = beta1 * m[name] + (1 - beta1) * g
            size = np.abs(beta1 * m[name]) + np.abs((1 - beta1) * g)
            near = np.abs(blend) / np.where(size == 0, 1, size)
            nearest[name] = np.minimum(nearest[name], near)
            w[name] = w[name] * (1 - lr * setting(name, "weight_decay")) - lr * np.sign(blend)
            m[name] = beta2 * m[name] + (1 - beta2) * g
    return w, {"exp_avg": m}, nearest


def units(got, want, floor):
    """Distance in units of the last place of max(|want|, floor), fp32."""
    size = np.maximum(np.abs(want), floor).astype(np.float32)
    return np.abs(got.astype(np.float64) - want) / np.spacing(size).astype(np.float64)


@pytest.mark.parametrize("rule", RULES)
def test_a_hundred_steps(rule, rng):
    """Weights within 66 fp32 ulp of float64 (of max(|w|, 0.5)): each step rounds the weight
    once, by half an ulp, and the moments it is made of a little. Moments within 32 (of max(|m|,
    0.25); of a momentum buffer, which adds up ten gradients, of max(|m|, 1)): a beta near 1
    that is rounded to fp32 moves a mean by half an ulp / (1 - beta), here 10, and each step
    rounds once more, of which the last 1 / (1 - beta) count."""
    params = make_params(rng)
    grads = make_grads(rng, params)
    if rule == "Lion":
        want, moments, nearest = of_paper(params, grads)
        # Where the blend all but cancels its sign is that of the rounding: nobody's is right.
        keep = {n: near > 1e-5 for n, near in nearest.items()}
        assert sum(int(k.sum()) for k in keep.values()) > 0.99 * sum(k.size for k in keep.values())
    else:
        want, moments = of_torch(rule, params, grads)
        keep = {n: np.ones(p.shape, bool) for n, p in params.items()}
    floor = 1.0 if rule == "SGD" else 0.25
    for full, got, _, state in fs.local_world(2).run(run, params, grads, rule):
        for name in params:
            assert units(full[name], want[name], 0.5)[keep[name]].max() <= 16 + STEPS / 2, name
            for what, values in moments.items():
                assert units(got[what][name], values[name], floor).max() <= 32, (name, what)
            absent = STEPS // ABSENT[name] if name in ABSENT else 0
            assert state["steps"][name] == STEPS - absent


@pytest.mark.parametrize("rule", RULES)
def test_one_set_of_bits_for_every_cut(rule, rng):
    params = make_params(rng)
    grads = make_grads(rng, params, 7)
    seen = set()
    for size, sharding in [
        (1, fs.Sharding(3)),
        (2, fs.Sharding(0)),
        (2, fs.Sharding(2, gather="copy")),
        (4, fs.Sharding(3, partition="per_parameter")),
        (4, fs.Sharding(3, replicate=2)),
    ]:
        ranks = fs.local_world(size).run(partial(run, sharding=sharding), params, grads, rule)
        seen.update(hashes for _, _, hashes, _ in ranks)
    assert len(seen) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
@pytest.mark.parametrize("rule", RULES)
def test_a_run_goes_on_from_its_checkpoint(rule, precision, rng, tmp_path):
    """Saved by two ranks after three steps, loaded by four: the bits of seven steps in a row."""
    params = make_params(rng)
    grads = make_grads(rng, params, 7)

    def save(world):
        def keep(shards, opt):
            for step in grads[:3]:
                for unit in reversed(shards.units):
                    unit.reduce({n: step[n] for n in unit.names if n in step})
                opt.step()
            fs.checkpoint.save(tmp_path, shards, opt, step=3)

        return run(world, params, grads[3:], rule, first=keep, precision=precision)

    def load(world):
        def take(shards, opt):
            fs.checkpoint.load(tmp_path, shards, opt)

        blank = {n: np.zeros_like(p) for n, p in params.items()}
        return run(world, blank, grads[3:], rule, first=take, precision=precision)

    whole = fs.local_world(2).run(partial(run, precision=precision), params, grads, rule)
    saved = fs.local_world(2).run(save)
    loaded = fs.local_world(4).run(load)
    assert len({(hashes, str(state)) for _, _, hashes, state in whole + saved + loaded}) == 1


@pytest.mark.quick
def test_the_largest_second_moment_stays(rng):
    """One large gradient, then small ones: with AMSGrad the denominator remembers it."""

    def rank(world, amsgrad):
        shards = fs.shard({"w": np.zeros(3, np.float32)}, world)
        opt = fs.Adam(shards, lr=0.1, betas=(0.0, 0.5), amsgrad=amsgrad)
        for value in (8.0, *(1.0,) * 6):
            shards.units[0].reduce({"w": np.full(3, value, np.float32)})
            opt.step()
        kinds = ("exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg_sq",)
        return [float(shards.full("w", kind)[0]) for kind in kinds], float(shards.full("w")[0])

    for (v, largest), slow in fs.local_world(2).run(rank, True):
        assert largest == 32.0 and v == pytest.approx(0.5 + 1.0 - 2.0**-6, rel=1e-6)
        for _, fast in fs.local_world(2).run(rank, False):
            assert fast < 1.5 * slow < 0


@pytest.mark.quick
def test_lion_moves_by_its_sign_alone():
    def rank(world):
        shards = fs.shard({"w": np.ones(4, np.float32)}, world)
        opt = fs.Lion(shards, lr=0.125)
        shards.units[0].reduce({"w": np.array([1e-30, -1e30, 0.0, -0.0], np.float32)})
        opt.step()
        return shards.full("w").tolist()

    assert fs.local_world(2).run(rank) == [[0.875, 1.125, 1.0, 1.0]] * 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        ("Adagrad", {"lr": 0.1, "lr_decay": -1.0}, "lr_decay=-1.0"),
        (
            "Adagrad",
            {"lr": 0.1, "initial_accumulator_value": float("nan")},
            "accumulator_value=nan",
        ),
        ("Adagrad", {"lr": 0.1, "initial_accumulator_value": -0.5}, "accumulator_value=-0.5"),
        ("Adagrad", {"lr": float("inf")}, "lr=inf"),
        ("Lion", {"lr": 0.1, "betas": (0.9, 1.0)}, "betas="),
        ("Lion", {"lr": -0.1}, "lr=-0.1"),
        ("AdamW", {"lr": 0.1, "amsgrad": True, "betas": (-0.1, 0.9)}, "betas="),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(rule, options, text):
    def rank(world):
        shards = fs.shard({"w": np.ones(4, np.float32)}, world)
        with pytest.raises(ValueError, match=text):
            getattr(fs, rule)(shards, **options)
        fs.SGD(shards, lr=0.1)  # the refusal left room for another
        return True

    assert fs.local_world(1).run(rank) == [True]


@pytest.mark.quick
def test_another_rule_is_not_restored():
    def rank(world):
        shards = fs.shard({"w": np.ones(4, np.float32)}, world)
        state = fs.Lion(shards, lr=0.1).state()
        with pytest.raises(ValueError, match="Lion, this one is Adagrad"):
            fs.Adagrad(shards, lr=0.1).restore(state)
        other = fs.shard({"w": np.ones(4, np.float32)}, world)
        plain = fs.Adam(other, lr=0.1).state()
        third = fs.shard({"w": np.ones(4, np.float32)}, world)
        with pytest.raises(ValueError, match="exp_avg_sq"):
            fs.Adam(third, lr=0.1, amsgrad=True).restore(plain)
        return True

    assert fs.local_world(1).run(rank) == [True]


@pytest.mark.quick
def test_lamb_and_muon_are_refused_by_name():
    for name in ("LAMB", "Muon"):
        with pytest.raises(AttributeError, match=f"flatshard.{name} is not there yet"):
            getattr(fs, name)


@pytest.mark.quick
@pytest.mark.parametrize(("name", "moments"), [("adamw-amsgrad", 3), ("lion", 1), ("adagrad", 1)])
def test_the_plan_counts_the_moments(name, moments):
    shapes = {"w": (640, 10)}
    plan = fs.plan(shapes, world_size=2, optimizer=name)
    assert plan.host["moments"] == moments * 6400 * 4

    def rank(world):
        shards = fs.shard({"w": np.ones((640, 10), np.float32)}, world)
        {
            "adamw-amsgrad": partial(fs.AdamW, amsgrad=True),
            "lion": fs.Lion,
            "adagrad": fs.Adagrad,
        }[name](shards, lr=0.1)
        planned, held, _ = fs.memory(shards)["moments"]
        return planned, held

    for planned, held in fs.local_world(2).run(rank):
        assert planned == held == plan.rank(0)["moments"]

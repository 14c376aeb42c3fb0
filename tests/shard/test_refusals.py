"""Bad input to optimizers and steps: a sentence that says what was got and expected, on every rank,
and nothing moved."""

import math

import numpy as np
import pytest

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

RULES = {
    "SGD": ("lr", "momentum", "weight_decay"),
    "Adam": ("lr", "eps", "weight_decay"),
    "AdamW": ("lr", "eps", "weight_decay"),
    "Lion": ("lr", "weight_decay"),
    "Adagrad": ("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value"),
}
NO_NUMBERS = (-1.0, -1e-30, math.nan, math.inf, -math.inf)
NO_BETAS = ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), (0.9,), (0.9, 0.9, 0.9), 0.9)


def make(world, **changes):
    start = {"body.w": np.ones((3, 4), np.float32), "head.bias": np.ones(5, np.float32)}
    return fs.shard(start, world, **changes)


def bits(shards, opt):
    return fs.weights_sha256(shards), fs.state_sha256(shards), opt.state()["steps"]


@pytest.mark.parametrize("rule", RULES)
def test_hyperparameters(rule):
    """When made, and when changed between steps; a group's own as well."""

    def rank(world):
        shards = make(world)
        for name in RULES[rule]:
            for value in NO_NUMBERS:
                with pytest.raises(ValueError, match=f"{name}={value!r}: expected a finite number"):
                    getattr(fs, rule)(shards, **{"lr": 0.1, name: value})
        if rule in ("Adam", "AdamW", "Lion"):
            for betas in NO_BETAS:
                with pytest.raises(ValueError, match=r"betas=.*: expected two numbers in \[0, 1\)"):
                    getattr(fs, rule)(shards, lr=0.1, betas=betas)
        assert world.memory()["moments"][:2] == (0, 0), "refused before anything was allocated"

        opt = getattr(fs, rule)(shards, lr=0.1)
        before = bits(shards, opt)
        for unit in reversed(shards.units):
            unit.reduce({n: np.ones(shards.full(n).shape) for n in unit.names})
        for name in RULES[rule][:-1] if rule == "Adagrad" else RULES[rule]:
            good = getattr(opt.groups[0], name)
            setattr(opt.groups[0], name, math.nan)
            with pytest.raises(ValueError, match=f"{name}=nan"):
                opt.step()
            setattr(opt.groups[0], name, good)
        for value in NO_NUMBERS:
            with pytest.raises(ValueError, match=f"lr={value!r}"):
                opt.step(lr=value)
        assert opt.lr == 0.1
        world.barrier()
        assert bits(shards, opt) == before
        world.barrier()
        assert opt.step(), "the gradients are still there"
        world.barrier()

        other = make(world, groups={"g": {"match": "head.*", "lr": -1.0}})
        with pytest.raises(ValueError, match=r"lr=-1\.0"):
            getattr(fs, rule)(other, lr=0.1)

    fs.local_world(2).run(rank)


def test_names_that_no_parameter_has():
    def rank(world):
        with pytest.raises(ValueError, match=r"groups\['g'\]: no parameter matches 'haed"):
            make(world, groups={"g": {"match": ["haed.*"], "lr": 1.0}})
        with pytest.raises(ValueError, match=r'groups\[.g.\] needs "match"'):
            make(world, groups={"g": {"lr": 1.0}})
        shards = make(world)
        with pytest.raises(ValueError, match=r"'head\.bais'; the nearest name is head\.bias"):
            fs.AdamW(shards, lr=0.1, weight_decay=0.1, no_decay=["head.bais"])
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.1, no_decay=["*.norm", "head.bias"])
        assert [g.name for g in opt.groups] == ["default", "no_decay"]

    fs.local_world(2).run(rank)


@pytest.mark.parametrize("scale", [3.0, 1000.0, 0.0, -2.0, math.nan, math.inf])
def test_a_scale_that_is_no_power_of_two(scale):
    for make_scale in (
        lambda: fs.LossScale(initial=scale),
        lambda: fs.LossScale(minimum=scale),
        lambda: fs.LossScale(factor=scale),
        lambda: fs.MixedPrecision(param="float16", master="float32", loss_scale=scale),
    ):
        with pytest.raises(ValueError, match=f"={scale!r}.*expected a power of two"):
            make_scale()

    def rank(world):
        shards = make(world)
        with pytest.raises(ValueError, match="expected a power of two"):
            shards._core.set_loss_scale(scale if scale != 0.0 else 0.75)

    fs.local_world(1).run(rank)


@pytest.mark.parametrize(
    ("gradient", "error", "text"),
    [
        (np.ones((4, 3), np.float32), ValueError, r"shape \(4, 3\), expected \(3, 4\)"),
        (np.ones(12, np.float32), ValueError, r"shape \(12,\), expected \(3, 4\)"),
        (np.ones((3, 4, 1), np.float32), ValueError, r"shape \(3, 4, 1\), expected \(3, 4\)"),
        (np.float32(1), ValueError, r"shape \(\), expected \(3, 4\)"),
        (np.ones((3, 4), np.int32), TypeError, "body.w: dtype int32, expected a float dtype"),
        (np.ones((3, 4), np.complex64), TypeError, "dtype complex64"),
        (np.ones((3, 4), bool), TypeError, "dtype bool"),
        (np.full((3, 4), "1"), TypeError, "dtype <U1"),
        (None, TypeError, "dtype object"),
    ],
    ids=str,
)
def test_a_gradient_of_another_shape_or_dtype(gradient, error, text):
    """Refused as a whole: the other parameter of the unit is not half handed in."""

    def rank(world):
        shards = make(world, unit_of=lambda name: "u")
        opt = fs.AdamW(shards, lr=0.1)
        before = bits(shards, opt)
        with pytest.raises(error, match=text):
            shards.units[0].reduce({"head.bias": np.ones(5, np.float32), "body.w": gradient})
        with pytest.raises(RuntimeError, match=r"step\(\) without a gradient on any rank"):
            opt.step()
        assert bits(shards, opt) == before
        world.barrier()

    fs.local_world(2).run(rank)


@pytest.mark.parametrize("stage", range(4))
def test_a_step_without_a_gradient(stage):
    """Before the first, after a step, after gradients were dropped: nothing moves, all goes on."""

    def rank(world):
        shards = make(world, sharding=fs.Sharding(stage))
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.1)

        def refuse():
            before = bits(shards, opt)
            world.barrier()
            with pytest.raises(RuntimeError, match="nothing was reduced since the last step"):
                opt.step(max_norm=1.0)
            assert bits(shards, opt) == before
            world.barrier()

        refuse()
        for turn in range(2):
            for unit in reversed(shards.units):
                unit.reduce({n: np.ones(shards.full(n).shape) for n in unit.names})
            if turn == 0:
                assert opt.step()
            else:
                opt.zero()
            refuse()
        assert (opt.steps_applied, opt.steps_skipped) == (1, 0)

    fs.local_world(2).run(rank)

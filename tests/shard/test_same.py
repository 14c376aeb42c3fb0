"""Ranks that bring different models or optimizers are refused, all of them, with who and what."""

import re

import ml_dtypes
import numpy as np
import pytest

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

SHAPES = {"a.w": (8, 4), "b.w": (4, 8), "c.w": (3,)}


def model(**changes):
    shapes = {**SHAPES, **changes}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def swapped():
    """The same elements, names of two parameters exchanged."""
    return {name: np.ones(SHAPES[name], np.float32) for name in ("b.w", "a.w", "c.w")}


def tied():
    arrays = model()
    return {**arrays, "d.w": arrays["c.w"]}


CASES = {
    "a size": (lambda: model(**{"b.w": (4, 9)}), {},
               "the shape of parameter 1, 'b.w', is (4, 9), not (4, 8)"),
    "the same elements in another shape": (lambda: model(**{"b.w": (8, 4)}), {},
               "the shape of parameter 1, 'b.w', is (8, 4), not (4, 8)"),
    "an order": (swapped, {},
               "parameter 0 is 'b.w', not 'a.w' (the same names, in another order)"),
    "a name": (lambda: {("x.w" if n == "c.w" else n): a for n, a in model().items()}, {},
               "parameter 2 is 'x.w', not 'c.w'"),
    "one more": (lambda: model(**{"d.w": (2,)}), {},
               "4 parameters, not 3: 'd.w' is the first more"),
    "one less": (lambda: dict(list(model().items())[:2]), {},
               "2 parameters, not 3: 'c.w' is the first less"),
    "a tie": (tied, {}, "the tied name of parameter 2, 'c.w', is 'd.w', not None"),
    "a dtype": (lambda: {n: a.astype(np.float16 if n == "b.w" else a.dtype)
                         for n, a in model().items()}, {},
               "the dtype of parameter 1, 'b.w', is 'float16', not 'float32'"),
    "all dtypes": (lambda: {n: a.astype(ml_dtypes.bfloat16) for n, a in model().items()}, {},
               "the dtype of parameter 0, 'a.w', is 'bfloat16', not 'float32'"),
    "frozen": (model, {"frozen": ["b.w"]},
               "the trainable of parameter 1, 'b.w', is False, not True"),
    "units": (model, {"unit_of": lambda name: "all"},
               "the unit of parameter 0, 'a.w', is 'all', not 'a'"),
    "a stage": (model, {"sharding": fs.Sharding(2)}, "sharding.stage is 2, not 3"),
    "a partition": (model, {"sharding": fs.Sharding(3, partition="per_parameter")},
               "sharding.partition is 'per_parameter', not 'flat'"),
    "a gather": (model, {"sharding": fs.Sharding(3, gather="copy")},
               "sharding.gather is 'copy', not 'view'"),
    "a precision": (model, {"precision": "bf16"}, "precision.param is 'bfloat16', not 'float32'"),
    "a seed": (model, {"precision": fs.MixedPrecision(
                   param="bfloat16", rounding="stochastic", rounding_seed=3)},
               "precision.param is 'bfloat16', not 'float32'"),
    "a group": (model, {"groups": {"slow": {"match": "a.*", "lr": 0.1}}}, "groups.slow is there"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("size", "odd"), [(2, 1), (3, 0), (3, 2), (4, 1)])
def test_a_difference_is_named_on_every_rank_and_the_world_goes_on(name, size, odd):
    make, options, text = CASES[name]

    def rank(world):
        mine = world.rank == odd
        with pytest.raises(fs.CollectiveMismatch) as raised:
            fs.shard(make() if mine else model(), world, **(options if mine else {}))
        before = world.memory()
        shards = fs.shard(model(), world)  # refused before anything was taken
        shards.close()
        assert world.memory()["weights"][0] == before["weights"][0] == 0
        return str(raised.value)

    said = fs.local_world(size).run(rank)
    reference = 1 if odd == 0 else 0  # most of them are alike; of two, rank 0 counts
    for message in said:
        assert message == said[0]
        assert message.startswith("model: ranks differ")
        assert f"Compared with rank {reference}, rank {odd}: {text}" in message, message


def test_several_odd_ranks_are_each_named():
    def rank(world):
        shapes = {1: {"a.w": (9, 4)}, 3: {"c.w": (5,)}}.get(world.rank, {})
        with pytest.raises(fs.CollectiveMismatch) as raised:
            fs.shard(model(**shapes), world)
        return str(raised.value)

    for message in fs.local_world(5).run(rank):
        assert re.search(r"rank 1: .*'a\.w', is \(9, 4\).*; rank 3: .*'c\.w', is \(5,\)", message)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": 0.2}, "groups.default.lr is 0.2, not 0.1"),
        ({"weight_decay": 0.5}, "groups.default.weight_decay is 0.5, not 0.0"),
        ({"betas": (0.8, 0.999)}, "groups.default.betas is (0.8, 0.999), not (0.9, 0.999)"),
        ({"amsgrad": True}, "moments is ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'), not"),
        ({"max_skips": 3}, "max_skips is 3, not 20"),
        ({"weight_decay": 0.1, "no_decay": ["a.*"]}, "groups.default.params is ('b.w', 'c.w'), n"),
    ],
)
def test_optimizers_are_compared_too(options, text):
    def rank(world):
        shards = fs.shard(model(), world)
        chosen = {"lr": 0.1, **(options if world.rank == 1 else {})}
        with pytest.raises(fs.CollectiveMismatch) as raised:
            fs.AdamW(shards, **chosen)
        opt = fs.AdamW(shards, lr=0.1)
        for unit in reversed(shards.units):
            unit.reduce({n: np.ones(SHAPES[n], np.float32) for n in unit.names})
        assert opt.step()
        return str(raised.value)

    for message in fs.local_world(3).run(rank):
        assert message.startswith("optimizer AdamW: ranks differ"), message
        assert f"rank 1: {text}" in message, message


def test_rules_are_compared():
    def rank(world):
        shards = fs.shard(model(), world)
        with pytest.raises(fs.CollectiveMismatch, match="rank 1: rule is 'Adam', not 'AdamW'"):
            (fs.Adam if world.rank == 1 else fs.AdamW)(shards, lr=0.1)

    fs.local_world(3).run(rank)


def test_native_models_are_compared():
    def rank(world):
        config = {
            "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2,
            "intermediate_size": 40 + 8 * world.rank, "num_attention_heads": 4,
        }  # fmt: skip
        with pytest.raises(fs.CollectiveMismatch) as raised:
            fs.models.Llama.from_config(config, world=world)
        return str(raised.value)

    for message in fs.local_world(2).run(rank):
        assert "gate_proj.weight', is (48, 24), not (40, 24)" in message, message


def test_what_shapes_do_not_show_is_compared_too():
    """A seed of its own, or another epsilon, on one rank: another model, of the same shapes."""

    def rank(world):
        config = {
            "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2,
            "intermediate_size": 40, "num_attention_heads": 4, "rms_norm_eps": 1e-6,
        }  # fmt: skip
        said = []
        for changed, seed in ((config, world.rank), ({**config, "rms_norm_eps": 1e-5}, 0)):
            mine = changed if world.rank else config
            with pytest.raises(fs.CollectiveMismatch) as raised:
                fs.models.Llama.from_config(mine, world=world, seed=seed)
            said.append(str(raised.value))
        fs.models.Llama.from_config(config, world=world, seed=5).close()
        return said

    for seeds, epsilons in fs.local_world(2).run(rank):
        assert seeds.endswith("rank 1: seed is 1, not 0"), seeds
        assert epsilons.endswith("rank 1: rms_norm_eps is 1e-05, not 1e-06"), epsilons

"""What units and ranks cost: memory that falls with the number of ranks, units that are gathered
whole, and how often. Ranks hold copies, as several hosts and devices do."""

import math

import numpy as np
import pytest

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

LAYERS, SIDE = 4, 64
SHAPES = {f"layers.{i}.{n}": (SIDE, SIDE) for i in range(LAYERS) for n in ("a", "b")}
NBYTES = len(SHAPES) * SIDE * SIDE * 4
#: How parameters come into units, and the parameters of one.
UNITS = {
    "one": (lambda name: "all", len(SHAPES)),
    "layers": (lambda name: name[: len("layers.0")], 2),
    "each": (lambda name: name, 1),
}
COPY = fs.Sharding(3, gather="copy")


def test_memory_falls_with_the_number_of_ranks():
    """What stays on each rank is the total over the ranks: a slope of -1 on two log scales."""

    def rank(world):
        before = world.memory()
        shards = fs.shard({n: np.zeros(s, np.float32) for n, s in SHAPES.items()}, world,
                          sharding=COPY)  # fmt: skip
        fs.AdamW(shards, lr=0.1)
        after = world.memory()
        classes = ("weights", "accumulators", "moments")
        held = sum(sum(after[c][:2]) - sum(before[c][:2]) for c in classes)
        world.barrier()
        return held

    sizes = (1, 2, 4, 8)
    held = [max(fs.local_world(size).run(rank)) for size in sizes]
    assert held[0] == pytest.approx(4 * NBYTES, rel=0.01)  # weight, gradient and two moments
    slope = np.polyfit(np.log(sizes), np.log(held), 1)[0]
    assert slope == pytest.approx(-1, abs=0.02)


@pytest.mark.parametrize("kind", UNITS)
def test_a_gather_holds_one_unit_and_there_is_one_for_each(kind):
    unit_of, params = UNITS[kind]

    def rank(world):
        shards = fs.shard({n: np.zeros(s, np.float32) for n, s in SHAPES.items()}, world,
                          sharding=COPY, unit_of=unit_of)  # fmt: skip
        opt = fs.SGD(shards, lr=0.1)
        before = world.log()
        for unit in (*shards.units, *reversed(shards.units)):
            with unit.gathered() as arrays:
                assert len(arrays) == params
            assert all(other.state == "released" for other in shards.units)
        for unit in reversed(shards.units):
            unit.reduce({n: np.ones(SHAPES[n], np.float32) for n in unit.names})
        opt.step()
        log = world.log().since(before)
        world.barrier()
        gathers = log.total(rank=world.rank, op="gather")
        sums = log.total(rank=world.rank, op="reduce")
        return sum(world.memory()["pool"][:2]), gathers, sums

    for pool, gathers, sums in fs.local_world(2).run(rank):
        assert pool == pytest.approx(params / len(SHAPES) * NBYTES, rel=0.01)
        units = len(SHAPES) // params
        # Twice the weights, but for the unit that is the last of forward and the first of backward,
        # and once the gradients.
        assert gathers.count == 2 * units - 1
        assert gathers.nbytes == gathers.count * NBYTES // units
        assert (sums.count, sums.nbytes) == (units, NBYTES)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_layer_is_gathered_twice_a_step_or_stays(reshard):
    """The same bits; kept from forward to backward all layers are held at once."""
    config = {
        "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    steps = 2

    def rank(world, sharding):
        model = fs.models.Llama.from_config(config, world=world, sharding=sharding)
        opt = fs.SGD(model, lr=0.1)
        draw = np.random.default_rng(world.rank)
        before = world.log()
        for _ in range(steps):
            ids = draw.integers(0, 61, (2, 9)).astype(np.int32)
            model.forward_backward(ids, ids)
            opt.step()
        log = world.log().since(before)
        names = [f"layers.{i}" for i in range(3)]
        counts = [log.total(rank=world.rank, op="gather", unit=name).count for name in names]
        layer = sum(math.prod(p.shape) * 4 for p in model.shards.parameters if ".0." in p.name)
        pool = sum(world.memory()["pool"][:2])
        digest = fs.weights_sha256(model)
        world.barrier()
        return counts, pool, layer, digest

    how = fs.Sharding(3, gather="copy", reshard_after_forward=reshard)
    digests = {row[3] for row in fs.local_world(2).run(rank, fs.Sharding(3))}
    for counts, pool, layer, digest in fs.local_world(2).run(rank, how):
        assert counts == [steps * (2 if reshard else 1)] * 3
        assert (pool < 2 * layer) == reshard and (pool > 3 * layer) == (not reshard)
        assert digest in digests and len(digests) == 1

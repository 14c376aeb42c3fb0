"""A rank whose batch failed asks for a skip: every rank agrees, nobody hangs, nothing moves.

Wherever the rank was: before its first unit, in the middle of a micro-batch, in a later one, in the
native model's backward, at every stage and gather.
"""

import itertools

import numpy as np
import pytest

import flatshard as fs
from flatshard import _core

pytestmark = pytest.mark.timeout(120)

SHAPES = {"embed.w": (13, 5), "layers.0.w": (7, 9), "layers.1.w": (9, 7), "head.w": (130,)}
UNITS = len(SHAPES)
SHARDINGS = [fs.Sharding(stage, gather=gather) for stage in range(4) for gather in ("view", "copy")]


class BatchFailed(Exception):
    """What ends a micro-batch in these tests."""


def gradient(name, rank, step, micro):
    rng = np.random.default_rng([len(name), rank, step, micro])
    return rng.integers(-8, 9, SHAPES[name]).astype(np.float32)


def micro_batch(shards, step, micro, fail_at=None):
    """Forward and backward of an arrays user, who fails before unit ``fail_at``."""
    rank, done = shards.world.rank, 0
    for unit in shards.units:
        if done == fail_at:
            raise BatchFailed(f"before forward of {unit.name}")
        with unit.gathered() as weights:
            assert weights[unit.names[0]].shape == SHAPES[unit.names[0]]
        done += 1
    for unit in reversed(shards.units):
        if done == fail_at:
            raise BatchFailed(f"before backward of {unit.name}")
        unit.reduce({n: gradient(n, rank, step, micro) for n in unit.names}, count=3 + rank)
        done += 1
    if done == fail_at:
        raise BatchFailed("after the last unit")


def steps(world, sharding, failures, steps_n=3, micros=2):
    """Results and hashes after each step; failures: {(step, micro): (rank, unit)}."""
    rng = np.random.default_rng(5)
    params = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    shards = fs.shard(params, world, sharding=sharding)
    opt = fs.AdamW(shards, lr=0.01, weight_decay=0.1)
    seen = []
    for step in range(steps_n):
        try:
            for micro in range(micros):
                rank, at = failures.get((step, micro), (None, None))
                micro_batch(shards, step, micro, at if rank == world.rank else None)
        except BatchFailed as error:
            opt.skip(str(error))
        result = opt.step(max_norm=1.0)
        seen.append((result, fs.weights_sha256(shards), fs.state_sha256(shards)))
    world.barrier()
    shards.close()
    return seen


@pytest.mark.quick
@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_wherever_the_batch_fails_nothing_moves_and_the_run_goes_on(sharding):
    size = 3
    # Two steps that are applied, without the failed one between them.
    straight = fs.local_world(size).run(steps, sharding, {(1, 0): (1, 0)})[0]
    for micro, at in itertools.product(range(2), range(2 * UNITS + 1)):
        _core.wait_set_delay(at + 1, 50)  # ranks meet in other orders each time
        try:
            ranks = fs.local_world(size).run(steps, sharding, {(1, micro): (at % size, at)})
        finally:
            _core.wait_set_delay(0, 0)
        assert all(rank == ranks[0] for rank in ranks), "equal on every rank"
        (first, *before), (skipped, *during), (last, *after) = ranks[0]
        assert (first.reason, skipped.reason, last.reason) == ("applied", "rank_skipped", "applied")
        assert not skipped and skipped.step == 1 and skipped.nonfinite is None
        ((who, why),) = skipped.skipped
        assert who == at % size and why.startswith(("before", "after"))
        assert during == before, "nothing moved"
        assert after == list(straight[2][1:]), "as if the step had not been"
        assert first.skipped == last.skipped == ()


def test_several_ranks_all_ranks_and_long_reasons(caplog):
    def rank(world, asking, reason):
        shards = fs.shard({"w": np.ones(5, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        bad = np.full(5, np.nan if world.rank == 0 else 1.0, np.float32)
        shards.units[0].reduce({"w": bad})
        if world.rank in asking:
            opt.skip(reason)
        result = opt.step()
        again = (shards.units[0].reduce({"w": np.ones(5, np.float32)}), opt.step())[1]
        return result, again.reason, shards.full("w").tolist(), opt.steps_skipped

    long = "no room für " + "ä" * 300
    told = long.encode()[:240].decode(errors="ignore")
    for asking in [(1,), (0, 2), (0, 1, 2)]:
        caplog.clear()
        for result, again, weights, count in fs.local_world(3).run(rank, asking, long):
            assert result.reason == "rank_skipped" and result.nonfinite is None
            assert result.skipped == tuple((r, told) for r in asking)
            assert again == "applied" and weights == [0.0] * 5 and count == 1
        assert f"rank {asking[0]} asked for it: no room f" in caplog.text


def test_too_many_skips_name_the_rank():
    def rank(world):
        shards = fs.shard({"w": np.ones(5, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0, max_skips=2)
        for _ in range(5):
            if world.rank == 1:
                opt.skip("a broken file")
            opt.step()

    with pytest.raises(fs.errors.NonFiniteError, match="rank 1 asked for it: a broken file"):
        fs.local_world(2).run(rank)


def test_too_late_or_no_text_or_dropped():
    def rank(world):
        shards = fs.shard({"w": np.ones(5, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        shards.units[0].reduce({"w": np.ones(5, np.float32)})
        with pytest.raises(TypeError, match="expected text, got ValueError"):
            opt.skip(ValueError("x"))
        opt.skip("forgotten by zero()")
        opt.zero()
        shards.units[0].reduce({"w": np.ones(5, np.float32)})
        assert opt.step().applied
        shards.units[0].reduce({"w": np.ones(5, np.float32)})
        opt.grad_norm()
        opt.skip("too late")
        with pytest.raises(RuntimeError, match="after grad_norm"):
            opt.step()

    fs.local_world(2).run(rank)


def test_a_skip_stands_behind_grad_norm_too():
    def rank(world):
        shards = fs.shard({"w": np.ones(5, np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0)
        shards.units[0].reduce({"w": np.ones(5, np.float32)})
        if world.rank == 0:
            opt.skip("early")
        opt.grad_norm(max_norm=1.0)
        return opt.step(max_norm=1.0).skipped

    assert fs.local_world(2).run(rank) == [((0, "early"),)] * 2


# ---- the native model ---------------------------------------------------------------------------

TINY = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "initializer_range": 0.1,
}  # fmt: skip


def ids(rank, step, micro, length=19):
    rng = np.random.default_rng([rank, step, micro])
    text = rng.integers(0, 61, (2, length + 1)).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def train(world, sharding, fails, precision="fp32", steps_n=3, micros=3):
    """Like ``steps``; fails(rank, step, micro) may raise, or give other inputs."""
    model = fs.models.Llama.from_config(
        TINY, world=world, sharding=sharding, seed=7, precision=precision
    )
    opt = fs.AdamW(model, lr=0.01)
    seen = []
    for step in range(steps_n):
        try:
            for micro in range(micros):
                inputs, targets = ids(world.rank, step, micro)
                inputs = fails(world.rank, step, micro, inputs)
                loss = model.forward_backward(inputs, targets)
                assert np.isfinite(loss.mean)
        except (ValueError, MemoryError) as error:
            opt.skip(f"{type(error).__name__}: {error}")
        result = opt.step(max_norm=1.0)
        seen.append((result, fs.weights_sha256(model), fs.state_sha256(model)))
    world.barrier()
    model.close()
    return seen


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_the_native_model_in_any_micro_batch(sharding):
    def fails(who, when, how):
        def answer(rank, step, micro, inputs):
            if rank not in who or (step, micro) != (1, when):
                return inputs
            if how == "data":
                raise MemoryError("no room for the batch")
            return np.full_like(inputs, 99)  # out of the vocabulary: refused inside

        return answer

    size = 3
    straight = fs.local_world(size).run(train, sharding, fails({0}, 0, "data"))[0]
    for when, (who, how) in itertools.product(
        range(3), [({1}, "data"), ({0}, "model"), ({0, 2}, "model"), ({0, 1, 2}, "data")]
    ):
        ranks = fs.local_world(size).run(train, sharding, fails(who, when, how))
        assert all(rank == ranks[0] for rank in ranks)
        (_, *before), (skipped, *during), (last, *after) = ranks[0]
        assert skipped.reason == "rank_skipped" and last.reason == "applied"
        assert [rank for rank, _ in skipped.skipped] == sorted(who)
        text = "no room for the batch" if how == "data" else "is 99: ids are between 0 and 60"
        assert all(text in why for _, why in skipped.skipped)
        assert during == before and after == list(straight[2][1:])


def test_any_allocation_of_a_larger_batch_that_fails():
    """Counted: the n-th allocation of the step fails on whichever rank it falls, until none does.

    The second step's sequences are longer, so that every rank makes room."""
    outcomes = []
    for nth in itertools.count(1):
        made = [0]

        def rank(world, nth=nth, made=made):
            model = fs.models.Llama.from_config(
                TINY, world=world, sharding=fs.Sharding(3, gather="copy"), seed=7
            )
            opt = fs.AdamW(model, lr=0.01)
            model.forward_backward(*ids(world.rank, 0, 0))
            opt.step()
            before = fs.weights_sha256(model), fs.state_sha256(model)
            world.barrier()
            if world.is_main:
                _core.alloc_fail_at(nth)
            world.barrier()
            try:
                model.forward_backward(*ids(world.rank, 1, 0, length=41))
            except MemoryError as error:
                opt.skip(str(error))
            world_ok = opt.step()
            made[0] = max(made[0], _core.alloc_fail_at(0))
            after = fs.weights_sha256(model), fs.state_sha256(model)
            assert (after == before) == (not world_ok.applied)
            model.forward_backward(*ids(world.rank, 2, 0, length=41))
            assert opt.step().applied
            world.barrier()
            model.close()
            return world_ok.reason

        reasons = fs.local_world(2).run(rank)
        assert reasons[0] == reasons[1]
        outcomes.append(reasons[0])
        if reasons[0] == "applied":
            break
    assert outcomes.count("rank_skipped") >= 4, outcomes

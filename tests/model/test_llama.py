"""The native model by itself: the same bits however it is sharded, threaded and checkpointed; what
is frozen, ignored and refused; initial weights; memory as planned; generation."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flatshard as fs
from flatshard import _core
from flatshard.models import Llama

# Odd sizes: no parameter divides evenly by 2 or 3 ranks.
SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TIED = {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}

Batch = tuple[NDArray[np.int32], NDArray[np.int32]]


def batch(seed: int, rows: int = 2, length: int = 20, vocab: int = 67) -> Batch:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    targets = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    targets[rng.random(targets.shape) < 0.2] = -100
    return ids, targets


def alone(run: Callable[[fs.World], Any], *, threads: int = 1) -> Any:
    return fs.local_world(1, threads=threads).run(run)[0]


def gradients(model: Llama, optimizer: Any = None) -> dict[str, NDArray[Any]]:
    """The summed gradient of every trainable parameter."""
    (optimizer or fs.SGD(model, lr=0.0)).grad_norm()
    return {
        p.name: model.shards.full(p.name, "grad") for p in model.shards.parameters if p.trainable
    }


def train(world: fs.World, config: Any, steps: int = 3, **options: Any) -> tuple[str, list[float]]:
    """A few steps on data that differs between ranks -> hash of the weights, losses."""
    model = Llama.from_config(config, world=world, **options)
    optimizer = fs.AdamW(model, lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        ids, targets = batch(100 * step + world.rank)
        losses.append(model.forward_backward(ids, targets).mean)
        assert optimizer.step(max_norm=1.0).applied
    return fs.weights_sha256(model), losses


# ---- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_gathers_and_checkpointing_give_the_same_bits(ranks: int, precision: str) -> None:
    def run(world: fs.World) -> set[str]:
        cases = [
            ({"stage": stage, "gather": gather}, checkpointing)
            for stage, gather, checkpointing in [
                (3, "view", False),
                (3, "copy", True),
                (2, "copy", False),
                (1, "view", True),
                (0, "copy", False),
                (0, "view", False),
            ]
        ]
        return {
            train(
                world,
                TIED,
                sharding=fs.Sharding(**sharding),
                precision=precision,
                checkpointing=checkpointing,
            )[0]
            for sharding, checkpointing in cases
        }

    hashes = set.union(*fs.local_world(ranks).run(run))
    assert len(hashes) == 1


def test_partitions_agree_without_clipping() -> None:
    def run(world: fs.World, partition: str) -> str:
        model = Llama.from_config(SMALL, world=world, sharding=fs.Sharding(partition=partition))
        optimizer = fs.AdamW(model, lr=1e-2)
        for step in range(2):
            model.forward_backward(*batch(10 * step + world.rank))
            optimizer.step()
        return fs.weights_sha256(model)

    flat, rows = (set(fs.local_world(3).run(run, p)) for p in ("flat", "per_parameter"))
    assert flat == rows
    assert len(flat) == 1


def test_bits_do_not_depend_on_threads() -> None:
    def run(world: fs.World) -> None:
        # Threads start late, and a small step may be over before they do: repeat the whole run
        # until every one of them has had a share.
        for _ in range(50):
            result = train(world, {**TIED, "intermediate_size": 600}, steps=2)
            results.append(result)
            if world._core.threads_used() == threads:
                return
        pytest.fail(f"{world._core.threads_used()} of {threads} threads took part")

    results: list[tuple[str, list[float]]] = []
    for threads in (1, 2, 3, 4):
        alone(run, threads=threads)
    assert all(result == results[0] for result in results)


SCRIPT = """
import json, sys
import flatshard as fs
from flatshard import blas
from test_llama import TIED, train

def run(world):
    # More rows of every matrix than one tile of the products has, and odd ones.
    config = {**TIED, "intermediate_size": 1100, "vocab_size": 1050}
    for _ in range(50):
        found = train(world, config, steps=1)
        if world._core.threads_used() == threads:
            return found
    raise SystemExit("threads that never ran prove nothing")

found = []
for threads in json.loads(sys.argv[1]):
    found.append(fs.local_world(1, threads=threads).run(run)[0])
print(json.dumps([blas.load(), fs._core.cpu_isa(), found]))
"""


def in_a_process(script: str, *arguments: str, **environment: str) -> str:
    """Runs a script in a process of its own; what it prints."""
    here = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(here), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def train_in_a_process(threads: list[int], **environment: str) -> tuple[str, str, list[Any]]:
    """Library and core, instruction set, results per threads."""
    said = in_a_process(SCRIPT, json.dumps(threads), **environment)
    library, isa, found = json.loads(said.splitlines()[-1])
    return library, isa, found


def test_bits_do_not_depend_on_threads_with_another_core_of_the_library() -> None:
    """Haswell's kernels compute a row differently in differently sized calls; our grid is fixed."""
    library, _, found = train_in_a_process([1, 2, 4], OPENBLAS_CORETYPE="Haswell")
    if "haswell" not in library.lower():
        pytest.skip(f"the library took another core: {library}")
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_instruction_sets_agree_on_the_whole_model(isa: str) -> None:
    try:
        _core.Kernels(isa)
    except NotImplementedError:
        pytest.skip(f"no {isa} here")
    _, best, want = train_in_a_process([1])
    if best == isa:
        pytest.skip(f"{isa} is the best here")
    _, used, got = train_in_a_process([1], FLATSHARD_CPU=isa)
    assert used == isa
    assert abs(got[0][1][0] / want[0][1][0] - 1.0) < 1e-6


def test_checkpointing_gives_the_same_gradients_and_holds_less() -> None:
    def run(world: fs.World, checkpointing: bool) -> tuple[dict[str, NDArray[Any]], int]:
        model = Llama.from_config(TIED, world=world, checkpointing=checkpointing)
        model.forward_backward(*batch(1, 3, 40))
        return gradients(model), world.memory()["activations"][0]

    (want, kept), (got, less) = (
        fs.local_world(1).run(run, checkpointing)[0] for checkpointing in (False, True)
    )
    assert less < 0.6 * kept
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        assert np.abs(want[name]).max() > 0, name


def test_two_ranks_do_what_one_does_with_the_whole_batch() -> None:
    def run(world: fs.World) -> tuple[dict[str, NDArray[Any]], list[float]]:
        model = Llama.from_config(TIED, world=world)
        optimizer = fs.SGD(model, lr=0.05, momentum=0.9)
        losses = []
        for step in range(20):
            ids, targets = batch(step % 2, rows=4)
            mine = slice(world.rank, None, world.size)
            losses.append(model.forward_backward(ids[mine], targets[mine]).mean)
            optimizer.step(max_norm=5.0)
        return {p.name: model.shards.full(p.name) for p in model.shards.parameters}, losses

    one = fs.local_world(1).run(run)[0]
    two = fs.local_world(2).run(run)[0]
    np.testing.assert_allclose(two[1], one[1], rtol=1e-5)
    assert one[1][-1] < one[1][0]
    for name, want in one[0].items():
        assert np.abs(two[0][name] - want).max() <= 1e-6 * np.abs(want).max(), name


def test_every_row_of_a_tied_head_moves_on_three_ranks() -> None:
    def run(world: fs.World) -> tuple[NDArray[Any], NDArray[Any]]:
        model = Llama.from_config(TIED, world=world)
        before = model.shards.full("lm_head.weight")
        optimizer = fs.AdamW(model, lr=1e-2)
        model.forward_backward(*batch(world.rank))
        optimizer.step()
        return before, model.shards.full("model.embed_tokens.weight")

    for before, after in fs.local_world(3).run(run):
        assert (before != after).any(axis=1).all()


# ---- precision ----------------------------------------------------------------------------------


def compare_with_rounded_weights() -> None:
    """bf16 beside fp32 with the same rounded weights: the same bits."""

    def run(world: fs.World, config: dict[str, Any]) -> None:
        low = Llama.from_config(config, world=world, precision="bf16", seed=3)
        full = Llama.from_config(config, world=world, seed=3)
        for p in full.shards.parameters:
            master = low.shards.full(p.name, "master")
            np.testing.assert_array_equal(master, full.shards.full(p.name))
            full.shards.set_full(p.name, low.shards.full(p.name).astype(np.float32))
        ids, targets = batch(5)
        np.testing.assert_array_equal(low.logits(ids), full.logits(ids))
        assert low.forward_backward(ids, targets) == full.forward_backward(ids, targets)
        want, got = gradients(full), gradients(low)
        for name in want:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)

    for config in (SMALL, TIED):
        fs.local_world(1).run(run, config)


def test_bf16_computes_with_rounded_weights_in_fp32() -> None:
    if _core.cpu_isa() != "avx512_bf16":
        compare_with_rounded_weights()
        return
    # Here products round their other operand too; without that instruction they do not.
    in_a_process("import test_llama; test_llama.compare_with_rounded_weights()",
                 FLATSHARD_CPU="avx512")  # fmt: skip
    with pytest.raises(AssertionError):
        compare_with_rounded_weights()


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_gradients_on_a_bf16_wire_are_rounded_once(config: dict[str, Any]) -> None:
    mixed = fs.MixedPrecision(param="float32", reduce="bfloat16")

    def run(world: fs.World, precision: Any) -> dict[str, NDArray[Any]]:
        model = Llama.from_config(config, world=world, precision=precision)
        model.forward_backward(*batch(5))
        return gradients(model)

    want, got = (fs.local_world(1).run(run, p)[0] for p in ("fp32", mixed))
    for name in want:
        assert (got[name] != want[name]).any(), name
        # A tied head's gradient is rounded when the head puts it and when the embedding adds.
        np.testing.assert_allclose(
            got[name], want[name], rtol=2**-8, atol=2**-8 * np.abs(want[name]).max()
        )


# ---- micro-batches ------------------------------------------------------------------------------


def test_micro_batches_add_up() -> None:
    def run(world: fs.World, sync: bool, stage: int) -> dict[str, NDArray[Any]]:
        model = Llama.from_config(TIED, world=world, sharding=fs.Sharding(stage=stage))
        for k in range(3):
            model.forward_backward(*batch(10 * world.rank + k), sync=sync or k == 2)
        return gradients(model)

    kept = fs.local_world(2).run(run, False, 1)[0]
    reduced = fs.local_world(2).run(run, True, 3)[0]

    def whole(world: fs.World) -> dict[str, NDArray[Any]]:
        model = Llama.from_config(TIED, world=world)
        batches = [batch(10 * rank + k) for rank in range(2) for k in range(3)]
        model.forward_backward(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))
        return gradients(model)

    for name, want in alone(whole).items():
        for got in (kept[name], reduced[name]):
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), name


def test_a_micro_batch_without_targets_gives_nothing() -> None:
    def run(world: fs.World) -> None:
        model = Llama.from_config(SMALL, world=world)
        ids, targets = batch(world.rank)
        if world.rank == 1:
            targets[:] = -100
        loss = model.forward_backward(ids, targets)
        assert (loss.local == 0.0) == (world.rank == 1)
        assert (loss.tokens == 0) == (world.rank == 1)
        assert loss.mean == world.broadcast(np.array([loss.local]))[0]
        result = fs.SGD(model, lr=0.1).step()
        assert result.applied
        assert result.count == (batch(0)[1] != -100).sum()

    fs.local_world(2).run(run)

    def all_ignored(world: fs.World) -> None:
        model = Llama.from_config(SMALL, world=world)
        ids, targets = batch(0)
        loss = model.forward_backward(ids, np.full_like(targets, -100))
        assert loss == (0.0, 0.0, 0)
        assert not any(g.any() for g in gradients(model).values())

    alone(all_ignored)


def test_sizes_may_change_from_call_to_call() -> None:
    def run(world: fs.World) -> None:
        model = Llama.from_config(TIED, world=world)
        fresh = Llama.from_config(TIED, world=world)
        for rows, length in [(1, 5), (3, 100), (2, 7), (1, 128), (1, 1), (3, 100)]:
            ids, targets = batch(rows * length, rows, length)
            targets[0, 0] = 1
            assert model.loss(ids, targets) == model.forward_backward(ids, targets)
            small = model.logits(ids[:1])
            np.testing.assert_array_equal(small, fresh.logits(ids[:1]))
        held = world.memory()["activations"]
        model.forward_backward(*batch(1, 2, 30))
        assert world.memory()["activations"] == held

    alone(run)


# ---- frozen -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "frozen"),
    [
        (SMALL, ["model.embed_tokens.weight", "model.layers.0.*"]),
        (SMALL, ["*norm*", "*.q_proj.*", "*.down_proj.*"]),
        (SMALL, ["model.*"]),
        (SMALL, ["lm_head.weight", "model.norm.weight"]),
        (TIED, ["lm_head.weight"]),
        (TIED, ["model.layers.*", "model.norm.weight"]),
    ],
    ids=["bottom", "kinds", "all but head", "head", "tied", "all but tied"],
)
def test_frozen_parameters_have_no_gradient_and_change_no_other(
    config: dict[str, Any], frozen: list[str]
) -> None:
    def run(world: fs.World, frozen: list[str]) -> tuple[dict[str, NDArray[Any]], list[str], int]:
        model = Llama.from_config(config, world=world, frozen=frozen)
        model.forward_backward(*batch(world.rank))
        names = [p.name for p in model.shards.parameters if not p.trainable]
        before = {name: model.shards.full(name) for name in names}
        optimizer = fs.SGD(model, lr=0.1)
        found = gradients(model, optimizer)
        assert optimizer.step().applied
        for name in names:
            np.testing.assert_array_equal(model.shards.full(name), before[name])
        return found, names, world.memory()["gradients"][1]

    want, _, all_slots = fs.local_world(2).run(run, [])[0]
    got, names, slots = fs.local_world(2).run(run, frozen)[0]
    assert names
    assert set(got) == set(want) - set(names)
    assert slots <= all_slots
    for name in got:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("config", "frozen"),
    [
        (SMALL, ["model.embed_tokens.weight", "model.layers.0.*"]),
        (SMALL, ["*norm*", "*.q_proj.*", "lm_head.weight"]),
        (TIED, ["lm_head.weight", "model.layers.1.*"]),
    ],
    ids=["bottom", "kinds", "tied"],
)
def test_frozen_between_steps_is_as_frozen_from_the_start(
    config: dict[str, Any], frozen: list[str], precision: str
) -> None:
    """Two steps frozen, two steps thawed: the first two as in a model that was opened so."""

    def run(world: fs.World, when: str) -> tuple[list[str], list[float]]:
        opened = frozen if when == "opened" else []
        reduce = {"fp32": "fp32", "bf16": fs.MixedPrecision(param="bfloat16", reduce="bfloat16")}
        model = Llama.from_config(config, world=world, frozen=opened, precision=reduce[precision])
        optimizer = fs.AdamW(model, lr=0.01, weight_decay=0.1)
        if when == "later":
            model.shards.freeze(frozen)
        hashes, norms = [], []
        for step in range(4):
            if step == 2 and when == "later":
                names = model.shards.frozen
                before = {name: model.shards.full(name) for name in names}
                model.shards.thaw(frozen)
            for micro in range(2):
                model.forward_backward(*batch(10 * step + 2 * micro + world.rank))
            norms.append(optimizer.step(max_norm=0.5).grad_norm)
            hashes.append(fs.weights_sha256(model))
        if when == "later":
            assert all((model.shards.full(name) != before[name]).any() for name in names)
        world.barrier()
        return hashes, norms

    for size in (1, 2):
        later = fs.local_world(size).run(run, "later")[0]
        opened = fs.local_world(size).run(run, "opened")[0]
        never = fs.local_world(size).run(run, "never")[0]
        assert later[0][:2] == opened[0][:2]
        assert later[1][:2] == opened[1][:2]
        assert later[0][2] != opened[0][2]
        assert never[0][0] != later[0][0]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    def run(world: fs.World) -> None:
        with pytest.raises(ValueError, match=r"no parameter matches model\.layer\.0"):
            Llama.from_config(SMALL, world=world, frozen=["*norm*", "model.layer.0.*"])

    alone(run)


# ---- initial weights ----------------------------------------------------------------------------


def test_initial_weights_depend_on_the_seed_alone() -> None:
    def run(world: fs.World, stage: int, partition: str, precision: str, seed: int) -> str:
        model = Llama.from_config(
            SMALL,
            world=world,
            sharding=fs.Sharding(stage=stage, partition=partition),
            precision=precision,
            seed=seed,
        )
        return fs.weights_sha256(model)

    cases = [(1, 3, "flat", "fp32"), (2, 3, "flat", "bf16"), (3, 0, "per_parameter", "fp32")]
    hashes = {h for ranks, *how in cases for h in fs.local_world(ranks).run(run, *how, 7)}
    assert len(hashes) == 1
    assert hashes != {alone(lambda world: run(world, 3, "flat", "fp32", 8))}


def test_initial_weights_have_the_spread_asked_for() -> None:
    def run(world: fs.World) -> None:
        model = Llama.from_config(
            {**SMALL, "hidden_size": 192, "vocab_size": 500, "initializer_range": 0.05,
             "attention_bias": True}, world=world,
        )  # fmt: skip
        for p in model.shards.parameters:
            value = model.shards.full(p.name)
            if "norm" in p.name:
                assert (value == 1.0).all(), p.name
            elif p.name.endswith("bias"):
                assert not value.any(), p.name
            else:
                into_stream = "o_proj" in p.name or "down_proj" in p.name
                std = 0.05 / np.sqrt(6) if into_stream else 0.05
                assert abs(value.std() / std - 1.0) < 0.05, p.name
                assert abs(value.mean()) < 0.05 * std + 5 * std / np.sqrt(value.size), p.name
        values = [model.shards.full(p.name).ravel()[:50] for p in model.shards.parameters]
        matrices = [v for v in values if v.std() > 0]
        assert all(
            abs(np.corrcoef(a, b)[0, 1]) < 0.7 for a, b in itertools.combinations(matrices, 2)
        )

    alone(run)


# ---- refused ------------------------------------------------------------------------------------


def test_wrong_ids_are_named() -> None:
    def run(world: fs.World) -> None:
        model = Llama.from_config(SMALL, world=world)
        ids, targets = batch(0)
        held = world.memory()["activations"]
        for place, value in [((1, 3), 67), ((0, 0), -1)]:
            bad = ids.copy()
            bad[place] = value
            with pytest.raises(ValueError, match=rf"inputs\[{place[0]}, {place[1]}\] is {value}: "):
                model.forward_backward(bad, targets)
        wrong = targets.copy()
        wrong[1, 2] = -99
        with pytest.raises(ValueError, match=r"targets\[1, 2\] is -99: .*-100"):
            model.forward_backward(ids, wrong)
        with pytest.raises(ValueError, match="4294967297"):
            model.forward_backward(ids.astype(np.int64) + 2**32 + 1 - ids, targets)
        with pytest.raises(TypeError, match="float64"):
            model.forward_backward(ids.astype(np.float64), targets)
        with pytest.raises(ValueError, match="two dimensions"):
            model.forward_backward(ids, targets[:, 1:])
        with pytest.raises(ValueError, match="empty"):
            model.forward_backward(ids[:0], targets[:0])
        with pytest.raises(ValueError, match=r"129 tokens: the model has 128 positions"):
            model.loss(np.zeros((1, 129), np.int32), np.zeros((1, 129), np.int32))
        with pytest.raises(ValueError, match="count"):
            model.forward_backward(ids, targets, count=-1)
        assert world.memory()["activations"] == held
        assert model.forward_backward(ids, targets).tokens > 0

    alone(run)


def test_a_closed_model_is_refused() -> None:
    def run(world: fs.World) -> None:
        model = Llama.from_config(SMALL, world=world)
        model.close()
        model.close()
        with pytest.raises(RuntimeError, match="closed"):
            model.logits(batch(0)[0])
        held = world.memory()
        assert all(held[name][0] == 0 for name in ("activations", "workspace", "weights"))

    alone(run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 7}, "head_dim is 7: it must be even"),
        ({"head_dim": 258}, "head_dim is 258"),
        ({"num_key_value_heads": 4}, r"num_attention_heads \(6\) is not a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1"),
        ({"rope_theta": 0.0}, "rope_theta is 0"),
    ],
)
def test_sizes_out_of_range_are_refused(change: dict[str, Any], words: str) -> None:
    def run(world: fs.World) -> None:
        before = world.memory()
        with pytest.raises(ValueError, match=words):
            Llama.from_config({**SMALL, **change}, world=world)
        assert world.memory() == before

    alone(run)


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_the_plan_is_what_is_held(
    config: dict[str, Any], checkpointing: bool, precision: str
) -> None:
    sharding = fs.Sharding(stage=3, gather="copy")
    planned = fs.plan(
        config,
        world_size=2,
        sharding=sharding,
        precision=precision,
        batch=(3, 40),
        checkpointing=checkpointing,
    )

    def run(world: fs.World) -> None:
        idle = world.memory()
        model = Llama.from_config(
            config,
            world=world,
            sharding=sharding,
            precision=precision,
            checkpointing=checkpointing,
        )
        optimizer = fs.AdamW(model, lr=1e-3)
        model.forward_backward(*batch(world.rank, 3, 40))
        optimizer.step()
        model.loss(*batch(0, 2, 9))
        held = world.memory()
        rows = planned.rank(world.rank)
        for name, nbytes in rows.items():
            mine = sum(held[name][:2]) - sum(idle[name][:2])
            assert mine == nbytes, name
            if name not in ("windows", "bookkeeping"):
                assert fs.memory(model)[name][0] == nbytes, name
        assert rows["activations"] > 0
        assert (rows["widened"] > 0) == (precision == "bf16")

    fs.local_world(2).run(run)


def test_memory_of_attention_grows_with_length_not_its_square() -> None:
    config = {**SMALL, "max_position_embeddings": 1 << 16}

    def total(length: int) -> int:
        return fs.plan(config, world_size=1, batch=(1, length)).rank_nbytes

    at = [total(1 << k) for k in (12, 13, 14)]
    assert (at[2] - at[1]) / (at[1] - at[0]) < 2.05


def test_whole_logits_do_not_exist() -> None:
    config = {**SMALL, "vocab_size": 4096, "max_position_embeddings": 4096}
    rows = fs.plan(config, world_size=1, batch=(4, 2048)).rank(0)
    assert rows["workspace"] + rows["activations"] < 4 * 2048 * 4096 * 4


# ---- generation ---------------------------------------------------------------------------------


def test_generation() -> None:
    def run(world: fs.World) -> NDArray[np.int32]:
        model = Llama.from_config({**SMALL, "initializer_range": 0.5}, world=world)
        prompt = batch(0, 2, 5)[0]
        greedy = model.generate(prompt, n=8)
        assert greedy.dtype == np.int32
        np.testing.assert_array_equal(greedy[:, :5], prompt)
        for at in range(5, 13):
            want = model.logits(greedy[:, :at])[:, -1].argmax(axis=-1)
            np.testing.assert_array_equal(greedy[:, at], want)
        np.testing.assert_array_equal(model.generate(prompt[1], n=8), greedy[1])
        drawn = [model.generate(prompt, n=20, temperature=2.0, seed=s) for s in (1, 1, 2)]
        np.testing.assert_array_equal(drawn[0], drawn[1])
        assert (drawn[0] != drawn[2]).any()
        long = model.generate(prompt, n=130, temperature=1.0)
        assert long.shape == (2, 135)
        assert model.generate(prompt, n=0).shape == (2, 5)
        with pytest.raises(ValueError, match="at least one token"):
            model.generate([[]], n=1)
        return long

    first, second = fs.local_world(2).run(run)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("window", [0, 7])
def test_cached_logits_are_those_of_the_whole_text(window: int) -> None:
    config = {**SMALL, "model_type": "mistral", "sliding_window": window or None,
              "initializer_range": 0.3}  # fmt: skip

    def run(world: fs.World) -> None:
        model = Llama.from_config(config, world=world, sharding=fs.Sharding(gather="copy"))
        ids = batch(0, 3, 100)[0]
        whole = model.logits(ids)
        before = world.memory()["cache"][0]
        model._core.cache_begin(3, 100)
        scores = np.empty((3, 67), np.float32)
        at = 0
        for length in (5, 1, 1, 60, 1, 32):
            model._core.cache_extend(np.ascontiguousarray(ids[:, at : at + length]), scores)
            at += length
            np.testing.assert_allclose(scores, whole[:, at - 1], rtol=1e-4, atol=1e-4)
        assert at == 100
        with pytest.raises(ValueError, match="1 more tokens for a cache that holds 100 of 100"):
            model._core.cache_extend(np.ascontiguousarray(ids[:, :1]), scores)
        with pytest.raises(ValueError, match="of 3 sequences"):
            model._core.cache_extend(np.ascontiguousarray(ids[:2, :1]), scores[:2])
        assert world.memory()["cache"][0] > before
        model._core.cache_end()
        assert world.memory()["cache"][0] == before == 0
        with pytest.raises(ValueError, match="128 positions"):
            model._core.cache_begin(1, 129)
        with pytest.raises(ValueError, match="of 0 sequences"):
            model._core.cache_extend(np.ascontiguousarray(ids[:, :1]), scores)
        np.testing.assert_array_equal(model.logits(ids), whole)

    fs.local_world(2).run(run)


def test_draws_follow_the_softmax() -> None:
    from flatshard.models.llama import _draw

    scores = np.tile(np.array([1.0, 0.0, -1.0, 2.0], np.float32), (40_000, 1))
    drawn = _draw(scores, 0.7, np.random.default_rng(0))
    p = np.exp(scores[0] / 0.7)
    counts = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(counts, p / p.sum(), atol=0.01)


def test_logits_see_no_later_token() -> None:
    def run(world: fs.World) -> None:
        model = Llama.from_config({**SMALL, "initializer_range": 0.3}, world=world)
        ids = batch(0, 2, 90)[0]
        changed = ids.copy()
        changed[:, 70:] = (changed[:, 70:] + 1) % 67
        want, got = model.logits(ids), model.logits(changed)
        np.testing.assert_array_equal(got[:, :70], want[:, :70])
        assert (got[:, 70:] != want[:, 70:]).any(axis=-1).all()

    alone(run)


def test_the_core_refuses_arrays_that_do_not_fit() -> None:
    def run(world: fs.World) -> None:
        model = Llama.from_config(SMALL, world=world)
        ids, targets = batch(0)
        with pytest.raises(ValueError, match="logits hold"):
            model._core.forward(ids, None, np.empty(7, np.float32), False)
        with pytest.raises(ValueError, match="without a loss"):
            model._core.forward(ids, targets, np.empty((2, 67), np.float32), True)
        with pytest.raises(TypeError):
            model._core.forward(ids.astype(np.int64), None, None, False)
        other = Llama.from_config({**SMALL, "vocab_size": 70}, world=world)
        with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight"):
            _core.Llama(other.shards._core, model.config.core(), False)

    alone(run)

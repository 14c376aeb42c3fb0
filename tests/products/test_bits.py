"""The same bits for one world size, partition and precision: at every stage, gather, number of
threads, and with ranks that are threads or processes."""

import json
import os
import pathlib
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest
from cases import CONFIG, Case, batches, pairs, product, run, share

import flatshard as fs

HERE = pathlib.Path(__file__).resolve().parent
SIZES = [1, 2, 3, 4, 5, 8]


#: What runs beyond the pairs: a seeded share of the product, or all of it.
SEED = int(os.environ.get("FLATSHARD_TEST_PRODUCT_SEED", "0"))
SHARES = [
    pytest.param(float(os.environ.get("FLATSHARD_TEST_SHARE", "0")), id="pairs"),
    pytest.param(1.0, id="all", marks=pytest.mark.full),
]


def one_each(results: list[tuple[Case, str, str, list[float]]]) -> dict[tuple[str, str], set]:
    """Hashes by what they may depend on; each set must have one member."""
    found = defaultdict(set)
    for case, weights, state, losses in results:
        found[case.bits].add((weights, state, tuple(losses)))
    return found


def test_pairs_hold_every_pair_of_values():
    cases, few = product(), pairs(product())
    assert len(few) < len(cases) / 4
    for i in range(len(Case._fields)):
        for j in range(i):
            assert {(c[i], c[j]) for c in few} == {(c[i], c[j]) for c in cases}


@pytest.mark.parametrize("part", SHARES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.timeout(280)
def test_threads_as_ranks(size, part):
    results = []
    for threads in (1, 2, 3):
        cases = [case for case in share(product(), SEED, part) if case.threads == threads]
        ranks = fs.local_world(size, threads=threads, timeout=120.0).run(run, cases)
        for rank in ranks:
            assert rank == ranks[0], "every rank sees the same"
        results += [(case, *result) for case, result in zip(cases, ranks[0], strict=True)]
    found = one_each(results)
    assert all(len(bits) == 1 for bits in found.values()), {k: len(v) for k, v in found.items()}
    for partition in ("flat", "per_parameter"):
        assert found[partition, "fp32"] != found[partition, "bf16"], "a precision shows"


@pytest.mark.parametrize("part", SHARES)
@pytest.mark.parametrize(("size", "threads"), [*((size, 1) for size in SIZES), (2, 2), (2, 3)])
@pytest.mark.timeout(280)
def test_processes_as_ranks(size, threads, part, tmp_path):
    out = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "flatshard.cli", "launch", "-n", str(size), str(HERE / "cases.py"),
         str(out), str(threads), str(SEED), str(part)],
        capture_output=True, text=True, timeout=270, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [(Case(*case), *rest) for case, *rest in json.loads(out.read_text())]
    assert {case.threads for case, *_ in results} == {threads}
    world = fs.local_world(size, threads=1, timeout=120.0)
    wanted = world.run(run, [case for case, *_ in results])[0]
    for (case, *result), want in zip(results, wanted, strict=True):
        assert result == list(want), case


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("partition", ["flat", "per_parameter"])
@pytest.mark.timeout(280)
def test_many_ranks_equal_one_with_the_whole_batch(size, partition):
    steps = 50

    def rank(world, sharding, ranks):
        model = fs.models.Llama.from_config(CONFIG, world=world, sharding=sharding, seed=7)
        opt = fs.SGD(model, lr=0.02, momentum=0.9)
        for step in range(steps):
            parts = [batches(r, step, 0) for r in ranks(world.rank)]
            model.forward_backward(*(np.concatenate(x) for x in zip(*parts, strict=True)))
            opt.step(max_norm=1.0)
        weights = {n: model.shards.full(n) for n in model.shards.names}
        world.barrier()
        model.close()
        return weights

    sharding = fs.Sharding(3, partition=partition)
    (alone,) = fs.local_world(1).run(rank, sharding, lambda r: range(size))
    together = fs.local_world(size, timeout=120.0).run(rank, sharding, lambda r: [r])
    assert any(np.abs(alone[n] - together[0][n]).max() > 0 for n in alone) or size == 1
    for weights in together:
        for name, want in alone.items():
            bound = 1e-6 * np.abs(want).max()
            np.testing.assert_allclose(weights[name], want, rtol=0, atol=bound, err_msg=name)


def test_every_row_of_a_tied_table_moves():
    # an odd vocabulary, three ranks, and a head that is the embedding: no row is left out or twice
    def rank(world):
        model = fs.models.Llama.from_config(CONFIG, world=world, seed=7)
        before = model.shards.full("model.embed_tokens.weight")
        opt = fs.AdamW(model, lr=0.01)
        model.forward_backward(*batches(world.rank, 0, 0))
        opt.step()
        return before, model.shards.full("lm_head.weight")

    for before, after in fs.local_world(3).run(rank):
        assert (before != after).any(axis=1).all()

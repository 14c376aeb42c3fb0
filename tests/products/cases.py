"""One product of cases: a small odd Llama trained a few steps under every sharding, hashed.

Run by the tests in a world of threads, and by itself as a rank of a world of processes:

    flatshard launch -n 3 tests/products/cases.py OUT THREADS SEED SHARE
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

import flatshard as fs

VOCAB, BATCH, LENGTH, STEPS = 61, 2, 19, 3

#: Odd sizes everywhere, grouped heads, a tied head with a vocabulary that no world size divides.
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}


class Case(NamedTuple):
    """One point of the product."""

    partition: str
    precision: str
    stage: int
    gather: str
    reshard: bool
    threads: int
    local: bool  # gradients of the first micro-batch stay local (stages 0 and 1)

    @property
    def bits(self) -> tuple[str, str]:
        """What the bits may depend on, the world size aside. Gradients kept local are added in
        another order, but two micro-batches of one rank are added in one order either way only
        when there is one rank: so it is part of the key."""
        return self.partition, self.precision + ("-local" if self.local else "")


def product() -> list[Case]:
    """Every case that is legal."""
    cases = itertools.product(
        ("flat", "per_parameter"), ("fp32", "bf16"), range(4), ("view", "copy"),
        (True, False), (1, 2, 3), (False, True),
    )  # fmt: skip
    return [
        case
        for case in map(Case._make, cases)
        if (case.reshard or (case.stage, case.gather) == (3, "copy"))
        and (not case.local or case.stage <= 1)
    ]


def pairs(cases: list[Case]) -> list[Case]:
    """A fixed few of the cases that hold every pair of values of any two fields."""
    wanted = {
        ((i, case[i]), (j, case[j]))
        for case in cases
        for i, j in itertools.combinations(range(len(case)), 2)
    }
    chosen = []
    while wanted:
        best = max(cases, key=lambda case: len(_pairs_of(case) & wanted))
        chosen.append(best)
        wanted -= _pairs_of(best)
    return chosen


def _pairs_of(case: Case) -> set[tuple[tuple[int, object], tuple[int, object]]]:
    return {((i, case[i]), (j, case[j])) for i, j in itertools.combinations(range(len(case)), 2)}


def share(cases: list[Case], seed: int, part: float) -> list[Case]:
    """The pairs, and a seeded part of the rest."""
    few = pairs(cases)
    rest = [case for case in cases if case not in few]
    return few + random.Random(seed).sample(rest, round(part * len(rest)))


def batches(rank: int, step: int, micro: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's tokens; some targets are ignored, a different number on each rank."""
    rng = np.random.default_rng([rank, step, micro])
    ids = rng.integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    targets = ids[:, 1:].copy()
    targets[0, : 2 + rank] = -100
    return ids[:, :-1], targets


def train(world: fs.World, case: Case, *, steps: int = STEPS) -> tuple[str, str, list[float]]:
    """(hash of weights, hash of moments, losses) after a few steps of two micro-batches."""
    model = fs.models.Llama.from_config(
        CONFIG,
        world=world,
        sharding=fs.Sharding(
            case.stage,
            partition=case.partition,
            gather=case.gather,
            reshard_after_forward=case.reshard,
        ),
        precision=case.precision,
        seed=7,
    )
    opt = fs.AdamW(model, lr=0.01, weight_decay=0.1, no_decay=["*norm*"])
    losses = []
    for step in range(steps):
        for micro in range(2):
            inputs, targets = batches(world.rank, step, micro)
            sync = micro == 1 or not case.local
            losses.append(model.forward_backward(inputs, targets, sync=sync).mean)
        assert opt.step(max_norm=0.5)
    hashes = fs.weights_sha256(model), fs.state_sha256(model)
    world.barrier()
    model.close()
    return (*hashes, losses)


def run(world: fs.World, cases: Iterable[Case]) -> list[tuple[str, str, list[float]]]:
    """Every case, one after the other, in one world."""
    return [train(world, case) for case in cases]


def main(arguments: list[str]) -> None:
    """A rank of a world of processes: runs the cases of one thread count, writes rank 0's
    results."""
    out, threads, seed, part = (
        arguments[0],
        int(arguments[1]),
        int(arguments[2]),
        float(arguments[3]),
    )
    cases = [case for case in share(product(), seed, part) if case.threads == threads]
    with fs.init(threads=threads, timeout=120.0) as world:
        results = run(world, cases)
        rank = world.rank
    if rank == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump([[case, *result] for case, result in zip(cases, results, strict=True)], file)


if __name__ == "__main__":
    main(sys.argv[1:])

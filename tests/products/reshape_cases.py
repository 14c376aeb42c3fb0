"""Save in one shape of job, load in another: the product, and what each side does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from cases import CONFIG, VOCAB

import flatshard as fs

SIZES = (1, 2, 3, 4, 5)
#: Sequences of a step over all ranks, shared out as evenly as they can be.
SEQUENCES, LENGTH = 6, 11
BEFORE, AFTER = 2, 5


class Shape(NamedTuple):
    """A job: its size, what a rank keeps, and how units are cut."""

    size: int
    stage: int
    partition: str


class Case(NamedTuple):
    """Saved in a shape and loaded in another; flat, so that pairs of values can be counted."""

    size: int
    stage: int
    partition: str
    to_size: int
    to_stage: int
    to_partition: str

    @property
    def saved(self) -> Shape:
        return Shape(*self[:3])

    @property
    def loaded(self) -> Shape:
        return Shape(*self[3:])


def product() -> list[Case]:
    """Every shape into every other."""
    shapes = list(itertools.product(SIZES, range(4), ("flat", "per_parameter")))
    return [Case(*a, *b) for a in shapes for b in shapes]


def build(world: fs.World, shape: Shape, *, seed: int = 7) -> tuple[fs.models.Llama, fs.AdamW]:
    """A tied model of odd sizes and an optimizer whose updates are not all sign."""
    model = fs.models.Llama.from_config(
        CONFIG,
        world=world,
        sharding=fs.Sharding(shape.stage, partition=shape.partition),  # type: ignore[arg-type]
        seed=seed,
    )
    return model, fs.AdamW(model, lr=0.01, eps=1e-4, weight_decay=0.1, no_decay=["*norm*"])


def steps(
    world: fs.World, model: fs.models.Llama, opt: fs.AdamW, which: Sequence[int]
) -> list[float]:
    """Losses of these steps; the batch of a step is the same for any number of ranks."""
    losses = []
    for step in which:
        ids = np.random.default_rng(step).integers(0, VOCAB, (SEQUENCES, LENGTH + 1), np.int32)
        mine = ids[world.rank :: world.size]
        losses.append(model.forward_backward(mine[:, :-1], mine[:, 1:]).mean)
        assert opt.step()
    return losses


def hashes(model: fs.models.Llama) -> tuple[str, str]:
    """Of weights and of moments, whatever the shape."""
    found = fs.weights_sha256(model), fs.state_sha256(model)
    model.shards.world.barrier()
    return found


def save(world: fs.World, folder: str, shape: Shape) -> tuple[tuple[str, str], list[float]]:
    """Trains, saves, goes on: (hashes at the save, losses after it)."""
    model, opt = build(world, shape)
    steps(world, model, opt, range(BEFORE))
    fs.checkpoint.save(folder, model, opt, step=BEFORE, user=list(shape))
    at_save = hashes(model)
    losses = steps(world, model, opt, range(BEFORE, BEFORE + AFTER))
    world.barrier()
    model.close()
    return at_save, losses


def load(world: fs.World, folder: str, shape: Shape) -> tuple[tuple[str, str], list[float], object]:
    """Loads over another model, goes on: (hashes as loaded, losses, user data)."""
    model, opt = build(world, shape, seed=8)
    loaded = fs.checkpoint.load(folder, model, opt)
    assert loaded.step == BEFORE == opt.steps_applied
    assert not (loaded.skipped or loaded.missing or loaded.unexpected or loaded.changed)
    as_loaded = hashes(model)
    losses = steps(world, model, opt, range(BEFORE, BEFORE + AFTER))
    world.barrier()
    model.close()
    return as_loaded, losses, loaded.user

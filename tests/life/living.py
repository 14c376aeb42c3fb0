"""A small model, its data, and what a process holds: shared by tests and the scripts they start."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import flatshard as fs

CONFIG = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
SHAPES = {"a.w": (13, 5), "b.w": (7, 9), "c.w": (130,)}


def ids(*seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    text = np.random.default_rng(seed).integers(0, 61, (2, 12)).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def llama(world: Any, **how: Any) -> fs.models.Llama:
    return fs.models.Llama.from_config(CONFIG, world=world, seed=7, **how)


def arrays(world: Any, **how: Any) -> fs.Shards:
    rng = np.random.default_rng(3)
    params = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    return fs.shard(params, world, **how)


def reduce_all(shards: fs.Shards, *seed: int) -> None:
    for unit in reversed(shards.units):
        rng = np.random.default_rng([len(unit.name), *seed])
        grads = {n: rng.standard_normal(SHAPES[n]).astype(np.float32) for n in unit.names}
        unit.reduce(grads)


def everything(world: Any, folder: str | None = None) -> None:
    """One use of everything: a native model, arrays, parts, world memory, a save; all closed."""
    model = llama(world, sharding=fs.Sharding(3, gather="copy"), precision="bf16")
    opt = fs.AdamW(model, lr=0.01)
    model.forward_backward(*ids(world.rank))
    assert opt.step(max_norm=1.0)
    model.generate(ids(0)[0][0], n=3)
    shards = arrays(world, sharding=fs.Sharding(1))
    moved = fs.SGD(shards, lr=0.1, momentum=0.9)
    reduce_all(shards, world.rank)
    assert moved.step()
    with shards.units[0].gathered(write=True) as weights:
        weights["a.w"][:] = 1.0
    if folder is not None:
        fs.checkpoint.save(folder, model, opt, step=1, keep=1, background=True).wait()
    part = world.split(0)
    part.barrier()
    part.close()
    there = world.symmetric(1000)
    world.all_reduce(there)
    del there
    world.barrier()
    model.close()
    shards.close()


def held() -> dict[str, int]:
    """What this process holds: descriptors, mappings (of world memory too), threads, Python
    objects, and bytes of its own and of shared memory. Pages of libraries are not counted: its
    share of them grows when another process that has them ends."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as file:
        maps = file.read().splitlines()
    with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
        rows = dict(line.split(":", 1) for line in file.read().splitlines()[1:])
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "maps": len(maps),
        "world maps": sum("flatshard-" in line for line in maps),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(gc.get_objects()),
        "pss": sum(int(rows[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem")),
    }


def grows(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What is more than it was. The matrix library's buffers and the allocator's arenas settle at
    some megabytes; a leak of a kilobyte a round would be seen in the mappings, objects or files."""
    slack: dict[str, int] = {"pss": 4 << 20, "maps": 8, "objects": 20}
    return {
        name: (before[name], after[name])
        for name in before
        if after[name] > before[name] + slack.get(name, 0)
    }


def settle(use: Callable[[], object], *, first: int, then: int) -> dict[str, tuple[int, int]]:
    """Uses something ``first`` times, then ``then`` times more; what grew in the latter."""
    for _ in range(first):
        use()
    before = held()
    for _ in range(then):
        use()
    return grows(before, held())

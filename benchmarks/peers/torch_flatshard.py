"""The training of torch_world with flatshard.torch in the place of DDP or FSDP2."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.peers.torch_world import Training, memory

__all__ = ["Sharded", "open_sharded"]


class Sharded(Training):
    """One optimizer step, clipping and AdamW included, and how much of it is our own work.

    stage : of ZeRO.
    part : "step", or "own": a sample is then the time in hooks, reduce, clipping and step alone.
    """

    def __init__(
        self, config: dict[str, Any], batch: int, length: int, stage: int, part: str, precision: str
    ) -> None:
        import flatshard as fs
        import flatshard.torch as ft

        self.ft = ft
        self.world = fs.init()
        self.rank, self.size = self.world.rank, self.world.size
        torch.set_num_threads(self.world.threads)
        model = self.build(config)
        self.baseline = memory() - sum(p.nbytes for p in model.parameters())
        ft.fully_shard(model, world=self.world, sharding=stage, mp_policy=precision)
        self.model = model
        self.autocast = False
        self.optimizer = ft.AdamW(model.parameters(), lr=1e-3)
        self.begin(batch, length)
        self.part = part
        self.own = 0.0
        if part == "own":
            self.watch_hooks()

    def watch_hooks(self) -> None:
        from flatshard.torch import _grads

        for name in ("on_gradient", "on_end"):
            setattr(_grads.Gradients, name, self.timed(getattr(_grads.Gradients, name)))

    def timed(self, function: Any) -> Any:
        """A function whose time is added to our own."""

        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.own += time.perf_counter() - started

        return call

    def update(self) -> None:
        started = time.perf_counter()
        self.ft.clip_grad_norm_(self.model, 1.0)
        assert self.optimizer.step().applied
        self.optimizer.zero_grad()
        self.own += time.perf_counter() - started

    def barrier(self) -> None:
        self.world.barrier()

    def sample(self) -> float:
        self.own = 0.0
        whole = super().sample()
        return self.own if self.part == "own" else whole

    def close(self) -> None:
        self.world.close()


def open_sharded(**arguments: Any) -> Sharded:
    return Sharded(**arguments)

"""The tail of a mixed-precision step in PyTorch, on one process."""

from __future__ import annotations

import os
import time

import torch

__all__ = ["Step", "open_step"]


class Step:
    """Casts bf16 gradients, clips their norm, updates fp32 masters, casts these to bf16."""

    def __init__(self, numel: int) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.manual_seed(0)
        self.weight = torch.randn(numel).bfloat16()
        self.grad = (torch.randn(numel) * 1e-3).bfloat16()
        self.master = torch.nn.Parameter(self.weight.float())
        self.master.grad = self.grad.float()
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([self.master], lr=1e-3, weight_decay=0.1, fused=True)

    def step(self) -> None:
        assert self.master.grad is not None
        self.master.grad.copy_(self.grad)
        torch.nn.utils.clip_grad_norm_([self.master], 1.0, foreach=True)
        self.optimizer.step()
        self.weight.copy_(self.master.detach())

    def verify(self) -> None:
        before = self.master.detach().clone()
        self.step()
        moved = (self.master.detach() - before).abs().max()
        assert 0 < float(moved) < 3e-3, f"the largest move is {moved}"

    def sample(self) -> float:
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started

    def close(self) -> None:
        pass


def open_step(numel: int) -> Step:
    return Step(numel)

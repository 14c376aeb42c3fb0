"""Single operations in PyTorch on one device: the optimizer's step, a sum, products, attention.

They run in the process that measures: starting another takes longer than all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

__all__ = ["Operation", "give_back", "open_operation"]


def step(numel: int) -> Callable[[], object]:
    """Fused AdamW on fp32 masters, and the bf16 weights made from them."""
    master = torch.nn.Parameter(torch.randn(numel, device=device()))
    master.grad = torch.randn_like(master)
    weight = torch.empty(numel, dtype=torch.bfloat16, device=device())
    optimizer = torch.optim.AdamW([master], lr=1e-3, fused=torch.cuda.is_available())

    def run() -> None:
        optimizer.step()
        weight.copy_(master.detach())

    return run


def reduce(numel: int, sources: int) -> Callable[[], object]:
    """The fp32 sum of bf16 arrays, and its norm."""
    src = [torch.randn(numel, device=device()).bfloat16() for _ in range(sources)]

    def run() -> torch.Tensor:
        total = src[0].float()
        for x in src[1:]:
            total += x
        return torch.linalg.vector_norm(total)

    return run


def product(m: int, n: int, k: int) -> Callable[[], object]:
    a = torch.randn(m, k, device=device()).bfloat16()
    b = torch.randn(n, k, device=device()).bfloat16()
    return lambda: a @ b.T


def attention(
    batch: int, length: int, q_heads: int, kv_heads: int, head_dim: int, backward: bool
) -> Callable[[], object]:
    def draw(heads: int) -> torch.Tensor:
        x = torch.randn(batch, heads, length, head_dim, device=device()).bfloat16()
        return x.requires_grad_(backward)

    q, k, v = draw(q_heads), draw(kv_heads), draw(kv_heads)

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q_heads != kv_heads
        )

    if not backward:
        return forward
    seen = forward()
    dout = torch.randn_like(seen)
    # The backward alone, as ours: the graph is kept.
    return lambda: torch.autograd.grad(seen, (q, k, v), dout, retain_graph=True)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


MAKERS: dict[str, Callable[..., Callable[[], object]]] = {
    "step": step,
    "reduce": reduce,
    "product": product,
    "attention": attention,
}


class Operation:
    """times : how often a sample runs it, so that starting it does not count."""

    def __init__(self, name: str, what: str, times: int, **sizes: Any) -> None:
        self.name, self.times = name, times
        self.run = MAKERS[what](**sizes)

    def verify(self) -> None:
        self.run()
        wait()

    def sample(self) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(self.times):
            self.run()
        wait()
        return (time.perf_counter() - started) / self.times

    def close(self) -> None:
        del self.run
        give_back()


def give_back() -> None:
    """Others measure in the same memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def open_operation(name: str, what: str, times: int, **sizes: Any) -> Operation:
    return Operation(name, what, times, **sizes)

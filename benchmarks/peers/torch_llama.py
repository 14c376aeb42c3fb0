"""The same Llama in PyTorch, on one device: bf16 weights with fp32 masters, fused AdamW.

Attention is scaled_dot_product_attention, each layer is compiled where asked for (one compilation
serves all of them), and checkpointing keeps each layer's input alone, as ours does. It runs in the
process that measures: importing PyTorch and compiling are paid once.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.torch_cuda import give_back

__all__ = ["Training", "open_training"]


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def turn(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions: halves of each head, in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = width // self.heads
        self.attention_norm = Norm(width, 1e-6)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = Norm(width, 1e-6)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, length, -1, self.dim).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = turn(q, cosines, sines), turn(k, cosines, sines)
        seen = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, config: dict[str, Any], length: int, checkpointing: bool) -> None:
        super().__init__()
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(width, 1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.checkpointing = checkpointing
        dim = width // config["num_attention_heads"]
        rates = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), rates)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, self.cosines, self.sines, use_reentrant=False)
            else:
                x = layer(x, self.cosines, self.sines)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Training:
    """Whole steps: forward, backward, clip, AdamW on the masters, weights rounded from them."""

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        batch: int,
        length: int,
        checkpointing: bool,
        compiled: bool,
        steps: int,
    ) -> None:
        self.name, self.steps = name, steps
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = Llama(config, length, checkpointing)
        self.weights = list(self.model.parameters())
        self.masters = [nn.Parameter(weight.detach().clone()) for weight in self.weights]
        for weight in self.weights:
            weight.data = weight.data.bfloat16()
        fused = self.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, fused=fused)
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        if compiled:
            for layer in self.model.layers:
                layer.compile()
        self.shape, self.vocabulary = (batch, length), config["vocab_size"]

    def batch(self) -> torch.Tensor:
        return torch.randint(self.vocabulary, self.shape, device=self.device)

    def step(self, ids: torch.Tensor) -> float:
        targets = torch.full_like(ids, -100)
        targets[:, :-1] = ids[:, 1:]
        loss = self.model(ids, targets)
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(self.gradients, [weight.grad for weight in self.weights])
            for weight in self.weights:
                weight.grad = None
            nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
            self.optimizer.step()
            torch._foreach_copy_([weight.data for weight in self.weights], self.masters)
        return float(loss.detach())

    def verify(self) -> None:
        ids = self.batch()
        losses = [self.step(ids) for _ in range(3)]
        start = math.log(self.vocabulary)
        assert abs(losses[0] - start) < 0.1 * start, f"first loss {losses[0]}, not near {start}"
        assert losses[2] < losses[0], f"the loss does not fall: {losses}"

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def sample(self) -> float:
        batches = [self.batch() for _ in range(self.steps)]
        self.wait()
        started = time.perf_counter()
        for ids in batches:
            self.step(ids)
        self.wait()
        return (time.perf_counter() - started) / self.steps

    def close(self) -> None:
        for name in ("model", "weights", "masters", "gradients", "optimizer"):
            delattr(self, name)
        give_back()


def open_training(**arguments: Any) -> Training:
    return Training(**arguments)

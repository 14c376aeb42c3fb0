"""Small modules, batches for them, and their losses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]

#: torch's generator is the process's, and ranks may be threads.
_building = threading.Lock()


def mlp(seed: int) -> nn.Module:
    """Odd sizes, a scalar and an empty Parameter."""
    with _building:
        return _mlp(seed)


def _mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 29), nn.Tanh(), nn.Linear(29, 5)
            )
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.nothing = nn.Parameter(torch.empty(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x) * self.scale + self.nothing.sum()

    return Scaled()


def mlp_batch(seed: int, rows: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 17, generator=g), "y": torch.randn(rows, 5, generator=g)}


def mlp_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(module(batch["x"]), batch["y"])


def llama(seed: int) -> nn.Module:
    """Embedding and head are one Parameter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=32, tie_word_embeddings=True,
        initializer_range=0.2, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def token_batch(seed: int, rows: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(2, 64, (rows, 12), generator=g)}


def llama_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = module(**batch, labels=batch["input_ids"]).loss
    return loss


def bert(seed: int) -> nn.Module:
    """No dropout; biases away from zero (a key's bias has no gradient but rounding noise)."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, max_position_embeddings=32, initializer_range=0.2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = BertForMaskedLM(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return module


def t5(seed: int) -> nn.Module:
    """One embedding under four names; position biases that all layers of a stack use."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        vocab_size=64, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
        initializer_factor=0.5,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


#: name -> (build, batch, loss)
MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int, int], Batch], Loss]] = {
    "mlp": (mlp, mlp_batch, mlp_loss),
    "llama": (llama, token_batch, llama_loss),
    "bert": (bert, token_batch, llama_loss),
    "t5": (t5, token_batch, llama_loss),
}


def rows(batch: Batch, begin: int, end: int) -> Batch:
    return {name: value[begin:end] for name, value in batch.items()}


def largest_difference(a: Any, b: Any) -> float:
    """Over tensors: the largest difference, in parts of the reference's largest element."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if y.numel():
            scale = y.detach().abs().max().item() or 1.0
            worst = max(worst, (x.detach().float() - y.detach().float()).abs().max().item() / scale)
    return worst

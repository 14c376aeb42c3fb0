"""Small models and data for the cases of tests/hf."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def llama(seed: int = 1) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            bos_token_id=None, eos_token_id=None, tie_word_embeddings=True,
        )
    )  # fmt: skip


def t5(seed: int = 1) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def bert(seed: int = 1) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=32, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def sequences(count: int, seed: int = 2) -> list[dict[str, Any]]:
    """Token sequences; of each another number of labels counts."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        tokens = torch.randint(32, (8,), generator=g)
        labels = tokens.clone()
        labels[: i % 6] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def classified(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Token sequences whose label says whether the first token is below 16."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(32, (count, 6), generator=g)
    return [{"input_ids": row, "labels": int(row[0] < 16)} for row in tokens]


def batch_of(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([torch.as_tensor(r[key]) for r in rows]) for key in rows[0]}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().float().clone() for name, p in model.named_parameters()}


def digest(values: dict[str, torch.Tensor]) -> str:
    h = hashlib.sha256()
    for name in sorted(values):
        h.update(values[name].contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference, by tensor, as a share of the largest magnitude. A tensor that is
    rounding noise (the bias of keys, whose gradient is zero) counts as of magnitude 1e-3."""
    assert one.keys() == other.keys()
    return max(
        float((one[n] - other[n]).abs().max() / other[n].abs().max().clamp_min(1e-3)) for n in one
    )

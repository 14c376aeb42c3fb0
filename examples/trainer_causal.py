"""A causal language model with the Trainer: the same script under FSDP's and DeepSpeed's files.

    python examples/trainer_causal.py                                          # alone
    torchrun --nproc-per-node 2 examples/trainer_causal.py --fsdp true \\
        --fsdp_config examples/data/fsdp.json
    flatshard launch -n 2 examples/trainer_causal.py --deepspeed examples/data/ds_config_zero3.json
    accelerate launch --config_file examples/data/accelerate_fsdp.yaml examples/trainer_causal.py

The script is a stock one but for the import of ``Trainer`` and ``TrainingArguments``; the options
are those of ``TrainingArguments``. All give the same weights, bit for bit. The text is that
of the sentence pairs beside it, as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    set_seed,
)

from flatshard.hf import Trainer, TrainingArguments

TEXT = Path(__file__).parent / "data" / "sentence_pairs.tsv"


@dataclass
class ModelArguments:
    """The model and the data."""

    hidden_size: int = field(default=128, metadata={"help": "width"})
    layers: int = field(default=4, metadata={"help": "number of layers"})
    length: int = field(default=128, metadata={"help": "bytes of an example"})
    model: str | None = field(default=None, metadata={"help": "a folder to start from"})
    patience: int | None = field(default=None, metadata={"help": "stop early after this many"})
    resume: bool = field(default=False, metadata={"help": "from the last complete checkpoint"})


class Bytes(Dataset[dict[str, Any]]):  # type: ignore[misc]
    """A text in pieces of equal length."""

    def __init__(self, text: bytes, length: int) -> None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.pieces = tokens[: len(tokens) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    lines = [line for line in TEXT.read_bytes().splitlines() if not line.startswith(b"#")]
    text = b"\n".join(b" ".join(line.split(b"\t")[1:3]) for line in lines[1:])
    cut = len(text) * 9 // 10
    if model_args.model:
        model = LlamaForCausalLM.from_pretrained(model_args.model)
    else:
        width = model_args.hidden_size
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=width,
                intermediate_size=width * 8 // 3 // 8 * 8,
                num_hidden_layers=model_args.layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=1024,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    patience = model_args.patience
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Bytes(text[:cut], model_args.length),
        eval_dataset=Bytes(text[cut:], model_args.length),
        callbacks=[EarlyStoppingCallback(patience)] if patience is not None else None,
    )
    result = trainer.train(resume_from_checkpoint=model_args.resume or None)
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(
            f"{result.global_step} steps: loss {result.training_loss:.6f}  "
            f"held-out {metrics['eval_loss']:.6f}"
        )
    trainer.end()


if __name__ == "__main__":
    main()

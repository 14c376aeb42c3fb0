"""Translates numbers from English to German with a small T5 and beam search.

    python examples/seq2seq_t5.py --output_dir runs/t5
    flatshard launch -n 2 examples/seq2seq_t5.py --output_dir runs/t5 --sharded_ddp

"four hundred forty two" becomes "vier hundert zwei und vierzig": the pairs are made by the script,
words are tokens, and the order of tens and ones changes. A stock script of ``Seq2SeqTrainer`` but
for two imports; evaluation generates with four beams and counts what is right to the last word.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import HfArgumentParser, T5Config, T5ForConditionalGeneration, set_seed

from flatshard.hf import Seq2SeqTrainer, Seq2SeqTrainingArguments

ENGLISH = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
ENGLISH += "fifteen sixteen seventeen eighteen nineteen"
ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
GERMAN = "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
GERMAN += "fünfzehn sechzehn siebzehn achtzehn neunzehn"
GERMAN_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"
OTHERS = "hundred thousand hundert tausend und ein"
PAD, END = 0, 1


def english(n: int) -> str:
    """A number up to 999,999 in English words."""
    if n < 20:
        return ENGLISH.split()[n]
    if n < 100:
        rest = f" {english(n % 10)}" if n % 10 else ""
        return ENGLISH_TENS.split()[n // 10 - 2] + rest
    size, word = (1000, "thousand") if n >= 1000 else (100, "hundred")
    rest = f" {english(n % size)}" if n % size else ""
    return f"{english(n // size)} {word}{rest}"


def german(n: int, *, last: bool = True) -> str:
    """A number in German, its parts as words of their own."""
    if n < 20:
        return "ein" if n == 1 and not last else GERMAN.split()[n]
    if n < 100:
        front = f"{german(n % 10, last=False)} und " if n % 10 else ""
        return front + GERMAN_TENS.split()[n // 10 - 2]
    size, word = (1000, "tausend") if n >= 1000 else (100, "hundert")
    rest = f" {german(n % size, last=last)}" if n % size else ""
    return f"{german(n // size, last=False)} {word}{rest}"


WORDS = ["<pad>", "</s>", *dict.fromkeys(
    f"{ENGLISH} {ENGLISH_TENS} {GERMAN} {GERMAN_TENS} {OTHERS}".split()
)]  # fmt: skip
NUMBER = {word: n for n, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    return [*(NUMBER[word] for word in text.split()), END]


def decode(tokens: Any) -> str:
    return " ".join(WORDS[t] for t in tokens if t not in (PAD, END, -100))


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pads a batch."""

    def padded(name: str, value: int) -> torch.Tensor:
        longest = max(len(row[name]) for row in rows)
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    inputs = padded("input_ids", PAD)
    return {
        "input_ids": inputs,
        "attention_mask": (inputs != PAD).long(),
        "labels": padded("labels", -100),
    }


def right(predicted: Any) -> dict[str, float]:
    """The share of translations that are right to the last word."""
    pairs = zip(predicted.predictions, predicted.label_ids, strict=True)
    return {"exact": float(np.mean([decode(got) == decode(want) for got, want in pairs]))}


@dataclass
class DataArguments:
    """The data and the model."""

    train_pairs: int = field(default=2000, metadata={"help": "pairs to train on"})
    eval_pairs: int = field(default=500, metadata={"help": "pairs held out"})
    largest: int = field(default=9999, metadata={"help": "largest number"})
    width: int = field(default=64, metadata={"help": "of the model"})


def main() -> None:
    parser = HfArgumentParser((DataArguments, Seq2SeqTrainingArguments))
    data, args = parser.parse_args_into_dataclasses()
    args.predict_with_generate = True
    args.generation_num_beams = args.generation_num_beams or 4
    args.generation_max_length = args.generation_max_length or 20
    set_seed(args.seed)
    wanted = data.train_pairs + data.eval_pairs
    numbers = random.Random(args.seed).sample(range(data.largest + 1), wanted)
    rows = [{"input_ids": encode(english(n)), "labels": encode(german(n))} for n in numbers]
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(WORDS),
            d_model=data.width,
            d_kv=data.width // 4,
            d_ff=4 * data.width,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=END,
        )
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=rows[: data.train_pairs],
        eval_dataset=rows[data.train_pairs :],
        data_collator=collate,
        compute_metrics=right,
    )
    result = trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        sample = rows[data.train_pairs]
        print(f"example: {decode(sample['input_ids'])} -> {decode(sample['labels'])}")
        print(
            f"{result.global_step} steps: loss {result.training_loss:.6f}  held-out "
            f"{metrics['eval_loss']:.6f}  right {metrics['eval_exact']:.3f} of {data.eval_pairs}"
        )
    trainer.end()


if __name__ == "__main__":
    main()

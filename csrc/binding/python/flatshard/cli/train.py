"""``flatshard train MODEL --data F -n RANKS ...``: trains a model, on the ranks it starts itself.

Started by ``flatshard launch``, torchrun, mpirun or srun, a process is one rank and trains at once.
Started by a person, it checks what can be checked without allocating, starts the ranks, and waits.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..models.options import SAVE_SIGNALS, TrainConfig
from ..models.report import write_result

__all__ = ["main"]

DESCRIPTION = """\
Trains a Llama-family model on text or tokens, sharded over the ranks of this machine. Ends with a
folder that holds a resumable checkpoint, the model in Hugging Face's layout (model/),
metrics.jsonl, loss.png and a sample of text. Ctrl-C saves and ends with status 130; a second one
ends at once."""


def parser() -> argparse.ArgumentParser:
    """The options; each is a field of TrainConfig, and so are the defaults."""
    default = TrainConfig(model="")
    it = argparse.ArgumentParser(
        prog="flatshard train",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(group: Any, name: str, text: str, **options: Any) -> None:
        field = name.lstrip("-").replace("-", "_")
        value = getattr(default, field)
        if options.get("action") != "store_true":
            options.setdefault("type", type(value) if value is not None else str)
            options.setdefault("metavar", field[0].upper())
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            if value is not None and shown != "":
                text += f" (default: {shown})"
        group.add_argument(name, dest=field, default=value, help=text.replace("%", "%%"), **options)

    it.add_argument(
        "model", metavar="MODEL", help="a size (small, 125m, ...), config.json or folder"
    )

    data = it.add_argument_group("data")
    add(
        data,
        "--data",
        "text file, folder, .jsonl, .npy or .bin, or 'stdlib': Python's own sources",
        metavar="F",
    )
    add(data, "--tokenizer", "bytes, or a tokenizer.json", metavar="F")
    add(data, "--glob", "file names to read in a folder", nargs="+", type=str, metavar="PATTERN")
    add(
        data,
        "--exclude",
        "file and folder names to leave out",
        nargs="+",
        type=str,
        metavar="PATTERN",
    )
    add(data, "--encoding", "of text files")
    add(data, "--token-dtype", "of .bin files: uint8, uint16 or int32")
    add(data, "--cache", "folder to keep tokens in", metavar="DIR")
    add(data, "--holdout", "part held out for evaluation", metavar="P")
    add(data, "--seed", "of the weights and the order of the data")

    ranks = it.add_argument_group("ranks and memory")
    ranks.add_argument(
        "-n",
        "--ranks",
        type=int,
        default=None,
        metavar="N",
        help="ranks to start on this machine (default: 1)",
    )
    ranks.add_argument(
        "--ranks-as",
        choices=("processes", "threads"),
        default="processes",
        help="what a rank is (default: processes)",
    )
    add(ranks, "--threads", "compute threads of a rank (default: its share of the cores)", type=int)
    add(ranks, "--stage", "0: everything whole, 1: state sharded, 2: gradients too, 3: weights too")
    add(ranks, "--gather", "auto, view (one copy of the weights on the host) or copy")
    add(ranks, "--partition", "flat or per_parameter")
    add(ranks, "--precision", "fp32 or bf16 (with fp32 masters)")
    add(
        ranks,
        "--activation-checkpointing",
        "compute activations again in backward",
        action="store_true",
    )

    step = it.add_argument_group("steps")
    add(step, "--batch", "sequences of a rank's micro-batch")
    add(step, "--length", "tokens of a sequence", metavar="T")
    add(step, "--accumulate", "micro-batches of a step")
    add(step, "--steps", "steps of the whole run", metavar="K")
    add(step, "--optimizer", "adamw, adam or sgd")
    add(step, "--lr", "learning rate after the warm-up")
    add(step, "--warmup", "steps of linear warm-up", metavar="K")
    add(step, "--schedule", "constant, linear or cosine")
    add(step, "--betas", "of Adam", nargs=2, type=float, metavar=("B1", "B2"))
    add(step, "--eps", "of Adam")
    add(step, "--weight-decay", "of all but norms and biases", metavar="W")
    add(step, "--max-norm", "clip the gradient to this norm; 0: do not", metavar="X")

    run = it.add_argument_group("run")
    add(run, "--out", "folder of the run", metavar="DIR")
    add(run, "--save-every", "steps between checkpoints; 0: only at the end", metavar="K")
    add(run, "--keep", "checkpoints that stay", metavar="K")
    add(run, "--eval-every", "steps between evaluations; 0: only at the end", metavar="K")
    add(run, "--eval-sequences", "held-out sequences of an evaluation", metavar="K")
    add(run, "--resume", "go on from the newest checkpoint in --out", action="store_true")
    add(
        run,
        "--reschedule",
        "with --resume: allow other --steps, --lr, --warmup, --schedule",
        action="store_true",
    )
    add(
        run,
        "--save-on",
        "signals that save and end with status 0 and stopped.json",
        nargs="+",
        choices=SAVE_SIGNALS,
        type=str,
        metavar="SIGNAL",
    )
    add(run, "--json", "write the result as one object, on failure too", metavar="FILE")
    add(run, "--prompt", "of the sample at the end", metavar="TEXT")
    add(run, "--sample-tokens", "length of the sample; 0: none", metavar="K")
    add(run, "--temperature", "of the sample")
    return it


def config_of(options: argparse.Namespace) -> TrainConfig:
    """The configuration that parsed options mean."""
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name not in ("ranks", "ranks_as")
    }
    return TrainConfig(**values)


def main(arguments: Sequence[str]) -> int:
    """Trains as one rank, or starts the ranks; returns 0, or 130 after Ctrl-C."""
    it = parser()
    options = it.parse_args(arguments)
    config = config_of(options)
    if launched():
        if options.ranks is not None:
            raise ConfigError(
                "-n starts ranks, and this process already is a rank of a job; leave out -n"
            )
        return status_of(train(config))
    ranks = 1 if options.ranks is None else options.ranks
    if config.json:
        Path(config.json).unlink(missing_ok=True)
    try:
        if ranks < 1:
            raise ConfigError(f"-n {ranks}: expected at least 1 rank")
        config.check()
        check_before(config, ranks)
        if ranks == 1:
            return status_of(train(config))
        if options.ranks_as == "threads":
            return status_of(train_threads(config, ranks))
        status = start_ranks(arguments, ranks)
    except BaseException as error:
        if config.json:
            write_result(config.json, {"error": sentence(error)}, replace=False)
        raise
    if status not in (0, INTERRUPTED) and config.json:
        # The ranks write their own result; one that was killed could not.
        write_result(config.json, {"error": f"the ranks ended with status {status}"}, replace=False)
    return status

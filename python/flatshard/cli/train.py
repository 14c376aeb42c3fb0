"""``flatshard train MODEL --data F -n RANKS ...``: trains a model, on the ranks it starts itself.

Started by ``flatshard launch``, torchrun, mpirun or srun, a process is one rank and trains at once.
Started by a person, it checks what can be checked without allocating, starts the ranks, and waits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flatshard

from .. import config as configuration
from .._start import Place, find_place
from ..config.deepspeed import AUTO_NAMES
from ..config.native import train_options
from ..errors import ConfigError
from ..models import data
from ..models.folder import RunFolder
from ..models.options import SAVE_SIGNALS, TrainConfig
from ..models.report import TrainResult, reason, write_result
from ..models.run import check_model
from ..models.stop import StopRequest
from ..models.train import train
from .env import memory
from .launch import launch
from .plan import of_run

__all__ = ["main"]

INTERRUPTED, BAD_USAGE = 130, 2  # a rank has said what is wrong
# Ranks that are threads wait for each other as long as ranks that are processes do.
THREADS_TIMEOUT_S = 1800.0

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
    ranks.add_argument(
        "--config",
        dest="configuration",
        metavar="F",
        help="an fsdp_config, a DeepSpeed JSON or an Accelerate YAML: what it says is the default "
        "of the options below",
    )
    add(ranks, "--device", "cpu, cuda (each rank on the GPU of its number) or cuda:N", metavar="D")
    add(ranks, "--threads", "compute threads of a rank (default: its share of the cores)", type=int)
    add(ranks, "--stage", "0: everything whole, 1: state sharded, 2: gradients too, 3: weights too")
    add(ranks, "--gather", "auto, view (one copy of the weights on the host) or copy")
    add(ranks, "--partition", "flat or per_parameter")
    add(
        ranks,
        "--precision",
        "fp32, bf16 or fp16 (with fp32 masters), bf16-split, bf16-pure or bf16-pure-sr",
    )
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
    add(
        step,
        "--warmup",
        "steps of linear warm-up (default: a tenth of them, at most 100)",
        type=int,
        metavar="K",
    )
    add(step, "--schedule", "constant, linear or cosine")
    add(step, "--betas", "of Adam", nargs=2, type=float, metavar=("B1", "B2"))
    add(step, "--eps", "of Adam")
    add(step, "--weight-decay", "of all but norms and biases", metavar="W")
    add(step, "--max-norm", "clip the gradient to this norm; 0: do not", metavar="X")

    run = it.add_argument_group("run")
    add(run, "--out", "folder of the run", metavar="DIR")
    add(run, "--save-every", "steps between checkpoints; 0: only at the end", metavar="K")
    add(run, "--keep", "checkpoints that stay", metavar="K")
    add(run, "--check-every", "steps between comparisons of the ranks' copies", metavar="K")
    add(run, "--eval-every", "steps between evaluations; 0: only at the end", metavar="K")
    add(run, "--eval-sequences", "held-out sequences of an evaluation", metavar="K")
    add(run, "--resume", "go on from the newest checkpoint in --out", action="store_true")
    add(
        run,
        "--reschedule",
        "with --resume: allow other --steps, --lr, --warmup, --schedule, --batch, --accumulate",
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
    add(run, "--trace", "write the ranks' last operations, for ui.perfetto.dev", metavar="FILE")
    add(run, "--prompt", "of the sample at the end", metavar="TEXT")
    add(run, "--sample-tokens", "length of the sample; 0: none", metavar="K")
    add(run, "--temperature", "of the sample")
    return it


def config_of(options: argparse.Namespace) -> TrainConfig:
    """The configuration that parsed options mean."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name not in ("ranks", "ranks_as", "configuration")
    }
    return TrainConfig(**values)


def parse(arguments: Sequence[str], place: Place) -> argparse.Namespace:
    """The options. With --config, what the file says comes before the defaults, and what is said
    on the command line before the file."""
    it = parser()
    options = it.parse_args(arguments)
    if options.configuration is None:
        return options
    settings = configuration.read(
        options.configuration,
        world_size=options.ranks or place.size,
        auto=dict.fromkeys(AUTO_NAMES, configuration.LATER),
    )
    settings.check_world(options.ranks or place.size)
    values, left = train_options(settings)
    it.set_defaults(**values)
    if place.rank == 0 and place.launcher != "flatshard launch":
        print(settings.table())
        print("".join(f"not taken over: {text}\n" for text in left), flush=True)
    return it.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Trains as one rank, or starts the ranks; returns 0, or 130 after Ctrl-C."""
    place = find_place()
    options = parse(arguments, place)
    config = config_of(options)
    if place.launcher != "nobody":
        if options.ranks not in (None, place.size):
            raise ConfigError(
                f"-n {options.ranks}, and this process already is a rank of the {place.size} that "
                f"{place.launcher} started; leave out -n"
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
        rank = [sys.executable, "-u", "-m", "flatshard.cli", "train", *arguments]
        status = launch(rank, ranks, threads=config.threads, agreed=(INTERRUPTED, BAD_USAGE))
    except BaseException as error:
        if config.json:
            write_result(config.json, {"error": reason(error)}, replace=False)
        raise
    if status not in (0, INTERRUPTED) and config.json:
        # The ranks write their own result; one that was killed could not.
        write_result(config.json, {"error": f"the ranks ended with status {status}"}, replace=False)
    return status


def check_before(config: TrainConfig, ranks: int) -> None:
    """What can be said before a rank is started: every rank would say the same, W times."""
    RunFolder(config.out).check(config)
    of_run(config, ranks, budget=memory()[1])
    if config.tokenizer == "bytes" or config.cache is not None:
        # Reading bytes is quick; with another tokenizer the ranks find out.
        alone = SimpleNamespace(rank=0, size=ranks)
        tokens = data.tokens(
            config.data, world=alone, batch=config.batch, length=config.length,
            tokenizer=config.tokenizer, holdout=config.holdout, glob=config.glob,
            exclude=config.exclude, encoding=config.encoding, token_dtype=config.token_dtype,
            cache=config.cache,
        )  # fmt: skip
        check_model(config, tokens)


def train_threads(config: TrainConfig, ranks: int) -> TrainResult:
    """Ranks that are threads of this process; this thread takes the signals for all of them."""
    with StopRequest(config.save_on) as stop:
        world = flatshard.local_world(
            ranks, timeout=THREADS_TIMEOUT_S, threads=config.threads, device=config.device
        )
        results = world.run(lambda one: train(config, world=one, stop=stop))
    return results[0]


def status_of(result: TrainResult) -> int:
    """0, or 130 after Ctrl-C."""
    return INTERRUPTED if result.interrupted == "SIGINT" else 0

"""``flatshard convert SOURCE DIR``: what another system saved, as a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from .. import checkpoint
from ..errors import ConfigError

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Writes the checkpoint and says what became of what.

    Parameters
    ----------
    arguments : sequence of str
        The command's words.

    Returns
    -------
    int
        0; failures are exceptions.
    """
    parser = argparse.ArgumentParser(
        prog="flatshard convert",
        description="Makes a checkpoint of what another system saved, optimizer state included. "
        "Runs nothing that a file holds.",
        allow_abbrev=False,
    )
    parser.add_argument("source", help="the other system's folder, or one file of weights")
    parser.add_argument("directory", help="a run's folder; gets step-NNNNNN")
    parser.add_argument(
        "--step", type=int, help="of the checkpoint (default: what the source says)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="of every weight and moment (default: as they are)",
    )
    parser.add_argument(
        "--rule",
        choices=("SGD", "Adam", "AdamW", "Lion", "Adagrad"),
        help="the optimizer, where the source does not tell it",
    )
    parser.add_argument("--optimizer", help="a file of optimizer state that lies elsewhere")
    parser.add_argument(
        "--names", help="a JSON list of parameter names in the order of an optimizer's numbers"
    )
    parser.add_argument(
        "--tie", action="append", default=[], metavar="ALIAS=NAME", help="two names of one weight"
    )
    parser.add_argument(
        "--leave", action="append", default=[], metavar="PATTERN", help="tensors to leave out"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be written")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.step is not None and options.step < 0:
        raise ConfigError(f"--step {options.step}: a whole number from 0 was expected")
    report = checkpoint.convert(
        options.source,
        None if options.dry_run else options.directory,
        step=options.step,
        dtype=options.dtype,
        rule=options.rule,
        optimizer=options.optimizer,
        names=None if options.names is None else _names(options.names),
        ties=dict(_tie(word) for word in options.tie),
        leave=options.leave,
    )
    print(json.dumps(asdict(report), indent=1) if options.json else report)
    return 0


def _names(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            names = json.load(file)
    except ValueError as error:
        raise ConfigError(f"--names {path}: not JSON: {error}") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"--names {path}: a list of names was expected")
    return names


def _tie(word: str) -> tuple[str, str]:
    alias, equals, name = word.partition("=")
    if not (alias and equals and name):
        raise ConfigError(f"--tie {word}: ALIAS=NAME was expected")
    return alias, name

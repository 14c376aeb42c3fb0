"""``flatshard sample DIR --prompt ..``: lets a trained model write."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from ..models.config import load_config
from ..models.tokenizer import load_tokenizer
from ..models.writing import write

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Prints the prompt and what follows it."""
    parser = argparse.ArgumentParser(
        prog="flatshard sample",
        description="Prints what a model writes after a prompt.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", metavar="DIR", help="folder of a run, or of a model in Hugging Face's layout"
    )
    parser.add_argument("--prompt", default="def ", metavar="TEXT", help="(default: 'def ')")
    parser.add_argument("--tokens", type=int, default=200, metavar="K", help="(default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T",
        help="0: always the likeliest token (default: 0.7)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the choice of tokens (default: 0)")
    parser.add_argument(
        "--tokenizer", metavar="F", help="bytes, or a tokenizer.json (default: the folder's own)"
    )
    parser.add_argument(
        "--context", type=int, metavar="K",
        help="tokens seen at once (default: the length of the run, else what the model allows)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        raise ConfigError(f"--tokens {options.tokens}: expected at least 1")
    if options.context is not None and options.context < 2:
        raise ConfigError(f"--context {options.context}: expected at least 2")
    folder = model_folder(Path(options.folder))
    tokenizer = load_tokenizer(options.tokenizer or folder)
    ids = tokenizer.encode(options.prompt).astype(np.int32)
    if ids.size == 0:
        raise ConfigError("--prompt is empty: the model goes on from at least one token")

    import flatshard

    world = flatshard.init()
    most = load_config(folder).max_position_embeddings
    model = flatshard.models.Llama.from_pretrained(
        folder, world=world, sharding=flatshard.Sharding(), precision="fp32"
    )
    written = write(
        model,
        ids,
        n=options.tokens,
        length=min(options.context or trained_length(folder) or most, most),
        temperature=options.temperature,
        seed=options.seed,
    )
    text = tokenizer.decode(written.tolist())
    model.close()
    if world.rank == 0:
        sys.stdout.write(text.rstrip("\n") + "\n")
    return 0


def trained_length(folder: Path) -> int | None:
    """The length of the sequences a run was trained on, where a model still lies in its run."""
    try:
        run = json.loads((folder.parent / "run.json").read_text("utf-8"))
        return max(2, int(run["config"]["length"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def model_folder(folder: Path) -> Path:
    """The folder with config.json: the one given, or the ``model`` in that of a run."""
    for place in (folder, folder / "model"):
        if (place / "config.json").is_file():
            return place
    if not folder.exists():
        raise ConfigError(f"{str(folder)!r}: no such folder")
    what = (
        "the run in it has not ended yet: resume it first"
        if (folder / "run.json").is_file()
        else "give the folder of a run, or of a model in Hugging Face's layout"
    )
    raise ConfigError(f"{str(folder)!r} holds no config.json, nor does {folder.name}/model; {what}")

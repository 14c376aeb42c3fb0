"""``flatshard export SOURCE DIR``: a checkpoint's weights as a Hugging Face folder."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence

from .. import checkpoint
from ..errors import ConfigError

__all__ = ["main"]

#: What stands beside weights in a model's folder. config.json is in the checkpoint itself.
BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


def main(arguments: Sequence[str]) -> int:
    """Writes the folder.

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
        prog="flatshard export",
        description="Writes a checkpoint's weights as Hugging Face safetensors.",
        allow_abbrev=False,
    )
    parser.add_argument("source", help="a run's folder or one checkpoint; the newest counts")
    parser.add_argument("directory", help="gets model.safetensors, and config.json where known")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="of every weight; float32 is the master where there is one (default: the dtype that "
        "the model computes in)",
    )
    parser.add_argument(
        "--force", action="store_true", help="write into a folder that is not empty"
    )
    options = parser.parse_args(arguments)
    if not options.force and os.path.isdir(options.directory) and os.listdir(options.directory):
        raise ConfigError(
            f"{options.directory} is there already and not empty; name another, or say --force to "
            "replace the weights in it"
        )
    checkpoint.export(options.source, options.directory, dtype=options.dtype)
    copied = []
    for path in _beside(options.source):
        name = os.path.basename(path)
        target = os.path.join(options.directory, name)
        if name not in copied and not os.path.exists(target):
            shutil.copyfile(path, target)
            copied.append(name)
    beside = f", with {', '.join(copied)}" if copied else ""
    print(f"wrote {os.path.join(options.directory, 'model.safetensors')}{beside}")
    return 0


def _beside(source: str) -> Iterator[str]:
    """Files that describe the model, in the source, beside it, or in a run's model folder."""
    source = os.path.abspath(source)
    parent = os.path.dirname(source)
    for folder in (source, os.path.join(source, "model"), parent, os.path.join(parent, "model")):
        for name in BESIDE:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                yield path

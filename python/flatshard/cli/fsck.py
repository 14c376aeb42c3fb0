"""``flatshard fsck DIR``: are the checkpoints in a folder whole?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from .. import checkpoint

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Reads every byte and names what is damaged.

    Parameters
    ----------
    arguments : sequence of str
        The command's words.

    Returns
    -------
    int
        0 when all is whole, 1 when something is damaged.
    """
    parser = argparse.ArgumentParser(
        prog="flatshard fsck",
        description="Checks every byte of the checkpoints in a folder against their checksums.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", help="a run's folder, one checkpoint, or a model's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = checkpoint.verify(options.directory)
    steps = checkpoint.steps(options.directory)
    if options.json:
        print(json.dumps({"steps": steps, "damage": [asdict(d) for d in found]}, indent=1))
        return 1 if found else 0
    for damage in found:
        print(f"step {damage.step}: {damage}" if damage.step is not None else str(damage))
    damaged = {damage.step for damage in found}
    whole = [str(step) for step in steps if step not in damaged]
    if steps:
        print(f"whole: step {', '.join(whole)}" if whole else "no checkpoint is whole")
    elif not found:
        print("headers and sizes are right; files of this kind carry no checksums")
    return 1 if found else 0

"""Runs Python in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import flatshard

DEADLINE = 280.0


def run(words: list[str], folder: Path, **variables: str) -> str:
    """Runs Python with these words; its output."""
    package = str(Path(flatshard.__file__).parent.parent)
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **offline, "PYTHONPATH": package, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout

"""Start-up: what a script pays before its first line of work, and up to its first step."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.harness import Case, Contender, Settings, Suite

__all__ = ["SUITE"]

# Each prints the seconds of its last part, measured inside the process, interpreter excluded.
TIMED = """
import time
started = time.perf_counter()
{work}
print(time.perf_counter() - started)
"""

FIRST_STEP = """
import numpy as np, flatshard as fs
{mark}
model = fs.models.Llama.from_config("tiny", world=fs.init(), sharding=fs.Sharding(stage=3))
optimizer = fs.AdamW(model, lr=1e-3)
tokens = np.zeros((1, 32), dtype=np.int32)
model.forward_backward(tokens, tokens)
assert optimizer.step().applied
"""


@dataclasses.dataclass
class Script:
    """A Python program in a fresh interpreter."""

    name: str
    text: str

    def verify(self) -> None:
        assert self.sample() > 0

    def sample(self) -> float:
        done = subprocess.run(
            [sys.executable, "-c", self.text], capture_output=True, text=True, timeout=300
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: {done.stderr[-2000:]}")
        return float(done.stdout.split()[-1])

    def close(self) -> None:
        pass


def importing(package: str) -> Contender | None:
    if importlib.util.find_spec(package) is None:
        return None
    return Script(f"import {package}", TIMED.format(work=f"import {package}"))


def cases(settings: Settings) -> Sequence[Case]:
    packages = ["flatshard", "numpy", *(["torch"] if settings.peers and not settings.smoke else [])]
    after_import = FIRST_STEP.format(mark="started = time.perf_counter()")
    steps = {
        "import, first world, first step": FIRST_STEP.format(mark=""),
        "first world and first step alone": after_import,
    }
    return [
        Case(
            "import",
            [lambda package=package: importing(package) for package in packages],  # type: ignore[misc]
            1.0,
            "import",
        ),
        Case(
            "start-up of a script with a tiny model",
            [
                lambda name=name, work=work: Script(name, TIMED.format(work=work))  # type: ignore[misc]
                for name, work in steps.items()
            ],
            1.0,
            "start",
        ),
    ]


SUITE = Suite("imports", "import, first world, first step", cases)

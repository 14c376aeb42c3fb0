"""``flatshard demo``: plan, train, kill, resume and damage a run, in under a minute.

Every figure is measured in the run that prints it, and every claim is checked: one that does not
hold is printed as such, and the exit status says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__, _core, checkpoint
from ..errors import FlatshardError
from ..plan import plan
from ..policy import Sharding
from .demo_job import Job, events_of
from .env import processor

__all__ = ["main"]

#: Sequences of a step over all ranks: 2 and 3 ranks share them out without a rest.
GLOBAL_BATCH = 6
STEPS, KILLED_AT, SAVE_EVERY, COMPARED = 40, 20, 5, 5
#: Of a loss, relative, on another number of ranks: gradients are added in another order, and in
#: bf16 a weight, or what is multiplied with it, may then be rounded the other way.
RESUMED_TOLERANCE = 1e-5
JOB_DEADLINE_S = 120.0
POLL_S = 0.001
KILLED = 128 + int(signal.SIGKILL)


class DemoError(FlatshardError):
    """A job of the demo did not do what it was started for; what follows would mean nothing."""


class Story:
    """Prints the lines, and counts the claims that hold and those that do not."""

    def __init__(self) -> None:
        self.held = 0
        self.failed: list[str] = []

    def say(self, label: str, text: str) -> None:
        """A line; a text of several lines is indented."""
        for line in text.splitlines():
            print(f"{label:<10}{line}", flush=True)
            label = ""

    def claim(self, holds: bool, words: str) -> None:
        """Count a claim; one that does not hold is printed."""
        if holds:
            self.held += 1
        else:
            self.failed.append(words)
            self.say("", f"FAILED: {words}")


def main(arguments: Sequence[str]) -> int:
    """Runs the demo.

    Parameters
    ----------
    arguments : sequence of str
        The command's words.

    Returns
    -------
    int
        0 when every claim held, 1 when one did not, 2 where ranks cannot be processes.
    """
    parser = argparse.ArgumentParser(
        prog="flatshard demo",
        description="Plans, trains, kills, resumes and damages a small run on two ranks of this "
        "machine, in under a minute. Every figure is measured and every claim checked.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", metavar="DIR", help="keep the files there (default: a temporary folder)"
    )
    options = parser.parse_args(arguments)
    if not hasattr(os, "memfd_create"):
        print(
            "flatshard demo kills a rank, so ranks must be processes: Linux only. Elsewhere "
            "'flatshard train ... -n 2 --ranks-as threads' trains",
            file=sys.stderr,
        )
        return 2
    story = Story()
    with contextlib.ExitStack() as stack:
        if options.out is None:
            above = stack.enter_context(tempfile.TemporaryDirectory(prefix="flatshard-demo-"))
        else:
            above = options.out
            os.makedirs(above)
        _tell(story, Path(above))
    seconds = _seconds_since_start()
    if story.failed:
        print(f"\n{len(story.failed)} of {story.held + len(story.failed)} claims did not hold")
        return 1
    print(f"\nall {story.held} claims held; {seconds:.1f} s in all")
    return 0


def _tell(story: Story, folder: Path) -> None:
    name = processor() or "processor unknown"
    cores = _core.cpu_count()
    story.say(
        "machine",
        f"{name}, {cores} core{'s' if cores != 1 else ''}, {_core.cpu_isa()}; "
        f"flatshard {__version__}",
    )
    whole = _train(story, folder)
    saved = folder / "checkpoints"
    good = _kill(story, folder, saved)
    _resume(story, folder, saved, good, whole)
    _damage(story, folder, saved, whole)


# -- jobs ------------------------------------------------------------------------------------------


class Run:
    """A job that has ended, or is being watched: its ranks' events."""

    def __init__(self, folder: Path, name: str, ranks: int, **options: Any) -> None:
        self.folder, self.name, self.ranks = folder / name, name, ranks
        self.folder.mkdir()
        self.job = Job(str(self.folder), GLOBAL_BATCH // ranks, **options)
        self.status: int | None = None

    def start(self, watch: Callable[[], bool] = lambda: False) -> Run:
        """Run the job to its end; ``watch`` is called over and over until it gives True."""
        words = [sys.executable, "-m", "flatshard.cli", "launch", "-n", str(self.ranks)]
        # A file of its own beside the results, as a user's is: reports name lines of it.
        script = self.folder.parent / "demo.py"
        shutil.copyfile(Path(__file__).with_name("demo_job.py"), script)
        words += [str(script), self.job.text()]
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        package = str(Path(__file__).resolve().parents[2])
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, (package, clean.get("PYTHONPATH"))))
        with open(self.folder / "log", "wb") as log:
            launcher = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean
            )
        deadline, watching = time.monotonic() + JOB_DEADLINE_S, True
        try:
            while (status := launcher.poll()) is None:
                if time.monotonic() > deadline:
                    raise DemoError(f"{self.name}: did not end in {JOB_DEADLINE_S:.0f} s")
                watching = watching and not watch()
                time.sleep(POLL_S if watching else 10 * POLL_S)
        finally:
            if launcher.poll() is None:
                launcher.terminate()  # it ends the ranks; killed, the kernel ends them
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(10.0)
                launcher.kill()
                launcher.wait()
        self.status = status
        return self

    def expect(self, status: int) -> Run:
        """DemoError, with the end of what the ranks printed, if the job ended otherwise."""
        if self.status != status:
            log = (self.folder / "log").read_text(errors="replace")[-2000:]
            raise DemoError(f"{self.name}: ended with status {self.status}, not {status}:\n{log}")
        return self

    def events(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        """A rank's events of a kind."""
        return [e for e in events_of(str(self.folder), rank) if e["event"] == event]

    def one(self, event: str, rank: int = 0) -> dict[str, Any]:
        """The only event of its kind."""
        found = self.events(event, rank)
        if len(found) != 1:
            raise DemoError(f"{self.name}: {len(found)} events {event!r} of rank {rank}, not 1")
        return found[0]

    def losses(self) -> dict[int, float]:
        """Step to mean loss over the ranks."""
        return {e["step"]: e["loss"] for e in self.events("step")}

    def hashes(self) -> dict[int, str]:
        """Step to hash of the weights."""
        return {e["step"]: e["weights"] for e in self.events("hash")}

    def seconds(self) -> float:
        """Of all steps."""
        return float(self.one("trained")["seconds"])


# -- the five parts --------------------------------------------------------------------------------


def _train(story: Story, folder: Path) -> Run:
    """Plan against measured memory; the run that nothing interrupts; the same at stage 0."""
    saves = tuple(range(SAVE_EVERY, KILLED_AT, SAVE_EVERY))
    run = Run(folder, "whole", 2, steps=STEPS, hash_at=(*saves, STEPS))
    job = run.job
    planned = plan(
        job.model,
        world_size=2,
        sharding=Sharding(job.stage),
        precision=job.precision,
        batch=(job.batch, job.length),
    )
    run.start().expect(0)
    told = [run.one("memory", rank) for rank in range(2)]
    off = sum(
        abs(nbytes - planned.rank(rank).get(name, 0))
        for rank in range(2)
        for name, nbytes in told[rank]["held"].items()
    )
    host, mine = planned.host, planned.rank(0)
    state = sum(mine[name] for name in ("master", "moments", "accumulators"))
    story.say(
        "plan",
        f"{job.model} Llama, {told[0]['params'] / 1e6:.1f}M parameters, 2 ranks, stage "
        f"{job.stage}, {job.precision}\n{host['weights'] / 1e6:.1f} MB weights/host, "
        f"{state / 1e6:.1f} MB state/rank, {planned.host_nbytes / 1e6:.1f} MB in all; "
        f"measured: {'the same, ' if off == 0 else ''}{off} bytes off",
    )
    story.claim(off == 0, "the plan is what the ranks hold, to the byte")

    losses = run.losses()
    other = Run(folder, "stage-0", 2, steps=STEPS, hash_at=(STEPS,), stage=0).start().expect(0)
    same = other.losses() == losses and other.hashes()[STEPS] == run.hashes()[STEPS]
    tokens = STEPS * GLOBAL_BATCH * job.length
    story.say(
        "train",
        f"step 1..{STEPS}  loss {losses[1]:.2f} -> {losses[STEPS]:.2f}   "
        f"{tokens / run.seconds():,.0f} tokens/s   "
        f"[stage 0: {'same bits' if same else 'other bits'}, {other.seconds():.1f} s; "
        f"stage {job.stage}: {run.seconds():.1f} s]",
    )
    story.claim(losses[STEPS] < losses[1] - 1.0, "the loss falls by more than 1")
    story.claim(same, "stage 0 has the same losses and weights, bit for bit")
    return run


def _kill(story: Story, folder: Path, saved: Path) -> int:
    """SIGKILL from outside; what the survivor says; the last good step."""
    run = Run(folder, "killed", 2, steps=STEPS, checkpoints=str(saved), save_every=SAVE_EVERY)
    victim: dict[str, int] = {}

    def watch() -> bool:
        begun = run.events("begin", rank=1)
        if not begun or begun[-1]["step"] < KILLED_AT:
            return False
        victim["pid"] = int(run.one("start", rank=1)["pid"])
        os.kill(victim["pid"], signal.SIGKILL)
        return True

    run.start(watch).expect(KILLED)
    step = run.events("begin", rank=1)[-1]["step"]
    story.say("kill", f"rank 1 (pid {victim['pid']}) is killed in step {step} (kill -9)")
    text = str(run.one("lost", rank=0)["text"])
    steps = checkpoint.steps(saved)
    good = steps[0] if steps else 0
    shown = text.replace(f"{folder}{os.sep}", "")
    story.say("", f"PeerLost: {shown}\nLast good checkpoint: step {good}.")
    story.claim(f"rank 1 (pid {victim['pid']})" in text, "PeerLost names the rank and its process")
    survivor = [line for line in text.splitlines() if line.strip().startswith("rank 0: ")]
    story.claim(
        any("demo.py:" in line for line in survivor),
        "PeerLost says what the survivor was in, and the line of Python",
    )
    last = (step - 1) // SAVE_EVERY * SAVE_EVERY
    story.claim(good == last and good > 0, f"the last good checkpoint is that of step {last}")
    return good


def _resume(story: Story, folder: Path, saved: Path, good: int, whole: Run) -> None:
    """At 2 ranks bit for bit, at 3 to a tolerance; the weights loaded are the same bits at both."""
    wanted = {step: loss for step, loss in whole.losses().items() if step > good}
    two = Run(folder, "two", 2, steps=STEPS, checkpoints=str(saved), hash_at=(STEPS,))
    two.start().expect(0)
    end = good + COMPARED
    three = Run(folder, "three", 3, steps=end, checkpoints=str(saved)).start().expect(0)
    loaded = [run.one("loaded") for run in (two, three)]
    exact = two.losses() == wanted and two.hashes() == {STEPS: whole.hashes()[STEPS]}
    found = three.losses()
    off = max(abs(found[s] - wanted[s]) / abs(wanted[s]) for s in range(good + 1, end + 1))
    story.say(
        "resume",
        f"from step {good} on 2 ranks: losses and weights "
        f"{'equal to' if exact else 'unlike'} the uninterrupted run"
        f"{', bit for bit' if exact else ''};\n"
        f"on 3 ranks: the next {COMPARED} losses equal to {off:.0e}",
    )
    story.claim(exact, "2 ranks go on with the bits of the uninterrupted run")
    story.claim(off <= RESUMED_TOLERANCE, f"3 ranks go on within {RESUMED_TOLERANCE:.0e}")
    story.claim(
        all(e["step"] == good and e["weights"] == whole.hashes()[good] for e in loaded),
        "2 and 3 ranks load the weights of that step, bit for bit",
    )


def _damage(story: Story, folder: Path, saved: Path, whole: Run) -> None:
    """One bit of the newest checkpoint: named, and fallen back from."""
    newest, before = checkpoint.steps(saved)[:2]
    path = saved / f"step-{newest:06d}" / "rank-00000-of-00002.safetensors"
    name, row = _flip_one_bit(path, random.Random(20240229))
    damages = checkpoint.verify(saved)
    hits = [
        d for d in damages
        if d.parameter == name and d.rows is not None and d.rows[0] <= row <= d.rows[1]
    ]  # fmt: skip
    named = bool(hits) and all(d.step == newest and d.rank == 0 for d in damages)
    run = Run(folder, "damaged", 2, steps=0, checkpoints=str(saved)).start().expect(0)
    loaded = run.one("loaded")
    words = f"{name}, not found"
    if hits and hits[0].rows is not None:
        others = len({(d.parameter, d.state) for d in damages}) - 1
        beside = f" (or {others} more in the same MiB)" if others else ""
        words = f"{name} rows {hits[0].rows[0]}-{hits[0].rows[1]}, rank {hits[0].rank}{beside}"
    story.say(
        "damage",
        f"one bit flipped in the file of step {newest}:\n{words}\n"
        f"-> the loader fell back to step {loaded['step']}",
    )
    story.claim(named, "the damage is named by tensor, rows and rank, and nothing else is")
    story.claim(
        loaded["step"] == before
        and len(loaded["skipped"]) == 1
        and loaded["weights"] == whole.hashes()[before],
        f"what is loaded instead is step {before}, bit for bit",
    )


def _flip_one_bit(path: Path, draw: random.Random) -> tuple[str, int]:
    """Flips a bit of a weight; the name of its tensor and its row, from the header alone."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    pieces = [
        (key, entry) for key, entry in sorted(header.items()) if ".layers." in key
        and ".mlp." in key and key.split(":")[1] == "weight"
    ]  # fmt: skip
    key, entry = draw.choice(pieces)
    name, _, first = key.rsplit(":", 2)
    begin, end = entry["data_offsets"]
    at = draw.randrange(begin, end)
    content[8 + size + at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    index = json.loads((path.parent / "index.json").read_text())
    shape = next(p["shape"] for p in index["parameters"] if p["name"] == name)
    return name, (int(first) + (at - begin) // 4) // int(shape[1])


def _seconds_since_start() -> float:
    """Of this process, so that its own imports count."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")

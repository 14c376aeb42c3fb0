"""Every fault at every point: each survivor ends in time, with the error that names the rank and
what it was in, and nothing is left in memory or on disk.

The pairs of values run always; the whole product with the tests marked full."""

import dataclasses
import json
import os
import pathlib
import re

import pytest
from cases import pairs
from faults import OPERATIONS, Case, expected, product, run_threads
from test_ends import left_in_memory, stays

import flatshard as fs
from flatshard import checkpoint

pytestmark = pytest.mark.timeout(90)

FEW = pairs(product())
CASES = [
    pytest.param(case, id=case.name, marks=() if case in FEW else pytest.mark.full)
    for case in product()
]


def test_pairs_hold_every_pair_of_values():
    cases = product()
    assert len(FEW) < len(cases) / 2
    for i in range(len(Case._fields)):
        for j in range(i):
            assert {(c[i], c[j]) for c in FEW} == {(c[i], c[j]) for c in cases}


def check_seen(case: Case, seen: dict, pid: int) -> None:
    """One survivor's error, and its words."""
    error, words = expected(case)
    assert seen["error"] == error, seen
    text = seen["text"]
    assert words.replace("PID", str(pid)) in text, text
    if error in ("PeerLost", "CollectiveTimeout"):
        assert any(f" in {word}" in text for word in OPERATIONS[case.point]), text
    if case.point in ("gather", "reduce") and case.fault in ("kill", "stop", "exception", "exit"):
        line = next(x for x in text.splitlines() if x.startswith(f"  rank {case.victim}: "))
        assert re.search(r", unit [abc]\b", line), f"the victim's unit: {line}"
        assert "faults.py:" in line and "contextlib" not in line, f"the script's line: {line}"
    if case.fault == "stop":
        assert "stopped (SIGSTOP)" in text, text


def check_folder(case: Case, folder: pathlib.Path) -> None:
    """Only a rank 0 that was killed cannot clear away what its save had begun; the next does."""
    hidden = [name for name in os.listdir(folder) if name.startswith(".")]
    if hidden:
        assert case.point == "save" and case.victim == 0 and case.fault in ("kill", "stop")

        def save(world):
            shards = fs.shard({"w": [1.0]}, world)
            checkpoint.save(folder, shards, step=5)

        fs.local_world(1).run(save)
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
    if list(folder.glob("step-*")):
        assert checkpoint.verify(folder) == [], "what was committed is whole"


@pytest.fixture(scope="module")
def waited():
    """(seconds from a survivor's wait to its error, case); the longest are printed."""
    rows = []
    yield rows
    stopped = max((row for row in rows if row[1].fault == "stop"), default=None)
    others = max((row for row in rows if row[1].fault != "stop"), default=None)
    print(f"{len(rows)} survivors; longest after a stop {stopped}, otherwise {others}")


@pytest.mark.parametrize("case", CASES)
def test_a_fault(case, tmp_path, template, waited):
    before = left_in_memory()
    if case.ranks == "threads":
        everyone = run_threads(case, str(tmp_path))
        pid = os.getpid()
    else:
        stops = case.victim if case.fault == "stop" else -1
        ends = template.run(
            case.size, "import faults\nfaults.run_process()\n", stops=stops,
            CASE=json.dumps(case), FOLDER=str(tmp_path),
        )  # fmt: skip
        lines = [[json.loads(x) for x in end.out.splitlines()] for end in ends]
        assert all(found for found in lines), ends
        pid = lines[case.victim][0]["pid"]
        everyone = [found[1] if len(found) > 1 else None for found in lines]
        for rank, end in enumerate(ends):
            if rank != case.victim:
                assert end.status == 0, dataclasses.asdict(end)
                assert everyone[rank]["left"] == 0, "descriptors or mappings"
    for rank, seen in enumerate(everyone):
        if rank != case.victim:
            assert seen is not None, f"rank {rank} did not end well"
            check_seen(case, seen, pid)
            waited.append((seen["seconds"], case))
    check_folder(case, tmp_path)
    assert not stays(before)

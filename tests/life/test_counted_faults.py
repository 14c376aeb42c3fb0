"""The n-th wait, the n-th allocation of everything a job does: n = 1, 2, 3 ... until it ends well.

Opening, training, generating, saving, splitting, closing. make test takes every so many n, from a
place that the seed of the run draws; the whole of it runs with the tests marked full."""

import os
import random

import pytest
from living import everything, held
from test_given_back import alone

import flatshard as fs

pytestmark = pytest.mark.timeout(280)


SEED = os.environ.get("TEST_SEED", "20240229")


def some(total: int, part: float, *draw: object) -> list[int]:
    """Of 1 to total: all, or a few that a seed draws."""
    count = max(1, round(total * part))
    return sorted(random.Random(f"{SEED} {draw}").sample(range(1, total + 1), count))


PARTS = [pytest.param(0.06, id="some"), pytest.param(1.0, id="all", marks=pytest.mark.full)]

DIES = """
    world = init(timeout=20, threads=1)
    victim, nth, what = int(os.environ["VICTIM"]), int(os.environ["NTH"]), int(os.environ["WHAT"])
    world.barrier()
    _core.wait_fault_at(nth if world.rank == victim else 0, what)
    try:
        everything(world, os.environ["FOLDER"])
        say(f"clean {_core.wait_fault_at(0, 0)}")
    except errors.PeerLost as error:
        assert world.rank != victim, error
        assert f"rank {victim}" in str(error), error
        assert (" died" if what == 1 else "interrupted") in str(error), error
        say("lost")
    except KeyboardInterrupt:
        assert world.rank == victim
        say("interrupted")
    world.close()
"""


@pytest.mark.parametrize(
    ("victim", "what", "part"),
    [
        pytest.param(1, 1, 0.03, id="rank 1 dies, some"),
        pytest.param(0, 3, 0.03, id="rank 0 is interrupted, some"),
        *(
            pytest.param(victim, what, 1.0, id=f"rank {victim} {how}, all", marks=pytest.mark.full)
            for victim in (0, 1)
            for what, how in ((1, "dies"), (3, "is interrupted"))
        ),
    ],
)
def test_a_fault_at_every_wait(victim, what, part, template, tmp_path):
    variables = {"VICTIM": str(victim), "WHAT": str(what)}

    def run(nth):
        folder = tmp_path / str(nth)
        folder.mkdir()
        return template.run(2, DIES, NTH=str(nth), FOLDER=str(folder), **variables)

    clean = run(0)
    assert all("clean" in end.out for end in clean), clean
    total = int(clean[victim].out.split()[1])
    assert total > 60
    seen = 0
    for nth in some(total, part, victim, what):
        ends = run(nth)
        died, survivor = ends[victim], ends[1 - victim]
        if nth > 0.8 * total and "clean" in died.out:
            continue  # a rank that need not wait for a slot waits less: this run had fewer
        if what == 1:
            assert died.status == -9, (nth, died)
        else:  # a fence that was through already goes on
            assert died.status == 0 and ("interrupted" in died.out or "clean" in died.out), died
        assert survivor.status == 0, (nth, survivor)
        seen += "lost" in survivor.out
        assert "lost" in survivor.out or "clean" in survivor.out, (nth, survivor)
    assert seen > 0


ALLOCATIONS = """
from living import *
from flatshard import _core
import random, sys, tempfile
def run(nth):
    made = [0]
    with tempfile.TemporaryDirectory() as folder:
        def rank(world):
            world.barrier()
            if world.is_main: _core.alloc_fail_at(nth)
            world.barrier()
            try: everything(world, folder)
            finally: made[0] = max(made[0], _core.alloc_fail_at(0))
        try:
            fs.local_world(2, timeout=20, threads=1).run(rank)
        except (MemoryError, fs.WorldError): pass
        else: return made[0]
    return None
total = run(0)
count = max(1, round(total * float(sys.argv[1])))
failed = 0
for _ in range(3): run(total // 2)
before = held()
for nth in sorted(random.Random(sys.argv[2]).sample(range(1, total + 1), count)):
    failed += run(nth) is None
assert run(0) is not None, "a clean run works after all that"
assert failed > count * 0.8, (failed, count)
print(total, grows(before, held()))
"""


@pytest.mark.parametrize("part", PARTS)
def test_any_allocation_fails(part):
    """Ranks as threads: whichever rank it hits, the other ends too, and nothing stays."""
    total, _, grew = alone(ALLOCATIONS, str(part), SEED, timeout=270).partition(" ")
    assert int(total) > 100 and grew.strip() == "{}", (total, grew)


def test_everything_is_what_it_says(tmp_path):
    """The use that these faults fall into: it really saves, and leaves nothing."""
    before = held()["files"]
    fs.local_world(2, threads=1).run(everything, str(tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]
    assert held()["files"] <= before + 2

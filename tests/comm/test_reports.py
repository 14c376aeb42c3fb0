"""What survivors are told of a rank that does not come: where it is, live, and why it is gone."""

import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import ranks
from ranks import Ranks

import flatshard

# Four units and two slots: whoever waits, waits for a unit. Rank 1 does not come to the third one.
TRAIN = """
    import ctypes, logging, threading

    world = init(timeout=50)
    params = {f"layers.{i}.w": np.ones(64, np.float32) for i in range(4)}
    sharding = flatshard.Sharding(stage=2)
    shards = flatshard.shard(params, world, sharding=sharding)
    optimizer = flatshard.SGD(shards, lr=0.1)

    def step(turn):
        for i, unit in enumerate(shards):
            if turn == 1 and i == 2 and world.rank == 1:
                say("here")
                stuck()
            unit.reduce({name: np.ones(64, np.float32) for name in unit.names})
        optimizer.step()

    def stuck():
        STUCK  # this line

    step(0)
    try:
        with world.limit(timeout=LIMIT):
            step(1)
    except errors.WorldError as error:
        say(f"caught {type(error).__name__}: {error}")
        assert error.rank == 1
        sys.exit(7)
    say("no error")
"""


def train(stuck: str, limit: float = 1.0) -> str:
    return TRAIN.replace("STUCK", stuck).replace("LIMIT", str(limit))


def line_of(path: pathlib.Path, mark: str) -> int:
    lines = path.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if mark in line)


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "train.py"


def check_survivors(job: Ranks, script: pathlib.Path, *wanted: str) -> None:
    """Ranks 0 and 2 have raised a timeout that names rank 1, its unit, and what is wanted."""
    for rank, end in zip((0, 2), job.ends(0, 2), strict=True):
        assert end.status == 7, end
        assert "caught CollectiveTimeout: rank 1" in end.out, end.out
        late = re.search(r"  rank 1: .*", end.out)
        assert late is not None, end.out
        for text in ("last in reduce, unit layers.1", *wanted):
            assert text in late.group(), (text, end.out)
        # The others wait: for a unit too, and on a line.
        other = re.search(rf"  rank {2 - rank}: .*", end.out)
        assert other is not None and f"at {script}:" in other.group(), end.out
        assert re.search(r"waits in reduce, unit layers\.\d", other.group()), end.out
        assert f"rank {rank} stops: rank 1" in end.err  # said before it is raised


@pytest.mark.quick
@pytest.mark.parametrize(
    "stuck",
    [
        "time.sleep(60)",
        "while True: pass",
        "while True: ctypes.PyDLL(None).sleep(60)",  # in C, the interpreter locked
        "threading.Event().wait(60)",
    ],
)
def test_where_a_late_rank_is_now(script: pathlib.Path, stuck: str) -> None:
    with Ranks(3, train(stuck), path=script) as job:
        check_survivors(
            job,
            script,
            f"{script}:{line_of(script, '# this line')} in stuck",
            f"called at {script}:{line_of(script, '    stuck()')} in step",
        )


@pytest.mark.quick
def test_a_stopped_rank(script: pathlib.Path) -> None:
    """It cannot answer: its last known line, and that it is stopped."""
    with Ranks(3, train("os.kill(os.getpid(), signal.SIGSTOP)"), path=script) as job:
        check_survivors(
            job,
            script,
            f"at {script}:{line_of(script, 'unit.reduce(')}",
            "its process is stopped (SIGSTOP), and that line its last known one",
        )
        job.signal(1, signal.SIGCONT)  # what it was not asked does not end it
        (end,) = job.ends(1)
        assert end.status == 7 and "CollectiveTimeout" in end.out, end


@pytest.mark.quick
def test_the_log_of_a_late_rank(script: pathlib.Path) -> None:
    """Also what its rank did not print, since only rank 0 speaks."""
    stuck = (
        'logging.getLogger("flatshard").warning("%s is slow", "disk"); '
        'logging.getLogger("flatshard").error("first line\\nsecond"); time.sleep(60)'
    )
    with Ranks(3, train(stuck), path=script) as job:
        for end in job.ends(0, 2):
            late = end.out[end.out.index("rank 1: ") :]
            assert "    its log: warning: disk is slow\n    its log: error: first line\n" in late
            assert "second" not in late


def test_a_late_rank_beside_a_dead_one(script: pathlib.Path) -> None:
    """Rank 2 dies while rank 1 computes: rank 0 says where rank 1 is, and at once."""
    program = """
        world = init(timeout=50)
        world.barrier()
        def compute():
            time.sleep(60)  # this line
        if world.rank == 1:
            say("here")
            compute()
        if world.rank == 2:
            time.sleep(60)
        world.barrier()
    """
    with Ranks(3, program, path=script) as job:
        job.wait_for(1, "here")
        job.wait_until_asleep(0)
        job.wait_until_asleep(1)
        job.signal(2, signal.SIGKILL)
        (end,) = job.ends(0)
        assert f"PeerLost: rank 2 (pid {job.pid(2)}) died" in end.err, end
        assert f"now at {script}:{line_of(script, '# this line')} in compute" in end.err


# ---- why a rank is gone -------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise LookupError('nothing')", "failed: LookupError: nothing (at HERE in load)"),
        ("raise KeyboardInterrupt", "failed: KeyboardInterrupt (at HERE in load)"),
        ("raise ValueError('x' * 5000)", "... (at HERE in load)"),
        ("raise ValueError('ab' + '\\u20ac' * 400)", "... (at HERE in load)"),
        ("raise ValueError('\\0 \\udc80')", r"ValueError: \0 \udc80 (at HERE in load)"),
        ("sys.exit(3)", "left: its program ended (sys.exit, or the end of the script)"),
        ("os._exit(3)", "died: its process ended without a word (a signal, a crash, os._exit)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "died: its process ended without a word"),
        ("world.close(); time.sleep(3)", "left: it closed its world"),
    ],
)  # fmt: skip
def test_why_a_rank_is_gone(script: pathlib.Path, how: str, said: str) -> None:
    program = f"""
        world = init(timeout=50)
        world.barrier()
        def load():
            {how}  # this line
        if world.rank == 1:
            load()
        try:
            world.all_reduce(1)
        except errors.PeerLost as error:
            say(f"caught {{error}}")
            assert error.rank == 1
            sys.exit(7)
    """
    with Ranks(3, program, path=script) as job:
        said = said.replace("HERE", f"{script}:{line_of(script, '# this line')}")
        for end in job.ends(0, 2):
            assert end.status == 7 and "caught rank 1" in end.out, end
            assert said in end.out, end.out
            assert "last in barrier" in end.out or "failed:" in end.out


def test_a_report_that_is_cut_in_a_character(script: pathlib.Path) -> None:
    """Names longer than their place in the report: still the right exception."""
    program = """
        params = {"x" + "\u5c64" * 40 + f".{i}.w": np.ones(64, np.float32) for i in range(4)}
        world = init(timeout=50, report_after=0.2)
        shards = flatshard.shard(params, world, sharding=flatshard.Sharding(stage=2))
        for unit in shards:
            if world.rank == 1:
                time.sleep(0.6)
                os._exit(1)
            try:
                unit.reduce({name: np.ones(64, np.float32) for name in unit.names})
            except errors.PeerLost as error:
                say(f"caught {error}")
                break
    """
    with Ranks(2, program, path=script, PYTHONIOENCODING="utf-8") as job:
        (end,) = job.ends(0)
        assert "caught rank 1" in end.out and "waits in reduce, unit x\u5c64\u5c64" in end.out, end
        assert "still waiting after" in end.err and "Traceback" not in end.err, end


@pytest.mark.quick
def test_ranks_that_are_threads(tmp_path: pathlib.Path) -> None:
    """The line where the late thread is now, not that of its last operation."""
    done = threading.Event()

    def body(world: flatshard.World) -> None:
        world.barrier()
        if world.rank == 1:
            here.append(sys._getframe().f_lineno + 1)
            done.wait(20)
        try:
            with world.limit(timeout=0.5):
                world.all_gather(1)
        finally:
            done.set()

    here: list[int] = []
    with pytest.raises(flatshard.CollectiveTimeout) as caught:
        flatshard.local_world(2).run(body)
    assert f"called at {__file__}:{here[0]} in body" in str(caught.value)
    assert "rank 1: has not come; last in barrier" in str(caught.value)
    with pytest.raises(LookupError):
        flatshard.local_world(2).run(fail_on_one)


def fail_on_one(world: flatshard.World) -> None:
    if world.rank == 1:
        raise LookupError("no such thing")
    with pytest.raises(flatshard.PeerLost, match=r"LookupError: no such thing \(at .*in fail_on_o"):
        world.barrier()


# ---- whose signal it is -------------------------------------------------------------------------

ASKED = """
    try:
        with world.limit(timeout=0.7):
            if world.rank == 1:
                say("here")
                time.sleep(2)  # this line
            world.barrier()
    except errors.CollectiveTimeout as error:
        say(f"caught {error}")
    say(f"counted {len(counted)}")
"""


@pytest.mark.quick
@pytest.mark.parametrize("number", ["", "60"])
def test_a_signal_that_the_program_uses_is_left_to_it(script: pathlib.Path, number: str) -> None:
    """Another one is taken; the one that is asked for by number is shared."""
    program = """
        counted = []
        mine = int(os.environ.get("FLATSHARD_REPORT_SIGNAL") or 54)
        signal.signal(mine, lambda *_: counted.append(1))
        world = init(timeout=50)
        world.barrier()
        os.kill(os.getpid(), mine)
        time.sleep(0)
        assert len(counted) == 1
    """
    variables = {"FLATSHARD_REPORT_SIGNAL": number} if number else {}
    program = textwrap.dedent(program) + textwrap.dedent(ASKED)
    with Ranks(2, program, path=script, **variables) as job:
        first, second = job.ends()
        assert f"now at {script}:{line_of(script, '# this line')}" in first.out, first
        for end in (first, second):
            assert end.status == 0 and "counted 1" in end.out, end


@pytest.mark.quick
def test_a_signal_that_the_program_takes_later_is_its_own(script: pathlib.Path) -> None:
    """Then that rank does not answer with a line, its handler stays, and close takes nothing."""
    program = """
        counted = []
        def count(*_): counted.append(1)
        world = init(timeout=50)
        world.barrier()
        signal.signal(54, count)
        with world.limit(timeout=0.7):
            try:
                if world.rank == 1:
                    say("here")
                    time.sleep(2)
                world.barrier()
            except errors.CollectiveTimeout as error:
                say(f"caught {error}")
        world.close()
        assert signal.getsignal(54) is count
        before = len(counted)
        os.kill(os.getpid(), 54)
        assert len(counted) == before + 1
    """
    with Ranks(2, program, path=script) as job:
        first, _ = job.all_well()
        assert "caught rank 1" in first and "now at" not in first, first


@pytest.mark.quick
def test_a_rank_that_blocks_the_signal(script: pathlib.Path) -> None:
    """It does not answer, which is said; the question that it finds later does it no harm."""
    program = """
        world = init(timeout=50)
        world.barrier()
        try:
            with world.limit(timeout=0.5):
                if world.rank == 1:
                    signal.pthread_sigmask(signal.SIG_BLOCK, range(54, 64))
                    time.sleep(1.5)
                world.barrier()
        except errors.CollectiveTimeout as error:
            say(f"caught {error}")
        world.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, range(54, 64))
        time.sleep(0)
        say("alive")
    """
    with Ranks(2, program, path=script) as job:
        first, second = job.all_well()
        assert "it was asked where it is now and does not answer" in first, first
        assert f"last in barrier, at {script}:" in first and "now at" not in first, first
        assert "alive" in second


@pytest.mark.quick
def test_none_and_a_wrong_signal(script: pathlib.Path) -> None:
    program = "\ncounted = []\nworld = init(timeout=50)\nworld.barrier()\n" + textwrap.dedent(ASKED)
    with Ranks(2, program, path=script, FLATSHARD_REPORT_SIGNAL="0") as job:
        first, _ = job.all_well()
        assert "now at" not in first and "at " + str(script) in first, first
    with Ranks(2, program, path=script, FLATSHARD_REPORT_SIGNAL="9") as job:
        for end in job.ends():
            assert "ConfigError: FLATSHARD_REPORT_SIGNAL=9: signal 9 is not a real-time" in end.err


@pytest.mark.quick
def test_faulthandler_stays_the_programs() -> None:
    """Enabled or not, and registered for a signal: as before, during and after the world; and a
    forked child does not answer."""
    program = """
        import faulthandler, tempfile
        def dumped(number):
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.register(number, file=file)
                signal.raise_signal(number)
                faulthandler.unregister(number)
                file.seek(0)
                return "File" in file.read()
        mine = tempfile.TemporaryFile("w+")
        faulthandler.register(54, file=mine)       # the very signal that would be taken
        faulthandler.enable(file=mine)
        for _ in range(3):
            world = init(timeout=50)
            world.barrier()
            assert faulthandler.is_enabled()
            with tempfile.TemporaryFile("w+") as late:  # as pytest does for tests that hang
                faulthandler.dump_traceback_later(0.05, file=late)
                time.sleep(0.5)
                faulthandler.cancel_dump_traceback_later()
                late.seek(0)
                assert "Timeout" in late.read()
            signal.raise_signal(54)
            assert dumped(signal.SIGUSR1)
            child = os.fork()
            if child == 0:
                number = 55
                os.kill(os.getpid(), number)       # ours in the parent: nothing happens here
                os._exit(11)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
            world.barrier()
            world.close()
        mine.seek(0)
        assert mine.read().count("most recent call first") == 3
        signal.raise_signal(55)  # our handler stays, and does nothing
        faulthandler.disable()
        say("well")
    """
    with Ranks(2, program) as job:
        assert all("well" in out for out in job.all_well())


# ---- launchers ----------------------------------------------------------------------------------

LAUNCHED = """
import os, signal, sys, time
import flatshard
world = flatshard.init(timeout=30)
world.barrier()
if world.rank == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
world.barrier()  # this line
"""


@pytest.mark.parametrize(
    "launcher",
    [
        ["flatshard.cli", "launch", "-n", "3"],
        pytest.param(
            ["torch.distributed.run", "--standalone", "--nproc-per-node=3"],
            marks=pytest.mark.torch,
        ),
    ],
    ids=["flatshard", "torchrun"],
)
def test_the_report_comes_before_the_launcher_ends_the_survivors(
    script: pathlib.Path, launcher: list[str]
) -> None:
    if launcher[0].startswith("torch"):
        pytest.importorskip("torch")
    script.write_text(LAUNCHED)
    end = subprocess.run(
        [sys.executable, "-m", *launcher, str(script)],
        env=ranks.environment(),
        capture_output=True,
        text=True,
        timeout=ranks.DEADLINE_S * 2,
    )
    assert end.returncode != 0
    told = {
        rank
        for rank in (0, 2)
        if re.search(rf"rank {rank} stops: rank 1 \(pid \d+\) died", end.stderr)
    }
    # torchrun leaves a tenth of a second, which a busy machine may need to wake one of them.
    assert told == {0, 2} or (told and launcher[0].startswith("torch")), end.stderr
    place = f"in barrier, at {script}:{line_of(script, '# this line')}"
    assert end.stderr.count(place) >= 2 * len(told)  # of both, in each report


def test_the_launcher_says_where_ranks_are_that_never_wait(script: pathlib.Path) -> None:
    """Nobody meets the dead rank, so nobody reports it: the launcher asks before it ends them."""
    script.write_text(
        "import os, time, flatshard\n"
        "world = flatshard.init(timeout=30)\n"
        "world.barrier()\n"
        "if world.rank == 1:\n"
        "    os._exit(3)\n"
        "def compute():\n"
        "    time.sleep(50)  # this line\n"
        "compute()\n"
    )
    end = subprocess.run(
        [sys.executable, "-m", "flatshard.cli", "launch", "-n", "2", str(script)],
        env=ranks.environment(),
        capture_output=True,
        text=True,
        timeout=ranks.DEADLINE_S,
    )
    assert end.returncode == 3, end
    told = "flatshard launch: the ranks that still run are ended: no rank waits for another"
    assert told in end.stderr, end.stderr
    place = f"now at {script}:{line_of(script, '# this line')} in compute"
    assert place in end.stderr and "rank 1: last in barrier" in end.stderr, end.stderr


def test_the_report_goes_through_the_programs_logging_too() -> None:
    """A file handler gets it, and stderr as well; a handler on stderr does not double it."""
    program = """
        import io, logging
        kept = io.StringIO()
        stream = kept if world_rank == 0 else sys.stderr
        logging.basicConfig(stream=stream, format="PROGRAM %(message)s")
        world = init(timeout=50)
        world.barrier()
        if world.rank == 2:
            os._exit(1)
        try:
            world.barrier()
        except errors.PeerLost:
            assert world.rank == 1 or "PROGRAM rank 0 stops: rank 2" in kept.getvalue()
    """
    program = '\n        world_rank = int(os.environ["RANK"])' + program
    with Ranks(3, program) as job:
        for rank, end in enumerate(job.ends(0, 1)):
            assert end.status == 0, end
            assert end.err.count(f"rank {rank} stops: rank 2") == 1, end.err


@pytest.mark.quick
def test_a_rank_that_starts_late_is_reported_once(script: pathlib.Path) -> None:
    """After report_after one line in the log, live among threads; the wait goes on."""
    program = """
        world = init(timeout=50, report_after=0.3)
        world.barrier()
        if world.rank == 1:
            time.sleep(2)  # it is not asked: a signal would interrupt what it does
        world.barrier()
    """
    with Ranks(2, program, path=script) as job:
        first, second = job.ends()
        assert first.status == second.status == 0, (first, second)
        assert first.err.count("still waiting after 0.3 s") == 1, first.err
        assert f"last in barrier, at {script}:" in first.err and "now at" not in first.err
        assert not second.err

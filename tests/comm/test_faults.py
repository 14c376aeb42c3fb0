"""Every wait ends: death, stop, exception, Ctrl-C, deadline; seen from the survivors."""

import pathlib
import re
import signal
import time

import pytest
import ranks
from ranks import Ranks

# Both ranks meet, then rank 1 says where it is while rank 0 waits in a second barrier.
MEET = """
    world = init(timeout=30)
    world.barrier()
    if world.rank == 1:
        say("here")
"""
SURVIVE = """
    try:
        world.barrier()
    except errors.{name} as error:
        say(f"caught {{type(error).__name__}}: {{error}}")
        sys.exit(7)
    say("no error")
"""


def left_behind() -> list[str]:
    """Files of ours where a world might leave some."""
    places = [pathlib.Path("/dev/shm"), pathlib.Path("/tmp")]
    found = [path for place in places for path in place.glob("flatshard*")]
    return [
        str(path)
        for path in found
        if "shm" in path.parts or re.fullmatch(r"flatshard-\d+", path.name)
    ]


@pytest.fixture(autouse=True)
def no_files():
    before = set(left_behind())
    yield
    assert set(left_behind()) <= before


@pytest.mark.quick
def test_kill() -> None:
    hang = "    if world.rank == 1:\n        time.sleep(60)\n"
    with Ranks(3, MEET + hang + SURVIVE.format(name="PeerLost")) as job:
        job.wait_for(1, "here")
        job.wait_until_asleep(0)
        job.signal(1, signal.SIGKILL)
        for end in job.ends(0, 2):
            assert end.status == 7, end
            assert f"caught PeerLost: rank 1 (pid {job.pid(1)}) died" in end.out
            assert "rank 1: has not come; last in barrier" in end.out
            assert "its process is gone" in end.out
            assert "in barrier, at <string>:" in end.out
            assert "stops: rank 1" in end.err  # said before it is raised


@pytest.mark.quick
def test_stop() -> None:
    hang = "    if world.rank == 1:\n        time.sleep(60)\n"
    program = MEET + hang + SURVIVE.format(name="CollectiveTimeout")
    with Ranks(2, program, FLATSHARD_TIMEOUT="1.5") as job:
        job.wait_for(1, "here")
        job.signal(1, signal.SIGSTOP)
        (end,) = job.ends(0)
        assert end.status == 7, end
        assert f"rank 1 (pid {job.pid(1)}) did not come within 1.5 s" in end.out
        assert "its process is stopped (SIGSTOP)" in end.out


@pytest.mark.quick
def test_an_exception_reaches_the_others() -> None:
    fail = "    if world.rank == 1:\n        raise LookupError('no such thing')\n"
    with Ranks(2, MEET + fail + SURVIVE.format(name="PeerLost")) as job:
        survivor, culprit = job.ends()
        assert culprit.status == 1 and "LookupError: no such thing" in culprit.err
        assert survivor.status == 7, survivor
        assert "failed: LookupError: no such thing" in survivor.out


def test_an_exception_in_a_with_block_reaches_the_others() -> None:
    """The block closes the world on its way out; the reason goes with it."""
    program = """
        try:
            with init(timeout=30) as world:
                world.barrier()
                if world.rank == 1:
                    raise LookupError("no such thing")
                world.barrier()
        except LookupError:
            time.sleep(3)
        except errors.PeerLost as error:
            assert "failed: LookupError: no such thing" in str(error), error
            say("lost")
    """
    with Ranks(2, program) as job:
        assert "lost" in job.all_well()[0]


def test_leaving_early_is_said() -> None:
    for leave, how in (
        ("sys.exit(0)", "its program ended (sys.exit, or the end of the script)"),
        ("world.close(); time.sleep(5)", "it closed its world"),
    ):
        program = MEET + f"    if world.rank == 1:\n        {leave}\n"
        with Ranks(2, program + SURVIVE.format(name="PeerLost")) as job:
            (end,) = job.ends(0)
            assert end.status == 7 and f"left: {how} while others need it" in end.out, end


@pytest.mark.quick
def test_interrupt_of_a_waiting_rank() -> None:
    program = """
        world = init(timeout=30)
        world.barrier()
        if world.rank == 1:
            try:
                say("here")
                world.barrier()
            except KeyboardInterrupt:
                say("interrupted")
                sys.exit(9)
        time.sleep(3)  # rank 1 waits in the second fence meanwhile
        try:
            world.barrier()
        except errors.PeerLost as error:
            say(f"caught {error}")
            sys.exit(7)
    """
    with Ranks(2, program) as job:
        job.wait_for(1, "here")
        job.wait_until_asleep(1)
        job.signal(1, signal.SIGINT)
        survivor, culprit = job.ends()
        assert culprit.status == 9 and "interrupted" in culprit.out, culprit
        assert survivor.status == 7 and "rank 1" in survivor.out, survivor


def test_interrupt_while_ranks_gather() -> None:
    """Before the world is there: rank 0 waits for a rank that never starts, and the reverse."""
    program = """
        import threading
        try:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            init(timeout=50)
        except KeyboardInterrupt:
            sys.exit(9)
    """
    for rank in (0, 1):
        alone = f"""
        os.environ.update(RANK='{rank}', WORLD_SIZE='2', LOCAL_WORLD_SIZE='2')
        """
        with Ranks(1, alone + program) as job:
            (end,) = job.ends()
            assert end.status == 9, end


@pytest.mark.quick
def test_a_handler_that_returns_does_not_end_a_wait() -> None:
    program = """
        told = []
        signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
        world = init(timeout=30)
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(time.monotonic()))
        world.barrier()
        if world.rank == 0:
            say("here")
            world.barrier()
            arrived = world.broadcast(0.0, root=1)
            assert len(seen) == 1 and seen[0] < arrived, (seen, arrived)
        else:
            say("ready")
            while not told:
                time.sleep(0.01)
            now = time.monotonic()
            world.barrier()
            world.broadcast(now, root=1)
    """
    with Ranks(2, program) as job:
        job.wait_for(0, "here")
        job.wait_for(1, "ready")
        job.wait_until_asleep(0)
        job.signal(0, signal.SIGINT)
        job.wait_until_asleep(0)
        time.sleep(0.5)  # the handler runs now, or never: the second rank comes after
        job.signal(1, signal.SIGUSR1)
        job.all_well()


def test_signals_all_the_time() -> None:
    """A timer signal every millisecond with a Python handler: right result, no failed call."""
    program = """
        world = init(timeout=50)
        count = [0]
        def tick(*_): count[0] += 1
        signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        x = np.full(4_000_000, world.rank + 1, np.float32)
        for _ in range(3):
            y = world.all_reduce(x)
            assert (y == 3).all()
        part = world.split(0)
        part.barrier()
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert count[0] > 5
    """
    with Ranks(2, program) as job:
        job.all_well()


@pytest.mark.quick
def test_an_alarm_that_raises_is_what_the_caller_gets() -> None:
    program = """
        world = init(timeout=50)
        if world.rank == 0:
            class Late(Exception): pass
            def late(*_): raise Late("over")
            signal.signal(signal.SIGALRM, late)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                world.barrier()
            except Late:
                say("late")
        else:
            try:
                time.sleep(2)
                world.barrier()
            except errors.PeerLost as error:
                assert "rank 0" in str(error), error
                say("lost")
    """
    with Ranks(2, program) as job:
        first, second = job.all_well()
        assert "late" in first and "lost" in second


def test_the_lock_of_the_interpreter_is_free_during_waits() -> None:
    program = """
        import threading
        world = init(timeout=50)
        if world.rank == 0:
            ticks, stop = [0], threading.Event()
            def tick():
                while not stop.wait(0.002):
                    ticks[0] += 1
            ticker = threading.Thread(target=tick)
            ticker.start()
            world.barrier()
            stop.set(); ticker.join()
            assert ticks[0] > 20, ticks
        else:
            time.sleep(1.0)
            world.barrier()
    """
    with Ranks(2, program) as job:
        job.all_well()


@pytest.mark.quick
def test_a_limit_for_one_operation() -> None:
    program = """
        world = init(timeout=500)
        if world.rank == 2:
            time.sleep(30)
        try:
            with world.limit(timeout=0.7):
                world.all_reduce(1)
        except errors.CollectiveTimeout as error:
            say(f"caught {error}")
    """
    with Ranks(3, program) as job:
        for end in job.ends(0, 1):
            assert "rank 2" in end.out and "did not come within 0.7 s" in end.out, end
            assert "Fence" in end.out and "of 3 ranks" in end.out
            assert "rank 0: in all_reduce of 1 elements of int64 (sum)" in end.out


def test_a_long_wait_is_reported_in_the_log_while_it_lasts() -> None:
    program = """
        world = init(timeout=50, report_after=0.3)
        if world.rank == 0:
            time.sleep(3)
            say("awake")
        world.barrier()
    """
    with Ranks(2, program) as job:
        waiter = job.processes[1]
        assert waiter.stderr is not None
        line = waiter.stderr.readline()  # comes while rank 0 still sleeps
        assert job.processes[0].poll() is None
        assert "flatshard warning (rank 1): still waiting after" in line, line
        job.all_well()


def test_a_thread_that_waits_does_not_hold_up_a_failed_process() -> None:
    """The main thread fails while another thread waits: both ranks end, and learn why."""
    program = """
        import threading
        world = init(timeout=50)
        def wait():
            try:
                world.barrier()
            except errors.PeerLost as error:
                say(f"caught {error}")
        if world.rank == 0:
            waiter = threading.Thread(target=wait)
            waiter.start()
            time.sleep(0.5)
            raise LookupError("the main thread fails")
        time.sleep(2)
        wait()
    """
    with Ranks(2, program) as job:
        first, second = job.ends()
        assert first.status == 1 and second.status == 0, (first, second)
        for end in (first, second):
            assert "caught rank 0" in end.out and "the main thread fails" in end.out, end


def test_interrupt_of_the_main_thread_while_another_waits() -> None:
    program = """
        import threading
        world = init(timeout=50)
        if world.rank == 0:
            waiter = threading.Thread(target=world.barrier)
            waiter.start()
            try:
                say("here")
                waiter.join()
            except KeyboardInterrupt:
                say("interrupted")
            waiter.join()     # the wait goes on, and ends well
        else:
            told = []
            signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
            say("ready")
            while not told:
                time.sleep(0.01)
            world.barrier()
    """
    with Ranks(2, program) as job:
        job.wait_for(0, "here")
        job.wait_for(1, "ready")
        job.wait_until_asleep(0)
        job.signal(0, signal.SIGINT)
        job.wait_for(0, "interrupted")
        job.signal(1, signal.SIGUSR1)
        job.all_well()


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_memory_file() -> None:
    """Sealed, not in core files, given back when the last rank lets go; no descriptor stays."""
    program = """
        import fcntl, gc, re
        def files():
            links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                     if os.path.exists(f"/proc/self/fd/{fd}")}
            return {int(fd): link for fd, link in links.items() if "flatshard" in link}
        assert not files()
        world = init(timeout=50)
        data = next(fd for fd, link in files().items() if "flatshard-data" in link)
        assert len(files()) == 3  # data, locks, and data once more for the answers of a late rank
        assert not any(os.get_inheritable(fd) for fd in files())
        seals = fcntl.fcntl(data, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_SEAL
        try:
            os.ftruncate(data, 4096)
            assert False
        except PermissionError:
            pass
        def taken():
            world.barrier()
            return os.fstat(data).st_blocks * 512
        before = taken()
        x = world.symmetric(4_000_000)
        during = taken()
        assert during - before >= 2 * 16_000_000, (before, during)
        maps = open("/proc/self/smaps").read()
        ours = re.findall(r"flatshard-data.*?VmFlags: ([^\\n]*)", maps, re.DOTALL)
        assert ours and all("dd" in flags.split() for flags in ours), ours
        world.barrier()
        del x
        assert taken() - before < 100_000, (before, taken())
        world.close()
        gc.collect()
        assert not files(), files()
    """
    with Ranks(2, program) as job:
        job.all_well()


# ---- fork ---------------------------------------------------------------------------------------


@pytest.mark.quick
def test_fork() -> None:
    """A child cannot use the world, and its end, by exit or exception, means nothing."""
    program = """
        import multiprocessing, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        world = init(timeout=30)
        there = world.symmetric(1000)
        there[:] = world.rank
        for how in range(2):
            child = os.fork()
            if child == 0:
                try:
                    world.barrier()
                except RuntimeError as error:
                    assert "parent process" in str(error), error
                    assert there[0] == world.rank
                    if how == 0:
                        sys.exit(11)   # runs atexit handlers
                    raise LookupError("in the child")
                os._exit(1)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == (11 if how == 0 else 1)
            world.barrier()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, 2]) == [1, 2]
        assert world.all_reduce(1) == 2
    """
    with Ranks(2, program) as job:
        job.all_well()


# ---- poison -------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_poisoned_world_must_be_closed_and_its_heir_names_the_dead() -> None:
    program = """
        world = init(timeout=30)
        world.barrier()
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):
            try:
                world.barrier()
                assert False
            except errors.PeerLost:
                pass
        try:
            init()
            assert False
        except errors.PeerLost as error:
            assert "rank 2" in str(error)
        world.close()
        try:
            init(timeout=1.5)
            assert False
        except errors.CollectiveTimeout as error:
            say(f"heir: {error}")
        if world.rank == 1:
            time.sleep(0.1)
    """
    with Ranks(3, program) as job:
        first, second = job.ends(0, 1)
        assert first.status == 0 and second.status == 0, (first, second)
        assert "rank(s) 2 of 3 did not come within 1.5 s" in first.out, first
        assert "heir:" in second.out, second


@pytest.mark.quick
def test_a_failure_in_one_part_ends_the_others() -> None:
    """Rank 0 waits for rank 1 in a part that the dead rank 3 is not in."""
    program = """
        world = init(timeout=30)
        part = world.split(world.rank // 2)
        part.barrier()
        if world.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 1:
            time.sleep(2)
        try:
            part.barrier()
            say("no error")
        except errors.PeerLost as error:
            say(f"caught {error}")
            sys.exit(7)
    """
    with Ranks(4, program) as job:
        for end in job.ends(0, 1, 2):
            assert end.status == 7 and "rank 3" in end.out and "died" in end.out, end


# ---- death at every wait ------------------------------------------------------------------------


def test_death_at_the_nth_wait() -> None:
    """Through the facade, a fence apart: n = 1, 4, 7, ... until a run is clean."""
    program = """
        from flatshard import _core
        if os.environ["RANK"] == "1":
            _core.wait_fault_at(int(os.environ["NTH"]), 1)
        try:
            world = init(timeout=30)
            x = world.symmetric(1000)
            world.all_reduce(x, out=x)
            world.split(0).barrier()
            world.reduce_scatter(np.ones(100_000, np.float32))
            world.barrier()
            say("done")
        except errors.PeerLost as error:
            assert "rank 1" in str(error) and "died" in str(error), error
            say("lost")
    """
    nth, deaths = 1, 0
    while True:
        with Ranks(2, program, NTH=str(nth)) as job:
            survivor, culprit = job.ends()
        assert survivor.status == 0, survivor
        if culprit.status == 0:
            assert "done" in survivor.out
            break
        assert culprit.status == -signal.SIGKILL
        deaths += "lost" in survivor.out
        nth += 3
    assert deaths >= 5


def test_two_jobs_at_once_do_not_meet() -> None:
    program = """
        world = init(timeout=30)
        for i in range(200):
            assert world.all_reduce(int(os.environ["JOB"])) == 2 * int(os.environ["JOB"])
        world.close()
        with init(timeout=30) as again:       # the same names, a new world
            assert again.all_gather(again.rank).tolist() == [0, 1]
    """
    port = ranks.free_port()
    with Ranks(2, program, port=port, JOB="3") as one, Ranks(2, program, JOB="5") as two:
        one.all_well()
        two.all_well()
    with Ranks(2, program, port=port, JOB="7") as three:  # a name that a dead job has had
        three.all_well()

"""Who started us: the environments of launchers, the logger, unknown variables."""

import contextlib
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import ranks
from ranks import Ranks

from flatshard import _core, _log, _start
from flatshard.errors import ConfigError

pytestmark = pytest.mark.quick

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
LAUNCH = {
    "FLATSHARD_JOB": "5:6:launch/1/2",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
}


def test_places() -> None:
    torchrun = _start.find_place(TORCHRUN)
    assert (torchrun.rank, torchrun.size, torchrun.local_rank) == (1, 4, 1)
    assert torchrun.name == "localhost:29500/none/2/4" and torchrun.files is None
    assert torchrun.parent == 0
    by_hand = {k: v for k, v in TORCHRUN.items() if not k.startswith("TORCHELASTIC_")}
    assert _start.find_place(by_hand).parent == os.getppid()
    mpi = _start.find_place(OPEN_MPI)
    assert (mpi.rank, mpi.size) == (2, 3) and "prterun-host-1@1" in mpi.name
    slurm = _start.find_place(SLURM)
    assert (slurm.rank, slurm.size) == (0, 2) and "77.0" in slurm.name
    launched = _start.find_place(LAUNCH)
    assert launched.files == (5, 6) and launched.name == "launch/1/2"
    assert _start.find_place({}).size == 1
    # Inside a batch script, outside a step: alone.
    assert _start.find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).size == 1


def test_names_differ_where_jobs_do() -> None:
    changes = {"MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_RUN_ID": "b"}
    names = {_start.find_place({**TORCHRUN, k: v}).name for k, v in changes.items()}
    names.add(_start.find_place(TORCHRUN).name)
    assert len(names) == 4


@pytest.mark.parametrize(
    ("environment", "error", "text"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, NotImplementedError, "4 ranks, 2 of them"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, NotImplementedError, "several hosts"),
        (
            {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            NotImplementedError,
            "several hosts",
        ),
        ({**TORCHRUN, "RANK": "4"}, ConfigError, "rank 4 does not exist in a world of 4"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, ConfigError, "WORLD_SIZE.*'four'"),
        ({**LAUNCH, "FLATSHARD_JOB": "x"}, ConfigError, "FLATSHARD_JOB='x'"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ConfigError, "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_contradictions(environment, error, text) -> None:
    with pytest.raises(error, match=text):
        _start.find_place(environment)


# ---- real starts --------------------------------------------------------------------------------


def test_torchruns_variables() -> None:
    program = """
        world = init(timeout=30, threads=2)
        assert init() is world is flatshard.init()
        assert world.threads == 2 and not world._core.is_threads
        say(f"{world.rank} of {world.size}: {world.all_reduce(world.rank)}")
    """
    with Ranks(3, program) as job:
        assert [out.strip() for out in job.all_well()] == [f"{r} of 3: 3" for r in range(3)]


@pytest.mark.parametrize("kind", ["mpi", "slurm"])
def test_other_launchers_variables(kind: str) -> None:
    program = "from flatshard import init\nw = init(timeout=30)\nprint(w.rank, w.all_reduce(1))\n"
    job = str(ranks.free_port())
    processes = []
    for rank in range(2):
        if kind == "mpi":
            variables = {
                **OPEN_MPI,
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "PMIX_NAMESPACE": job,
            }
        else:
            variables = {
                **SLURM,
                "SLURM_JOB_ID": job,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
            }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", program],
                env=ranks.environment(**variables),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    outs = [process.communicate(timeout=ranks.DEADLINE_S)[0].split() for process in processes]
    assert outs == [["0", "2"], ["1", "2"]]


def test_a_world_of_one_needs_nothing_and_ends(tmp_path: pathlib.Path) -> None:
    """No rendezvous, no file; the working folder may be gone at exit."""
    program = (
        "import os, flatshard\nw = flatshard.init()\nw.barrier()\n"
        "os.rmdir(os.getcwd())\nprint(w.size)\n"
    )
    folder = tmp_path / "gone"
    folder.mkdir()
    for variables in ({}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}):
        folder.mkdir(exist_ok=True)
        end = subprocess.run(
            [sys.executable, "-c", program],
            env=ranks.environment(**variables),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=ranks.DEADLINE_S,
        )
        assert end.returncode == 0 and end.stdout == "1\n", end.stderr


def test_nobody_else_can_pretend_to_be_rank_0() -> None:
    """An address that somebody squats without being rank 0 does not stop a job."""
    program = """
        world = init(timeout=30)
        assert world.all_reduce(1) == 2
    """
    port = ranks.free_port()
    name = f"{os.getuid()}/127.0.0.1:{port}/none/0/2/0"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter:
        squatter.bind(abstract_name(name))
        squatter.listen(8)  # accepts connections, never answers
        with Ranks(2, program, port=port) as job:
            job.all_well()


def abstract_name(name: str) -> bytes:
    """Where rank 0 of a job listens first: two 64-bit hashes of the name."""
    mask, prime = (1 << 64) - 1, 0x100000001B3
    first, second = 0xCBF29CE484222325, 0x6C62272E07BB0142
    for byte in name.encode():
        first = (first ^ byte) * prime & mask
        second = ((second ^ byte) * prime + 0x9E3779B97F4A7C15) & mask
    return f"\0flatshard-{os.getuid()}-{first:016x}{second:016x}".encode()


JOINING = """
import os, pathlib, time
from flatshard import init
job, rank = os.environ["JOB"], os.environ["RANK"]
pathlib.Path(f"ready-{job}{rank}").touch()
while not os.path.exists(f"go-{job}{rank}"):
    time.sleep(0.002)
with init(timeout=50) as world:
    names = world.all_gather(ord(job))
pathlib.Path(f"met-{job}{rank}.part").write_text("".join(chr(int(name)) for name in names))
os.rename(f"met-{job}{rank}.part", f"met-{job}{rank}")
"""


class ByHand:
    """Ranks that a shell starts in the background, as somebody would by hand."""

    def __init__(self, folder: pathlib.Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.shells: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "ByHand":
        return self

    def __exit__(self, *_: object) -> None:
        for shell in self.shells:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()

    def shell(self, job: str, *of: int) -> None:
        """Starts these ranks of a job of two, all by one shell; they wait for go."""
        lines = [f'RANK={rank} LOCAL_RANK={rank} "$0" -c "$1" &' for rank in of]
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        self.shells.append(
            subprocess.Popen(
                ["sh", "-c", "\n".join([*lines, "wait"]), sys.executable, JOINING],
                env=ranks.environment(**common, MASTER_PORT=str(self.port), JOB=job),
                cwd=self.folder,
                start_new_session=True,
            )
        )
        for rank in of:
            self.until(f"ready-{job}{rank}")

    def go(self, rank: str) -> None:
        (self.folder / f"go-{rank}").touch()

    def until(self, name: str) -> None:
        deadline = time.monotonic() + ranks.DEADLINE_S
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.005)

    def until_heard(self) -> None:
        """Until a rank 0 listens under the name."""
        name = abstract_name(f"{os.getuid()}/127.0.0.1:{self.port}/none/0/2/0")
        wanted = name.replace(b"\0", b"@")
        deadline = time.monotonic() + ranks.DEADLINE_S
        while wanted not in pathlib.Path("/proc/net/unix").read_bytes():
            assert time.monotonic() < deadline, "rank 0 does not listen"
            time.sleep(0.005)

    def met(self, rank: str) -> str:
        """The jobs of those that a rank met."""
        self.until(f"met-{rank}")
        return (self.folder / f"met-{rank}").read_text()


def test_two_jobs_by_hand_on_one_port_do_not_mix(tmp_path: pathlib.Path) -> None:
    """A rank of the second job asks the first one's rank 0 before that one's own does."""
    with ByHand(tmp_path, ranks.free_port()) as all_ranks:
        all_ranks.shell("a", 0, 1)
        all_ranks.shell("b", 0, 1)
        all_ranks.go("a0")
        all_ranks.until_heard()
        all_ranks.go("b1")
        time.sleep(0.2)  # it asks
        all_ranks.go("b0")
        time.sleep(0.2)
        all_ranks.go("a1")
        met = {rank: all_ranks.met(rank) for rank in ("a0", "a1", "b0", "b1")}
    assert met == {"a0": "aa", "a1": "aa", "b0": "bb", "b1": "bb"}


def test_ranks_of_two_shells_find_each_other(tmp_path: pathlib.Path) -> None:
    with ByHand(tmp_path, ranks.free_port()) as all_ranks:
        for rank in (0, 1):
            all_ranks.shell("a", rank)
            all_ranks.go(f"a{rank}")
        assert [all_ranks.met("a0"), all_ranks.met("a1")] == ["aa", "aa"]


# ---- logger -------------------------------------------------------------------------------------


def say_on(rank: int, level: str, setting: str, extra: str = "None") -> str:
    program = (
        "from flatshard import _log\n"
        f"_log.set_rank({rank}, thread_only=False)\n"
        f"_log.logger.{level}('a %s', 'word', extra={extra})\n"
    )
    end = subprocess.run(
        [sys.executable, "-c", program],
        env=ranks.environment(**({"FLATSHARD_LOG": setting} if setting else {})),
        capture_output=True,
        text=True,
        timeout=ranks.DEADLINE_S,
    )
    return end.stderr


def test_log_levels_and_ranks() -> None:
    assert say_on(0, "warning", "") == "flatshard warning (rank 0): a word\n"
    assert say_on(0, "info", "") == ""
    assert say_on(0, "info", "info") == "flatshard info (rank 0): a word\n"
    assert say_on(3, "warning", "") == ""
    assert say_on(3, "debug", "all:debug") == "flatshard debug (rank 3): a word\n"
    assert say_on(3, "warning", "", "_log.every_rank") == "flatshard warning (rank 3): a word\n"
    assert "FLATSHARD_LOG=loud" in say_on(0, "info", "loud")


def test_records_carry_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flatshard"):
        _log.logger.warning("here")
    assert caplog.records[-1].rank == 0


def test_unknown_variables_are_named_once() -> None:
    end = subprocess.run(
        [sys.executable, "-c", "import flatshard, flatshard.job"],
        env=ranks.environment(FLATSHARD_TREADS="3", FLATSHARD_CPU="baseline"),
        capture_output=True,
        text=True,
        timeout=ranks.DEADLINE_S,
    )
    assert end.stderr.count("FLATSHARD_TREADS") == 1
    assert "did you mean FLATSHARD_THREADS?" in end.stderr and "FLATSHARD_CPU" not in end.stderr


def test_the_kernels_are_those_the_variable_names() -> None:
    program = "import flatshard; print(flatshard.init()._core.device)"
    end = subprocess.run(
        [sys.executable, "-c", program],
        env=ranks.environment(FLATSHARD_CPU="baseline"),
        capture_output=True,
        text=True,
        timeout=ranks.DEADLINE_S,
    )
    assert end.stdout == "cpu/baseline\n", end.stderr


@pytest.mark.parametrize("name", ["FLATSHARD_TIMEOUT", "FLATSHARD_REPORT_AFTER"])
def test_durations_from_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flatshard import init

    monkeypatch.setenv(name, "soon")
    with pytest.raises(ConfigError, match=f"{name}=soon"):
        init()
    monkeypatch.setenv(name, "12.5")
    with init() as world:
        assert 12.5 in world._core.deadlines()
    assert name in _core.env_table()

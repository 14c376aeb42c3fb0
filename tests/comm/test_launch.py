"""flatshard launch: environment, failures, signals, and that nothing stays."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import ranks

COMMAND = [sys.executable, "-m", "flatshard.cli", "launch"]


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=ranks.environment(**variables),
        capture_output=True,
        text=True,
        timeout=ranks.DEADLINE_S,
    )


@pytest.fixture
def script(tmp_path: pathlib.Path):
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text("import os, signal, sys, time\nimport flatshard\n" + text)
        return str(path)

    return write


@pytest.mark.quick
def test_environment(script) -> None:
    end = launch(
        "-n",
        "2",
        script(
            "world = flatshard.init()\n"
            "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS'\n"
            "values = [os.environ[name] for name in names.split()]\n"
            "assert int(os.environ['MASTER_PORT']) > 0 and world.all_reduce(1) == 2\n"
            "os.write(1, (' '.join(values + sys.argv[1:]) + '\\n').encode())\n"
        ),
        "--flag",
        "word",
    )
    assert end.returncode == 0, end.stderr
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    lines = sorted(end.stdout.splitlines())
    for rank, line in enumerate(lines):
        fixed = f"{rank} 2 {rank} 2 127.0.0.1 "
        assert line.startswith(fixed) and line.endswith(" --flag word"), line
        assert 1 <= int(line[len(fixed) :].split()[0]) <= share


@pytest.mark.quick
def test_a_second_world_and_the_children_of_ranks(script) -> None:
    """What was handed down serves once; later worlds of the job, and no others, still meet."""
    end = launch(
        "-n",
        "2",
        script(
            "import subprocess\n"
            "for turn in range(3):\n"
            "    with flatshard.init(timeout=30) as world:\n"
            "        assert world.all_reduce(turn) == 2 * turn\n"
            "code = 'import flatshard; flatshard.init(timeout=5)'\n"
            "child = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)\n"
            "assert 'was this process started by a rank' in child.stderr, child.stderr\n"
        ),
    )
    assert end.returncode == 0, end.stderr


@pytest.mark.quick
def test_threads_module_and_given_values(tmp_path: pathlib.Path) -> None:
    (tmp_path / "module_of_ours.py").write_text(
        "import os, flatshard\n"
        "w = flatshard.init()\n"
        "assert w.threads == 2 and os.environ['OMP_NUM_THREADS'] == '2'\n"
        "w.print(os.environ['MASTER_PORT'])\n"
    )
    port = ranks.free_port()
    path = f"{ranks.PACKAGE}:{tmp_path}"
    end = launch(
        "-n", "2", "--threads", "2", "--master-port", str(port), "-m", "module_of_ours",
        PYTHONPATH=path,
    )  # fmt: skip
    assert end.returncode == 0, end.stderr
    assert end.stdout == f"{port}\n"


@pytest.mark.quick
def test_a_failure_ends_the_job_with_its_traceback_first(script) -> None:
    end = launch(
        "-n",
        "3",
        script(
            "world = flatshard.init()\n"
            "world.barrier()\n"
            "if world.rank == 1:\n    raise LookupError('the cause')\n"
            "world.barrier()\n"
        ),
    )
    assert end.returncode == 1
    # Reports are written in one piece; the pieces of two ranks' tracebacks may mix.
    assert end.stderr.index("LookupError: the cause") < end.stderr.index("stops: rank 1")
    assert end.stderr.count("stops: rank 1") == 2
    assert end.stderr.count("PeerLost") == 2
    assert "flatshard launch: rank 1 ended with status 1; the job is over" in end.stderr


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("sys.exit(5)", 5, "rank 1 ended with status 5"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_status_of_the_first_failure(script, how: str, status: int, text: str) -> None:
    """The others compute and never meet it: they are ended."""
    end = launch(
        "-n",
        "2",
        script(
            "world = flatshard.init()\nworld.barrier()\n"
            f"if world.rank == 1:\n    {how}\n"
            "signal.signal(signal.SIGTERM, lambda *_: (print('told to end'), os._exit(0)))\n"
            "time.sleep(50)\n"
        ),
    )
    assert end.returncode == status and text in end.stderr, end.stderr
    assert "told to end" in end.stdout


@pytest.mark.quick
def test_bad_usage(tmp_path: pathlib.Path) -> None:
    missing = launch("-n", "2", str(tmp_path / "none.py"))
    assert missing.returncode == 2 and "there is no file" in missing.stderr
    assert launch("-n", "0", "x.py").returncode == 2
    assert launch("x.py").returncode == 2
    assert launch("-n", "5000", __file__).returncode != 0


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        end = launch("-n", "2", "--master-port", str(port), __file__)
    assert end.returncode == 1 and f"127.0.0.1:{port}" in end.stderr, end.stderr


def alive(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition, what: str) -> None:
    end = time.monotonic() + ranks.DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


SLEEPERS = """
world = flatshard.init()
def note(number, frame):
    os.write(1, f"signal {world.rank} {number}\\n".encode())
    if number == signal.SIGTERM:
        os._exit(3)
for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, note)
world.barrier()
os.write(1, f"pid {os.getpid()}\\n".encode())
while True:
    time.sleep(0.05)
"""


class Started:
    """A launcher that runs SLEEPERS on 2 ranks; the lines it writes."""

    def __init__(self, script) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "-n", "2", script(SLEEPERS)],
            env=ranks.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pids = [int(self.line().split()[1]) for _ in range(2)]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_signals_reach_every_rank_once(script) -> None:
    started = Started(script)
    try:
        for number in (signal.SIGINT, signal.SIGUSR1):
            started.process.send_signal(number)
            said = sorted(started.line() for _ in range(2))
            assert said == [f"signal {rank} {int(number)}\n" for rank in range(2)]
        started.process.send_signal(signal.SIGTERM)
        out, _ = started.process.communicate(timeout=ranks.DEADLINE_S)
        assert sorted(out.splitlines()) == ["signal 0 15", "signal 1 15"], out
        assert started.process.returncode == 3
    finally:
        started.end()


def test_ranks_end_with_a_launcher_that_is_killed(script) -> None:
    started = Started(script)
    assert all(alive(pid) for pid in started.pids)
    started.process.kill()
    started.process.communicate()
    wait_until(lambda: not any(alive(pid) for pid in started.pids), "ranks live on")


def test_ctrl_c_ends_waiting_ranks(script) -> None:
    """Ranks in a barrier that nobody completes, and one that computes."""
    process = subprocess.Popen(
        [
            *COMMAND,
            "-n",
            "3",
            script(
                "world = flatshard.init()\nworld.barrier()\n"
                "if world.rank == 2:\n"
                "    print('ready', flush=True)\n    time.sleep(50)\n"
                "world.barrier()\n"
            ),
        ],
        env=ranks.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=ranks.DEADLINE_S)
    assert process.returncode == 130 or process.returncode == 1, err
    assert "KeyboardInterrupt" in err


def test_a_grandchild_of_a_failed_rank_does_not_stay(script) -> None:
    end = launch(
        "-n",
        "2",
        script(
            "import subprocess\n"
            "world = flatshard.init()\n"
            "child = subprocess.Popen(['sleep', '300'])\n"
            "pids = world.all_gather(child.pid)\n"
            "world.print(*pids)\n"
            "world.barrier()\n"
            "if world.rank == 1:\n    sys.exit(4)\n"
            "world.barrier()\n"
        ),
    )
    assert end.returncode == 4
    pids = [int(word) for word in end.stdout.split()]
    wait_until(lambda: not any(alive(pid) for pid in pids), "grandchildren live on")


def test_many_jobs_at_once(script) -> None:
    """Ten launchers start together: each has a port of its own, and its own ranks."""
    path = script(
        "world = flatshard.init()\n"
        "ports = world.all_gather(int(os.environ['MASTER_PORT']))\n"
        "assert ports[0] == ports[1]\n"
        "import socket\n"
        "if world.rank == 0:\n"
        "    with socket.socket() as server:\n"
        "        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "        server.bind(('127.0.0.1', int(ports[0])))\n"
        "        server.listen()\n"
        "world.barrier()\n"
        "world.print(ports[0])\n"
    )
    jobs = [
        subprocess.Popen(
            [*COMMAND, "-n", "2", path], env=ranks.environment(), stdout=subprocess.PIPE, text=True
        )
        for _ in range(10)
    ]
    ports = [job.communicate(timeout=ranks.DEADLINE_S)[0].strip() for job in jobs]
    assert all(job.returncode == 0 for job in jobs)
    assert all(port.isdecimal() for port in ports)


@pytest.mark.torch
def test_torchrun(tmp_path: pathlib.Path) -> None:
    """The real one: its variables, its end of the others, and our report before that."""
    path = tmp_path / "script.py"
    path.write_text(
        "import flatshard, os, signal, sys\n"
        "world = flatshard.init(timeout=30)\n"
        "assert world.all_reduce(1) == 2\n"
        "if 'kill' in sys.argv and world.rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "world.barrier()\n"
        "os.write(1, b'well %d\\n' % world.rank)\n"  # in one piece: torchrun unbuffers print
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, str(path), *arguments],
            env=ranks.environment(),
            capture_output=True,
            text=True,
            timeout=ranks.DEADLINE_S * 2,
        )

    end = run()
    assert end.returncode == 0 and sorted(end.stdout.splitlines()) == ["well 0", "well 1"], end
    end = run("kill")
    assert end.returncode != 0
    assert "rank 0 stops: rank 1" in end.stderr and "died" in end.stderr, end.stderr

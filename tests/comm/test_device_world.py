"""Worlds on device "cuda": how the library is found, checked and refused, and which rank has what.

The library is csrc/cuda on the stand-in for CUDA's runtime: no GPU is needed.
"""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import flatshard as fs
from flatshard import _core, _device

DEADLINE_S = 120.0


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


# ---- without the library ------------------------------------------------------------------------


@pytest.mark.quick
def test_the_core_knows_no_cuda() -> None:
    content = pathlib.Path(_core.__file__).read_bytes()
    for symbol in (b"cudaMalloc", b"cuInit", b"cublasCreate", b"ncclCommInit", b"libcudart"):
        assert symbol not in content


@pytest.mark.quick
@pytest.mark.parametrize("word", ["gpu", "cuda:", "cuda:x", "cpu:0", "CUDA", ""])
def test_words(word: str) -> None:
    with pytest.raises(ValueError, match="expected 'cpu', 'cuda' or 'cuda:N'"):
        fs.init(device=word)
    with pytest.raises(ValueError, match="expected 'cpu', 'cuda' or 'cuda:N'"):
        fs.local_world(2, device=word)


@pytest.mark.quick
def test_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv("FLATSHARD_CUDA_LIBRARY", raising=False)
    monkeypatch.setattr(_device, "LIBRARY", tmp_path / "libfs_cuda.so")
    with pytest.raises(fs.ConfigError, match=r"no libfs_cuda\.so: nvcc was not found"):
        fs.init(device="cuda")
    monkeypatch.setenv("FLATSHARD_CUDA_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(fs.ConfigError, match="no such file"):
        fs.local_world(1, device="cuda")


@pytest.mark.quick
def test_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    monkeypatch.setenv("FLATSHARD_CUDA_LIBRARY", str(text))
    with pytest.raises(fs.ConfigError, match="could not load"):
        fs.init(device="cuda")
    monkeypatch.setenv("FLATSHARD_CUDA_LIBRARY", _core.__file__)
    with pytest.raises(fs.ConfigError, match="it has no symbol fs_plugin_get"):
        fs.init(device="cuda")


# ---- with it ------------------------------------------------------------------------------------


def test_another_build(
    cuda: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    mine = _core.build_id().encode()
    content = cuda.read_bytes()
    assert content.count(mine) >= 1
    other = tmp_path / "other.so"
    other.write_bytes(content.replace(mine, b"0" * len(mine)))
    monkeypatch.setenv("FLATSHARD_CUDA_LIBRARY", str(other))
    with pytest.raises(fs.ConfigError, match=rf"of build 0+, and this is build {mine.decode()}"):
        fs.init(device="cuda")


def test_each_rank_has_its_device(cuda: pathlib.Path) -> None:
    def rank(world: fs.World) -> tuple[str, str, float]:
        inside = fs.init(device="cuda")
        part = world.split(world.rank % 2)
        assert part is not None
        total = world.all_reduce(np.full(3, world.rank + 1.0, np.float32))
        return inside.device, part.device, float(total[0])

    assert fs.local_world(3, device="cuda").run(rank) == [
        (f"cuda:{r}", f"cuda:{r}", 6.0) for r in range(3)
    ]
    assert fs.local_world(2, device="cuda:3").run(lambda world: world.device) == [
        "cuda:3",
        "cuda:4",
    ]
    assert fs.local_world(1).run(lambda world: world.device) == ["cpu"]


def test_init_takes_the_local_rank(cuda: pathlib.Path) -> None:
    end = run(
        "import flatshard as fs\n"
        "for device in ('cuda:5', 'cuda'):\n"
        "    world = fs.init(device=device)\n"
        "    print(world.device, fs.init() is world)\n"
        "    try:\n"
        "        fs.init(device='cuda:7')\n"
        "    except fs.ConfigError as error:\n"
        "        print(error)\n"
        "    world.close()\n"
    )
    assert end.returncode == 0, end.stderr
    assert end.stdout.splitlines() == [
        "cuda:5 True",
        "device='cuda:7': the world of this process is on 'cuda:5' already; close it first",
        "cuda:0 True",
        "device='cuda:7': the world of this process is on 'cuda:0' already; close it first",
    ]


def test_launched_ranks(cuda: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import flatshard as fs\nworld = fs.init(device='cuda')\n"
        "print(f'{world.rank} {world.device} {int(world.all_reduce(1))}\\n', end='')\n"
    )
    end = subprocess.run(
        [sys.executable, "-m", "flatshard.cli", "launch", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert end.returncode == 0, end.stderr
    lines = [line.split("] ")[-1] for line in end.stdout.splitlines()]
    assert sorted(lines) == ["0 cuda:0 2", "1 cuda:1 2"]


def test_fewer_devices_than_ranks(cuda: pathlib.Path) -> None:
    program = "import flatshard as fs; fs.local_world({}, device='cuda').run(print)"
    end = run(program.format(3), CUDASIM_DEVICES="2")
    assert "ConfigError: rank 2 of local_world(3) needs device cuda:2" in end.stderr
    assert "may use 2" in end.stderr
    end = run("import flatshard as fs; fs.init(device='cuda:1')", CUDASIM_DEVICES="1")
    assert "ConfigError: rank 0" in end.stderr and "needs device cuda:1" in end.stderr


def test_a_driver_that_is_too_old(cuda: pathlib.Path) -> None:
    program = (
        "import ctypes, os, flatshard as fs\n"
        "ctypes.CDLL(os.environ['FLATSHARD_CUDA_LIBRARY']).fs_sim_set_driver({})\n"
        "fs.init(device='cuda')"
    )
    end = run(program.format(12040))
    assert "ConfigError: device 'cuda': the CUDA driver is for CUDA 12.4" in end.stderr
    end = run(program.format(0))
    assert "ConfigError: device 'cuda': no CUDA driver is loaded here" in end.stderr


def test_view_is_refused(cuda: pathlib.Path) -> None:
    def rank(world: fs.World) -> str:
        with pytest.raises(ValueError, match="computes on cuda:0") as caught:
            fs.shard({"w": np.ones(4, np.float32)}, world, sharding=fs.Sharding(gather="view"))
        return str(caught.value)

    assert 'gather="view"' in fs.local_world(1, device="cuda").run(rank)[0]


def test_import_and_fork(cuda: pathlib.Path) -> None:
    """Nothing of CUDA begins at import, so a fork between import and init is none of its matter; a
    world that a child inherits is refused, and the child ends by itself."""
    end = run(
        "import os, flatshard as fs\n"
        "def child(body):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        code = 1\n"
        "        try:\n"
        "            body(); code = 0\n"
        "        finally:\n"
        "            os._exit(code)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libfs_cuda' not in maps and 'libcuda' not in maps\n"
        "def first():\n"
        "    world = fs.init(device='cuda'); assert world.device == 'cuda:0'; world.close()\n"
        "child(first)\n"
        "world = fs.init(device='cuda')\n"
        "def second():\n"
        "    try:\n"
        "        world.barrier()\n"
        "    except RuntimeError as error:\n"
        "        assert 'parent process' in str(error)\n"
        "    else:\n"
        "        raise AssertionError\n"
        "child(second)\n"
        "world.close()\n"
    )
    assert end.returncode == 0, end.stderr

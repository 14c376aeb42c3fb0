"""``flatshard env``: this machine, as flatshard sees it."""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import _core, _device, blas
from ..errors import ConfigError
from ..models.report import size

__all__ = ["main", "report"]

#: What flatshard works with where it is installed. Asked for by name: nothing is imported.
PACKAGES = ("numpy", "torch", "transformers", "accelerate", "tokenizers", "matplotlib")


def main(arguments: Sequence[str]) -> int:
    """Prints the report, as lines or as one JSON object."""
    parser = argparse.ArgumentParser(
        prog="flatshard env", description="This machine, as flatshard sees it.", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    values = report()
    if options.json:
        print(json.dumps(values, indent=1))
        return 0
    for key, value in values.items():
        if key.endswith("_bytes"):
            key, value = key.removesuffix("_bytes"), None if value is None else size(value)
        print(f"{key:<16} {_words(value)}")
    return 0


def report() -> dict[str, Any]:
    """What is there; plain values.

    Returns
    -------
    dict
        ``machine``, ``system``, ``python``, ``flatshard``, ``build``, ``isa`` (in use), ``isas``
        (that run here), ``cores`` (this process may use), ``memory_bytes`` (of the machine, or the
        cgroup's limit where that is lower), ``memory_free_bytes``, ``blas`` (library and core),
        ``cuda`` (devices and libraries, or ``off``: why it is not used, and what was found),
        ``processes`` (can ranks be processes?), ``packages`` and ``variables`` (the FLATSHARD_*
        that are set).
    """
    try:
        library = blas.load()
    except (OSError, NotImplementedError) as error:
        library = f"none: {error}"
    limit, free = memory()
    return {
        "machine": " ".join(filter(None, (platform.machine(), processor()))),
        "system": platform.platform(),
        "python": platform.python_version(),
        "flatshard": version("flatshard"),
        "build": _core.build_id(),
        "isa": _core.cpu_isa(),
        "isas": _core.cpu_isas(),
        "cores": _core.cpu_count(),
        "memory_bytes": limit,
        "memory_free_bytes": free,
        "blas": library,
        "cuda": cuda(),
        "processes": "yes" if hasattr(os, "memfd_create") else "no: ranks are threads here",
        "packages": {name: version(name) for name in PACKAGES},
        "variables": {name: value for name in _core.env_table() if (value := os.environ.get(name))},
    }


def processor() -> str:
    """The processor's name as the system has it; empty where it has none."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else ""


def memory() -> tuple[int | None, int | None]:
    """Bytes this process may use and bytes that are free; None where the system does not say."""
    total = free = None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "MemTotal":
                total = int(value.split()[0]) * 1024
            elif key == "MemAvailable":
                free = int(value.split()[0]) * 1024
    except (OSError, ValueError):
        return None, None
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int(Path("/sys/fs/cgroup", limit_file).read_text())
            used = int(Path("/sys/fs/cgroup", used_file).read_text())
        except (OSError, ValueError):  # no such version of cgroups, or "max"
            continue
        if total is not None and limit < total:
            total, free = limit, min(free or limit, max(0, limit - used))
    return total, free


def cuda() -> dict[str, str]:
    """What there is of CUDA, or why device "cuda" cannot be used."""
    found: dict[str, str] = {}
    try:
        device = _device.load()
        for ordinal in range(device.count()):
            found[f"cuda:{ordinal}"] = device.describe(ordinal)
        for name in ("cublas", "nccl"):
            try:
                found[name] = device.library(name)
            except NotImplementedError as error:
                found[name] = f"not found: {error}"
    except (ConfigError, NotImplementedError) as error:
        found["off"] = str(error)
        home = os.environ.get("CUDA_HOME")
        if home and not Path(home, "bin", "nvcc").is_file():
            found["CUDA_HOME"] = (
                f"{home!r} holds no bin/nvcc: unset it, or name the toolkit's folder"
            )
        found.update(_toolkit_and_driver())
    return found


def _toolkit_and_driver() -> dict[str, str]:
    """Which nvcc and which driver are here, and whether what the one makes runs on the other."""
    compiler, driver = shutil.which("nvcc"), ctypes.util.find_library("cuda")
    made_for = _nvcc_release(compiler) if compiler else None
    takes = _driver_release(driver) if driver else None
    found = {
        "nvcc": f"{compiler} ({_cuda(made_for)})" if compiler else "not on the path",
        "driver": f"{driver} ({_cuda(takes)})"
        if driver
        else "no libcuda.so.1 in the loader's folders",
    }
    if made_for and takes and made_for[0] > takes[0]:
        found["toolkit"] = (
            f"nvcc is of CUDA {made_for[0]} and the driver takes CUDA {takes[0]} at most: another "
            "major version. Update the driver, or build with an nvcc of the driver's"
        )
    return found


def _cuda(release: tuple[int, int] | None) -> str:
    return f"CUDA {release[0]}.{release[1]}" if release else "does not say its version"


def _nvcc_release(compiler: str) -> tuple[int, int] | None:
    """The toolkit's version, as the compiler says it."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(said[1]), int(said[2])) if said else None


def _driver_release(library: str) -> tuple[int, int] | None:
    """The newest CUDA that the driver takes. Starts no CUDA: it only asks for the number."""
    try:
        number = ctypes.c_int(0)
        if ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def version(package: str) -> str:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _words(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, dict):
        separator = "; " if "off" in value or "cublas" in value else ", "
        return separator.join(f"{name} {item}" for name, item in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)

"""Which rank this process is, from the environment of whoever started it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ConfigError

__all__ = ["Place", "find_place", "socket_folder"]


@dataclass(frozen=True)
class Place:
    """This process in its job.

    Attributes
    ----------
    rank, size, local_rank, local_size : int
        As the launcher counts; ``local_`` counts on this host.
    name : str
        Equal on all ranks of the job, and on no other job of this user.
    launcher : str
        Who started it, for messages.
    files : tuple of int or None
        Descriptors of the job's shared state, when the launcher handed them down.
    parent : int
        The process that started this one, where somebody sets the variables by hand, and the name
        may be that of another job as well; else 0.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    name: str
    launcher: str
    files: tuple[int, int] | None = None
    parent: int = 0


def _number(environment: Mapping[str, str], name: str, launcher: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"{launcher} sets {name}, but it is {text!r} here: expected a number. "
            "Unset RANK and WORLD_SIZE to run alone, or use 'flatshard launch -n N script.py'"
        )
    return int(text)


def _check(place: Place) -> Place:
    if place.rank >= place.size or place.size < 1:
        raise ConfigError(
            f"{place.launcher}: rank {place.rank} does not exist in a world of {place.size}"
        )
    if place.local_size != place.size:
        raise NotImplementedError(
            f"a world over several hosts is not there yet: {place.launcher} started "
            f"{place.size} ranks, {place.local_size} of them on this host. Use one host"
        )
    return place


def _launched(environment: Mapping[str, str]) -> Place:
    text = environment["FLATSHARD_JOB"]
    try:
        data, locks, name = text.split(":", 2)
        files = (int(data), int(locks))
    except ValueError:
        raise ConfigError(
            f"FLATSHARD_JOB={text!r} is not what 'flatshard launch' writes; unset it"
        ) from None
    launcher = "flatshard launch"
    return Place(
        rank=_number(environment, "RANK", launcher),
        size=_number(environment, "WORLD_SIZE", launcher),
        local_rank=_number(environment, "LOCAL_RANK", launcher),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", launcher),
        name=name,
        launcher=launcher,
        files=files,
    )


def _torchrun(environment: Mapping[str, str]) -> Place:
    launcher = "torchrun (RANK, WORLD_SIZE)"
    size = _number(environment, "WORLD_SIZE", launcher)
    rank = _number(environment, "RANK", launcher)
    # Launchers that know one host only leave the local numbers out.
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), **environment}
    address = environment.get("MASTER_ADDR", "localhost")
    port = environment.get("MASTER_PORT", "0")
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(
        rank=rank,
        size=size,
        local_rank=_number(local, "LOCAL_RANK", launcher),
        local_size=_number(local, "LOCAL_WORLD_SIZE", launcher),
        name=f"{address}:{port}/{run}/{restart}/{size}",
        launcher=launcher,
        # torchrun itself listens on the port: no second one has it.
        parent=0 if "TORCHELASTIC_RUN_ID" in environment else os.getppid(),
    )


def _open_mpi(environment: Mapping[str, str]) -> Place:
    launcher = "mpirun (OMPI_COMM_WORLD_*)"
    size = _number(environment, "OMPI_COMM_WORLD_SIZE", launcher)
    job = next(
        (
            environment[name]
            for name in ("PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid")
            if environment.get(name)
        ),
        f"parent {os.getppid()}",  # every rank of a host is a child of one mpirun daemon
    )
    return Place(
        rank=_number(environment, "OMPI_COMM_WORLD_RANK", launcher),
        size=size,
        local_rank=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", launcher),
        local_size=_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", launcher),
        name=f"mpi/{job}/{size}",
        launcher=launcher,
    )


def _slurm(environment: Mapping[str, str]) -> Place:
    launcher = "srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS)"
    size = _number(environment, "SLURM_STEP_NUM_TASKS", launcher)
    nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
    on_host = size
    if nodes != "1":
        # "2(x3),1": tasks of each node in turn; this node's is enough to say no.
        on_host = int(environment.get("SLURM_STEP_TASKS_PER_NODE", "0").split("(")[0].split(",")[0])
    job, step = environment.get("SLURM_JOB_ID", "?"), environment.get("SLURM_STEP_ID", "?")
    restart = environment.get("SLURM_RESTART_COUNT", "0")
    return Place(
        rank=_number(environment, "SLURM_PROCID", launcher),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID", launcher),
        local_size=on_host,
        name=f"slurm/{job}.{step}/{restart}/{size}",
        launcher=launcher,
    )


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place: by ``flatshard launch``, torchrun, Open MPI, Slurm, or alone.

    Raises
    ------
    ConfigError
        If the variables of a launcher are incomplete or contradict each other.
    NotImplementedError
        If the ranks are on several hosts.
    """
    if environment.get("FLATSHARD_JOB"):
        return _check(_launched(environment))
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _check(_torchrun(environment))
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _check(_open_mpi(environment))
    # A batch script has SLURM_PROCID too, but is no task of a step.
    if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        return _check(_slurm(environment))
    return Place(rank=0, size=1, local_rank=0, local_size=1, name="alone", launcher="nobody")


def socket_folder(environment: Mapping[str, str] = os.environ) -> str:
    """A folder only this user can enter, for ranks that no abstract name brings together."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return os.path.join(runtime, "flatshard")
    return os.path.join(tempfile.gettempdir(), f"flatshard-{os.getuid()}")

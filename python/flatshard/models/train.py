"""The trainer of the native models: what ``flatshard train`` runs on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import flatshard

from .options import TrainConfig
from .report import StepReport, TrainResult, reason, write_result
from .run import Run
from .stop import StopRequest

if TYPE_CHECKING:
    from ..world import World

__all__ = ["TrainConfig", "TrainResult", "train"]


def write_trace(config: TrainConfig, world: World) -> None:
    """The operations of all ranks so far, on rank 0, if the configuration asks for them."""
    if config.trace and world.rank == 0:
        world.log().trace(config.trace)


def train(
    config: TrainConfig,
    *,
    world: World | None = None,
    stop: StopRequest | None = None,
    on_step: Callable[[StepReport], object] | None = None,
    on_eval: Callable[[int, float], object] | None = None,
    on_save: Callable[[int, Path], object] | None = None,
) -> TrainResult:
    """Trains a model; collective, every rank calls it with the same configuration.

    Parameters
    ----------
    config : TrainConfig
    world : World, optional
        Default: ``flatshard.init(device=config.device)``.
    stop : StopRequest, optional
        Asked after every step. Default: one that notes Ctrl-C and ``config.save_on`` while this
        runs.
    on_step, on_eval, on_save : callable, optional
        Called on every rank after a step with its :class:`StepReport`, after an evaluation with the
        step and the held-out loss, after a save with the step and the checkpoint's folder.

    Returns
    -------
    TrainResult

    Raises
    ------
    ConfigError
        If the configuration, the data, the model or the folder will not do; before anything large
        is allocated.
    CheckpointError
        If there is nothing to resume, or it is damaged or of another model.
    NonFiniteError
        If too many steps in a row were skipped.

    Notes
    -----
    A run that was stopped and resumed ends with the bits of one that was not. A step for whose
    batch a rank has no memory is skipped on every rank (``Optimizer.skip``), and counted.
    """
    config.check()
    if world is None:
        world = flatshard.init(device=config.device, threads=config.threads)
    # One that was given is entered, and left, by whoever gave it.
    with StopRequest(config.save_on) if stop is None else nullcontext(stop) as asked:
        run = Run(config, world, asked, on_step, on_eval, on_save)
        try:
            result = run.go()
            write_trace(config, world)
        except BaseException as error:
            if config.json:
                write_result(config.json, {**run.known(), "error": reason(error)}, replace=False)
            with suppress(Exception):  # what failed first is what is raised
                write_trace(config, world)
            raise
        finally:
            run.close()
    if config.json and world.rank == 0:
        values = dataclasses.asdict(result)
        if result.interrupted is not None:
            values["error"] = f"stopped by {result.interrupted} after step {result.steps}"
        write_result(config.json, values)
    return result

"""``flatshard plan MODEL``: the memory of a run, to the byte, before anything is allocated."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import cast

import flatshard

from .. import _device
from ..errors import ConfigError
from ..models.options import TrainConfig
from ..plan import _bytes as words_of
from ..policy import Gather, Partition
from .env import memory

__all__ = ["main", "of_run"]


def main(arguments: Sequence[str]) -> int:
    """Prints the table; 1 where it does not fit."""
    default = {field.name: field.default for field in fields(TrainConfig)}
    it = argparse.ArgumentParser(
        prog="flatshard plan",
        description="Bytes of every class of memory of a training run, counted without allocating.",
        allow_abbrev=False,
    )
    it.add_argument(
        "model", metavar="MODEL", help="a size (small, 125m, ...), config.json or folder"
    )
    it.add_argument("-n", "--ranks", type=int, default=1, metavar="N", help="(default: 1)")
    for name in ("stage", "batch", "length"):
        it.add_argument(f"--{name}", type=int, default=default[name], help=f"({default[name]})")
    for name in ("precision", "gather", "partition", "optimizer"):
        it.add_argument(f"--{name}", default=default[name], help=f"({default[name]})")
    it.add_argument("--device", default="cpu", help="cpu, or cuda: each rank on a GPU (cpu)")
    it.add_argument("--activation-checkpointing", action="store_true")
    it.add_argument(
        "--budget", metavar="BYTES", help="room of the host, as 16G or 800M (default: what is free)"
    )
    it.add_argument(
        "--device-budget", metavar="BYTES", help="room of each rank's GPU (default: not compared)"
    )
    it.add_argument("--json", action="store_true", help="print one JSON object")
    options = it.parse_args(arguments)
    if options.ranks < 1:
        raise ConfigError(f"-n {options.ranks}: expected at least 1 rank")
    config = TrainConfig(
        model=options.model,
        stage=options.stage,
        batch=options.batch,
        length=options.length,
        precision=options.precision,
        gather=options.gather,
        partition=options.partition,
        optimizer=options.optimizer,
        activation_checkpointing=options.activation_checkpointing,
        device=options.device,
    )
    config.check()
    made = of_run(config, options.ranks)
    room = memory()[1] if options.budget is None else read_bytes("--budget", options.budget)
    gpu = None
    if options.device_budget is not None:
        gpu = read_bytes("--device-budget", options.device_budget)
    places = [
        (needed, least, where)
        for needed, least, where in (
            (made.host_nbytes, room, "of this host"),
            (made.device_nbytes, gpu, "of each GPU"),
        )
        if least is not None
    ]
    fits = all(needed <= least for needed, least, _ in places)
    if options.json:
        table = {
            name: {"rank": made.rank(0)[name], "host": nbytes} for name, nbytes in made.host.items()
        }
        if made.device_nbytes:
            for name, nbytes in made.device(0).items():
                table[name]["device"] = nbytes
        total = {
            "rank": made.rank_nbytes,
            "host": made.host_nbytes,
            "device": made.device_nbytes,
        }
        rooms = {"room": room, "device_room": gpu}
        print(json.dumps({"memory": table, "total": total, **rooms, "fits": fits}, indent=1))
    else:
        print(made.table())
        for needed, least, where in places:
            print(
                f"{'fits' if needed <= least else 'does not fit'} in the {words_of(least)} {where}"
            )
    return 0 if fits else 1


def of_run(config: TrainConfig, ranks: int, *, budget: int | None = None) -> flatshard.Plan:
    """The plan of what ``flatshard train`` would hold.

    Parameters
    ----------
    config : TrainConfig
    ranks : int
    budget : int, bytes, optional
        Room of the host.

    Returns
    -------
    Plan

    Raises
    ------
    MemoryBudgetError
        If it is more than the budget; the text has the table.
    """
    momentum = config.optimizer == "sgd" and config.betas[0] > 0
    return flatshard.plan(
        config.model,
        world_size=ranks,
        sharding=flatshard.Sharding(
            stage=config.stage,
            partition=cast(Partition, config.partition),
            gather=cast(Gather, config.gather),
        ),
        precision=config.precision,
        optimizer="sgd-momentum" if momentum else config.optimizer,
        batch=(config.batch, config.length),
        checkpointing=config.activation_checkpointing,
        budget=budget,
        device=_device.parse(config.device)[0],
    )


def read_bytes(option: str, text: str) -> int:
    """``800M`` and the like as bytes; letters are powers of 1000, ``Mi`` and the like of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]?)(i?)B?", text)
    if match is None:
        raise ConfigError(f"{option} {text!r}: expected bytes, as 16G, 800M or 512Mi")
    number, letter, binary = match.groups()
    power = " kMGT".index(letter or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)

"""What a model's configuration comes to: parameters, units, and bytes of activations."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from .. import _core
from .._charged import Charged, charged
from .._layout import Group, Parameter, core_definition
from ..policy import Policy
from .config import LlamaConfig

__all__ = ["define", "plan_rows"]


def define(
    config: LlamaConfig, *, frozen: Iterable[str] = (), groups: Iterable[Group] = ()
) -> tuple[list[Parameter], list[tuple[str, int, int]]]:
    """Parameters and units of a configuration, as :class:`flatshard.shard.Shards` takes them.

    Parameters
    ----------
    config : LlamaConfig
        The model.
    frozen : iterable of str
        Shell patterns of names (of either name of a tied head) that are not trained.
    groups : iterable of Group
        The first group that matches a name takes it.

    Returns
    -------
    (list of Parameter, list of (str, int, int))
        Units are ``embed``, ``layers.0`` to the last, ``head``; a tied head is the embedding.

    Raises
    ------
    ValueError
        A size out of range, or a pattern that matches nothing.
    """
    rows, units = _core.llama_define(config.core())
    patterns = tuple(frozen)
    unused = set(patterns)
    parameters = []
    for name, tied, shape, unit in rows:
        names = [name] if tied is None else [name, tied]

        def any_of(wanted: Iterable[str], names: list[str] = names) -> list[str]:
            return [w for w in wanted if any(fnmatch.fnmatchcase(n, w) for n in names)]

        hits = any_of(patterns)
        unused -= set(hits)
        group = next((g.name for g in groups if any_of(g.match)), None)
        parameters.append(Parameter(name, tied, tuple(shape), unit, not hits, group))
    if unused:
        raise ValueError(f"frozen: no parameter matches {', '.join(sorted(unused))}")
    return parameters, list(units)


def plan_rows(
    config: LlamaConfig,
    policy: Policy,
    world_size: int,
    batch: tuple[int, int],
    *,
    checkpointing: bool = False,
    frozen: Iterable[str] = (),
) -> Charged:
    """What forward and backward of a micro-batch hold on a rank, on top of the shards.

    Parameters
    ----------
    config : LlamaConfig
        The model.
    policy : Policy
        Sharding and precision, resolved.
    world_size : int
        Ranks.
    batch : (int, int)
        Sequences and tokens of a sequence.
    checkpointing : bool
        Activations are computed again in backward.
    frozen : iterable of str
        As for :func:`define`.

    Returns
    -------
    dict of str to (int, int, int)
        Class to (private, world, device) bytes.
    """
    definition = core_definition(*define(config, frozen=frozen))
    rows = _core.llama_plan(
        config.core(),
        *definition,
        policy.core(),
        world_size,
        checkpointing,
        *batch,
        policy.device != "cpu",
    )
    return charged(rows)

"""From what a foreign folder holds to a committed checkpoint of ours."""

from __future__ import annotations

import fnmatch
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _core
from .._folders import BLOCK_NBYTES, FORMAT, first_of, write_index
from .._save import hidden_folder, machine
from .._version import __version__
from ..errors import CheckpointError
from ._foreign import FLOATS, Array, Foreign, nearest, renamed
from ._optimizer import moments_of, rule_of
from ._pickle_values import DTYPES
from ._sources import Zeros, numpy_dtype, same

__all__ = ["Converted", "Options", "Plan", "plan", "write"]

#: Buffers that some files hold beside the parameters, and that no target asks for.
IGNORED = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")


@dataclass(frozen=True)
class Converted:
    """What :func:`convert` did. Made by it.

    Attributes
    ----------
    folder : str
        The checkpoint's folder; "" when nothing was written (``dry_run``).
    kind : str
        What the source was.
    step : int
        The step of the checkpoint.
    parameters, numel, nbytes : int
        Parameters, their elements, and the bytes of weights and moments.
    dtypes : tuple of str
        Of the weights as they were written.
    rule : str or None
        The optimizer that the moments are for; None without moments.
    moments : tuple of str
        State arrays, "exp_avg" and the like.
    ties : tuple of (str, str)
        Second names, each with the name that it stands for.
    frozen : tuple of str
        Parameters without optimizer state of their own, where others have it.
    left_out : tuple of (str, str)
        What was not taken over, each with the reason.
    notes : tuple of str
        What was concluded and not read.
    """

    folder: str
    kind: str
    step: int
    parameters: int
    numel: int
    nbytes: int
    dtypes: tuple[str, ...]
    rule: str | None
    moments: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]
    frozen: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        state = f"{self.rule} ({', '.join(self.moments)})" if self.rule else "no optimizer state"
        lines = [
            f"{self.kind}, step {self.step}: {self.parameters} parameters, {self.numel:,} "
            f"elements, {', '.join(self.dtypes)}; {state}; {self.nbytes:,} bytes"
        ]
        lines += [f"tied: {alias} is {name}" for alias, name in self.ties]
        if self.frozen:
            lines.append(f"frozen: {first_of(self.frozen)}")
        lines += [f"note: {note}" for note in self.notes]
        whys: dict[str, list[str]] = {}
        for what, why in self.left_out:
            whys.setdefault(why, []).append(what)
        lines += [f"left out: {first_of(what)}: {why}" for why, what in whys.items()]
        lines.append(f"wrote {self.folder}" if self.folder else "nothing written")
        return "\n".join(lines)


@dataclass(frozen=True)
class Options:
    """What the caller said beside source and target."""

    step: int | None = None
    dtype: str | None = None
    rule: str | None = None
    ties: Mapping[str, str] | None = None
    leave: Sequence[str] = ()


@dataclass(frozen=True)
class _Parameter:
    name: str
    alias: str | None
    weight: Array
    moments: tuple[Array, ...]
    trainable: bool


@dataclass(frozen=True)
class Plan:
    """Everything that will be written, checked."""

    foreign: Foreign
    parameters: tuple[_Parameter, ...]
    step: int
    rule: str | None
    moments: tuple[str, ...]
    dtype: str | None
    optimizer: dict[str, Any] | None

    def stored(self, array: Array) -> str:
        """The dtype in which an array is written."""
        return self.dtype or array.dtype


# -- deciding --------------------------------------------------------------------------------------


def plan(foreign: Foreign, where: str, options: Options) -> Plan:
    """Decide what becomes of a folder's content.

    Raises
    ------
    CheckpointError
        Shapes of weights and moments that differ, state of unknown parameters, an optimizer that is
        none of ours.
    """
    renamed(foreign, where)
    _leave(foreign, where, options.leave)
    if not foreign.weights:
        raise CheckpointError(f"{where}: holds no floating-point weights")
    moments = moments_of(foreign, where)
    rule = rule_of(foreign, where, moments, options.rule) if foreign.groups or moments else None
    _tie(foreign, where, options.ties or {})
    trained = {name for group in foreign.groups for name in group["params"]} or set(foreign.state)
    if rule is None:
        trained = set(foreign.weights) - foreign.frozen
    aliases: dict[str, str] = {}
    for alias, name in foreign.ties.items():
        if name in aliases:
            raise CheckpointError(
                f"{where}: {name} is also {aliases[name]} and {alias}: a parameter has at most two "
                "names here"
            )
        aliases[name] = alias
    parameters = []
    for name, weight in foreign.weights.items():
        arrays = tuple(_moment(foreign, where, name, weight, key, moments) for key in moments)
        trainable = name in trained
        parameters.append(
            _Parameter(name, aliases.get(name), weight, arrays if trainable else (), trainable)
        )
    _check(where, parameters, options.dtype)
    for name in foreign.state:
        if name not in foreign.steps:  # SGD counts none: its first step would set the buffer anew
            foreign.steps[name] = max(options.step or foreign.step or 0, 1)
    steps = [foreign.steps.get(p.name, 0) for p in parameters if p.trainable]
    step = options.step if options.step is not None else foreign.step
    if step is None:
        step = max(steps, default=0)
    optimizer = None
    if rule is not None:
        optimizer = _optimizer(foreign, parameters, rule, moments, max(steps, default=0))
    return Plan(foreign, tuple(parameters), step, rule, moments, options.dtype, optimizer)


def _leave(foreign: Foreign, where: str, patterns: Iterable[str]) -> None:
    """Leave out what patterns name, and buffers that are known by their names."""
    said = list(patterns)
    unused = set(said)
    for name in list(foreign.weights):
        match = next((p for p in said if fnmatch.fnmatchcase(name, p)), None)
        known = name not in foreign.state and any(fnmatch.fnmatchcase(name, p) for p in IGNORED)
        if match is None and not known:
            continue
        unused.discard(match or "")
        foreign.leave(name, "asked for" if match else "a buffer that no model here has")
        del foreign.weights[name]
        foreign.state.pop(name, None)
        foreign.steps.pop(name, None)
        for group in foreign.groups:
            group["params"] = [other for other in group["params"] if other != name]
    if unused:
        pattern = sorted(unused)[0]
        hint = nearest(pattern, foreign.weights)
        raise CheckpointError(f"{where}: nothing is called {pattern!r}{hint}")


def _tie(foreign: Foreign, where: str, said: Mapping[str, str]) -> None:
    """Make one parameter of two names: those that the folder or the caller ties, and those that
    hold the same trained matrix although one of them has no state."""
    for alias, name in said.items():
        if alias in foreign.nameless and name in foreign.weights:
            foreign.ties[alias] = name
            foreign.left_out[:] = [entry for entry in foreign.left_out if entry[0] != alias]
            continue
        for each in (alias, name):
            if each not in foreign.weights and each not in foreign.ties:
                hint = nearest(each, [*foreign.weights, *foreign.nameless])
                raise CheckpointError(f"{where}: no parameter is called {each}{hint}")
        if foreign.ties.get(alias) == name or foreign.ties.get(name) == alias:
            continue
        if alias in foreign.weights and name in foreign.weights:
            _merge(foreign, where, alias, name)
    if not foreign.state:
        return
    if (foreign.config or {}).get("tie_word_embeddings") is False:
        return
    listed = {name for group in foreign.groups for name in group["params"]}
    alone = [n for n in foreign.weights if n not in foreign.state]
    alone = [n for n in alone if n not in foreign.frozen and n not in listed]
    shapes = {foreign.weights[name].shape for name in alone}
    matrices: dict[tuple[Any, ...], list[str]] = {}
    for name in foreign.state:
        if name in foreign.weights and foreign.weights[name].shape in shapes:
            matrices.setdefault(_head(foreign.weights[name]), []).append(name)
    tied = set(foreign.ties.values())
    for alias in alone:
        array = foreign.weights[alias]
        head, n = _head(array), DTYPES[array.dtype]
        values = {head[-1][at : at + n] for at in range(0, len(head[-1]), n)}
        if len(array.shape) < 2 or len(values) < 2:
            continue  # vectors and constants may be equal by chance
        for name in matrices.get(head, []):
            if name not in tied and same(array.source, foreign.weights[name].source):
                foreign.notes.append(
                    f"{alias} holds what {name} holds and has no state of its own: tied"
                )
                _merge(foreign, where, alias, name)
                tied.add(name)
                break


def _head(array: Array) -> tuple[Any, ...]:
    """Shape, dtype and first elements: what differs there is not compared further."""
    content = array.source.read(0, min(array.numel, 1024)) if array.numel else b""
    return (array.shape, array.dtype, content)


def _merge(foreign: Foreign, where: str, alias: str, name: str) -> None:
    """One parameter of two; the one that has state stays."""
    if alias in foreign.state and name not in foreign.state:
        alias, name = name, alias
    first, second = foreign.weights[name], foreign.weights[alias]
    if first.shape != second.shape or not same(first.source, second.source):
        raise CheckpointError(f"{where}: {alias} and {name} are to be tied, and hold other values")
    if alias in foreign.state:
        raise CheckpointError(f"{where}: {alias} and {name} are to be tied, and both have state")
    del foreign.weights[alias]
    foreign.steps.pop(alias, None)
    for group in foreign.groups:
        group["params"] = [other for other in group["params"] if other != alias]
    foreign.ties[alias] = name


def _moment(
    foreign: Foreign, where: str, name: str, weight: Array, key: str, moments: tuple[str, ...]
) -> Array:
    found = foreign.state.get(name, {}).get(key)
    if found is None:
        states = iter(foreign.state.values())
        dtype = next((s[moments[0]].dtype for s in states), "float32")
        return Array(weight.shape, Zeros(weight.numel, dtype))
    if found.shape != weight.shape:
        raise CheckpointError(
            f"{where}: {name} is {list(weight.shape)}, its {key} is {list(found.shape)}"
        )
    return found


def _check(where: str, parameters: Sequence[_Parameter], dtype: str | None) -> None:
    """What one checkpoint cannot hold."""
    kinds = Counter(array.dtype for p in parameters for array in p.moments)
    if len(kinds) > 1 and dtype is None:
        raise CheckpointError(
            f"{where}: moments of several dtypes ({', '.join(kinds)}): give one (dtype=, --dtype)"
        )
    for p in parameters:
        bad = next((a.dtype for a in (p.weight, *p.moments) if a.dtype not in FLOATS), None)
        if bad is not None:
            raise CheckpointError(f"{where}: {p.name} has elements of {bad}")
        if len(p.weight.shape) > 8:
            raise CheckpointError(f"{where}: {p.name} has {len(p.weight.shape)} dimensions")
        if any(ord(c) < 0x20 or ord(c) == 0x7F for c in p.name + (p.alias or "")):
            raise CheckpointError(f"{where}: {p.name!r:.100} is no name")


def _optimizer(
    foreign: Foreign,
    parameters: Sequence[_Parameter],
    rule: str,
    moments: tuple[str, ...],
    applied: int,
) -> dict[str, Any]:
    """The optimizer's part of an index, as Optimizer.state() gives it."""
    trained = [p.name for p in parameters if p.trainable]
    groups = foreign.groups or [{"params": trained}]
    if any("lr" not in group for group in groups):
        foreign.notes.append("no learning rate is told: groups have lr 0 until one is set")
    decays = [group.get("weight_decay", 0.0) for group in groups]
    made, used = [], set()
    for group, decay in zip(groups, decays, strict=True):
        params = [name for name in trained if name in set(group["params"])]
        if not params:
            continue
        wanted = "no_decay" if decay == 0.0 and any(decays) else "default"
        names = itertools.chain([wanted], (f"{wanted}-{n}" for n in itertools.count(2)))
        name = next(n for n in names if n not in used)
        used.add(name)
        made.append(
            {
                "name": name,
                "params": params,
                "lr": group.get("lr", 0.0),
                "weight_decay": decay,
                "betas": group.get("betas", [0.9, 0.999]),
                "eps": group.get("eps", 1e-8),
                "momentum": group.get("momentum", 0.0),
                "nesterov": bool(group.get("nesterov", False)),
                "lr_decay": group.get("lr_decay", 0.0),
                "lr_fixed": False,
            }
        )
    fresh = [p.name for p in parameters if p.trainable and moments and p.name not in foreign.state]
    if fresh:
        foreign.notes.append(f"no state yet, begun with zeros: {first_of(fresh)}")
    return {
        "rule": rule,
        "applied": applied,
        "skipped": 0,
        "skips_in_row": 0,
        "moments": list(moments),
        "scaler": foreign.scaler,
        "groups": made,
        "steps": {name: foreign.steps.get(name, 0) for name in trained},
    }


# -- writing ---------------------------------------------------------------------------------------


def write(made: Plan, directory: str | None) -> Converted:
    """Write the checkpoint and commit it as a save does; None only reports."""
    arrays = [
        (p.name, state, array)
        for p in made.parameters
        for state, array in zip(
            ("weight", "moment1", "moment2", "moment3"), (p.weight, *p.moments), strict=False
        )
        if array.numel
    ]
    # Wider dtypes first, so that everything lies aligned.
    arrays.sort(key=lambda entry: -DTYPES[made.stored(entry[2])])
    total = sum(array.numel * DTYPES[made.stored(array)] for _, _, array in arrays)
    folder = ""
    if directory is not None:
        for check in made.foreign.checks.values():
            check()
        parent = os.path.abspath(directory)
        with hidden_folder(parent, made.step) as begun:
            _core.io_room_check(parent, total)
            nbytes, crcs = _stream(made, arrays, begun["hidden"])
            text = write_index(_index(made, begun["serial"], nbytes, crcs))
            _core.io_commit(None, begun["hidden"], begun["final"], parent, text)
            folder = begun["final"]
    foreign = made.foreign
    return Converted(
        folder=folder,
        kind=foreign.kind,
        step=made.step,
        parameters=len(made.parameters),
        numel=sum(p.weight.numel for p in made.parameters),
        nbytes=total,
        dtypes=tuple(sorted({made.stored(p.weight) for p in made.parameters})),
        rule=made.rule,
        moments=made.moments,
        ties=tuple(foreign.ties.items()),
        frozen=tuple(p.name for p in made.parameters if not p.trainable),
        left_out=tuple(foreign.left_out),
        notes=tuple(foreign.notes),
    )


_FILE = "rank-00000-of-00001.safetensors"


def _stream(made: Plan, arrays: Sequence[tuple[str, str, Array]], folder: str) -> tuple[int, bytes]:
    kernels = _core.Kernels()

    def read(index: int, begin: int, end: int) -> Any:
        source = arrays[index][2].source
        content = source.read(begin, end)
        if made.stored(arrays[index][2]) == source.dtype:
            return content
        given = np.frombuffer(content, numpy_dtype(source.dtype))
        out = np.empty(end - begin, numpy_dtype(made.stored(arrays[index][2])))
        kernels.convert(out, given)
        return out.view(np.uint8)

    tensors = tuple(
        (f"{name}:{state}:0", made.stored(array), (array.numel,), None)
        for name, state, array in arrays
    )
    metadata = {"format": "flatshard 1", "rank": "0", "world_size": "1"}
    return _core.stream_write(folder, _FILE, tensors, metadata, read)


def _index(made: Plan, serial: int, nbytes: int, crcs: bytes) -> dict[str, Any]:
    """What index.json says: the keys of a save."""
    common = Counter(made.stored(p.weight) for p in made.parameters).most_common(1)[0][0]
    moments = [made.stored(array) for p in made.parameters for array in p.moments]
    return {
        "format": FORMAT,
        "writer": f"flatshard {__version__}, from a {made.foreign.kind}",
        "serial": serial,
        "step": made.step,
        "world_size": 1,
        "stage": 3,
        "partition": "flat",
        "param_dtype": made.foreign.param_dtype or common,
        "moments_dtype": None if made.rule is None else next(iter(moments), common),
        "crc32c_block_nbytes": BLOCK_NBYTES,
        "machine": machine(),
        "optimizer": made.optimizer,
        "user": [None],
        "parameters": [
            {
                "name": p.name,
                "tied_name": p.alias,
                "shape": list(p.weight.shape),
                "dtype": made.stored(p.weight),
                "trainable": p.trainable,
                "group": None,
            }
            for p in made.parameters
        ],
        "model": made.foreign.config,
        "files": [{"name": _FILE, "nbytes": nbytes, "crc32c": crcs.hex()}],
    }

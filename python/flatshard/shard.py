"""Shards: parameters laid flat, cut over the ranks of a world, gathered and reduced unit by
unit."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from . import _core
from .policy import Policy, Precision, Sharding, resolve

if TYPE_CHECKING:
    from .world import World

__all__ = ["Group", "Parameter", "Shards", "Unit", "shard", "state_sha256", "weights_sha256"]

Array = npt.NDArray[Any]

_log = logging.getLogger("flatshard")

_WEIGHT, _MASTER, _GRAD, _MOMENT1, _MOMENT2, _MOMENT3 = range(6)
#: Names of what a parameter has, as users say them.
_KINDS = {
    "weight": _WEIGHT,
    "master": _MASTER,
    "grad": _GRAD,
    "momentum_buffer": _MOMENT1,
    "exp_avg": _MOMENT1,
    "exp_avg_sq": _MOMENT2,
    "max_exp_avg_sq": _MOMENT3,
    "sum": _MOMENT1,
}
_NO_COUNT = -1
#: Elements of the constant that is stored again and again by Shards.fill.
_FILL_N = 1 << 18


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name; bfloat16 comes from ml_dtypes, imported when first needed."""
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the layout.

    Parameters
    ----------
    name : str
        Its name; the first one of a tie.
    tied_name : str or None
        Its second name.
    shape : tuple of int
        Its whole shape.
    unit : int
        Index of its unit.
    trainable : bool
        Whether it has a gradient and optimizer state.
    group : str or None
        Name of its group, where the caller named groups.
    """

    name: str
    tied_name: str | None
    shape: tuple[int, ...]
    unit: int
    trainable: bool = True
    group: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return (self.name,) if self.tied_name is None else (self.name, self.tied_name)

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Group:
    """Hyperparameters of the parameters whose names match a pattern.

    Parameters
    ----------
    name : str
        The group's name.
    match : tuple of str
        Shell patterns (``fnmatch``) of parameter names; the first group that matches wins.
    options : mapping
        Hyperparameters that differ from the optimizer's.
    """

    name: str
    match: tuple[str, ...]
    options: Mapping[str, Any]


class Unit:
    """Parameters that are gathered, released and reduced together. Made by :class:`Shards`."""

    def __init__(self, shards: Shards, index: int, name: str, params: Sequence[int]) -> None:
        self._shards = shards
        self._index = index
        self._params = tuple(params)
        self._gathers = 0
        #: The unit's name.
        self.name = name

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self._params)} parameters, {self.state})"

    @property
    def names(self) -> tuple[str, ...]:
        """First names of its parameters, in order."""
        return tuple(self._shards.parameters[p].name for p in self._params)

    @property
    def state(self) -> Literal["gathered", "released"]:
        """Whether the weights are readable here (by :meth:`gather`)."""
        return "gathered" if self._gathers else "released"

    def gather(self) -> dict[str, Array]:
        """Make the weights readable.

        Returns
        -------
        dict of str to read-only ndarray
            Every name (both of a tie) to the compute copy, whole shape, dtype ``precision.param``.
            With ``gather="view"`` these are the weights themselves and stay valid; with "copy" they
            are valid until :meth:`release`.

        Raises
        ------
        RuntimeError
            ``gather="copy"``: the pool is full; the text names the units that hold it.
        WorldError
            The job is over.

        Notes
        -----
        Every rank gathers the same units in the same order, as on a GPU; "copy" checks it
        at the next step. Cost: nothing with "view"; (world - 1) / world of the unit's bytes copied
        with "copy".
        """
        arrays = self._shards._core.gather(self._index)
        self._gathers += 1
        named: dict[str, Array] = {}
        for p, array in zip(self._params, arrays, strict=True):
            for name in self._shards.parameters[p].names:
                named[name] = array
        return named

    def release(self) -> None:
        """Give the buffer of a gathered unit back.

        Raises
        ------
        BufferError
            ``gather="copy"``: arrays of the unit are still in use.
        RuntimeError
            The unit is not gathered.
        """
        self._shards._core.release(self._index)
        self._gathers -= 1

    @contextlib.contextmanager
    def gathered(self, *, write: bool = False) -> Iterator[dict[str, Array]]:
        """The weights for the length of a ``with`` block.

        Parameters
        ----------
        write : bool
            Yield private, writable copies; when the block ends without an exception, every rank
            stores its own part of its own copy (collective), masters included.

        Yields
        ------
        dict of str to ndarray
            As :meth:`gather`; read-only unless ``write``.

        Notes
        -----
        With ``write`` a rank that writes another value than its peers changes its own part alone:
        compute the new value alike on every rank, or broadcast it first.
        """
        arrays = self.gather()
        try:
            if not write:
                yield arrays
                return
            copies: dict[str, Array] = {}
            for p in self._params:
                names = self._shards.parameters[p].names
                copies[names[0]] = arrays[names[0]].copy()
                for name in names[1:]:
                    copies[name] = copies[names[0]]
            arrays.clear()
            yield copies
            with self._shards.storing() as store:
                for p in self._params:
                    store(p, _WEIGHT, copies[self._shards.parameters[p].name])
        finally:
            arrays.clear()
            self.release()

    def reduce(self, grads: Mapping[str, Array], *, count: int | None = None) -> None:
        """Hand in this micro-batch's gradients of the unit; they are summed over ranks.

        Parameters
        ----------
        grads : mapping of str to ndarray
            Name (either of a tie; both add up) to gradient: whole shape, any float dtype. Copied
            before this returns. Names left out had no gradient.
        count : int, optional
            Tokens or samples of this rank's micro-batch, where gradients are sums over them: the
            step divides by the sum of counts of all ranks and micro-batches. The same for every
            unit of a micro-batch. None on every rank: a plain mean over ranks, micro-batches added.

        Raises
        ------
        KeyError
            A name is not the unit's.
        ValueError
            A wrong shape, a frozen parameter, or a count that differs within the micro-batch.

        Notes
        -----
        The first unit that comes a second time begins a new micro-batch; units that did not come
        are absent. Cost: one copy here, and one pass over the sum of all ranks' gradients of the
        owned part.
        """
        shards = self._shards
        pairs: list[tuple[int, Array]] = []
        for name, grad in grads.items():
            p = shards.index(name)
            if p not in self._params:
                raise KeyError(f"{name} is not a parameter of unit {self.name}")
            parameter = shards.parameters[p]
            array = np.ascontiguousarray(_as_array(name, grad))
            if array.shape != parameter.shape and not (parameter.shape == () and array.size == 1):
                raise ValueError(
                    f"gradient of {name}: shape {array.shape}, expected {parameter.shape}"
                )
            pairs.append((p, array))
        shards._begin_reduce(self._index, count)
        for p, array in pairs:
            shards._core.grad_put(p, array)
        shards._core.grad_publish(self._index, False)


class Shards:
    """Sharded parameters, gradients and optimizer state of one model on one rank.

    Made by :func:`shard` or by a model; iterating yields its units.

    Parameters
    ----------
    world : World
        The ranks.
    parameters : sequence of Parameter
        Listed unit by unit.
    units : sequence of (str, int, int)
        Name, first place and last place in the order of publishing gradients.
    policy : Policy
        What :func:`flatshard.policy.resolve` decided.
    groups : sequence of Group
        Named groups, for the optimizer.

    Notes
    -----
    Opening is collective: layouts and policies are compared before anything is allocated.
    """

    def __init__(
        self,
        world: World,
        *,
        parameters: Sequence[Parameter],
        units: Sequence[tuple[str, int, int]],
        policy: Policy,
        groups: Sequence[Group] = (),
    ) -> None:
        check_groups(groups, parameters)
        #: The world that the shards live in.
        self.world = world
        #: Every parameter, in the order of the layout.
        self.parameters = tuple(parameters)
        #: Sharding and precision as resolved.
        self.policy = policy
        #: Named groups.
        self.groups = tuple(groups)
        self._definition = core_definition(self.parameters, units)
        self._core = _core.Shards(world._core, *self._definition, policy.core())
        self._index = {name: i for i, p in enumerate(self.parameters) for name in p.names}
        members: list[list[int]] = [[] for _ in units]
        for i, parameter in enumerate(self.parameters):
            members[parameter.unit].append(i)
        #: Every unit, in the order of the layout.
        self.units = tuple(Unit(self, u, name, members[u]) for u, (name, _, _) in enumerate(units))
        self._moments: tuple[str, ...] = ()
        self._reduced: set[int] = set()
        self._count: int | None = None

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)

    @property
    def shards(self) -> Shards:
        """Itself: what optimizers and checkpoints ask of anything sharded."""
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, both of a tie, in the order of the layout."""
        return tuple(name for p in self.parameters for name in p.names)

    def unit(self, name: str) -> Unit:
        """The unit with this name; KeyError names those there are."""
        for unit in self.units:
            if unit.name == name:
                return unit
        raise KeyError(f"no unit {name!r}; there are {', '.join(u.name for u in self.units)}")

    def index(self, name: str) -> int:
        """Index of the parameter with this name; KeyError otherwise."""
        try:
            return self._index[name]
        except KeyError:
            raise KeyError(f"no parameter {name!r}") from None

    def close(self) -> None:
        """Give the memory back. Never waits; twice is fine. Arrays of gathered units stay valid
        with ``gather="view"``; with "copy" they must be gone (BufferError)."""
        self._core.close()

    # -- per-parameter access ---------------------------------------------------------------------

    def _kind(self, what: str) -> int:
        known = ("weight", "master", "grad", *self._moments)
        if what not in known:
            raise ValueError(f"what={what!r}: expected one of {', '.join(known)}")
        return _KINDS[what]

    def dtype(self, name: str, what: str = "weight") -> np.dtype[Any]:
        """The dtype in which ``what`` of the parameter called ``name`` is kept."""
        kind = self._kind(what)
        parameter = self.parameters[self.index(name)]
        precision = self.policy.precision
        if kind == _GRAD:
            return numpy_dtype(precision.accumulate)
        if kind >= _MOMENT1:
            return numpy_dtype(precision.moments)
        if kind == _MASTER and (precision.master is not None and parameter.trainable):
            return numpy_dtype("float32")
        return numpy_dtype(precision.param)

    def full(self, name: str, what: str = "weight") -> Array:
        """A private copy of a whole parameter, gradient, master or moment.

        Parameters
        ----------
        name : str
            Either name of a tie.
        what : {"weight", "master", "grad"} or a moment of the optimizer
            What to read; moments are "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"
            and "sum". "master" is the fp32 weight behind a low-precision one, else the weight.
            "grad" is the sum over ranks so far, neither divided nor clipped; zero if there is none.

        Returns
        -------
        ndarray
            Whole shape, dtype as kept.

        Raises
        ------
        KeyError, ValueError
            No such parameter, or it has no such state (a frozen one has no gradient).

        Notes
        -----
        On one host no other rank takes part; between steps any subset of ranks may read.
        """
        p = self.index(name)
        out = np.empty(self.parameters[p].shape, self.dtype(name, what))
        self._core.load(p, self._kind(what), 0, out)
        return out

    def local(self, name: str, what: str = "weight") -> tuple[Array, tuple[int, int]]:
        """A private copy of what this rank speaks for. Never a collective.

        Parameters
        ----------
        name, what : str
            As for :meth:`full`.

        Returns
        -------
        array : ndarray, 1-D
            Elements [begin, end) of the flattened parameter.
        (begin, end) : tuple of int
            The range; equal when this rank owns nothing of it.
        """
        p = self.index(name)
        begin, end = self._core.range(p, self.world.rank)
        out = np.empty(end - begin, self.dtype(name, what))
        self._core.load(p, self._kind(what), begin, out)
        return out, (begin, end)

    def set_full(self, name: str, array: Array, what: str = "weight") -> None:
        """Replace a whole parameter, master or moment. Collective.

        Parameters
        ----------
        name : str
            Either name of a tie.
        array : ndarray
            Whole shape, any float dtype, equal on every rank: each stores its own part.
        what : str
            As for :meth:`full`; "weight" and "master" both set the master and the compute copy.
        """
        p = self.index(name)
        kind = self._kind(what)
        value = np.asarray(array, order="C")  # a scalar stays one
        if value.shape != self.parameters[p].shape:
            raise ValueError(f"{name}: shape {value.shape}, expected {self.parameters[p].shape}")
        with self.storing() as store:
            store(p, kind, value)

    def fill(self, what: str, value: float) -> None:
        """Set every element of a moment to one value. Collective.

        Parameters
        ----------
        what : str
            Name of the moment.
        value : float
            Rounded to the dtype in which it is kept.
        """
        kind = self._kind(what)
        if kind < _MOMENT1:
            raise ValueError(f"what={what!r}: expected one of {', '.join(self._moments)}")
        most = max((p.numel for p in self.parameters if p.trainable), default=0)
        constant = np.full(min(most, _FILL_N), value, np.float32)
        with self.storing() as store:
            for index, parameter in enumerate(self.parameters):
                if parameter.trainable:
                    for begin in range(0, parameter.numel, _FILL_N):
                        store(index, kind, constant[: parameter.numel - begin], begin)

    @contextlib.contextmanager
    def storing(self) -> Iterator[Callable[..., None]]:
        """A batch of stores between two fences. Collective.

        Yields
        ------
        callable
            ``store(index, kind, array, begin=0)`` writes elements from ``begin`` on; parts that
            other ranks keep are ignored.
        """
        self._core.store_begin()

        def store(index: int, kind: int, array: Array, begin: int = 0) -> None:
            self._core.store(index, kind, begin, np.ascontiguousarray(array))

        yield store
        self._core.store_end()

    # -- micro-batches of callers with arrays -----------------------------------------------------

    def _begin_reduce(self, unit: int, count: int | None) -> None:
        if count is not None and count < 0:
            raise ValueError(f"count={count!r}: expected 0 or more")
        if unit in self._reduced:
            self.end_micro_batch()
        elif self._reduced and count != self._count:
            raise ValueError(
                f"count={count!r} for this unit and {self._count!r} for an earlier one of the same "
                "micro-batch"
            )
        self._reduced.add(unit)
        self._count = count

    def end_micro_batch(self) -> None:
        """End the micro-batch of :meth:`Unit.reduce` calls: units that did not come are absent.
        Called by the step, and by the first unit that comes a second time."""
        if self._reduced:
            count = self._count
            self._reduced.clear()
            self._core.round_end(_NO_COUNT if count is None else count, False)

    # -- memory -----------------------------------------------------------------------------------

    def planned(self) -> dict[str, tuple[int, int]]:
        """What the plan says these shards hold on this rank: class to (private, world) bytes."""
        rows = _core.shards_plan(
            *self._definition,
            self.policy.core(),
            self.world.size,
            self.world.rank,
            len(self._moments),
        )
        return {name: (row[0], row[1]) for name, row in rows.items()}


def core_definition(
    parameters: Sequence[Parameter], units: Iterable[tuple[str, int, int]]
) -> tuple[list[tuple[Any, ...]], list[tuple[str, int, int]]]:
    """Parameters and units as the core takes them."""
    numbers: dict[str | None, int] = {None: 0}
    rows = []
    for p in parameters:
        group = numbers.setdefault(p.group, len(numbers))
        rows.append((p.name, p.tied_name, p.shape, p.unit, p.trainable, group))
    return rows, list(units)


def default_unit(name: str) -> str:
    """The unit of a parameter unless the caller says otherwise: its name up to the first numbered
    component ("model.layers.3.mlp.weight" -> "model.layers.3"), else its first component."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def _take_groups(groups: Mapping[str, Mapping[str, Any]] | None) -> tuple[Group, ...]:
    taken = []
    for name, options in (groups or {}).items():
        rest = dict(options)
        match = rest.pop("match", None)
        if not match:
            raise ValueError(f'groups[{name!r}] needs "match": a list of parameter name patterns')
        taken.append(Group(name, (match,) if isinstance(match, str) else tuple(match), rest))
    return tuple(taken)


def check_groups(groups: Sequence[Group], parameters: Sequence[Parameter]) -> None:
    """Refuse a pattern that no parameter matches: it is a typing error, and would train with other
    hyperparameters than were asked for."""
    names = [name for p in parameters for name in p.names]
    for group in groups:
        for pattern in group.match:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
                hint = f"; the nearest name is {near[0]}" if near else ""
                raise ValueError(f"groups[{group.name!r}]: no parameter matches {pattern!r}{hint}")


def _as_array(name: str, value: Any) -> Array:
    """A float array from anything NumPy understands, or that speaks DLPack on the CPU."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        array = np.asarray(value)
    else:
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError):
            array = np.asarray(value)  # bfloat16, which NumPy's DLPack does not know
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name}: dtype {array.dtype}, expected a float dtype")
    return array


def _raw(array: Array) -> memoryview:
    """The bytes of a contiguous array, of any dtype and shape."""
    return memoryview(array.reshape(-1).view(np.uint8).data)


def _agree_on_values(world: World, arrays: Mapping[str, Array]) -> bool:
    """Whether every rank passed the same bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays.values():
        digest.update(_raw(np.ascontiguousarray(array)))
    mine = np.frombuffer(digest.digest(), np.int64)
    return bool(np.all(world.all_gather(mine) == mine))


def shard(
    params: Mapping[str, Array],
    world: World,
    *,
    sharding: Sharding = Sharding(),
    precision: Precision = "fp32",
    unit_of: Callable[[str], str] | None = None,
    frozen: Iterable[str] = (),
    groups: Mapping[str, Mapping[str, Any]] | None = None,
) -> Shards:
    """Shard a mapping of arrays over the ranks of a world. Collective.

    Parameters
    ----------
    params : mapping of str to ndarray
        Name to initial value: float arrays of any shape, of NumPy or of a library whose arrays it
        or DLPack can read on the CPU. One array under two names is a tie.
        Copied.
    world : World
        The ranks.
    sharding : Sharding
        What each rank keeps.
    precision : str or MixedPrecision
        A preset ("fp32", "bf16", "bf16-pure", "bf16-pure-sr", "fp16") or a mix.
    unit_of : callable, optional
        Parameter name to unit name; by default the name up to its first numbered component.
    frozen : iterable of str
        Names without gradient and optimizer state.
    groups : mapping, optional
        ``{name: {"match": [patterns], "lr": ..., ...}}`` for the optimizer.

    Returns
    -------
    Shards
        With the values of rank 0 where ranks passed different ones (a warning says so).

    Raises
    ------
    TypeError, ValueError
        A value that is no float array, an unknown name in ``frozen``.
    CollectiveMismatch
        Ranks passed different names, shapes, or policies.

    Notes
    -----
    Gradients go on the wire in the arrays' own dtype unless ``MixedPrecision.reduce`` says
    otherwise. Memory: each rank keeps about 1/world of what the stage shards; ``flatshard.plan``
    lists the bytes.
    """
    arrays: dict[str, Array] = {}
    for name, value in params.items():
        arrays[name] = _as_array(name, value)
    unknown = set(frozen) - set(arrays)
    if unknown:
        raise ValueError(f"frozen: no parameter {', '.join(sorted(unknown))}")
    parameters, units, values = _define(params, arrays, unit_of or default_unit, frozenset(frozen))
    taken = _take_groups(groups)
    dtypes = {a.dtype.name for a in arrays.values()}
    produced = "bfloat16" if dtypes == {"bfloat16"} else "float32"
    policy = resolve(world.size, sharding=sharding, precision=precision, produced=produced)
    shards = Shards(world, parameters=parameters, units=units, policy=policy, groups=taken)
    try:
        equal = _agree_on_values(world, values)
        if not equal and world.is_main:
            _log.warning("ranks passed different initial values; all take those of rank 0")
        with shards.storing() as store:
            for index, parameter in enumerate(parameters):
                value = np.ascontiguousarray(values[parameter.name])
                if not equal:
                    value = world.broadcast(value.copy(), root=0)
                store(index, _WEIGHT, value)
    except BaseException:
        shards.close()
        raise
    return shards


def _define(
    params: Mapping[str, Array],
    arrays: Mapping[str, Array],
    unit_of: Callable[[str], str],
    frozen: frozenset[str],
) -> tuple[list[Parameter], list[tuple[str, int, int]], dict[str, Array]]:
    """Ties found by identity, parameters sorted by unit, units in order of first appearance.
    Gradients are expected from the last unit to the first; a tie across units
    belongs to its first name's."""
    first_name: dict[int, str] = {}
    second: dict[str, str] = {}
    for name in params:
        owner = first_name.setdefault(id(params[name]), name)
        if owner != name:
            if owner in second:
                raise ValueError(
                    f"{owner}, {second[owner]} and {name} are one array; two names are the most"
                )
            second[owner] = name
    order: dict[str, list[str]] = {}
    for name in arrays:
        if name not in second.values():
            order.setdefault(unit_of(name), []).append(name)
    last = len(order) - 1
    units = [(unit, last - u, last - u) for u, unit in enumerate(order)]
    parameters = [
        Parameter(
            name=name,
            tied_name=second.get(name),
            shape=arrays[name].shape,
            unit=u,
            trainable=name not in frozen and second.get(name) not in frozen,
        )
        for u, unit in enumerate(order)
        for name in order[unit]
    ]
    return parameters, units, {p.name: arrays[p.name] for p in parameters}


def _hash(target: Any, kinds: Sequence[str], trainable_only: bool) -> str:
    shards = cast(Shards, target.shards)
    digest = hashlib.sha256()
    for parameter in shards.parameters:
        if trainable_only and not parameter.trainable:
            continue
        for what in kinds:
            array = shards.full(parameter.name, what)
            head = f"{parameter.name}\0{array.dtype.name}\0{parameter.shape}\0".encode()
            digest.update(head)
            digest.update(_raw(array))
    return digest.hexdigest()


def weights_sha256(target: Any) -> str:
    """SHA-256 over every parameter: name, dtype, shape, little-endian bytes.

    Parameters
    ----------
    target : Shards or anything with ``.shards``
        The fp32 master is hashed where there is one, else the weight: whole tensors, so the value
        does not depend on world size, stage or partition.

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    return _hash(target, ("master",), False)


def state_sha256(target: Any) -> str:
    """As :func:`weights_sha256`, over the optimizer's moments.

    Parameters
    ----------
    target : Shards or anything with ``.shards``
        With an optimizer that keeps moments, else the hash of nothing.
    """
    shards = cast(Shards, target.shards)
    return _hash(target, shards._moments, True)

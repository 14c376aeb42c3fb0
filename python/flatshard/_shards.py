"""Shards: parameters laid flat and cut over the ranks of a world."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from ._arrays import Array
from ._charged import Charged, charged
from ._copies import check_copies
from ._kinds import GRAD, KINDS, MASTER, MOMENT1
from ._layout import Group, Parameter, check_groups, core_definition, matching, numpy_dtype
from ._same import check_same, describe_model
from ._unit import Unit
from .policy import Policy

if TYPE_CHECKING:
    from .config import Settings
    from .world import World

__all__ = ["Shards"]

_NO_COUNT = -1
#: Elements of the constant that is stored again and again by Shards.fill.
_FILL_N = 1 << 18


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
    dtypes : sequence of str
        Of the arrays that the values come from, one for each parameter; empty: not known.

    Raises
    ------
    CollectiveMismatch
        Ranks differ in a parameter, sharding, precision or group; it says which rank, in what. On
        all ranks, before anything is allocated; the world stays usable.

    Notes
    -----
    Opening is collective.
    """

    def __init__(
        self,
        world: World,
        *,
        parameters: Sequence[Parameter],
        units: Sequence[tuple[str, int, int]],
        policy: Policy,
        groups: Sequence[Group] = (),
        dtypes: Sequence[str] = (),
    ) -> None:
        check_groups(groups, parameters)
        description = describe_model(parameters, units, policy, groups, dtypes)
        check_same(world, "model", description)
        #: The world that the shards live in.
        self.world = world
        #: Every parameter, in the order of the layout.
        self.parameters = tuple(parameters)
        #: Sharding and precision as resolved.
        self.policy = policy
        #: Named groups.
        self.groups = tuple(groups)
        #: What a configuration asked for, if ``Settings.attach`` was called; shown by describe.
        self.settings: Settings | None = None
        self._definition = core_definition(self.parameters, units)
        self._core = _core.Shards(world._core, *self._definition, policy.core())
        self._index = {name: i for i, p in enumerate(self.parameters) for name in p.names}
        members: list[list[int]] = [[] for _ in units]
        for i, parameter in enumerate(self.parameters):
            members[parameter.unit].append(i)
        #: Every unit, in the order of the layout.
        self.units = tuple(Unit(self, u, name, members[u]) for u, (name, _, _) in enumerate(units))
        self._moments: tuple[str, ...] = ()
        self._frozen: frozenset[int] = frozenset()  # for now: see freeze
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
        return KINDS[what]

    def dtype(self, name: str, what: str = "weight") -> np.dtype[Any]:
        """The dtype in which ``what`` of the parameter called ``name`` is kept."""
        kind = self._kind(what)
        parameter = self.parameters[self.index(name)]
        precision = self.policy.precision
        if kind == GRAD:
            return numpy_dtype(precision.accumulate)
        if kind >= MOMENT1:
            return numpy_dtype(precision.moments)
        if kind == MASTER and (precision.master is not None and parameter.trainable):
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
        self._core.load_kept(p, self._kind(what), begin, out)
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
        if kind < MOMENT1:
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
        if self._core.agreed():
            raise RuntimeError(
                f"rank {self.world.rank}: a gradient of unit {self.units[unit].name} came between "
                "grad_norm() and step(), or after a step() that was interrupted: call step() to "
                "end it, or zero() to drop it"
            )
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

    def check(self) -> None:
        """Compare, over the ranks, all copies of weights and state that must be equal. Collective,
        between steps.

        Compute copies that ranks hold whole (``gather="copy"`` at stages 0 to 2), masters and
        moments of replicated shards (stage 0, ``replicate``), and on each rank the compute copy
        with its separate master, rounded. Of what exists once, there is nothing to compare.

        Raises
        ------
        CollectiveMismatch
            On every rank: names parameter, elements, and the rank whose copy differs from most of
            the others. The world stays usable; nothing is repaired.

        Notes
        -----
        Reads each byte that this rank holds once (CRC-32C, with the processor's instruction), and
        exchanges 48 bytes a parameter and rank.
        """
        check_copies(self)

    # -- freezing and thawing ---------------------------------------------------------------------

    @property
    def frozen(self) -> tuple[str, ...]:
        """First names of the parameters that are frozen: when the shards were opened, or for now by
        :meth:`freeze`."""
        return tuple(
            p.name for i, p in enumerate(self.parameters) if not p.trainable or i in self._frozen
        )

    def trains(self, name: str) -> bool:
        """Whether the parameter called ``name`` may have a gradient now."""
        index = self.index(name)
        return self.parameters[index].trainable and index not in self._frozen

    def freeze(self, patterns: str | Iterable[str]) -> None:
        """Stop training some parameters until :meth:`thaw`. Collective, between steps.

        A frozen parameter has no gradient: it is in no norm, neither updated nor decayed, and its
        step count stands. Native models do not compute its gradient; :meth:`Unit.reduce` refuses
        one.

        Parameters
        ----------
        patterns : str or iterable of str
            Shell patterns (``fnmatch``) of parameter names, either name of a tie. What is frozen
            already stays so.

        Raises
        ------
        ValueError
            A pattern that no parameter matches; the nearest name is given. Nothing changed.
        RuntimeError
            Some rank has gradients of a step that was not taken. Raised on every rank; nothing
            changed.
        CollectiveMismatch
            The ranks would freeze different parameters.

        Notes
        -----
        Weights, masters and moments stay as they are, and keep their memory: thawing goes on from
        them. For a parameter that is never trained, ``frozen=`` when opening costs no memory.
        One fence; nothing is allocated. A checkpoint with the optimizer says what is frozen.
        """
        patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        found = matching("freeze", patterns, self.parameters)
        self.set_frozen(self._frozen | {i for i in found if self.parameters[i].trainable})

    def thaw(self, patterns: str | Iterable[str] = "*") -> None:
        """Train parameters again that :meth:`freeze` froze, from the state they have kept.
        Collective, between steps.

        Parameters
        ----------
        patterns : str or iterable of str
            As for :meth:`freeze`; all, unless given.

        Raises
        ------
        ValueError
            A pattern that no parameter matches, or only such as were frozen when the shards were
            opened: these have no room for gradients and state. Nothing changed.
        RuntimeError, CollectiveMismatch
            As for :meth:`freeze`.
        """
        patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        found: set[int] = set()
        for pattern in patterns:
            matched = matching("thaw", [pattern], self.parameters)
            if not any(self.parameters[i].trainable for i in matched):
                name = self.parameters[min(matched)].name
                raise ValueError(
                    f"thaw: {name} was frozen when the shards were opened and has no room for "
                    "gradients and state; open it trainable, and freeze it then"
                )
            found |= matched
        self.set_frozen(self._frozen - found)

    def set_frozen(self, indices: Iterable[int]) -> None:
        """Freeze exactly the parameters with these indices. Collective, between steps; see
        :meth:`freeze`."""
        chosen = frozenset(indices)
        self._core.freeze(bytes(i in chosen for i in range(len(self.parameters))))
        self._frozen = chosen

    # -- memory -----------------------------------------------------------------------------------

    def planned(self) -> Charged:
        """What the plan says these shards hold on this rank: class to (private, world, device)
        bytes."""
        rows = _core.shards_plan(
            *self._definition,
            self.policy.core(),
            self.world.size,
            self.world.rank,
            len(self._moments),
            self.policy.device != "cpu",
        )
        return charged(rows)

"""The ranks of a world as a grid with named axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .world import World

__all__ = ["Mesh"]


class Mesh(Mapping[str, "World"]):
    """A grid of ranks: each axis is the world of the ranks that differ in it alone. Made by
    :meth:`flatshard.World.mesh`.

    Parameters
    ----------
    world : World
        The ranks, laid out row by row: the last axis varies fastest.
    axes : mapping of str to int
        Name to length; the product is the world's size. One length may be -1: what is left.

    Attributes
    ----------
    shape : dict of str to int
        Length of each axis.
    coordinates : dict of str to int
        Where this rank is.

    Raises
    ------
    ValueError
        The lengths do not multiply to the world's size. Before anything is split.
    """

    def __init__(self, world: World, axes: Mapping[str, int]) -> None:
        self.shape = _lengths(axes, world.size)
        self.coordinates: dict[str, int] = {}
        self._worlds: dict[str, World] = {}
        rest = world.rank
        for name, length in reversed(list(self.shape.items())):
            rest, self.coordinates[name] = divmod(rest, length)
        self.coordinates = {name: self.coordinates[name] for name in self.shape}
        stride = 1
        for name, length in reversed(list(self.shape.items())):
            along = self.coordinates[name]
            part = world.split(world.rank - along * stride, key=along)
            assert part is not None
            self._worlds[name] = part
            stride *= length

    def __getitem__(self, name: str) -> World:
        return self._worlds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shape)

    def __len__(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        where = ", ".join(f"{n} {self.coordinates[n]} of {k}" for n, k in self.shape.items())
        return f"Mesh({where})"

    def close(self) -> None:
        """Leave the worlds of the axes; the world itself stays. Never waits."""
        for world in self._worlds.values():
            world.close()


def _lengths(axes: Mapping[str, int], size: int) -> dict[str, int]:
    lengths = dict(axes)
    if not lengths:
        raise ValueError("a mesh needs an axis: world.mesh(replicate=2, shard=-1)")
    bad = {n: k for n, k in lengths.items() if k < 1 and k != -1}
    open_axes = [n for n, k in lengths.items() if k == -1]
    if bad or len(open_axes) > 1:
        raise ValueError(
            f"mesh axes {lengths}: expected lengths of 1 or more, at most one of them -1"
        )
    known = math.prod(k for k in lengths.values() if k != -1)
    if open_axes and size % known == 0:
        lengths[open_axes[0]] = size // known
    if math.prod(lengths.values()) != size or (open_axes and size % known):
        raise ValueError(f"mesh axes {dict(axes)} do not multiply to the world size {size}")
    return lengths

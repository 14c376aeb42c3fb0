"""How the weights of a sharded module are held between and during forward and backward.

One abstract class, one class for each way. With ``_views.Views`` every Parameter is always whole:
over memory that all ranks of the host map (``gather="view"``), or over the rank's own whole copy
(``gather="copy"`` at stages 0 to 2). With ``_copies.Copies`` (``gather="copy"`` at stage 3, and a
world on a GPU at any) it has memory only while its unit runs. Nothing else in this package asks how
weights are held.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ._module import Sharded

__all__ = ["Held", "hold"]


class Held(abc.ABC):
    """What the rest of the package may ask of the weights.

    Parameters
    ----------
    sharded : Sharded
        The module; its shards are open and hold the values.
    """

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded

    @abc.abstractmethod
    def attach(self) -> None:
        """Give every Parameter its memory and install what forward and backward need. Called once,
        after the values are stored and before hooks for gradients are installed."""

    @abc.abstractmethod
    def detach(self) -> None:
        """Undo `attach`: every Parameter an ordinary private tensor with the current values."""

    @abc.abstractmethod
    def check(self, where: str) -> None:
        """Raise RuntimeError, naming the Parameter and the cure, if somebody else than this package
        wrote or replaced a Parameter since the last `refresh`. Local. ``where`` says what was about
        to happen."""

    @abc.abstractmethod
    def refresh(self) -> None:
        """The weights have moved (a step, a load): make the Parameters show it, tell autograd, and
        take their present state as the right one. Never waits in view mode."""

    @abc.abstractmethod
    def changed(self, index: int) -> bool:
        """Did somebody write Parameter ``index`` since the last `refresh`? (A load does, and its
        hook asks.)"""

    @abc.abstractmethod
    def lend(self, values: list[torch.Tensor] | None) -> None:
        """Every Parameter an ordinary tensor that may be written: over ``values``, or, with None,
        over what it has (a load writes there, and asks `changed`). Until `restore` or `refresh`."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Undo `lend` with values: what was written is dropped."""

    @abc.abstractmethod
    def whole(self, index: int) -> torch.Tensor:
        """Parameter ``index``'s weight, whole, to read. A collective only in copy mode."""


def hold(sharded: Sharded) -> Held:
    """The class for the policy that the module was sharded with."""
    if sharded.shards.policy.weights == "shard" or sharded.world.device != "cpu":
        from ._copies import Copies

        return Copies(sharded)
    from ._views import Views

    return Views(sharded)

"""Letting a model write more than it was trained to see at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .llama import Llama

__all__ = ["write"]


def write(
    model: Llama,
    ids: NDArray[np.int32],
    *,
    n: int,
    length: int,
    temperature: float,
    seed: int,
) -> NDArray[np.int32]:
    """Goes on from ids with a window of ``length`` tokens, moved on by half of it at a time.

    A model that never saw a position writes badly there, whatever its tables allow. Collective
    where :meth:`Llama.generate` is.

    Parameters
    ----------
    model : Llama
    ids : (m,) ndarray of int32
        At least one token.
    n : int
        Tokens to add.
    length : int
        Tokens seen at most, those written included; at least 2.
    temperature, seed
        See :meth:`Llama.generate`.

    Returns
    -------
    (m + n,) ndarray of int32
    """
    text = ids
    window = 0
    while n > 0:
        seen = text if text.size < length else text[-(length // 2) :]
        now = min(n, length - seen.size)
        longer = model.generate(seen, n=now, temperature=temperature, seed=seed + window)
        text = np.concatenate([text, longer[seen.size :]])
        n -= now
        window += 1
    return text

"""Hashes of weights and optimizer state that do not depend on how they are sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

from ._arrays import raw
from ._shards import Shards

__all__ = ["state_sha256", "weights_sha256"]


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
            digest.update(raw(array))
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

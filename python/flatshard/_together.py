"""Doing things on one rank, or on each, so that a failure is the same exception everywhere."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _core, errors

if TYPE_CHECKING:
    from .shard import Shards
    from .world import World

__all__ = ["exchange", "on_first", "shards_of", "stored_dtype"]


def _told(rank: int, error: BaseException) -> dict[str, Any]:
    number = error.errno if isinstance(error, OSError) else None
    text = (error.strerror if number is not None else None) if isinstance(error, OSError) else None
    path = getattr(error, "filename", None)
    return {
        "type": type(error).__name__,
        "text": text or str(error),
        "errno": number,
        "path": None if path is None else str(path),
        "rank": rank,
    }


def _raised(told: dict[str, Any]) -> BaseException:
    kind = getattr(errors, told["type"], None) or getattr(builtins, told["type"], RuntimeError)
    if isinstance(told["errno"], int):
        return OSError(told["errno"], told["text"], told["path"])
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = RuntimeError
    text = told["text"] if told["rank"] == 0 else f"rank {told['rank']}: {told['text']}"
    try:
        return kind(text)
    except TypeError:  # a built-in that needs more arguments
        return RuntimeError(f"{told['type']}: {text}")


def _answer(rank: int, call: Callable[[], Any]) -> tuple[bytes, Exception | None]:
    try:
        return json.dumps({"value": call()}, allow_nan=False).encode(), None
    except Exception as error:
        return json.dumps({"error": _told(rank, error)}).encode(), error


def _opened(texts: list[bytes], mine: Exception | None) -> list[Any]:
    answers: list[dict[str, Any]] = [
        json.loads(text) if text else {"value": None} for text in texts
    ]
    for answer in answers:
        if "error" in answer:
            raise _raised(answer["error"]) from mine
    return [answer["value"] for answer in answers]


def exchange(world: World, call: Callable[[], Any]) -> list[Any]:
    """Run ``call`` on every rank and give every rank all results.

    Parameters
    ----------
    world : World
        The ranks. Collective.
    call : callable
        Local; gives something that JSON can hold.

    Returns
    -------
    list
        Results in rank order, as JSON gives them back.

    Raises
    ------
    Exception
        What the first rank that failed raised, on every rank; the same class where it is built in
        or ours.
    """
    text, error = _answer(world.rank, call)
    return _opened(_core.io_share(world._core, text), error)


def on_first(world: World, call: Callable[[], Any]) -> Any:
    """Run ``call`` on rank 0 alone and give its result to every rank; as :func:`exchange`."""
    text, error = _answer(0, call) if world.rank == 0 else (b"", None)
    return _opened(_core.io_share(world._core, text), error)[0]


def shards_of(target: Any) -> Shards:
    """The shards of anything that is sharded."""
    shards = getattr(target, "shards", None)
    if shards is None or not hasattr(shards, "parameters"):
        raise TypeError(f"expected Shards, or anything with .shards, got {type(target).__name__}")
    found: Shards = shards
    return found


def stored_dtype(shards: Shards, trainable: bool) -> str:
    """The dtype in which a weight is written: the master's where there is one."""
    precision = shards.policy.precision
    return "float32" if precision.master is not None and trainable else precision.param

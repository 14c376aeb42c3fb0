"""What a value of a configuration may be: small checks that name what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "Check",
    "Wrong",
    "anything",
    "betas",
    "choice",
    "device",
    "dtype",
    "flag",
    "integer",
    "mapping",
    "names",
    "number",
    "power_of_two",
    "text",
]

#: (value, from_text) -> value. ``from_text``: all values are strings, as in an environment.
Check = Callable[[object, bool], Any]

_TRUE = ("true", "yes", "y", "t", "on", "1")
_FALSE = ("false", "no", "n", "f", "off", "0")
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
}


class Wrong(ValueError):
    """A value is not what was expected; the text is what was."""


def flag(value: object, from_text: bool) -> bool:
    """true or false; a word that means one in text."""
    if isinstance(value, bool):
        return value
    if from_text and isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    raise Wrong("true or false")


def loose_flag(value: object, from_text: bool) -> bool:
    """As flag, and "true" and "false" in quotes: what transformers accepts in an fsdp_config."""
    return flag(value, True)


def _real(value: object, from_text: bool) -> float | int:
    if from_text and isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            try:
                return float(value)
            except ValueError:
                raise Wrong("a number") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Wrong("a number")
    return value


def integer(least: int, most: int = 1 << 62, *, infinite: bool = False) -> Check:
    """A whole number, also written 5e8; ``infinite`` admits infinity and gives None for it."""

    def check(value: object, from_text: bool) -> int | None:
        expected = f"a whole number from {least}" + (f" to {most}" if most < 1 << 62 else "")
        try:
            read = _real(value, from_text)
        except Wrong:
            raise Wrong(expected) from None
        if infinite and read == math.inf:
            return None
        if isinstance(read, float):
            if not math.isfinite(read) or read != int(read):
                raise Wrong(expected)
            read = int(read)
        if not least <= read <= most:
            raise Wrong(expected)
        return read

    return check


def number(
    least: float = 0.0, *, above: bool = False, below: float = math.inf, most: float = math.inf
) -> Check:
    """A finite number: at least ``least`` (``above``: more than it), ``below`` or at ``most``."""

    def check(value: object, from_text: bool) -> float:
        expected = f"a finite number {'above' if above else 'from'} {least:g}"
        if below < math.inf:
            expected += f" and below {below:g}"
        if most < math.inf:
            expected += f" to {most:g}"
        try:
            read = float(_real(value, from_text))
        except (Wrong, OverflowError):
            raise Wrong(expected) from None
        good = math.isfinite(read) and (read > least if above else read >= least)
        if not good or read >= below or read > most:
            raise Wrong(expected)
        return read

    return check


def power_of_two(value: object, from_text: bool) -> float:
    """0 or a power of two, as a loss scale is."""
    try:
        read = float(_real(value, from_text))
    except (Wrong, OverflowError):
        raise Wrong("0 (dynamic) or a power of two") from None
    if read == 0.0 or (math.isfinite(read) and read > 0 and math.frexp(read)[0] == 0.5):
        return read
    raise Wrong("0 (dynamic) or a power of two")


def choice(*allowed: str) -> Check:
    """One of some words, in any case; gives the word as it is spelled here."""
    spelled = {word.lower(): word for word in allowed}

    def check(value: object, from_text: bool) -> str:
        if isinstance(value, str) and value.strip().lower() in spelled:
            return spelled[value.strip().lower()]
        raise Wrong(f"one of {', '.join(allowed)}")

    return check


def one_of(*allowed: int) -> Check:
    """One of some whole numbers."""

    def check(value: object, from_text: bool) -> int:
        expected = " or ".join(map(str, allowed))
        try:
            read = _real(value, True if isinstance(value, str) else from_text)
        except Wrong:
            raise Wrong(expected) from None
        if read not in allowed:
            raise Wrong(expected)
        return int(read)

    return check


def dtype(value: object, from_text: bool) -> str:
    """A float dtype by any of its usual names; gives "float32", "bfloat16" or "float16"."""
    if isinstance(value, str) and value.strip().lower() in _DTYPES:
        return _DTYPES[value.strip().lower()]
    # A torch.dtype, which prints as one of the names: no need to know torch.
    if not isinstance(value, str) and type(value).__name__ == "dtype" and str(value) in _DTYPES:
        return _DTYPES[str(value)]
    raise Wrong("fp32, bf16 or fp16")


def device(value: object, from_text: bool) -> str:
    """Where something is offloaded to."""
    if value is None:
        return "none"
    return str(choice("none", "cpu", "nvme")(value, from_text))


def text(value: object, from_text: bool) -> str:
    """Any string."""
    if not isinstance(value, str):
        raise Wrong("a string")
    return value


def optional_text(value: object, from_text: bool) -> str | None:
    """Any string, or null."""
    return None if value is None else text(value, from_text)


def names(value: object, from_text: bool) -> tuple[str, ...]:
    """Names as a list or separated by commas; both at once too. Empty, or null: none."""
    if value is None:
        return ()
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise Wrong("a name, names separated by commas, or a list of names")
    found: list[str] = []
    for part in parts:
        for name in part.split(","):
            if name.strip() and name.strip() not in found:
                found.append(name.strip())
    if any(not name.isidentifier() for name in found):
        raise Wrong("names of classes, which are identifiers")
    return tuple(found)


def modules(value: object, from_text: bool) -> str | tuple[str, ...]:
    """A pattern for the whole name of a module, or a list of names."""
    if value is None:
        return ()
    if isinstance(value, str):
        import re

        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise Wrong(f"a regular expression ({error})") from None
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise Wrong("a regular expression for the name of a module, or a list of names")


def betas(value: object, from_text: bool) -> tuple[float, float]:
    """Two decay rates."""
    expected = "a list of two numbers from 0 and below 1"
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise Wrong(expected)
    each = number(below=1.0)
    try:
        return (each(value[0], from_text), each(value[1], from_text))
    except Wrong:
        raise Wrong(expected) from None


def mapping(value: object, from_text: bool) -> dict[str, Any]:
    """A section: an object whose keys are strings. null: an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Wrong("an object")
    return dict(value)


def anything(value: object, from_text: bool) -> object:
    """Anything: the value has no effect."""
    return value

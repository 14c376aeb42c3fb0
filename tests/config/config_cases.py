"""What the tests of the keys share: one case a key and value, and the keys that rules know."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from flatshard import config
from flatshard.config.reading import Rule


def done(path: str, value: Any, **fields: Any) -> tuple[str, Any, str, dict[str, Any]]:
    """The key decides these fields of the settings."""
    return path, value, "done", fields


def noted(path: str, *values: Any) -> list[tuple[str, Any, str, dict[str, Any]]]:
    """The key changes nothing, with each of these values."""
    return [(path, value, "noted", {}) for value in values]


def refused(path: str, value: Any, text: str) -> tuple[str, Any, str, dict[str, Any]]:
    """The key is refused by a sentence that matches text."""
    return path, value, "refused", {"text": text}


def nested(path: str, value: Any, **also: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for the path a.b; ``also`` has other paths, dots written as __."""
    made: dict[str, Any] = {}
    for where, what in {path: value, **{k.replace("__", "."): v for k, v in also.items()}}.items():
        *sections, key = where.split(".")
        inner = made
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = what
    return made


def paths(rules: Mapping[str, Rule], path: str = "") -> Iterator[str]:
    """Every key of some rules, sections resolved."""
    for key, rule in rules.items():
        if rule.fate == "section":
            assert rule.rules is not None
            yield from paths(rule.rules, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def meaning(settings: config.Settings) -> dict[str, Any]:
    """The fields that a run depends on."""
    names = {field.name for field in dataclasses.fields(settings)}
    return {name: getattr(settings, name) for name in names - {"keys", "given", "source", "kind"}}


def row(settings: config.Settings, path: str) -> config.Key:
    """The line of the table about a key."""
    found = [key for key in settings.keys if key.path == path]
    assert len(found) == 1, f"{path}: {found}"
    return found[0]

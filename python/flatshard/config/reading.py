"""How every configuration is read: files without duplicate keys, and a table of rules by key."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from ..errors import ConfigError
from .checks import Check, Wrong, mapping
from .settings import LATER, Key, short

__all__ = ["UNFILLED", "Auto", "Reader", "Rule", "done", "load", "noted", "refused", "section"]

_NBYTES_MAX = 1 << 24
#: What is said of an "auto" that nobody fills.
UNFILLED = "nothing was given to fill it"


# ---- rules --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Auto:
    """How a value "auto" is filled from what the caller knows.

    Parameters
    ----------
    names : tuple of str
        What must be known, by the names of ``transformers.TrainingArguments``.
    make : callable
        From these values to this one.
    must_match : bool
        A value in the file that differs from a known one is a contradiction.
    """

    names: tuple[str, ...]
    make: Callable[..., Any] = lambda value: value
    must_match: bool = True


@dataclass(frozen=True)
class Rule:
    """What becomes of a key. Made by done, noted, refused and section.

    Parameters
    ----------
    fate : {"done", "noted", "refused", "section"}
    check : callable
        Gives the value, or says what was expected.
    text : str or callable
        What the key decides (from the value, if callable), what takes its place, or why not.
    near : str
        With "refused": the nearest key that is valid.
    off : callable
        Values that ask for nothing: what "refused" lets pass.
    off_text : str
        What is said of a value that is off.
    rules : mapping or None
        Of a section.
    auto : Auto or None
        Filled in place of "auto"; None: "auto" is refused.
    alias : str
        Another key that means the same; values are kept under that one.
    lacks : mapping or None
        Valid words that ask for what there is not, and what is said of them.
    """

    fate: Literal["done", "noted", "refused", "section"]
    check: Check
    text: str | Callable[[Any], str]
    near: str = ""
    off: Callable[[Any], bool] = lambda value: False
    off_text: str = "off"
    rules: Mapping[str, Rule] | None = None
    auto: Auto | None = None
    alias: str = ""
    lacks: Mapping[str, str] | None = None


def done(
    check: Check,
    text: str | Callable[[Any], str],
    *,
    auto: Auto | None = None,
    alias: str = "",
    off: Callable[[Any], bool] = lambda value: False,
    off_text: str = "off",
    lacks: Mapping[str, str] | None = None,
) -> Rule:
    """A key that decides something."""
    return Rule(
        "done", check, text, auto=auto, alias=alias, off=off, off_text=off_text, lacks=lacks
    )


def noted(check: Check, text: str, *, auto: Auto | None = None) -> Rule:
    """A key without effect here; text names the mechanism that takes its place."""
    return Rule("noted", check, text, auto=auto)


def refused(
    check: Check,
    text: str,
    *,
    near: str = "",
    off: Callable[[Any], bool] = lambda value: not value,
    off_text: str = "off",
) -> Rule:
    """A key that asks for what there is not, unless its value is ``off``."""
    return Rule("refused", check, text, near=near, off=off, off_text=off_text)


def section(rules: Mapping[str, Rule], text: str = "") -> Rule:
    """Keys within keys."""
    return Rule("section", mapping, text, rules=rules)


# ---- reading by rules ---------------------------------------------------------------------------


class Reader:
    """Reads sections by their rules and keeps what became of each key.

    Parameters
    ----------
    source : str
        Named in errors.
    auto : mapping, optional
        Values for keys that are "auto".
    from_text : bool
        Every value is a string, as in an environment.
    names : mapping, optional
        Path to how the source spells it, where that is not the path.
    fills : bool
        Whether "auto" stands for another value; else it is a word as others.
    """

    def __init__(
        self,
        source: str,
        *,
        auto: Mapping[str, Any] | None = None,
        from_text: bool = False,
        names: Mapping[str, str] | None = None,
        fills: bool = True,
    ) -> None:
        self.source = source
        self.auto = dict(auto or {})
        self.from_text = from_text
        self.names = dict(names or {})
        self.fills = fills
        self.rows: list[Key] = []

    def where(self, path: str, key: str) -> str:
        """A key in a section as the source spells it."""
        full = f"{path}.{key}" if path else key
        return self.names.get(full, full)

    def fail(self, path: str, text: str) -> NoReturn:
        """Raises ConfigError about a key, with the table so far: there it is refused."""
        error = ConfigError(f"{self.source}: {path} {text}" if path else f"{self.source}: {text}")
        if path and self.rows:
            given = next((row.value for row in self.rows if row.path == path), None)
            others = (row for row in self.rows if row.path != path)
            error.keys = (*others, Key(path, given, "refused", text))
        raise error

    def refuse(self, path: str, value: object, text: str) -> None:
        """Adds a refused line to the table; settle() raises for all of them."""
        self.rows.append(Key(path, value, "refused", text))

    def settle(self) -> None:
        """Raises ConfigError where keys were refused: one line for each, the table in ``keys``."""
        refused = [key for key in self.rows if key.fate == "refused"]
        wrong = [f"{self.source}: {key.path} {key.text}" for key in refused]
        if wrong:
            error = ConfigError("\n".join(wrong))
            error.keys = tuple(self.rows)
            raise error

    def row(self, path: str, value: object, fate: Literal["done", "noted"], text: str) -> None:
        """Adds a line to the table, for what no single rule decides."""
        self.rows.append(Key(path, value, fate, text))

    def read(
        self,
        values: Mapping[str, Any],
        rules: Mapping[str, Rule],
        path: str = "",
        *,
        known: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The values of keys that are done, nested as the sections are; aliases are resolved.

        All keys are read before the first refused one raises, so that an error names them all.

        Parameters
        ----------
        values : mapping
            What was read.
        rules : mapping
            Key to its rule.
        path : str
            Of the section; empty at the top.
        known : mapping, optional
            Key to the path where it belongs, for a key that stands in the wrong section.
        """
        outermost = known is None
        paths = _paths(rules) if known is None else known
        found: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for key, given in values.items():
            if not isinstance(key, str):
                self.fail(_quoted(key), "is a key, and keys are strings")
            where = self.where(path, key)
            rule = rules.get(key)
            if rule is None and _is_comment(key):
                self.row(where, given, "noted", "a comment")
                continue
            if rule is None:
                self.refuse(where, given, _unknown(key, rules, paths))
                continue
            try:
                if rule.fate == "section":
                    assert rule.rules is not None
                    inner = self._checked(rule, where, given)
                    found[key] = self.read(inner, rule.rules, where, known=paths)
                    continue
                value, auto = self._filled(rule, where, given)
                name = rule.alias or key
                if rule.fate == "done" and name in found and found[name] != value:
                    self.fail(
                        where,
                        f"is {_quoted(given)} and {origin[name]} is "
                        f"{_quoted(found[name])}: they mean the same; leave one out",
                    )
                self._keep(rule, where, value, auto)
            except ConfigError as error:
                self.refuse(where, given, str(error).removeprefix(f"{self.source}: {where} "))
                continue
            if rule.fate == "done":
                found[name], origin[name] = value, where
        if outermost:
            self.settle()
        return found

    def section(self, rule: Rule, where: str, given: object) -> dict[str, Any]:
        """A section that is read apart: checked to be one."""
        made: dict[str, Any] = self._checked(rule, where, given)
        return made

    def _checked(self, rule: Rule, where: str, given: object) -> Any:
        try:
            return rule.check(given, self.from_text)
        except Wrong as wrong:
            self.fail(where, f"is {_quoted(given)}: expected {wrong}")

    def _filled(self, rule: Rule, where: str, given: object) -> tuple[Any, str]:
        """The value, and a word about "auto"."""
        fill = rule.auto
        known = fill is not None and all(name in self.auto for name in fill.names)
        is_auto = isinstance(given, str) and given.strip().lower() == "auto"
        if not (is_auto and self.fills):
            value = self._checked(rule, where, given)
            if fill is not None and known and fill.must_match:
                self._match(fill, rule, where, value)
            return value, ""
        if fill is None:
            self.fail(where, 'is "auto", which nothing fills; write the value')
        if not known:
            missing = [name for name in fill.names if name not in self.auto]
            self.fail(
                where,
                f'is "auto", and {UNFILLED}; write the value, or give '
                f"auto={{{', '.join(f'{name!r}: ...' for name in missing)}}}",
            )
        word = f" (auto, from {', '.join(fill.names)})" if fill.names else " (auto)"
        values = [self.auto[name] for name in fill.names]
        if any(value is LATER for value in values):
            return LATER, word
        made = self._made(fill, where, values)
        return (None if made is None else self._checked(rule, where, made)), word

    def _made(self, fill: Auto, where: str, values: list[Any]) -> Any:
        try:
            return fill.make(*values)
        except (TypeError, ValueError, OverflowError):
            self.fail(where, f"cannot be filled from {', '.join(fill.names)} = {values!r:.80}")

    def _match(self, fill: Auto, rule: Rule, where: str, value: Any) -> None:
        values = [self.auto[name] for name in fill.names]
        if not values or any(one is LATER for one in values):
            return
        theirs = self._checked(rule, where, self._made(fill, where, values))
        if theirs != value:
            self.fail(
                where,
                f"is {value!r}, but {' and '.join(fill.names)} given beside the file make it "
                f'{theirs!r}: change one of them, or write "auto"',
            )

    def _keep(self, rule: Rule, where: str, value: Any, auto: str) -> None:
        if rule.lacks and isinstance(value, str) and value in rule.lacks:
            self.fail(where, f"is {value}: {rule.lacks[value]}")
        off = value is not LATER and (value is not None or not auto) and rule.off(value)
        if rule.fate == "refused" and not off:
            hint = f"; the nearest that is offered is {rule.near}" if rule.near else ""
            self.fail(where, f"is {_quoted(value)}: {rule.text}{hint}")
        if off:
            done = rule.fate == "done"
            text = rule.off_text if done else f"{rule.off_text}: {rule.text}"
            self.rows.append(Key(where, value, "done" if done else "noted", text, auto))
        else:
            if callable(rule.text):
                text = "open" if value in (None, LATER) else rule.text(value)
            else:
                text = rule.text
            fate: Literal["done", "noted"] = "done" if rule.fate == "done" else "noted"
            self.rows.append(Key(where, value, fate, text, auto))


def _quoted(value: object) -> str:
    return f'"{short(value)}"' if isinstance(value, str) else short(value)


def _paths(rules: Mapping[str, Rule], path: str = "") -> dict[str, str]:
    """Key to its full path, for all sections; of a key in several, the first."""
    found: dict[str, str] = {}
    for key in rules:
        found.setdefault(key, f"{path}{key}")
    for key, rule in rules.items():
        for inner, where in _paths(rule.rules or {}, f"{path}{key}.").items():
            found.setdefault(inner, where)
    return found


def _is_comment(key: str) -> bool:
    """JSON has no comments: people write them as keys that no reader knows."""
    return key.startswith("_") or key in ("comment", "//")


def _unknown(key: str, rules: Mapping[str, Rule], known: Mapping[str, str]) -> str:
    offered = [name for name, rule in rules.items() if rule.fate != "refused"]
    if key in known:
        return f"does not belong here: it is {known[key]}"
    near = difflib.get_close_matches(key, offered, n=1, cutoff=0.6)
    if near:
        return f"is not known; did you mean {near[0]}?"
    far = difflib.get_close_matches(key, list(known), n=1, cutoff=0.8)
    if far:
        return f"is not known; did you mean {known[far[0]]}?"
    few = sorted(offered)[:12]
    return f"is not known; there are {', '.join(few)}{', ...' if len(offered) > 12 else ''}"


# ---- files --------------------------------------------------------------------------------------


def _no_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"the key {key!r:.80} stands there twice; leave one out")
        found[key] = value
    return found


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_no_duplicates)


def _parse_yaml(text: str, name: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{name}: reading YAML needs PyYAML: pip install 'flatshard[yaml]' (JSON needs nothing)"
        ) from None

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                key = key_node.value
                if isinstance(key, str) and key != "<<":
                    if key in seen:
                        raise ConfigError(
                            f"the key {key!r:.80} stands there twice, again in line "
                            f"{key_node.start_mark.line + 1}; leave one out"
                        )
                    seen.add(key)
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


def load(source: Any) -> tuple[dict[str, Any], str]:
    """The top level of a configuration, and its name for messages.

    Parameters
    ----------
    source : path, str or mapping
        A file of JSON or YAML, JSON text, or what was already parsed.

    Returns
    -------
    (dict, str)

    Raises
    ------
    ConfigError
        No such file, no JSON or YAML, a key that stands there twice, or no object at the top.
    """
    if isinstance(source, Mapping):
        values, name = dict(source), "configuration"
    elif isinstance(source, str) and source.lstrip().startswith("{"):
        name = "configuration"
        values = _parsed(source, name, yaml=False)
    elif isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        values = _parsed_file(name)
    else:
        raise ConfigError(
            f"a configuration is a path, a dict or JSON text, not {type(source).__name__}"
        )
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected an object at the top, not {type(values).__name__}")
    return values, name


def _parsed_file(name: str) -> Any:
    try:
        if os.path.getsize(name) > _NBYTES_MAX:
            raise ConfigError(f"{name}: over {_NBYTES_MAX} bytes, not a configuration")
        with open(name, encoding="utf-8-sig") as stream:
            text = stream.read()
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from None
    yaml = name.endswith((".yaml", ".yml")) or not text.lstrip().startswith("{")
    return _parsed(text, name, yaml=yaml and not name.endswith(".json"))


def _parsed(text: str, name: str, *, yaml: bool) -> Any:
    try:
        return _parse_yaml(text, name) if yaml else _parse_json(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}".replace(f"{name}: {name}: ", f"{name}: ")) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply for a configuration") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name}: not {'YAML' if yaml else 'JSON'}: {error!s:.300}") from None

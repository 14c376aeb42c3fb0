"""``flatshard config check F``, ``keys FORM``, ``write F``: what becomes of keys; other forms."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import config
from ..config.accelerate_keys import DEEPSPEED, PARALLEL, TOP
from ..config.checks import Wrong
from ..config.deepspeed import AUTO_NAMES
from ..config.deepspeed_keys import RULES as DEEPSPEED_RULES
from ..config.fsdp import POLICY
from ..config.fsdp import RULES as FSDP_RULES
from ..config.own import KINDS
from ..config.reading import UNFILLED, Rule, section
from ..config.settings import short, table
from ..errors import ConfigError

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Reads, shows, converts; 2 where a key is refused (by the caller, from ConfigError)."""
    it = argparse.ArgumentParser(
        prog="flatshard config",
        description="What becomes of each key of an FSDP, DeepSpeed or Accelerate configuration.",
        allow_abbrev=False,
    )
    commands = it.add_subparsers(dest="command", metavar="COMMAND", required=True)

    check = commands.add_parser(
        "check", help="print what becomes of each key; status 2 if one is refused"
    )
    _reading(check, "file", "FILE")
    check.add_argument("--json", action="store_true", help="print one JSON object")

    keys = commands.add_parser("keys", help="every key of a form, and what becomes of it")
    keys.add_argument("form", choices=("fsdp", "deepspeed", "accelerate"))

    write = commands.add_parser("write", help="write a configuration in another form")
    write.add_argument("file", metavar="FILE", help="to write, .json or .yaml; - prints it")
    _reading(write, "--from", "SOURCE", required=True, dest="source")
    write.add_argument(
        "--to", choices=KINDS, default="flatshard", help="form to write (default: flatshard)"
    )
    write.add_argument("--force", action="store_true", help="replace FILE if it is there")

    options = it.parse_args(arguments)
    if options.command == "check":
        return _check(options)
    if options.command == "keys":
        print("\n".join(known_keys(options.form)))
        return 0
    return _write(options)


def _reading(it: argparse.ArgumentParser, name: str, metavar: str, **more: Any) -> None:
    """The options by which a configuration is read."""
    text = "a configuration: JSON or YAML; 'environment' reads what accelerate launch exported"
    it.add_argument(name, metavar=metavar, help=text, **more)
    it.add_argument("--kind", choices=KINDS, help="its form (default: told by its keys)")
    it.add_argument(
        "--world-size", type=int, metavar="N", help="ranks, which batch sizes are checked against"
    )
    it.add_argument(
        "--auto",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what fills an 'auto', as learning_rate=3e-5; may be repeated",
    )
    it.add_argument(
        "--trainer",
        action="store_true",
        help="count an 'auto' that the Trainer fills as filled",
    )


def _read(source: str, options: argparse.Namespace) -> config.Settings:
    if options.world_size is not None and options.world_size < 1:
        raise ConfigError(f"--world-size {options.world_size}: expected at least 1")
    auto: dict[str, Any] = dict.fromkeys(AUTO_NAMES, config.LATER) if options.trainer else {}
    for pair in options.auto:
        name, equals, value = pair.partition("=")
        if not equals or name not in AUTO_NAMES:
            raise ConfigError(
                f"--auto {pair}: expected NAME=VALUE, NAME one of {', '.join(AUTO_NAMES)}"
            )
        try:
            auto[name] = json.loads(value)
        except ValueError:
            raise ConfigError(f"--auto {pair}: {value!r} is no number, true or false") from None
    try:
        return config.read(
            os.environ if source == "environment" else source,
            kind=options.kind or ("accelerate" if source == "environment" else None),
            world_size=options.world_size,
            auto=auto,
        )
    except ConfigError as error:
        if UNFILLED not in str(error):
            raise
        told = ConfigError(
            f'{error}\nhere what is "auto" is filled by --auto NAME=VALUE, or by --trainer where '
            "a Trainer will fill it"
        )
        told.keys = error.keys
        raise told from None


def _check(options: argparse.Namespace) -> int:
    try:
        settings = _read(options.file, options)
    except ConfigError as error:
        if error.keys:
            _show(options, options.file, error.keys, None)
        raise
    if options.world_size is not None:
        settings.check_world(options.world_size)
    _show(options, settings.source, settings.keys, settings)
    return 0


def _show(
    options: argparse.Namespace,
    source: str,
    keys: Sequence[config.Key],
    settings: config.Settings | None,
) -> None:
    """The table, or one JSON object; without settings where keys are refused."""
    if options.json:
        rows = [
            {
                "key": key.path,
                "value": short(key.value) + key.auto,
                "fate": key.fate,
                "by": key.text,
            }
            for key in keys
        ]
        made = config.to_dict(settings) if settings and not _is_open(settings) else None
        print(json.dumps({"source": source, "keys": rows, "settings": made}, indent=1))
        return
    print(table(source, keys))
    counts = Counter(key.fate for key in keys)
    print(
        f"{counts['done']} done, {counts['noted']} noted, {counts['refused'] or 'none'} refused",
        flush=True,
    )


def known_keys(form: str) -> list[str]:
    """A line for every key that a reader knows: done, noted or refused, and why.

    Parameters
    ----------
    form : {"fsdp", "deepspeed", "accelerate"}
    """
    rules: Mapping[str, Rule] = {
        "fsdp": {**FSDP_RULES, "mixed_precision_policy": section(POLICY)},
        "deepspeed": DEEPSPEED_RULES,
        "accelerate": {
            **TOP,
            "fsdp_config": section(FSDP_RULES),
            "deepspeed_config": section(DEEPSPEED),
            "parallelism_config": section(PARALLEL),
        },
    }[form]
    rows = list(_rows(rules, ""))
    width = max(len(path) for path, _, _ in rows)
    return [f"{path:{width}}  {fate:7}  {text}".rstrip() for path, fate, text in rows]


def _rows(rules: Mapping[str, Rule], path: str) -> Iterator[tuple[str, str, str]]:
    for key, rule in rules.items():
        if rule.fate == "section":
            yield from _rows(rule.rules or {}, f"{path}{key}.")
            continue
        text = rule.text if isinstance(rule.text, str) else _example(rule)
        if rule.near:
            text += f"; nearest: {rule.near}"
        yield f"{path}{key}", rule.fate, text


#: Likely values; the first that a rule takes is its example.
_SAMPLES: tuple[object, ...] = (
    *(True, ["LlamaDecoderLayer"], "AdamW", "NO_SHARD", "FULL_STATE_DICT", "bf16", "cpu"),
    *("WarmupLR", "Fail", "FSDP", 2, 0.5),
)


def _example(rule: Rule) -> str:
    """What the first value decides that the rule takes."""
    for sample in _SAMPLES:
        try:
            value = rule.check(sample, False)
        except Wrong:
            continue
        return f"{short(sample)}: {rule.text(value)}" if callable(rule.text) else rule.text
    raise AssertionError("no sample fits")


def _is_open(settings: config.Settings) -> bool:
    parts = (settings.optimizer, settings.schedule)
    return any(value is config.LATER for p in parts if p for value in p.options.values())


def _write(options: argparse.Namespace) -> int:
    settings = _read(options.source, options)
    written = config.write(settings, options.to)
    for text in written.left_out:
        print(f"left out: {text}", file=sys.stderr)
    if options.file.endswith((".yaml", ".yml")):
        try:
            import yaml
        except ImportError:
            raise ConfigError(
                f"{options.file}: writing YAML needs PyYAML: pip install 'flatshard[yaml]'"
            ) from None
        text = yaml.safe_dump(written.values, sort_keys=False)
    else:
        text = json.dumps(written.values, indent=2) + "\n"
    if options.file == "-":
        print(text, end="")
        return 0
    try:
        with open(options.file, "w" if options.force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{options.file} is there already; name another, or say --force"
        ) from None
    return 0

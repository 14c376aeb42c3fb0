"""Fuzzing of the readers in Python: seeded, aware of JSON's structure, and guided by branches.

    python tests/fuzz/readers.py TARGET --seconds 10 [--seed N] [--plant] [--out DIR]

An input is bytes. It may be refused with the errors that the reader documents; if it is accepted,
what it gives must keep the promises written here; anything else is a finding, which is written to
DIR. Inputs that reach a new branch are kept and mutated further. With ``--plant`` one check of the
reader is removed from a copy of its source first: then there must be a finding.
"""

from __future__ import annotations

import argparse
import dis
import hashlib
import inspect
import json
import os
import pathlib
import random
import re
import resource
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from reader_targets import TARGETS, VOCABULARY, Target, run_one

HERE = pathlib.Path(__file__).resolve().parent
NBYTES_MAX = 4096
MEMORY_MAX = 8 << 30  # a reader that asks for more than this gets MemoryError, a finding


# -- branches --------------------------------------------------------------------------------------


def code_objects(target: Target) -> Iterator[types.CodeType]:
    """Of the functions that count, with those inside them."""

    def inner(code: types.CodeType) -> Iterator[types.CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from inner(constant)

    for module in target.modules:
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__ or name in target.without:
                continue
            if target.functions and name not in target.functions:
                continue
            members = vars(value).values() if isinstance(value, type) else [value]
            for member in members:
                function = inspect.unwrap(getattr(member, "fget", member))
                code = getattr(function, "__code__", None)
                if isinstance(code, types.CodeType) and code.co_filename == module.__file__:
                    yield from inner(code)


class Branches:
    """Both outcomes of every conditional jump of some code, and which were seen."""

    def __init__(self, target: Target) -> None:
        self.jumps: dict[types.CodeType, set[int]] = {}
        self.total = 0
        for code in code_objects(target):
            if code in self.jumps:
                continue
            instructions = list(dis.get_instructions(code))
            self.jumps[code] = {
                each.offset
                for each in instructions
                if each.opname == "FOR_ITER" or ("JUMP" in each.opname and "IF" in each.opname)
            }
            self.total += 2 * len(self.jumps[code])
        self.seen: set[tuple[types.CodeType, int, int]] = set()
        self._last: dict[types.FrameType, int] = {}

    def __enter__(self) -> Branches:
        self._last.clear()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if frame.f_code not in self.jumps:
            return None
        frame.f_trace = self._step  # first: from Python 3.13 on only a traced frame takes the rest
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            last, at = self._last.get(frame, -1), frame.f_lasti
            if last in self.jumps[frame.f_code]:
                self.seen.add((frame.f_code, last, at))
            self._last[frame] = at
        elif event == "exception":
            self._last.pop(frame, None)
        return self._step

    def missing(self) -> list[str]:
        """Lines with an outcome that was not seen."""
        lines = set()
        for code, jumps in self.jumps.items():
            line_of = {}
            line = code.co_firstlineno
            for each in dis.get_instructions(code):
                line = each.starts_line or line
                line_of[each.offset] = line
            for jump in jumps:
                if sum(1 for c, a, _ in self.seen if c is code and a == jump) < 2:
                    lines.add(f"{pathlib.Path(code.co_filename).name}:{line_of[jump]}")
        return sorted(lines)


# -- mutation --------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 2**31, 2**53, 2**62, 2**63, 2**64, 2**70, 1.5, 0.0, -0.5,
    1e-8, 1e308, "", "x", "auto", "AUTO", "../outside.safetensors", "/etc/passwd", "a\0b", ".x",
    "a.safetensors", "sub/c.safetensors", "é", [], {}, [[]], ["a"], [1, 2], {"a": 1},
]  # fmt: skip


def strings_of(modules: tuple[types.ModuleType, ...]) -> list[Any]:
    """Words and numbers in a module's source: keys and values that it knows."""
    found: set[str] = set()
    for module in modules:
        found |= set(re.findall(r'"([\w.\-:/ ]{1,40})"', inspect.getsource(module)))
    return sorted(found)


class Mutator:
    """Changes inputs; what it draws depends on the seed alone."""

    def __init__(self, words: list[Any], draw: random.Random) -> None:
        self.words, self.draw = words, draw

    def value(self) -> Any:
        return self.draw.choice(
            VALUES if self.draw.random() < 0.6 or not self.words else self.words
        )

    def structure(self, values: Any) -> Any:
        """One node replaced, dropped, added, moved or renamed."""
        nodes: list[tuple[Any, Any]] = []

        def walk(node: Any) -> None:
            items = node.items() if isinstance(node, dict) else enumerate(node)
            for key, value in items:
                nodes.append((node, key))
                if isinstance(value, (dict, list)):
                    walk(value)

        if not isinstance(values, (dict, list)):
            return self.value()
        walk(values)
        if not nodes:
            nodes = [(values, None)]
        node, key = self.draw.choice(nodes)
        kind = self.draw.randrange(6)
        if kind == 0 and key is not None:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[str(self.draw.choice(self.words or ["x"]))] = self.value()
        elif kind == 2 and isinstance(node, list):
            node.append(self.value())
        elif kind == 3 and isinstance(node, dict) and key is not None:
            node[str(self.draw.choice(self.words or ["x"]))] = node.pop(key)
        elif kind == 4 and key is not None and isinstance(node[key], (int, float)):
            node[key] = self.draw.choice([-1, 1, 2, 0.5]) * node[key] + self.draw.choice([0, 1, -1])
        elif key is not None:
            node[key] = self.value()
        return values

    def text(self, data: bytes) -> bytes:
        """Bytes flipped, cut, doubled, or a word put in."""
        changed = bytearray(data)
        at = self.draw.randrange(len(changed) + 1)
        kind = self.draw.randrange(5 if self.words else 7)  # no words: no JSON, but opcodes
        if kind > 4 and at < len(changed):
            changed[at] = self.draw.choice(data)
        elif kind == 0 and at < len(changed):
            changed[at] ^= 1 << self.draw.randrange(8)
        elif kind == 1:
            del changed[at : at + self.draw.randrange(1, 9)]
        elif kind == 2:
            end = at + self.draw.randrange(1, 40)
            changed[at:at] = changed[at:end]
        elif kind == 3:
            changed[at:at] = json.dumps(self.value()).encode()
        else:
            del changed[at:]
        return bytes(changed)

    def __call__(self, data: bytes) -> bytes:
        for _ in range(1 + self.draw.randrange(3)):
            if self.draw.random() < 0.8:
                try:
                    values = json.loads(data)
                except (ValueError, RecursionError):
                    data = self.text(data)
                    continue
                data = json.dumps(self.structure(values)).encode()
            else:
                data = self.text(data)
        return data[:NBYTES_MAX]


# -- the loop --------------------------------------------------------------------------------------


def seeds(name: str) -> list[bytes]:
    """The target's corpus."""
    return [path.read_bytes() for path in sorted((HERE / "corpus" / name).iterdir())]


def plant(target: Target) -> None:
    """Replaces a module's functions by those of a copy of its source that lacks one check."""
    assert target.plant is not None
    module, text, other = target.plant
    source = inspect.getsource(module)
    assert source.count(text) == 1, f"{text!r} is {source.count(text)} times in {module.__name__}"
    before = dict(vars(module))
    exec(compile(source.replace(text, other), str(module.__file__), "exec"), vars(module))
    for user in [
        m for n, m in sys.modules.items() if n.startswith("flatshard") and m is not module
    ]:
        for name, value in list(vars(user).items()):
            if name in before and value is before[name] and not name.startswith("__"):
                setattr(user, name, vars(module)[name])


@dataclass
class Result:
    """What a run of a target came to."""

    runs: int
    accepted: int
    seen: int
    total: int
    missing: list[str]
    finding: bytes | None = None
    reason: str = ""


def fuzz(target: Target, seconds: float, seed: int) -> Result:
    """Until the time is over or something is found."""
    draw = random.Random(seed)
    mutate = Mutator(strings_of(VOCABULARY[target.name]), draw)
    branches = Branches(target)
    pool: list[bytes] = []
    waiting = seeds(target.name)[::-1]
    result = Result(0, 0, 0, branches.total, [])
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        while time.monotonic() < end or waiting:
            data = waiting.pop() if waiting else mutate(draw.choice(pool))
            before = len(branches.seen)
            try:
                with branches:
                    result.accepted += run_one(target, data, folder)
            except Exception:
                sys.settrace(None)
                result.finding, result.reason = data, traceback.format_exc()
                break
            result.runs += 1
            if len(branches.seen) > before or not pool:
                pool.append(data)
    result.seen, result.missing = len(branches.seen), branches.missing()
    return result


def main(arguments: list[str]) -> int:
    """0: nothing was found; 1: something was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plant", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/fuzz"))
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
    target = TARGETS[options.target]
    if options.plant:
        plant(target)
    result = fuzz(target, options.seconds, options.seed)
    if options.json is not None:
        told = {k: getattr(result, k) for k in ("runs", "accepted", "seen", "total", "missing")}
        options.json.write_text(json.dumps(told))
    if result.finding is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(result.finding).hexdigest()[:12]
        path = options.out / f"found-{target.name}-{name}"
        path.write_bytes(result.finding)
        print(f"{result.reason}\nfound by run {result.runs} of {target.name}: {path}")
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    sys.exit(main(sys.argv[1:]))

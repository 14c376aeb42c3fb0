"""Fuzzing of the readers in Python: seeded, aware of JSON's structure, and guided by branches.

    python tests/fuzz/readers.py TARGET --seconds 10 [--seed N] [--plant] [--out DIR]

An input is bytes. It may be refused with the errors that the reader documents; if it is accepted,
what it gives must keep the promises written here; anything else is a finding, which is written to
DIR. Inputs that reach a new branch are kept and mutated further. With ``--plant`` one check of the
reader is removed from a copy of its source first: then there must be a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import hashlib
import inspect
import itertools
import json
import math
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
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flatshard import _core, _folders
from flatshard.config import (
    LATER,
    accelerate_keys,
    checks,
    deepspeed_keys,
    fsdp,
    reading,
    zero_keys,
)
from flatshard.config import accelerate as read_accelerate
from flatshard.config import deepspeed as read_deepspeed
from flatshard.config import fsdp as read_fsdp
from flatshard.convert import _foreign, _pickle_values, _pickles, _torch_zip
from flatshard.errors import CheckpointError, ConfigError
from flatshard.models import config as model_config
from flatshard.models.definition import define

HERE = pathlib.Path(__file__).resolve().parent
NBYTES_MAX = 4096
MEMORY_MAX = 8 << 30  # a reader that asks for more than this gets MemoryError, a finding
SECONDS_MAX = 10.0  # of one input


def promise(holds: bool, words: str) -> None:
    """What a reader guarantees of what it accepted."""
    if not holds:
        raise AssertionError(words)


# -- targets ---------------------------------------------------------------------------------------


@dataclass
class Target:
    """One reader: how to call it, what it may raise, and which branches count."""

    name: str
    call: Callable[[bytes, pathlib.Path], None]
    errors: tuple[type[Exception], ...]
    modules: tuple[types.ModuleType, ...]
    #: Functions of the modules; empty: all of them.
    functions: tuple[str, ...] = ()
    #: Not of the reader: what else stands in its modules.
    without: tuple[str, ...] = ()
    #: (module, text, other text): the check that --plant removes.
    plant: tuple[types.ModuleType, str, str] | None = None
    words: list[Any] = field(default_factory=list)


def sealed(text: bytes) -> bytes:
    """JSON of an object with the right checksum behind it, as write_index makes it."""
    body = text.rstrip()
    body = body[:-1].rstrip() if body.endswith(b"}") else body
    return body + f',\n "crc32c": "{_core.crc32c(body):08x}"\n}}\n'.encode()


def call_index(data: bytes, folder: pathlib.Path) -> None:
    """``=``: a whole index.json. Else JSON that gets its checksum here."""
    text = data[1:] if data[:1] == b"=" else sealed(data)
    index = _folders.parse_index(str(folder), text)
    for value in (index.serial, index.step, index.world_size):
        promise(type(value) is int and 0 <= value < 2**63, f"{value!r} is a size")
    promise(len(index.files) == index.world_size, "a file a rank")
    promise(len(index.users) in (1, index.world_size), "user data of one or of each")
    for name, nbytes, crcs in index.files:
        plain = bool(name) and "/" not in name and not name.startswith(".")
        promise(plain, f"{name!r} is a plain name")
        promise(0 <= nbytes < 2**63 and len(crcs) == 4 * -(-nbytes // (1 << 20)), "checksums")
    for p in index.parameters:
        promise(all(type(n) is int and n >= 0 for n in p.shape), f"{p.shape} is a shape")
        promise(math.prod(p.shape) < 2**60 and len(p.shape) <= 8, "its elements can be counted")
    names = [n for p in index.parameters for n in (p.name, p.tied_name) if n is not None]
    promise(len(set(names)) == len(names), "a name once")
    _folders.catalog_of(index)
    for rank in range(min(index.world_size, 4)):
        index.user(rank, index.world_size)


def call_weight_map(data: bytes, folder: pathlib.Path) -> None:
    """The index of a sharded Hugging Face folder that holds a.safetensors and b.safetensors."""
    inside, single = folder / "inside", folder / "single"
    if not inside.exists():
        (inside / "sub").mkdir(parents=True)
        single.mkdir()
        for path in (
            inside / "a.safetensors", inside / "b.safetensors", inside / "sub" / "c.safetensors",
            single / "model.safetensors", folder / "outside.safetensors",
        ):  # fmt: skip
            path.write_bytes(b"")
    for one in (single, single / "model.safetensors"):
        files = _folders.foreign_catalog(str(one)).files
        promise([name for name, _, _ in files] == ["model.safetensors"], "one file")
    if not data:  # no index either
        (inside / "model.safetensors.index.json").unlink(missing_ok=True)
        _folders.foreign_catalog(str(inside))
    (inside / "model.safetensors.index.json").write_bytes(data)
    catalog = _folders.foreign_catalog(str(inside))
    there = {"a.safetensors", "b.safetensors"}
    for name, _, _ in catalog.files:
        promise(name in there, f"{name!r} is in the folder")
    promise(len({name for name, _, _ in catalog.files}) == len(catalog.files), "a file once")


def call_config(data: bytes, folder: pathlib.Path) -> None:
    """A config.json, to the parameters that follow from it."""
    path = folder / "config.json"
    path.write_bytes(data)
    try:
        config = model_config.load_config(folder)
    except ValueError as error:
        promise(isinstance(error, ConfigError), f"{type(error).__name__} is a ConfigError")
        raise
    for name in (f for f in config.__dataclass_fields__ if isinstance(getattr(config, f), int)):
        promise(0 <= getattr(config, name) < 2**62, f"{name} is a size")
    json.dumps(config.to_hf(dtype="float32"))
    if config.num_hidden_layers > 16:  # their names would be all the work
        config = dataclass_replace(config, num_hidden_layers=16)
    parameters, units = define(config)
    promise(len(units) == 2 + config.num_hidden_layers, "a unit a layer, embedding, head")
    promise(all(n > 0 for p in parameters for n in p.shape), "sizes of parameters")


def dataclass_replace(value: Any, **changes: Any) -> Any:
    """As dataclasses.replace, also when --plant has made the class anew."""
    fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
    return type(value)(**{**fields, **changes})


def _nothing_ignored(settings: Any, values: dict[str, Any], prefix: str) -> None:
    paths = [key.path for key in settings.keys]
    for key, value in values.items():
        plain = key
        if prefix and key.startswith(prefix) and key != f"{prefix}size":
            plain = key[len(prefix) :]
        found = any(p in (key, plain) or p.startswith((f"{key}.", f"{plain}.")) for p in paths)
        promise(found or value in ({}, None), f"{key!r} is in the table")
    settings.table()


def _each_way(
    read: Callable[..., Any], ways: list[dict[str, Any]], data: bytes, prefix: str
) -> None:
    """Reads with each set of arguments; refused if each of them refuses."""
    refusal: Exception | None = None
    accepted = False
    for how in ways:
        try:
            settings = read(**how)
        except (ConfigError, NotImplementedError) as error:
            refusal = error
            continue
        _nothing_ignored(settings, json.loads(data.decode("utf-8-sig")), prefix)
        accepted = True
    if not accepted and refusal is not None:
        raise refusal


def call_fsdp(data: bytes, folder: pathlib.Path) -> None:
    """An fsdp_config in a JSON file."""
    path = folder / "fsdp.json"
    path.write_bytes(data)
    _each_way(
        lambda **how: read_fsdp(str(path), **how),
        [
            {"world_size": 4},
            {"world_size": None, "options": "full_shard auto_wrap offload"},
            {"world_size": 2, "gradient_checkpointing": True, "options": ["shard_grad_op"]},
            {"world_size": 2, "device": "cuda"},
            {"world_size": 2, "options": False},
        ],
        data,
        "fsdp_",
    )


#: What "auto" is filled with.
AUTO = {
    "learning_rate": 1e-4, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    "max_grad_norm": 1.0, "warmup_steps": 10, "max_steps": 100, "bf16": True, "fp16": False,
    "hidden_size": 64,
}  # fmt: skip


def call_deepspeed(data: bytes, folder: pathlib.Path) -> None:
    """A ds_config.json."""
    path = folder / "ds.json"
    path.write_bytes(data)
    _each_way(
        lambda **how: read_deepspeed(str(path), **how),
        [
            {"world_size": 2, "auto": AUTO},
            {"world_size": 2},
            {"world_size": None},
            {"world_size": None, "auto": dict.fromkeys(AUTO, LATER)},
            {"world_size": 2, "auto": dict.fromkeys(AUTO, "x"), "device": "cuda"},
        ],
        data,
        "",
    )


def call_accelerate(data: bytes, folder: pathlib.Path) -> None:
    """An Accelerate configuration: {"environment": ...}, or a file, read as JSON or as YAML."""
    values, ways = None, list[dict[str, Any]]()
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
        values = {"ACCELERATE_MIXED_PRECISION": "no", **json.loads(data)["environment"]}
    if values is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            ways = [{}, {"world_size": 4}]
            _each_way(lambda **how: read_accelerate(values, **how), ways, b"{}", "")
        return
    path = folder / f"accelerate.{'yaml' if len(data) % 2 else 'json'}"
    path.write_bytes(data)
    text = b"{}" if path.suffix == ".yaml" else data
    ways = [{}, {"world_size": 2, "auto": AUTO}, {"device": "cuda"}]
    _each_way(lambda **how: read_accelerate(str(path), **how), ways, text, "")


def _tensors_of(value: Any) -> list[_pickle_values.Tensor]:
    """Tensors in what a pickle gave, a few levels down: it may refer to itself."""
    found, level = list[_pickle_values.Tensor](), [value]
    for _ in range(4):
        inner: list[Any] = []
        for each in level[:100]:
            if isinstance(each, _pickle_values.Tensor):
                found.append(each)
            elif isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, (list, tuple)):
                inner += each
            elif isinstance(each, _pickle_values.Record):
                inner += [*each.args, *each.fields.values()]
        level = inner
    return found


def _lies_inside(tensor: _pickle_values.Tensor, nbytes: int) -> None:
    itemsize = _pickle_values.DTYPES[tensor.dtype]
    promise(len(tensor.shape) == len(tensor.stride), "a stride a dimension")
    promise(all(n >= 0 for n in (*tensor.shape, *tensor.stride, tensor.offset)), "sizes")
    if tensor.numel:
        steps = zip(tensor.shape, tensor.stride, strict=True)
        last = tensor.offset + sum((n - 1) * step for n, step in steps)
        promise((last + 1) * itemsize <= nbytes, f"{tensor} lies in {nbytes} bytes")
        promise(tensor.numel * itemsize <= nbytes, f"{tensor} holds no element twice for ever")


def call_pickle(data: bytes, folder: pathlib.Path) -> None:
    """A pickle of torch.save, whose storages have 64 bytes each."""
    value = _pickles.load(
        "there", data, persistent=lambda given: _pickle_values.storage_of(given, lambda key: 64)
    )
    plain = (type(None), bool, int, float, str, bytes, list, tuple, dict)
    ours = (
        _pickle_values.Tensor,
        _pickle_values.Record,
        _pickle_values.Name,
        _pickle_values.Storage,
    )
    promise(isinstance(value, (*plain, *ours)), f"{type(value)} is plain")
    promise(len(_pickle_values.shown(value)) < 1000, "fit for a message")
    for tensor in _tensors_of(value):
        _lies_inside(tensor, 64)


def call_torch_zip(data: bytes, folder: pathlib.Path) -> None:
    """A file of torch.save: its directory, its pickle, and every tensor's bytes."""
    (folder / "x.bin").write_bytes(data)
    with _foreign.opened(str(folder)) as place:
        opened = _torch_zip.TorchFile(place.file("x.bin"))
        spans = sorted((m.at, m.at + m.nbytes) for m in opened.members.values() if m.nbytes)
        promise(all(a >= 0 and b <= len(data) for a, b in spans), "members lie in the file")
        pairs = itertools.pairwise(spans)
        promise(all(b <= c for (_, b), (c, _) in pairs), "members do not overlap")
        promise(all(".." not in name for name in opened.members), "names are plain")
        value = opened.load()
        member = opened.members["data.pkl"]
        text = data[member.at : member.at + member.nbytes]
        promise(not opened.checked or zlib.crc32(text) == member.crc, "the pickle is whole")
        for tensor in _tensors_of(value):
            held = opened.members.get(f"data/{tensor.storage.key}")
            _lies_inside(tensor, 0 if held is None else held.nbytes)
            opened.check(tensor)
            content = opened.source(tensor).read(0, tensor.numel)
            promise(len(content) == tensor.numel * _pickle_values.DTYPES[tensor.dtype], "all of it")


_FOLDERS = ("parse_json", "_no_duplicates", "_no_constants", "_Reader")
_DS = sys.modules["flatshard.config.deepspeed"]
_FSDP = sys.modules["flatshard.config.fsdp"]
_ACCELERATE = sys.modules["flatshard.config.accelerate"]
assert fsdp is read_fsdp
# What the planted bug takes away.
UNKNOWN_KEY_REFUSED = "                self.refuse(where, given, _unknown(key, rules, paths))\n"

TARGETS = {
    target.name: target
    for target in (
        Target(
            "index", call_index, (CheckpointError,), (_folders,),
            functions=(
                *_FOLDERS, "parse_index", "_parameter", "_file", "is_plain", "Index", "catalog_of",
            ),
            plant=(_folders, "if not 0 <= value < 2**63:", "if value >= 2**63:"),
        ),
        Target(
            "weight_map", call_weight_map, (CheckpointError,), (_folders,),
            functions=(*_FOLDERS, "is_plain", "weight_map", "foreign_catalog", "first_of"),
            plant=(_folders, " or not is_plain(target):", ":"),
        ),
        Target(
            "pickle", call_pickle, (CheckpointError,), (_pickles, _pickle_values),
            plant=(_pickle_values, "if last >= room or numel > room:", "if numel > room:"),
        ),
        Target(
            "torch_zip", call_torch_zip, (CheckpointError,), (_torch_zip,),
            plant=(_torch_zip, "if self.checked and zlib.crc32(text) != member.crc:", "if False:"),
        ),
        Target(
            "config", call_config, (ConfigError, ValueError), (model_config,),
            without=("has_weights",),
            plant=(model_config, "if not 0 <= value < 1 << 62:", "if value >= 1 << 62:"),
        ),
        Target(
            "fsdp", call_fsdp, (ConfigError, NotImplementedError), (_FSDP,),
            plant=(reading, UNKNOWN_KEY_REFUSED, "                continue\n"),
        ),
        Target(
            "deepspeed", call_deepspeed, (ConfigError, NotImplementedError), (_DS, reading),
            functions=(
                "deepspeed", "read_deepspeed", "_batch", "_fill_train", "_precision_keys",
                "_precision", "_loss_scale", "_offload", "_optimizer", "_schedule", "_say_type",
                "Reader", "_unknown", "_no_duplicates", "_parse_json", "_parsed",
            ),
            plant=(reading, UNKNOWN_KEY_REFUSED, "                continue\n"),
        ),
        Target(
            "accelerate", call_accelerate, (ConfigError, NotImplementedError),
            (_ACCELERATE,),
            plant=(reading, UNKNOWN_KEY_REFUSED, "                continue\n"),
        ),
    )
}  # fmt: skip
#: Modules whose strings are keys and values that a mutation may use.
VOCABULARY: dict[str, tuple[types.ModuleType, ...]] = {
    "index": (_folders,),
    "weight_map": (_folders,),
    "pickle": (),
    "torch_zip": (),
    "config": (model_config,),
    "fsdp": (_FSDP, checks),
    "deepspeed": (_DS, deepspeed_keys, zero_keys, checks),
    "accelerate": (_ACCELERATE, accelerate_keys, checks),
}


def run_one(target: Target, data: bytes, folder: pathlib.Path) -> bool:
    """Was it accepted? Raises what is a finding."""
    started = time.monotonic()
    try:
        target.call(data, folder)
        accepted = True
    except target.errors:
        accepted = False
    promise(time.monotonic() - started < SECONDS_MAX, "an answer within seconds")
    return accepted


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

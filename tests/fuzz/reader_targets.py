"""The fuzzed readers in Python: how each is called, what it may raise, what it promises.

An input is bytes. It may be refused with the errors that the reader documents; if it is accepted,
what it gives must keep the promises written here; anything else is a finding.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import pathlib
import sys
import time
import types
import warnings
import zlib
from collections.abc import Callable
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

SECONDS_MAX = 10.0  # of one input


def promise(holds: bool, words: str) -> None:
    """What a reader guarantees of what it accepted."""
    if not holds:
        raise AssertionError(words)


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

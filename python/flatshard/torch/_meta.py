"""Modules that are built without memory and get their values when they are sharded."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .._export import read_weights
from .._folders import first_of, foreign_catalog
from .._kinds import WEIGHT
from ..errors import CheckpointError, ConfigError
from ..world import World
from . import _registry
from ._arrays import as_array
from ._module import fully_shard

if TYPE_CHECKING:
    from ._module import Sharded

__all__ = ["empty_weights", "from_pretrained", "materialize"]

_log = logging.getLogger("flatshard")

Init = str | os.PathLike[str] | Callable[[torch.nn.Module], Any] | None


# ---- building -----------------------------------------------------------------------------------


class _EmptyOnMeta(torch.overrides.TorchFunctionMode):
    """torch.empty gives no memory; whatever has values is made as ever."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Modules built inside have Parameters without memory (on the meta device), and buffers with
    their values.

    Notes
    -----
    ``torch.device("meta")`` takes the values of buffers away too, among them tables that no
    checkpoint holds (rotary frequencies). Here only Parameters are without memory, and filling them
    at random costs nothing. For `fully_shard` and then `materialize`.

    Examples
    --------
    >>> with empty_weights():
    ...     model = torch.nn.Linear(100_000, 100_000)
    >>> model.weight.device
    device(type='meta')
    """
    register = torch.nn.Module.register_parameter

    def without_memory(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and param.device.type != "meta":
            kept = self._parameters[name]
            assert kept is not None
            self._parameters[name] = torch.nn.Parameter(
                kept.to("meta"), requires_grad=kept.requires_grad
            )

    torch.nn.Module.register_parameter = without_memory
    try:
        with _EmptyOnMeta():
            yield
    finally:
        torch.nn.Module.register_parameter = register


# ---- values -------------------------------------------------------------------------------------


def materialize(
    module: torch.nn.Module, init: Init = None, *, strict: bool = True
) -> torch.nn.Module:
    """Give a module that was sharded without values its weights. Collective.

    Parameters
    ----------
    module : Module
        Sharded by `fully_shard` while its Parameters were on the meta device.
    init : path, callable, or None
        A folder of Hugging Face safetensors or a checkpoint of flatshard: each rank reads only the
        ranges that it keeps. A callable is called with each submodule that holds Parameters, as
        ``torch.nn.Module.apply`` would, and fills them in place; ranks draw the same numbers. None:
        the model's own ``_init_weights`` (transformers), else each submodule's
        ``reset_parameters``.
    strict : bool
        With a folder: False initialises, as None does, what it lacks, and passes over what it has
        besides.

    Returns
    -------
    Module
        The module itself.

    Raises
    ------
    CheckpointError
        The folder lacks a Parameter, or holds others or other shapes. Nothing was written.
    ConfigError
        Nothing says how a submodule is initialised; or a buffer has no values and the folder none
        for it.
    ValueError
        Not sharded.

    Notes
    -----
    Memory: with a folder, the ranges a rank keeps; with a callable besides the Parameters of one
    submodule at a time.
    """
    sharded = _registry.sharded_of(module, "materialize")
    if isinstance(init, (str, os.PathLike)):
        missing = _read(sharded, os.fspath(init), strict)
        _fill(sharded, missing, None)
    else:
        _fill(sharded, {m.name for m in sharded.members}, init)
    _check_buffers(sharded)
    sharded.has_values = True
    sharded.held.refresh()
    return module


def _read(sharded: Sharded, folder: str, strict: bool) -> set[str]:
    """Reads a folder; gives the Parameters that it lacks."""
    if not os.path.exists(folder):
        raise CheckpointError(f"{folder}: there is no such folder")
    rename = _renaming(sharded, folder)
    buffers = {n for n, _ in sharded.module.named_buffers()}
    found = read_weights(
        sharded.shards,
        folder,
        strict=strict,
        rename=rename,
        ignore=("*.rotary_emb.inv_freq", *(rename(name) for name in buffers)),
    )
    for name in _read_buffers(sharded, folder, rename):
        _log.debug("buffer %s read from %s", name, folder)
    if sharded.world.is_main and found.missing:
        _log.warning(
            "%s lacks %s: initialised anew; train them before use", folder, first_of(found.missing)
        )
    if sharded.world.is_main and found.unexpected:
        _log.warning("%s holds besides %s: not read", folder, first_of(found.unexpected))
    return set(found.missing)


def _tensor_names(folder: str) -> dict[str, str]:
    """Tensors of a folder of safetensors to the file of each; empty for a checkpoint of ours."""
    from safetensors import safe_open

    try:
        catalog = foreign_catalog(folder)
    except CheckpointError:
        return {}
    names: dict[str, str] = {}
    for file, _, _ in catalog.files:
        path = os.path.join(catalog.folder, file)
        with safe_open(path, framework="pt") as opened:
            names.update(dict.fromkeys(opened.keys(), path))
    return names


def _renaming(sharded: Sharded, folder: str) -> Callable[[str], str]:
    """From names here to names there: a model with a head reads the folder of one without, and the
    other way round (transformers' ``base_model_prefix``)."""
    prefix = getattr(sharded.module, "base_model_prefix", "")
    there = _tensor_names(folder)
    ours = [name for member in sharded.members for name in member.names]
    if prefix and there and not any(name in there for name in ours):
        dotted = prefix + "."
        if any(name.startswith(dotted) and name[len(dotted) :] in there for name in ours):
            return lambda name: name.removeprefix(dotted)
        if any(dotted + name in there for name in ours):
            return lambda name: dotted + name
    return lambda name: name


def _read_buffers(sharded: Sharded, folder: str, rename: Callable[[str], str]) -> list[str]:
    """Persistent buffers that the folder holds."""
    from safetensors import safe_open

    there = _tensor_names(folder)
    done = []
    for name, buffer in list(sharded.module.named_buffers()):
        path = there.get(rename(name))
        if path is None:
            continue
        with safe_open(path, framework="pt") as opened:
            value = opened.get_tensor(rename(name))
        if value.shape != buffer.shape:
            raise CheckpointError(
                f"{path}: buffer {name} is {list(value.shape)} there and {list(buffer.shape)} here"
            )
        owner, _, attribute = name.rpartition(".")
        holder = sharded.module.get_submodule(owner)
        holder._buffers[attribute] = value.to(buffer.dtype)
        done.append(name)
    return done


def _check_buffers(sharded: Sharded) -> None:
    bare = [name for name, b in sharded.module.named_buffers() if b.device.type == "meta"]
    if bare:
        raise ConfigError(
            f"buffers without values: {first_of(bare)}. Build the module inside "
            "flatshard.torch.empty_weights() instead of torch.device('meta'): then buffers keep "
            "theirs"
        )


def _fill(sharded: Sharded, names: set[str], init: Any) -> None:
    """Initialises these Parameters, submodule by submodule, alike on every rank."""
    if not names:
        return
    fill = init if init is not None else _own_init(sharded.module)
    holders: dict[int, tuple[torch.nn.Module, dict[str, int]]] = {}
    for index, member in enumerate(sharded.members):
        if member.name in names:
            holder, attribute = member.places[0]
            holders.setdefault(id(holder), (holder, {}))[1][attribute] = index
    seed = int(sharded.world.broadcast(np.array([torch.initial_seed() % 2**62]), root=0)[0])
    with torch.random.fork_rng(devices=[]), sharded.shards.storing() as store:
        torch.manual_seed(seed)
        for holder, places in holders.values():
            twin = _twin(holder)
            with torch.no_grad():
                fill(twin)
            for attribute, index in places.items():
                value = twin._parameters[attribute]
                assert value is not None
                store(index, WEIGHT, as_array(value))


def _twin(holder: torch.nn.Module) -> torch.nn.Module:
    """A shallow copy with private Parameters: to be initialised, and then read."""
    twin = copy.copy(holder)
    twin.__dict__ = dict(holder.__dict__)
    twin._parameters = {
        name: None
        if p is None
        else torch.nn.Parameter(torch.full(p.shape, float("nan")), requires_grad=p.requires_grad)
        for name, p in holder._parameters.items()
    }
    return twin


def _own_init(module: torch.nn.Module) -> Callable[[torch.nn.Module], Any]:
    of_model: Any = getattr(module, "_init_weights", None)
    if callable(of_model):
        found: Callable[[torch.nn.Module], Any] = of_model
        return found

    def reset(holder: torch.nn.Module) -> None:
        if not callable(getattr(holder, "reset_parameters", None)):
            raise ConfigError(
                f"materialize: a {type(holder).__name__} has no reset_parameters(); say init=, a "
                "function that fills a submodule's own Parameters, or a folder"
            )
        holder.reset_parameters()

    return reset


# ---- transformers -------------------------------------------------------------------------------


def from_pretrained(
    cls: Any,
    directory: str | os.PathLike[str],
    *,
    world: World | None = None,
    units: Any = "auto",
    sharding: Any = None,
    mp_policy: Any = None,
    strict: bool = False,
    config: Any = None,
    **options: Any,
) -> Any:
    """A sharded model of transformers from a folder; no rank ever holds the whole. Collective.

    Parameters
    ----------
    cls : class
        A model class (``LlamaForCausalLM``, ``AutoModelForCausalLM``, ...).
    directory : path
        Holds config.json and safetensors, single or in several files.
    world, units, sharding, mp_policy
        As for `fully_shard`.
    strict : bool
        Whether a Parameter that the folder lacks (a new head) is an error; else it is initialised,
        and said.
    config : PretrainedConfig, optional
        Instead of the folder's own.
    **options
        Of the configuration (``num_labels=2``, ``attn_implementation="eager"``).

    Returns
    -------
    Module
        Sharded, in evaluation mode, as ``cls.from_pretrained`` gives it.

    Raises
    ------
    CheckpointError, ConfigError
        As `materialize`.

    Notes
    -----
    Each rank reads only the ranges that it keeps. ``cls.from_pretrained`` followed by `fully_shard`
    gives the same weights and needs the whole model on every rank meanwhile.
    """
    from transformers import AutoConfig

    if config is None:
        config = AutoConfig.from_pretrained(os.fspath(directory), **options)
    elif options:
        raise ConfigError(f"config= is given; set {', '.join(sorted(options))} in it")
    make = getattr(cls, "from_config", None) or getattr(cls, "_from_config", cls)
    with empty_weights():
        model = make(config)
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    model.eval()
    fully_shard(model, world=world, units=units, sharding=sharding, mp_policy=mp_policy)
    return materialize(model, directory, strict=strict)

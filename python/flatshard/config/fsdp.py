"""FSDP's configuration: the ``fsdp_config`` of transformers, and what Accelerate makes of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..policy import PRESETS, LossScale, MixedPrecision, Offload, Sharding
from . import checks
from .reading import Reader, Rule, done, load, noted, refused
from .settings import Settings, Units

__all__ = ["POLICY", "RULES", "Defaults", "fsdp", "read_fsdp"]

ONE_HOME = "pinned host memory where a GPU computes; on the CPU there is one home"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
#: What ``TrainingArguments(fsdp="full_shard auto_wrap offload")`` may hold besides strategies.
_OPTIONS = ("auto_wrap", "offload")


@dataclass(frozen=True)
class Defaults:
    """What is meant by a key that is not there; it depends on who reads.

    Parameters
    ----------
    version : int
        Of FSDP.
    wrap : str
        Of ``auto_wrap_policy``.
    save_by_version : tuple of str
        Of ``state_dict_type``, for version 1 and 2.
    """

    version: int = 2
    wrap: str = "TRANSFORMER_BASED_WRAP"
    save_by_version: tuple[str, str] = ("FULL_STATE_DICT", "FULL_STATE_DICT")


def _strategy(value: object, from_text: bool) -> str:
    expected = f"one of {', '.join(STRATEGIES)}, or 1 to {len(STRATEGIES)}"
    if isinstance(value, str) and value.strip().upper() in STRATEGIES:
        return value.strip().upper()
    try:
        number = checks.integer(1, len(STRATEGIES))(value, True)
    except checks.Wrong:
        raise checks.Wrong(expected) from None
    return STRATEGIES[number - 1]


def _reshard(value: object, from_text: bool) -> bool | str:
    """true or false, or a strategy's name or number, which version 1 takes."""
    # 1 is FULL_SHARD and not true; "1" of an environment likewise.
    digits = isinstance(value, int) and not isinstance(value, bool)
    if not digits and not (isinstance(value, str) and value.strip().isdigit()):
        try:
            return checks.loose_flag(value, from_text)
        except checks.Wrong:
            pass
    try:
        return _strategy(value, from_text)
    except checks.Wrong as wrong:
        raise checks.Wrong(f"true or false, or, with version 1, {wrong}") from None


def _policy(value: object, from_text: bool) -> object:
    if value is None or isinstance(value, Mapping):
        return checks.mapping(value, from_text)
    word = checks.choice("fp32", "bf16", "fp16", "fp8", "no")(value, from_text)
    if word == "fp8":
        raise checks.Wrong("bf16, fp16 or fp32: fp8 is not offered")
    return word


def _reshard_text(value: object) -> str:
    if isinstance(value, bool):
        return f"Sharding(stage=3, reshard_after_forward={value})"
    return _strategy_text(str(value))


def _strategy_text(value: str) -> str:
    if value == "NO_SHARD":
        return "Sharding(stage=0)"
    kept = value in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    text = f"Sharding(stage=3, reshard_after_forward={not kept})"
    if value.startswith("HYBRID"):
        text += "; a replica a host: one, unless dp_replicate_size says more"
    return text


def _offload_text(value: bool) -> str:
    return f'Offload(params="cpu", grads="cpu", state="cpu"): {ONE_HOME}'


_flag = checks.loose_flag
_size = checks.integer(1)
_MESH = "flatshard shards over data-parallel ranks alone"

#: A ``mixed_precision_policy`` that is an object.
POLICY: Mapping[str, Rule] = {
    "param_dtype": done(checks.dtype, lambda v: f'MixedPrecision(param="{v}")'),
    "reduce_dtype": done(checks.dtype, lambda v: f'MixedPrecision(reduce="{v}")'),
    "output_dtype": noted(checks.dtype, "outputs keep the dtype that the module gives them"),
    "buffer_dtype": noted(checks.dtype, "buffers keep their dtype; they are not sharded"),
    **{
        name: refused(
            _flag,
            "inputs are cast to param_dtype",
            near="mixed_precision_policy.param_dtype",
            off=lambda v: v,
            off_text="always",
        )
        for name in ("cast_forward_inputs", "cast_root_forward_inputs")
    },
    "keep_low_precision_grads": refused(
        _flag, "summed gradients are float32", near="mixed_precision_policy.reduce_dtype"
    ),
}

#: Every key, without the prefix ``fsdp_``.
RULES: Mapping[str, Rule] = {
    "version": done(
        checks.one_of(1, 2),
        lambda v: f'Sharding(partition="{("flat", "per_parameter")[v - 1]}")',
    ),
    "reshard_after_forward": done(_reshard, _reshard_text),
    "sharding_strategy": done(_strategy, _strategy_text),
    "cpu_offload": done(_flag, _offload_text, off=lambda v: not v, off_text="nothing is offloaded"),
    "offload_params": done(
        _flag,
        _offload_text,
        alias="cpu_offload",
        off=lambda v: not v,
        off_text="nothing is offloaded",
    ),
    "auto_wrap_policy": done(checks.choice(*WRAPS), "how the model is cut into units"),
    "transformer_layer_cls_to_wrap": done(
        checks.names, lambda v: f"units: {', '.join(v) if v else 'the layers the model names'}"
    ),
    "transformer_cls_names_to_wrap": done(
        checks.names,
        lambda v: f"units: {', '.join(v) if v else 'the layers the model names'}",
        alias="transformer_layer_cls_to_wrap",
    ),
    "transformer_cls_to_wrap": done(
        checks.names,
        lambda v: f"units: {', '.join(v) if v else 'the layers the model names'}",
        alias="transformer_layer_cls_to_wrap",
    ),
    "min_num_params": done(
        checks.integer(0),
        "least parameters of a unit, with SIZE_BASED_WRAP",
        off=lambda v: not v,
        off_text="no effect: SIZE_BASED_WRAP alone has a least size",
    ),
    "state_dict_type": done(
        checks.choice("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
        lambda v: f'checkpoint.save(kind="{v.split("_")[0].lower()}")',
    ),
    "cpu_ram_efficient_loading": done(
        _flag,
        "weights are read by the ranks that own them, never whole by each",
        off=lambda v: not v,
        off_text="the script loads the model; fully_shard then takes rank 0's values",
    ),
    "activation_checkpointing": done(
        _flag,
        "activations are computed again in backward",
        off=lambda v: not v,
        off_text="activations are kept",
    ),
    "ignored_modules": done(
        checks.modules,
        "these modules stay unsharded",
        off=lambda v: not v,
        off_text="none",
    ),
    "mixed_precision_policy": done(_policy, lambda v: f"precision {v}"),
    "fsdp_size": done(_size, "ranks of the world, as it must be"),
    "backward_prefetch": noted(
        checks.choice("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        "flatshard schedules gathers itself: Sharding(prefetch=)",
    ),
    "backward_prefetch_policy": noted(
        checks.choice("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        "flatshard schedules gathers itself: Sharding(prefetch=)",
    ),
    "forward_prefetch": noted(_flag, "flatshard schedules gathers itself: Sharding(prefetch=)"),
    "limit_all_gathers": noted(
        _flag, "gathered units are bounded when shards are opened, not by waiting"
    ),
    "use_orig_params": noted(_flag, "always: parameters keep their identity"),
    "sync_module_states": noted(_flag, "always: all ranks start from rank 0's values"),
    "activation_checkpointing_offload": refused(
        _flag, "activations are not moved to another home", near="activation_checkpointing"
    ),
    "xla": refused(_flag, "there is no XLA backend", near="version"),
    "xla_fsdp_v2": refused(_flag, "there is no XLA backend", near="version"),
    "xla_fsdp_settings": refused(checks.mapping, "there is no XLA backend", near="version"),
    "xla_fsdp_grad_ckpt": refused(
        _flag, "there is no XLA backend", near="activation_checkpointing"
    ),
    "tp_size": refused(_size, _MESH, near="fsdp_size", off=lambda v: v == 1),
    "ep_size": refused(_size, _MESH, near="fsdp_size", off=lambda v: v == 1),
    "cp_size": refused(_size, _MESH, near="fsdp_size", off=lambda v: v == 1),
    "sp_size": refused(_size, _MESH, near="fsdp_size", off=lambda v: v == 1),
    "enable_expert_parallel": refused(_flag, _MESH, near="fsdp_size"),
    "param_init_fn": refused(
        checks.anything,
        "a file holds no function; give flatshard.torch.materialize(init=)",
        near="cpu_ram_efficient_loading",
        off=lambda v: v is None,
    ),
    "state_dict_config": refused(
        checks.anything,
        "a file holds no object of torch",
        near="state_dict_type",
        off=lambda v: v is None,
    ),
    "optim_state_dict_config": refused(
        checks.anything,
        "a file holds no object of torch",
        near="state_dict_type",
        off=lambda v: v is None,
    ),
}


def without_prefix(reader: Reader, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without ``fsdp_``; the same key with and without must say the same."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        plain = key
        if isinstance(key, str) and key.startswith("fsdp_") and key != "fsdp_size":
            plain = key[len("fsdp_") :]
        if plain in found and found[plain] != value:
            reader.fail(plain, f"is {found[plain]!r:.60} and {value!r:.60}, with and without fsdp_")
        found[plain] = value
    return found


def fsdp(
    source: Any,
    *,
    world_size: int | None = None,
    options: str | Iterable[str] | bool = True,
    gradient_checkpointing: bool = False,
    device: str = "cpu",
) -> Settings:
    """Reads an ``fsdp_config``, strictly.

    Parameters
    ----------
    source : path, str or mapping
        A JSON or YAML file, JSON text, or a dict; keys with or without ``fsdp_``.
    world_size : int, optional
        Ranks; where it is given, sizes in the file must fit it.
    options : str or iterable of str, optional
        The ``fsdp`` argument beside it, as ``"full_shard auto_wrap offload"``. False: FSDP is off
        and the configuration ignored, which the table says.
    gradient_checkpointing : bool
        Whether the Trainer's own is on, which excludes ``activation_checkpointing``.
    device : {"cpu", "cuda"}
        Where the model computes.

    Returns
    -------
    Settings
        Defaults are those of transformers: version 2, TRANSFORMER_BASED_WRAP, FULL_STATE_DICT.

    Raises
    ------
    ConfigError
        A key that is unknown, refused or there twice, a value of another type or out of range, or
        two keys that contradict each other. The text names the key and what would do.
    """
    values, name = load(source)
    reader = Reader(name)
    if options is False:
        for key, value in values.items():
            reader.row(str(key), value, "noted", "ignored: fsdp is false")
        return Settings(name, "fsdp", Sharding(stage=0), keys=tuple(reader.rows))
    return read_fsdp(
        reader,
        _with_options(reader, without_prefix(reader, values), options),
        defaults=Defaults(),
        world_size=world_size,
        gradient_checkpointing=gradient_checkpointing,
        device=device,
    )


def _with_options(
    reader: Reader, values: dict[str, Any], options: str | Iterable[str] | bool
) -> dict[str, Any]:
    """The old words of the ``fsdp`` argument as keys; a key that is there already stands."""
    if isinstance(options, bool) or options is None:
        return values
    for option in options.split() if isinstance(options, str) else options:
        word = str(getattr(option, "value", option)).lower()
        if word.upper() in STRATEGIES:
            if not {"reshard_after_forward", "sharding_strategy"} & set(values):
                values["sharding_strategy"] = word.upper()
        elif word == "offload":
            if not {"cpu_offload", "offload_params"} & set(values):
                values["cpu_offload"] = True
        elif word != "auto_wrap":
            words = (*(name.lower() for name in STRATEGIES), *_OPTIONS)
            reader.fail("fsdp", f"has the word {word!r:.60}: expected {', '.join(words)}")
    return values


def read_fsdp(
    reader: Reader,
    values: Mapping[str, Any],
    *,
    defaults: Defaults,
    world_size: int | None,
    path: str = "",
    gradient_checkpointing: bool = False,
    device: str = "cpu",
) -> Settings:
    """Settings from keys without prefix; ``defaults`` fill what is not there."""
    found = reader.read(values, RULES, path)

    def where(key: str) -> str:
        return reader.where(path, key)

    version = found.get("version", defaults.version)
    stage, reshard, given = _stage(reader, found, version, where)
    if found.get("activation_checkpointing") and gradient_checkpointing:
        reader.fail(
            where("activation_checkpointing"),
            "and gradient_checkpointing are both on: each computes activations again; leave "
            "gradient_checkpointing off",
        )
    offload = None
    if found.get("cpu_offload"):
        if device != "cpu" and stage != 3:
            reader.fail(
                where("cpu_offload"),
                f"is true with a strategy that keeps weights whole (stage {stage}): on {device} "
                "these stay there, and only sharded ones can be offloaded; leave it out, or shard "
                "parameters too",
            )
        offload = Offload(params="cpu", grads="cpu", state="cpu")
    if world_size is not None and found.get("fsdp_size", world_size) != world_size:
        reader.fail(
            where("fsdp_size"),
            f"is {found['fsdp_size']}, but the world has {world_size} ranks: {_MESH}",
        )
    precision = _precision(reader, found.get("mixed_precision_policy"), where)
    units, names = _units(reader, found, defaults, where)
    save = _save(reader, found, defaults, version, where)
    given |= {
        field
        for field, key in (
            ("precision", "mixed_precision_policy"),
            ("activation_checkpointing", "activation_checkpointing"),
            ("save", "state_dict_type"),
            ("efficient_loading", "cpu_ram_efficient_loading"),
            ("ignored_modules", "ignored_modules"),
            ("world_size", "fsdp_size"),
        )
        if key in found
    }
    return Settings(
        source=reader.source,
        kind="fsdp",
        sharding=Sharding(
            stage=stage,
            partition="flat" if version == 1 else "per_parameter",
            reshard_after_forward=reshard,
            offload=offload,
        ),
        precision=precision,
        units=units,
        ignored_modules=found.get("ignored_modules") or (),
        activation_checkpointing=found.get("activation_checkpointing", False),
        save=save,
        efficient_loading=found.get("cpu_ram_efficient_loading", False),
        world_size=found.get("fsdp_size"),
        given=frozenset(given | names | {"sharding"}),
        keys=tuple(reader.rows),
    )


def _stage(
    reader: Reader, found: Mapping[str, Any], version: int, where: Any
) -> tuple[int, bool, set[str]]:
    """(stage, reshard_after_forward, fields that were given)."""
    reshard = found.get("reshard_after_forward")
    strategy = found.get("sharding_strategy")
    if reshard is None and strategy is None:
        return 3, True, set()
    if version == 2 and isinstance(reshard, str):
        reader.fail(
            where("reshard_after_forward"),
            f'is "{reshard}", and version 2 takes true or false; with version 1 it is a strategy',
        )
    if version == 1 and isinstance(reshard, bool):
        reader.fail(
            where("reshard_after_forward"),
            f"is {str(reshard).lower()}, and version 1 takes one of {', '.join(STRATEGIES)}; with "
            "version 2 it is true or false",
        )
    meant = []
    if isinstance(reshard, bool):
        meant.append((3, reshard))
    for name in (reshard, strategy):
        if isinstance(name, str):
            kept = name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
            meant.append((0, True) if name == "NO_SHARD" else (3, not kept))
    if len(set(meant)) > 1:
        reader.fail(
            where("reshard_after_forward"),
            f"is {str(reshard).lower() if isinstance(reshard, bool) else reshard}, which "
            f"contradicts {where('sharding_strategy')} {strategy}; leave one of them out",
        )
    return (*meant[0], {"sharding"})


def _precision(reader: Reader, policy: Any, where: Any) -> MixedPrecision:
    if not policy:
        return PRESETS["fp32"]
    if isinstance(policy, str):
        return PRESETS["fp32" if policy == "no" else policy]
    row = reader.rows.pop(
        next(i for i, key in enumerate(reader.rows) if key.path.endswith("mixed_precision_policy"))
    )
    read = reader.read(policy, POLICY, row.path)
    param = read.get("param_dtype", "float32")
    return mix(reader, row.path, param=param, reduce=read.get("reduce_dtype"))


def mix(reader: Reader, path: str, *, param: str, reduce: str | None) -> MixedPrecision:
    """fp32 masters behind a compute dtype, scaled where fp16 is in it."""
    half = "float16" in (param, reduce)
    try:
        return MixedPrecision(
            param=param,
            reduce=reduce,
            master=None if param == "float32" else "float32",
            loss_scale=LossScale() if half else None,
        )
    except ValueError as error:
        reader.fail(path, f"cannot be: {error}")


def _units(
    reader: Reader, found: Mapping[str, Any], defaults: Defaults, where: Any
) -> tuple[Units, set[str]]:
    wrap = found.get("auto_wrap_policy", defaults.wrap)
    if "auto_wrap_policy" not in found and wrap == "NO_WRAP":
        text = "Accelerate's default: the whole model is one unit, which saves no gathered memory"
        reader.row(where("auto_wrap_policy"), wrap, "done", text)
    classes = found.get("transformer_layer_cls_to_wrap", ())
    least = found.get("min_num_params", 0)
    given = {"units"} if "auto_wrap_policy" in found or classes else set()
    if wrap == "SIZE_BASED_WRAP":
        if not least:
            reader.fail(
                where("min_num_params"),
                "must be above 0 with SIZE_BASED_WRAP: with 0 the whole model is one unit, which "
                "saves no memory (NO_WRAP says so)",
            )
        _demote(reader, where, "transformer_layer_cls_to_wrap", "no effect under SIZE_BASED_WRAP")
        return Units("size", min_num_params=least), given
    _demote(reader, where, "min_num_params", f"no effect under {wrap}")
    if wrap == "NO_WRAP":
        _demote(reader, where, "transformer_layer_cls_to_wrap", "no effect under NO_WRAP")
        return Units("whole"), given
    return (Units("classes", classes) if classes else Units("auto")), given


def _demote(reader: Reader, where: Any, name: str, text: str) -> None:
    """A key that another one leaves without effect is noted, not done."""
    same = {name, *(key for key, rule in RULES.items() if rule.alias == name)}
    paths = {where(key) for key in same}
    for i, key in enumerate(reader.rows):
        if key.path in paths and key.fate == "done":
            reader.rows[i] = replace(key, fate="noted", text=text)


def _save(
    reader: Reader, found: Mapping[str, Any], defaults: Defaults, version: int, where: Any
) -> Literal["full", "sharded"]:
    kind = found.get("state_dict_type", defaults.save_by_version[version - 1])
    if kind == "LOCAL_STATE_DICT":
        reader.fail(
            where("state_dict_type"),
            "is LOCAL_STATE_DICT: what a rank's flat memory holds fits no other world; the nearest "
            "that is offered is SHARDED_STATE_DICT",
        )
    return "full" if kind == "FULL_STATE_DICT" else "sharded"

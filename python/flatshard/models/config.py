"""Configurations of Llama-family models: sizes by name, and config.json both ways."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError

__all__ = ["SIZES", "LlamaConfig", "has_weights", "load_config"]

Family = Literal["llama", "mistral", "granite"]

#: Sizes by name. "tiny" is for tests, "small" for a few minutes on bytes of text; the rest have
#: room for a vocabulary of subwords.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    "small": {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
    "32m": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    "125m": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    "350m": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
    },
    "1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    "7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
}

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "granite": "GraniteForCausalLM",
}
#: What a key means when config.json leaves it out, where families differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "granite": {"max_position_embeddings": 2048, "attention_multiplier": 1.0},
}
#: Keys that would change the computation, and the only values that this model computes.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, 0.0, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "use_bidirectional_attention": (False, None),
}
_ROPE_KINDS = {"default": 0, "linear": 1, "llama3": 2}
_CONFIG_NBYTES_MAX = 10_000_000


@dataclass(frozen=True)
class LlamaConfig:
    """A Llama, Mistral or Granite configuration. Fields are named as in config.json.

    Parameters
    ----------
    model_type : {"llama", "mistral", "granite"}
        The family, which decides the class that transformers opens a saved folder with.
    vocab_size, hidden_size, intermediate_size : int
        Sizes of the vocabulary, of the residual stream and of the MLP.
    num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim : int
        Heads of the queries and of keys and values; head_dim even and at most 256.
    max_position_embeddings : int, tokens
        Longest sequence.
    sliding_window : int, tokens
        How far attention looks back (Mistral); 0: everywhere.
    rms_norm_eps, rope_theta : float
        Of the norms; base of the rotary angles.
    rope_type : {"default", "linear", "llama3"}
        How rotary angles are stretched.
    rope_factor : float
        By how much, in "linear" and "llama3".
    rope_low_freq_factor, rope_high_freq_factor : float
        "llama3": wavelengths above ``rope_original_max_position`` / low are stretched whole, below
        that / high not at all, and between them in part.
    rope_original_max_position : int
        "llama3": tokens of the longest sequence before stretching.
    attention_bias, mlp_bias, tie_word_embeddings : bool
        Biases of the projections; whether the head is the embedding.
    embedding_multiplier, residual_multiplier, logits_scaling : float
        Granite's; 1 elsewhere.
    attention_multiplier : float
        Scale of the attention scores; 1 / sqrt(head_dim) but for Granite.
    initializer_range : float
        Standard deviation of initial weights.
    other : dict
        Further keys of the config.json that was read, written back by a save.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    model_type: Family = "llama"
    sliding_window: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position: int = 0
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 0.0
    logits_scaling: float = 1.0
    initializer_range: float = 0.02
    other: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.attention_multiplier and self.head_dim > 0:
            object.__setattr__(self, "attention_multiplier", self.head_dim**-0.5)

    def core(self) -> tuple[Any, ...]:
        """The tuple that the C core takes."""
        return (
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.max_position_embeddings,
            self.sliding_window,
            self.rms_norm_eps,
            self.rope_theta,
            _ROPE_KINDS[self.rope_type],
            self.rope_factor,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
            self.rope_original_max_position,
            self.attention_bias,
            self.mlp_bias,
            self.tie_word_embeddings,
            self.embedding_multiplier,
            self.residual_multiplier,
            self.attention_multiplier,
            self.logits_scaling,
        )

    def to_hf(self, *, dtype: str) -> dict[str, Any]:
        """The content of a config.json that transformers opens.

        Parameters
        ----------
        dtype : str
            Of the weights beside it.

        Returns
        -------
        dict
            Rotary keys in the older spelling (``rope_theta``, ``rope_scaling``), which old and new
            versions read.
        """
        hf: dict[str, Any] = {
            **self.other,
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "torch_dtype": dtype,
            "hidden_act": "silu",
            "use_cache": True,
            "rope_scaling": self._rope_scaling(),
        }
        shared = [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_theta",
            "tie_word_embeddings",
            "initializer_range",
        ]
        if self.model_type == "mistral":
            hf["sliding_window"] = self.sliding_window or None
        else:
            shared += ["attention_bias", "mlp_bias"]
        if self.model_type == "granite":
            shared += ["embedding_multiplier", "residual_multiplier"]
            shared += ["attention_multiplier", "logits_scaling"]
        hf.update({name: getattr(self, name) for name in shared})
        return hf

    def _rope_scaling(self) -> dict[str, Any] | None:
        if self.rope_type == "default":
            return None
        scaling = {"rope_type": self.rope_type, "factor": self.rope_factor}
        if self.rope_type == "llama3":
            scaling["low_freq_factor"] = self.rope_low_freq_factor
            scaling["high_freq_factor"] = self.rope_high_freq_factor
            scaling["original_max_position_embeddings"] = self.rope_original_max_position
        return scaling


# ---- reading ------------------------------------------------------------------------------------


class _Keys:
    """Typed access to a configuration, which says where and what when a value is wrong."""

    def __init__(self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any]) -> None:
        self.values, self.where, self.defaults = values, where, defaults
        self.used: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        value = self.values.get(name)
        return self.defaults.get(name, default) if value is None else value

    def wrong(self, name: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {value!r:.60}: expected {expected}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, value, "a whole number")
        if not 0 <= value < 1 << 62:
            raise self.wrong(name, value, "a size")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value


def _rope(keys: _Keys) -> dict[str, Any]:
    """Rotary fields: ``rope_parameters`` is new, ``rope_theta`` and ``rope_scaling`` are old."""
    new, old = keys.get("rope_parameters"), keys.get("rope_scaling")
    scaling = old or new or {}
    if not isinstance(scaling, Mapping) or not isinstance(new or {}, Mapping):
        raise keys.wrong("rope_scaling", scaling, "an object")
    where = f"{keys.where}, rotary scaling"
    inner = _Keys({**(new or {}), **scaling}, where, {})
    kind = inner.get("rope_type", inner.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KINDS:
        raise ConfigError(
            f"{where}: {kind!r:.60} is not offered; there are {', '.join(_ROPE_KINDS)}"
        )
    if inner.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(f"{where}: partial_rotary_factor is not offered")
    fields: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": inner.number("rope_theta", keys.number("rope_theta", 10000.0)),
    }
    if kind != "default":
        if "factor" not in inner.values:
            raise ConfigError(f"{where}: factor is missing")
        fields["rope_factor"] = inner.number("factor", 1.0)
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            if name not in inner.values:
                raise ConfigError(f"{where}: {name} is missing")
            fields[f"rope_{name}"] = inner.number(name, 0.0)
        fields["rope_original_max_position"] = inner.integer(
            "original_max_position_embeddings", keys.integer("max_position_embeddings")
        )
    return fields


def _from_dict(values: Mapping[str, Any], where: str) -> LlamaConfig:
    family = values.get("model_type", "llama")
    if not isinstance(family, str) or family not in _ARCHITECTURES:
        raise ConfigError(
            f"{where}: a model of family {family!r:.60}; the native model is a Llama: model_type "
            f"{', '.join(_ARCHITECTURES)}"
        )
    keys = _Keys(values, where, _DEFAULTS[family])
    for name, allowed in _ONLY.items():
        if keys.get(name) not in (None, *allowed):
            raise ConfigError(
                f"{where}: {name} is {values[name]!r:.60}; this model computes only with "
                f"{allowed[0]!r}"
            )
    layer_types = keys.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise keys.wrong("layer_types", layer_types, "a list")
    if family != "mistral" and any(kind != "full_attention" for kind in layer_types):
        raise ConfigError(f"{where}: layer_types other than full_attention are not offered")
    heads = keys.integer("num_attention_heads")
    hidden = keys.integer("hidden_size")
    if keys.get("head_dim") is None and (heads == 0 or hidden % heads):
        raise ConfigError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and "
            "there is no head_dim"
        )
    granite = family == "granite"
    fields: dict[str, Any] = {
        "model_type": family,
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_hidden_layers": keys.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("num_key_value_heads", heads),
        "head_dim": keys.integer("head_dim", hidden // heads if heads else 0),
        "max_position_embeddings": keys.integer("max_position_embeddings"),
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": keys.flag("tie_word_embeddings"),
        "initializer_range": keys.number("initializer_range", 0.02),
        # Mistral has no biases, and the others no window, whatever the file says.
        "attention_bias": family != "mistral" and keys.flag("attention_bias"),
        "mlp_bias": family != "mistral" and keys.flag("mlp_bias"),
        **_rope(keys),
    }
    if family == "mistral":
        # Here null means none; only a key left out means the default.
        no_window = "sliding_window" in values and values["sliding_window"] is None
        fields["sliding_window"] = 0 if no_window else keys.integer("sliding_window")
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        fields[name] = keys.number(name, 1.0) if granite else 1.0
    if granite:
        fields["attention_multiplier"] = keys.number("attention_multiplier", 1.0)
    computed = keys.used | {"architectures", "dtype", "torch_dtype", "transformers_version"}
    other = {name: value for name, value in values.items() if name not in computed}
    return LlamaConfig(**fields, other=other)


def _read(path: str) -> LlamaConfig:
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise ConfigError(f"{path}: no config.json in this folder")
    if os.path.getsize(file) > _CONFIG_NBYTES_MAX:
        raise ConfigError(f"{file}: over {_CONFIG_NBYTES_MAX} bytes, not a configuration")
    try:
        with open(file, encoding="utf-8") as stream:
            values = json.load(stream)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: an object was expected")
    return _from_dict(values, file)


def load_config(source: str | os.PathLike[str] | Mapping[str, Any] | LlamaConfig) -> LlamaConfig:
    """A configuration from a size by name, a dict, a config.json, or a folder that holds one.

    Parameters
    ----------
    source : str, path, mapping or LlamaConfig
        A name in :data:`SIZES` comes before a path.

    Returns
    -------
    LlamaConfig

    Raises
    ------
    ConfigError
        An unknown size, another family, a key that is missing, of a wrong type, or that asks for
        something this model does not compute.
    """
    if isinstance(source, LlamaConfig):
        return source
    if isinstance(source, Mapping):
        return _from_dict(source, "configuration")
    name = os.fspath(source)
    if name in SIZES:
        return _from_dict(SIZES[name], name)
    if not os.path.exists(name):
        raise ConfigError(
            f"no size, file or folder is named {name!r}; sizes are {', '.join(SIZES)}"
        )
    return _read(name)


def has_weights(source: object) -> bool:
    """Is this a folder with weights in Hugging Face's layout?"""
    if not isinstance(source, (str, os.PathLike)) or os.fspath(source) in SIZES:
        return False
    return any(
        os.path.isfile(os.path.join(source, f"model.safetensors{end}"))
        for end in ("", ".index.json")
    )

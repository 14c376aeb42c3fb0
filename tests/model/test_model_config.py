"""Configurations: sizes by name, config.json in both spellings, and what is refused by name."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

import flatshard as fs
from flatshard.models.config import SIZES, LlamaConfig, has_weights, load_config
from flatshard.models.definition import define

pytestmark = pytest.mark.quick

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def params(config: LlamaConfig) -> int:
    return sum(p.numel for p in define(config)[0])


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("tiny", 0.8e6, 1.3e6),
        ("small", 4e6, 6e6),
        ("32m", 31e6, 35e6),
        ("125m", 124e6, 135e6),
        ("350m", 330e6, 370e6),
        ("1b", 1.0e9, 1.2e9),
        ("7b", 6.6e9, 6.9e9),
    ],
)
def test_sizes_have_the_parameters_of_their_names(name: str, low: float, high: float) -> None:
    config = load_config(name)
    assert low < params(config) < high
    assert config.attention_multiplier == config.head_dim**-0.5
    assert config.hidden_size == config.num_attention_heads * config.head_dim


def test_every_size_is_tested() -> None:
    assert set(SIZES) == {"tiny", "small", "32m", "125m", "350m", "1b", "7b"}
    assert SIZES["small"]["vocab_size"] == 256, "bytes"


def test_units_and_names() -> None:
    parameters, units = define(load_config({**SMALL, "tie_word_embeddings": True}))
    assert units == [("embed", 0, 3), ("layers.0", 2, 2), ("layers.1", 1, 1), ("head", 0, 0)]
    names = [p.name for p in parameters]
    assert names[0] == "model.embed_tokens.weight"
    assert parameters[0].tied_name == "lm_head.weight"
    assert names[-1] == "model.norm.weight"
    at = names.index("model.layers.1.self_attn.q_proj.weight")
    assert [n.split(".")[-2] for n in names[at : at + 3]] == ["q_proj", "k_proj", "v_proj"]
    _, untied = define(load_config(SMALL))
    assert untied[0] == ("embed", 3, 3)


def test_defaults_are_those_of_the_families() -> None:
    llama = load_config(SMALL)
    assert (llama.model_type, llama.num_key_value_heads, llama.head_dim) == ("llama", 4, 8)
    assert (llama.rms_norm_eps, llama.rope_theta, llama.sliding_window) == (1e-6, 10000.0, 0)
    mistral = load_config({**SMALL, "num_attention_heads": 16, "model_type": "mistral"})
    assert (mistral.num_key_value_heads, mistral.sliding_window) == (8, 4096)
    none = load_config({**SMALL, "num_key_value_heads": 4, "model_type": "mistral",
                        "sliding_window": None, "attention_bias": True})  # fmt: skip
    assert (none.sliding_window, none.attention_bias) == (0, False)
    granite = load_config({**SMALL, "model_type": "granite"})
    assert granite.attention_multiplier == 1.0
    assert load_config({**SMALL, "logits_scaling": 7.0}).logits_scaling == 1.0


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"rope_theta": 5e5}, ("default", 5e5, 1.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, ("default", 2e4, 1.0)),
        ({"rope_theta": 3e4, "rope_scaling": None}, ("default", 3e4, 1.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ("linear", 1e4, 2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, ("linear", 1e4, 2.5)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9.0}},
            ("linear", 9.0, 4.0),
        ),
    ],
)
def test_rotary_keys_old_and_new(config: dict[str, Any], fields: tuple[Any, ...]) -> None:
    got = load_config({**SMALL, **config})
    assert (got.rope_type, got.rope_theta, got.rope_factor) == fields


def test_llama3_scaling() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5,
               "high_freq_factor": 4.5, "original_max_position_embeddings": 99}  # fmt: skip
    got = load_config({**SMALL, "rope_scaling": scaling})
    assert got.rope_original_max_position == 99
    assert (got.rope_low_freq_factor, got.rope_high_freq_factor) == (1.5, 4.5)
    assert got.to_hf(dtype="float32")["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "family 'gpt2'.*llama, mistral, granite"),
        ({"model_type": None}, "family None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not offered"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "linear"}, "an object"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 33}, "not a multiple"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ],
)
def test_what_is_not_offered_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(fs.ConfigError, match=words):
        load_config({**SMALL, **change})


def test_unknown_names_and_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(fs.ConfigError, match="'33m'; sizes are tiny, small, 32m"):
        load_config("33m")
    with pytest.raises(fs.ConfigError, match=r"no config\.json"):
        load_config(tmp_path)
    file = tmp_path / "config.json"
    for text, words in [("{", "not JSON"), ("[1]", "an object"), ("[" * 100_000, "not JSON")]:
        file.write_text(text)
        with pytest.raises(fs.ConfigError, match=words):
            load_config(tmp_path)
    file.write_text(json.dumps({**SMALL, "model_type": "bert"}))
    with pytest.raises(fs.ConfigError, match=r"config\.json: a model of family 'bert'"):
        load_config(tmp_path)
    file.write_text(json.dumps(SMALL))
    assert load_config(tmp_path) == load_config(str(file)) == load_config(SMALL)


@pytest.mark.parametrize("family", ["llama", "mistral", "granite"])
def test_what_is_written_reads_back(family: str) -> None:
    given = {
        **SMALL,
        "model_type": family,
        "num_key_value_heads": 2,
        "sliding_window": 17,
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 5,
        "transformers_version": "4.0.0",
    }
    config = load_config(given)
    written = json.loads(json.dumps(config.to_hf(dtype="bfloat16")))
    again = load_config(written)
    assert again.core() == config.core()
    assert written["bos_token_id"] == 5
    assert written["torch_dtype"] == "bfloat16"
    assert "transformers_version" not in written


def test_folders_with_weights(tmp_path: pathlib.Path) -> None:
    assert not has_weights("tiny")
    assert not has_weights(SMALL)
    assert not has_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert has_weights(tmp_path)


# ---- folders ------------------------------------------------------------------------------------


def saved(folder: pathlib.Path) -> pathlib.Path:
    def run(world: fs.World) -> None:
        fs.models.Llama.from_config(SMALL, world=world).save_pretrained(folder)

    fs.local_world(1).run(run)
    return folder


def refused(folder: pathlib.Path, words: str, error: type[Exception] = fs.CheckpointError) -> None:
    """from_pretrained fails with this sentence on every rank, and took no memory."""

    def run(world: fs.World) -> None:
        before = world.memory()
        with pytest.raises(error, match=words):
            fs.models.Llama.from_pretrained(folder, world=world)
        assert world.memory() == before

    fs.local_world(2).run(run)


def rewrite(folder: pathlib.Path, change: Any) -> None:
    """Changes the tensors of a folder."""
    from safetensors.numpy import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_damaged_and_foreign_folders_are_refused(tmp_path: pathlib.Path) -> None:
    folder = saved(tmp_path / "model")
    file = folder / "model.safetensors"
    whole = file.read_bytes()

    file.write_bytes(whole[:-100])
    refused(folder, "model.safetensors")
    file.write_bytes(whole[:5])
    refused(folder, "model.safetensors")

    file.write_bytes(whole)
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, r"lacks model\.layers\.1\.mlp\.up_proj\.weight")

    file.write_bytes(whole)
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(folder, lambda t: t.update({name: t[name][:-1].copy()}))
    refused(folder, r"k_proj\.weight is \[31, 32\] there and \[32, 32\] here")

    file.write_bytes(whole)
    rewrite(folder, lambda t: t.update({name: t[name].astype(np.int32)}))
    refused(folder, "k_proj.*not a floating-point type")

    file.write_bytes(whole)
    rewrite(folder, lambda t: t.update({"model.extra": np.zeros(3, np.float32)}))
    refused(folder, r"besides model\.extra")

    file.unlink()
    refused(folder, "holds no weights")
    (folder / "config.json").unlink()
    refused(folder, r"no config\.json", fs.ConfigError)


def test_an_index_names_files_of_its_own_folder_only(tmp_path: pathlib.Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    for target in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index = {"weight_map": {"model.norm.weight": target}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        refused(folder, r"model\.norm\.weight.* is said to be in")

"""The native model against transformers on the CPU: logits, loss, every gradient,
training, and folders both ways.

Weights are drawn so that the comparison means something: attention is far from uniform, and logits
are spread (both are asserted), biases and norm weights are random, every multiplier differs from 1.
"""

import copy
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flatshard as fs
from flatshard import _core

torch = pytest.importorskip("torch", reason="torch is the reference of these tests")
transformers = pytest.importorskip("transformers", reason="its models are the reference")

torch.set_num_threads(1)  # these models are tiny
RELATIVE = 1e-4
BATCH, LENGTH = 2, 70  # two tiles of attention, the second a part

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
CASES: dict[str, dict[str, Any]] = {
    "llama, small odd heads, groups of 3": {
        "model_type": "llama",
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "llama, tied, biases, head size apart": {
        "model_type": "llama",
        "hidden_size": 52,
        "intermediate_size": 70,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 20,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama, llama3 rope": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama, linear rope, one key head": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 33,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "mistral, window 9, heads of 80": {
        "model_type": "mistral",
        "hidden_size": 40,
        "intermediate_size": 61,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 80,
        "sliding_window": 9,
    },
    "mistral, window over tiles": {
        "model_type": "mistral",
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 66,
    },
    "granite, every multiplier, tied, biases": {
        "model_type": "granite",
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "embedding_multiplier": 3.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.5,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "granite, untied": {
        "model_type": "granite",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "embedding_multiplier": 0.6,
        "residual_multiplier": 1.7,
        "attention_multiplier": 0.5,
        "logits_scaling": 0.3,
    },
}
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
}


@pytest.fixture(params=CASES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**COMMON, **CASES[request.param]}


def reference(config: dict[str, Any], rng: np.random.Generator) -> Any:
    """A transformers model with weights that make sharp attention and spread logits."""
    of_config, of_model = (getattr(transformers, name) for name in CLASSES[config["model_type"]])
    given = {key: value for key, value in config.items() if key != "model_type"}
    model = of_model(of_config(**given, attn_implementation="eager")).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            if "norm" in name:
                value = 1.0 + 0.3 * rng.normal(size=shape)
            elif name.endswith("bias"):
                value = 0.3 * rng.normal(size=shape)
            elif "embed" in name or "lm_head" in name:
                value = rng.normal(size=shape) * (0.8 if config["model_type"] == "granite" else 0.5)
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                value = rng.normal(size=shape) * gain / np.sqrt(shape[1])
            parameter.copy_(torch.from_numpy(value.astype(np.float32)))
    return model


def batch(rng: np.random.Generator) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    ids = rng.integers(0, COMMON["vocab_size"], (BATCH, LENGTH)).astype(np.int32)
    targets = rng.integers(0, COMMON["vocab_size"], (BATCH, LENGTH)).astype(np.int32)
    targets[rng.random(targets.shape) < 0.15] = -100
    return ids, targets


def long(x: NDArray[np.int32]) -> Any:
    return torch.from_numpy(x.astype(np.int64))


def loss_of(model: Any, ids: NDArray[np.int32], targets: NDArray[np.int32], reduction: str) -> Any:
    logits = model(input_ids=long(ids)).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), long(targets).flatten(), reduction=reduction
    )


def entropy_share(model: Any, ids: NDArray[np.int32], window: int) -> float:
    """Mean entropy of attention over its mean maximum."""
    attentions = model(input_ids=long(ids), output_attentions=True).attentions
    seen = np.minimum(np.arange(LENGTH) + 1, window or LENGTH)
    p = torch.stack(attentions).double()
    entropy = -(p * torch.log(p.clamp_min(1e-30))).sum(-1).mean().item()
    return float(entropy / np.log(seen).mean())


def native(config: dict[str, Any], model: Any, world: fs.World, **options: Any) -> fs.models.Llama:
    """The native model of a config, with a transformers model's weights."""
    made = fs.models.Llama.from_config(config, world=world, **options)
    weights = dict(model.named_parameters())
    for parameter in made.shards.parameters:
        made.shards.set_full(parameter.name, weights[parameter.name].detach().numpy())
    return made


def alone(run: Callable[[fs.World], Any]) -> Any:
    return fs.local_world(1).run(run)[0]


def relative(got: NDArray[Any], want: NDArray[Any]) -> float:
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.abs(want).max())


def test_logits_loss_and_every_gradient(config: dict[str, Any], rng: np.random.Generator) -> None:
    model = reference(config, rng)
    ids, targets = batch(rng)
    with torch.no_grad():
        assert entropy_share(model, ids, config.get("sliding_window", 0)) < 0.5
        want_logits = model(input_ids=long(ids)).logits.numpy()
    assert want_logits.std() >= 1.0
    want = loss_of(model, ids, targets, "sum")
    want.backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}

    def run(world: fs.World) -> None:
        made = native(config, model, world)
        assert made.params == sum(p.numel() for p in model.parameters())
        assert relative(made.logits(ids), want_logits) < RELATIVE
        loss = made.forward_backward(ids, targets)
        assert loss.tokens == (targets != -100).sum()
        assert abs(loss.local * loss.tokens / want.item() - 1.0) < RELATIVE
        assert made.loss(ids, targets) == loss
        fs.SGD(made, lr=0.0).grad_norm()
        for parameter in made.shards.parameters:
            got = made.shards.full(parameter.name, "grad")
            assert relative(got, grads[parameter.name]) < RELATIVE, parameter.name
        assert {p.name for p in made.shards.parameters} == set(grads)

    alone(run)


def test_bf16_is_nearer_to_exact_than_torch(
    config: dict[str, Any], rng: np.random.Generator
) -> None:
    """Torch's bf16 model rounds each operation, ours what it multiplies and nothing else."""
    exact = reference(config, rng)
    low = copy.deepcopy(exact).bfloat16()
    with torch.no_grad():
        for mine, rounded in zip(exact.parameters(), low.parameters(), strict=True):
            mine.copy_(rounded)
    ids, targets = batch(rng)
    logits, grads = [], []
    for model in (exact, low):
        loss = loss_of(model, ids, targets, "sum")
        loss.backward()
        logits.append(model(input_ids=long(ids)).logits.detach().float().numpy())
        grads.append({name: p.grad.float().numpy() for name, p in model.named_parameters()})

    def run(world: fs.World) -> None:
        made = native(config, exact, world, precision="bf16")
        assert relative(made.logits(ids), logits[0]) < relative(logits[1], logits[0])
        made.forward_backward(ids, targets)
        fs.SGD(made, lr=0.0).grad_norm()
        got = {p.name: made.shards.full(p.name, "grad") for p in made.shards.parameters}
        ours, torchs = (
            max(relative(some[name], grads[0][name]) for name in got) for some in (got, grads[1])
        )
        assert ours < torchs

    alone(run)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_twenty_steps_of_adamw(
    config: dict[str, Any], rng: np.random.Generator, ranks: int
) -> None:
    model = reference(config, rng)
    batches = [batch(rng) for _ in range(20)]
    started = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    want = []
    first = reference(config, rng)
    first.load_state_dict({**first.state_dict(), **started})
    for ids, targets in batches:
        loss = loss_of(model, ids, targets, "mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    assert want[-1] < want[0]

    def run(world: fs.World) -> list[float]:
        made = native(config, first, world)
        ours = fs.AdamW(made, lr=2e-3, weight_decay=0.1)
        got = []
        for ids, targets in batches:
            mine = slice(world.rank, None, world.size)
            got.append(made.forward_backward(ids[mine], targets[mine]).mean)
            assert ours.step().applied
        return got

    for got in fs.local_world(ranks).run(run):
        np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_saved_folder_opens_in_transformers(
    config: dict[str, Any], rng: np.random.Generator, tmp_path: pathlib.Path, precision: str
) -> None:
    model = reference(config, rng)
    ids, _ = batch(rng)

    def run(world: fs.World) -> NDArray[np.float32]:
        made = native(config, model, world, precision=precision)
        made.save_pretrained(tmp_path)
        return made.logits(ids)

    got = fs.local_world(2).run(run)[0]
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(opened).__name__ == CLASSES[config["model_type"]][1]
    with torch.no_grad():
        want = opened(input_ids=long(ids)).logits.numpy()
        low = opened.bfloat16()(input_ids=long(ids)).logits.float().numpy()
    rounds = precision == "bf16" and _core.cpu_isa() == "avx512_bf16"  # its products' operands
    assert relative(got, want) < (relative(low, want) if rounds else RELATIVE)
    stored = json.loads((tmp_path / "config.json").read_text())["torch_dtype"]
    assert stored == {"fp32": "float32", "bf16": "bfloat16"}[precision]


@pytest.mark.parametrize("shard_size", ["10GB", "20KB"])
def test_a_folder_of_transformers_opens_here(
    config: dict[str, Any], rng: np.random.Generator, tmp_path: pathlib.Path, shard_size: str
) -> None:
    model = reference(config, rng)
    ids, _ = batch(rng)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "10GB")
    with torch.no_grad():
        want = model(input_ids=long(ids)).logits.numpy()

    def run(world: fs.World) -> None:
        made = fs.models.Llama.from_pretrained(tmp_path, world=world)
        assert relative(made.logits(ids), want) < RELATIVE
        again = tmp_path / "again"
        made.save_pretrained(again)
        same = fs.models.Llama.from_pretrained(again, world=world)
        assert fs.weights_sha256(same) == fs.weights_sha256(made)
        assert same.config.core() == made.config.core()

    fs.local_world(2).run(run)


def test_generation_is_that_of_transformers(rng: np.random.Generator) -> None:
    config = {**COMMON, **CASES["mistral, window 9, heads of 80"]}
    model = reference(config, rng)
    prompt = rng.integers(0, 101, (2, 5)).astype(np.int32)
    with torch.no_grad():
        want = model.generate(
            long(prompt), attention_mask=torch.ones(2, 5, dtype=torch.long), max_new_tokens=30,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        ).numpy()  # fmt: skip
    got = alone(lambda world: native(config, model, world).generate(prompt, n=30))
    np.testing.assert_array_equal(got, want)

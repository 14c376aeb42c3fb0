"""Whatever is read, the outcome is Settings or a ConfigError that can be printed."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from config_cases import nested, paths
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatshard import ConfigError, config
from flatshard.config import Settings
from flatshard.config.accelerate_keys import ENVIRONMENT, TOP, VARIABLES
from flatshard.config.deepspeed_keys import RULES as DEEPSPEED
from flatshard.config.fsdp import RULES as FSDP
from flatshard.config.own import RULES as OWN

SEARCH = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

WORDS = st.sampled_from(
    [
        *("auto", "cpu", "nvme", "none", "true", "false", "bf16", "fp16", "fp32", "AdamW", "SGD"),
        *("FULL_SHARD", "NO_SHARD", "WarmupLR", "OneCycle", "FSDP", "DEEPSPEED", "MULTI_CPU", "no"),
        *("SIZE_BASED_WRAP", "NO_WRAP", "SHARDED_STATE_DICT", "linear", "Fail", "1", "2", ""),
    ]
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.integers(),
    st.just(10**400),
    st.floats(allow_nan=True, allow_infinity=True),
    WORDS,
    st.text(max_size=6),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def trees(rules: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of known keys with likely and unlikely values."""
    known = st.sampled_from(sorted(paths(rules)))

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for path, value in pairs:
            into, new = made, nested(path, value)
            while True:
                key, inner = next(iter(new.items()))
                if isinstance(into.get(key), dict) and isinstance(inner, dict) and inner:
                    into, new = into[key], inner
                    continue
                into[key] = inner
                break
        return made

    return st.lists(st.tuples(known, VALUES), max_size=6).map(build)


def outcome(read: Callable[[], Settings]) -> None:
    try:
        made = read()
    except ConfigError as error:
        assert 0 < len(str(error)) < 3000
        return
    made.table()
    for form in ("flatshard", "fsdp", "deepspeed", "accelerate"):
        try:
            config.write(made, form)
        except ConfigError as error:
            assert "left open" in str(error)


AUTO = st.dictionaries(
    st.sampled_from(["learning_rate", "max_grad_norm", "bf16", "warmup_steps", "hidden_size"]),
    st.one_of(LEAVES, st.just(config.LATER)),
    max_size=3,
)


@SEARCH
@given(trees(DEEPSPEED), st.sampled_from([None, 1, 4]), AUTO)
def test_deepspeed(values: dict[str, Any], world_size: int | None, auto: dict[str, Any]) -> None:
    outcome(lambda: config.deepspeed(values, world_size=world_size, auto=auto))


@SEARCH
@given(trees(FSDP), st.booleans())
def test_fsdp(values: dict[str, Any], prefixed: bool) -> None:
    if prefixed:
        values = {f"fsdp_{key}": value for key, value in values.items()}
    outcome(lambda: config.fsdp(values))


@SEARCH
@given(trees(TOP), trees(FSDP), WORDS)
def test_accelerate(top: dict[str, Any], fsdp: dict[str, Any], kind: str) -> None:
    outcome(lambda: config.accelerate({"distributed_type": kind, "fsdp_config": fsdp, **top}))


@SEARCH
@pytest.mark.filterwarnings("ignore:PARALLELISM_CONFIG_CP_SIZE")
@given(
    st.dictionaries(
        st.sampled_from([*VARIABLES, *ENVIRONMENT, "FSDP_X"]),
        WORDS | st.text(max_size=3),
        max_size=6,
    )
)
def test_environment(values: dict[str, str]) -> None:
    outcome(lambda: config.accelerate({"ACCELERATE_USE_FSDP": "true", **values}))


@SEARCH
@given(trees(OWN))
def test_own_form(values: dict[str, Any]) -> None:
    outcome(lambda: config.flatshard(values))


@SEARCH
@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,-&*! \nab0', max_size=40).map(str.encode))
def test_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder: pathlib.Path = tmp_path_factory.getbasetemp()
    for name in ("any.json", "any.yaml", "any"):
        (folder / name).write_bytes(content)
        outcome(lambda path=folder / name: config.read(path, world_size=2))  # type: ignore[misc]


@SEARCH
@given(VALUES)
def test_any_value_as_json(value: Any) -> None:
    try:
        text = json.dumps({"zero_optimization": value, "optimizer": value})
    except ValueError:
        return
    outcome(lambda: config.deepspeed(text, world_size=2))

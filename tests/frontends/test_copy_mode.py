"""gather="copy" for PyTorch modules: the bits of "view", and memory only for what is used."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from gang import Gang, case_name

pytest.importorskip("torch")
pytest.importorskip("transformers")

CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"model": "mlp", "stage": 3}),
    (2, {"model": "mlp", "stage": 0}),
    (2, {"model": "bert", "stage": 1}),
    (2, {"model": "llama", "stage": 2}),
    (2, {"model": "llama", "stage": 3, "micro_batches": 2}),
    (2, {"model": "llama", "stage": 3, "precision": "bf16"}),
    (2, {"model": "llama", "stage": 3, "recompute": "reentrant"}),
    (2, {"model": "llama", "stage": 3, "recompute": "not"}),
    (2, {"model": "llama", "stage": 3, "freeze": "mlp"}),
    (2, {"model": "bert", "stage": 3, "reshard": False}),
    (2, {"model": "t5", "stage": 3}),
    (3, {"model": "llama", "stage": 3, "freeze": "layers.0"}),
]  # fmt: skip


@pytest.mark.parametrize(("size", "options"), CASES, ids=case_name)
def test_bits_and_memory(gang: Callable[[int], Gang], size: int, options: dict[str, Any]) -> None:
    copies = gang(size).run("cases_copy_mode:bits", gather="copy", **options)
    views = gang(size).run("cases_copy_mode:bits", gather="view", **options)
    for copied, viewed in zip(copies, views, strict=True):
        assert copied["sha"] == viewed["sha"] == views[0]["sha"]
        assert copied["loss"] == viewed["loss"]
        if options["stage"] == 3:
            assert copied["between"] == copied["after"] == 0
            assert 0 < copied["peaks"][1] <= copied["total"]
        if options["stage"] == 3 and options["model"] == "llama":
            # The tied embedding, the last norm, and one of two equal layers.
            assert copied["peaks"][0] < 0.8 * copied["total"]
            assert copied["peaks"][1] < 0.8 * copied["total"]


def test_touching_outside_raises(gang: Callable[[int], Gang]) -> None:
    for said in gang(2).run("cases_copy_mode:touched_outside"):
        assert all(said), said
        assert all("layers.0.weight" in text for text in (said[0], said[4])), said
        assert all("sharded and not gathered" in text for text in said[:5]), said
        assert "unshard(module)" in said[5]


def test_gradients_of_gradients(gang: Callable[[int], Gang]) -> None:
    for gather, words in (("view", ""), ("copy", "create_graph=True")):
        for said in gang(2).run("cases_copy_mode:gradients_of_gradients", gather=gather):
            assert words in said and bool(said) == bool(words), said


def test_unusual_calls(gang: Callable[[int], Gang]) -> None:
    for differences in gang(2).run("cases_copy_mode:calls"):
        assert max(differences.values()) < 1e-6, differences


@pytest.mark.parametrize("gather", ["view", "copy"])
def test_outputs_that_are_in_no_loss(gang: Callable[[int], Gang], gather: str) -> None:
    gang(2).run("cases_copy_mode:left_out", gather=gather)


def test_whole_weights(gang: Callable[[int], Gang], tmp_path: pathlib.Path) -> None:
    gang(2).run("cases_copy_mode:whole", folder=str(tmp_path))


# Those that read no Parameter outside of forward.
RULES = ["aliases", "bad_loads", "stale_graph", "sparse", "nothing_published", "fp16", "calls",
         "unit_choices", "fsdp_policies", "freed", "recomputed"]  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_rule(gang: Callable[[int], Gang], case: str) -> None:
    gang(2).run("cases_copy_mode:rule", which=case)

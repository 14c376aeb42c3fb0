"""The sources of csrc/cuda: compiled by nvcc, and what the compiler made of their arithmetic.

What the kernels compute is for tests/c/test_cuda_*.c, which run them without a GPU.
"""

import importlib.util
import os
import pathlib
import re
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
HEADERS = sorted((ROOT / "csrc" / "cuda").glob("*.*h"))
# Kernels whose results must have the CPU's bits.
EXACT = ["convert", "model_elements", "model_heads", "model_rows", "normal", "sum", "update"]
# The headers that know of the stand-in, and how many of their branches do.
MAY_DIFFER = {"common.cuh": 6, "tensor_core.cuh": 1}


def tool() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_tool", ROOT / "tools" / "cuda.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = tool().find_nvcc()
    if found is None:
        assert not os.environ.get("CI"), "no nvcc: CI must have it"
        pytest.skip("no nvcc here: the CUDA sources run on the stand-in alone")
    return str(found)


@pytest.mark.parametrize("name", EXACT)
def test_arithmetic_is_exact(name: str, nvcc: str, tmp_path: pathlib.Path) -> None:
    # --fmad=false and its like are easily lost: look at what came out.
    ptx = tool().to_ptx(nvcc, ROOT / "csrc" / "cuda" / f"{name}.cu", tmp_path)
    assert ".entry" in ptx
    wrong = re.findall(r"^.*(?:\bfma\.|\.approx|\.ftz|\bmad\.f|\bmad\.rn\.f).*$", ptx, re.MULTILINE)
    assert wrong == []
    if name == "update":
        assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx


def test_attention_uses_tensor_cores(nvcc: str, tmp_path: pathlib.Path) -> None:
    for name in ("attention_forward", "attention_backward"):
        ptx = tool().to_ptx(nvcc, ROOT / "csrc" / "cuda" / f"{name}.cu", tmp_path)
        for word in ("f32.bf16.bf16.f32", "f32.f16.f16.f32"):
            assert f"mma.sync.aligned.m16n8k16.row.col.{word}" in ptx
        for word in ("ldmatrix.sync", "cp.async.cg", "ex2.approx.ftz.f32"):
            assert word in ptx, f"{name}: no {word}"
        assert "mul.rn.f32" not in ptx, f"{name}: products may not fuse"
        # Nothing else is approximate, and no float is added to memory that others add to.
        left = ptx.replace("ex2.approx.ftz.f32", "")
        assert not re.search(r"\.approx|\.ftz|\batom\.|\bred\.", left)


def test_contraction_would_be_seen(nvcc: str, tmp_path: pathlib.Path) -> None:
    module = tool()
    module.ARITHMETIC = ["--fmad=true"]
    ptx = module.to_ptx(nvcc, ROOT / "csrc" / "cuda" / "update.cu", tmp_path)
    assert re.search(r"\bfma\.rn\.f32", ptx)


@pytest.mark.quick
def test_no_source_knows_the_stand_in() -> None:
    # How a kernel starts and where shared memory lies may differ, and instructions without a word
    # in C++.
    assert SOURCES, "csrc/cuda holds no source: is the tree complete?"
    for path in [*SOURCES, *HEADERS]:
        text = path.read_text(encoding="utf-8")
        if path.name not in MAY_DIFFER:
            assert "sim" not in re.findall(r"[a-z]+", text.lower()), path
            assert "__CUDACC__" not in text, path
    for name, most in MAY_DIFFER.items():
        branches = (ROOT / "csrc" / "cuda" / name).read_text().count("__CUDACC__")
        assert branches <= most, f"{name}: another difference from the stand-in: is it needed?"

"""Element arithmetic is one text for C, C++ and CUDA, and fuses nothing."""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

USE = """
#include "device/rules.h"
float use(const fs_hyper *h, float g, float *w, float *m, float *v)
{
    fs_rule_sgd(h, 0.5f, g, w);
    fs_rule_momentum(h, 0.5f, g, w, m);
    fs_rule_adam(h, 0.5f, g, w, m, v);
    fs_rule_adamw(h, 0.5f, g, w, m, v);
    return fs_exp_f32(*w) + fs_log_f32(*w) + fs_f32_of_f16(fs_f16_of_f32(*w))
         + fs_f32_of_bf16(fs_bf16_of_f32(*w)) + fs_f32_odd_of_f64((double)*w);
}
"""

KERNEL = """
#include "device/rules.h"
__global__ void step(fs_hyper h, const float *g, float *w, float *m, float *v, uint16_t *out)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    fs_rule_adamw(&h, 0.5f, g[i], &w[i], &m[i], &v[i]);
    fs_rule_adam(&h, 0.5f, g[i], &w[i], &m[i], &v[i]);
    fs_rule_momentum(&h, 0.5f, g[i], &w[i], &m[i]);
    out[i] = fs_bf16_of_f32(w[i]) + fs_f16_of_f32(fs_exp_f32(w[i]) + fs_log_f32(m[i]));
}
"""


def run(*command: str | pathlib.Path) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("compiler", ["gcc -std=c11", "g++ -std=c++17", "clang++ -std=c++17"])
def test_compiles(compiler: str, tmp_path: pathlib.Path) -> None:
    words = compiler.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not on the path")
    source = tmp_path / ("use.c" if words[0] == "gcc" else "use.cpp")
    source.write_text(USE)
    run(*words, "-Wall", "-Wextra", "-Werror", "-Icsrc", "-c", source, "-o", tmp_path / "use.o")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the path")
def test_cuda_code_rounds_every_operation(tmp_path: pathlib.Path) -> None:
    """Neither fused, approximate nor flushed instructions: the bits of the CPU."""
    source, ptx = tmp_path / "step.cu", tmp_path / "step.ptx"
    source.write_text(KERNEL)
    flags = ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]
    run("nvcc", "-Icsrc", "-ptx", *flags, source, "-o", ptx)
    text = ptx.read_text()
    assert "sqrt.rn.f32" in text and "div.rn.f32" in text
    assert re.findall(r"\b(?:fma|mad)\.\w*\.?f32|\.approx|\.ftz", text) == []
    # The flag is what does it: without it the compiler fuses.
    run("nvcc", "-Icsrc", "-ptx", source, "-o", ptx)
    assert "fma.rn.f32" in ptx.read_text()

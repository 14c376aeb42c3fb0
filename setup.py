"""Builds flatshard._core. Plain setuptools; see pyproject.toml for everything that is not C."""

import glob
import os
import sys

import numpy
from setuptools import Extension, setup

# Ours come last: flags injected through CFLAGS must not change arithmetic.
CFLAGS = [
    "-std=c11",
    "-O3",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
]
if os.environ.get("FLATSHARD_WERROR") == "1":
    CFLAGS += ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wstrict-prototypes", "-Werror"]

core = Extension(
    "flatshard._core",
    sources=sorted(glob.glob("csrc/*/*.c")),
    depends=sorted(glob.glob("csrc/*/*.[hi]*")),
    include_dirs=[numpy.get_include()],
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"), ("NPY_TARGET_VERSION", "NPY_1_22_API_VERSION")],
    extra_compile_args=CFLAGS,
    extra_link_args=["-pthread"] + (["-ldl"] if sys.platform == "linux" else []),
)

setup(ext_modules=[core])

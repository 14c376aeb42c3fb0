"""Matrix products on the fixed grid of rows: right for every shape and transposition, same bits."""

import os
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import scipy_openblas32

from flatshard import _core

LIBRARY = pathlib.Path(scipy_openblas32.get_lib_dir()) / scipy_openblas32.get_library(fullname=True)

# (m, n, k): rows around the grid of 512, empty sides, vectors.
SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (511, 9, 33),
    (512, 16, 64),
    (513, 17, 65),
    (1025, 33, 129),
    (1, 600, 40),
    (600, 1, 40),
    (40, 50, 0),
    (0, 5, 3),
    (5, 0, 3),
]


@pytest.fixture(scope="module", autouse=True)
def loaded() -> str:
    description = _core.gemm_load(LIBRARY)
    assert _core.gemm_is_loaded()
    # The second call is the first one's answer.
    assert _core.gemm_load(str(LIBRARY)) == description
    return str(description)


def test_description_names_library_and_core(loaded: str) -> None:
    assert "OpenBLAS" in loaded and " core " in loaded


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
def test_against_float64(rng: np.random.Generator, trans_a: bool, trans_b: bool, add: bool) -> None:
    kernels = _core.Kernels(threads=2)
    for m, n, k in SHAPES:
        a = rng.standard_normal((k, m) if trans_a else (m, k)).astype(np.float32)
        b = rng.standard_normal((n, k) if trans_b else (k, n)).astype(np.float32)
        c = rng.standard_normal((m, n)).astype(np.float32)
        before = c.astype(np.float64)
        if not add:
            c[:] = np.nan  # what the memory held must not matter
        kernels.gemm(c, a, b, trans_a=trans_a, trans_b=trans_b, add=add)
        left = (a.T if trans_a else a).astype(np.float64)
        right = (b.T if trans_b else b).astype(np.float64)
        want = left @ right + (before if add else 0.0)
        bound = (np.abs(left) @ np.abs(right) + np.abs(before)) * 1e-6 + 1e-30
        assert (np.abs(c - want) <= bound).all(), (m, n, k)


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
def test_products_that_may_be_rounded(
    rng: np.random.Generator, trans_a: bool, trans_b: bool
) -> None:
    """To bf16 where the processor multiplies that, and not at all elsewhere."""

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)

    for isa in _core.cpu_isas():
        kernels = _core.Kernels(isa, threads=2)
        seen = rounded if isa == "avx512_bf16" else np.float64
        # Around the blocks of 12 rows, 32 and 64 columns, 256 terms, too.
        for m, n, k in [*SHAPES, (11, 31, 255), (12, 32, 256), (25, 65, 257), (13, 97, 513)]:
            a = rng.standard_normal((k, m) if trans_a else (m, k)).astype(np.float32)
            b = rng.standard_normal((n, k) if trans_b else (k, n)).astype(np.float32)
            left, right = seen(a.T if trans_a else a), seen(b.T if trans_b else b)
            for add in (False, True):
                c = rng.standard_normal((m, n)).astype(np.float32)
                before = c.astype(np.float64) if add else np.zeros((m, n))
                c = c if add else np.full_like(c, np.nan)
                kernels.gemm(
                    c, a, b, trans_a=trans_a, trans_b=trans_b, add=add, rounding="bfloat16"
                )
                # Products of bf16 are exact in fp32; k sums of theirs round.
                bound = (np.abs(left) @ np.abs(right) + np.abs(before)) * (k + 1) * 2.0**-24
                assert (np.abs(c - (left @ right + before)) <= bound + 1e-30).all(), (isa, m, n, k)


@pytest.mark.skipif("avx512_bf16" not in _core.cpu_isas(), reason="no AVX512_BF16 here")
def test_a_row_of_rounded_products_has_its_bits_alone(rng: np.random.Generator) -> None:
    """Not those of its place, its neighbours, the threads, or the product's other size."""
    a = rng.standard_normal((600, 300)).astype(np.float32)
    b = rng.standard_normal((300, 90)).astype(np.float32)
    whole = np.empty((600, 90), np.float32)
    _core.Kernels("avx512_bf16", threads=3).gemm(whole, a, b, rounding="bfloat16")
    kernels = _core.Kernels("avx512_bf16")
    for row, column in ((0, 0), (5, 33), (511, 64), (599, 89)):
        one = np.empty((1, 1), np.float32)
        kernels.gemm(one, a[row : row + 1], b[:, column : column + 1].copy(), rounding="bfloat16")
        assert one[0, 0].tobytes() == whole[row, column].tobytes()
    turned = np.empty((600, 90), np.float32)
    kernels.gemm(turned, a.T.copy(), b.T.copy(), trans_a=True, trans_b=True, rounding="bfloat16")
    assert turned.tobytes() == whole.tobytes()


@pytest.mark.skipif("avx512_bf16" not in _core.cpu_isas(), reason="no AVX512_BF16 here")
def test_what_rounds_to_what(rng: np.random.Generator) -> None:
    """Each half-width pattern through a product with one: exact; ties to even, infinities, NaN."""
    kernels = _core.Kernels("avx512_bf16")
    patterns = np.arange(65536, dtype=np.uint32) << 16
    a = patterns.view(np.float32).reshape(-1, 1)
    c = np.empty_like(a)
    kernels.gemm(c, a, np.ones((1, 1), np.float32), rounding="bfloat16")
    normal = np.isnan(a) | np.isinf(a) | (np.abs(a) >= np.finfo(np.float32).tiny)
    want = np.where(normal, a, 0.0).astype(
        np.float32
    )  # the processor's products have no subnormals
    assert np.array_equal(c, want, equal_nan=True)
    odd = (patterns[(patterns & 0x7F800000) != 0x7F800000] | 0x8000).view(np.float32).reshape(-1, 1)
    odd = odd[np.abs(odd) >= np.finfo(np.float32).tiny].reshape(-1, 1)
    c = np.empty_like(odd)
    kernels.gemm(c, odd, np.ones((1, 1), np.float32), rounding="bfloat16")
    assert np.array_equal(c, odd.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_a_bad_row_stays_in_its_row(rng: np.random.Generator) -> None:
    a = rng.standard_normal((700, 20)).astype(np.float32)
    b = rng.standard_normal((20, 9)).astype(np.float32)
    a[600, 3] = np.nan
    c = np.empty((700, 9), np.float32)
    _core.Kernels().gemm(c, a, b)
    assert np.isnan(c[600]).all() and np.isfinite(np.delete(c, 600, axis=0)).all()


SAME_BITS = """
import sys, time
import numpy as np
from flatshard import _core
print(_core.gemm_load(sys.argv[1]))
rng = np.random.default_rng(1)
many = [_core.Kernels(threads=t) for t in (2, 3, 4)]
deadline = time.monotonic() + 60
first = True
while first or (any(k.threads_used < t for k, t in zip(many, (2, 3, 4)))
                and time.monotonic() < deadline):
    first = False
    for m, n, k in [(2049, 64, 96), (1500, 33, 129), (2500, 7, 513)]:
        for trans_a in (False, True):
            for trans_b in (False, True):
                a = rng.standard_normal((k, m) if trans_a else (m, k)).astype(np.float32)
                b = rng.standard_normal((n, k) if trans_b else (k, n)).astype(np.float32)
                want = np.empty((m, n), np.float32)
                _core.Kernels().gemm(want, a, b, trans_a=trans_a, trans_b=trans_b)
                for kernels in many:
                    c = np.empty((m, n), np.float32)
                    kernels.gemm(c, a, b, trans_a=trans_a, trans_b=trans_b)
                    assert np.array_equal(c.view(np.uint32), want.view(np.uint32)), kernels.name
print([k.threads_used for k in many])
"""


@pytest.mark.parametrize("core", [None, "Haswell"])
def test_threads_do_not_show(core: str | None) -> None:
    """Also with the library's Haswell kernels, whose rows depend on how many a call has."""
    env = dict(os.environ)
    if core is not None:
        if "avx2" not in _core.cpu_isas():
            pytest.skip("this processor cannot run the library's Haswell kernels")
        env["OPENBLAS_CORETYPE"] = core
    done = subprocess.run(
        [sys.executable, "-c", SAME_BITS, str(LIBRARY)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert core is None or f"core {core}" in lines[0]
    assert lines[1] == "[2, 3, 4]"


def test_the_library_has_one_thread() -> None:
    """A product is worked on by the thread that asks for it alone."""
    code = (
        "import sys, time\nimport numpy as np\nfrom flatshard import _core\n"
        "_core.gemm_load(sys.argv[1])\n"
        "a = np.ones((1500, 1500), np.float32); c = np.empty_like(a)\n"
        "k = _core.Kernels()\n"
        "k.gemm(c, a, a)\n"
        "time.sleep(1.0)\n"  # threads of NumPy's own library spin for a while after import
        "ours, all = time.thread_time(), time.process_time()\n"
        "for _ in range(4): k.gemm(c, a, a)\n"
        "print((time.process_time() - all) / (time.thread_time() - ours))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(LIBRARY)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1.2  # processor time of all threads to that of this one


def test_refusals() -> None:
    kernels = _core.Kernels()
    a, b, c = (np.zeros(s, np.float32) for s in ((3, 4), (4, 5), (3, 5)))
    with pytest.raises(ValueError, match=r"b is not a \(4, 5\) array"):
        kernels.gemm(c, a, np.zeros((5, 5), np.float32))
    with pytest.raises(ValueError, match=r"a is not a \(3, 3\) array"):
        kernels.gemm(c, a, b, trans_a=True)
    with pytest.raises(TypeError):
        kernels.gemm(c, a.astype(np.float64), b)
    with pytest.raises(ValueError, match="two-dimensional"):
        kernels.gemm(c, np.zeros(4, np.float32), b)


def test_a_library_that_is_none(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys\nfrom flatshard import _core\n"
        "try:\n    _core.gemm_load(sys.argv[1])\n"
        "except NotImplementedError as error:\n    print(error, _core.gemm_is_loaded())\n"
    )
    text = tmp_path / "not a library.so"
    text.write_text("text")
    for path, words in [
        (text, "could not load"),
        (tmp_path / "absent.so", "could not load"),
        (_core.__file__, "not a CBLAS library"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert words in done.stdout and str(path) in done.stdout and "False" in done.stdout


def test_products_before_loading_are_refused() -> None:
    code = (
        "import numpy as np\nfrom flatshard import _core\nassert not _core.gemm_is_loaded()\n"
        "x = np.zeros((2, 2), np.float32)\n"
        "try:\n    _core.Kernels().gemm(x, x, x)\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "gemm_load(path) comes first" in done.stdout, done.stderr

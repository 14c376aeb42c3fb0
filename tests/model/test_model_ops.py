"""Each operation of the model's table against float64 NumPy, on every instruction set of this CPU.

Bounds are in units of what rounding to fp32 may cost: `ROUNDING` is 2^-24, and each test says how
many of them it allows, of the largest element of the tensor (sums of products round at the size of
their terms, not of their result).
"""

from typing import Any

import ml_dtypes
import model_reference as ref
import numpy as np
import pytest
from numpy.typing import NDArray

from flatshard import _core

pytestmark = pytest.mark.quick

ROUNDING = 2.0**-24


def isas_here() -> list[str]:
    names = []
    for name in ("baseline", "avx2", "avx512", "neon"):  # avx512_bf16 has those of avx512
        try:
            _core.Kernels(name)
        except NotImplementedError:
            continue
        names.append(name)
    return names


def run(name: str, kernels: Any, **fields: Any) -> None:
    """Runs an operation on Kernels, or on one thread of the named set. None: left out."""
    if isinstance(kernels, str):
        kernels = _core.Kernels(kernels)
    given = {key: value for key, value in fields.items() if value is not None}
    _core.model_op(kernels, name, **given)


ISAS = isas_here()


def f32(*shape: int, rng: np.random.Generator, scale: float = 1.0) -> NDArray[np.float32]:
    return (rng.normal(size=shape) * scale).astype(np.float32)


def empty(*shape: int) -> NDArray[np.float32]:
    """Memory that must be written before it is read: full of NaN."""
    return np.full(shape, np.nan, np.float32)


def wide(x: NDArray[Any]) -> NDArray[np.float64]:
    return x.astype(np.float64)


def close(got: NDArray[Any], want: NDArray[np.float64], *, roundings: float) -> None:
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    worst = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
    assert worst <= roundings * ROUNDING, f"off by {worst / ROUNDING:.1f} roundings"


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_some_vector_set_was_tried() -> None:
    import platform

    assert "baseline" in ISAS
    if platform.machine() in ("x86_64", "AMD64"):
        assert "avx2" in ISAS, "this processor is older than the tests expect"


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="no such field"):
        run("scale", "baseline", rows=3)
    with pytest.raises(ValueError, match="no operation"):
        run("nothing", "baseline")


# ---- embedding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(("rows", "width", "vocab"), [(1, 1, 1), (37, 19, 11), (70, 64, 300)])
def test_embed(
    isa: str, rng: np.random.Generator, rows: int, width: int, vocab: int, dtype: Any
) -> None:
    table = f32(vocab, width, rng=rng).astype(dtype)
    tokens = rng.integers(0, vocab, rows).astype(np.int32)
    out = empty(rows, width)
    run(
        "embed",
        isa,
        rows=rows,
        width=width,
        vocab=vocab,
        tokens=tokens,
        scale=1.5,
        table=table,
        table_dtype=np.dtype(dtype),
        out=out,
    )
    np.testing.assert_array_equal(out, np.float32(1.5) * table[tokens].astype(np.float32))


def sorted_rows(tokens: NDArray[np.int32], vocab: int) -> dict[str, NDArray[np.int32]]:
    """Rows by their token, and where each token's begin."""
    begins = np.concatenate([[0], np.bincount(tokens, minlength=vocab).cumsum()])
    order = np.argsort(tokens, kind="stable")
    return {"first": begins.astype(np.int32), "sorted": order.astype(np.int32)}


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "width", "vocab"), [(1, 1, 1), (37, 19, 11), (300, 24, 1000)])
def test_embed_grad(
    isa: str, rng: np.random.Generator, rows: int, width: int, vocab: int, add: bool
) -> None:
    tokens = rng.integers(0, max(vocab // 2, 1), rows).astype(np.int32)
    dy = f32(rows, width, rng=rng)
    dtable = f32(vocab, width, rng=rng) if add else empty(vocab, width)
    want = ref.embed_grad(vocab, tokens, 0.7, wide(dy)) + (wide(dtable) if add else 0.0)
    run(
        "embed_grad",
        isa,
        rows=rows,
        width=width,
        vocab=vocab,
        scale=0.7,
        dy=dy,
        dtable=dtable,
        add=add,
        **sorted_rows(tokens, vocab),
    )
    close(dtable, want, roundings=40)


# ---- norm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (5, 17), (40, 96), (3, 1000)])
def test_norm(
    isa: str, rng: np.random.Generator, rows: int, width: int, branch: bool, bias: bool
) -> None:
    x, weight = f32(rows, width, rng=rng), f32(width, rng=rng)
    h, b = f32(rows, width, rng=rng), f32(width, rng=rng)
    total, out, rstd = empty(rows, width), empty(rows, width), empty(rows)
    run(
        "norm",
        isa,
        rows=rows,
        width=width,
        x=x,
        branch=h if branch else None,
        bias=b if bias and branch else None,
        alpha=0.22,
        sum=total if branch else None,
        weight=weight,
        eps=1e-2,
        out=out,
        rstd=rstd,
    )
    want = wide(x)
    if branch:
        want = want + 0.22 * (wide(h) + (wide(b) if bias else 0.0))
        close(total, want, roundings=4)
    close(out, ref.norm(want, wide(weight), 1e-2), roundings=20)
    close(rstd, 1.0 / np.sqrt(np.mean(want**2, axis=-1) + 1e-2), roundings=20)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (5, 17), (130, 96), (2000, 33)])
def test_norm_grad(
    isa: str, rng: np.random.Generator, rows: int, width: int, add: bool, frozen: bool
) -> None:
    x, weight, dy = f32(rows, width, rng=rng), f32(width, rng=rng), f32(rows, width, rng=rng)
    rstd = (1.0 / np.sqrt(np.mean(wide(x) ** 2, axis=-1) + 1e-2)).astype(np.float32)
    dx = f32(rows, width, rng=rng) if add else empty(rows, width)
    dweight = f32(width, rng=rng) if add else empty(width)
    want_dx, want_dweight = ref.norm_grad(wide(x), wide(weight), 1e-2, wide(dy))
    want_dx = want_dx + (wide(dx) if add else 0.0)
    want_dweight = want_dweight + (wide(dweight) if add else 0.0)
    inout = dy.copy()
    run(
        "norm_grad",
        isa,
        rows=rows,
        width=width,
        x=x,
        rstd=rstd,
        weight=weight,
        dy=inout,
        dx=dx,
        dx_add=add,
        dweight=None if frozen else dweight,
        dweight_add=add,
        partial=empty(64, width),
    )
    close(dx, want_dx, roundings=40)
    close(inout, ref.norm(wide(x), wide(weight), 1e-2), roundings=10)
    if not frozen:
        close(dweight, want_dweight, roundings=60)


# ---- heads --------------------------------------------------------------------------------------

HEADS = [(1, 1, 1, 1, 2), (2, 19, 4, 2, 6), (1, 33, 6, 2, 20), (2, 16, 3, 3, 64), (1, 5, 2, 1, 80)]


def padded(dim: int) -> int:
    return -(-dim // 16) * 16


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("batch", "length", "q_heads", "kv_heads", "dim"), HEADS)
def test_heads(
    isa: str,
    rng: np.random.Generator,
    batch: int,
    length: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    bias: bool,
) -> None:
    angles = rng.uniform(-4, 4, size=(length, dim // 2))
    all_heads = q_heads + 2 * kv_heads
    rows = f32(batch * length, all_heads * dim, rng=rng)
    biases = f32(all_heads * dim, rng=rng) if bias else np.zeros(all_heads * dim, np.float32)
    cut = [q_heads * dim, (q_heads + kv_heads) * dim]
    q_bias, k_bias, v_bias = (np.ascontiguousarray(b) for b in np.split(biases, cut))
    q, k, v = (empty(batch, h, length, padded(dim)) for h in (q_heads, kv_heads, kv_heads))
    shape = {
        "batch": batch,
        "length": length,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "padded_dim": padded(dim),
        "kv_rows": length,
        "q_scale": 0.3,
        "cosines": np.cos(angles).astype(np.float32),
        "sines": np.sin(angles).astype(np.float32),
    }
    run(
        "heads",
        isa,
        **shape,
        rows=rows,
        q=q,
        k=k,
        v=v,
        q_bias=q_bias if bias else None,
        k_bias=k_bias if bias else None,
        v_bias=v_bias if bias else None,
    )
    tokens = wide(rows + biases).reshape(batch, length, all_heads, dim).swapaxes(1, 2)
    want_q = 0.3 * ref.rotate(tokens[:, :q_heads], angles)
    want_k = ref.rotate(tokens[:, q_heads : q_heads + kv_heads], angles)
    close(q[..., :dim], want_q, roundings=8)
    close(k[..., :dim], want_k, roundings=8)
    close(v[..., :dim], tokens[:, q_heads + kv_heads :], roundings=2)
    for packed in (q, k, v):
        assert not packed[..., dim:].any()

    back = empty(batch * length, all_heads * dim)
    run("heads_grad", isa, **shape, rows=back, q=q, k=k, v=v)
    turned_q = 0.3 * ref.rotate(wide(q[..., :dim]), -angles)
    turned_k = ref.rotate(wide(k[..., :dim]), -angles)
    want = np.concatenate([turned_q, turned_k, wide(v[..., :dim])], axis=1)
    close(back, want.swapaxes(1, 2).reshape(batch * length, -1), roundings=8)


# ---- attention ----------------------------------------------------------------------------------

# batch, length, query heads, key heads, head size, window. Lengths around the tile of 64, windows
# inside one tile, across two, and one less and one more than a tile.
ATTENTION = [
    (1, 1, 1, 1, 2, 0),
    (2, 7, 2, 1, 6, 0),
    (1, 63, 3, 1, 20, 0),
    (2, 64, 4, 2, 64, 0),
    (1, 65, 2, 2, 80, 0),
    (1, 150, 4, 2, 128, 0),
    (1, 200, 2, 1, 256, 0),
    (1, 70, 2, 1, 16, 1),
    (1, 150, 4, 2, 20, 5),
    (2, 200, 2, 1, 32, 63),
    (1, 200, 2, 2, 64, 65),
    (1, 210, 2, 1, 64, 100),
    (1, 70, 2, 1, 16, 1000),
]


def attend(
    kernels: Any,
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    dy: NDArray[np.float32],
    window: int,
) -> dict[str, NDArray[np.float32]]:
    """Forward and backward; scratch full of NaN, so that what is read was written."""
    batch, q_heads, length, dim = q.shape
    kv_heads, dp, lp = k.shape[1], padded(dim), -(-length // 64) * 64

    def pack(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.pad(x, [(0, 0), (0, 0), (0, 0), (0, dp - dim)])

    rows = (batch * length, q_heads * dim)
    out, lse = empty(*rows), empty(batch, q_heads, length)
    dq, dk, dv = (empty(batch, h, length, dp) for h in (q_heads, kv_heads, kv_heads))
    fields = {
        "batch": batch,
        "length": length,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "padded_dim": dp,
        "window": window,
        "kv_rows": length,
        "q": pack(q),
        "k": pack(k),
        "v": pack(v),
        "out": out,
        "lse": lse,
        "k_turned": empty(batch, kv_heads, dp, lp),
    }
    run("attention", kernels, **fields)
    fields["k_turned"].fill(np.nan)
    run(
        "attention_grad",
        kernels,
        **fields,
        v_turned=empty(batch, kv_heads, dp, lp),
        dout=np.ascontiguousarray(dy.swapaxes(1, 2)).reshape(rows),
        dout_packed=empty(batch, q_heads, length, dp),
        delta=empty(batch, q_heads, length),
        dq=dq,
        dk=dk,
        dv=dv,
    )
    for packed in (dq, dk, dv):
        assert not packed[..., dim:].any()
    heads = out.reshape(batch, length, q_heads, dim).swapaxes(1, 2)
    return {
        "out": heads,
        "lse": lse,
        "dq": dq[..., :dim],
        "dk": dk[..., :dim],
        "dv": dv[..., :dim],
    }


@pytest.mark.parametrize(("batch", "length", "q_heads", "kv_heads", "dim", "window"), ATTENTION)
def test_attention(
    isa: str,
    rng: np.random.Generator,
    batch: int,
    length: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    window: int,
) -> None:
    # Scores with a standard deviation of about 3: far from uniform attention.
    q = f32(batch, q_heads, length, dim, rng=rng, scale=3.0 / np.sqrt(dim))
    k, v = (f32(batch, kv_heads, length, dim, rng=rng) for _ in range(2))
    dy = f32(batch, q_heads, length, dim, rng=rng)
    got = attend(isa, q, k, v, dy, window)
    inputs = (wide(q), wide(k), wide(v))
    close(got["out"], ref.attention(*inputs, window), roundings=60)
    dq, dk, dv = ref.attention_grad(*inputs, window, wide(dy))
    # Where every query sees one key, probabilities are 1 and dq is rounding alone.
    if length > 1 and window != 1:
        close(got["dq"], dq, roundings=150)
        close(got["dk"], dk, roundings=150)
    close(got["dv"], dv, roundings=150)


@pytest.mark.parametrize(
    ("past", "length", "rows", "window"),
    [
        (0, 5, 9, 0),
        (1, 1, 2, 0),
        (63, 1, 200, 0),
        (64, 3, 70, 0),
        (130, 70, 200, 0),
        (150, 2, 160, 9),
        (100, 80, 180, 70),
    ],
)
def test_attention_goes_on_from_cached_keys(
    isa: str, rng: np.random.Generator, past: int, length: int, rows: int, window: int
) -> None:
    batch, q_heads, kv_heads, dim, keys = 2, 4, 2, 16, past + length
    q = f32(batch, q_heads, keys, dim, rng=rng, scale=0.7)
    k, v = (f32(batch, kv_heads, keys, dim, rng=rng) for _ in range(2))
    cache = [np.full((batch, kv_heads, rows, dim), np.nan, np.float32) for _ in range(2)]
    for held, x in zip(cache, (k, v), strict=True):
        held[:, :, :keys] = x
    out = empty(batch * length, q_heads * dim)
    run(
        "attention",
        isa,
        batch=batch,
        length=length,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        padded_dim=dim,
        window=window,
        past=past,
        kv_rows=rows,
        q=np.ascontiguousarray(q[:, :, past:]),
        k=cache[0],
        v=cache[1],
        out=out,
        lse=empty(batch, q_heads, length),
        k_turned=empty(batch, kv_heads, dim, -(-keys // 64) * 64),
    )
    want = ref.attention(wide(q), wide(k), wide(v), window)[:, :, past:]
    close(out.reshape(batch, length, q_heads, dim).swapaxes(1, 2), want, roundings=60)


def test_attention_survives_scores_of_any_size(isa: str, rng: np.random.Generator) -> None:
    """One key wins by far, and exponentials of the others vanish: no overflow, no NaN."""
    q, k, v = (f32(1, 2, 130, 16, rng=rng, scale=s) for s in (60.0, 60.0, 1.0))
    got = attend(isa, q, k, v, np.ones_like(q), 0)
    want = ref.attention(wide(q), wide(k), wide(v), 0)
    np.testing.assert_allclose(got["out"], want, atol=3e-2)
    assert all(np.isfinite(x).all() for x in got.values())


# ---- SwiGLU, cross-entropy, sums ----------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 33), (20, 1100)])
def test_swiglu(isa: str, rng: np.random.Generator, rows: int, width: int, bias: bool) -> None:
    gate, up, dy = (f32(rows, width, rng=rng, scale=4.0) for _ in range(3))
    gate[0, 0] = -100.0  # exp(100) is beyond fp32
    biases = [f32(width, rng=rng) if bias else None for _ in range(2)]
    g, u = (wide(x if b is None else x + b) for x, b in zip((gate, up), biases, strict=True))
    shape = {"rows": rows, "width": width, "gate_bias": biases[0], "up_bias": biases[1]}
    act = empty(rows, width)
    run("swiglu", isa, **shape, gate=gate, up=up, act=act)
    close(act, ref.swiglu(g, u), roundings=10)
    act = dy.copy()
    run("swiglu_grad", isa, **shape, gate=gate, up=up, act=act)
    dgate, dup = ref.swiglu_grad(g, u, wide(dy))
    close(gate, dgate, roundings=20)
    close(up, dup, roundings=20)
    close(act, ref.swiglu(g, u), roundings=10)


@pytest.mark.parametrize("factor", [None, 1.0, 0.25])
@pytest.mark.parametrize(("rows", "vocab", "scale"), [(1, 1, 1.0), (9, 65, 0.125), (5, 5000, 1.0)])
def test_xent(
    isa: str, rng: np.random.Generator, rows: int, vocab: int, scale: float, factor: float | None
) -> None:
    logits = f32(rows, vocab, rng=rng, scale=4.0 / scale)
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    if rows > 2:
        targets[1] = ref.IGNORED
    want, want_grad = (f(wide(logits), targets, scale) for f in (ref.xent, ref.xent_grad))
    loss = np.full(rows, np.nan)
    run(
        "xent",
        isa,
        rows=rows,
        vocab=vocab,
        logits=logits,
        targets=targets,
        scale=scale,
        dlogits=None if factor is None else logits,
        factor=factor,
        loss=loss,
    )
    np.testing.assert_allclose(loss, want, rtol=1e-6, atol=1e-6)
    if factor is not None:
        got = logits / np.float32(factor)
        np.testing.assert_allclose(got, want_grad, rtol=2e-6, atol=1e-6 * scale)


def test_xent_of_large_logits(isa: str) -> None:
    logits = np.array([[3e4, -3e4, 0.0], [-1e30, 0.0, 1e30]], np.float32)
    loss = np.full(2, np.nan)
    run(
        "xent",
        isa,
        rows=2,
        vocab=3,
        logits=logits,
        targets=np.array([0, 2], np.int32),
        scale=1.0,
        dlogits=logits,
        factor=1.0,
        loss=loss,
    )
    assert not loss.any()
    assert not logits.any()


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "width", "stride"), [(1, 1, 1), (50, 70, 90), (300, 64, 64)])
def test_column_sum(
    isa: str, rng: np.random.Generator, rows: int, width: int, stride: int, add: bool
) -> None:
    x = f32(rows, stride, rng=rng)
    out = f32(width, rng=rng) if add else empty(width)
    want = wide(x[:, :width]).sum(axis=0) + (wide(out) if add else 0.0)
    run("column_sum", isa, rows=rows, width=width, stride=stride, x=x, out=out, add=add)
    close(out, want, roundings=4)


@pytest.mark.parametrize("add", [False, True])
def test_scale(isa: str, rng: np.random.Generator, add: bool) -> None:
    x, out = f32(70001, rng=rng), f32(70001, rng=rng)
    want = np.float32(0.22) * x + (out if add else np.float32(0))
    run("scale", isa, out=out, x=x, alpha=0.22, add=add, n=x.size)
    np.testing.assert_array_equal(out, want)


# ---- initial weights ----------------------------------------------------------------------------


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox 4x32-10 in Python's integers (Salmon et al. 2011)."""
    x, k = list(counter), list(key)
    mask = 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ k[0], b & mask, (a >> 32) ^ x[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return tuple(x)


def test_philox_of_the_test_is_philox() -> None:
    """The known answers that the generator was published with."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_normal_is_philox_and_box_muller(isa: str) -> None:
    seed, stream, first, n = 0x123456789ABCDEF, 7, (5 << 32) + 2, 41
    out = empty(n)
    run("normal", isa, seed=seed, stream=stream, first=first, n=n, std=0.5, out=out)
    want = []
    for i in range(first, first + n):
        block = i // 4
        words = philox(
            (block & 0xFFFFFFFF, block >> 32, stream, 0), (seed & 0xFFFFFFFF, seed >> 32)
        )
        w0, w1 = words[:2] if i % 4 < 2 else words[2:]
        radius = np.sqrt(-2.0 * np.log(((w0 >> 8) + 0.5) / 2**24))
        turn = (w1 >> 30) * np.pi / 2 + (((w1 >> 6) & 0xFFFFFF) - 8388607.5) * np.pi / 2 / 2**24
        want.append(0.5 * radius * (np.sin(turn) if i % 2 else np.cos(turn)))
    close(out, np.array(want), roundings=20)


def test_normal_does_not_depend_on_the_cut(isa: str) -> None:
    whole = empty(200_003)
    run(
        "normal",
        _core.Kernels(isa, threads=2),
        seed=3,
        stream=1,
        first=0,
        n=whole.size,
        std=1.0,
        out=whole,
    )
    for begin, end in [(0, 1), (1, 7), (1021, 3000), (65_000, 140_001)]:
        part = empty(end - begin)
        run("normal", isa, seed=3, stream=1, first=begin, n=part.size, std=1.0, out=part)
        np.testing.assert_array_equal(part, whole[begin:end])
    assert abs(whole.mean()) < 0.01
    assert abs(whole.std() - 1.0) < 0.01
    assert abs((whole**4).mean() - 3.0) < 0.15
    assert 3.9 < np.abs(whole).max() < 6.0


# ---- bits ---------------------------------------------------------------------------------------


def all_results(kernels: Any) -> dict[str, NDArray[Any]]:
    """Results of every operation on data large enough for several tasks."""
    rng = np.random.default_rng(11)
    rows, width, vocab = 600, 200, 2000
    out: dict[str, NDArray[Any]] = {}

    def go(name: str, **fields: Any) -> None:
        run(name, kernels, **fields)
        for key in (
            "out",
            "dtable",
            "dx",
            "dy",
            "dweight",
            "gate",
            "up",
            "act",
            "logits",
            "loss",
            "sum",
            "rstd",
        ):
            if key in fields:
                out[f"{name}.{key}"] = fields[key]

    tokens = rng.integers(0, vocab, rows).astype(np.int32)
    x, dy, weight = f32(rows, width, rng=rng), f32(rows, width, rng=rng), f32(width, rng=rng)
    go(
        "embed",
        rows=rows,
        width=width,
        vocab=vocab,
        tokens=tokens,
        scale=1.5,
        table=f32(vocab, width, rng=rng),
        table_dtype=np.dtype(np.float32),
        out=empty(rows, width),
    )
    go(
        "embed_grad",
        rows=rows,
        width=width,
        vocab=vocab,
        scale=1.5,
        dy=dy,
        dtable=empty(vocab, width),
        **sorted_rows(tokens, vocab),
    )
    go(
        "norm",
        rows=rows,
        width=width,
        x=x,
        branch=dy,
        alpha=0.3,
        sum=empty(rows, width),
        weight=weight,
        eps=1e-5,
        out=empty(rows, width),
        rstd=empty(rows),
    )
    go(
        "norm_grad",
        rows=rows,
        width=width,
        x=x,
        rstd=out["norm.rstd"],
        weight=weight,
        dy=dy.copy(),
        dx=empty(rows, width),
        dweight=empty(width),
        partial=empty(64, width),
    )
    big = [f32(rows, 500, rng=rng) for _ in range(3)]
    go("swiglu", rows=rows, width=500, gate=big[0].copy(), up=big[1].copy(), act=empty(rows, 500))
    go("swiglu_grad", rows=rows, width=500, gate=big[0], up=big[1], act=big[2])
    logits = x.copy()
    go(
        "xent",
        rows=rows,
        vocab=width,
        logits=logits,
        dlogits=logits,
        factor=1.0,
        loss=np.full(rows, np.nan),
        targets=(tokens % width).astype(np.int32),
        scale=0.5,
    )
    go("column_sum", rows=rows, width=width, stride=width, x=x, out=empty(width))
    go("scale", x=f32(100_000, rng=rng), alpha=0.5, n=100_000, out=empty(100_000))
    go("normal", seed=1, stream=2, first=3, n=200_000, std=0.1, out=empty(200_000))
    q, d = f32(2, 4, 150, 20, rng=rng), f32(2, 4, 150, 20, rng=rng)
    k, v = f32(2, 2, 150, 20, rng=rng), f32(2, 2, 150, 20, rng=rng)
    results = attend(kernels, q, k, v, d, 70)
    out.update({f"attention.{key}": value for key, value in results.items()})
    return out


def test_bits_do_not_depend_on_threads(isa: str) -> None:
    want = all_results(_core.Kernels(isa))
    for threads in (2, 3, 4):
        kernels = _core.Kernels(isa, threads=threads)
        for _ in range(200):  # until every thread has had a share
            got = all_results(kernels)
            for name in want:
                np.testing.assert_array_equal(got[name], want[name], err_msg=f"{name}, {threads}")
            if kernels.threads_used == threads:
                break
        assert kernels.threads_used == threads


@pytest.mark.parametrize("other", [name for name in ISAS if name != "baseline"])
def test_instruction_sets_agree(other: str) -> None:
    """All but attention, which alone fuses multiply and add, give the same bits."""
    want = all_results(_core.Kernels("baseline"))
    got = all_results(_core.Kernels(other))
    for name in want:
        if name.startswith("attention."):
            close(got[name], wide(want[name]), roundings=100)
        else:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)

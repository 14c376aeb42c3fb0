"""The model's operations in float64 NumPy, forward and backward, written from their formulas.

Plain and slow on purpose; nothing here imports flatshard. Shapes: rows (n, width), heads
(batch, heads, length, dim). Each *_grad returns the gradients of sum(output * dy).
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

IGNORED = -100


def embed(table: Array, tokens: NDArray[np.int32], scale: float) -> Array:
    return scale * table[tokens]


def embed_grad(vocab: int, tokens: NDArray[np.int32], scale: float, dy: Array) -> Array:
    dtable = np.zeros((vocab, dy.shape[1]))
    np.add.at(dtable, tokens, scale * dy)
    return dtable


def norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm (Zhang and Sennrich 2019, eq. 4)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def norm_grad(x: Array, weight: Array, eps: float, dy: Array) -> tuple[Array, Array]:
    rstd = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    scaled = dy * weight
    dx = rstd * scaled - x * rstd**3 * np.mean(scaled * x, axis=-1, keepdims=True)
    return dx, np.sum(dy * x * rstd, axis=0)


def rotate(x: Array, angles: Array) -> Array:
    """Turns pair (i, i + dim / 2) of the last axis by angles (length, dim / 2)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def seen(length: int, window: int) -> NDArray[np.bool_]:
    """(i, j): does query i see key j?"""
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    return (j <= i) & ((i - j < window) if window else True)


def probabilities(q: Array, k: Array, window: int) -> Array:
    """(batch, q_heads, length, length); q carries the scale, key heads are shared by groups."""
    group = q.shape[1] // k.shape[1]
    scores = q @ np.repeat(k, group, axis=1).swapaxes(-1, -2)
    scores = np.where(seen(q.shape[2], window), scores, -np.inf)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(q: Array, k: Array, v: Array, window: int) -> Array:
    group = q.shape[1] // k.shape[1]
    return probabilities(q, k, window) @ np.repeat(v, group, axis=1)


def attention_grad(
    q: Array, k: Array, v: Array, window: int, dy: Array
) -> tuple[Array, Array, Array]:
    batch, q_heads, length, dim = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    p = probabilities(q, k, window)
    k_all, v_all = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    dp = dy @ v_all.swapaxes(-1, -2)
    ds = p * (dp - np.sum(dp * p, axis=-1, keepdims=True))
    grouped = (batch, kv_heads, group, length, dim)
    dk = (ds.swapaxes(-1, -2) @ q).reshape(grouped).sum(axis=2)
    dv = (p.swapaxes(-1, -2) @ dy).reshape(grouped).sum(axis=2)
    return ds @ k_all, dk, dv


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up (Shazeer 2020)."""
    return gate / (1.0 + np.exp(-gate)) * up


def swiglu_grad(gate: Array, up: Array, dy: Array) -> tuple[Array, Array]:
    s = 1.0 / (1.0 + np.exp(-gate))
    return dy * up * (s + gate * s * (1.0 - s)), dy * gate * s


def xent(logits: Array, targets: NDArray[np.int32], scale: float) -> Array:
    """Loss of each row, nats; 0 where the target is ignored."""
    z = logits * scale
    most = z.max(axis=-1)
    log_sum = np.log(np.exp(z - most[:, None]).sum(axis=-1)) + most
    kept = targets != IGNORED
    picked = z[np.arange(len(z)), np.where(kept, targets, 0)]
    return np.where(kept, log_sum - picked, 0.0)


def xent_grad(logits: Array, targets: NDArray[np.int32], scale: float) -> Array:
    z = logits * scale
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    kept = targets != IGNORED
    p[np.flatnonzero(kept), targets[kept]] -= 1.0
    return np.where(kept[:, None], p * scale, 0.0)

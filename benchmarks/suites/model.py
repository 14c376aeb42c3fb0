"""Where the time of a training step of the native model goes: every operation as often as one step
runs it, beside the step's matrix products.

Options: size=32m, batch=4, length=256, threads=1, isa=avx512 (the best of this machine). What is
not a product is bound by memory or by its own arithmetic and hardly by neighbours: its share of the
step is the figure to watch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import Case, Contender, Settings, Suite
from flatshard import _core, blas
from flatshard.models.config import LlamaConfig, load_config

__all__ = ["SUITE"]

Array = np.ndarray[Any, Any]
SLICE = 512  # rows of the head's logits at a time
EVERYTHING = "all but products"
PRODUCTS = "products"


class Step:
    """Arrays of one layer and one slice of the head, and the operations on them."""

    def __init__(self, config: LlamaConfig, batch: int, length: int, kernels: Any) -> None:
        self.config, self.kernels = config, kernels
        self.batch, self.length, self.rows = batch, length, batch * length
        self.rng = np.random.default_rng(0)
        self.made: dict[str, Array] = {}
        self.slices = -(-self.rows // SLICE)

    def floats(self, name: str, *shape: int) -> Array:
        """An array of normal numbers, made once per name."""
        if name not in self.made:
            self.made[name] = self.rng.standard_normal(shape, np.float32)
        return self.made[name]

    def run(self, operation: str, **fields: Any) -> None:
        _core.model_op(self.kernels, operation, **fields)

    # -- operations, each as often as one step runs it ---------------------------------------------

    def heads_fields(self) -> dict[str, Any]:
        c = self.config
        dim, padded = c.head_dim, -(-c.head_dim // 16) * 16
        packed = {
            name: self.floats(name, self.batch, heads, self.length, padded)
            for name, heads in (("q", c.num_attention_heads), ("k", c.num_key_value_heads),
                                ("v", c.num_key_value_heads))
        }  # fmt: skip
        return {
            "batch": self.batch,
            "length": self.length,
            "q_heads": c.num_attention_heads,
            "kv_heads": c.num_key_value_heads,
            "head_dim": dim,
            "padded_dim": padded,
            "kv_rows": self.length,
            **packed,
        }

    def heads(self) -> None:
        c = self.config
        columns = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
        angles = self.floats("angles", self.length, c.head_dim // 2)
        fields = {
            **self.heads_fields(),
            "rows": self.floats("projected", self.rows, columns),
            "cosines": angles,
            "sines": angles,
            "q_scale": c.attention_multiplier,
        }
        for _ in range(c.num_hidden_layers):
            self.run("heads", **fields)
            self.run("heads_grad", **fields)

    def attention_fields(self) -> dict[str, Any]:
        c, fields = self.config, self.heads_fields()
        q_n = c.num_attention_heads * c.head_dim
        turned = (
            self.batch,
            c.num_key_value_heads,
            fields["padded_dim"],
            -(-self.length // 64) * 64,
        )
        per_row = (self.batch, c.num_attention_heads, self.length)
        return {
            **fields,
            "out": self.floats("attended", self.rows, q_n),
            "lse": self.floats("lse", *per_row),
            "k_turned": self.floats("k_turned", *turned),
            "v_turned": self.floats("v_turned", *turned),
            "dout": self.floats("dattended", self.rows, q_n),
            "dout_packed": self.floats("dpacked", *fields["q"].shape),
            "delta": self.floats("delta", *per_row),
            "dq": self.floats("dq", *fields["q"].shape),
            "dk": self.floats("dk", *fields["k"].shape),
            "dv": self.floats("dv", *fields["v"].shape),
        }

    def attention(self) -> None:
        fields = self.attention_fields()
        for _ in range(self.config.num_hidden_layers):
            self.run("attention", **fields)

    def attention_backward(self) -> None:
        fields = self.attention_fields()
        for _ in range(self.config.num_hidden_layers):
            self.run("attention_grad", **fields)

    def norms(self) -> None:
        width = self.config.hidden_size
        x, dy, dx = (self.floats(name, self.rows, width) for name in ("x", "dy", "dx"))
        weight, rstd = self.floats("weight", width), self.floats("rstd", self.rows)
        for _ in range(2 * self.config.num_hidden_layers + 1):
            self.run("norm", rows=self.rows, width=width, x=x, branch=dy, alpha=1.0,
                     sum=self.floats("sum", self.rows, width), weight=weight, eps=1e-6,
                     out=self.floats("normed", self.rows, width), rstd=rstd)  # fmt: skip
            self.run("norm_grad", rows=self.rows, width=width, x=x, rstd=rstd, weight=weight,
                     dy=self.floats("branch", self.rows, width), dx=dx, dweight=dx[0],
                     partial=self.floats("partial", 64, width))  # fmt: skip

    def swiglu(self) -> None:
        width = self.config.intermediate_size
        gate, up = (self.floats(name, self.rows, width) for name in ("gate", "up"))
        for layer in range(self.config.num_hidden_layers):
            # Backward replaces its inputs, which must be fresh: products of products vanish.
            dgate, dup, act = (
                self.floats(f"{name} {layer}", self.rows, width) for name in ("dgate", "dup", "act")
            )
            self.run("swiglu", rows=self.rows, width=width, gate=gate, up=up,
                     act=self.floats("wide", self.rows, width))  # fmt: skip
            self.run("swiglu_grad", rows=self.rows, width=width, gate=dgate, up=dup, act=act)

    def refresh(self) -> None:
        """Undoes what the last sample did to the inputs of SwiGLU's backward."""
        for name, array in self.made.items():
            source = {"dgate": "gate", "dup": "up", "act": "up"}.get(name.split(" ")[0])
            if source is not None and " " in name:
                array[:] = self.made[source]

    def cross_entropy(self) -> None:
        vocab, rows = self.config.vocab_size, min(SLICE, self.rows)
        targets = np.arange(rows, dtype=np.int32) % vocab
        for _ in range(self.slices):
            logits = self.floats("logits", rows, vocab)
            self.run("xent", rows=rows, vocab=vocab, logits=logits, targets=targets, scale=1.0,
                     dlogits=logits, factor=1.0, loss=np.empty(rows))  # fmt: skip

    def embedding(self) -> None:
        vocab, width = self.config.vocab_size, self.config.hidden_size
        tokens = (np.arange(self.rows, dtype=np.int32) * 7919) % vocab
        table = self.floats("table", vocab, width)
        fields = {"rows": self.rows, "width": width, "vocab": vocab, "scale": 1.0}
        self.run("embed", **fields, tokens=tokens, table=table, table_dtype=table.dtype,
                 out=self.floats("x", self.rows, width))  # fmt: skip
        begins = np.concatenate([[0], np.bincount(tokens, minlength=vocab).cumsum()])
        self.run(
            "embed_grad",
            **fields,
            dy=self.floats("dy", self.rows, width),
            dtable=table,
            first=begins.astype(np.int32),
            sorted=np.argsort(tokens, kind="stable").astype(np.int32),
        )

    def products(self) -> None:
        """Forward, gradient of the input, gradient of the weight, of every matrix."""
        c = self.config
        q_n, kv_n = (n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads))
        hidden, wide = c.hidden_size, c.intermediate_size
        layer = [(hidden, q_n), (hidden, kv_n), (hidden, kv_n), (q_n, hidden), (hidden, wide),
                 (hidden, wide), (wide, hidden)]  # fmt: skip
        for _ in range(c.num_hidden_layers):
            for n_in, n_out in layer:
                self.product(self.rows, n_in, n_out)
        for _ in range(self.slices):
            self.product(min(SLICE, self.rows), hidden, c.vocab_size)

    def product(self, rows: int, n_in: int, n_out: int) -> None:
        x, y = self.floats(f"in{rows}x{n_in}", rows, n_in), self.floats(f"out{n_out}", rows, n_out)
        weight = self.floats(f"w{n_in}x{n_out}", n_out, n_in)
        self.kernels.gemm(y, x, weight, trans_b=True)
        self.kernels.gemm(self.floats(f"din{rows}x{n_in}", rows, n_in), y, weight)
        self.kernels.gemm(self.floats(f"dw{n_in}x{n_out}", n_out, n_in), y, x, trans_a=True)

    # -- checks ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Attention, norm and SwiGLU of these very arrays against NumPy in fp64, on a few rows."""
        fields = self.attention_fields()
        self.run("attention", **fields)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        head, row = self.config.num_attention_heads - 1, self.length - 1
        q = fields["q"][0, head, row].astype(np.float64)
        k, v = (fields[n][0, head // group].astype(np.float64) for n in ("k", "v"))
        p = np.exp(k @ q - (k @ q).max())
        out = fields["out"].reshape(self.batch, self.length, -1, self.config.head_dim)
        want = (p / p.sum()) @ v
        assert np.abs(out[0, row, head] - want[: self.config.head_dim]).max() < 1e-4
        self.swiglu()
        gate, up = self.made["gate"][3].astype(np.float64), self.made["up"][3].astype(np.float64)
        act = np.empty((1, gate.size), np.float32)
        self.run("swiglu", rows=1, width=gate.size, gate=self.made["gate"][3],
                 up=self.made["up"][3], act=act)  # fmt: skip
        assert np.abs(act[0] - gate / (1 + np.exp(-gate)) * up).max() < 1e-4
        self.norms()
        total = self.made["x"][1].astype(np.float64) + self.made["dy"][1]
        want = total / np.sqrt(np.mean(total**2) + 1e-6) * self.made["weight"]
        assert np.abs(self.made["normed"][1] - want).max() < 1e-4


class Operation:
    """One kind of operation of a step."""

    def __init__(self, name: str, step: Step, runs: Sequence[Callable[[], None]]) -> None:
        self.name, self.step, self.runs = name, step, runs

    def verify(self) -> None:
        self.step.check()
        for run in self.runs:
            run()

    def sample(self) -> float:
        self.step.refresh()
        started = time.perf_counter()
        for run in self.runs:
            run()
        return time.perf_counter() - started

    def close(self) -> None:
        self.step.made.clear()


def cases(settings: Settings) -> Sequence[Case]:
    options = settings.options
    size = options.get("size", "tiny" if settings.smoke else "32m")
    batch, length = int(options.get("batch", 4)), int(options.get("length", 256))
    threads = int(options.get("threads", 1))
    config = load_config(size)

    def opener(name: str, parts: Sequence[str]) -> Callable[[], Contender]:
        def opened() -> Contender:
            blas.load()
            kernels = _core.Kernels(options.get("isa"), threads=threads)
            step = Step(config, batch, length, kernels)
            return Operation(name, step, [getattr(step, part) for part in parts])

        return opened

    names = {
        "attention forward": "attention",
        "attention backward": "attention_backward",
        "rotation and packing": "heads",
        "norms and residuals, both ways": "norms",
        "SwiGLU, both ways": "swiglu",
        "cross-entropy": "cross_entropy",
        "embedding, both ways": "embedding",
    }
    contenders = [opener(EVERYTHING, list(names.values())), opener(PRODUCTS, ["products"])]
    contenders += [opener(name, [part]) for name, part in names.items()]
    title = f"{size}, {batch} x {length} tokens, {threads} thread(s): one step"
    return [Case(title, contenders, work=batch * length, unit="tokens", compare=False)]


SUITE = Suite("model", "where the time of a training step of the native model goes", cases)

"""A GPU: single operations against the chip and torch, whole steps in tokens/s and MFU, offload.

Options: part=ops|rows|attention|1b|7b|offload (default: all), layers=N of the shape (default: as
many as fit, with everything that a case compares in memory at once), batch=2, length=4096,
checkpointing=off,on, peak=989e12 (FLOP/s of the chip in bf16, dense, where its name is not known).

With --smoke and without a library named by FLATSHARD_CUDA_LIBRARY, everything runs at tiny sizes
on the stand-in for CUDA: that shows that it runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import Case, Contender, Result, Settings, Suite, Unavailable
from benchmarks.program import Program
from benchmarks.ranks import Ranks
from flatshard import _core

__all__ = ["SUITE"]

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = ROOT / "build" / "benchmarks" / "cuda_ops"
STAND_IN = ROOT / "build" / "ctest" / "plain" / "libfs_cuda.so"
#: Dense bf16, by the vendor's data sheets.
PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "H20": 148e12, "A100": 312e12, "B200": 2250e12}
GOAL_MFU = 0.60  # 7B shape, full recompute, recompute not counted
GOAL_STEP = 0.90  # of the bandwidth of a device-to-device copy
PARTS = ("ops", "rows", "attention", "1b", "7b", "offload")
Open = Callable[[], Contender | None]


@dataclasses.dataclass(frozen=True)
class Chip:
    """What runs: bytes free; FLOP/s in bf16, 0 where not known; smoke: the stand-in's sizes."""

    name: str
    free_nbytes: int
    peak: float
    smoke: bool
    library: str


# ---- the chip -----------------------------------------------------------------------------------


def make(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise Unavailable(f"{what} could not be built:\n{done.stdout}{done.stderr}"[-3000:])


def find_chip(settings: Settings) -> Chip:
    """Builds what measures and asks it for the device."""
    library = os.environ.get("FLATSHARD_CUDA_LIBRARY", "")
    if not library and settings.smoke:
        if shutil.which("make") is None or shutil.which("c++") is None:
            raise Unavailable("the stand-in for CUDA needs make and a C++ compiler")
        build = ["make", "-s", "-f", "tests/c/Makefile", f"-j{os.cpu_count() or 1}", "stand-in"]
        make([*build, f"BUILD_ID={_core.build_id()}"], "the stand-in for CUDA")
        library = str(STAND_IN)
    if not library:
        library = str(ROOT / "build" / "cuda" / "libfs_cuda.so")
    if not os.path.exists(library):
        raise Unavailable(
            f"no device: {library} is not there; python tools/cuda.py makes it where nvcc is "
            "(--smoke runs on a stand-in)"
        )
    os.environ["FLATSHARD_CUDA_LIBRARY"] = library
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path) for room in ("base", "device") for path in
                     (ROOT / "csrc" / room).glob("*.c"))  # fmt: skip
    flags = ["-O2", "-std=c11", "-ffp-contract=off", "-pthread", "-Icsrc"]
    flags.append(f'-DFS_BUILD_ID="{_core.build_id()}"')
    compiler = os.environ.get("CC", "cc").split()
    sources += [str(ROOT / "benchmarks" / name) for name in ("cuda_ops.c", "cuda_rows.c")]
    make([*compiler, *flags, *sources, "-o", str(PROGRAM), "-ldl", "-lm"], "cuda_ops")
    asked = subprocess.run(
        [str(PROGRAM), library, "describe"], capture_output=True, text=True, timeout=120
    )
    if asked.returncode != 0:
        raise Unavailable(f"no device: {asked.stderr.strip()}")
    name, free, _total = asked.stdout.strip().split("\n")
    known = [peak for word, peak in PEAKS.items() if word in name.replace(",", " ").split()]
    peak = float(settings.options.get("peak", known[0] if known else 0.0))
    print(f"  {name}, {int(free) / 2**30:.0f} GiB free, bf16 peak {peak / 1e12:.0f} TFLOP/s")
    return Chip(name, int(free), peak, settings.smoke, library)


# ---- single operations --------------------------------------------------------------------------


def ours(chip: Chip, name: str, what: str, **sizes: Any) -> Open:
    words = [f"{key}={int(value)}" for key, value in sizes.items()]
    return lambda: Program(name, [str(PROGRAM), chip.library, what, *words])


def torchs(settings: Settings, name: str, what: str, **sizes: Any) -> list[Open]:
    if not settings.peers or importlib.util.find_spec("torch") is None:
        return []

    def open_peer() -> Contender:
        from benchmarks.peers import torch_cuda

        return torch_cuda.open_operation(name, what, **sizes)

    return [open_peer]


def share_of_copy(goal: str) -> Callable[[list[Result]], list[str]]:
    def remarks(results: list[Result]) -> list[str]:
        first, copy = results[0], results[1]
        return [f"{first.rate / copy.rate:.3f} of the copy's bandwidth{goal}"]

    return remarks


def bound_case(
    settings: Settings,
    chip: Chip,
    title: str,
    nbytes: int,
    goal: str,
    mine: Open,
    peers: list[Open],
) -> Case:
    """An operation that moves nbytes in all, beside a copy that does: half read, half written."""
    times = 1 if chip.smoke else 10
    copy = ours(chip, "copy from device to device", "copy", nbytes=nbytes // 2, times=times)
    return Case(title, [mine, copy, *peers], nbytes / 1e9, "GB", remarks=share_of_copy(goal))


def step_case(settings: Settings, chip: Chip) -> Case:
    numel, times = (1 << 12, 1) if chip.smoke else (1 << 28, 10)
    mine = ours(chip, "flatshard: AdamW, masters, bf16 weights", "step", numel=numel, times=times)
    peers = torchs(settings, "torch: fused AdamW, cast", "step", numel=numel, times=times)
    title = f"AdamW step, {numel / 1e6:.0f} M parameters, 30 B each"
    return bound_case(settings, chip, title, 30 * numel, f" (goal {GOAL_STEP})", mine, peers)


def sum_case(settings: Settings, chip: Chip, sources: int) -> Case:
    numel, times = (1 << 12, 1) if chip.smoke else (1 << 27, 10)
    sizes = {"numel": numel, "sources": sources, "times": times}
    mine = ours(chip, "flatshard: sum, norm, non-finite test", "sum", **sizes)
    peers = torchs(settings, "torch: sum, norm", "reduce", **sizes)
    each = 2 * sources + 4
    title = f"sum of {sources} ranks, bf16 to fp32, {numel / 1e6:.0f} M elements, {each} B each"
    return bound_case(settings, chip, title, each * numel, "", mine, peers)


def product_case(settings: Settings, chip: Chip, m: int, n: int, k: int) -> Case:
    sizes = {"m": m, "n": n, "k": k, "times": 1 if chip.smoke else 20}
    who = [ours(chip, "flatshard", "gemm", **sizes)]
    who += torchs(settings, "torch", "product", **sizes)
    flop = 2.0 * m * n * k
    return Case(
        f"product, bf16: ({m}, {k}) by ({n}, {k}) turned", who, flop / 1e12, "TFLOP",
        remarks=lambda results: peak_share(chip, results),
    )  # fmt: skip


def attention_case(
    settings: Settings, chip: Chip, heads: int, kv_heads: int, dim: int, *, backward: bool
) -> Case:
    batch, length = (1, 64) if chip.smoke else (2, 4096)
    sizes = {"batch": batch, "length": length, "q_heads": heads, "kv_heads": kv_heads,
             "head_dim": dim, "times": 1 if chip.smoke else 10}  # fmt: skip
    who = [ours(chip, "flatshard", "attention_grad" if backward else "attention", **sizes)]
    who += torchs(settings, "torch: scaled_dot_product_attention", "attention",
                  backward=backward, **sizes)  # fmt: skip
    # Two products over the lower triangle; five of them backward.
    flop = (5 if backward else 2) * batch * heads * float(length) ** 2 * dim
    way = "backward" if backward else "forward"
    title = f"attention {way}, bf16, {batch} x {length}, {heads} heads of {dim}, {kv_heads} of keys"
    return Case(title, who, flop / 1e12, "TFLOP", remarks=lambda results: peak_share(chip, results))


def peak_share(chip: Chip, results: list[Result]) -> list[str]:
    if chip.peak == 0:
        return []
    return [f"{r.contender}: {r.rate * 1e12 / chip.peak:.3f} of the chip's peak" for r in results]


def op_cases(settings: Settings, chip: Chip) -> list[Case]:
    small = chip.smoke
    made = [step_case(settings, chip), sum_case(settings, chip, 8), sum_case(settings, chip, 1)]
    shapes = [(64, 48, 32)] if small else [(8192, 12288, 4096), (8192, 22016, 4096),
                                           (8192, 4096, 11008)]  # fmt: skip
    made += [product_case(settings, chip, *shape) for shape in shapes]
    return made


def row_cases(settings: Settings, chip: Chip) -> list[Case]:
    """What memory bounds in a 7B-shaped model's step, beside a copy of as many bytes as must move:
    each input read once, each result written once."""
    rows, width, vocab = (64, 64, 96) if chip.smoke else (8192, 4096, 32000)
    lines = 16 if chip.smoke else 2048  # of logits at a time
    q_heads, kv_heads, dim = (4, 2, 16) if chip.smoke else (32, 32, 128)
    times = 1 if chip.smoke else 20
    packed = {"batch": 2, "length": rows // 2, "q_heads": q_heads, "kv_heads": kv_heads,
              "head_dim": dim}  # fmt: skip
    moved = 4 * rows * (q_heads + 2 * kv_heads) * dim
    made = []
    for what, nbytes, sizes in (
        ("norm_grad", 10 * rows * width, {"rows": rows, "width": width}),
        ("column_sum", 2 * rows * width, {"rows": rows, "width": width}),
        ("xent", 6 * lines * vocab, {"rows": lines, "vocab": vocab}),
        ("embed_grad", 2 * rows * width + 4 * vocab * width,
         {"rows": rows, "width": width, "vocab": vocab}),
        ("heads", moved, packed),
        ("heads_grad", moved, packed),
    ):  # fmt: skip
        mine = ours(chip, f"flatshard: {what}", what, times=times, **sizes)
        shape = ", ".join(f"{key} {value}" for key, value in sizes.items())
        title = f"{what}, bf16, {shape}, {nbytes / 1e6:.1f} MB"
        made.append(bound_case(settings, chip, title, nbytes, "", mine, []))
    return made


def attention_cases(settings: Settings, chip: Chip) -> list[Case]:
    return [
        attention_case(settings, chip, heads, kv_heads, dim, backward=backward)
        for heads, kv_heads, dim in ([(2, 1, 64)] if chip.smoke else [(32, 32, 128), (32, 4, 64)])
        for backward in (False, True)
    ]


# ---- whole steps --------------------------------------------------------------------------------


def shape_of(size: str, chip: Chip, layers: int | None) -> dict[str, int]:
    from flatshard.models.config import SIZES

    config = dict(SIZES["tiny" if chip.smoke else size])
    if chip.smoke:
        config |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                   "vocab_size": 64}  # fmt: skip
    config["max_position_embeddings"] = max(4096, config["max_position_embeddings"])
    if layers is not None:
        config["num_hidden_layers"] = layers
    return config


def sizes_of(config: dict[str, int]) -> tuple[int, int]:
    """Parameters of one layer, and of everything that is multiplied by: the embedding is not."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    dim = width // config["num_attention_heads"]
    layer = width * dim * (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    layer += 3 * width * inner
    return layer, config["num_hidden_layers"] * layer + width * config["vocab_size"]


def layers_that_fit(
    chip: Chip, config: dict[str, int], tokens: int, at_once: int, checkpointing: bool
) -> int:
    """Of the shape's layers, with at_once models on the chip: 18 bytes a parameter (weights,
    masters, moments, gradients), activations, and a fifth for what libraries keep besides."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    layer, _ = sizes_of(config)
    kept = width if checkpointing else 8 * width + 3 * inner
    ends = 18 * 2 * width * config["vocab_size"] + tokens * (8 * config["vocab_size"] + 64 * width)
    room = 0.8 * chip.free_nbytes / at_once - ends
    return max(1, min(config["num_hidden_layers"], int(room / (18 * layer + 2 * tokens * kept))))


def mfu(chip: Chip, config: dict[str, int], length: int, goal: str) -> Callable[..., list[str]]:
    _, products = sizes_of(config)
    width, layers = config["hidden_size"], config["num_hidden_layers"]

    def remarks(results: list[Result]) -> list[str]:
        if chip.peak == 0:
            return ["no MFU: the chip's peak is not known, peak=FLOP/s names it"]
        attention = 6 * layers * width * length  # causal: half of 12
        formula = f"MFU = 6 x {products / 1e9:.3f} G parameters x tokens/s / "
        lines = [f"{formula}{chip.peak / 1e12:.0f} TFLOP/s; in brackets with attention's products"]
        for r in results:
            bare = 6 * products * r.rate / chip.peak
            whole = (6 * products + attention) * r.rate / chip.peak
            lines.append(f"{r.contender}: MFU {bare:.3f} ({whole:.3f}){goal}")
        return lines

    return remarks


def model_cases(settings: Settings, chip: Chip, size: str) -> list[Case]:
    options = settings.options
    batch = int(options.get("batch", 1 if chip.smoke else 2))
    length = int(options.get("length", 16 if chip.smoke else 4096))
    peers = settings.peers and importlib.util.find_spec("torch") is not None
    made = []
    for word in options.get("checkpointing", "on,off" if size == "7b" else "off,on").split(","):
        checkpointing = word == "on"
        config = shape_of(size, chip, None)
        whole = config["num_hidden_layers"]
        fit = layers_that_fit(chip, config, batch * length, 4 if peers else 2, checkpointing)
        config = shape_of(size, chip, int(options["layers"]) if "layers" in options else fit)
        who: list[Open] = [trainer(config, stage, batch, length, checkpointing, chip)
                           for stage in (3, 0)]  # fmt: skip
        if peers:
            who += [torch_trainer(
                    config, batch, length, checkpointing, compiled, 1 if chip.smoke else 2
                )
                    for compiled in (True, False)]  # fmt: skip
        layers = config["num_hidden_layers"]
        title = f"{size} shape, {layers} of {whole} layers, bf16, {batch} x {length} tokens, " + (
            "each layer computed again in backward" if checkpointing else "all activations kept"
        )
        goal = f", goal {GOAL_MFU:.2f}" if size == "7b" and checkpointing else ""
        made.append(
            Case(title, who, float(batch * length), "tokens",
                 remarks=mfu(chip, config, length, goal))
        )  # fmt: skip
    return made


def trainer(
    config: dict[str, int],
    stage: int,
    batch: int,
    length: int,
    checkpointing: bool,
    chip: Chip,
    offload: dict[str, str] | None = None,
    name: str = "",
) -> Open:
    return lambda: Ranks(
        name or f"flatshard stage {stage}",
        "benchmarks.suites.train:open_flatshard",
        n=1,
        threads=1 if chip.smoke else os.cpu_count() or 1,
        deadline=300.0,
        config=config,
        precision="bf16",
        stage=stage,
        gather="copy",
        batch=batch,
        length=length,
        device="cuda",
        checkpointing=checkpointing,
        offload=offload,
        steps=1 if chip.smoke else 2,
    )


def torch_trainer(
    config: dict[str, int], batch: int, length: int, checkpointing: bool, compiled: bool, steps: int
) -> Open:
    def open_peer() -> Contender:
        from benchmarks.peers import torch_llama

        return torch_llama.open_training(
            name="torch, compiled" if compiled else "torch, eager",
            config=config,
            batch=batch,
            length=length,
            checkpointing=checkpointing,
            compiled=compiled,
            steps=steps,
        )

    return open_peer


def offload_cases(settings: Settings, chip: Chip) -> list[Case]:
    """The same bits more slowly, for less memory: one model at a time would hide what it costs."""
    batch, length = (1, 16) if chip.smoke else (2, 4096)
    config = shape_of("1b", chip, None)
    homes: list[tuple[str, dict[str, str] | None]] = [
        ("everything on the device", None),
        ("state on the CPU", {"state": "cpu"}),
        ("gradients and state on the CPU", {"state": "cpu", "grads": "cpu"}),
        ("everything on the CPU", {"state": "cpu", "grads": "cpu", "params": "cpu"}),
    ]
    who = [trainer(config, 3, batch, length, True, chip, home, name) for name, home in homes]
    title = f"1b, bf16, stage 3, {batch} x {length} tokens: where the memory classes live"
    return [Case(title, who, float(batch * length), "tokens")]


def cases(settings: Settings) -> Sequence[Case]:
    part = settings.options.get("part", "")
    if part and part not in PARTS:
        raise SystemExit(f"part={part}: expected one of {', '.join(PARTS)}")
    chip = find_chip(settings)
    parts = (part,) if part else PARTS
    made: list[Case] = []
    if "ops" in parts:
        made += op_cases(settings, chip)
    if "rows" in parts:
        made += row_cases(settings, chip)
    if "attention" in parts:
        made += attention_cases(settings, chip)
    for size in ("1b", "7b"):
        if size in parts:
            made += model_cases(settings, chip, size)
    if "offload" in parts:
        made += offload_cases(settings, chip)
    return made


SUITE = Suite("cuda", "a GPU: operations, tokens/s and MFU against torch, offload", cases)

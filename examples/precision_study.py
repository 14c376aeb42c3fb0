"""One small Llama with and without fp32 masters, at three learning rates: what precision decides.

    python examples/precision_study.py --out docs/

Weights in bf16 have 8 significant bits: near 0.1 their neighbours are 4.9e-4 apart, and an Adam
step of 1e-5 rounds back to where it came from. With a master the same steps add up. Writes
`precision.json` (every loss and gradient norm) and, with matplotlib, `precision-loss.png` and
`precision-norm.png`.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

import flatshard as fs

#: Standard deviation of the initial weights, which decides how far apart bf16 neighbours are.
INIT_STD = 0.1
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "initializer_range": INIT_STD,
}
RATES = (1e-5, 4e-5, 1e-3)
PRECISIONS = ("bf16", "bf16-pure")
BATCH, LENGTH, RANKS = 4, 64, 2


def corpus() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of some of the standard library's modules."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(stdlib.glob("*.py"))[:80])
    return np.frombuffer(text, np.uint8)


def train(
    world: fs.World, precision: str, lr: float, seed: int, steps: int
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of every step, at a constant rate."""
    text = corpus()
    model = fs.models.Llama.from_config(CONFIG, world=world, precision=precision, seed=seed)
    opt = fs.AdamW(model, lr=lr)
    draw = np.random.default_rng([seed, world.rank])
    losses, norms = [], []
    for _ in range(steps):
        starts = draw.integers(0, len(text) - LENGTH - 1, BATCH)
        rows = np.stack([text[s : s + LENGTH + 1] for s in starts]).astype(np.int32)
        losses.append(model.forward_backward(rows[:, :-1], rows[:, 1:]).mean)
        norms.append(opt.step(max_norm=1.0).grad_norm)
    world.barrier()
    model.close()
    return losses, norms


def frozen_weight(world: fs.World, precision: str, steps: int = 1000) -> float:
    """How far a weight of 0.02 moves in 1,000 Adam steps of 1e-6, the gradient's sign constant."""
    start = np.full(1, 0.02, np.float32)
    shards = fs.shard({"w": start}, world, precision=precision)
    opt = fs.Adam(shards, lr=1e-6)
    before = float(shards.full("w", "master")[0])
    for _ in range(steps):
        shards.units[0].reduce({"w": np.ones(1, np.float32)})
        opt.step()
    moved = before - float(shards.full("w", "master")[0])
    world.barrier()
    shards.close()
    return moved


def tail(values: list[float]) -> float:
    """Mean of the last tenth."""
    return float(np.mean(values[-max(1, len(values) // 10) :]))


def draw(runs: list[dict[str, Any]], key: str, title: str, path: Path) -> None:
    """Curves of one quantity: a panel for each rate, a line for each precision and seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(RATES), figsize=(12, 3.6), sharey=True)
    colours = dict(zip(PRECISIONS, ("#1f6fb2", "#d1622b"), strict=True))
    for panel, rate in zip(panels, RATES, strict=True):
        for run in runs:
            if run["lr"] == rate:
                label = run["precision"] if run["seed"] == runs[0]["seed"] else None
                smooth = np.convolve(run[key], np.ones(9) / 9, "valid")
                panel.plot(smooth, color=colours[run["precision"]], lw=0.9, label=label)
        panel.set_title(f"learning rate {rate:g}")
        panel.set_xlabel("step")
    panels[0].set_ylabel(title)
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    """Runs the study and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    world = fs.local_world(RANKS, threads=1)
    runs: list[dict[str, Any]] = []
    print(f"initial weights: normal, standard deviation {INIT_STD}; {options.steps} steps")
    print(f"{'rate':>8} {'precision':>10} {'first loss':>11} {'last loss':>10} {'last norm':>10}")
    for rate in RATES:
        for precision in PRECISIONS:
            for seed in range(options.seeds):
                losses, norms = world.run(train, precision, rate, seed, options.steps)[0]
                runs.append({"lr": rate, "precision": precision, "seed": seed,
                             "loss": losses, "norm": norms})  # fmt: skip
                print(f"{rate:8g} {precision:>10} {losses[0]:11.3f} {tail(losses):10.3f} "
                      f"{tail(norms):10.2f}", flush=True)  # fmt: skip
    for precision in PRECISIONS:
        moved = world.run(frozen_weight, precision)[0]
        print(f"a weight of 0.02 after 1,000 steps of 1e-6 in {precision}: moved by {moved:.3g}")
    options.out.mkdir(parents=True, exist_ok=True)
    rounded = [{k: [round(x, 4) for x in v] if isinstance(v, list) else v for k, v in run.items()}
               for run in runs]  # fmt: skip
    (options.out / "precision.json").write_text(json.dumps(rounded), encoding="utf-8")
    try:
        draw(runs, "loss", "loss, nats per byte", options.out / "precision-loss.png")
        draw(runs, "norm", "gradient norm", options.out / "precision-norm.png")
    except ImportError:
        print("no pictures: matplotlib is not installed")


if __name__ == "__main__":
    main()

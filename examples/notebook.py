# %% [markdown]
# Sharding in a notebook: ranks are threads of this process. Each `# %%` is a cell.

# %%
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import flatshard as fs

# %% [markdown]
# A model of one's own: a function from weights and a batch to a loss and gradients, in plain NumPy.


# %%
def forward_backward(
    weights: dict[str, NDArray[Any]], x: NDArray[Any], y: NDArray[Any]
) -> tuple[float, dict[str, NDArray[Any]]]:
    """Two layers with a tanh between them, mean squared error."""
    hidden = np.tanh(x @ weights["in.w"])
    error = hidden @ weights["out.w"] - y
    d_out = 2 * error / error.size
    d_hidden = d_out @ weights["out.w"].T * (1 - hidden**2)
    return float((error**2).mean()), {"out.w": hidden.T @ d_out, "in.w": x.T @ d_hidden}


# %% [markdown]
# What each rank does: gather a unit, compute, reduce its gradients, step.


# %%
def train(world: fs.World, stage: int, steps: int = 200) -> tuple[float, str]:
    """Trains on batches of this rank's own; returns the last loss and the hash of the weights."""
    start = np.random.default_rng(0)
    weights = {
        "in.w": start.normal(0, 0.5, (4, 32)).astype(np.float32),
        "out.w": start.normal(0, 0.2, (32, 1)).astype(np.float32),
    }
    shards = fs.shard(weights, world, sharding=fs.Sharding(stage=stage))
    opt = fs.AdamW(shards, lr=1e-2)
    draw = np.random.default_rng(1 + world.rank)
    loss = float("nan")
    for _ in range(steps):
        x = draw.normal(size=(16, 4)).astype(np.float32)
        y = np.sin(x.sum(axis=1, keepdims=True))
        gathered = {name: w for unit in shards for name, w in unit.gather().items()}
        loss, gradients = forward_backward(gathered, x, y)
        for unit in shards:
            unit.reduce({name: gradients[name].astype(np.float32) for name in unit.names})
            unit.release()
        opt.step(max_norm=1.0)
    return loss, fs.weights_sha256(shards)


# %% [markdown]
# Four ranks, each stage: the same bits.

# %%
for stage in (0, 1, 2, 3):
    loss, digest = fs.local_world(4).run(train, stage)[0]
    print(f"stage {stage}: loss {loss:.4f}  weights {digest[:12]}")

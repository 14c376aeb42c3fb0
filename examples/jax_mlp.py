"""A network in JAX, trained by shards: JAX computes gradients, flatshard keeps, sums and updates.

    python examples/jax_mlp.py                              alone
    flatshard launch -n 2 examples/jax_mlp.py --stage 3     two ranks, each with its own batches

Needs jax. Each rank gathers the weights, takes the gradient of a sum over its batch, and hands it
in with the number of samples; after the step every rank reads the same weights.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import flatshard as fs

SIZES = (2, 64, 64, 1)


def start() -> dict[str, NDArray[Any]]:
    """Initial weights by name: of numbered layers, each of which becomes a unit."""
    rng = np.random.default_rng(0)
    weights = {}
    for layer, (width, out) in enumerate(itertools.pairwise(SIZES)):
        values = width**-0.5 * rng.standard_normal((width, out))
        weights[f"layers.{layer}.w"] = values.astype(np.float32)
        weights[f"layers.{layer}.b"] = np.zeros(out, np.float32)
    return weights


def loss_sum(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Squared errors over the batch, added up."""
    last = len(SIZES) - 2
    for layer in range(last):
        x = jnp.tanh(x @ weights[f"layers.{layer}.w"] + weights[f"layers.{layer}.b"])
    out = x @ weights[f"layers.{last}.w"] + weights[f"layers.{last}.b"]
    return jnp.sum((out - y) ** 2)


forward_backward = jax.jit(jax.value_and_grad(loss_sum))


def train(world: fs.World, *, stage: int, precision: str, steps: int) -> tuple[float, str]:
    """Returns the mean loss of the last ten steps over all ranks, and the hash of the weights."""
    shards = fs.shard(start(), world, sharding=fs.Sharding(stage), precision=precision)
    opt = fs.AdamW(shards, lr=3e-3, weight_decay=0.01, no_decay=("*.b",))
    rate = fs.schedule.cosine(3e-3, warmup=10, total=steps)
    draw = np.random.default_rng(1 + world.rank)
    losses = []
    for step in range(steps):
        x = draw.uniform(-2, 2, (64, 2)).astype(np.float32)
        y = np.sin(2 * x[:, :1]) * np.cos(x[:, 1:])
        weights = {
            name: jnp.asarray(w, jnp.float32) for u in shards for name, w in u.gather().items()
        }
        loss, gradients = forward_backward(weights, jnp.asarray(x), jnp.asarray(y))
        for unit in reversed(list(shards)):  # as backward does: the last layer first
            unit.release()
            unit.reduce({name: gradients[name] for name in unit.names}, count=len(x))
        opt.step(max_norm=1.0, lr=rate(opt.steps_applied))
        losses.append(float(world.all_reduce(np.array(float(loss) / len(x)), op="mean")))
        if step % 50 == 0 or step == steps - 1:
            world.print(f"step {step + 1:4} loss {losses[-1]:.4f}")
    return float(np.mean(losses[-10:])), fs.weights_sha256(shards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stage", type=int, default=3, help="0: DDP ... 3: ZeRO-3, FSDP")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    with fs.init() as world:
        loss, digest = train(world, **vars(given))
        what = f"stage {given.stage}, {world.size} ranks"
        world.print(f"{what}: loss {loss:.4f}, weights {digest[:12]}")


if __name__ == "__main__":
    main()

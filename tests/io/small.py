"""A small sharded model for checkpoint tests, and steps on it that any world can repeat."""

import numpy as np

from flatshard.optim import AdamW
from flatshard.policy import Sharding
from flatshard.shard import Shards, shard, state_sha256, weights_sha256

SHAPES = {
    "embed.weight": (13, 3),
    "layers.0.mlp.up_proj.weight": (7, 10),
    "layers.0.frozen": (5, 3),
    "layers.1.mlp.up_proj.weight": (64, 40),
    "layers.1.scale": (),
    "norm.weight": (2,),
}
FROZEN = ("layers.0.frozen",)


def values(seed: int = 0) -> dict[str, np.ndarray]:
    """Initial values; the embedding has a second name."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32).reshape(shape)
        for name, shape in SHAPES.items()
    }
    arrays["head.weight"] = arrays["embed.weight"]
    return arrays


def build(world, *, stage=3, partition="flat", gather="view", precision="fp32", seed=0) -> Shards:
    """The model on the ranks of a world."""
    return shard(
        values(seed),
        world,
        sharding=Sharding(stage, partition=partition, gather=gather),
        precision=precision,
        frozen=FROZEN,
    )


def optimizer(shards: Shards) -> AdamW:
    """AdamW with two groups, without the state of any step."""
    return AdamW(shards, lr=0.01, weight_decay=0.1, no_decay=("*.scale", "norm*"))


def step(shards: Shards, opt: AdamW, number: int) -> None:
    """One step whose gradients depend on rank and number alone; one parameter comes every other."""
    for unit in reversed(shards.units):
        grads = {}
        for name in unit.names:
            if name in FROZEN or (name == "norm.weight" and number % 2 == 0):
                continue
            rng = np.random.default_rng([number, shards.world.rank, len(name)])
            grads[name] = rng.standard_normal(SHAPES[name]).astype(np.float32).reshape(SHAPES[name])
        unit.reduce(grads, count=1 + shards.world.rank)
    opt.step(max_norm=1.0)


def hashes(shards: Shards) -> tuple[str, str]:
    """Of weights (masters) and of moments: independent of the shape of the job."""
    found = weights_sha256(shards), state_sha256(shards)
    shards.world.barrier()
    return found

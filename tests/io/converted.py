"""Loading what was converted, and comparing it with what the other system held."""

import pathlib

import numpy as np
import safetensors.numpy

import flatshard as fs
from flatshard import checkpoint

FIXTURES = pathlib.Path(__file__).resolve().parent / "fixtures"


def truth_of(folder: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
    """By parameter: weight, exp_avg, exp_avg_sq (a frozen one has its weight alone)."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, array in safetensors.numpy.load_file(folder / "truth.safetensors").items():
        name, _, what = key.rpartition(":")
        found.setdefault(name, {})[what] = array
    return found


def loads(
    run: pathlib.Path,
    truth,
    *,
    ties=(),
    size=3,
    precision="fp32",
    steps=None,
    cast=False,
    **sharding,
):
    """Load a converted checkpoint on some ranks; every weight and moment must have its bits."""
    params = {name: np.zeros(t["weight"].shape, np.float32) for name, t in truth.items()}
    frozen = tuple(name for name, t in truth.items() if "exp_avg" not in t)
    for alias, name in ties:
        params[alias] = params[name]

    def body(world):
        shards = fs.shard(
            params, world, sharding=fs.Sharding(**sharding), precision=precision, frozen=frozen
        )
        opt = fs.AdamW(shards, lr=0.5)
        loaded = checkpoint.load(run, shards, opt, cast=cast)
        for name, arrays in truth.items():
            wide = "master" if precision == "bf16" and name not in frozen else "weight"
            for what, array in arrays.items():
                got = shards.full(name, wide if what == "weight" else what)
                assert got.tobytes() == array.astype(got.dtype).tobytes(), (name, what)
        world.barrier()
        return loaded, opt.state()

    loaded, state = fs.local_world(size).run(body)[0]
    if steps is not None:
        assert set(state["steps"].values()) == {steps}
    return loaded, state

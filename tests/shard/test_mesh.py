"""Meshes: which ranks an axis holds, and hybrid sharding by hand over two of them."""

import numpy as np
import pytest

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("axes", "size"),
    [
        ({"a": 2, "b": 3}, 6),
        ({"a": 2, "b": -1, "c": 2}, 8),
        ({"only": 3}, 3),
        ({"a": 1, "b": 2}, 2),
    ],
)
def test_axes_hold_the_ranks_that_differ_in_them_alone(axes, size):
    shape = tuple(size // abs(int(np.prod(list(axes.values())))) if k == -1 else k
                  for k in axes.values())  # fmt: skip
    grid = np.arange(size).reshape(shape)

    def rank(world):
        mesh = world.mesh(**axes)
        mine = np.array([world.rank], np.int64)
        seen = {name: mesh[name].all_gather(mine).tolist() for name in mesh}
        where = dict(mesh.coordinates), {name: mesh[name].rank for name in mesh}
        mesh.close()
        world.barrier()
        return dict(mesh.shape), seen, where

    for r, (lengths, seen, (coordinates, ranks)) in enumerate(fs.local_world(size).run(rank)):
        assert tuple(lengths.values()) == shape
        place = tuple(int(i[0]) for i in np.nonzero(grid == r))
        assert tuple(coordinates.values()) == place
        assert ranks == coordinates
        for i, name in enumerate(axes):
            line = grid[(*place[:i], slice(None), *place[i + 1 :])]
            assert seen[name] == line.tolist()


@pytest.mark.parametrize(
    "axes", [{}, {"a": 3}, {"a": 0, "b": 4}, {"a": -1, "b": -1}, {"a": 3, "b": -1}]
)
def test_axes_that_do_not_fit_are_refused(axes):
    def rank(world):
        with pytest.raises(ValueError, match="mesh"):
            world.mesh(**axes)
        world.barrier()

    fs.local_world(4).run(rank)


def test_hybrid_sharding_equals_flat(rng):
    params = {"a.w": rng.standard_normal((7, 5)).astype(np.float32),
              "b.w": rng.standard_normal(3).astype(np.float32)}  # fmt: skip
    grads = [{n: rng.integers(-4, 5, p.shape).astype(np.float32) for n, p in params.items()}
             for _ in range(4)]  # fmt: skip

    def rank(world, sharding):
        shards = fs.shard(params, world, sharding=sharding)
        opt = fs.AdamW(shards, lr=0.1, weight_decay=0.1)
        for _ in range(3):
            for unit in reversed(shards.units):
                unit.reduce({n: grads[world.rank][n] for n in unit.names})
            opt.step(max_norm=1.0)
        held = sum(shards.planned()["moments"])
        hashes = fs.weights_sha256(shards), fs.state_sha256(shards)
        world.barrier()
        return hashes, held

    for gather in ("view", "copy"):
        flat = fs.local_world(4).run(rank, fs.Sharding(3, gather=gather))
        hybrid = fs.local_world(4).run(rank, fs.Sharding(3, gather=gather, replicate=2))
        assert {h for h, _ in flat} == {h for h, _ in hybrid}
        assert sum(n for _, n in hybrid) == 2 * sum(n for _, n in flat)

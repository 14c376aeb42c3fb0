"""Copies that must be equal: a flipped bit in one of them is named, with its rank and parameter.

Bits are flipped through the address of a gathered array, or found by their values in world memory:
what a stray pointer, or memory without error correction, does.
"""

import ctypes
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

SHAPES = {"a.w": (23, 5), "b.w": (7, 9), "b.frozen": (9,), "c.w": (130,)}


def open_shards(world, *, sharding, precision="fp32"):
    rng = np.random.default_rng(11)
    params = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    return fs.shard(params, world, sharding=sharding, precision=precision, frozen=["b.frozen"])


def reduce_all(shards):
    for unit in reversed(shards.units):
        names = [n for n in unit.names if n != "b.frozen"]
        rng = np.random.default_rng(len(unit.name) + shards.world.rank)
        unit.reduce({n: rng.standard_normal(SHAPES[n]).astype(np.float32) for n in names})


def flip(address, bit=0):
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 1 << bit


def weight_address(shards, name, element):
    """Of an element of this rank's compute copy."""
    unit = shards.units[shards.parameters[shards.index(name)].unit]
    with unit.gathered() as weights:
        array = weights[name]
        return array.ctypes.data + element * array.itemsize


SHARDINGS = [
    fs.Sharding(0, gather="copy"),
    fs.Sharding(1, gather="copy"),
    fs.Sharding(2, gather="copy", partition="per_parameter"),
    fs.Sharding(1, gather="copy", replicate=2),
]


@pytest.mark.parametrize("name", ["a.w", "b.frozen", "c.w"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_a_flipped_bit_of_a_weight(sharding, precision, name):
    def rank(world):
        shards = open_shards(world, sharding=sharding, precision=precision)
        opt = fs.AdamW(shards, lr=0.01, check_every=1)
        for _ in range(2):
            reduce_all(shards)
            assert opt.step()
        element = int(np.prod(SHAPES[name])) - 1
        world.barrier()  # everyone has copied what the others own
        if world.rank == 2:
            flip(weight_address(shards, name, element))
        world.barrier()
        before = opt.state()
        reduce_all(shards)
        with pytest.raises(fs.CollectiveMismatch) as raised:
            opt.step()
        assert opt.state() == before, "nothing moved"
        opt.zero()
        if world.rank == 2:
            flip(weight_address(shards, name, element))  # back
        world.barrier()
        shards.check()
        reduce_all(shards)
        assert opt.step(), "the world is whole"
        return str(raised.value)

    element = int(np.prod(SHAPES[name])) - 1
    for message in fs.local_world(4).run(rank):
        found = re.search(r"weight of '(.*)', elements \[(\d+), (\d+)\): rank 2\b", message)
        assert found is not None, message
        assert found[1] == name and int(found[2]) <= element < int(found[3])
        assert message.count("elements [") == 1, "nothing else differs"


#: A rank of a job of processes: masters and moments have no address in Python, but world memory is
#: a file, in which the values of a rank's copy are found, once for each rank, in rank order.
STATE = """
    import ctypes, re, sys
    import numpy as np
    import flatshard as fs

    def places(values):
        found = []
        for line in open("/proc/self/maps"):
            if "flatshard-data" in line:
                begin, end = (int(x, 16) for x in line.split()[0].split("-"))
                memory = ctypes.string_at(begin, end - begin)
                found += [begin + m.start() for m in re.finditer(re.escape(values), memory)]
        return sorted(found)

    with fs.init(timeout=40) as world:
        for what in ("master", "exp_avg", "exp_avg_sq"):
            rng = np.random.default_rng(11)
            params = {n: rng.standard_normal(63).astype(np.float32) for n in ("a.w", "b.w")}
            shards = fs.shard(params, world, sharding=fs.Sharding(0, gather="copy"),
                              precision="bf16")
            opt = fs.AdamW(shards, lr=0.01, check_every=3)
            steps = 0
            try:
                while True:
                    for unit in reversed(shards.units):
                        unit.reduce({n: params[n] * (1 + world.rank) for n in unit.names})
                    assert opt.step()
                    steps += 1
                    world.barrier()
                    if steps == 1 and world.rank == 1:
                        found = places(shards.full("b.w", what)[:8].tobytes())
                        assert len(found) == world.size, found
                        ctypes.c_uint8.from_address(found[1] + 2).value ^= 64
                    world.barrier()
            except fs.CollectiveMismatch as error:
                text = str(error)
            who = "rank 1" if world.size == 3 else "ranks 0, 1 hold different copies"
            assert steps == 2, "found before the third step"
            assert "'a.w'" not in text
            assert re.search(rf"{what} of 'b.w', elements \\[0, \\d+\\): {who}", text), text
            world.barrier()
            shards.close()
"""


@pytest.mark.parametrize("size", [2, 3])
def test_a_flipped_bit_of_the_state_is_found_within_n_steps(size, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(STATE))
    done = subprocess.run(
        [sys.executable, "-m", "flatshard.cli", "launch", "-n", str(size), str(script)],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_shared_weights_and_their_masters():
    """One compute copy for all: it is compared with the rounded masters."""

    def rank(world):
        shards = open_shards(world, sharding=fs.Sharding(3), precision="bf16")
        opt = fs.AdamW(shards, lr=0.01)
        shards.check()
        reduce_all(shards)
        opt.step()
        shards.check()
        world.barrier()
        if world.is_main:
            flip(weight_address(shards, "c.w", 129), 3)
        world.barrier()
        with pytest.raises(fs.CollectiveMismatch) as raised:
            shards.check()
        return str(raised.value)

    for message in fs.local_world(2).run(rank):
        expected = r"weight of 'c.w', elements \[\d+, 130\): rank 1: it is not the rounded master"
        assert re.search(expected, message), message


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "bf16-pure-sr", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_nothing_is_found_where_nothing_is_wrong(stage, precision):
    def rank(world):
        shardings = [fs.Sharding(stage, gather=gather) for gather in ("view", "copy")]
        if stage:
            shardings += [fs.Sharding(stage, gather=g, replicate=2) for g in ("view", "copy")]
        for sharding in shardings:
            shards = open_shards(world, sharding=sharding, precision=precision)
            opt = fs.AdamW(shards, lr=0.01, amsgrad=True, check_every=1)
            for _ in range(3):
                reduce_all(shards)
                opt.step(max_norm=1.0)
            shards.set_full("a.w", np.full(SHAPES["a.w"], 0.3, np.float32))
            shards.check()
            world.barrier()
            shards.close()

    fs.local_world(4).run(rank)


def test_a_split_master():
    def rank(world):
        split = fs.MixedPrecision(param="bfloat16", master="split")
        shards = open_shards(world, sharding=fs.Sharding(0, gather="copy"), precision=split)
        opt = fs.AdamW(shards, lr=0.01, check_every=1)
        for _ in range(2):
            reduce_all(shards)
            opt.step()
        shards.check()

    fs.local_world(2).run(rank)


def test_numbers_are_checked():
    def rank(world):
        shards = open_shards(world, sharding=fs.Sharding(3))
        with pytest.raises(ValueError, match="check_every=-1"):
            fs.AdamW(shards, lr=0.01, check_every=-1)

    fs.local_world(1).run(rank)

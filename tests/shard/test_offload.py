"""Offload on a device, over the stand-in for CUDA: where arrays live, and that bits do not depend
on it. What runs beneath, with every rule and precision, is tests/c/test_cuda_offload.c."""

import gc
import itertools
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

import flatshard as fs

CLASSES = ("params", "grads", "state")
SHAPES = {"a.w": (9, 5), "a.b": (7,), "b.w": (130,), "c.w": (3, 11), "c.s": ()}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Worlds that are collected while others run would wait for a device that waits for others."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def homes(*names: str) -> fs.Offload:
    return fs.Offload(**dict.fromkeys(names, "cpu"))


SETS = [names for n in (1, 2, 3) for names in itertools.combinations(CLASSES, n)]


def noise(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in SHAPES.items()}


def train(world, sharding, precision="bf16", rule=fs.AdamW, **hyper):
    """Three steps; what came out, what the ledger and the plan say, what describe says."""
    before = world.memory()
    shards = fs.shard(noise(0), world, sharding=sharding, precision=precision)
    opt = rule(shards, lr=0.1, **hyper)
    after = world.memory()
    for step in range(3):
        gradients = noise(100 + 10 * step + world.rank)
        for unit in reversed(shards.units):
            unit.reduce({n: gradients[n] for n in unit.names})
        assert opt.step(max_norm=1.0).applied
    assert world.memory() == after, "after open nothing allocates"
    hashes = fs.weights_sha256(shards), fs.state_sha256(shards)
    held = {c: tuple(after[c][i] - before[c][i] for i in (0, 1, 3)) for c in after}
    planned, said = shards.planned(), fs.describe(shards)
    world.barrier()
    shards.close()
    return hashes, held, planned, said


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_same_bits_and_the_homes_that_were_asked_for(size: int, cuda: object) -> None:
    on_cpu = fs.local_world(size).run(train, fs.Sharding(3))
    device = fs.local_world(size, device="cuda")
    bits = {row[0] for row in on_cpu}
    for names in [(), *SETS]:
        sharding = fs.Sharding(3, offload=homes(*names))
        for hashes, held, planned, said in device.run(train, sharding):
            assert hashes in bits, names
            assert held == planned, names
            for row, name in (
                ("weights", "params"),
                ("accumulators", "grads"),
                ("master", "state"),
                ("moments", "state"),
            ):
                private, world, on_device = held[row]
                assert world == 0
                assert (on_device == 0) == (name in names), (row, names)
                assert (private > 0) == (name in names), (row, names)
            for buffer, words, name in (
                ("compute copy  ", "pinned host memory", "params"),
                ("sum over ranks  ", "pinned host memory", "grads"),
                ("moments  ", "pinned host memory", "state"),
                ("update  ", "on the CPU", "state"),
            ):
                line = next(line for line in said.split("\n") if buffer in line)
                assert (words in line) == (name in names), line


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_weights_stay_on_the_device(stage: int, cuda: object) -> None:
    want = fs.local_world(2).run(train, fs.Sharding(stage))
    device = fs.local_world(2, device="cuda")
    got = device.run(train, fs.Sharding(stage, offload=homes("state", "grads")))
    assert [row[0] for row in got] == [row[0] for row in want]

    def refused(world: fs.World) -> None:
        before = world.memory()
        with pytest.raises(ValueError, match=f"stage {stage}: .* use stage 3"):
            fs.shard(noise(0), world, sharding=fs.Sharding(stage, offload=homes("params")))
        assert world.memory() == before

    device.run(refused)


@pytest.mark.parametrize(
    ("rule", "hyper"),
    [(fs.SGD, {"momentum": 0.9}), (fs.Adam, {}), (fs.Lion, {}), (fs.Adagrad, {})],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_every_rule(rule: object, hyper: dict[str, float], cuda: object) -> None:
    for precision in ("fp32", "bf16-split", "bf16-pure-sr"):

        def rank(world: fs.World, offload: fs.Offload | None, precision: str = precision) -> object:
            return train(world, fs.Sharding(3, offload=offload), precision, rule, **hyper)[0]

        device = fs.local_world(2, device="cuda")
        runs = [fs.local_world(2).run(rank, None), device.run(rank, None)]
        runs.append(device.run(rank, homes(*CLASSES)))
        assert len({bits for run in runs for bits in run}) == 1, precision


@pytest.mark.parametrize("precision", ["bf16", "bf16-split"])
def test_homes_are_read_written_and_saved(
    precision: str, tmp_path: pathlib.Path, cuda: object
) -> None:
    """Weight, master and moments are set and read back wherever they live; a checkpoint from there
    goes on here with the same bits, and the other way round."""

    def step(shards: fs.Shards, opt: fs.AdamW, seed: int) -> None:
        for unit in reversed(shards.units):
            unit.reduce({n: noise(seed)[n] for n in unit.names})
        assert opt.step(max_norm=1.0).applied

    def rank(world: fs.World, offload: fs.Offload | None, folder: str) -> list[str]:
        how = fs.Sharding(3, offload=offload)
        shards = fs.shard(noise(0), world, sharding=how, precision=precision)
        opt = fs.AdamW(shards, lr=0.1)
        if (tmp_path / folder).exists():
            fs.checkpoint.load(tmp_path / folder, shards, opt)
        else:
            step(shards, opt, 1)
            for name, shape in SHAPES.items():
                for what in ("master", "exp_avg", "exp_avg_sq"):
                    value = np.full(shape, 1 + 2.0**-12, np.float32)
                    shards.set_full(name, value, what)
                    assert np.array_equal(shards.full(name, what), value), (name, what)
                    mine, (begin, end) = shards.local(name, what)
                    assert np.array_equal(mine, value.ravel()[begin:end])
                assert (shards.full(name).astype(np.float32) == 1).all()
            fs.checkpoint.save(tmp_path / folder, shards, opt, step=1)
        seen = [fs.weights_sha256(shards), fs.state_sha256(shards)]
        step(shards, opt, 2)
        seen += [fs.weights_sha256(shards), fs.state_sha256(shards)]
        world.barrier()
        shards.close()
        return seen

    host, device = fs.local_world(2), fs.local_world(2, device="cuda")
    want = host.run(rank, None, "host")
    for names in [(), *SETS]:
        folder = "-".join(names) or "device"
        assert device.run(rank, homes(*names), folder) == want, names
        assert device.run(rank, homes(*names), "host") == want, names
        assert host.run(rank, None, folder) == want, names


def test_a_large_parameter_goes_in_pieces(cuda: object) -> None:
    # Above a million elements, which is what goes at once.
    def rank(world: fs.World, sharding: fs.Sharding) -> tuple[str, str]:
        rng = np.random.default_rng(3)
        start = rng.standard_normal((1100, 1000)).astype(np.float32)
        shards = fs.shard({"w": start}, world, sharding=sharding, precision="bf16-split")
        opt = fs.AdamW(shards, lr=0.1)
        shards.unit("w").reduce({"w": rng.standard_normal(start.shape).astype(np.float32)})
        assert opt.step().applied
        return fs.weights_sha256(shards), fs.state_sha256(shards)

    want = fs.local_world(1).run(rank, fs.Sharding(3))
    assert (
        fs.local_world(1, device="cuda").run(rank, fs.Sharding(3, offload=homes("state"))) == want
    )


def test_an_overflow_on_one_of_four_ranks_skips_on_all(cuda: object) -> None:
    """fp16, homes on the CPU: every rank skips and halves the scale, nothing moves, and the next
    step has the bits of a run on the CPU."""
    how = fs.MixedPrecision(
        param="float16",
        reduce="float16",
        master="float32",
        loss_scale=fs.LossScale(initial=1024.0, window=1),
    )

    def rank(world: fs.World, sharding: fs.Sharding) -> list[tuple[str, str]]:
        shards = fs.shard(noise(0), world, sharding=sharding, precision=how)
        opt = fs.AdamW(shards, lr=0.1)
        seen = [(fs.weights_sha256(shards), fs.state_sha256(shards))]
        for turn in range(12):
            gradients = {n: np.asarray(v) * 1024 for n, v in noise(10 * turn + world.rank).items()}
            overflows = turn % 2 == 0
            if overflows and world.rank == 2:
                gradients["b.w"][turn] = np.inf
            for unit in reversed(shards.units):
                unit.reduce({n: gradients[n] for n in unit.names})
            result = opt.step(max_norm=1.0)
            seen.append((fs.weights_sha256(shards), fs.state_sha256(shards)))
            if overflows:
                assert not result.applied and result.nonfinite == ("b.w", 2)
                assert (result.loss_scale, opt.loss_scale) == (1024.0, 512.0)
            else:
                assert result.applied and opt.loss_scale == 1024.0
            assert (seen[-1] == seen[-2]) == overflows
        world.barrier()
        shards.close()
        return seen

    want = fs.local_world(4).run(rank, fs.Sharding(3))
    device = fs.local_world(4, device="cuda")
    for names in ((), ("grads",), CLASSES):
        assert device.run(rank, fs.Sharding(3, offload=homes(*names))) == want, names


def test_the_plan_needs_no_device() -> None:
    sharding = fs.Sharding(3, gather="copy", offload=homes("state", "grads"))
    words = {"world_size": 2, "sharding": sharding, "precision": "bf16"}
    host = fs.plan(SHAPES, **words)
    plan = fs.plan(SHAPES, **words, device="cuda")
    assert host.device_nbytes == 0 and "on cuda" not in str(host)
    device = plan.device(0)
    assert device["moments"] == device["master"] == device["accumulators"] == 0
    assert plan.rank(0)["moments"] == host.rank(0)["moments"] > 0
    assert device["weights"] > 0 and device["gradients"] > 0
    assert plan.device_nbytes == sum(device.values()) or plan.device_nbytes > sum(device.values())
    assert "its device" in str(plan) and "on cuda" in str(plan)


def test_homes_that_are_not_offered() -> None:
    for name in CLASSES:
        with pytest.raises(NotImplementedError, match=f'Offload\\({name}="disk"\\)'):
            fs.Offload(**{name: "disk"})
        with pytest.raises(ValueError, match=f"Offload\\({name}="):
            fs.Offload(**{name: ("cpu", 0.5)})

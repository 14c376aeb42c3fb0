"""Checkpoints over which other libraries stumbled: padding, ties, frozen and unused parameters,
dtypes, schedules, and what a killed job left behind; each with what is right."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import flatshard as fs
from flatshard import _core, checkpoint

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]


def on(size, rank, *arguments):
    return fs.local_world(size).run(rank, *arguments)


def values(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32).reshape(s) for n, s in shapes.items()}


def grads(shapes, step, without=()):
    """The same on every rank, so that their mean does not depend on how many there are."""
    found = values(shapes, 100 + step)
    return {name: found[name] for name in shapes if name not in without}


def train(shards, opt, shapes, which, without=()):
    for step in which:
        for unit in reversed(shards.units):
            wanted = grads(shapes, step, without)
            unit.reduce({n: wanted[n] for n in unit.names if n in wanted})
        opt.step()


@pytest.mark.parametrize("size", [1, 3, 5])
def test_moments_go_on_at_another_number_of_ranks(tmp_path, size):
    """Eleven elements, saved by four ranks after three steps: three more are the same anywhere."""
    shapes = {"w": (11,)}

    def whole(world):
        shards = fs.shard(values(shapes), world)
        opt = fs.AdamW(shards, lr=0.1, eps=1e-4)
        train(shards, opt, shapes, range(3))
        checkpoint.save(tmp_path, shards, opt, step=3)
        train(shards, opt, shapes, range(3, 6))
        found = [shards.full("w", what) for what in ("weight", "exp_avg", "exp_avg_sq")]
        world.barrier()
        return found

    def resumed(world):
        shards = fs.shard(values(shapes, 5), world)
        opt = fs.AdamW(shards, lr=0.7, eps=1e-4)
        checkpoint.load(tmp_path, shards, opt)
        assert opt.lr == 0.1 and opt.state()["steps"] == {"w": 3}
        train(shards, opt, shapes, range(3, 6))
        found = [shards.full("w", what) for what in ("weight", "exp_avg", "exp_avg_sq")]
        world.barrier()
        return found

    expected = on(4, whole)[0]
    for rank in on(size, resumed):
        for got, want in zip(rank, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("numel", [4 * 3 + 1, 4 * 3 + 2, 4 * 3 + 3, 3, 1])
def test_padding_is_not_counted(tmp_path, numel):
    """Sizes that four ranks cannot share out evenly: the export has each element once."""
    shapes = {"a": (numel,), "b": (numel, 3)}

    def rank(world):
        shards = fs.shard(values(shapes), world)
        checkpoint.save(tmp_path / "run", shards, step=1)

    on(4, rank)
    checkpoint.export(tmp_path / "run", tmp_path / "model")
    found = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    expected = values(shapes)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape and (found[name] == value).all()


def test_an_export_has_what_every_rank_owns(tmp_path):
    """Three tensors, one on each of three ranks: the file that one rank writes has all."""
    shapes = {f"layers.{k}.w": (32,) for k in range(3)}

    def rank(world):
        shards = fs.shard(values(shapes), world)
        checkpoint.export(shards, tmp_path / "model")
        world.barrier()

    on(3, rank)
    path = tmp_path / "model" / "model.safetensors"
    found, expected = safetensors.numpy.load_file(path), values(shapes)
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)


def test_an_export_as_float32_holds_frozen_weights_too(tmp_path):
    """Compute copies in bf16, one parameter frozen: all of it comes out as float32, exactly."""
    shapes = {"trained": (6, 4), "frozen": (5,)}

    def rank(world):
        shards = fs.shard(values(shapes), world, precision="bf16", frozen=("frozen",))
        checkpoint.save(tmp_path / "run", shards, fs.AdamW(shards, lr=0.1), step=1)

    on(2, rank)
    checkpoint.export(tmp_path / "run", tmp_path / "model", dtype="float32")
    found = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    assert {name: value.dtype.name for name, value in found.items()} == {
        "trained": "float32", "frozen": "float32",
    }  # fmt: skip
    expected = values(shapes)
    assert (found["trained"] == expected["trained"]).all(), "the master, not its rounding"
    rounded = expected["frozen"].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (found["frozen"] == rounded).all()


def test_a_tie_is_written_once_and_both_names_come_back(tmp_path):
    shapes = {"embed": (6, 4)}

    def rank(world):
        params = values(shapes)
        params["head"] = params["embed"]
        shards = fs.shard(params, world, sharding=fs.Sharding(stage=2))
        checkpoint.save(tmp_path / "run", shards, step=1)
        return shards.full("head")

    on(2, rank)
    checkpoint.export(tmp_path / "run", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    found = safetensors.numpy.load_file(path)
    assert list(found) == ["embed"]
    assert path.stat().st_size < 6 * 4 * 4 + 512, "one table, not two"

    def load(world):
        params = values(shapes, 9)
        params["head"] = params["embed"]
        shards = fs.shard(params, world)
        checkpoint.load(tmp_path / "run", shards)
        world.barrier()
        checkpoint.read_weights(shards, tmp_path / "model")
        assert (shards.full("embed") == found["embed"]).all()
        assert (shards.full("head") == found["embed"]).all()
        world.barrier()

    on(3, load)


def test_a_parameter_that_never_had_a_gradient(tmp_path):
    """The first of two: its step count stays 0, the other's is not taken for it, and training goes
    on with the same bits."""
    shapes = {"first": (5,), "second": (7,)}

    def rank(world, resume):
        shards = fs.shard(values(shapes), world)
        opt = fs.AdamW(shards, lr=0.1)
        if resume:
            checkpoint.load(tmp_path, shards, opt)
        else:
            train(shards, opt, shapes, range(3), without=("first",))
            checkpoint.save(tmp_path, shards, opt, step=3)
        assert opt.state()["steps"] == {"first": 0, "second": 3}
        train(shards, opt, shapes, range(3, 6))
        assert opt.state()["steps"] == {"first": 3, "second": 6}
        digest = fs.weights_sha256(shards), fs.state_sha256(shards)
        world.barrier()
        return digest

    assert on(2, rank, False) == on(2, rank, True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_dtype_changes_only_when_it_is_asked_to(tmp_path, dtype):
    """A file in a narrow dtype into float32 masters and out again: the same bits, or float32."""
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    source = {n: v.astype(narrow) for n, v in values({"a": (9, 3), "b": (4,)}).items()}
    (tmp_path / "in").mkdir()
    safetensors.numpy.save_file(source, tmp_path / "in" / "model.safetensors")
    precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]

    def rank(world):
        shards = fs.shard(values({"a": (9, 3), "b": (4,)}, 3), world, precision=precision)
        read = checkpoint.read_weights(shards, tmp_path / "in")
        assert read.dtypes == ({"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype],)
        for name, value in source.items():
            assert (shards.full(name, "master") == value.astype(np.float32)).all()
        world.barrier()
        checkpoint.export(shards, tmp_path / "same")
        checkpoint.export(shards, tmp_path / "wide", dtype="float32")
        world.barrier()

    on(2, rank)
    same = safetensors.numpy.load_file(tmp_path / "same" / "model.safetensors")
    wide = safetensors.numpy.load_file(tmp_path / "wide" / "model.safetensors")
    for name, value in source.items():
        assert same[name].dtype == value.dtype and same[name].tobytes() == value.tobytes()
        assert wide[name].dtype == np.float32 and (wide[name] == value.astype(np.float32)).all()


def test_a_schedule_goes_on_where_it_was(tmp_path):
    """Saved at step 4 of a warm-up of 10: the rate is that of step 4, and the next one's of 5."""
    schedule = fs.schedule.linear(1.0, warmup=10, total=100)

    def rank(world, resume):
        shards = fs.shard(values({"w": (4,)}), world)
        opt = fs.SGD(shards, lr=1.0)
        rates = []
        if resume:
            loaded = checkpoint.load(tmp_path, shards, opt)
            assert loaded.step == 4 == opt.steps_applied
        for _ in range(opt.steps_applied, 6):
            for unit in shards.units:
                unit.reduce({"w": np.ones(4, np.float32)})
            rates.append(schedule(opt.steps_applied))
            result = opt.step(lr=rates[-1])
            if result.step == 4 and not resume:
                checkpoint.save(tmp_path, shards, opt, step=4)
        found = rates, shards.full("w").tolist()
        world.barrier()
        return found

    (rates, weights), _ = on(2, rank, False)
    (rest, resumed), _ = on(2, rank, True)
    assert rest == rates[4:] and len(set(rates)) == 6
    assert resumed == weights


def test_files_of_another_job_are_neither_read_nor_kept(tmp_path):
    """Half checkpoints of a job with larger and smaller files lie in the folder."""
    for name, nbytes in (("larger", 1 << 16), ("smaller", 10)):
        left = tmp_path / f".saving-step-000001-1-{name}"
        left.mkdir()
        (left / "rank-00000-of-00002.safetensors").write_bytes(b"\xff" * nbytes)
    (tmp_path / ".removing-step-000000").mkdir()

    def rank(world):
        shards = fs.shard(values({"w": (50,)}), world)
        checkpoint.save(tmp_path, shards, step=1)
        before = fs.weights_sha256(shards)
        assert checkpoint.load(tmp_path, shards).step == 1
        assert fs.weights_sha256(shards) == before

    on(2, rank)
    assert os.listdir(tmp_path) == ["step-000001"] and checkpoint.verify(tmp_path) == []
    files = json.loads((tmp_path / "step-000001" / "index.json").read_text())["files"]
    for entry in files:
        path = tmp_path / "step-000001" / entry["name"]
        assert path.stat().st_size == entry["nbytes"] < 2000


@pytest.mark.parametrize("metadata", [{"k": "v"}, {}])
def test_a_file_without_tensors(tmp_path, metadata):
    path = tmp_path / "empty.safetensors"
    _core.safetensors_write(path, (), (), metadata)
    assert _core.safetensors_header(path) == (metadata, [])
    with safetensors.safe_open(path, "np") as file:
        assert list(file.keys()) == [] and (file.metadata() or {}) == metadata

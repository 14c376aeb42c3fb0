"""Saving and loading: exact resume, any shape of job, user data, refusals before it starts."""

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import small

import flatshard as fs
from flatshard import _core, checkpoint
from flatshard.errors import CheckpointError, WorldError
from flatshard.job import local_world
from flatshard.optim import SGD, AdamW
from flatshard.shard import shard

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

CASES = [  # every value and every pair of stage, partition, gather, precision; worlds in turn
    (1, 0, "flat", "view", "fp32"),
    (2, 0, "per_parameter", "copy", "bf16"),
    (3, 1, "flat", "copy", "bf16"),
    (2, 1, "per_parameter", "view", "fp32"),
    (4, 2, "flat", "view", "bf16"),
    (3, 2, "per_parameter", "copy", "fp32"),
    (5, 3, "flat", "view", "fp32"),
    (2, 3, "flat", "copy", "bf16-pure"),
    (3, 3, "per_parameter", "view", "bf16"),
    (4, 3, "per_parameter", "copy", "fp32"),
    (2, 0, "flat", "view", "bf16-pure"),
    (8, 3, "flat", "view", "bf16"),
]


@pytest.mark.parametrize(("size", "stage", "partition", "gather", "precision"), CASES)
def test_resume_is_exact(tmp_path, size, stage, partition, gather, precision) -> None:
    """Three steps, a save, three more: a fresh job from the save ends with the same bits."""
    how = {"stage": stage, "partition": partition, "gather": gather, "precision": precision}

    def uninterrupted(world):
        shards = small.build(world, **how)
        opt = small.optimizer(shards)
        for number in range(3):
            small.step(shards, opt, number)
        user = {"rank": world.rank, "position": [1, 2.5, None, "é"]}
        saving = checkpoint.save(tmp_path, shards, opt, step=3, user=user).wait()
        assert os.path.basename(saving.folder) == "step-000003"
        at_save = small.hashes(shards)
        for number in range(3, 6):
            small.step(shards, opt, number)
        return at_save, small.hashes(shards), opt.state()

    def resumed(world):
        shards = small.build(world, **how, seed=9)
        opt = small.optimizer(shards)
        loaded = checkpoint.load(tmp_path, shards, opt)
        assert (loaded.step, loaded.skipped) == (3, ())
        assert loaded.user == {"rank": world.rank, "position": [1, 2.5, None, "é"]}
        at_save = small.hashes(shards)
        for number in range(3, 6):
            small.step(shards, opt, number)
        return at_save, small.hashes(shards), opt.state()

    first, second = local_world(size).run(uninterrupted), local_world(size).run(resumed)
    assert first == second
    assert len({str(each[:2]) for each in first}) == 1
    assert first[0][2]["steps"]["norm.weight"] == 3 and first[0][2]["steps"]["layers.1.scale"] == 6


RESUME = """
import sys
sys.path.insert(0, sys.argv[1])
import small
import flatshard as fs

with fs.init(timeout=60.0) as world:
    shards = small.build(world, precision="bf16", seed=4)
    opt = small.optimizer(shards)
    assert fs.checkpoint.load(sys.argv[2], shards, opt).step == 3
    for number in range(3, 6):
        small.step(shards, opt, number)
    fs.checkpoint.save(sys.argv[3], shards, opt, step=6)
    print(*small.hashes(shards))
"""


def test_processes_go_on_where_threads_stopped(tmp_path) -> None:
    def threads(world):
        shards = small.build(world, precision="bf16")
        opt = small.optimizer(shards)
        for number in range(6):
            if number == 3:
                checkpoint.save(tmp_path / "three", shards, opt, step=3)
            small.step(shards, opt, number)
        checkpoint.save(tmp_path / "threads", shards, opt, step=6)
        return small.hashes(shards)

    expected = local_world(2).run(threads)[0]
    here = os.path.dirname(os.path.abspath(__file__))
    package = os.path.dirname(os.path.dirname(os.path.abspath(checkpoint.__file__)))
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": "29876", "TORCHELASTIC_RUN_ID": f"resume-{os.getpid()}"}
    words = [sys.executable, "-c", RESUME, here]
    words += [str(tmp_path / "three"), str(tmp_path / "processes")]
    ranks = [
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "PYTHONPATH": package, "RANK": r, "LOCAL_RANK": r},
        )
        for r in "01"
    ]
    try:
        found = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert found == [list(expected)] * 2
    for name in ("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"):
        left, right = (tmp_path / how / "step-000006" / name for how in ("threads", "processes"))
        assert left.read_bytes() == right.read_bytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_shape_loads_what_any_other_saved(tmp_path, precision) -> None:
    def save(world):
        shards = small.build(world, stage=3, precision=precision)
        opt = small.optimizer(shards)
        small.step(shards, opt, 1)
        checkpoint.save(tmp_path, shards, opt, step=1, user="same on every rank")
        return small.hashes(shards)

    expected = local_world(4).run(save)[0]

    for size, stage, partition, gather in [
        (1, 3, "flat", "view"),
        (2, 0, "per_parameter", "copy"),
        (3, 1, "flat", "copy"),
        (5, 2, "per_parameter", "view"),
        (8, 3, "per_parameter", "copy"),
    ]:

        def load(world, stage=stage, partition=partition, gather=gather):
            shards = small.build(
                world, stage=stage, partition=partition, gather=gather, precision=precision, seed=5
            )
            opt = small.optimizer(shards)
            assert checkpoint.load(tmp_path, shards, opt).user == "same on every rank"
            # What is computed with, too: the rounded master, on every rank.
            for name in small.SHAPES:
                weight, master = shards.full(name), shards.full(name, "master")
                assert weight.tobytes() == master.astype(weight.dtype).tobytes()
            return small.hashes(shards)

        assert set(local_world(size).run(load)) == {expected}, (size, stage, partition, gather)


def test_user_data_of_each_rank_needs_the_same_ranks(tmp_path) -> None:
    def save(world):
        checkpoint.save(tmp_path, small.build(world), step=0, user=world.rank)

    local_world(2).run(save)

    def load(world):
        shards = small.build(world, seed=3)
        before = small.hashes(shards)
        with pytest.raises(CheckpointError, match="2 ranks saved user data of its own"):
            checkpoint.load(tmp_path, shards)
        assert small.hashes(shards) == before
        assert checkpoint.load(tmp_path, shards, weights_only=True).user is None

    local_world(3).run(load)


def test_latest_is_the_highest_serial_also_after_a_rollback(tmp_path) -> None:
    def body(world):
        shards = small.build(world)
        opt = small.optimizer(shards)
        for number in range(1, 4):
            small.step(shards, opt, number)
            checkpoint.save(tmp_path, shards, opt, step=number)
        assert checkpoint.load(tmp_path, shards, opt, step=2).step == 2
        at_two = small.hashes(shards)
        checkpoint.save(tmp_path, shards, opt, step=2)  # a second folder of step 2
        small.step(shards, opt, 7)
        assert checkpoint.load(tmp_path, shards, opt).step == 2
        assert small.hashes(shards) == at_two
        with pytest.raises(CheckpointError, match="no checkpoint of step 9; there are: 2, 3, 2, 1"):
            checkpoint.load(tmp_path, shards, opt, step=9)

    local_world(2).run(body)
    assert sorted(os.listdir(tmp_path)) == [
        "step-000001", "step-000002", "step-000002-2", "step-000003",
    ]  # fmt: skip
    assert checkpoint.steps(tmp_path) == [2, 3, 2, 1]


def test_keep_removes_the_oldest_after_the_new_one_is_there(tmp_path) -> None:
    def body(world):
        shards = small.build(world)
        for number in range(5):
            checkpoint.save(tmp_path, shards, step=number, keep=2)

    local_world(2).run(body)
    assert sorted(os.listdir(tmp_path)) == ["step-000003", "step-000004"]


def test_what_stands_in_files_and_index(tmp_path) -> None:
    """Masters are written, compute copies are not; ties once; frozen weights without state."""

    def body(world):
        shards = small.build(world, precision="bf16")
        opt = small.optimizer(shards)
        small.step(shards, opt, 1)
        checkpoint.save(tmp_path, shards, opt, step=1)
        memory = world.memory()["checkpoint"]
        assert memory[0] == memory[1] == 0, "buffers are given back"
        assert 0 < memory[2] <= 8 << 20, "and were charged"

    local_world(2).run(body)
    index = json.loads((tmp_path / "step-000001" / "index.json").read_text())
    assert (index["format"], index["step"], index["serial"], index["world_size"]) == (1, 1, 1, 2)
    assert index["partition"] == "flat" and index["stage"] == 3
    parameters = {p["name"]: p for p in index["parameters"]}
    assert parameters["embed.weight"]["tied_name"] == "head.weight"
    assert parameters["embed.weight"]["dtype"] == "float32"
    assert parameters["layers.0.frozen"]["dtype"] == "bfloat16"
    nbytes = sum(file["nbytes"] for file in index["files"])
    trained = sum(int(np.prod(s)) for n, s in small.SHAPES.items() if n not in small.FROZEN)
    assert trained * 12 + 15 * 2 < nbytes < trained * 12 + 15 * 2 + 2 * 4096

    from safetensors import safe_open

    with safe_open(tmp_path / "step-000001" / index["files"][0]["name"], "np") as file:
        assert file.metadata() == {"format": "flatshard 1", "rank": "0", "world_size": "2"}
        states = {name.split(":")[1] for name in file.keys()}  # noqa: SIM118
    assert states == {"weight", "moment1", "moment2"}


# -- refusals --------------------------------------------------------------------------------------


def test_nothing_there(tmp_path) -> None:
    def body(world):
        shards = small.build(world)
        with pytest.raises(CheckpointError, match="no such folder"):
            checkpoint.load(tmp_path / "none", shards)
        with pytest.raises(CheckpointError, match="nothing was committed there"):
            checkpoint.load(tmp_path, shards)

    (tmp_path / "step-000007").mkdir()  # a folder without an index was never committed
    local_world(2).run(body)


def test_a_checkpoint_of_another_model(tmp_path) -> None:
    def save(world):
        checkpoint.save(tmp_path, small.build(world), step=1)

    local_world(2).run(save)

    def load(world):
        params = small.values()
        del params["layers.1.scale"], params["head.weight"]
        params["layers.2.scale"] = np.zeros((), np.float32)
        shards = shard(params, world)
        before = shards.full("norm.weight")
        with pytest.raises(
            CheckpointError, match=r"it lacks layers.2.scale; it has besides layers.1.scale"
        ):
            checkpoint.load(tmp_path, shards)
        assert (shards.full("norm.weight") == before).all()
        loaded = checkpoint.load(tmp_path, shards, strict=False, cast=True)
        assert loaded.missing == ("layers.2.scale",)
        assert loaded.unexpected == ("layers.1.scale",)
        assert (shards.full("norm.weight") == small.values()["norm.weight"]).all()
        params["norm.weight"] = np.zeros((1, 2), np.float32)
        with pytest.raises(CheckpointError, match=r"norm.weight is \[2\] there and \[1, 2\] here"):
            checkpoint.load(tmp_path, shard(params, world), strict=False)

    local_world(2).run(load)


def test_dtypes_must_be_equal_unless_cast(tmp_path) -> None:
    def save(world):
        shards = small.build(world, precision="bf16-pure")
        opt = small.optimizer(shards)
        small.step(shards, opt, 1)
        checkpoint.save(tmp_path, shards, opt, step=1)
        return {name: shards.full(name, "exp_avg") for name in small.SHAPES if "frozen" not in name}

    moments = local_world(2).run(save)[0]

    def load(world):
        shards = small.build(world, precision="fp32")
        opt = small.optimizer(shards)
        with pytest.raises(CheckpointError, match="is bfloat16 there and float32 here"):
            checkpoint.load(tmp_path, shards, opt)
        checkpoint.load(tmp_path, shards, opt, cast=True)
        for name, moment in moments.items():
            assert moment.dtype == ml_dtypes.bfloat16
            assert (shards.full(name, "exp_avg") == moment.astype(np.float32)).all()

    local_world(3).run(load)


def test_optimizers_must_agree(tmp_path) -> None:
    def save(world):
        shards = small.build(world)
        checkpoint.save(tmp_path / "bare", shards, step=1)
        checkpoint.save(tmp_path / "adamw", shards, AdamW(shards, lr=0.1), step=1)

    local_world(2).run(save)

    def load(world):
        shards = small.build(world)
        sgd = SGD(shards, lr=0.1, momentum=0.9)
        with pytest.raises(CheckpointError, match="without an optimizer"):
            checkpoint.load(tmp_path / "bare", shards, sgd)
        with pytest.raises(ValueError, match="rule AdamW, this one SGD"):
            checkpoint.load(tmp_path / "adamw", shards, sgd)
        checkpoint.load(tmp_path / "adamw", shards, sgd, weights_only=True)
        checkpoint.load(tmp_path / "adamw", shards)

    local_world(2).run(load)


def test_bad_arguments_raise_on_every_rank(tmp_path) -> None:
    def body(world):
        shards = small.build(world)
        with pytest.raises(TypeError, match=r"(rank 1: )?user: cannot be saved as JSON"):
            checkpoint.save(tmp_path, shards, step=1, user=object() if world.rank == 1 else None)
        with pytest.raises(ValueError, match="Out of range float values"):
            checkpoint.save(tmp_path, shards, step=1, user=float("nan"))
        with pytest.raises(ValueError, match="ranks are at different steps: 0, 1"):
            checkpoint.save(tmp_path, shards, step=world.rank)
        with pytest.raises(ValueError, match="step=-1"):
            checkpoint.save(tmp_path, shards, step=-1)
        with pytest.raises(ValueError, match="keep=0"):
            checkpoint.save(tmp_path, shards, step=1, keep=0)
        with pytest.raises(NotImplementedError, match=r"checkpoint\.export"):
            checkpoint.save(tmp_path, shards, step=1, kind="full")
        with pytest.raises(TypeError, match="expected Shards"):
            checkpoint.save(tmp_path, {}, step=1)

    local_world(2).run(body)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("size", "precision"), [(1, "fp32"), (3, "bf16")])
def test_in_the_background(tmp_path, size, precision) -> None:
    """Training goes on; what is committed is the moment of the call, and only when waited for."""

    def body(world):
        shards = small.build(world, precision=precision)
        opt = small.optimizer(shards)
        small.step(shards, opt, 1)
        there = small.hashes(shards)
        first = checkpoint.save(tmp_path, shards, opt, step=1, user=[1], background=True)
        for number in range(2, 5):
            small.step(shards, opt, number)
        world.barrier()
        assert checkpoint.steps(tmp_path) == []
        assert first.wait() is first
        assert checkpoint.steps(tmp_path) == [1]
        assert world.memory()["checkpoint"][0] == 0, "the copy is given back"
        after = small.hashes(shards)
        loaded = checkpoint.load(tmp_path, shards, opt)
        assert (loaded.step, loaded.user) == (1, [1])
        assert small.hashes(shards) == there != after
        # The next save and the next load see to the one before.
        checkpoint.save(tmp_path, shards, opt, step=2, background=True)
        checkpoint.save(tmp_path, shards, opt, step=3, background=True, keep=2)
        assert checkpoint.load(tmp_path, shards, opt).step == 3
        world.barrier()
        assert checkpoint.steps(tmp_path) == [3, 2]
        return there

    expected = local_world(size).run(body)[0]
    assert checkpoint.verify(tmp_path) == []
    assert all(not name.startswith(".") for name in os.listdir(tmp_path))

    def load(world):
        shards = small.build(world, precision=precision)
        checkpoint.load(tmp_path, shards, small.optimizer(shards))
        return small.hashes(shards)

    assert local_world(2).run(load)[0] == expected


def test_a_failure_in_the_background_is_told_to_all(tmp_path, monkeypatch) -> None:
    write, calls = _core.snapshot_write, iter(range(100))

    def failing(snapshot, folder):
        if next(calls) == 1:
            raise OSError(28, "No space left on device", f"{folder}/x")
        return write(snapshot, folder)

    monkeypatch.setattr(_core, "snapshot_write", failing)

    def body(world):
        shards = small.build(world)
        saving = checkpoint.save(tmp_path, shards, step=1, background=True)
        with pytest.raises(OSError, match="No space left") as caught:
            saving.wait()
        assert caught.value.errno == 28
        assert saving.wait() is saving, "told once"
        world.barrier()
        assert os.listdir(tmp_path) == []
        checkpoint.save(tmp_path, shards, step=2)

    local_world(3).run(body)
    assert checkpoint.steps(tmp_path) == [2]


def test_a_torn_model_is_not_saved(tmp_path) -> None:
    """A fault in a step's last wait leaves some weights new and some old: save says no."""
    torn: list[int] = []

    def body(world, nth):
        shards = small.build(world)
        opt = small.optimizer(shards)
        checkpoint.save(tmp_path, shards, opt, step=1, keep=1)
        world.barrier()
        if world.rank == 0:
            _core.wait_fault_at(nth, 3)
        try:
            small.step(shards, opt, 2)
        except (WorldError, KeyboardInterrupt):
            try:
                shards._core.check_whole()
            except RuntimeError:
                torn.append(nth)
                with pytest.raises(RuntimeError, match="last good checkpoint there is of step 1"):
                    checkpoint.save(tmp_path, shards, opt, step=2)
            raise

    # Waits of both ranks are counted as they come, and one whose peer was quick is over before the
    # fault: which wait is the last differs from sweep to sweep.
    for _ in range(20):
        for nth in range(1, 60):
            try:
                local_world(2).run(body, nth)
            except (WorldError, KeyboardInterrupt):
                continue
            finally:
                _core.wait_fault_at(0, 0)
            break
        else:
            pytest.fail("every step was interrupted")
        if torn:
            break
    assert torn, "no fault fell into the last waits of a step"
    assert checkpoint.steps(tmp_path) == [1]


def test_a_rank_that_ends_ends_the_save_of_the_others(tmp_path) -> None:
    """No half checkpoint stays, and nobody waits."""

    def body(world):
        shards = small.build(world)
        if world.rank == 1:
            raise RuntimeError("this rank gives up")
        with pytest.raises(WorldError):
            checkpoint.save(tmp_path, shards, step=1)
        raise RuntimeError("as expected")

    with pytest.raises(RuntimeError):
        local_world(2).run(body)
    assert not [name for name in os.listdir(tmp_path) if not name.startswith(".")]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("size", "stage", "partition", "precision", "optimizer"),
    [
        (1, 0, "flat", "fp32", "sgd"),
        (2, 3, "flat", "bf16", "adamw"),
        (3, 2, "per_parameter", "bf16-pure", "lion"),
        (5, 0, "per_parameter", "fp32", "adamw-amsgrad"),
        (4, 1, "flat", "bf16", "adam"),
    ],
)
def test_the_copy_behind_the_training_is_in_the_plan(
    tmp_path, size, stage, partition, precision, optimizer
) -> None:
    """To the byte, and nothing else of the plan changes."""
    shapes = {"layers.0.w": (31, 7), "layers.1.w": (5,), "scale": (), "none": (0, 3)}
    how = {"sharding": fs.Sharding(stage, partition=partition), "precision": precision}
    plain = fs.plan(shapes, world_size=size, optimizer=optimizer, **how)
    planned = fs.plan(shapes, world_size=size, optimizer=optimizer, background=True, **how)
    assert "saves in the background" in planned.what

    def body(world):
        shards = shard({n: np.ones(s, np.float32) for n, s in shapes.items()}, world, **how)
        opt = {
            "sgd": lambda: SGD(shards, lr=0.1),
            "adam": lambda: fs.Adam(shards, lr=0.1),
            "adamw": lambda: AdamW(shards, lr=0.1),
            "adamw-amsgrad": lambda: AdamW(shards, lr=0.1, amsgrad=True),
            "lion": lambda: fs.Lion(shards, lr=0.1),
        }[optimizer]()
        checkpoint.save(tmp_path, shards, opt, step=1, background=True).wait()
        return world.memory()["checkpoint"]

    for rank, (private, shared, peak, device) in enumerate(local_world(size).run(body)):
        assert (private, shared, device) == (0, 0, 0)
        wanted = planned.rank(rank)
        assert peak == wanted.pop("checkpoint") > 0
        assert wanted == {n: b for n, b in plain.rank(rank).items() if n != "checkpoint"}
        assert plain.rank(rank)["checkpoint"] == 0

"""Folders of DeepSpeed at ZeRO stages 1, 2 and 3: weights and moments with the bits it says."""

import math
import shutil

import converted
import ml_dtypes
import numpy as np
import pytest
import torch_zip

import flatshard as fs
from flatshard import _folders, checkpoint
from flatshard.cli.__main__ import main
from flatshard.convert import _deepspeed_files, _deepspeed_layouts, _foreign
from flatshard.errors import CheckpointError

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

TIE = {"head.weight": "embed.weight"}
STAGES = (1, 2, 3)


def source_of(stage: int):
    return converted.FIXTURES / f"deepspeed-{stage}"


def check(source, run, stage: int) -> None:
    """Converts and loads with tie, frozen parameters and groups, at other shapes."""
    report = checkpoint.convert(source, run, ties=TIE)
    assert (report.kind, report.step, report.rule) == (f"DeepSpeed ZeRO-{stage} folder", 3, "AdamW")
    assert report.ties == (("head.weight", "embed.weight"),)
    assert report.frozen == ("still.weight", "still.bias")
    assert {what for what, _ in report.left_out} == {"table", "counts", "note"}
    assert checkpoint.verify(run) == []
    truth = converted.truth_of(source)
    assert len(truth) == report.parameters == 8
    half = truth["still.weight"]["weight"].dtype == ml_dtypes.bfloat16
    for size, sharding in ((3, {"stage": 1}), (5, {"stage": 3, "partition": "per_parameter"})):
        # The masters of a bf16 run are fp32, its frozen weights bf16: as the preset has them.
        precision = "bf16" if half else "fp32"
        _, state = converted.loads(
            run, truth, ties=TIE.items(), size=size, precision=precision, steps=3, **sharding
        )
        decay, plain = state["groups"]
        assert set(decay["params"]) == {"embed.weight", "up.weight", "down.weight"}
        assert (decay["weight_decay"], decay["lr"]) == (0.1, 1e-2)
        assert set(plain["params"]) == {"up.bias", "down.bias", "scale"}
        assert (plain["name"], plain["weight_decay"]) == ("no_decay", 0.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage(tmp_path, stage) -> None:
    check(source_of(stage), tmp_path, stage)


def test_everything_widened(tmp_path, capsys) -> None:
    """Frozen weights too: no half-width entry is left in an export that asks for fp32."""
    out = tmp_path / "run"
    words = ["convert", str(source_of(2) / "global_step3"), str(out), "--dtype", "float32"]
    assert main(words) == 0
    assert "no optimizer" not in capsys.readouterr().out
    truth = {n: {k: a.astype(np.float32) for k, a in t.items()} for n, t in
             converted.truth_of(source_of(2)).items()}  # fmt: skip
    converted.loads(out, truth, ties=TIE.items(), steps=3)
    checkpoint.export(out, tmp_path / "hf", dtype="float32")
    pieces = _folders.foreign_catalog(str(tmp_path / "hf")).pieces()
    assert len(pieces) == 8 and {piece[2] for piece in pieces} == {"F32"}


def test_training_goes_on(tmp_path) -> None:
    """A step after the load is the step that the same arrays give by hand (AdamW in float64)."""
    checkpoint.convert(source_of(1), tmp_path, ties=TIE)
    truth = converted.truth_of(source_of(1))
    params = {name: np.zeros(t["weight"].shape, np.float32) for name, t in truth.items()}
    params["head.weight"] = params["embed.weight"]
    frozen = tuple(name for name, t in truth.items() if "exp_avg" not in t)

    def body(world):
        shards = fs.shard(params, world, frozen=frozen)
        opt = fs.AdamW(shards, lr=1.0)
        checkpoint.load(tmp_path, shards, opt)
        for unit in reversed(shards.units):
            grads = {n: np.full(params[n].shape, 0.25, np.float32) for n in unit.names
                     if n not in frozen and n != "head.weight"}  # fmt: skip
            unit.reduce(grads)
        assert opt.step().step == 4
        found = {name: shards.full(name) for name in truth}
        world.barrier()
        return found

    got = fs.local_world(2).run(body)[0]
    for name, arrays in truth.items():
        w = arrays["weight"].astype(np.float64)
        if name not in frozen:
            decay = 0.1 if w.ndim > 1 else 0.0
            m = 0.9 * arrays["exp_avg"].astype(np.float64) + 0.1 * 0.25
            v = 0.999 * arrays["exp_avg_sq"].astype(np.float64) + 0.001 * 0.25**2
            w *= 1 - 1e-2 * decay
            w -= 1e-2 * (m / (1 - 0.9**4)) / (np.sqrt(v / (1 - 0.999**4)) + 1e-8)
        np.testing.assert_allclose(got[name], w, rtol=3e-6, atol=3e-7)


def test_a_tie_of_stage_3_is_said_or_told_about(tmp_path) -> None:
    for stage in STAGES:
        assert checkpoint.convert(source_of(stage), None).ties == tuple(TIE.items())
    # Ranks but the first do not say it; as the first one they make it a name without a value.
    source, inner = copy(tmp_path, 3)
    files = [inner / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (1, 0)]
    shutil.copy(*files)
    report = checkpoint.convert(source, None)
    assert report.ties == () and "head.weight: stage 3 keeps no value" in str(report)
    with pytest.raises(CheckpointError, match=r"called haed\.weight; the nearest is head\.weight"):
        checkpoint.convert(source, None, ties={"haed.weight": "embed.weight"})
    assert checkpoint.convert(source, None, ties=TIE).ties == tuple(TIE.items())


def test_versions_that_do_not_say_where_a_parameter_lies() -> None:
    """End to end over the ranks: what newer versions say of the same files."""
    with _foreign.opened(str(source_of(2) / "global_step3")) as folder:
        models, files = _deepspeed_files.read_files(folder)
        shapes = _deepspeed_files.shapes_of(models[0])
        foreign = _foreign.Foreign("")
        key, inner = "single_partition_of_fp32_groups", "base_optimizer_state"
        buffers = _deepspeed_layouts._buffers(foreign, files, key, inner, 2)
        for g, group in enumerate(shapes):
            ranks = [rank[g] for rank in buffers]
            said = _deepspeed_layouts._mapped(files, g, group, ranks)
            assert said == _deepspeed_layouts._in_order(files, g, group, ranks)
            assert any(len(places) == 2 for places in said.values()) or g == 1
            assert sum(n for p in said.values() for _, _, n in p) == sum(
                math.prod(shape) for shape in group.values()
            )
        more = {**shapes[0], "other": (30,)}
        with pytest.raises(CheckpointError, match="the layout of this version is not known"):
            _deepspeed_layouts._in_order(files, 0, more, [rank[0] for rank in buffers])


def write_fp16(folder, params, *, ranks, elastic) -> dict[str, dict[str, np.ndarray]]:
    """A ZeRO-2 folder of an fp16 run as older versions write it: no slice mappings, step counts by
    group, a dynamic loss scale; ``elastic``: states as a list. Its truth."""
    rng = np.random.default_rng(1)
    truth = {
        name: {k: rng.standard_normal(shape).astype(np.float32) ** 2
               for k in ("weight", "exp_avg", "exp_avg_sq")}
        for name, shape in params.items()
    }  # fmt: skip
    folder.mkdir(parents=True)
    inner = folder / "global_step7"
    inner.mkdir()
    (folder / "latest").write_text("global_step7\n")
    torch_zip.write(inner / "mp_rank_00_model_states.pt", {
        "module": {n: t["weight"].astype(np.float16) for n, t in truth.items()},
        "buffer_names": [], "param_shapes": [params], "global_steps": 7, "dp_world_size": ranks,
        "ds_config": {"optimizer": {"type": "Adam"}},
    })  # fmt: skip
    flat = {
        k: np.concatenate([t[k].reshape(-1) for t in truth.values()])
        for k in ("weight", "exp_avg", "exp_avg_sq")
    }
    numel = flat["weight"].size
    part = -(-numel // (2 * ranks)) * 2
    for rank in range(ranks):
        mine = {k: np.zeros(part, np.float32) for k in flat}
        for k, whole in flat.items():
            piece = whole[rank * part : (rank + 1) * part]
            mine[k][: piece.size] = piece
        state = {k: v for k, v in mine.items() if k != "weight"}
        base = {"state": {0: state}, "param_groups": [
            {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0, "step": 7,
             "params": [0]}]}  # fmt: skip
        scaler = torch_zip.Made(
            "deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", cur_scale=1024.0,
            cur_iter=9, last_overflow_iter=1, scale_window=100, cur_hysteresis=2, dynamic=True,
        )  # fmt: skip
        torch_zip.write(inner / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {
            "optimizer_state_dict": {
                "zero_stage": 2, "loss_scaler": scaler,
                "base_optimizer_state": [{**state, "step": 7}] if elastic else base,
                "single_partition_of_fp32_groups": [mine["weight"]],
            }})  # fmt: skip
    return truth


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("numel", [5, 13, 14, 15])
def test_an_fp16_run_of_an_older_version(tmp_path, numel, elastic) -> None:
    """Every remainder of elements over ranks; masters, moments, and the loss scale."""
    params = {"a": (3, 2), "b": (numel,), "c": (1,)}
    truth = write_fp16(tmp_path / "source", params, ranks=3, elastic=elastic)
    report = checkpoint.convert(tmp_path / "source", tmp_path / "run")
    assert (report.step, report.rule, report.dtypes) == (7, "AdamW", ("float32",))
    assert ("no learning rate is told" in str(report)) == elastic

    def body(world):
        zeros = {name: np.zeros(shape, np.float32) for name, shape in params.items()}
        shards = fs.shard(zeros, world, precision="fp16")
        opt = fs.AdamW(shards, lr=1.0)
        checkpoint.load(tmp_path / "run", shards, opt)
        for name, arrays in truth.items():
            assert shards.full(name, "master").tobytes() == arrays["weight"].tobytes()
            for key in ("exp_avg", "exp_avg_sq"):
                assert shards.full(name, key).tobytes() == arrays[key].tobytes()
        world.barrier()
        return opt.state()

    state = fs.local_world(2).run(body)[0]
    assert set(state["steps"].values()) == {7}
    assert state["scaler"] == {"scale": 1024.0, "clean": 7, "patience": 2}
    (group,) = state["groups"]
    assert elastic or (group["lr"], group["betas"], group["eps"]) == (0.1, [0.9, 0.95], 1e-6)


def copy(tmp_path, stage: int):
    source = tmp_path / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(source_of(stage), source)
    return source, source / "global_step3"


def refused(source, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        checkpoint.convert(source, None, ties=TIE)


def test_what_is_refused(tmp_path) -> None:
    source, inner = copy(tmp_path, 2)
    for tag, words in (
        ("../source/global_step3", "is not the name of a folder"),
        ("/etc", "is not the name of a folder"),
        ("", "is not the name of a folder"),
        ("global_step9", "there is no such folder"),
    ):
        (source / "latest").write_text(tag)
        refused(source, words)
    (source / "latest").unlink()
    refused(source, "no file 'latest': name one of global_step3")
    (source / "link").symlink_to(inner)
    (source / "latest").write_text("link")
    refused(source, "there is no such folder")

    source, inner = copy(tmp_path, 2)
    first, second = sorted(inner.glob("*optim_states.pt"))
    second.rename(inner / "away")
    refused(source, "hold .* of .* elements")
    first.rename(second)
    refused(source, "the file of rank 0 is missing")
    source, inner = copy(tmp_path, 3)
    next(inner.glob("*rank_1*model_states.pt")).unlink()
    refused(source, "hold .* elements|with .* elements")
    source, inner = copy(tmp_path, 3)
    for name, words in (
        ("zero_pp_rank_0_mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_00-model_states.pt", "pipelines and experts"),
        ("expert_0_mp_rank_00_model_states.pt", "pipelines and experts"),
    ):
        (inner / name).write_bytes(b"")
        refused(source, words)
        (inner / name).unlink()
    target = next(inner.glob("*rank_1*optim_states.pt"))
    target.rename(tmp_path / "outside.pt")
    target.symlink_to(tmp_path / "outside.pt")
    refused(source, "a link that leads out of its folder")


def test_weights_alone_need_no_optimizer_files(tmp_path) -> None:
    """Stages 1 and 2 hold the compute copies in the model's file: taken, and said to be that."""
    source, inner = copy(tmp_path, 2)
    for file in inner.glob("*optim_states.pt"):
        file.unlink()
    report = checkpoint.convert(source, tmp_path / "run")
    assert report.rule is None and report.dtypes == ("bfloat16",)
    assert "weights are the compute copies" in str(report)
    source, inner = copy(tmp_path, 3)
    for file in inner.glob("*optim_states.pt"):
        file.unlink()
    refused(source, "stage 3 keeps weights in the files of optimizer state")


def test_flipped_bits(tmp_path, rng) -> None:
    """In any file: an error of ours, or the same checkpoint."""
    for stage in STAGES:
        source, inner = copy(tmp_path, stage)
        checkpoint.convert(source, tmp_path / "good", ties=TIE)
        good = (tmp_path / "good/step-000003/rank-00000-of-00001.safetensors").read_bytes()
        files = sorted(inner.glob("*.pt"))
        for _ in range(25):
            file = files[rng.integers(len(files))]
            before = file.read_bytes()
            bad = bytearray(before)
            bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
            file.write_bytes(bad)
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            try:
                checkpoint.convert(source, tmp_path / "run", ties=TIE)
            except CheckpointError:
                assert not list((tmp_path / "run").glob("*"))
            else:
                name = "run/step-000003/rank-00000-of-00001.safetensors"
                assert (tmp_path / name).read_bytes() == good
            file.write_bytes(before)
        shutil.rmtree(tmp_path / "good")

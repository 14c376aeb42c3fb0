"""``flatshard convert``: Hugging Face folders and files, with and without optimizer state."""

import contextlib
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tracemalloc

import converted
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch_zip

import flatshard as fs
from flatshard import _folders, checkpoint
from flatshard.cli.__main__ import main
from flatshard.convert import _sources
from flatshard.errors import CheckpointError

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

LLAMA = converted.FIXTURES / "transformers"
TIE = ("lm_head.weight", "model.embed_tokens.weight")


def test_a_checkpoint_of_flatshard_hf_says_how_it_is_used(tmp_path) -> None:
    (tmp_path / "flatshard-complete.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"flatshard\.hf.*resume_from_checkpoint.*--names"):
        checkpoint.convert(tmp_path, tmp_path / "out")


def test_a_folder_of_transformers_with_its_optimizer(tmp_path) -> None:
    """Numbers of a Trainer's optimizer become names, and all of it loads at another shape."""
    report = checkpoint.convert(LLAMA, tmp_path)
    truth = converted.truth_of(LLAMA)
    assert (report.step, report.rule, report.moments) == (3, "AdamW", ("exp_avg", "exp_avg_sq"))
    assert report.parameters == len(truth) and report.dtypes == ("float32",)
    assert report.nbytes == 12 * report.numel
    assert {what for what, _ in report.left_out} >= {"scheduler.pt", "pytorch_model.bin"}
    assert "order of a llama model" in str(report) and "wrote" in str(report)
    assert checkpoint.verify(tmp_path) == [] and checkpoint.steps(tmp_path) == [3]
    for sharding in ({"stage": 3}, {"stage": 1, "partition": "per_parameter"}):
        loaded, state = converted.loads(tmp_path, truth, steps=3, **sharding)
        assert loaded.step == 3 and loaded.user is None
        (group,) = state["groups"]
        assert (group["lr"], group["weight_decay"], group["eps"]) == (1e-2, 0.1, 1e-6)


def test_a_native_model_goes_on_from_it(tmp_path) -> None:
    """The converted Llama loads with its tie, trains, and is exported as transformers wrote it."""
    checkpoint.convert(LLAMA / "pytorch_model.bin", tmp_path / "run", step=3,
                       optimizer=LLAMA / "optimizer.pt")  # fmt: skip
    truth = converted.truth_of(LLAMA)

    def body(world):
        model = fs.models.Llama.from_config(LLAMA / "config.json", world=world, precision="bf16")
        opt = fs.AdamW(model, lr=1.0)
        assert checkpoint.load(tmp_path / "run", model, opt).step == 3
        for name, arrays in truth.items():
            assert model.shards.full(name, "master").tobytes() == arrays["weight"].tobytes()
            assert model.shards.full(name, "exp_avg_sq").tobytes() == arrays["exp_avg_sq"].tobytes()
        ids = np.arange(8, dtype=np.int32)[None]
        model.forward_backward(ids, ids)
        assert opt.step().step == 4 and opt.groups[0].lr == 1e-2
        world.barrier()

    fs.local_world(2).run(body)
    checkpoint.convert(LLAMA, tmp_path / "again")
    checkpoint.export(tmp_path / "again", tmp_path / "out")
    left = safetensors.numpy.load_file(LLAMA / "model.safetensors")
    right = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(left[name].tobytes() == right[name].tobytes() for name in left)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 11


def test_the_index_is_that_of_a_save(tmp_path) -> None:
    checkpoint.convert(LLAMA, tmp_path / "run")
    (folder,) = _folders.committed(str(tmp_path / "run"))
    golden = converted.FIXTURES.parent.parent / "golden" / "checkpoint-format-1"
    (saved,) = _folders.committed(str(golden))
    ours, theirs = _folders.read_index(folder), _folders.read_index(saved)
    assert ours.raw.keys() == theirs.raw.keys()
    assert ours.optimizer is not None and theirs.optimizer is not None
    assert ours.optimizer.keys() == theirs.optimizer.keys()
    assert ours.optimizer["groups"][0].keys() >= theirs.optimizer["groups"][0].keys()
    assert os.listdir(tmp_path / "run") == ["step-000003"], "nothing hidden stays"


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_dtypes_are_kept_or_cast_as_asked(tmp_path, dtype) -> None:
    arrays = {"a.w": np.linspace(-3, 3, 30).reshape(5, 6).astype(dtype), "b": np.ones(3, dtype)}
    arrays["ids"] = np.arange(3)
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    report = checkpoint.convert(tmp_path, tmp_path / "kept")
    assert report.dtypes == (np.dtype(dtype).name,) and report.rule is None
    assert [what for what, _ in report.left_out] == ["ids"]
    wide = checkpoint.convert(tmp_path, tmp_path / "wide", dtype="float32")
    assert wide.dtypes == ("float32",)
    checkpoint.export(tmp_path / "wide", tmp_path / "out", dtype="float32")
    got = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert got["a.w"].tobytes() == arrays["a.w"].astype(np.float32).tobytes()
    # Saved without an optimizer: a load that asks for one says so.
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        converted.loads(tmp_path / "wide", {"a.w": {"weight": arrays["a.w"]}, "b": {
            "weight": arrays["b"]}})  # fmt: skip


def test_a_tie_that_is_said(tmp_path) -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    arrays = {"embed": table, "head": table.copy(), "w": np.ones(2, np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    report = checkpoint.convert(tmp_path, tmp_path / "run", ties={"head": "embed"})
    assert report.ties == (("head", "embed"),) and report.parameters == 2
    with pytest.raises(CheckpointError, match=r"no parameter is called haed; the nearest is head"):
        checkpoint.convert(tmp_path, None, ties={"haed": "embed"})
    arrays["head"][0, 0] = 5
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="head and embed are to be tied, and hold other"):
        checkpoint.convert(tmp_path, tmp_path / "run", ties={"head": "embed"})
    assert checkpoint.steps(tmp_path / "run") == [0], "a failure leaves what was there"


def test_numbers_without_an_order_are_refused(tmp_path) -> None:
    """safetensors sorts names: a known family, or the caller, says whose number is whose."""
    for name in ("model.safetensors", "optimizer.pt"):
        shutil.copy(LLAMA / name, tmp_path)
    with pytest.raises(CheckpointError, match=r"safetensors does not keep their order.*--names"):
        checkpoint.convert(tmp_path, None)
    truth = converted.truth_of(LLAMA)
    with pytest.raises(CheckpointError, match="is not that of its numbers"):
        checkpoint.convert(tmp_path, None, names=sorted(truth))
    with pytest.raises(CheckpointError, match=r"numbers 11 parameters, the names .* has 10"):
        checkpoint.convert(tmp_path, None, names=sorted(truth)[1:])
    order = [
        "model.embed_tokens.weight",
        *(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    (tmp_path / "names.json").write_text(json.dumps(order))
    out = tmp_path / "run"
    assert main(["convert", str(tmp_path), str(out), "--names", str(tmp_path / "names.json")]) == 0
    converted.loads(out, truth, size=2, steps=3)
    order[-1] = "model.norm.wieght"
    with pytest.raises(CheckpointError, match="wieght, which the weights lack; the nearest is mod"):
        checkpoint.convert(tmp_path, None, names=order)


def test_the_two_groups_of_a_trainer(tmp_path) -> None:
    """Numbered along the groups: weights that decay first, norms after them."""
    for source in (LLAMA, LLAMA / "pytorch_model.bin"):
        out = tmp_path / source.name
        other = LLAMA / "two_groups.pt"
        if source.is_dir():
            source = tmp_path / "source"
            shutil.copytree(LLAMA, source)
            (source / "optimizer.pt").unlink()
        report = checkpoint.convert(source, out, optimizer=other)
        assert "in the Trainer's two groups" in str(report)
        ties = [TIE] if report.ties else []
        _, state = converted.loads(out, converted.truth_of(LLAMA), ties=ties, steps=3)
        decay, plain = state["groups"]
        assert all("norm" in name for name in plain["params"]) and len(plain["params"]) == 3
        assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_every_file_is_closed(tmp_path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not list descriptors")
    checkpoint.convert(LLAMA, None)
    before = descriptors()
    for source in (LLAMA, converted.FIXTURES / "dcp" / "nested", converted.FIXTURES / "fsdp",
                   converted.FIXTURES / "deepspeed-3", converted.FIXTURES):  # fmt: skip
        with contextlib.suppress(CheckpointError):
            checkpoint.convert(source, None)
    with contextlib.suppress(CheckpointError):
        checkpoint.convert(
            LLAMA / "pytorch_model.bin", None, optimizer=converted.FIXTURES / "fsdp" / "by_ids.bin"
        )
    assert descriptors() == before


def test_a_tie_is_loaded_under_either_name(tmp_path) -> None:
    """Saved as embed and head, loaded by a model that meets head first; state and steps too."""
    checkpoint.convert(LLAMA / "pytorch_model.bin", tmp_path, optimizer=LLAMA / "optimizer.pt")
    truth = converted.truth_of(LLAMA)
    alias, name = TIE
    turned = {alias if n == name else n: arrays for n, arrays in truth.items()}
    loaded, state = converted.loads(tmp_path, turned, ties=[(name, alias)], steps=3)
    assert loaded.missing == loaded.unexpected == loaded.changed == ()
    assert alias in state["steps"] and name not in state["steps"]
    assert alias in state["groups"][0]["params"]
    # Untied here, under the second name alone: the values are its own from now on.
    loaded, state = converted.loads(tmp_path, turned, steps=3)
    assert loaded.changed and alias in state["steps"]


def test_ties_are_not_made_by_chance(tmp_path) -> None:
    """Equal constants, and equal vectors, stay parameters of their own."""
    same = np.arange(6, dtype=np.float32).reshape(2, 3)
    table = {"a": same, "b": same.copy(), "c": np.ones((2, 3)), "d": np.ones((2, 3))}
    arrays = {name: array.astype(np.float32) for name, array in table.items()}
    folder = tmp_path / "source"
    write_torch(folder, arrays, trained=("a", "c"))
    report = checkpoint.convert(folder, None)
    assert report.ties == (("b", "a"),) and report.frozen == ("d",)
    (folder / "config.json").write_text('{"tie_word_embeddings": false}')
    assert checkpoint.convert(folder, None).ties == ()


def test_moments_that_share_their_elements_are_refused(tmp_path) -> None:
    """A file whose second moment was written over the first cannot be gone on from."""
    arrays = {"w": np.arange(6, dtype=np.float32)}
    torch_zip.write(tmp_path / "pytorch_model.bin", arrays)
    moment = arrays["w"] + 1
    state = {"w": {"step": 2.0, "exp_avg": moment, "exp_avg_sq": moment}}
    groups = [{"params": ["w"], "lr": 0.1}]
    torch_zip.write(tmp_path / "optimizer.bin", {"state": state, "param_groups": groups})
    with pytest.raises(CheckpointError, match="exp_avg and exp_avg_sq of w are the same elements"):
        checkpoint.convert(tmp_path, None)


def write_torch(folder: pathlib.Path, arrays, *, trained) -> None:
    """Weights and AdamW's state by names in files of torch.save, written by hand."""
    folder.mkdir()
    files: dict[str, dict[str, object]] = {"pytorch_model.bin": dict(arrays), "optimizer.bin": {
        "state": {n: {"step": 2, "exp_avg": arrays[n] + 1, "exp_avg_sq": arrays[n] + 2}
                  for n in trained},
        "param_groups": [{"params": list(trained), "lr": 0.1, "betas": (0.9, 0.99)}],
    }}  # fmt: skip
    for name, content in files.items():
        torch_zip.write(folder / name, content)


def test_a_large_tensor_streams(tmp_path) -> None:
    """Memory is a few MiB whatever the tensors' size, and the cost of a check is one more read."""
    arrays = {"w": np.arange(1 << 24, dtype=np.float32).reshape(4096, 4096)}
    torch_zip.write(tmp_path / "x.bin", arrays)
    tracemalloc.start()
    try:
        checkpoint.convert(tmp_path / "x.bin", tmp_path / "run", dtype="bfloat16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20, "64 MiB of weights"
    (file,) = (tmp_path / "run").glob("*/rank-*")
    got = np.frombuffer(file.read_bytes()[-2 << 24 :], ml_dtypes.bfloat16)
    assert (got == arrays["w"].reshape(-1).astype(ml_dtypes.bfloat16)).all()


def test_a_folder_in_several_torch_files(tmp_path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"layers.{i}.w": rng.standard_normal((3, 4)).astype(np.float32) for i in range(4)}
    names = list(arrays)
    places = {}
    for file, part in (("pytorch_model-00001-of-00002.bin", names[:2]),
                       ("pytorch_model-00002-of-00002.bin", names[2:])):  # fmt: skip
        torch_zip.write(tmp_path / file, {name: arrays[name] for name in part})
        places |= dict.fromkeys(part, file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    checkpoint.convert(tmp_path, tmp_path / "run")
    checkpoint.export(tmp_path / "run", tmp_path / "out")
    got = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert all(got[name].tobytes() == array.tobytes() for name, array in arrays.items())

    index.write_text(json.dumps({"weight_map": {**places, "ghost": places[names[0]]}}))
    with pytest.raises(CheckpointError, match="its index lists ghost, no file has it"):
        checkpoint.convert(tmp_path, None)
    index.write_text(json.dumps({"weight_map": {**places, names[0]: places[names[3]]}}))
    with pytest.raises(CheckpointError, match=r"'layers\.0\.w' is in pytorch_model-00001"):
        checkpoint.convert(tmp_path, None)
    index.write_text(json.dumps({"weight_map": places}))
    (tmp_path / places[names[3]]).unlink()
    with pytest.raises(CheckpointError, match=r"00002\.bin is missing, and with it layers\.2\.w"):
        checkpoint.convert(tmp_path, None)


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    """A source that is cut while it is read, a file that may not grow, Ctrl-C: nothing half."""
    arrays = {"w": np.arange(4 << 20, dtype=np.float32)}
    torch_zip.write(tmp_path / "x.bin", arrays)
    run = tmp_path / "run"
    checkpoint.convert(LLAMA, run)

    def unchanged() -> None:
        assert os.listdir(run) == ["step-000003"] and checkpoint.verify(run) == []

    real = _sources.Stretch.read

    def cut(self, begin, end):
        if begin > 2 << 20:
            os.truncate(self.file.path, 9 << 20)
        return real(self, begin, end)

    with monkeypatch.context() as patch:
        patch.setattr(_sources.Stretch, "read", cut)
        with pytest.raises(CheckpointError, match="unexpected end of file"):
            checkpoint.convert(tmp_path / "x.bin", run)
    unchanged()
    torch_zip.write(tmp_path / "x.bin", arrays)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoint.convert(tmp_path / "x.bin", run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    unchanged()

    def interrupted(self, begin, end):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_sources.Stretch, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.convert(tmp_path / "x.bin", run)
    unchanged()


def test_wrapped_names_and_buffers(tmp_path) -> None:
    arrays = {
        "module._orig_mod.a.w": np.ones((2, 2), np.float32),
        "module._fsdp_wrapped_module.b.module.w": np.ones(3, np.float32),
        "module.x.rotary_emb.inv_freq": np.ones(3, np.float32),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    checkpoint.convert(tmp_path, tmp_path / "run")
    (folder,) = _folders.committed(str(tmp_path / "run"))
    assert {p.name for p in _folders.read_index(folder).parameters} == {"a.w", "b.module.w"}
    checkpoint.convert(tmp_path, tmp_path / "less", leave=["b.*"])
    (folder,) = _folders.committed(str(tmp_path / "less"))
    assert [p.name for p in _folders.read_index(folder).parameters] == ["a.w"]
    with pytest.raises(CheckpointError, match="nothing is called 'c"):
        checkpoint.convert(tmp_path, None, leave=["c.*"])
    arrays["module.a.w"] = arrays["module._orig_mod.a.w"]
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"are both 'a\.w'|are both 'module\.a\.w'"):
        checkpoint.convert(tmp_path, None)


def test_the_command(tmp_path, capsys) -> None:
    assert main(["convert", str(LLAMA), str(tmp_path / "run"), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == "" and not (tmp_path / "run").exists()
    assert main(["convert", str(LLAMA), str(tmp_path / "run"), "--step", "12"]) == 0
    assert "step-000012" in capsys.readouterr().out
    assert main(["fsck", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "other")]) == 1
    assert "a checkpoint of flatshard already" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "other")]) == 1
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["convert", str(tmp_path / "empty"), str(tmp_path / "other")]) == 1
    assert "holds no weights" in capsys.readouterr().err
    assert main(["convert", str(LLAMA), str(tmp_path / "other"), "--tie", "x"]) == 2
    for options in ({"dtype": "int8"}, {"rule": "Muon"}, {"step": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            checkpoint.convert(LLAMA, None, **options)


def test_nothing_is_imported_and_no_world_started(tmp_path) -> None:
    code = (
        "import pickle, sys, zipfile\nfrom flatshard.cli.__main__ import main\n"
        "pickle.load = pickle.loads = pickle.Unpickler = pickle._Unpickler = None\n"
        "zipfile.ZipFile = None\n"
        "from flatshard import _core\n"
        "for name in ('job_create', 'job_join', 'job_threads'):\n"
        "    setattr(_core, name, None)\n"
        "assert main(['convert', sys.argv[1], sys.argv[2]]) == 0\n"
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(fs.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(LLAMA), str(tmp_path / "run")],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

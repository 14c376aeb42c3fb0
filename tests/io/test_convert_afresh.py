"""Folders that PyTorch, transformers and DeepSpeed write now, by the scripts that made the
committed ones: what is installed must be read as the versions of then are."""

import contextlib
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import zipfile

import converted
import numpy as np
import pytest
import safetensors.numpy
import test_convert_deepspeed
import test_convert_torch

import flatshard as fs
from flatshard import checkpoint
from flatshard.errors import CheckpointError

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

pytest.importorskip("torch")


def make(script: str, folder: pathlib.Path, *words: str, python: str = sys.executable) -> None:
    """Runs a making script on two ranks, with a deadline for all of it."""
    command = [python, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    process = subprocess.Popen(
        [*command, str(converted.FIXTURES / script), str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            # The launcher ends its workers, which are in sessions of their own, on this one.
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=40)
            process.kill()
            process.communicate(timeout=10)
    assert process.returncode == 0, out[-3000:]


def test_torch(tmp_path) -> None:
    make("make_torch.py", tmp_path)
    truth = converted.truth_of(tmp_path / "dcp")
    for name in ("nested", "flat"):
        test_convert_torch.check_dcp(tmp_path / "dcp" / name, truth, tmp_path / f"run-{name}")
    for name in ("fsdp", "accelerate"):
        run = tmp_path / f"run-{name}"
        checkpoint.convert(tmp_path / name, run)
        truth = converted.truth_of(tmp_path / name)
        _, state = converted.loads(run, truth, ties=test_convert_torch.TIE)
        test_convert_torch.check_groups(state)
    checkpoint.convert(tmp_path / "dcp-columns", tmp_path / "run-columns")
    checkpoint.export(tmp_path / "run-columns", tmp_path / "out")
    got = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    for name, arrays in converted.truth_of(tmp_path / "dcp-columns").items():
        assert got[name].tobytes() == arrays["weight"].tobytes()


def test_everything_that_torch_may_save(tmp_path) -> None:
    """Views, strides, odd shapes and dtypes, parameters, other protocols: as torch.load has it."""
    import torch

    base = torch.arange(24.0)
    content = {
        "view": base[4:10].reshape(2, 3),
        "other view": base[8:20].reshape(3, 4),
        "transposed": base.reshape(4, 6).t(),
        "strided": base[1::3],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "half": torch.randn(5).to(torch.bfloat16),
        "double": torch.randn(5, dtype=torch.float64),
    }
    left = {
        "fp8": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "unsigned": torch.zeros(3, dtype=torch.uint16),
        "complex": torch.zeros(3, dtype=torch.complex64),
        "flags": torch.ones(3, dtype=torch.bool),
        "number": 3,
        "nothing": None,
    }
    for options in ({}, {"pickle_protocol": 4}):
        torch.save({**content, **left}, tmp_path / "x.bin", **options)
        run = tmp_path / f"run-{len(options)}"
        report = checkpoint.convert(tmp_path / "x.bin", run)
        assert {what for what, _ in report.left_out} == set(left)
        checkpoint.export(run, tmp_path / "out", dtype="float64")
        got = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
        for name, tensor in content.items():
            assert (got[name] == tensor.detach().double().numpy()).all(), name
            assert got[name].shape == tuple(tensor.shape)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, tmp_path / "x.bin")
    finally:
        torch.serialization.set_crc32_options(before)
    assert checkpoint.convert(tmp_path / "x.bin", None).parameters == len(content)

    def refused(value, words: str, **options) -> None:
        torch.save(value, tmp_path / "x.bin", **options)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.convert(tmp_path / "x.bin", None)

    refused({"w": torch.zeros(1).expand(1000)}, "reaches beyond the 1 elements of storage")
    refused(torch.nn.Linear(2, 2), "names 'torch.nn.modules.linear.Linear'")
    refused({"w": torch.zeros(2), "f": print}, "names '(builtins|__builtin__).print'")
    refused({"w": torch.zeros(2).to_sparse()}, "names 'torch._utils._rebuild_sparse_tensor'")
    refused(content, "before 1.6|no zip|header", _use_new_zipfile_serialization=False)
    archive = zipfile.ZipFile(tmp_path / "x.bin", "w")  # torch.jit.save is on its way out
    with archive:
        for name in ("data.pkl", "constants.pkl", "code/m.py", "version"):
            archive.writestr(f"m/{name}", b"")
    with pytest.raises(CheckpointError, match="a TorchScript program"):
        checkpoint.convert(tmp_path / "x.bin", None)


OPTIMIZERS = {
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, {}),
    "Adam, amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}, {"amsgrad": True}),
    "SGD, momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}, {"momentum": 0.9}),
    "SGD": ("SGD", {"lr": 0.01}, {}),
    "Adagrad": ("Adagrad", {"lr": 0.01}, {}),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("what", OPTIMIZERS)
def test_the_next_step_is_that_of_torch(tmp_path, what, steps) -> None:
    """Every rule: state by numbers in, then one step here and one step there."""
    import torch

    rule, options, ours = OPTIMIZERS[what]
    torch.manual_seed(0)
    params = {"a.weight": torch.randn(5, 3), "b": torch.randn(7)}
    params = {name: torch.nn.Parameter(p) for name, p in params.items()}
    optimizer = getattr(torch.optim, rule)(params.values(), **options)

    def grads(number: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(number)
        return {name: torch.randn(p.shape) for name, p in params.items()}

    def step(number: int) -> None:
        for name, gradient in grads(number).items():
            params[name].grad = gradient
        optimizer.step()

    for number in range(steps):
        step(number)
    torch.save({n: p.detach() for n, p in params.items()}, tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    report = checkpoint.convert(tmp_path, tmp_path / "run", rule="Adam" if steps == 0 and
                                rule == "Adam" and "amsgrad" not in ours else None)  # fmt: skip
    zeros = {name: np.zeros(p.shape, np.float32) for name, p in params.items()}

    given = {name: g.numpy() for name, g in grads(99).items()}

    def body(world):
        shards = fs.shard(zeros, world)
        opt = getattr(fs, rule)(shards, lr=9.0, **ours)
        checkpoint.load(tmp_path / "run", shards, opt)
        for unit in reversed(shards.units):
            unit.reduce({name: given[name] for name in unit.names})
        assert opt.step().step == report.step + 1
        found = {name: shards.full(name) for name in zeros}
        world.barrier()
        return found

    got = fs.local_world(2).run(body)[0]
    step(99)
    for name, p in params.items():
        np.testing.assert_allclose(got[name], p.detach().numpy(), rtol=2e-6, atol=2e-7)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")
def test_transformers(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, str(converted.FIXTURES / "make_transformers.py"), str(tmp_path / "made")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    checkpoint.convert(tmp_path / "made", tmp_path / "run")
    truth = converted.truth_of(tmp_path / "made")
    converted.loads(tmp_path / "run", truth, steps=3)
    shutil.rmtree(tmp_path / "run")
    checkpoint.convert(
        tmp_path / "made" / "pytorch_model.bin",
        tmp_path / "run",
        optimizer=tmp_path / "made" / "optimizer.pt",
    )
    converted.loads(
        tmp_path / "run", truth, ties=[("lm_head.weight", "model.embed_tokens.weight")], steps=3
    )


def with_deepspeed() -> str | None:
    """A Python that has DeepSpeed: this one, or the one that .ci/run made."""
    if importlib.util.find_spec("deepspeed") is not None:
        return sys.executable
    other = pathlib.Path(__file__).resolve().parents[2] / "build" / "others" / "bin" / "python"
    probe = "import importlib.util as u, sys; sys.exit(None in map(u.find_spec, sys.argv[1:]))"
    if not other.exists() or subprocess.run([other, "-c", probe, "torch", "deepspeed"]).returncode:
        return None
    return str(other)


@pytest.mark.skipif(with_deepspeed() is None, reason="no deepspeed")
def test_deepspeed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if " " in torch.__file__:
        pytest.skip("DeepSpeed's extension does not link where torch lies in a path with a blank")
    # Compiled here, not in the user's cache: what another run left half done there would fail.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    make("make_deepspeed.py", tmp_path, python=with_deepspeed() or "")
    for stage in test_convert_deepspeed.STAGES:
        run = tmp_path / f"run-{stage}"
        test_convert_deepspeed.check(tmp_path / f"deepspeed-{stage}", run, stage)

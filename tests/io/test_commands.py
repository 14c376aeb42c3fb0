"""``flatshard fsck`` and ``flatshard export``."""

import json

import pytest
import small

import flatshard as fs
from flatshard import checkpoint
from flatshard.cli.__main__ import main

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run(tmp_path):
    """A run's folder with two checkpoints of a native model."""

    def body(world):
        model = fs.models.Llama.from_config("tiny", world=world, precision="bf16", seed=3)
        for step in (10, 20):
            checkpoint.save(tmp_path / "run", model, step=step)
        model.save_pretrained(tmp_path / "hf")

    fs.local_world(2).run(body)
    return tmp_path


def test_fsck(run, capsys) -> None:
    assert main(["fsck", str(run / "run")]) == 0
    assert capsys.readouterr().out == "whole: step 20, 10\n"
    file = run / "run" / "step-000020" / "rank-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    assert main(["fsck", str(run / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "whole: step 10"
    assert all(line.startswith("step 20: ") and ", rank 1 (" in line for line in lines[:-1])
    assert main(["fsck", str(run / "run"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == [20, 10] and report["damage"][0]["rank"] == 1
    assert main(["fsck", str(run / "none")]) == 1
    assert "holds no weights" in capsys.readouterr().err
    assert main(["fsck", str(run / "hf")]) == 0
    assert "carry no checksums" in capsys.readouterr().out


def test_export_gives_what_save_pretrained_gives(run, capsys) -> None:
    out = run / "exported"
    assert main(["export", str(run / "run"), str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    for name in ("model.safetensors", "config.json"):
        left, right = (out / name).read_bytes(), (run / "hf" / name).read_bytes()
        assert left == right, name
    assert main(["export", str(run / "run"), str(out)]) == 2
    assert "not empty" in (said := capsys.readouterr().err) and "--force" in said
    assert main(["export", str(run / "run"), str(out), "--force"]) == 0
    assert main(["export", str(run / "run"), str(run / "wide"), "--dtype", "float32"]) == 0
    assert json.loads((run / "wide" / "config.json").read_text())["torch_dtype"] == "float32"

    def load(world):
        model = fs.models.Llama.from_pretrained(run / "wide", world=world, precision="bf16")
        first = fs.models.Llama.from_config("tiny", world=world, precision="bf16", seed=3)
        assert small.hashes(model.shards)[0] == small.hashes(first.shards)[0]

    fs.local_world(3).run(load)

"""flatshard train --trace: the operations of a run, of one that fails too."""

import json
from pathlib import Path

import pytest

import flatshard
from flatshard.cli.train import config_of, parser
from flatshard.models.train import train


def arguments(tmp_path: Path) -> list[str]:
    corpus = tmp_path / "words.txt"
    corpus.write_text("alpha beta gamma delta " * 300)
    return [
        *("tiny", "--data", str(corpus), "--out", str(tmp_path / "run"), "--batch", "2"),
        *("--length", "32", "--steps", "2", "--sample-tokens", "0", "--eval-sequences", "2"),
        *("--trace", str(tmp_path / "trace.json")),
    ]


@pytest.mark.quick
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_its_trace(tmp_path: Path, fails: bool) -> None:
    config = config_of(parser().parse_args(arguments(tmp_path)))

    def on_step(_: object) -> None:
        if fails:
            raise LookupError("the second step is not to be")

    def body(world: flatshard.World) -> None:
        train(config, world=world, on_step=on_step)

    if fails:
        with pytest.raises(LookupError):
            flatshard.local_world(2).run(body)
    else:
        flatshard.local_world(2).run(body)
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [event for event in found if event["name"] == "publishing of the weights"]
    assert {event["tid"] for event in steps} == {0, 1}
    assert any(event["name"].startswith("reduce layers.") for event in found)

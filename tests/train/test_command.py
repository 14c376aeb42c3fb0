"""``flatshard COMMAND``: finds it, lists them, refuses what is not there by name."""

from __future__ import annotations

import pytest

from flatshard.cli.__main__ import COMMANDS, LATER, main

pytestmark = pytest.mark.quick


def test_lists_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in (*COMMANDS, *LATER):
        assert name in out


@pytest.mark.parametrize(
    "word,near", [("trian", "train"), ("lunch", "launch"), ("smaple", "sample")]
)
def test_unknown_command_suggests(word: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert f"unknown command '{word}'; did you mean 'flatshard {near}'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(LATER))
def test_later_commands_are_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--anything"]) == 2
    assert f"flatshard {name} is not there yet" in capsys.readouterr().err


def test_no_near_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xyzzy"]) == 2
    assert "flatshard --help lists them" in capsys.readouterr().err

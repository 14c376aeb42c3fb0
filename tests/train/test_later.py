"""What the README says is not there yet is refused by name, with what serves meanwhile."""

from __future__ import annotations

import pytest

import flatshard as fs
from flatshard._later import LATER

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", list(LATER))
def test_names(name: str) -> None:
    with pytest.raises(AttributeError, match=f"flatshard.{name} is not there yet: "):
        getattr(fs, name)


def test_homes_and_places() -> None:
    with pytest.raises(NotImplementedError, match="disk"):
        fs.Offload(state="disk")
    with pytest.raises(NotImplementedError, match="nccl"):
        fs.init(backend="nccl")


def test_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(NotImplementedError, match="several hosts"):
        fs.init()


def test_every_public_name_is_there() -> None:
    assert not set(LATER) & set(fs.__all__)
    for name in fs.__all__:
        assert getattr(fs, name) is not None

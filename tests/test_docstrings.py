"""Every public name says what it is, and every parameter of it is explained."""

import importlib
import inspect
import re

import pytest

import flatshard

pytestmark = pytest.mark.quick

MODULES = [
    *("flatshard", "flatshard.world", "flatshard.policy", "flatshard.shard", "flatshard.optim"),
    *("flatshard.schedule", "flatshard.plan", "flatshard.checkpoint", "flatshard.errors"),
    *("flatshard.models", "flatshard.models.llama", "flatshard.models.data"),
    *("flatshard.config", "flatshard.trace"),
]


def things() -> list[tuple[str, object]]:
    """Public classes, functions and methods of the public modules, by full name."""
    found: dict[str, object] = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            thing = getattr(module, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            found[f"{thing.__module__}.{name}"] = thing
            if inspect.isclass(thing) and not issubclass(thing, BaseException):
                for inner, member in vars(thing).items():
                    if not inner.startswith("_") and inspect.isfunction(member):
                        found[f"{thing.__module__}.{name}.{inner}"] = member
    return sorted(found.items())


@pytest.mark.parametrize(("name", "thing"), things(), ids=lambda value: str(value)[:60])
def test_explained(name: str, thing: object) -> None:
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return
    assert callable(thing)
    parameters = [
        parameter.name
        for parameter in inspect.signature(thing).parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    if inspect.isclass(thing):
        text += inspect.getdoc(thing.__init__) or ""  # type: ignore[misc]
        if re.search(r"Made by|Comes from", text):
            return  # not for users to make
    unexplained = [p for p in parameters if not re.search(rf"\b{p}\b", text)]
    assert not unexplained, f"{name} does not explain {', '.join(unexplained)}"


def test_every_name_is_there() -> None:
    for name in flatshard.__all__:
        assert getattr(flatshard, name) is not None, name
    nonsense = "nonsense"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(flatshard, nonsense)

"""Arguments of fully_shard from settings, for modules that only look like torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flatshard import ConfigError, Sharding, config
from flatshard.config.modules import sized_modules
from flatshard.policy import PRESETS

pytestmark = pytest.mark.quick


class Parameter:
    def __init__(self, numel: int) -> None:
        self._numel = numel

    def numel(self) -> int:
        return self._numel


class Module:
    """What the settings look at: children, names, Parameters."""

    def __init__(self, *numels: int, **children: Module) -> None:
        self._own = [Parameter(n) for n in numels]
        self._children = children

    def children(self) -> Iterator[Module]:
        yield from self._children.values()

    def named_modules(self, path: str = "") -> Iterator[tuple[str, Module]]:
        yield path, self
        for name, child in self._children.items():
            yield from child.named_modules(f"{path}.{name}" if path else name)

    def modules(self) -> Iterator[Module]:
        yield from (module for _, module in self.named_modules())

    def parameters(self) -> Iterator[Parameter]:
        yield from self._own
        for child in self._children.values():
            yield from child.parameters()


class Layer(Module):
    pass


class ModuleList(Module):
    pass


class MultiheadAttention(Module):
    pass


def model() -> Module:
    layers = {str(i): Layer(10, mlp=Module(100), attn=MultiheadAttention(200)) for i in range(2)}
    return Module(5, layers=ModuleList(**layers), head=Module(50))


def names(module: Module, chosen: list[Any]) -> list[str]:
    return [name for name, m in module.named_modules() if any(m is c for c in chosen)]


def test_units_and_precision() -> None:
    asked = config.fsdp({"transformer_layer_cls_to_wrap": "Layer"}).module_options(model())
    assert asked == {"sharding": Sharding(partition="per_parameter"), "units": ["Layer"]}
    assert config.fsdp({}).module_options(model())["units"] == "auto"
    whole = {"auto_wrap_policy": "NO_WRAP", "mixed_precision_policy": "bf16"}
    asked = config.fsdp(whole).module_options(model())
    assert asked["units"] == [] and asked["mp_policy"] == PRESETS["bf16"]
    with pytest.raises(ConfigError, match="did you mean Layer"):
        config.fsdp({"transformer_layer_cls_to_wrap": "layer"}).module_options(model())


LAYERS = ["layers.0", "layers.1"]
WITHIN = ["layers.0.mlp", "layers.1.mlp"]


@pytest.mark.parametrize(
    ("least", "wanted"),
    [
        (1000, []),
        (500, []),  # a list is no unit, and what is left of the root is the root's
        (250, LAYERS),
        (150, LAYERS),  # attention is neither looked into nor taken by itself
        (100, [*LAYERS, *WITHIN]),  # without its unit a layer still has 210
        (50, [*LAYERS, *WITHIN, "head"]),
    ],
)
def test_units_by_size(least: int, wanted: list[str]) -> None:
    module = model()
    assert sorted(names(module, sized_modules(module, least))) == sorted(wanted)


def test_ignored_modules() -> None:
    module = model()
    for asked in ("layers\\.0.*", ["layers.0"]):
        ignored = config.fsdp({"ignored_modules": asked}).module_options(module)["ignored_params"]
        assert sum(p.numel() for p in ignored) == 310
    with pytest.raises(ConfigError, match="no module's name matches 'nothing'"):
        config.fsdp({"ignored_modules": "nothing"}).module_options(module)
    with pytest.raises(ConfigError, match="the model has no module 'tail'"):
        config.fsdp({"ignored_modules": ["tail"]}).module_options(module)
    assert sized_modules(module, 200, module.parameters()) == []

"""The stub of the C core names what the core has, with the same parameters."""

import ast
import inspect
import pathlib

import pytest

from flatshard import _core

STUB = pathlib.Path(_core.__file__).with_name("_core.pyi")
if not STUB.exists():  # an extension built into another folder
    STUB = pathlib.Path(__file__).resolve().parent.parent / "python" / "flatshard" / "_core.pyi"

pytestmark = pytest.mark.quick


def members(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Public names a body of the stub declares -> their node."""
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def public(thing: object) -> set[str]:
    names = vars(thing) if isinstance(thing, type) else dir(thing)
    return {name for name in names if not name.startswith("_")}


DECLARED = members(ast.parse(STUB.read_text(encoding="utf-8")).body)
CLASSES = sorted(name for name in public(_core) if isinstance(getattr(_core, name), type))


def test_the_same_names() -> None:
    assert set(DECLARED) == public(_core)


@pytest.mark.parametrize("name", CLASSES)
def test_the_same_members(name: str) -> None:
    node = DECLARED[name]
    assert isinstance(node, ast.ClassDef)
    assert set(members(node.body)) == public(getattr(_core, name))


def functions() -> list[tuple[str, ast.FunctionDef, object]]:
    """Every function and method of the stub that is not a property."""
    found: list[tuple[str, ast.FunctionDef, object]] = []
    for name, node in DECLARED.items():
        if isinstance(node, ast.FunctionDef):
            found.append((name, node, getattr(_core, name, None)))
        elif isinstance(node, ast.ClassDef):
            owner = getattr(_core, name, None)
            for inner, method in members(node.body).items():
                if isinstance(method, ast.FunctionDef) and not method.decorator_list:
                    found.append((f"{name}.{inner}", method, getattr(owner, inner, None)))
    return found


@pytest.mark.parametrize(("name", "node", "real"), functions(), ids=lambda value: str(value)[:40])
def test_the_same_parameters(name: str, node: ast.FunctionDef, real: object) -> None:
    """Names, order and defaults' presence, from the signature in the C docstring."""
    assert callable(real), f"{name} is declared and not there"
    try:
        signature = inspect.signature(real)
    except ValueError:
        pytest.fail(f"{name}: its docstring does not begin with a signature, as NAME($self, a, /)")
    expected = {
        parameter.name: parameter.default is not inspect.Parameter.empty
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    }
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    declared = {a.arg: place >= required for place, a in enumerate(positional) if a.arg != "self"}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        declared[argument.arg] = default is not None
    if arguments.kwarg is not None:
        declared[arguments.kwarg.arg] = False
    assert list(declared.items()) == list(expected.items())

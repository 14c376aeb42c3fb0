"""Documents say what is true: their blocks run, their links lead somewhere, their names exist.

Blocks of a document are run in order in one empty folder that holds a small corpus.txt, as a reader
would. What a block is follows from its language:

- `python`: a script, left out where it imports torch or transformers and that is not installed. A
  first line `# NAME.py` names the file, for later commands; a block that defines test functions is
  run by pytest.
- `sh`, `console`: commands, one a line (a `$ ` before it is taken off; lines after commands of a
  console block are what they print). `flatshard` and `python` are run, `make` targets are looked
  up, `pip` and `git` lines are only read.
- anything else is only shown.
"""

import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEADLINE = 180.0  # seconds for one block
HAS_TORCH = importlib.util.find_spec("torch") is not None


def documents() -> list[pathlib.Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(path: pathlib.Path) -> list[tuple[int, str, str]]:
    """(line, language, text) of each fenced block."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start()) + 1, match.group(1), match.group(2))
        for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def with_blocks() -> list[pathlib.Path]:
    runs = ("python", "sh", "console", "bash")
    return [p for p in documents() if any(language in runs for _, language, _ in blocks(p))]


def environment(folder: pathlib.Path) -> dict[str, str]:
    """That of a reader in folder, with this Python's programs first on the path."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    package = importlib.util.find_spec("flatshard")
    assert package is not None and package.origin is not None
    source = str(pathlib.Path(package.origin).parent.parent)
    return {**os.environ, "PATH": path, "PYTHONPATH": source, "HOME": str(folder)}


def run(words: list[str], folder: pathlib.Path, what: str) -> None:
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, f"{what}: {shlex.join(words)}\n{done.stdout[-3000:]}"


def left_out(text: str) -> bool:
    """Does a script import torch or transformers, where that is not installed?"""
    words = r"^\s*(?:import|from) (?:flatshard\.)?(torch|transformers)\b"
    asked = {match.group(1) for match in re.finditer(words, text, re.MULTILINE)}
    return any(importlib.util.find_spec(name) is None for name in asked)


def run_python(text: str, number: int, folder: pathlib.Path, what: str) -> None:
    first = text.split("\n", 1)[0]
    named = re.match(r"# ([\w/]+\.py)$", first)
    name = named.group(1) if named else f"block_{number}.py"
    if re.search(r"^(async )?def test_", text, re.MULTILINE):
        name = name if name.startswith("test_") else f"test_{name}"
    (folder / name).write_text(text)
    if left_out(text):
        return
    if name.startswith("test_"):
        run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name], folder, what)
    elif not (named and "import sys" in text and "sys.argv" in text):
        run([sys.executable, name], folder, what)


def run_commands(text: str, language: str, folder: pathlib.Path, what: str) -> None:
    lines = text.replace("\\\n", " ").splitlines()
    if language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        command = line.partition(" # ")[0].strip()
        if not command or command.startswith("#"):
            continue
        words = shlex.split(command)
        while words and re.match(r"^[A-Z_]+=", words[0]):
            words.pop(0)
        program = words[0]
        scripts = [folder / word for word in words if word.endswith(".py")]
        if any(script.is_file() and left_out(script.read_text()) for script in scripts):
            continue
        if program == "make":
            targets = [w for w in words[1:] if re.match(r"^[\w-]+$", w)]
            makefile = (ROOT / "Makefile").read_text()
            for target in targets:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{what}: no {target}"
        elif program in ("pip", "git", "cd", "export"):
            continue
        elif program in ("flatshard", "python", "python3"):
            real = [sys.executable, "-m", "flatshard.cli"] if program == "flatshard" else []
            run((real or [sys.executable]) + words[1:], folder, what)
        elif program in ("torchrun", "mpirun", "srun"):
            if program != "torchrun" or shutil.which("torchrun") is None:
                continue  # not on every machine; its variables have tests of their own
            run([sys.executable, "-m", "torch.distributed.run", *words[1:]], folder, what)
        else:
            pytest.fail(f"{what}: the test does not know how to run: {line}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", with_blocks(), ids=lambda path: path.name)
def test_blocks_run(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    sentence = "The river runs past the old mill, and the miller counts the sacks of flour.\n"
    (tmp_path / "corpus.txt").write_text(sentence * 400)
    for number, (line, language, text) in enumerate(blocks(path)):
        what = f"{path.name}:{line}"
        if language == "python" and "import torch" in text and not HAS_TORCH:
            continue
        if language == "python":
            run_python(text, number, tmp_path, what)
        elif language in ("sh", "bash", "console"):
            run_commands(text, language, tmp_path, what)


@pytest.mark.quick
@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_lead_somewhere(path: pathlib.Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    missing = [
        link
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        if not re.match(r"^[a-z]+:", link) and not (path.parent / link).exists()
    ]
    assert not missing, f"{path.name}: {missing}"
    named = re.findall(r"`((?:csrc|python|tests|docs|tools|benchmarks|examples)/[\w./-]+)`", text)
    gone = [name for name in named if not (ROOT / name).exists()]
    assert not gone, f"{path.name} names what is not there: {gone}"


@pytest.mark.quick
@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_targets_and_variables_exist(path: pathlib.Path) -> None:
    from flatshard import _core

    text = path.read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.name}: make {target}"
    known = set(_core.env_table()) | set(
        re.findall(r"FLATSHARD_\w+", (ROOT / "setup.py").read_text())
    )
    for variable in set(re.findall(r"FLATSHARD_[A-Z_]+\b(?!\*)", text)):
        assert variable in known, f"{path.name}: {variable} is no variable of ours"


@pytest.mark.quick
def test_the_picture_is_current() -> None:
    path = ROOT / "docs" / "draw_architecture.py"
    spec = importlib.util.spec_from_file_location("draw_architecture", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = path.with_name("architecture.svg").read_text(encoding="utf-8")
    assert drawn == module.draw(), f"run python {path.relative_to(ROOT)}"


@pytest.mark.quick
def test_version_is_said_once() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "([^"]+)"$', project, re.MULTILINE)
    assert version is not None
    assert f"## {version.group(1)}" in (ROOT / "CHANGELOG.md").read_text()

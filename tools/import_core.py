"""Imports one build of the extension by its path: python tools/import_core.py FOLDER."""

from __future__ import annotations

import importlib.util
import pathlib
import sys


def main() -> None:
    (path,) = pathlib.Path(sys.argv[1]).rglob("_core*.so")
    spec = importlib.util.spec_from_file_location("flatshard._core", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(f"imported {path}: {len(dir(module))} names")


if __name__ == "__main__":
    main()

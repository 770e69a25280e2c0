"""Writes packages that register test engines and strategies as plugins, and import hooks that
change modules in worker processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

HOOK = """
import importlib.abc, importlib.util, sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "{name}":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            import {changer}

            {changer}.{function}(module)

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, Finder())
"""


def write_plugins(folder: Path, kind: str, targets: Mapping[str, str]) -> str:
    """Write the metadata of a package that registers `targets` (name -> module:attribute).
    Returns the value for PYTHONPATH; it also finds the modules of the tests."""
    metadata = folder / "test_plugins-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: test-plugins\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in targets.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[rollick.{kind}]", *lines, ""]))
    return _search_path(folder)


def write_import_hook(folder: Path, name: str, target: str) -> str:
    """Make each process with the folder on its path call `target` (module:function) with the module
    `name` right after its import. Returns the value for PYTHONPATH."""
    changer, _, function = target.partition(":")
    folder.mkdir(parents=True, exist_ok=True)
    code = HOOK.format(name=name, changer=changer, function=function)
    (folder / "sitecustomize.py").write_text(code)
    return _search_path(folder)


def _search_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), str(Path(__file__).parent)])

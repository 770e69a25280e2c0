"""Packages whose entry points a recipe can name, for tests of engines and strategies of our own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def write_plugins(folder: Path, kind: str, targets: Mapping[str, str]) -> str:
    """Write the metadata of a package that registers `targets` (name -> module:attribute).
    Returns the value for PYTHONPATH; it also finds the modules of the tests."""
    metadata = folder / "test_plugins-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: test-plugins\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in targets.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[rollick.{kind}]", *lines, ""]))
    return os.pathsep.join([str(folder), str(Path(__file__).parent)])

"""Permissions of files with weights: safetensors makes them readable by their owner alone."""

from __future__ import annotations

from pathlib import Path


def inherit_permissions(folder: Path) -> None:
    """Let those who may read the folder read its weights too."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)

"""Starter projects: a recipe with its Python code, which `rollick init NAME` copies."""

from __future__ import annotations

from pathlib import Path

from rollick.errors import ConfigError, writing_to

HERE = Path(__file__).parent
FILES = ("recipe.yaml", "tasks.py", "README.md")


def starter_names() -> list[str]:
    return sorted(path.parent.name for path in HERE.glob("*/recipe.yaml"))


def write_starter(name: str, folder: Path) -> list[Path]:
    """Copy a project and return the written files. Raises if one of them exists."""
    if name not in starter_names():
        fix = f"use {', '.join(starter_names())}"
        raise ConfigError(f"there is no starter project {name!r}", fix=fix)
    targets = [folder / file for file in FILES]
    existing = [str(target) for target in targets if target.exists()]
    if existing:
        fix = "choose another folder, or move the files"
        raise ConfigError(f"{', '.join(existing)} exists already", fix=fix)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for target in targets:
            target.write_text((HERE / name / target.name).read_text("utf-8"), encoding="utf-8")
    return targets

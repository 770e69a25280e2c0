"""Starter projects: a folder with a recipe and the Python that it names, to be changed.

rollick init NAME [FOLDER] -> the files of rollick/starters/NAME are copied to FOLDER
"""

from __future__ import annotations

from pathlib import Path

from rollick.errors import ConfigError

HERE = Path(__file__).parent
FILES = ("recipe.yaml", "tasks.py", "README.md")


def starter_names() -> list[str]:
    """The projects that there are."""
    return sorted(path.parent.name for path in HERE.glob("*/recipe.yaml"))


def write_starter(name: str, folder: Path) -> list[Path]:
    """Copy a project; the files written. Nothing that is there is overwritten."""
    if name not in starter_names():
        raise ConfigError(
            f"there is no starter project {name!r}", fix=f"use {', '.join(starter_names())}"
        )
    targets = [folder / file for file in FILES]
    there = [str(target) for target in targets if target.exists()]
    if there:
        raise ConfigError(
            f"{', '.join(there)} exists already", fix="choose another folder, or move it away"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for target in targets:
        target.write_text((HERE / name / target.name).read_text("utf-8"), encoding="utf-8")
    return targets

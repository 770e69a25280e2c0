"""The files of a run: its lock, its recipe, its samples, its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollick.checkpoint import CheckpointStore, RunLock
from rollick.config.load import dump_recipe
from rollick.config.schema import Recipe
from rollick.errors import CheckpointError, ConfigError
from rollick.observe.metrics import read_metrics, rewrite

ENGINE_STEPS = "engine_steps.jsonl"
"""What a calibration needs (observe.engine_steps); see calibrate.py."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path = path
        self.checkpoints = CheckpointStore(
            path / "checkpoints",
            keep_last=recipe.checkpoint.keep_last,
            keep_best=recipe.checkpoint.keep_best,
        )

    @property
    def dumps(self) -> Path:
        return self.path / "dumps"

    @property
    def begun(self) -> bool:
        """Whether a run has left something here that another one would mix with."""
        return (self.path / "metrics.jsonl").exists() or self.checkpoints.latest() is not None

    def forget_after(self, step: int) -> None:
        """Remove the samples of steps that will be made again."""
        for name in ("samples.jsonl", "validation.jsonl", ENGINE_STEPS):
            if (self.path / name).exists():
                rows = read_metrics(self.path / name)
                rewrite(self.path / name, [row for row in rows if row["step"] <= step])

    def keep_recipe(self, recipe: Recipe) -> None:
        """The resolved recipe, beside what it made."""
        (self.path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")

    def append_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Add rows to a .jsonl file of the run."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


@contextmanager
def open_folder(recipe: Recipe, *, resume: bool) -> Generator[RunFolder]:
    """The run's folder, locked. A folder that holds a run is only taken up to resume it."""
    path = Path(recipe.run.folder) / recipe.run.name
    if resume and not (path / "recipe.yaml").exists():
        raise CheckpointError(f"{path} holds no run to resume", fix="start without --resume")
    path.mkdir(parents=True, exist_ok=True)
    with RunLock(path):
        folder = RunFolder(path, recipe)
        if folder.begun and not resume:
            raise ConfigError(
                f"{path} already holds a run",
                fix="continue it with --resume, or choose another run.name",
            )
        if not resume:
            folder.keep_recipe(recipe)
        yield folder

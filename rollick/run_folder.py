"""The files of a run: its lock, its recipe and code, its samples, its checkpoints."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollick.checkpoint import CheckpointStore
from rollick.config.load import LoadedRecipe, load_recipe
from rollick.config.recipe_record import record_recipe
from rollick.config.schema import Recipe
from rollick.errors import CheckpointError, ConfigError, writing_to
from rollick.observe.metrics import read_metrics, replace_rows
from rollick.observe.row_file import RowFile

LOG = logging.getLogger("rollick")

RUN_LOCK = "run.lock"
ENGINE_STEPS = "engine_steps.jsonl"
"""Measured engine steps (observe.engine_steps) for simulator/calibrate.py."""


class RunFolder:
    """The files of one run. `open_folder` opens it with its lock."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path = path
        self.dumps = path / "dumps"
        self._files: dict[str, RowFile] = {}
        self.checkpoints = CheckpointStore(
            path / "checkpoints",
            keep_last=recipe.checkpoint.keep_last,
            keep_best=recipe.checkpoint.keep_best,
        )

    @property
    def has_run(self) -> bool:
        return (self.path / "metrics.jsonl").exists() or self.checkpoints.latest() is not None

    def drop_rows_after(self, step: int) -> None:
        """Remove the rows of later steps, which a resumed run writes again."""
        for name in ("samples.jsonl", "validation.jsonl", ENGINE_STEPS):
            if (self.path / name).exists():
                rows = read_metrics(self.path / name)
                replace_rows(self.path / name, [row for row in rows if row["step"] <= step])

    def write_recipe(self, loaded: LoadedRecipe) -> None:
        """Write the recipe with a copy of the code that it names in files."""
        record_recipe(loaded, self.path).write(self.path)

    def describe_changes(self, loaded: LoadedRecipe) -> list[str]:
        """The differences of the recipe and its code from those in the folder, one per line."""
        try:
            earlier = load_recipe(self.path / "recipe.yaml", check=False)
        except ConfigError as error:  # Written by another version.
            return [f"recipe.yaml cannot be compared: {error.message}"]
        # File names that another version wrote may be relative to loaded.base_dir.
        before = record_recipe(replace(earlier, base_dir=loaded.base_dir), self.path)
        return record_recipe(loaded, self.path).describe_changes(before, self.path)

    def append_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Append rows to a .jsonl file of the run. On a full disk they wait for free space."""
        if name not in self._files:
            self._files[name] = RowFile(self.path / name)
        self._files[name].append(rows)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


@contextmanager
def open_folder(loaded: LoadedRecipe, *, resume: bool) -> Generator[RunFolder]:
    """Lock the run's folder. Raises if `resume` is true without a run, or false with one.

    A resumed run logs how its recipe differs from the one in the folder.
    """
    recipe = loaded.recipe
    path = Path(recipe.run.folder) / recipe.run.name
    if resume and not (path / "recipe.yaml").exists():
        raise CheckpointError(f"{path} holds no run to resume", fix="start without --resume")
    with writing_to(path):
        path.mkdir(parents=True, exist_ok=True)
        (path / RUN_LOCK).touch()
    with run_lock(path):
        folder = RunFolder(path, recipe)
        if not resume:
            refuse_existing_run(folder)
            with writing_to(path):
                folder.write_recipe(loaded)
        elif changes := folder.describe_changes(loaded):
            LOG.warning("resuming with other settings:\n  %s", "\n  ".join(changes))
        try:
            yield folder
        finally:
            folder.close()


@contextmanager
def run_lock(folder: Path) -> Generator[None]:
    """Prevent a second run in a folder. The kernel releases the lock when the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    # The file stays: deleting it would let two runs lock two files of one name.
    with (folder / RUN_LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise CheckpointError(
                f"{folder} is in use by another run ({file.read() or 'unknown process'})",
                fix="wait for it or stop it, or give this run another name",
            ) from error
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield
        finally:
            file.truncate(0)
            # Unlock explicitly, because a forked child may hold a copy of the descriptor.
            fcntl.flock(file, fcntl.LOCK_UN)


def refuse_existing_run(folder: RunFolder) -> None:
    if folder.has_run:
        raise ConfigError(
            f"{folder.path} already holds a run",
            fix="continue it with --resume, or choose another run.name",
        )

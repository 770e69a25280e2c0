"""Helpers for complete runs on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollick import LoadedRecipe, RunResult
from rollick.config.load import recipe_from_dict
from rollick.testing.toys import toy_recipe

Run = Callable[..., RunResult]

DROPS = "data.domains.letters.rewards=[rollick.testing.toys:says_letter]"
"""A reward under which most groups of the toy have no signal, and are dropped and refilled."""


def toy(model: Path, runs: Path, *overrides: str, **options: Any) -> LoadedRecipe:
    return recipe_from_dict(toy_recipe(model, runs, **options), overrides=overrides)


CLOCKED = ("time/", "speed/", "controller/", "memory/")
"""Metrics that depend on the clock or count faults."""
DCP_METADATA = ".metadata"
"""A file of torch's distributed checkpoints that differs between any two runs."""


def figures(result: RunResult) -> list[dict[str, Any]]:
    """The metrics of each step, without those in CLOCKED."""
    lines = (result.folder / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKED)} for row in rows]


def checkpoint_state(result: RunResult) -> dict[str, bytes]:
    """All files of the trained roles in the run's newest checkpoint."""
    newest = sorted((result.folder / "checkpoints").glob("step-*"))[-1]
    files = [f for name in ("learner", "critic") for f in (newest / name).rglob("*")]
    kept = [f for f in files if f.is_file() and f.name != DCP_METADATA]
    return {str(f.relative_to(newest)): f.read_bytes() for f in kept}


def learner_state(result: RunResult) -> dict[str, bytes]:
    """All files of the learner in the run's newest checkpoint."""
    newest = sorted((result.folder / "checkpoints").glob("step-*"))[-1]
    learner = newest / "learner"
    return {str(f.relative_to(learner)): f.read_bytes() for f in learner.rglob("*") if f.is_file()}

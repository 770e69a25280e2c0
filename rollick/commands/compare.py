"""Back end of `rollick compare`: reads runs, and groups those that differ only in their seed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollick.config.load import load_recipe
from rollick.config.problems import did_you_mean
from rollick.config.recipe_record import CODE, flatten_settings, show_setting
from rollick.errors import ConfigError, DataError, RollickError
from rollick.observe.comparison import (
    DEFAULT_METRICS,
    HELD_OUT,
    TRAINING_SCORE,
    RunCurves,
    RunGroup,
    common_metric,
)
from rollick.observe.metrics import read_metrics
from rollick.observe.report import LOSS

LOG = logging.getLogger("rollick")

NOT_COMPARED = ("run.name", "run.folder", "run.seed", "observe.")
"""Prefixes of settings that do not change what a run learns."""
MAX_SETTINGS = 3
"""Maximum settings in the label of a group; if groups differ in more, a label names the runs."""

Settings = Mapping[str, Any]


class NoCurves(DataError):
    """A folder without the metrics of a run."""


def group_runs(folders: Sequence[Path]) -> list[RunGroup]:
    """Read the runs in this order; those that differ only in their seed form one group.

    A pattern such as runs/* also matches evaluations, replays and exported models: they are skipped
    with a warning if there is a run to compare.
    """
    runs: dict[Path, tuple[Settings, RunCurves]] = {}
    skipped: list[RollickError] = []
    for folder in folders:
        try:
            runs[folder.resolve()] = _read_run(folder)
        except NoCurves as error:
            skipped.append(error)
    if not runs and skipped:
        raise skipped[0]
    if skipped:
        LOG.warning("skipped %d: %s", len(skipped), "; ".join(error.message for error in skipped))
    groups: list[tuple[Settings, list[RunCurves]]] = []
    for settings, run in runs.values():
        members = next(
            (m for other, m in groups if other == settings and _belongs_to_group(run, m, other)),
            None,
        )
        if members is None:
            groups.append((settings, [run]))
        else:
            members.append(run)
    labels = _build_labels([settings for settings, _ in groups])
    return [
        RunGroup(label or ", ".join(run.name for run in members), members)
        for label, (_, members) in zip(labels, groups, strict=True)
    ]


def _belongs_to_group(run: RunCurves, members: Sequence[RunCurves], settings: Settings) -> bool:
    """Whether a run with the settings of a group differs from its members only in the seed. Rows
    and rewards passed from Python cannot be compared: runs with one seed may differ in them."""
    has_objects = any("object:" in show_setting(value) for value in settings.values())
    return not has_objects or run.seed not in [member.seed for member in members]


def choose_metrics(groups: Sequence[RunGroup], metric: str | None) -> tuple[str, Sequence[str]]:
    """The metric of the table, and those of the picture."""
    if metric is None:
        if (common := common_metric(groups)) is None:
            reasons = "; ".join(_describe_missing_metric(groups, name) for name in DEFAULT_METRICS)
            message = f"the runs have no default metric in common: {reasons}"
            raise DataError(message, fix="leave runs out, or choose another metric with --metric")
        held_out = common if common in HELD_OUT else HELD_OUT[0]
        return common, [held_out, TRAINING_SCORE, *([LOSS] if common == LOSS else [])]
    for run in (run for group in groups for run in group.runs):
        if not run.points(metric):
            known = list(dict.fromkeys(name for row in run.rows for name in row))
            fix = did_you_mean(metric, known) or f"it has: {', '.join(known)}"
            raise DataError(f"{run.name} has no metric {metric!r}", fix=fix)
    return metric, [metric]


def _describe_missing_metric(groups: Sequence[RunGroup], metric: str) -> str:
    """One run without the metric, and the number of the others without it."""
    names = [run.name for group in groups for run in group.runs if not run.points(metric)]
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{metric} is not in {names[0]}{others}"


def _read_run(folder: Path) -> tuple[Settings, RunCurves]:
    if not (folder / "recipe.yaml").is_file():
        fix = "give folders with recipe.yaml, such as runs/NAME"
        error_type = NoCurves if folder.exists() else ConfigError
        raise error_type(f"{folder} is not a run's folder", fix=fix)
    path = folder / "metrics.jsonl"
    rows = read_metrics(path) if path.is_file() else []
    if not rows or not rows[-1]["step"]:
        raise NoCurves(f"{folder} has made no step", fix="give a run that has")
    recipe = load_recipe(folder / "recipe.yaml", check=False).recipe
    settings = {
        name: value
        for name, value in flatten_settings(recipe.model_dump(mode="json"))
        if not name.startswith(NOT_COMPARED)
    }
    for file in sorted((folder / CODE).rglob("*.py")):
        digest = hashlib.blake2b(file.read_bytes(), digest_size=3).hexdigest()
        settings[file.relative_to(folder).as_posix()] = digest
    return settings, RunCurves(folder.resolve().name, recipe.run.seed, rows)


def _build_labels(groups: Sequence[Settings]) -> list[str]:
    """The settings that distinguish each group; empty for too many settings or a single group."""
    names = dict.fromkeys(name for settings in groups for name in settings)
    different = [
        name for name in names if any(group.get(name) != groups[0].get(name) for group in groups)
    ]
    if not 0 < len(different) <= MAX_SETTINGS:
        return [""] * len(groups)
    short_names = [name if "/" in name else name.rpartition(".")[2] for name in different]
    label_names = short_names if len(set(short_names)) == len(short_names) else different
    labels = [
        ", ".join(
            f"{label}={show_setting(settings.get(name))}"
            for label, name in zip(label_names, different, strict=True)
        )
        for settings in groups
    ]
    return labels if len(set(labels)) == len(labels) else [""] * len(groups)

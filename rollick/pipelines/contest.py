"""A model plays an environment: what `rollick env test --policy MODEL` does.

    model, environment -> a recipe that only validates -> episodes -> PlayReport

Greedy, in this process. The tasks are those of a domain with that
environment and seed, so that a figure here is the figure of a validation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from rollick.config.load import load_recipe, recipe_from_dict
from rollick.config.schema import Recipe
from rollick.envs.play import PlayReport
from rollick.pipelines.inspect import evaluate_model, find_checkpoint, is_run
from rollick.pipelines.run import wait_for
from rollick.types import Group, Played, ScoredSample

TURN_TOKENS, MAX_TOKENS, MAX_LENGTH, AT_ONCE = 256, 1024, 2048, 16
"""Tokens of a turn, of an episode and of its whole sequence; episodes that are played at once."""


def play_model(
    model: str,
    environment: str,
    *,
    options: Mapping[str, Any],
    episodes: int,
    seed: int = 0,
    device: str = "cpu",
) -> PlayReport:
    """Let a model (a folder, a file, or a run with a checkpoint) play; `seed`: other tasks."""
    checkpoint, path, limits = None, model, {"turn": TURN_TOKENS, "episode": MAX_TOKENS}
    if is_run(model):
        checkpoint = find_checkpoint(Path(model))
        trained = load_recipe(Path(model) / "recipe.yaml", check=False).recipe
        path, limits = trained.model.path, _limits_of(trained)
    spec = {"name": environment, "options": dict(options), "tasks": episodes, "seed": seed}
    spec["turn_tokens"] = limits["turn"]
    with tempfile.TemporaryDirectory() as folder:
        recipe = {
            "pipeline": "agentic",
            "run": {"folder": folder, "name": "play"},
            "model": {"path": path},
            "data": {"domains": {"play": {"environment": spec}}},
            "sampling": {"max_tokens": limits["episode"]},
            "infer": {"slots": AT_ONCE, "max_length": MAX_LENGTH},
            "devices": {"policy": device, "generators": device},
            "cluster": {"backend": "inline"},
            "observe": {"sinks": [], "live": "off"},
        }
        begun = perf_counter()
        report = wait_for(evaluate_model(recipe_from_dict(recipe), checkpoint=checkpoint))
        return summarise(report.groups, perf_counter() - begun)


def _limits_of(recipe: Recipe) -> dict[str, int]:
    """A policy that was trained on short turns knows no others."""
    specs = [domain.environment for domain in recipe.data.domains.values() if domain.environment]
    turn = max((spec.turn_tokens for spec in specs), default=0)
    return {"turn": turn or TURN_TOKENS, "episode": min(recipe.sampling.max_tokens, MAX_TOKENS)}


def summarise(groups: tuple[Group, ...], seconds: float) -> PlayReport:
    """Figures over the episodes of a validation; those that failed solved nothing."""
    members = [member for group in groups for member in group.members]
    played = [member.sample.played for member in members if member.sample.played is not None]
    steps, count = sum(len(episode.replies) for episode in played), max(len(played), 1)
    errors = [_error(member) for member in members if not member.score.ok]
    return PlayReport(
        episodes=len(played),
        success=sum(episode.success for episode in played) / count,
        reward=sum(m.score.value for m in members if m.score.ok) / count,
        steps=steps / count,
        steps_per_s=steps / max(seconds, 1e-9),
        valid=_share(played, "valid"),
        effective=_share(played, "effective"),
        errors=len(errors),
        first_errors=tuple(errors[:3]),
    )


def _error(member: ScoredSample) -> str:
    return f"{member.sample.prompt.uid}: {member.score.detail}"


def _share(played: list[Played], name: str) -> float | None:
    flags = [flag for episode in played for flag in getattr(episode, name)]
    return sum(flags) / len(flags) if flags else None

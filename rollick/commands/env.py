"""Back end of `rollick env test`.

    name, options -> check_env -> problems
                  -> scripted policy: episodes in this process           -> EpisodeReport
                  -> model: greedy evaluation with a temporary recipe    -> EpisodeReport

A model is evaluated on a domain with that environment and seed, so the report equals the
validation of that domain.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from rollick.commands.evaluate import evaluate_model
from rollick.commands.export import find_checkpoint, is_run
from rollick.config.load import load_recipe, recipe_from_dict
from rollick.config.schema import Recipe, environment_of
from rollick.envs.base import find_env, make_env
from rollick.episodes.check_env import check_across_processes, check_env
from rollick.episodes.in_process import (
    POLICIES,
    EpisodeReport,
    find_policy,
    run_episode,
    run_episodes,
)
from rollick.pipelines.run import wait_for
from rollick.types import EpisodeRecord, Group

TURN_TOKENS, EPISODE_TOKENS, MAX_LENGTH, CONCURRENT_EPISODES = 256, 1024, 2048, 16
"""For a model: token limits of a turn, an episode and a sequence; concurrent episodes."""


def test_env(
    name: str,
    options: Mapping[str, Any],
    *,
    policy: str,
    episodes: int,
    seed: int,
    picture: Path | None,
) -> tuple[list[str], EpisodeReport]:
    """Check the environment, run episodes with a scripted policy or a model, and draw one
    episode to `picture`; with a model, the random policy plays it.

    Returns the problems of the environment, and averages over the episodes.
    """
    make, is_model = find_env(name), policy not in POLICIES and Path(policy).exists()
    scripted = find_policy("random" if is_model else policy)
    problems = check_env(make, options, name=name) or check_across_processes(name, options)
    if is_model:
        report = run_model_episodes(policy, name, options=options, episodes=episodes, seed=seed)
    else:
        seeds = range(seed, seed + episodes)
        report = run_episodes(make, seeds, options=options, policy=scripted, name=name)
    if picture is not None:
        from rollick.episodes.pictures import save_episode

        env = make_env(make, options, name=name)
        save_episode(picture, run_episode(env, seed, scripted, pictures=True))
    return problems, report


def run_model_episodes(
    model: str,
    environment: str,
    *,
    options: Mapping[str, Any],
    episodes: int,
    seed: int = 0,
    device: str = "cpu",
) -> EpisodeReport:
    """Evaluate a model (its path, or the folder of a run with a checkpoint) on an environment."""
    checkpoint, path, turn_tokens, max_tokens = None, model, TURN_TOKENS, EPISODE_TOKENS
    if is_run(model):
        checkpoint = find_checkpoint(Path(model))
        trained = load_recipe(Path(model) / "recipe.yaml", check=False).recipe
        path, (turn_tokens, max_tokens) = trained.model.path, _token_limits(trained)
    spec = {"name": environment, "options": dict(options), "seed": seed}
    spec["turn_tokens"] = turn_tokens
    with tempfile.TemporaryDirectory() as folder:
        recipe = {
            "pipeline": "agentic",
            "run": {"folder": folder, "name": "episodes"},
            "model": {"path": path},
            "data": {"domains": {"episodes": {"environment": spec, "limit": episodes}}},
            "sampling": {"max_tokens": max_tokens},
            "infer": {"slots": CONCURRENT_EPISODES, "max_length": MAX_LENGTH},
            "devices": {"policy": device, "generators": device},
            "cluster": {"backend": "inline"},
            "observe": {"sinks": [], "live": "off"},
        }
        started = perf_counter()
        loaded = recipe_from_dict(recipe)
        report = wait_for(evaluate_model(loaded, checkpoint=checkpoint, training=True))
        return summarise(report.groups, perf_counter() - started)


def _token_limits(recipe: Recipe) -> tuple[int, int]:
    """The recipe's token limits of a turn and of an episode (at most EPISODE_TOKENS)."""
    specs = [environment_of(domain) for domain in recipe.data.domains.values()]
    turn = max((spec.turn_tokens for spec in specs if spec is not None), default=0)
    return turn or TURN_TOKENS, min(recipe.max_new_tokens, EPISODE_TOKENS)


def summarise(groups: tuple[Group, ...], seconds: float) -> EpisodeReport:
    """Averages over the episodes of an evaluation; a failed one counts as unsolved."""
    members = [member for group in groups for member in group.members]
    episodes = [member.sample.episode for member in members if member.sample.episode is not None]
    steps, count = sum(len(episode.replies) for episode in episodes), max(len(episodes), 1)
    failed = [member for member in members if not member.score.ok]
    errors = [f"{member.sample.prompt.uid}: {member.score.detail}" for member in failed]
    return EpisodeReport(
        episodes=len(episodes),
        success=sum(episode.success for episode in episodes) / count,
        reward=sum(m.score.value for m in members if m.score.ok) / count,
        steps=steps / count,
        steps_per_s=steps / max(seconds, 1e-9),
        valid=_fraction_true(episodes, "valid"),
        effective=_fraction_true(episodes, "effective"),
        errors=len(errors),
        first_errors=tuple(errors[:3]),
    )


def _fraction_true(episodes: list[EpisodeRecord], name: str) -> float | None:
    flags = [flag for episode in episodes for flag in getattr(episode, name)]
    return sum(flags) / len(flags) if flags else None

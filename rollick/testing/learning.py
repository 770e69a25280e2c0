"""Does it learn? One toy task, in process, in a second or two, for any settings of an algorithm.

    a prompt is one of four letters, a right answer begins with that letter

A tiny model made from nothing starts at about 0.15, the real RL pipeline trains it, and the curve
is the mean score of each step. The control gives every score to a sample drawn by lot: the same
steps with nothing to learn from.

`imitate` is the same for pipelines that learn from given answers: after each update the model is
asked for answers, and their mean score is the curve. The control is given wrong answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollick.config.load import recipe_from_dict
from rollick.observe.metrics import read_metrics
from rollick.pipelines.base import open_session
from rollick.pipelines.rl import RLPipeline
from rollick.pipelines.rlvr import open_pipeline
from rollick.pipelines.run import run_recipe
from rollick.testing.tiny import save_tiny
from rollick.types import Group

LETTERS = "abcd"
STEPS = 30
LAST = 5


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean score of each step, the age of the oldest token that was trained on, all figures."""

    scores: tuple[float, ...]
    oldest: int = 0
    figures: tuple[Mapping[str, float], ...] = ()

    @property
    def final(self) -> float:
        """Mean of the last steps."""
        return float(np.mean(self.scores[-LAST:]))

    def of(self, metric: str) -> tuple[float, ...]:
        """A metric of each step."""
        return tuple(figures[metric] for figures in self.figures)


def learn(
    algorithm: str | Mapping[str, Any],
    folder: Path,
    *,
    staleness: float = 0,
    shuffled: bool = False,
    steps: int = STEPS,
    seed: int = 0,
    **sections: Mapping[str, Any],
) -> Curve:
    """Train the toy with these settings of `algorithm` (or a preset); `sections` go on top."""
    model = save_tiny(folder / "model", seed=seed, alphabet=LETTERS, **SMALL)
    recipe = echo_recipe(model, folder, algorithm=algorithm, steps=steps, seed=seed)
    recipe["rollout"] |= {"max_staleness": staleness}
    _lay_over(recipe, sections)
    with _threads_kept():
        return asyncio.run(_run(recipe, steps=steps, shuffled=shuffled))


def imitate(
    pipeline: str,
    folder: Path,
    *,
    wrong: bool = False,
    steps: int = STEPS,
    seed: int = 0,
    **sections: Mapping[str, Any],
) -> Curve:
    """Train the toy from given answers with the pipeline sft, dpo or distill.

    The run is folder / "runs" / "run"; export it for a model that knows the task.
    """
    model = save_tiny(folder / "model", seed=seed, alphabet=LETTERS, **SMALL)
    recipe = echo_recipe(model, folder, algorithm={}, steps=steps, seed=seed)
    held_out = recipe["data"]["domains"]["letters"]
    right, other = ("wrong", "answer") if wrong else ("answer", "wrong")
    columns = {"chosen": right, "rejected": other} if pipeline == "dpo" else {"completion": right}
    answers = {"source": "rollick.testing.toys:echo_pairs", **columns}
    recipe |= {
        "pipeline": pipeline,
        "data": {"domains": {"letters": answers}, "validation": {"letters": held_out}},
        "rollout": {},
        "evaluate": {"every": 1, "samples": 16, "temperature": 1.0},
        "observe": {"sinks": [], "live": "off"},
    }
    recipe["train"] |= {"batch_size": 12}
    _lay_over(recipe, sections)
    with _threads_kept():
        result = run_recipe(recipe_from_dict(recipe))
    figures = tuple(read_metrics(result.folder / "metrics.jsonl"))
    return Curve(tuple(row["eval/pass@1"] for row in figures), figures=figures)


def _lay_over(recipe: dict[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> None:
    for name, section in sections.items():
        recipe[name] = {**recipe.get(name, {}), **section}


@contextmanager
def _threads_kept() -> Generator[None]:
    """A run sets the threads of this process; put them back."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


FAST = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3}
"""Optimizer settings that suit a model of this size, of policy and critic.

The large eps is for what comes after the task is learned: gradients are nearly 0 then, and a small
one makes a full step of the first stale sample that differs.
"""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"critic": {"optimizer": FAST}},
    # Its length penalty falls on every answer that runs to the limit: room to stop before it.
    "dapo": {"sampling": {"max_tokens": 20}, "steps": 50},
}
"""What a preset needs beside the toy's own settings."""


def settings_of(preset: str, *, staleness: float = 0) -> Mapping[str, Any]:
    """What `learn` is to be given with a preset, beside its name."""
    # Its clip is so close to 1 that most stale samples are out of it.
    slow = {"steps": 2 * STEPS} if preset == "gspo" and staleness else {}
    return {**SETTINGS.get(preset, {}), **slow}


SMALL = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 2, "max_length": 32}


def echo_recipe(
    model: Path, folder: Path, *, algorithm: str | Mapping[str, Any], steps: int, seed: int
) -> dict[str, Any]:
    """The recipe of the toy task, as a dict."""
    toys = "rollick.testing.toys"
    domain = {"source": f"{toys}:echo_rows", "rewards": [f"{toys}:echoes"]}
    return {
        "run": {"folder": str(folder / "runs"), "steps": steps, "seed": seed, "threads": 1},
        "model": {"path": str(model), "template": "plain"},
        "data": {"domains": {"letters": domain}},
        "sampling": {"max_tokens": 4},
        # Every group is kept: a task that is learned has no other groups, and the curve goes on.
        "rollout": {"groups_per_step": 8, "group_size": 8, "drop_no_signal": False},
        "algorithm": algorithm,
        "train": {"optimizer": dict(FAST)},
        "infer": {"slots": 64, "max_length": 32},
        "cluster": {"backend": "inline"},
        "observe": {"sinks": [], "live": "off", "samples_per_step": 0},
    }


async def _run(recipe: dict[str, Any], *, steps: int, shuffled: bool) -> Curve:
    scores: list[float] = []
    figures: list[Mapping[str, float]] = []
    async with (
        open_session(recipe_from_dict(recipe)) as session,
        open_pipeline(session) as pipeline,
    ):
        if shuffled:
            _shuffle_scores(pipeline)
        for _ in range(steps):
            report = await pipeline.step()
            session.step += 1
            values = [score for group in report.groups for score in group.scores]
            scores.append(float(np.mean(values)))
            figures.append(pipeline.measure(report))
    oldest = max(row["rollout/age_max"] for row in figures)
    return Curve(tuple(scores), int(oldest), tuple(figures))


def _shuffle_scores(pipeline: RLPipeline) -> None:
    take = pipeline.generate

    async def generate() -> list[Group]:
        return shuffle_scores(await take(), seed=pipeline.session.step)

    pipeline.generate = generate


def shuffle_scores(groups: Sequence[Group], *, seed: int) -> list[Group]:
    """Every score goes to a sample of the batch drawn by lot."""
    members = [member for group in groups for member in group.members]
    order = np.random.default_rng(seed).permutation(len(members))
    mixed = iter([replace(m, score=members[o].score) for m, o in zip(members, order, strict=True)])
    return [replace(g, members=tuple(next(mixed) for _ in g.members)) for g in groups]

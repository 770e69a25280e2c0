"""Checks that an algorithm learns: a toy task, in process, in one or two seconds.

    the prompt is one of four letters; a correct answer starts with that letter

`learn` trains a tiny, randomly initialised model with the RL pipeline, from a mean score of about
0.15. The control trains on shuffled scores. `imitate` does the same for pipelines that learn from
given answers, with the mean score after each update; its control learns from wrong answers.
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
from rollick.pipelines.open_run import open_run
from rollick.pipelines.rl import open_rl
from rollick.pipelines.run import run_recipe
from rollick.testing.tiny import save_tiny
from rollick.testing.toys import without_rollout
from rollick.types import Group

LETTERS = "abcd"
STEPS = 30
FINAL_STEPS = 5


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean score of each step, age of the oldest trained token, and all metrics by step."""

    scores: tuple[float, ...]
    max_age: int = 0
    rows: tuple[Mapping[str, float], ...] = ()

    @property
    def final(self) -> float:
        """Mean score of the last steps."""
        return float(np.mean(self.scores[-FINAL_STEPS:]))

    def values_of(self, metric: str) -> tuple[float, ...]:
        """The values of a metric by step."""
        return tuple(row[metric] for row in self.rows)


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
    """Train the toy with an algorithm section or preset; `sections` override the recipe."""
    model = save_tiny(folder / "model", seed=seed, alphabet=LETTERS, **SMALL_MODEL)
    recipe = echo_recipe(model, folder, algorithm=algorithm, steps=steps, seed=seed)
    recipe["rollout"] |= {"max_staleness": staleness}
    _override(recipe, sections)
    with _restore_threads():
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

    The run folder is folder / "runs" / "run"; exporting it gives a model that knows the task.
    """
    model = save_tiny(folder / "model", seed=seed, alphabet=LETTERS, **SMALL_MODEL)
    recipe = echo_recipe(model, folder, algorithm={}, steps=steps, seed=seed)
    held_out = recipe["data"]["domains"]["letters"]
    target, other = ("wrong", "answer") if wrong else ("answer", "wrong")
    columns = {"chosen": target, "rejected": other} if pipeline == "dpo" else {"completion": target}
    answers = {"source": "rollick.testing.toys:echo_pairs", **columns}
    recipe |= {
        "pipeline": pipeline,
        "data": {"domains": {"letters": answers}, "validation": {"letters": held_out}},
        "evaluate": {
            "every": 1,
            "at_start": False,
            "samples": 16,
            "sampling": {"temperature": 1.0},
        },
        "observe": {"sinks": [], "live": "off"},
    }
    recipe = without_rollout(recipe)
    recipe["train"] |= {"batch_size": 12}
    _override(recipe, sections)
    with _restore_threads():
        result = run_recipe(recipe_from_dict(recipe))
    rows = tuple(read_metrics(result.folder / "metrics.jsonl"))
    return Curve(tuple(row["eval/pass@1"] for row in rows), rows=rows)


def _override(recipe: dict[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> None:
    for name, section in sections.items():
        recipe[name] = {**recipe.get(name, {}), **section}


@contextmanager
def _restore_threads() -> Generator[None]:
    """Restore the number of torch threads, which a run changes."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


FAST_OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3}
"""Optimizer settings for policy and critic of this size.

Once the task is learned, gradients are nearly 0. With a small eps, the first stale sample that
differs would then make a full step.
"""

PRESET_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"critic": {"optimizer": FAST_OPTIMIZER}},
    # A higher token limit: the length penalty applies to every answer that reaches it.
    "dapo": {"sampling": {"max_tokens": 20}, "steps": 50},
}
"""Changes to the toy's settings by preset."""


def settings_of(preset: str, *, staleness: float = 0) -> Mapping[str, Any]:
    """The keyword arguments of `learn` for a preset."""
    # The clip of gspo is so narrow that most stale samples are outside it.
    slow = {"steps": 2 * STEPS} if preset == "gspo" and staleness else {}
    return {**PRESET_SETTINGS.get(preset, {}), **slow}


SMALL_MODEL = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 2, "max_length": 32}


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
        # Keep every group: once the task is learned, no group has signal.
        "rollout": {"groups_per_step": 8, "group_size": 8, "drop_no_signal": False},
        "algorithm": algorithm,
        "train": {"optimizer": dict(FAST_OPTIMIZER)},
        "infer": {"slots": 64, "max_length": 32},
        "cluster": {"backend": "inline"},
        "observe": {"sinks": [], "live": "off", "samples_per_step": 0},
    }


async def _run(recipe: dict[str, Any], *, steps: int, shuffled: bool) -> Curve:
    scores: list[float] = []
    rows: list[Mapping[str, float]] = []
    async with open_run(recipe_from_dict(recipe)) as run, open_rl(run) as pipeline:
        if shuffled:
            generate_groups = pipeline.generate

            async def generate() -> list[Group]:
                return shuffle_scores(await generate_groups(), seed=pipeline.state.step)

            pipeline.generate = generate
        for _ in range(steps):
            report = await pipeline.step()
            run.state.step += 1
            scores.append(float(np.mean([s for group in report.groups for s in group.scores])))
            rows.append(pipeline.measure(report))
    max_age = max(row["rollout/age_max"] for row in rows)
    return Curve(tuple(scores), int(max_age), tuple(rows))


def shuffle_scores(groups: Sequence[Group], *, seed: int) -> list[Group]:
    """Shuffle the scores over all samples of the batch."""
    members = [member for group in groups for member in group.members]
    order = np.random.default_rng(seed).permutation(len(members))
    shuffled = (replace(m, score=members[o].score) for m, o in zip(members, order, strict=True))
    return [replace(g, members=tuple(next(shuffled) for _ in g.members)) for g in groups]

"""The demo: a randomly initialised model learns two tasks by RL, on Ray, in about a minute.

    tiny model -> SFT on a few solved examples -> validation -> RL on two domains -> validation

The tasks: sort five letters, and sort five digits in descending order. The prompts of warm-up, RL
and validation are disjoint.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollick.algorithms.advantages import Advantages, dr_grpo
from rollick.commands.export import export_run
from rollick.config.load import recipe_from_dict
from rollick.config.schema.advantages import BaselineAdvantage
from rollick.observe.metrics import read_metrics
from rollick.observe.tables import Console, evaluation_table, stderr_console
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunObjects
from rollick.testing.learning import shuffle_scores
from rollick.testing.tiny import save_tiny
from rollick.types import Group

LETTERS = "abcdefghij"
DIGITS = "0123456789"
ALPHABET = DIGITS + LETTERS + "<>"
DOMAINS = ("letters", "digits")
HELD_OUT = 100
WARM_UP = 20
TRAINING = 1000
MODEL = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "max_length": 64}

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Tasks:
    """Rows by domain; the three sets are disjoint."""

    warm_up: dict[str, list[Row]]
    training: dict[str, list[Row]]
    held_out: dict[str, list[Row]]


def make_tasks(seed: int) -> Tasks:
    """Random tasks, split in three. The answer to `cgaeb>` is `abceg`, that to `40718<` `87410`."""
    rng = random.Random(seed)
    letters = [{"prompt": f"{t}>", "answer": "".join(sorted(t))} for t in _draw(LETTERS, rng)]
    digits = [{"prompt": f"{t}<", "answer": "".join(sorted(t))[::-1]} for t in _draw(DIGITS, rng)]
    rows = {"letters": letters, "digits": digits}
    end = HELD_OUT + WARM_UP
    return Tasks(
        warm_up={name: part[HELD_OUT:end] for name, part in rows.items()},
        training={name: part[end:] for name, part in rows.items()},
        held_out={name: part[:HELD_OUT] for name, part in rows.items()},
    )


def _draw(symbols: str, rng: random.Random) -> list[str]:
    """Distinct texts of five distinct symbols."""
    texts: dict[str, None] = {}
    while len(texts) < HELD_OUT + WARM_UP + TRAINING:
        texts["".join(rng.sample(symbols, 5))] = None
    return list(texts)


def letters_in_order(completion: str, answer: str) -> float:
    """1 for the sorted letters; else up to 0.5 for letters at the right position."""
    if completion == answer:
        return 1.0
    if len(completion) != len(answer):
        return 0.0
    return 0.5 * sum(a == b for a, b in zip(completion, answer, strict=True)) / len(answer)


def largest_first(completion: str, answer: str) -> float:
    """The same for digits in descending order."""
    return letters_in_order(completion, answer)


def dr_grpo_on_shuffled_scores(groups: Sequence[Group], options: dict[str, Any]) -> Advantages:
    """The control: dr_grpo on shuffled scores, which carry no signal."""
    return dr_grpo(shuffle_scores(groups, seed=groups[0].uid), BaselineAdvantage())


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Share of correct greedy answers on the held-out prompts."""

    before: dict[str, float]
    after: dict[str, float]
    seconds: float
    report: Path

    def to_json(self) -> dict[str, Any]:
        return {
            "before": self.before["all"],
            "after": self.after["all"],
            "seconds": round(self.seconds, 1),
            "warmup_prompts": WARM_UP * len(DOMAINS),
            "domains": _table(self.before, self.after, DOMAINS),
        }


def run_demo(
    started: float, *, seed: int = 0, control: bool = False, folder: Path = Path("runs")
) -> DemoResult:
    """Run the demo; prints a table and the paths of the picture and the report.

    `started` is time.perf_counter() at the start of the command.
    """
    name = f"demo-{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}" + ("-control" if control else "")
    root = folder / name
    console = stderr_console()
    tasks = make_tasks(seed)
    console.print(f"creating a tiny model; warm-up on {WARM_UP} examples of each task")
    model = save_tiny(root / "model", seed=seed, alphabet=ALPHABET, **MODEL)
    warm_up = run_recipe(
        recipe_from_dict(warm_up_recipe(model, root, seed), objects=DOMAINS),
        objects=RunObjects(prompts=tasks.warm_up),
    )
    policy = export_run(warm_up.folder, root / "warm")
    console.print("reinforcement learning on Ray")
    objects = run_objects(tasks)
    run = run_recipe(
        recipe_from_dict(rl_recipe(policy, root, seed, control=control), objects=objects.names),
        objects=objects,
    )
    rows = read_metrics(run.folder / "metrics.jsonl")
    result = DemoResult(
        before=_accuracy(rows[0]),
        after=_accuracy(rows[-1]),
        seconds=time.perf_counter() - started,
        report=run.folder / "report.html",
    )
    _show(console, result)
    return result


def warm_up_recipe(model: Path, root: Path, seed: int) -> dict[str, Any]:
    """SFT on the solved examples."""
    domains = {n: {"source": f"object:{n}", "completion": "answer"} for n in DOMAINS}
    return {
        "pipeline": "sft",
        "run": {"name": "warm_up", "folder": str(root), "steps": 150, "seed": seed, "threads": 1},
        "model": {"path": str(model), "template": "plain"},
        "data": {"domains": domains},
        "train": {
            "batch_size": 24,
            "optimizer": {"lr": 2e-3, "betas": [0.9, 0.95]},
            "schedule": {"shape": "linear", "warmup_steps": 10, "final": 0.1},
        },
        "cluster": {"backend": "inline"},
        "observe": {"sinks": []},
    }


def rl_recipe(policy: Path, root: Path, seed: int, *, control: bool) -> dict[str, Any]:
    """RL on both domains, from the warmed-up policy."""
    advantage = f"{__name__}:dr_grpo_on_shuffled_scores" if control else "dr_grpo"
    rewards = {"letters": ["object:letters_in_order"], "digits": ["object:largest_first"]}
    return {
        "run": {"name": "rl", "folder": str(root), "steps": 120, "seed": seed, "threads": 1},
        "model": {"path": str(policy), "template": "plain"},
        "data": {
            "domains": {n: {"source": f"object:{n}", "rewards": r} for n, r in rewards.items()},
            "validation": {
                n: {"source": f"object:held_out_{n}", "rewards": r} for n, r in rewards.items()
            },
        },
        "sampling": {"max_tokens": 6},
        # Shuffled scores differ in every group, so a control has no group without signal.
        "rollout": {"groups_per_step": 64, "group_size": 8, "drop_no_signal": not control},
        "algorithm": {"advantage": advantage},
        "train": {
            "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
            "schedule": {"shape": "linear", "warmup_steps": 5, "final": 0.2},
        },
        "infer": {"slots": 512, "max_length": 64},
        "evaluate": {"at_start": True, "every": 30},
    }


def run_objects(tasks: Tasks) -> RunObjects:
    """The prompts and rewards that `rl_recipe` names."""
    held_out = {f"held_out_{name}": rows for name, rows in tasks.held_out.items()}
    return RunObjects(
        prompts={**tasks.training, **held_out},
        rewards={"letters_in_order": letters_in_order, "largest_first": largest_first},
    )


def _accuracy(row: dict[str, float]) -> dict[str, float]:
    return {"all": row["eval/pass@1"], **{n: row[f"eval/{n}/pass@1"] for n in DOMAINS}}


def _table(
    before: dict[str, float], after: dict[str, float], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    return {name: {"before": before[name], "after": after[name]} for name in names}


def _show(console: Console, result: DemoResult) -> None:
    figures = _table(result.before, result.after, (*DOMAINS, "all"))
    console.print(evaluation_table(figures, title="correct answers on held-out prompts"))
    console.print(f"curves  {result.report.with_suffix('.png')}", soft_wrap=True)
    console.print(f"report  {result.report}", soft_wrap=True)
    console.print(f"{result.seconds:.0f} s in total")

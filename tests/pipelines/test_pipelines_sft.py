"""SFT runs: loss, metrics, resume and validation, without a rollout."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rollick.config.load import LoadedRecipe
from rollick.observe.metric_table import is_documented
from rollick.observe.metrics import read_metrics
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunObjects, RunResult

Toy = Callable[..., LoadedRecipe]
ROWS = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefgh"]
SOURCE = {"source": "object:rows", "completion": "answer"}
OBJECTS = RunObjects(prompts={"rows": ROWS}, rewards={"reward": lambda completion, answer: 1.0})


def run_sft(toy: Toy, *overrides: str, resume: bool = False, **options: Any) -> RunResult:
    data = options.pop("data", {"domains": {"letters": SOURCE}})
    loaded = toy(
        "run.deterministic=true",
        "train.optimizer.lr=3e-3",
        "train.batch_size=8",
        *overrides,
        pipeline="sft",
        data=data,
        **options,
    )
    return run_recipe(loaded, objects=OBJECTS, resume=resume)


def read_metric_rows(result: RunResult) -> list[dict[str, float]]:
    rows = read_metrics(result.folder / "metrics.jsonl")
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows
    ]


@pytest.fixture(scope="module")
def full_run(toy: Toy) -> RunResult:
    return run_sft(toy, steps=20)


def test_the_loss_falls(full_run: RunResult) -> None:
    losses = [row["train/loss"] for row in read_metric_rows(full_run)]
    assert len(losses) == 20
    assert losses[-1] < 0.5 * losses[0]
    assert losses[0] > 1


def test_every_metric_is_documented(full_run: RunResult) -> None:
    logged = {name for row in read_metrics(full_run.folder / "metrics.jsonl") for name in row}
    assert {name for name in logged - {"step"} if not is_documented(name)} == set()


def test_a_resumed_run_equals_an_uninterrupted_one(toy: Toy, full_run: RunResult) -> None:
    run_sft(toy, steps=8, name="halved")
    resumed = run_sft(toy, steps=20, name="halved", resume=True)
    assert read_metric_rows(resumed) == read_metric_rows(full_run)
    assert read_learner_files(resumed) == read_learner_files(full_run)


def read_learner_files(result: RunResult) -> dict[str, bytes]:
    learner = sorted((result.folder / "checkpoints").glob("step-*"))[-1] / "learner"
    return {path.name: path.read_bytes() for path in learner.rglob("*") if path.is_file()}


def test_it_validates_by_generating(toy: Toy) -> None:
    held_out = {"source": "object:rows", "rewards": ["object:reward"]}
    data = {"domains": {"letters": SOURCE}, "validation": {"held_out": held_out}}
    options = ["evaluate.every=2", "evaluate.at_end=true", "evaluate.at_start=true"]
    result = run_sft(toy, *options, steps=3, data=data)
    rows = read_metric_rows(result)
    assert [row["step"] for row in rows if "eval/pass@1" in row] == [0, 2, 3]
    assert result.score == 1.0
    lines = (result.folder / "validation.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0] * 8 + [2] * 8 + [3] * 8

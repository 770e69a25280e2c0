"""A run in which 30 % of the rewards raise and 5 % hang: it completes, the counts are exact, and it
trains on exactly the batch that the samples without a fault give."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from rollick.algorithms.credit import CreditAssigner
from rollick.algorithms.objective import build_objective
from rollick.config.load import LoadedRecipe
from rollick.data.batch import Batch, BatchShare
from rollick.data.collate import collate
from rollick.data.store import load_batch, load_groups
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunObjects, RunResult
from rollick.trainer.local import LocalStrategy
from rollick.types import PolicyVersion, Sample, SampleId, stable_hash
from rollick.workers.learner import LearnerWorker

STEPS = 2
RAISE, HANG = 30, 35
"""Bounds on the draw of a sample (0 to 99): below 30 it raises, below 35 it hangs."""


def compute_draw(uid: SampleId) -> int:
    return stable_hash("fault", *uid) % 100


def faulty(sample: Sample) -> float:
    """A score by the sample's text, or a fault by its id."""
    import time

    from rollick.types import stable_hash

    draw = stable_hash("fault", *sample.uid) % 100
    if draw < 30:
        raise ValueError("injected")
    if draw < 35:
        time.sleep(600)
    return stable_hash(sample.text) % 1000 / 1000


@pytest.fixture(scope="module")
def loaded(toy: Callable[..., LoadedRecipe]) -> LoadedRecipe:
    domain = {"source": "rollick.testing.toys:letter_rows", "rewards": ["object:reward"]}
    return toy(
        "rewards.timeout_s=0.7",
        "rewards.processes=2",
        "rollout.max_failed_scores=0.9",
        "rollout.groups_per_step=6",
        "rollout.group_size=8",
        "rollout.drop_no_signal=false",
        "observe.dump_steps=[1, 2]",
        "observe.samples_per_step=1000",
        steps=STEPS,
        data={"domains": {"letters": domain}},
    )


@pytest.fixture(scope="module")
def run(loaded: LoadedRecipe) -> RunResult:
    return run_recipe(loaded, objects=RunObjects(rewards={"reward": faulty}))


def read_rows(run: RunResult, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / name).read_text("utf-8").splitlines()]


def test_the_run_completes(run: RunResult):
    assert (run.step, run.interrupted) == (STEPS, False)


def test_every_fault_is_counted_and_nothing_else_is(run: RunResult):
    for row in read_rows(run, "samples.jsonl"):
        group, _, index = row["sample"].removeprefix("g").partition(".")
        draw = compute_draw(SampleId(int(group), int(index)))
        expected = "failed" if draw < RAISE else "timeout" if draw < HANG else "ok"
        assert row["status"] == expected
        assert (row["score"] is None) == (expected != "ok")
    for row in read_rows(run, "metrics.jsonl"):
        groups = load_groups(run.folder / "dumps" / f"step-{int(row['step']):06d}" / "groups")
        draws = [compute_draw(sample.uid) for group in groups for sample in group.samples]
        faults = sum(draw < HANG for draw in draws)
        assert 0 < faults < len(draws)
        assert row["reward/calls/object:reward"] == len(draws)
        assert row["reward/failed/object:reward"] == faults
        assert row["rollout/failed_scores"] == faults / len(draws)


def make_clean_batch(run: RunResult, loaded: LoadedRecipe) -> Batch:
    """The batch of those samples of the first step that had no fault."""
    groups = load_groups(run.folder / "dumps" / "step-000001" / "groups")
    clean = [
        replace(
            group, members=tuple(m for m in group.members if compute_draw(m.sample.uid) >= HANG)
        )
        for group in groups
    ]
    assert sum(len(group.members) for group in clean) < sum(len(g.members) for g in groups)
    credit = CreditAssigner(loaded.recipe, base=loaded.base_dir)
    batch = collate(clean, select_members=credit.trained_members, version=PolicyVersion(0))
    return credit.assign(clean, batch)[0]


def test_the_batch_is_that_of_the_samples_without_a_fault(run: RunResult, loaded: LoadedRecipe):
    expected = make_clean_batch(run, loaded)
    trained = load_batch(run.folder / "dumps" / "step-000001" / "batch")
    for item in fields(expected):
        expected_value, trained_value = getattr(expected, item.name), getattr(trained, item.name)
        if isinstance(expected_value, np.ndarray):
            assert np.array_equal(expected_value, trained_value), item.name
        elif item.name == "uids":
            assert expected_value == trained_value
    assert np.any(trained.advantages_N)


def test_the_gradient_is_that_of_the_samples_without_a_fault(run: RunResult, loaded: LoadedRecipe):
    strategy = LocalStrategy(loaded.recipe, device="cpu")
    learner = LearnerWorker(strategy, build_objective(loaded.recipe.algorithms), loaded.recipe)
    metrics = learner.train(BatchShare((make_clean_batch(run, loaded),))).metrics()
    first = read_rows(run, "metrics.jsonl")[0]
    for name in ("train/grad_norm", "train/loss", "train/tokens"):
        assert metrics[name] == pytest.approx(first[name], rel=1e-6), name

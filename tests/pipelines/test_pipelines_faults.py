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
"""In a hundred: a lot below 30 raises, one below 35 hangs."""


def lot_of(uid: SampleId) -> int:
    return stable_hash("fault", *uid) % 100


def faulty(sample: Sample) -> float:
    """A score by the sample's text, or a fault by its id."""
    import time

    from rollick.types import stable_hash

    lot = stable_hash("fault", *sample.uid) % 100
    if lot < 30:
        raise ValueError("injected")
    if lot < 35:
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


def rows_of(run: RunResult, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / name).read_text("utf-8").splitlines()]


def test_the_run_completes(run: RunResult):
    assert (run.step, run.interrupted) == (STEPS, False)


def test_every_fault_is_counted_and_nothing_else_is(run: RunResult):
    for row in rows_of(run, "samples.jsonl"):
        group, _, index = row["sample"].removeprefix("g").partition(".")
        lot = lot_of(SampleId(int(group), int(index)))
        wanted = "failed" if lot < RAISE else "timeout" if lot < HANG else "ok"
        assert row["status"] == wanted
        assert (row["score"] is None) == (wanted != "ok")
    for row in rows_of(run, "metrics.jsonl"):
        groups = load_groups(run.folder / "dumps" / f"step-{int(row['step']):06d}" / "groups")
        lots = [lot_of(sample.uid) for group in groups for sample in group.samples]
        faults = sum(lot < HANG for lot in lots)
        assert 0 < faults < len(lots)
        assert row["reward/calls/object:reward"] == len(lots)
        assert row["reward/failed/object:reward"] == faults
        assert row["rollout/failed_scores"] == faults / len(lots)


def clean_batch(run: RunResult, loaded: LoadedRecipe) -> Batch:
    """What the samples of the first step without a fault give, and only they."""
    groups = load_groups(run.folder / "dumps" / "step-000001" / "groups")
    clean = [
        replace(group, members=tuple(m for m in group.members if lot_of(m.sample.uid) >= HANG))
        for group in groups
    ]
    assert sum(len(group.members) for group in clean) < sum(len(g.members) for g in groups)
    credit = CreditAssigner(loaded.recipe, base=loaded.base_dir)
    batch = collate(clean, select_members=credit.trained_members, version=PolicyVersion(0))
    return credit.assign(clean, batch)[0]


def test_the_batch_is_that_of_the_samples_without_a_fault(run: RunResult, loaded: LoadedRecipe):
    wanted = clean_batch(run, loaded)
    trained = load_batch(run.folder / "dumps" / "step-000001" / "batch")
    for part in fields(wanted):
        mine, theirs = getattr(wanted, part.name), getattr(trained, part.name)
        if isinstance(mine, np.ndarray):
            assert np.array_equal(mine, theirs), part.name
        elif part.name == "uids":
            assert mine == theirs
    assert np.any(trained.advantages_N)


def test_the_gradient_is_that_of_the_samples_without_a_fault(run: RunResult, loaded: LoadedRecipe):
    strategy = LocalStrategy(loaded.recipe, device="cpu")
    learner = LearnerWorker(strategy, build_objective(loaded.recipe.algorithms), loaded.recipe)
    metrics = learner.train(BatchShare((clean_batch(run, loaded),))).metrics()
    first = rows_of(run, "metrics.jsonl")[0]
    for name in ("train/grad_norm", "train/loss", "train/tokens"):
        assert metrics[name] == pytest.approx(first[name], rel=1e-6), name

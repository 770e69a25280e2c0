"""Troubled steps: exploding gradients and collapsed policies, but no step of a healthy run."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from rollick.observe.step_health import MIN_STEPS, StepHealth, StepSignals

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RECORDED = [path for path in sorted(RESULTS.glob("*.jsonl")) if "engine_steps" not in path.name]
HEALTHY = StepSignals(0.5, -0.01, entropy=1.2, mismatch_kl=0.001)


def examine_healthy_steps(count: int = MIN_STEPS) -> StepHealth:
    health = StepHealth()
    assert not any(health.examine(HEALTHY) for _ in range(count))
    return health


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_no_step_of_a_recorded_run_is_troubled(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    health, steps = StepHealth(), 0
    for row in (row for row in rows if "train/grad_norm" in row):
        entropy, mismatch = row.get("train/mean/entropy"), row.get("train/mean/mismatch_kl")
        signals = (row["train/grad_norm"], row["train/loss"], True, True, entropy, mismatch)
        assert health.examine(StepSignals(*signals)) == ""
        steps += 1
    assert steps > 10


@pytest.mark.parametrize(
    ("step", "trouble"),
    [
        (replace(HEALTHY, changed=False, grad_norm=nan), "not finite"),
        (replace(HEALTHY, loss=nan), "its loss was nan"),
        (replace(HEALTHY, grad_norm=20.0), "40 times the usual"),
        (replace(HEALTHY, grad_norm=0.0), "fell from 0.5 to 0"),
        (replace(HEALTHY, entropy=0.0), "entropy fell from 1.2 to 0"),
        (replace(HEALTHY, mismatch_kl=50.0), "50 nats per token"),
    ],
)
def test_a_step_far_outside_the_healthy_ones_is_troubled(step: StepSignals, trouble: str) -> None:
    health = examine_healthy_steps()
    assert trouble in health.examine(step)
    assert health.examine(HEALTHY) == "", "troubled steps do not change what is usual"


@pytest.mark.parametrize(
    "step",
    [
        replace(HEALTHY, grad_norm=5.0),
        replace(HEALTHY, grad_norm=0.0, has_signal=False),
        replace(HEALTHY, entropy=0.02),
        StepSignals(0.5, 0.1),
    ],
)
def test_a_step_within_what_healthy_runs_show_is_not_troubled(step: StepSignals) -> None:
    assert examine_healthy_steps().examine(step) == ""


def test_the_first_gradients_may_grow() -> None:
    health = StepHealth()
    grad_norms = (0.001, 0.1, 1.0, 1.0)
    assert not any(health.examine(replace(HEALTHY, grad_norm=norm)) for norm in grad_norms)


def test_a_resumed_run_knows_what_was_usual() -> None:
    health = StepHealth()
    row = {"train/grad_norm": 0.5, "train/loss": 0.1, "train/mean/entropy": 1.0}
    health.examine_rows([{}, row, row])
    assert "fell from 0.5" in health.examine(replace(HEALTHY, grad_norm=0.0))

"""Corrupt weights in live processes, on Ray: a byte that flips in an engine, and training steps
that break the policy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import faulty_engine
import pytest
import ray
from ledger_audit import audit
from toy_runs import figures, learner_state, toy

from rollick import RunResult, run_recipe
from rollick.cluster.ray_start import start_ray
from rollick.commands.doctor import diagnose_folder
from rollick.data.store import load_batch
from rollick.errors import RollickError
from rollick.observe.faults import Fault, read_faults
from rollick.observe.goodput import GOODPUT, TimeRow, read_goodput
from rollick.observe.row_file import read_rows
from rollick.rollout.ledger.log import read_log
from rollick.rollout.unchecked import DAMAGED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RAY = ("cluster.backend=ray", "rollout.drop_no_signal=false")
FIXED = ("run.deterministic=true", "devices.generators=cpu:1")
TWO_ENGINES = ("devices.generators=cpu:1-2", "infer.slots=4", "infer.engine=faulty")
BROKEN_LOSS = """
import dataclasses
from rollick.algorithms.losses import reinforce

CALLS = 0

def broken(inputs, options):
    global CALLS
    CALLS += 1
    result = reinforce(inputs, options)
    factor = {factor} if 4 <= CALLS <= 5 else 1.0
    return dataclasses.replace(result, loss_T=result.loss_T * factor)
"""
"""A loss whose gradient explodes, or is NaN, in the calls 4 and 5 of a process."""
BREAK_CASES = pytest.mark.parametrize(
    ("factor", "kind", "cause"),
    [
        ("1e6", "exploded", "2 steps in a row broke the policy"),
        ("float('nan')", "not_finite", "2 steps in a row had a non-finite gradient in the policy"),
    ],
    ids=["exploding", "NaN"],
)

Run = Callable[..., RunResult]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that says when a byte flips. Ray's workers inherit the variable with its path."""
    folder = tmp_path_factory.mktemp("faulty")
    path = faulty_engine.install(folder / "plugins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([path, *filter(None, sys.path)]))
        patch.setenv(faulty_engine.VARIABLE, str(folder / "plan"))
        patch.syspath_prepend(path.split(os.pathsep)[0])
        assert start_ray(None)
        yield folder / "plan"
        ray.shutdown()


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, plan: Path) -> Run:
    def start(name: str, *overrides: str, **options: Any) -> RunResult:
        return run_recipe(toy(tiny_folder, tmp_path, *RAY, *overrides, name=name, **options))

    return start


def find_faults(folder: Path, kind: str) -> list[Fault]:
    return [fault for fault in read_faults(folder) if fault.kind == kind]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_byte_that_flips_in_an_engine_on_ray_costs_samples_and_no_step(
    run: Run, plan: Path, staleness: int
) -> None:
    faulty_engine.plan_fault(plan, "flip", requests=12)
    result = run("flipped", *TWO_ENGINES, f"rollout.max_staleness={staleness}", steps=5)
    assert not plan.exists(), "no byte was flipped"
    assert result.step == 5
    [fault] = find_faults(result.folder, "corrupt")
    assert fault.role == "generators"
    assert "its memory was damaged" in fault.cause
    counts = audit(read_log(result.folder / "ledger.jsonl"))
    assert counts.groups.trained == 20
    assert set(counts.dropped_by_reason) == {DAMAGED}
    assert "1 corrupt" in "\n".join(diagnose_folder(result.folder).lines())


def test_an_asynchronous_publish_finds_no_damage_in_a_healthy_run(run: Run) -> None:
    result = run("healthy", *TWO_ENGINES, "rollout.max_staleness=1", steps=6)
    assert find_faults(result.folder, "corrupt") == []
    counts = audit(read_log(result.folder / "ledger.jsonl"))
    assert not counts.dropped_by_reason


def write_broken_loss(folder: Path, factor: str) -> tuple[str, ...]:
    (folder / "own.py").write_text(BROKEN_LOSS.format(factor=factor))
    loss = f"algorithm.loss={folder / 'own.py'}:broken"
    return (*FIXED, loss, "train.max_skipped_steps=2")


@BREAK_CASES
def test_broken_steps_are_undone_and_the_run_goes_on(
    run: Run, tmp_path: Path, factor: str, kind: str, cause: str
) -> None:
    loss = write_broken_loss(tmp_path, factor)
    # Steps 4 and 5 break. The snapshot after step 3 may be broken; the one after step 2 is not.
    good = run("good", *loss, steps=2)
    undone = run("undone", *loss, steps=5)
    assert learner_state(undone) == learner_state(good)
    result = run("on", *loss, steps=8)
    assert result.step == 8
    for folder in (undone.folder, result.folder):
        [fault] = find_faults(folder, "rolled_back")
        assert cause in fault.cause
        assert fault.redone_steps == 3
        broken_steps = find_faults(folder, kind)
        assert len(broken_steps) == 2
        check_cost(folder, fault)
        assert fault.failed_at == broken_steps[0].detected_at
        for step in (4, 5):
            batch = load_batch(folder / f"dumps/bad_steps/policy-{step:06d}/batch")
            assert batch.rows == 16
    assert [row["version"] for row in figures(result)] == expected_versions(kind)
    assert all(isfinite(row["train/loss"]) for row in figures(result)[5:])
    assert "1 rolled back" in "\n".join(diagnose_folder(result.folder).lines())


def check_cost(folder: Path, rollback: Fault) -> None:
    """Check that steps 3 and 4, and step 5 up to the rollback, do not count as progress."""
    rows, goodput = [TimeRow(**row) for row in read_rows(folder / GOODPUT)], read_goodput(folder)
    seconds_by_step = {row.step: sum(row.seconds.values()) for row in rows if row.event == "step"}
    assert goodput.wall_s == pytest.approx(rows[-1].at - rows[0].at, abs=1e-3)
    assert goodput.redone_steps == rollback.redone_steps
    assert goodput.seconds["redo"] > seconds_by_step[3] + seconds_by_step[4]
    assert goodput.seconds["redo"] == pytest.approx(rollback.redo_s)
    assert 0 < rollback.recover_s <= goodput.seconds["recover"]


def expected_versions(kind: str) -> list[int]:
    """The policy version after each of eight steps. Non-finite steps change no weights; the
    rollback changes them and gets a new version."""
    return [1, 2, 3, 4, 5, 6, 7, 8] if kind == "exploded" else [1, 2, 3, 3, 4, 5, 6, 7]


@BREAK_CASES
def test_what_a_broken_policy_has_generated_is_dropped(
    run: Run, tmp_path: Path, factor: str, kind: str, cause: str
) -> None:
    loss = write_broken_loss(tmp_path, factor)
    result = run("stale", *loss, "rollout.max_staleness=1", steps=8)
    counts = audit(read_log(result.folder / "ledger.jsonl"))
    assert counts.groups.trained == 32
    assert counts.dropped_by_reason.get("rolled_back", 0) > 0


def test_a_learning_rate_of_a_thousand_ends_the_run_after_its_rollbacks(
    run: Run, tmp_path: Path
) -> None:
    with pytest.raises(RollickError, match=r"rolled back 2 times, the limit \(train.rollbacks\)"):
        run("huge", *FIXED, "train.optimizer.lr=1e3", "train.max_skipped_steps=2", steps=60)
    assert len(find_faults(tmp_path / "huge", "rolled_back")) == 2

"""Runs whose steps break the policy end with an error, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollick import RunResult, run_recipe
from rollick.config.load import LoadedRecipe
from rollick.data.store import load_batch
from rollick.errors import NoSignalError, RollickError
from rollick.observe.faults import Fault, read_faults
from rollick.observe.metrics import read_metrics

Toy = Callable[..., LoadedRecipe]
RunToy = Callable[..., RunResult]

HUGE_LR = ("train.optimizer.lr=1e3", "rollout.drop_no_signal=false")


def find_folder(loaded: LoadedRecipe) -> Path:
    return Path(loaded.recipe.run.folder) / loaded.recipe.run.name


def read_policy_faults(folder: Path) -> list[Fault]:
    return [fault for fault in read_faults(folder) if fault.role == "policy"]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_learning_rate_of_a_thousand_ends_the_run_with_an_error(toy: Toy, staleness: int) -> None:
    loaded = toy(*HUGE_LR, f"rollout.max_staleness={staleness}", "checkpoint.every=1", steps=20)
    with pytest.raises(RollickError, match="5 steps in a row broke the policy") as error:
        run_recipe(loaded)
    assert "lower train.optimizer.lr" in error.value.fix
    folder = find_folder(loaded)
    faults = read_policy_faults(folder)
    assert [fault.kind for fault in faults] == ["exploded"] * 5
    assert faults[0].step == 1
    assert "fell from" in faults[0].cause
    for fault in faults:
        batch = load_batch(folder / f"dumps/bad_steps/policy-{fault.step + 1:06d}/batch")
        assert batch.rows == 16
    # After the first broken step no checkpoint is saved.
    saved = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert saved == ["step-000001"]


def test_a_collapsed_policy_without_signal_ends_the_run_with_a_hint(toy: Toy) -> None:
    with pytest.raises(NoSignalError, match="the policy may have collapsed"):
        run_recipe(toy("train.optimizer.lr=1e3", steps=20))


def test_a_run_that_is_over_before_it_may_stop_does_not_end_as_if_all_were_well(
    toy: Toy,
) -> None:
    with pytest.raises(RollickError, match="2 steps in a row broke the policy"):
        run_recipe(toy(*HUGE_LR, steps=3))


def test_a_collapsed_policy_is_found_after_a_resume_too(toy: Toy) -> None:
    loaded = toy(*HUGE_LR, "checkpoint.every=1", steps=2)
    run_recipe(loaded)
    longer = toy(*HUGE_LR, "checkpoint.every=1", name=loaded.recipe.run.name, steps=20)
    with pytest.raises(RollickError, match="broke the policy"):
        run_recipe(longer, resume=True)


def test_a_healthy_run_has_no_troubled_step(run_toy: RunToy) -> None:
    result = run_toy(steps=8)
    assert len(read_metrics(result.folder / "metrics.jsonl")) == 8
    assert read_policy_faults(result.folder) == []

"""Steps make only the forwards that they need: the forwards are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollick import RunResult
from rollick.algorithms.objective import build_objective
from rollick.testing.batches import random_batch, recipe_of
from rollick.trainer.local import LocalStrategy

RunToy = Callable[..., RunResult]

NO_CORRECTION = ("algorithm.loss=ppo", "algorithm.correction=none")


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes over batches that policies make, in order."""
    calls: list[str] = []

    def count(name: str) -> None:
        method: Any = getattr(LocalStrategy, name)

        def call_and_record(self: LocalStrategy, *args: Any) -> Any:
            calls.append(name)
            return method(self, *args)

        monkeypatch.setattr(LocalStrategy, name, call_and_record)

    count("logprobs")
    count("forward_backward")
    return calls


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The engine's log-probs serve as those of the old policy.
        ((), ["forward_backward"]),
        (("train.minibatches=2",), ["forward_backward"] * 2),
        # The old policy is the one that is trained.
        (NO_CORRECTION, ["forward_backward"]),
        # The policy changes between optimizer steps, and a correction compares it with the engine.
        ((*NO_CORRECTION, "train.minibatches=2"), ["logprobs", *["forward_backward"] * 2]),
        ((*NO_CORRECTION, "train.epochs=2"), ["logprobs", *["forward_backward"] * 2]),
        (("algorithm.correction=icepop",), ["logprobs", "forward_backward"]),
        # With adapters the reference is a forward of the policy.
        (("train.lora.rank=2", "algorithm.kl.coefficient=0.1"), ["logprobs", "forward_backward"]),
    ],
)
def test_a_step_makes_no_forward_that_it_does_not_need(
    run_toy: RunToy, forwards: list[str], options: tuple[str, ...], expected: list[str]
) -> None:
    run_toy("algorithm.loss=ppo", *options, steps=1)
    assert forwards == expected


def test_the_skipped_forward_would_have_changed_nothing(tiny_folder: Path) -> None:
    recipe = recipe_of(tiny_folder, algorithm={"loss": "ppo", "correction": "none"})
    batch, actual = random_batch([7, 12, 9]), []
    for one_step in (True, False):
        strategy = LocalStrategy(recipe)
        objective = build_objective(recipe.algorithms, one_step=one_step)
        old_N = None if one_step else strategy.logprobs(batch)
        strategy.forward_backward(replace(batch, old_logprobs_N=old_N), objective)
        gradients = [value.flatten() for value in strategy.optimizer.gradients().values()]
        actual.append(torch.cat(gradients))
    assert (actual[0] - actual[1]).norm() < 1e-5 * actual[1].norm()

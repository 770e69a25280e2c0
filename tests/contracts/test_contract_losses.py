"""What every loss promises: its gradient does not depend on how a batch is cut, packed or spread.

For each loss, aggregation and correction: the gradient of sum(weights * loss) is the same, to
1e-10 in float64, for any micro-batches, any order of samples in them, and 1, 2 or 3 ranks whose
gradients are summed. A new loss or aggregation joins by its name in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollick.algorithms.losses import LossInputs
from rollick.algorithms.objective import build_objective, resolve_aggregation
from rollick.config.corrections import clash
from rollick.config.names import NAMES
from rollick.config.schema import AlgorithmConfig, Recipe
from rollick.data.batch import Batch
from rollick.errors import ConfigError
from rollick.testing.batches import random_batch, recipe_of
from rollick.testing.tiny import save_tiny
from rollick.train.local import LocalStrategy
from rollick.train.strategy import LossFn

LENGTHS = [3, 1, 7, 5, 2, 9]
GROUPS = [0, 0, 1, 1, 2, 2]
VOCABULARY, HIDDEN = 11, 6


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Parts = Sequence[Sequence[int]]
SPREADS: dict[str, list[Parts]] = {
    "other order": [[[5, 3, 0, 1, 4, 2]]],
    "one sample each": [[[0], [1], [2], [3], [4], [5]]],
    "uneven micro-batches": [[[4, 2], [0], [5, 1, 3]]],
    "two ranks": [[[0, 3], [2]], [[5, 4, 1]]],
    "three ranks, one of them idle": [[[1, 2, 5]], [], [[4], [3, 0]]],
}
"""By rank, by micro-batch: the samples, in the order of packing."""


@dataclass(frozen=True)
class Problem:
    """A head over fixed hidden states; one tensor a sample for everything else."""

    hidden: list[torch.Tensor]
    targets: list[torch.Tensor]
    inputs: list[dict[str, torch.Tensor]]

    def micro_batch(self, head: torch.Tensor, samples: Sequence[int]) -> LossInputs:
        def cat(name: str) -> torch.Tensor:
            return torch.cat([self.inputs[b][name] for b in samples])

        hidden = torch.cat([self.hidden[b] for b in samples])
        targets = torch.cat([self.targets[b] for b in samples])
        every = torch.log_softmax(hidden @ head, -1)
        turns = [2 * place + self.inputs[b]["turn"] for place, b in enumerate(samples)]
        lengths = [len(self.targets[b]) for b in samples]
        return LossInputs(
            logprobs_T=every.gather(1, targets[:, None])[:, 0],
            old_T=cat("old"),
            behaviour_T=cat("behaviour"),
            advantages_T=cat("advantage"),
            weights_T=cat("weight"),
            reference_T=cat("reference"),
            sequence_T=torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths)),
            segment_T=torch.cat(turns),
        )


def problem(aggregation: str) -> tuple[torch.Tensor, Problem]:
    """Log-probs differ from each other by about 0.2, so every branch of every loss occurs."""
    draw = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    weights = resolve_aggregation(aggregation)(np.array(LENGTHS), np.array(GROUPS), max_tokens=9)
    head = rand(HIDDEN, VOCABULARY) * 0.5
    hidden = [rand(length, HIDDEN) for length in LENGTHS]
    targets = [torch.randint(VOCABULARY, (n,), generator=draw) for n in LENGTHS]
    inputs: list[dict[str, torch.Tensor]] = []
    for b, length in enumerate(LENGTHS):
        now = torch.log_softmax(hidden[b] @ head, -1).gather(1, targets[b][:, None])[:, 0]
        inputs.append(
            {
                "old": now + 0.2 * rand(length),
                "behaviour": now + 0.2 * rand(length),
                "reference": now + 0.2 * rand(length),
                "advantage": rand(1).expand(length),
                "weight": torch.full((length,), float(weights[b]), dtype=torch.float64),
                "turn": (torch.arange(length) >= length // 2).long(),
            }
        )
    return head, Problem(hidden, targets, inputs)


def gradient(
    objective: LossFn, head: torch.Tensor, given: Problem, spread: Sequence[Parts]
) -> torch.Tensor:
    """Summed over ranks; each rank accumulates over its micro-batches."""
    total = torch.zeros_like(head)
    for parts in spread:
        own = head.clone().requires_grad_()
        for samples in parts:
            inputs = given.micro_batch(own, samples)
            (inputs.weights_T * objective(inputs).loss_T).sum().backward()
        total += torch.zeros_like(head) if own.grad is None else own.grad
    return total


def assert_invariant(algorithm: dict[str, Any]) -> None:
    parts = AlgorithmConfig.model_validate(algorithm)
    objective = build_objective(parts)
    head, given = problem(parts.aggregation)
    whole = gradient(objective, head, given, [[range(len(LENGTHS))]])
    assert whole.norm() > 0
    for name, spread in SPREADS.items():
        error = (gradient(objective, head, given, spread) - whole).norm() / whole.norm()
        assert error <= 1e-10, name


@pytest.mark.parametrize("aggregation", sorted(NAMES["aggregations"]))
@pytest.mark.parametrize("loss", sorted(NAMES["losses"]))
def test_the_gradient_is_the_same_however_a_batch_is_spread(loss: str, aggregation: str):
    wide = {"clip_low": 0.15, "clip_high": 0.15} if loss in ("gspo", "segment") else {}
    assert_invariant(
        {
            "loss": {"name": loss, **wide},
            "aggregation": aggregation,
            "kl": {"coefficient": 0.1, "form": "k3"},
        }
    )


WIDE: dict[str, dict[str, float]] = {
    "geometric": {"low": 0.95, "high": 1.05},
    "k3": {"max_kl": 0.05},
    "opsm": {"delta": 0.01},
}


@pytest.mark.parametrize("correction", sorted(NAMES["corrections"]))
@pytest.mark.parametrize("loss", ["ppo", "reinforce", "dppo_tv"])
def test_corrections_do_not_feel_the_spread_either(loss: str, correction: str):
    if clash(loss, correction):
        with pytest.raises(ConfigError, match=r"algorithm\.correction"):
            assert_invariant({"loss": loss, "correction": correction})
    else:
        part = {"name": correction, **WIDE.get(correction, {})}
        assert_invariant({"loss": loss, "correction": part})


def test_a_loss_that_normalises_inside_its_micro_batch_is_caught(tmp_path: Path):
    (tmp_path / "bad.py").write_text(
        "from rollick.algorithms.losses import TokenLoss\n"
        "def mean(inputs, options):\n"
        "    return TokenLoss(-inputs.logprobs_T / len(inputs.logprobs_T))\n"
    )
    objective = build_objective(
        AlgorithmConfig.model_validate({"loss": "bad.py:mean"}), base=tmp_path
    )
    head, given = problem("token_mean")
    whole = gradient(objective, head, given, [[range(len(LENGTHS))]])
    split = gradient(objective, head, given, SPREADS["one sample each"])
    assert (whole - split).norm() / whole.norm() > 0.1


@pytest.fixture(scope="module")
def strategy(tmp_path_factory: pytest.TempPathFactory) -> LocalStrategy:
    recipe: Recipe = recipe_of(save_tiny(tmp_path_factory.mktemp("tiny"), hidden=32))
    local = LocalStrategy(recipe)
    local.module.double()
    return local


def two_turns(batch: Batch) -> Batch:
    """The middle token of each sample is an observation: nobody drew it, its log-prob is -inf."""
    middle_N = batch.offsets_B1[:-1] + batch.lengths_B // 2 + 1
    mask_N, logprobs_N = batch.loss_mask_N.copy(), batch.logprobs_N.copy()
    mask_N[middle_N], logprobs_N[middle_N] = False, -np.inf
    advantages_N = np.repeat(batch.advantages_N[batch.offsets_B1[:-1]], batch.lengths_B)
    return replace(batch, loss_mask_N=mask_N, logprobs_N=logprobs_N, advantages_N=advantages_N)


def model_gradient(local: LocalStrategy, loss: LossFn, parts: Sequence[Batch]) -> torch.Tensor:
    local.module.zero_grad()
    for part in parts:
        local.forward_backward(part, loss)
    return torch.cat([p.grad.flatten() for p in local.module.parameters() if p.grad is not None])


@pytest.mark.parametrize("loss", sorted(NAMES["losses"]))
def test_a_whole_model_has_the_same_gradient_however_a_batch_is_spread(
    strategy: LocalStrategy, loss: str
):
    wide = {"clip_low": 0.9, "clip_high": 2.0} if loss in ("gspo", "segment") else {}
    objective = build_objective(AlgorithmConfig.model_validate({"loss": {"name": loss, **wide}}))
    batch = two_turns(random_batch([6, 9, 7, 12]))
    whole = model_gradient(strategy, objective, [batch])
    assert torch.isfinite(whole).all()
    assert whole.norm() > 0
    for spread in ([[0, 1], [2, 3]], [[3, 1, 0, 2]], [[2], [0], [3], [1]]):
        split = model_gradient(strategy, objective, [batch.take(part) for part in spread])
        assert (split - whole).norm() / whole.norm() <= 1e-10


def test_turns_are_runs_of_trained_tokens(strategy: LocalStrategy):
    seen: list[LossInputs] = []

    def spy(inputs: LossInputs) -> Any:
        seen.append(inputs)
        return build_objective(AlgorithmConfig())(inputs)

    strategy.forward_backward(two_turns(random_batch([6, 7])), spy)
    [inputs] = seen
    assert inputs.segment_T is not None
    # trained: 2, 3, (4), 5 of six tokens; 2, 3, (4), 5, 6 of seven; the longest sample is first
    assert inputs.segment_T.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert inputs.sequence_T.tolist() == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("loss", sorted(NAMES["losses"]))
def test_tokens_outside_of_the_mask_change_nothing(strategy: LocalStrategy, loss: str):
    objective = build_objective(AlgorithmConfig.model_validate({"loss": loss}))
    batch = two_turns(random_batch([6, 9]))
    noisy = replace(
        batch,
        advantages_N=np.where(batch.loss_mask_N, batch.advantages_N, np.float32(np.nan)),
        weights_N=np.where(batch.loss_mask_N, batch.weights_N, 5.0),
    )
    clean = model_gradient(strategy, objective, [batch])
    assert torch.equal(model_gradient(strategy, objective, [noisy]), clean)

"""Checks that a custom loss or advantage satisfies its contract, for use in tests.

    check_loss(my_loss, {"scale": 2.0})          raises AssertionError with the problem
    check_advantage(my_advantage, {"floor": 0})

They call the function with small random inputs. learning.py checks whether it learns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rollick.algorithms.advantages import AdvantagesAndReturns
from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.algorithms.objective import checked_advantages
from rollick.errors import ConfigError
from rollick.testing.fakes import annotated, group
from rollick.types import Annotations, Group

LossFn = Callable[[LossInputs, Any], TokenLoss]
AdvantageFn = Callable[[Sequence[Group], Any], Any]

LENGTHS = (3, 2, 4, 1)
"""Trained tokens of each sample; consecutive samples form pairs."""
TOLERANCE = 1e-10
LEAVES = ("logprobs_T", "student_TK", "entropy_T")
"""The inputs of a loss that carry gradients."""


def random_inputs(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> LossInputs:
    """Random inputs of samples with these lengths, in float64."""
    random = torch.Generator().manual_seed(seed)
    sample_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    count = len(sample_T)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=random, dtype=torch.float64)

    behaviour_T = -0.2 - 2 * uniform(count)
    advantages_T = (1 - 2.0 * (sample_T % 2)) * (0.5 + uniform(len(lengths))[sample_T])
    top_TK = uniform(2, count, 3).log_softmax(-1) - 0.1
    return LossInputs(
        logprobs_T=(behaviour_T + uniform(count) - 0.5).clamp(max=-0.05).requires_grad_(),
        old_T=(behaviour_T + 0.2 * uniform(count) - 0.1).clamp(max=-0.05),
        behaviour_T=behaviour_T,
        advantages_T=advantages_T,
        weights_T=torch.full((count,), 1 / max(count, 1), dtype=torch.float64),
        sequence_T=sample_T,
        reference_T=-0.2 - 2 * uniform(count),
        turn_T=sample_T,
        scores_T=advantages_T + 0.1,
        pair_T=sample_T // 2,
        age_T=sample_T % 3,
        teacher_TK=top_TK[0],
        student_TK=top_TK[1].clone().requires_grad_(),
        entropy_T=(1 + uniform(count)).requires_grad_(),
    )


def check_loss(loss: LossFn, options: Any = None, *, pairs: bool = False) -> None:
    """Raise AssertionError unless each token has a finite loss that no other sample changes.

    pairs: the loss of a sample may depend on the other sample of its pair, as in dpo.
    """
    options = {} if options is None else options
    inputs = random_inputs()
    _check_shape(loss(inputs, options), inputs)
    empty = inputs.where(torch.zeros(len(inputs.sequence_T), dtype=torch.bool))
    _check_shape(loss(empty, options), empty)

    far = replace(inputs, logprobs_T=(inputs.logprobs_T.detach() - 60).requires_grad_())
    _check_shape(loss(far, options), far)
    for name, part in (("near", inputs), ("far", far)):
        gradients = _gradients(loss, part, options)
        assert all(torch.isfinite(g).all() for g in gradients), f"a gradient is not finite ({name})"
    _check_split(loss, inputs, options, pairs=pairs)


def _check_shape(result: TokenLoss, inputs: LossInputs) -> None:
    count = len(inputs.sequence_T)
    shape = tuple(result.loss_T.shape)
    assert shape == (count,), f"the loss of {count} tokens has the shape {shape}"
    assert torch.isfinite(result.loss_T).all(), "the loss of a token is not finite"
    for name, value in result.sums.items():
        assert value.ndim == 0, f"the sum {name} has the shape {tuple(value.shape)}, not ()"


def _check_split(loss: LossFn, inputs: LossInputs, options: Any, *, pairs: bool) -> None:
    """The gradient of a sample must not depend on the other samples of its micro-batch."""
    assert inputs.pair_T is not None
    unit_T = inputs.pair_T if pairs else inputs.sequence_T
    full = _gradients(loss, inputs, options)
    for unit in unit_T.unique():
        unit_mask_T = unit_T == unit
        alone = inputs.where(unit_mask_T)
        # Samples and pairs are numbered from 0 in each micro-batch.
        numbers = {name: getattr(alone, name) for name in ("sequence_T", "turn_T", "pair_T")}
        alone = replace(alone, **{name: n_T - n_T.min() for name, n_T in numbers.items()})
        leaves = {name: getattr(alone, name).detach().requires_grad_() for name in LEAVES}
        alone = replace(alone, **leaves)
        for actual, expected in zip(_gradients(loss, alone, options), full, strict=True):
            difference = (actual - expected[unit_mask_T]).abs().max().item()
            assert difference <= TOLERANCE, (
                f"the gradient of a sample changes by {difference:.3g} with the other samples of "
                "its micro-batch: sum or average over the tokens of one sample only"
            )


def _gradients(loss: LossFn, inputs: LossInputs, options: Any) -> list[torch.Tensor]:
    total = (inputs.weights_T * loss(inputs, options).loss_T).sum()
    leaves = [getattr(inputs, name) for name in LEAVES]
    assert total.requires_grad, "the loss has no gradient: it must depend on logprobs_T"
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def random_groups() -> list[Group]:
    """Annotated groups with different scores, a failed reward, equal scores, and one sample."""
    plain = [
        group([1.0, 0.0, 0.5], uid=0, texts=["12", "3", "4567"]),
        group([2.0, None, 0.0], uid=1, texts=["1", "22", "333"]),
        group([1.0, 1.0], uid=2, texts=["11", "2"]),
        group([0.5], uid=3, texts=["123"]),
    ]
    random = np.random.default_rng(0)

    def annotations(length: int) -> Annotations:
        old, reference, teacher = -0.1 - random.random((3, length))
        values = random.random(length)
        return Annotations(old, reference, teacher, values, float(values[-1]))

    return [annotated(g, *(annotations(s.length) for s in g.samples)) for g in plain]


def check_advantage(advantage: AdvantageFn, options: Any = None) -> None:
    """Raise AssertionError unless every sample has a finite value or one per token, a failed reward
    gets 0, the order of groups does not matter, and an empty list is accepted."""
    options = {} if options is None else options
    groups = random_groups()
    by_sample = _by_sample(advantage(groups, options), groups)
    reversed_order = _by_sample(advantage(groups[::-1], options), groups[::-1])
    for uid, value in by_sample.items():
        difference = float(np.max(np.abs(value - reversed_order[uid]), initial=0.0))
        assert difference <= TOLERANCE, f"sample {uid} changes with the order of groups"
    for member in (member for g in groups for member in g.members):
        uid = str(member.sample.uid)
        if not member.score.ok and np.any(by_sample[uid]):
            raise AssertionError(
                f"sample {uid}, whose reward failed, has an advantage other than 0"
            )
    assert len(advantage([], options)) == 0, "the advantages of no groups must be empty"


def _by_sample(advantages: Any, groups: Sequence[Group]) -> dict[str, Any]:
    try:
        checked = checked_advantages(advantages, groups, "under test")
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    by_sample: dict[str, Any] = {}
    for group_, values in zip(groups, checked, strict=True):
        for sample, value in zip(group_.samples, values, strict=True):
            plain = value.advantages_T if isinstance(value, AdvantagesAndReturns) else value
            by_sample[str(sample.uid)] = np.asarray(plain, np.float64)
    return by_sample

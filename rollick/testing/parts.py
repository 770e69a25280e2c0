"""What a loss or an advantage of your own must keep to, as two checks for your tests.

    check_loss(my_loss, {"scale": 2.0})          raises AssertionError with what is wrong
    check_advantage(my_advantage, {"floor": 0})

They call the function with small random inputs that have everything it may look at. Whether it
learns is for learning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rollick.algorithms.advantages import Gae
from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.testing.fakes import annotated, group
from rollick.types import Annotations, Group

Loss = Callable[[LossInputs, Any], TokenLoss]
Advantage = Callable[[Sequence[Group], Any], Any]

LENGTHS = (3, 2, 4, 1)
"""Trained tokens of each sample; two samples are a pair."""
TOLERANCE = 1e-10


def random_inputs(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> LossInputs:
    """Tokens of samples of these lengths, in float64; what carries a gradient is a leaf."""
    random = torch.Generator().manual_seed(seed)
    sample_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    count = len(sample_T)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=random, dtype=torch.float64)

    behaviour_T = -0.2 - 2 * drawn(count)
    advantages_T = (1 - 2.0 * (sample_T % 2)) * (0.5 + drawn(len(lengths))[sample_T])
    top_TK = drawn(2, count, 3).log_softmax(-1) - 0.1
    return LossInputs(
        logprobs_T=(behaviour_T + drawn(count) - 0.5).clamp(max=-0.05).requires_grad_(),
        old_T=(behaviour_T + 0.2 * drawn(count) - 0.1).clamp(max=-0.05),
        behaviour_T=behaviour_T,
        advantages_T=advantages_T,
        weights_T=torch.full((count,), 1 / max(count, 1), dtype=torch.float64),
        sequence_T=sample_T,
        reference_T=-0.2 - 2 * drawn(count),
        segment_T=sample_T,
        scores_T=advantages_T + 0.1,
        pair_T=sample_T // 2,
        age_T=sample_T % 3,
        teacher_TK=top_TK[0],
        student_TK=top_TK[1].clone().requires_grad_(),
        entropy_T=(1 + drawn(count)).requires_grad_(),
    )


def check_loss(loss: Loss, options: Any = None, *, pairs: bool = False) -> None:
    """Raise AssertionError unless each token has a finite loss that no other sample changes.

    pairs: the two samples of a pair are looked at together, as dpo does.
    """
    options = {} if options is None else options
    inputs = random_inputs()
    _check_shape(loss(inputs, options), inputs)
    empty = inputs.where(torch.zeros(len(inputs.sequence_T), dtype=torch.bool))
    _check_shape(loss(empty, options), empty)

    far = replace(inputs, logprobs_T=(inputs.logprobs_T.detach() - 60).requires_grad_())
    _check_shape(loss(far, options), far)
    for name, part in (("near", inputs), ("far", far)):
        found = _gradients(loss, part, options)
        assert all(torch.isfinite(g).all() for g in found), f"a gradient is not finite ({name})"
    _check_split(loss, inputs, options, pairs=pairs)


def _check_shape(result: TokenLoss, inputs: LossInputs) -> None:
    count = len(inputs.sequence_T)
    shape = tuple(result.loss_T.shape)
    assert shape == (count,), f"the loss of {count} tokens has the shape {shape}"
    assert torch.isfinite(result.loss_T).all(), "the loss of a token is not finite"
    for name, value in result.sums.items():
        assert value.ndim == 0, f"the sum {name} has the shape {tuple(value.shape)}, not ()"


def _check_split(loss: Loss, inputs: LossInputs, options: Any, *, pairs: bool) -> None:
    """A micro-batch may hold any of the samples: each must get the gradient that it gets alone."""
    assert inputs.pair_T is not None
    unit_T = inputs.pair_T if pairs else inputs.sequence_T
    whole = _gradients(loss, inputs, options)
    for unit in unit_T.unique():
        mine_T = unit_T == unit
        alone = inputs.where(mine_T)
        # Samples and pairs are numbered from 0 in each micro-batch.
        for name in ("sequence_T", "segment_T", "pair_T"):
            number_T = getattr(alone, name)
            alone = replace(alone, **{name: number_T - number_T.min()})
        alone = _with_leaves(alone)
        for found, expected in zip(_gradients(loss, alone, options), whole, strict=True):
            difference = (found - expected[mine_T]).abs().max().item()
            assert difference <= TOLERANCE, (
                f"the gradient of a sample changes by {difference:.3g} with the other samples of "
                "its micro-batch: sum or average over the tokens of one sample only"
            )


def _with_leaves(inputs: LossInputs) -> LossInputs:
    leaves = {
        name: getattr(inputs, name).detach().requires_grad_()
        for name in ("logprobs_T", "student_TK", "entropy_T")
    }
    return replace(inputs, **leaves)


def _gradients(loss: Loss, inputs: LossInputs, options: Any) -> list[torch.Tensor]:
    total = (inputs.weights_T * loss(inputs, options).loss_T).sum()
    leaves = [inputs.logprobs_T, inputs.student_TK, inputs.entropy_T]
    known = [leaf for leaf in leaves if leaf is not None]
    assert total.requires_grad, "the loss has no gradient: it must look at logprobs_T"
    return list(torch.autograd.grad(total, known, allow_unused=True, materialize_grads=True))


def random_groups() -> list[Group]:
    """Groups of several kinds, with all that models may say of their tokens: unlike scores, a
    reward that failed, scores that are all alike, a single sample."""
    plain = [
        group([1.0, 0.0, 0.5], uid=0, texts=["12", "3", "4567"]),
        group([2.0, None, 0.0], uid=1, texts=["1", "22", "333"]),
        group([1.0, 1.0], uid=2, texts=["11", "2"]),
        group([0.5], uid=3, texts=["123"]),
    ]
    random = np.random.default_rng(0)

    def said(length: int) -> Annotations:
        old, reference, teacher = -0.1 - random.random((3, length))
        values = random.random(length)
        return Annotations(old, reference, teacher, values, float(values[-1]))

    return [annotated(whole, *(said(sample.length) for sample in whole.samples)) for whole in plain]


def check_advantage(advantage: Advantage, options: Any = None) -> None:
    """Raise AssertionError unless every sample gets a finite number, or one for each token; a
    failed reward gets 0; the order of groups changes nothing; no group is no error."""
    options = {} if options is None else options
    groups = random_groups()
    found = _flat(advantage(groups, options), groups)
    turned = _flat(advantage(groups[::-1], options), groups[::-1])
    for uid, value in found.items():
        difference = float(np.max(np.abs(value - turned[uid]), initial=0.0))
        assert difference <= TOLERANCE, f"sample {uid} changes with the order of groups"
    for member in (member for whole in groups for member in whole.members):
        failed = not member.score.ok
        assert not failed or not np.any(found[str(member.sample.uid)]), (
            f"sample {member.sample.uid}, whose reward failed, has an advantage other than 0"
        )
    assert len(advantage([], options)) == 0, "without groups there is nothing to return"


def _flat(values: Any, groups: Sequence[Group]) -> dict[str, Any]:
    assert len(values) == len(groups), f"{len(values)} lists for {len(groups)} groups"
    found: dict[str, Any] = {}
    for whole, of_group in zip(groups, values, strict=True):
        assert len(of_group) == len(whole.members), (
            f"{len(of_group)} values for the {len(whole.members)} samples of group {whole.uid}"
        )
        for sample, value in zip(whole.samples, of_group, strict=True):
            plain = value.advantages_T if isinstance(value, Gae) else value
            numbers = np.asarray(plain, np.float64)
            assert numbers.shape in ((), (sample.length,)), (
                f"sample {sample.uid} of {sample.length} tokens has the shape {numbers.shape}"
            )
            assert np.isfinite(numbers).all(), f"the advantage of {sample.uid} is not finite"
            found[str(sample.uid)] = numbers
    return found

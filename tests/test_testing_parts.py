"""The checks for authors of losses and advantages: built-in ones pass, broken ones are reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.config.names import NAMES, resolve
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.schema.losses import PAIRWISE
from rollick.testing.parts import check_advantage, check_loss
from rollick.types import Group


def load_part(kind: str, name: str) -> tuple[Any, Any]:
    """The function of a name, and its default options."""
    key = {"losses": "loss", "advantages": "advantage"}[kind]
    config = AlgorithmConfig.model_validate({key: name})
    return resolve(kind, name), getattr(config, key)


@pytest.mark.parametrize("name", sorted(NAMES["losses"]))
def test_every_loss_of_ours_keeps_to_it(name: str) -> None:
    function, options = load_part("losses", name)
    check_loss(function, options, pairs=name in PAIRWISE)


@pytest.mark.parametrize("name", sorted(NAMES["advantages"]))
def test_every_advantage_of_ours_keeps_to_it(name: str) -> None:
    function, options = load_part("advantages", name)
    check_advantage(function, options)


def mean_of_the_microbatch(inputs: LossInputs, options: Any) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_T / max(len(inputs.logprobs_T), 1))


def one_number(inputs: LossInputs, options: Any) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_T.sum())


def unbounded(inputs: LossInputs, options: Any) -> TokenLoss:
    return TokenLoss((inputs.behaviour_T - inputs.logprobs_T).mul(50).exp())


def no_gradient(inputs: LossInputs, options: Any) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_T.detach())


def sum_by_token(inputs: LossInputs, options: Any) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_T, {"mine": inputs.logprobs_T.detach()})


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (mean_of_the_microbatch, "changes by .* with the other samples"),
        (one_number, r"the loss of 10 tokens has the shape \(\)"),
        (unbounded, "not finite"),
        (no_gradient, "has no gradient"),
        (sum_by_token, "the sum mine has the shape"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_told_which_rule(loss: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_loss(loss)


def test_a_loss_over_pairs_may_depend_on_both_answers_and_on_no_others() -> None:
    function, options = load_part("losses", "dpo")
    with pytest.raises(AssertionError, match="with the other samples"):
        check_loss(function, options, pairs=False)


def over_the_mean(groups: Sequence[Group], options: Any) -> Any:
    with np.errstate(all="ignore"):
        return [[s / np.mean(g.scores) for s in g.scores] for g in groups]


def only_scored(groups: Sequence[Group], options: Any) -> Any:
    return [[m.score.value for m in g.members if m.score.ok] for g in groups]


def over_the_first_group(groups: Sequence[Group], options: Any) -> Any:
    return [[m.score.value - groups[0].scores[0] if m.score.ok else 0 for m in g.members]
            for g in groups]  # fmt: skip


def failed_as_a_fault(groups: Sequence[Group], options: Any) -> Any:
    return [[m.score.value if m.score.ok else -1.0 for m in g.members] for g in groups]


def of_the_response(groups: Sequence[Group], options: Any) -> Any:
    return [[np.ones(m.sample.response_length) for m in g.members] for g in groups]


@pytest.mark.parametrize(
    ("advantage", "complaint"),
    [
        (over_the_mean, "not finite"),
        (only_scored, "2 values for the 3 samples of group 1"),
        (over_the_first_group, "changes with the order of groups"),
        (failed_as_a_fault, "whose reward failed, has an advantage other than 0"),
        (of_the_response, "has the shape"),
    ],
)
def test_an_advantage_that_breaks_the_contract_is_told_which_rule(
    advantage: Any, complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_advantage(advantage)


def test_the_checks_do_not_disturb_what_torch_knows_of_random_numbers() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    check_loss(*load_part("losses", "ppo"))
    assert torch.equal(before, torch.random.get_rng_state())

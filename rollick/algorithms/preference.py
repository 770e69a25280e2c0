"""Losses of pairs: a chosen and a rejected answer to the same prompt. Pure.

(LossInputs, options) -> TokenLoss. The two answers of a pair have one number in `pair_T`; the
chosen one has positive advantages, the other negative ones. The margin of a pair is how much more
the policy prefers the chosen answer than the reference does: the sum over its tokens of
log pi - log pi_ref, minus that of the rejected answer. Each token carries the loss of its pair, so
that the aggregation prompt_mean is the mean over pairs.

Shapes: T trained tokens, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import logsigmoid

from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.config.losses import DpoLoss, IpoLoss
from rollick.errors import ConfigError


def dpo(inputs: LossInputs, options: DpoLoss) -> TokenLoss:
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), e the share of wrong labels."""
    beta, wrong = options.beta, options.label_smoothing

    def loss(margin_P: torch.Tensor) -> torch.Tensor:
        right_P, other_P = logsigmoid(beta * margin_P), logsigmoid(-beta * margin_P)
        return -(1 - wrong) * right_P - wrong * other_P

    return _over_pairs(inputs, loss)


def ipo(inputs: LossInputs, options: IpoLoss) -> TokenLoss:
    """(1 - e) (m - 1 / (2 beta))^2 + e (m + 1 / (2 beta))^2.

    A margin to meet instead of one to grow for ever (arXiv 2310.12036).
    """
    goal, wrong = 1 / (2 * options.beta), options.label_smoothing

    def loss(margin_P: torch.Tensor) -> torch.Tensor:
        right_P, other_P = (margin_P - goal).square(), (margin_P + goal).square()
        return (1 - wrong) * right_P + wrong * other_P

    return _over_pairs(inputs, loss)


def _over_pairs(inputs: LossInputs, loss: Callable[[torch.Tensor], torch.Tensor]) -> TokenLoss:
    if inputs.pair_T is None or inputs.reference_T is None:
        raise ConfigError(
            "a loss of pairs needs to know the pair of each token, and log-probs of a reference",
            fix="use pipeline dpo",
        )
    sign_T = inputs.advantages_T.sign()
    gained_T = sign_T * (inputs.logprobs_T - inputs.reference_T.detach())
    pairs = int(inputs.pair_T.max()) + 1 if len(inputs.pair_T) else 0
    margin_P = gained_T.new_zeros(pairs).index_add(0, inputs.pair_T, gained_T)
    loss_T = loss(margin_P)[inputs.pair_T]
    with torch.no_grad():
        sums = {
            "preferred": (margin_P > 0)[inputs.pair_T].sum(),
            "margin": margin_P[inputs.pair_T].sum(),
        }
    return TokenLoss(loss_T, sums)

"""Preference losses on pairs of a chosen and a rejected answer: (LossInputs, options) -> TokenLoss.

The two answers of a pair share an index in `pair_T`; the chosen one has positive advantages, the
rejected one negative. The margin of a pair is the sum of log pi - log pi_ref over the tokens of the
chosen answer, minus that of the rejected answer. Each token carries the loss of its pair, so that
the aggregation prompt_mean is the mean over pairs.

Shapes: T trained tokens, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import logsigmoid

from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.config.schema.losses import PairLoss
from rollick.errors import ConfigError


def dpo(inputs: LossInputs, options: PairLoss) -> TokenLoss:
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), with label smoothing e."""
    beta, smoothing = options.beta, options.label_smoothing

    def loss(margin_P: torch.Tensor) -> torch.Tensor:
        kept_P, swapped_P = logsigmoid(beta * margin_P), logsigmoid(-beta * margin_P)
        return -(1 - smoothing) * kept_P - smoothing * swapped_P

    return _pair_loss(inputs, loss)


def ipo(inputs: LossInputs, options: PairLoss) -> TokenLoss:
    """(1 - e) (m - 1 / (2 beta))^2 + e (m + 1 / (2 beta))^2.

    The margin has a target instead of growing without bound (arXiv 2310.12036).
    """
    target, smoothing = 1 / (2 * options.beta), options.label_smoothing

    def loss(margin_P: torch.Tensor) -> torch.Tensor:
        kept_P, swapped_P = (margin_P - target).square(), (margin_P + target).square()
        return (1 - smoothing) * kept_P + smoothing * swapped_P

    return _pair_loss(inputs, loss)


def _pair_loss(inputs: LossInputs, loss: Callable[[torch.Tensor], torch.Tensor]) -> TokenLoss:
    if inputs.pair_T is None or inputs.reference_T is None:
        raise ConfigError(
            "a preference loss needs the pair and the reference log-prob of each token",
            fix="use pipeline dpo",
        )
    sign_T = inputs.advantages_T.sign()
    log_ratio_T = sign_T * (inputs.logprobs_T - inputs.reference_T.detach())
    num_pairs = int(inputs.pair_T.max()) + 1 if len(inputs.pair_T) else 0
    margin_P = log_ratio_T.new_zeros(num_pairs).index_add(0, inputs.pair_T, log_ratio_T)
    loss_T = loss(margin_P)[inputs.pair_T]
    with torch.no_grad():
        sums = {
            "preference_accuracy": (margin_P > 0)[inputs.pair_T].sum(),
            "margin": margin_P[inputs.pair_T].sum(),
        }
    return TokenLoss(loss_T, sums)

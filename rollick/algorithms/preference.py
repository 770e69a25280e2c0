"""Losses on pairs of a better and a worse answer: of a policy (dpo, ipo), and of a reward model.

Pure functions. A policy's are (LossInputs, options) -> TokenLoss. The two answers of a pair share
an index in `pair_T`; the chosen one has positive advantages, the rejected one negative. The margin
of a pair is the sum of log pi - log pi_ref over the tokens of the chosen answer, minus that of the
rejected answer. Each token carries the loss of its pair, so that the aggregation prompt_mean is the
mean over pairs.

Shapes: T trained tokens, B samples, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.algorithms.objective import Loss
from rollick.config.schema.losses import PairLoss
from rollick.errors import ConfigError


def dpo(inputs: LossInputs, options: PairLoss) -> TokenLoss:
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), with label smoothing e."""
    beta, smoothing = options.beta, options.label_smoothing

    def loss(margin_P: torch.Tensor) -> torch.Tensor:
        likely_P, swapped_P = logsigmoid(beta * margin_P), logsigmoid(-beta * margin_P)
        return -(1 - smoothing) * likely_P - smoothing * swapped_P

    return _pair_loss(inputs, loss)


def ipo(inputs: LossInputs, options: PairLoss) -> TokenLoss:
    """(1 - e) (m - 1 / (2 beta))^2 + e (m + 1 / (2 beta))^2.

    The margin has a target instead of growing without bound (arXiv 2310.12036).
    """
    target, smoothing = 1 / (2 * options.beta), options.label_smoothing

    def loss(margin_P: torch.Tensor) -> torch.Tensor:
        likely_P, swapped_P = (margin_P - target).square(), (margin_P + target).square()
        return (1 - smoothing) * likely_P + smoothing * swapped_P

    return _pair_loss(inputs, loss)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInputs:
    """The inputs of a reward-model loss. `scores_B` carries the gradient."""

    scores_B: torch.Tensor
    better_B: torch.Tensor
    """1 for the better answer of a pair, -1 for the other."""
    pair_B: torch.Tensor
    """Index of its pair, ascending from 0. Both answers of a pair are present."""
    weights_B: torch.Tensor


def bradley_terry(inputs: ScoreInputs) -> Loss:
    """-log sigmoid(better - worse): the Bradley-Terry model of preferences (1952).

    The weight of a sample is the sum of its tokens' weights. With the aggregation prompt_mean the
    loss is the mean over all pairs of the batch, whatever its split.
    """
    pairs = int(inputs.pair_B.max()) + 1 if len(inputs.pair_B) else 0
    zeros_P = inputs.scores_B.new_zeros(pairs)
    margin_P = zeros_P.index_add(0, inputs.pair_B, inputs.better_B * inputs.scores_B)
    weights_P = zeros_P.index_add(0, inputs.pair_B, inputs.weights_B)
    total = -(weights_P * logsigmoid(margin_P)).sum()
    with torch.no_grad():
        sums = {"preference_accuracy": (margin_P > 0).sum(), "margin": margin_P.sum()}
    return Loss(total, sums)


def _pair_loss(inputs: LossInputs, loss: Callable[[torch.Tensor], torch.Tensor]) -> TokenLoss:
    if inputs.pair_T is None or inputs.reference_T is None:
        raise ConfigError(
            "a preference loss needs the pair and the reference log-prob of each token",
            fix="use pipeline dpo",
        )
    sign_T = inputs.advantages_T.sign()
    log_ratio_T = sign_T * (inputs.logprobs_T - inputs.reference_T.detach())
    pairs = int(inputs.pair_T.max()) + 1 if len(inputs.pair_T) else 0
    margin_P = log_ratio_T.new_zeros(pairs).index_add(0, inputs.pair_T, log_ratio_T)
    loss_T = loss(margin_P)[inputs.pair_T]
    with torch.no_grad():
        sums = {
            "preference_accuracy": (margin_P > 0)[inputs.pair_T].sum(),
            "margin": margin_P[inputs.pair_T].sum(),
        }
    return TokenLoss(loss_T, sums)

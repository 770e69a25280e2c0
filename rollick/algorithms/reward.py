"""The loss of a reward model: of two answers to a prompt it should give the better one more. Pure.

B samples, P pairs. A sample's weight is the sum over its tokens of the aggregation's weights, so
that with prompt_mean the loss is the mean over the pairs of the whole batch, however it is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from rollick.algorithms.objective import Loss


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInputs:
    """What the loss of a reward model may look at. `scores_B` carries the gradient.

    better_B: 1 for the better answer of a pair, -1 for the other. pair_B: number of its pair,
    ascending from 0. Both answers of a pair are there.
    """

    scores_B: torch.Tensor
    better_B: torch.Tensor
    pair_B: torch.Tensor
    weights_B: torch.Tensor


def bradley_terry(inputs: ScoreInputs) -> Loss:
    """-log sigmoid(better - worse), the chance of the given order (Bradley and Terry, 1952)."""
    pairs = int(inputs.pair_B.max()) + 1 if len(inputs.pair_B) else 0
    zeros_P = inputs.scores_B.new_zeros(pairs)
    margin_P = zeros_P.index_add(0, inputs.pair_B, inputs.better_B * inputs.scores_B)
    weights_P = zeros_P.index_add(0, inputs.pair_B, inputs.weights_B)
    total = -(weights_P * logsigmoid(margin_P)).sum()
    with torch.no_grad():
        sums = {"ordered": (margin_P > 0).sum(), "margin": margin_P.sum()}
    return Loss(total, sums)

"""The loss of a reward model on pairs of a better and a worse answer.

B samples, P pairs. The weight of a sample is the sum of its tokens' weights. With the aggregation
prompt_mean the loss is the mean over all pairs of the batch, however it is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from rollick.algorithms.objective import Loss


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
    """-log sigmoid(better - worse): the Bradley-Terry model of preferences (1952)."""
    num_pairs = int(inputs.pair_B.max()) + 1 if len(inputs.pair_B) else 0
    zeros_P = inputs.scores_B.new_zeros(num_pairs)
    margin_P = zeros_P.index_add(0, inputs.pair_B, inputs.better_B * inputs.scores_B)
    weights_P = zeros_P.index_add(0, inputs.pair_B, inputs.weights_B)
    total = -(weights_P * logsigmoid(margin_P)).sum()
    with torch.no_grad():
        sums = {"preference_accuracy": (margin_P > 0).sum(), "margin": margin_P.sum()}
    return Loss(total, sums)

"""The loss of a micro-batch over its trained tokens, as both strategies compute it.

    ForwardOutput -> LossInputs -> loss -> LossAccumulator

Legend: T trained tokens of a micro-batch, K likeliest tokens of a position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollick.algorithms.kl import k3
from rollick.algorithms.losses import LossInputs
from rollick.data.batch import Batch
from rollick.trainer.microbatch import PackedBatch, loss_inputs
from rollick.trainer.router_balance import Routing
from rollick.trainer.strategy import LossFn
from rollick.trainer.trainable_model import LossAccumulator
from rollick.types import NOT_SAMPLED, BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """The result of a forward, for all trained tokens of a micro-batch."""

    logprobs_T: Tensor
    entropy_T: Tensor
    student_TK: Tensor | None
    """Log-probs of the teacher's likeliest tokens, if the batch has these."""
    routing: Routing | None
    """Of the rows on this rank, if the recipe balances experts."""


def add_token_loss(
    part: Batch,
    packed: PackedBatch,
    output: ForwardOutput,
    *,
    loss: LossFn,
    accumulator: LossAccumulator,
) -> Tensor:
    """The loss of a micro-batch; its metrics are added to the accumulator."""
    inputs = loss_inputs(
        part,
        packed,
        output.logprobs_T,
        entropy_T=None if part.entropy_weights_N is None else output.entropy_T,
        student_TK=output.student_TK,
    )
    result = loss(inputs)
    sums = {**result.sums, "entropy": output.entropy_T.detach().sum()}
    accumulator.add(result.total, sums, tokens=len(output.logprobs_T))
    _add_mismatch(accumulator, inputs, part.versions_N[packed.indices_T] != NOT_SAMPLED)
    return result.total


@torch.no_grad()
def _add_mismatch(
    accumulator: LossAccumulator, inputs: LossInputs, is_sampled_T: BoolArray
) -> None:
    """How far the policy is from the one that sampled the tokens; other tokens do not count."""
    if not is_sampled_T.any():
        return
    sampled = torch.as_tensor(is_sampled_T, device=inputs.logprobs_T.device)
    now_T, behaviour_T = inputs.logprobs_T[sampled], inputs.behaviour_T[sampled]
    accumulator.add_sum("mismatch_kl", k3(behaviour_T, now_T).sum())
    accumulator.add_maximum("probability_change", (now_T.exp() - behaviour_T.exp()).abs().max())

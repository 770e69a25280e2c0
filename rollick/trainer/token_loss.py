"""The loss of a micro-batch in both strategies: the loss of its trained tokens, and the
load-balancing loss of a mixture of experts.

    ForwardOutput -> LossInputs -> loss -> LossAccumulator

The load-balancing loss is the same for any division of a batch. For each layer: E * sum over
experts of (fraction of rows that chose it) * (its mean probability). It is top_k if all experts are
chosen equally often, and larger otherwise (Switch Transformer, arXiv 2101.03961; there with one
choice per row). Choices have no gradient, so with the counts of the *complete* batch the loss is a
sum over rows, and any micro-batches and ranks give the same gradient. It covers the rows that
predict trained tokens, which do not depend on the packing.

Legend: T trained tokens of a micro-batch, K likeliest tokens of a position, L layers with experts,
E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollick.algorithms.kl import k3
from rollick.algorithms.losses import LossInputs
from rollick.data.batch import Batch
from rollick.errors import ModelError
from rollick.trainer.microbatch import PackedBatch, loss_inputs
from rollick.trainer.strategy import LossFn
from rollick.trainer.trainable_model import LossAccumulator
from rollick.types import NOT_SAMPLED, BoolArray


class Routing(NamedTuple):
    """How often each expert was chosen by some rows, and the sum of its probabilities."""

    counts_LE: Tensor
    sums_LE: Tensor
    """With a gradient."""


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
    microbatch: Batch,
    packed: PackedBatch,
    output: ForwardOutput,
    *,
    loss: LossFn,
    accumulator: LossAccumulator,
) -> Tensor:
    """The loss of a micro-batch; adds its metrics to the accumulator."""
    inputs = loss_inputs(
        microbatch,
        packed,
        output.logprobs_T,
        entropy_T=None if microbatch.entropy_weights_N is None else output.entropy_T,
        student_TK=output.student_TK,
    )
    result = loss(inputs)
    sums = {**result.sums, "entropy": output.entropy_T.detach().sum()}
    accumulator.add(result.total, sums, tokens=len(output.logprobs_T))
    _add_mismatch(accumulator, inputs, microbatch.versions_N[packed.indices_T] != NOT_SAMPLED)
    return result.total


@torch.no_grad()
def _add_mismatch(
    accumulator: LossAccumulator, inputs: LossInputs, is_sampled_T: BoolArray
) -> None:
    """Add metrics of the mismatch between the current and the behaviour policy, over sampled
    tokens."""
    if not is_sampled_T.any():
        return
    mask_T = torch.as_tensor(is_sampled_T, device=inputs.logprobs_T.device)
    current_T, behaviour_T = inputs.logprobs_T[mask_T], inputs.behaviour_T[mask_T]
    accumulator.add_sum("mismatch_kl", k3(behaviour_T, current_T).sum())
    accumulator.add_maximum("probability_change", (current_T.exp() - behaviour_T.exp()).abs().max())


class RouterLog:
    """Records the router logits of a model."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        # The experts of a multimodal model are in its text decoder.
        text_config = config.get_text_config()
        self._logits: list[Tensor] | None = None
        self._top_k = int(getattr(text_config, "num_experts_per_tok", None) or 0)
        routers = _find_routers(model)
        if not routers or not self._top_k:
            raise ModelError(
                f"train.expert_balance is set, and {type(model).__name__} has no experts",
                fix="remove train.expert_balance",
            )
        for router, index in routers:
            router.register_forward_hook(partial(self._record, index))

    @contextmanager
    def recording(self) -> Generator[None]:
        """Records one forward; layers that are recomputed later are not recorded."""
        self._logits = []
        yield
        self._recorded, self._logits = self._logits, None

    def of_rows(self, rows: Tensor) -> Routing:
        """The routing of these rows in the recorded forward."""
        probabilities = [logits[rows].softmax(-1) for logits in self._recorded]
        self._recorded = []
        experts, dtype = probabilities[0].shape[-1], probabilities[0].dtype
        with torch.no_grad():
            chosen = [p.topk(self._top_k, dim=-1).indices.flatten() for p in probabilities]
            counts = [torch.bincount(indices, minlength=experts) for indices in chosen]
        sums_LE = torch.stack([p.sum(0) for p in probabilities])
        return Routing(torch.stack(counts).to(dtype), sums_LE)

    def _record(self, index: int, _: nn.Module, __: Any, output: Any) -> None:
        if self._logits is not None:
            logits = output[index] if isinstance(output, tuple) else output
            self._logits.append(logits.flatten(0, -2))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBalance:
    """The load-balancing loss of a batch of `rows` rows. Without counts, the batch is one
    micro-batch. A sharded learner passes functions that sum over ranks."""

    coefficient: float
    rows: int
    counts_LE: Tensor | None
    sum_counts: Callable[[Tensor], Tensor] = Tensor.detach
    sum_loss: Callable[[Tensor], Tensor] = Tensor.detach

    def add(self, routing: Routing | None, accumulator: LossAccumulator) -> Tensor:
        """The loss term of a micro-batch; adds its metrics to the accumulator."""
        assert routing is not None
        counts_LE = self.counts_LE
        if counts_LE is None:
            counts_LE = self.sum_counts(routing.counts_LE.clone())
        layers, experts = counts_LE.shape
        rows = max(self.rows, 1)
        loss = experts / layers * (counts_LE / rows * routing.sums_LE).sum() / rows
        value = self.sum_loss(loss.detach().clone())
        accumulator.add_sum("total", self.coefficient * value)
        accumulator.add_sum("expert_balance", value * self.rows)  # A mean over the batch's rows.
        return self.coefficient * loss


def _find_routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """(router, index of the logits in its output) for each router that the model declares."""
    declared: Any = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorders: Any = declared.get("router_logits") or ()
    routers: list[tuple[nn.Module, int]] = []
    for recorder in recorders if isinstance(recorders, list | tuple) else (recorders,):
        target = getattr(recorder, "target_class", recorder)
        index = int(getattr(recorder, "index", 0))
        routers += [(module, index) for module in model.modules() if isinstance(module, target)]
    return routers

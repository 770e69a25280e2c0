"""The sharded strategy: a language model sharded over many ranks.

Losses and metrics cover all samples, as in local.py. See parallel/model.py for the ranks.

    log-probs of the trained tokens, gathered over the ranks of the pack -> the same loss on each of
          them -> backward

Legend: N tokens of a batch, T trained ones of a pack, K top tokens of a position, L layers, E
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollick.config.schema import ModelConfig, ParallelConfig, Recipe
from rollick.data.batch import Batch, TopTokens
from rollick.models.attention.varlen import VARLEN
from rollick.models.loading.load import empty_model, save_with_tokenizer, write_model
from rollick.trainer.microbatch import PackedBatch, trained_tokens
from rollick.trainer.optimizer import check_gradient_dtype
from rollick.trainer.parallel.checkpoint import describe_regions
from rollick.trainer.parallel.collectives import all_sum, wait_for_all
from rollick.trainer.parallel.model import ModelSource, ShardedModel, empty_batch
from rollick.trainer.parallel.rank_forward import TokenForward, TokenTargets
from rollick.trainer.parallel.shard import gather_full_tensors, local_tensor
from rollick.trainer.strategy import (
    LocalShards,
    LossFn,
    LossReport,
    Region,
    ShardedWeights,
    WeightStream,
)
from rollick.trainer.token_loss import ExpertBalance, ForwardOutput, Routing, add_token_loss
from rollick.trainer.trainable_model import (
    LossAccumulator,
    check_packable,
    load_packed_model,
    policy_optimizer,
    token_indices,
)
from rollick.types import FloatArray


class FsdpStrategy(ShardedModel):
    """Trains a sharded model; if not trainable, it only computes log-probs.

    `dtype` overrides the recipe's. `model` and `parallel` override the policy's (for a teacher);
    `vocabulary` restricts its output to the first `vocabulary` tokens.
    """

    has_random_state = True

    def __init__(
        self,
        recipe: Recipe,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        trainable: bool = True,
        model: ModelConfig | None = None,
        parallel: ParallelConfig | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self._regions: Sequence[Mapping[str, Region]] = ()
        config, train = model or recipe.model, recipe.train
        max_length = recipe.infer.max_length

        def build() -> nn.Module:
            check_packable(config)
            return empty_model(config, attention=VARLEN)

        load = partial(load_packed_model, config, device="cpu", max_length=max_length)
        make_forward = partial(
            TokenForward,
            chunk=train.logprob_chunk_tokens,
            routers=trainable and train.expert_balance > 0,
            vocabulary=vocabulary,
        )
        super().__init__(
            recipe,
            ModelSource(config, build, load, max_length),
            make_forward,
            parallel=parallel or train.parallel,
            device=device,
            dtype=dtype,
            make_optimizer=partial(policy_optimizer, recipe=recipe) if trainable else None,
        )

    def run_empty_forward(self) -> None:
        self._forward_only(empty_batch())

    def logprobs(self, batch: Batch) -> FloatArray:
        logprobs_N = np.zeros(batch.tokens, dtype=np.float32)
        for samples in self.plan_microbatches(batch):
            output, packed = self._forward_only(batch.take(samples))
            if samples:
                indices_T = token_indices(batch, samples)[packed.indices_T]
                logprobs_N[indices_T] = output.logprobs_T.float().cpu().numpy()
        return logprobs_N

    def top_logprobs(self, batch: Batch, *, k: int) -> TopTokens:
        """See LocalStrategy.top_logprobs."""
        ids_NK = np.zeros((batch.tokens, k), dtype=np.int32)
        logprobs_NK = np.zeros((batch.tokens, k), dtype=np.float32)
        for samples in self.plan_microbatches(batch):
            microbatch = batch.take(samples)
            packed, share = self.share(microbatch)
            with self.forward_only():
                targets = TokenTargets.of(packed, microbatch, share.trained)
                ids_TK, top_TK = self.forward(share, targets, k)
            if samples:
                indices_T = token_indices(batch, samples)[packed.indices_T]
                ids_NK[indices_T] = ids_TK.cpu().numpy()
                logprobs_NK[indices_T] = top_TK.float().cpu().numpy()
        return TopTokens(ids_NK, logprobs_NK)

    def forward_backward(self, batch: Batch, loss: LossFn) -> LossReport:
        check_gradient_dtype(self.precision.compute)
        accumulator = LossAccumulator()
        plan = self.plan_microbatches(batch)
        balance = self._expert_balance(batch, plan)
        for samples in plan:
            microbatch = batch.take(samples)
            output, packed = self._forward(microbatch)
            total = output.logprobs_T.sum()
            if samples:
                total = add_token_loss(
                    microbatch, packed, output, loss=loss, accumulator=accumulator
                )
            if balance is not None:
                total = total + balance.add(output.routing, accumulator)
            total.backward()
        return self.sum_reports(accumulator)

    def weights(self) -> ShardedWeights:
        """Copies of the full parameters under their public names, one at a time. A collective: all
        ranks must iterate in order."""
        dtype, named = self.precision.compute, self.sharded_optimizer.parameters.items()
        empty_tensor = partial(torch.empty, dtype=dtype, device="meta")
        shapes = [(name, empty_tensor(value.shape)) for name, value in named]

        def convert_shards() -> WeightStream:
            return ((name, local_tensor(value).to(dtype)) for name, value in named)

        shards = LocalShards(self.grid.rank, self._gather_regions, convert_shards)
        return ShardedWeights(shapes, gather_full_tensors(named, dtype), shards)

    def _gather_regions(self) -> Sequence[Mapping[str, Region]]:
        """The part of each parameter that each rank has."""
        if not self._regions:
            own = describe_regions(self.sharded_optimizer.parameters)
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, own)
            self._regions = gathered
        return self._regions

    def export(self, path: Path) -> None:
        """Write a Hugging Face folder with the tokenizer, on the first rank."""
        if self.grid.rank == 0:
            write_model(path, self.model, self.weights(), dtype=self.precision.compute)
            save_with_tokenizer(None, self.model_config, path)
        else:
            for _ in self.weights():
                pass
        wait_for_all()

    def _forward(self, microbatch: Batch) -> tuple[ForwardOutput, PackedBatch]:
        packed, share = self.share(microbatch)
        targets = TokenTargets.of(packed, microbatch, share.trained)
        logprobs_T, entropy_T, student_TK, counts_LE, sums_LE = self.forward(share, targets)
        routing = None if counts_LE is None else Routing(counts_LE, sums_LE)
        return ForwardOutput(logprobs_T, entropy_T, student_TK, routing), packed

    def _forward_only(self, microbatch: Batch) -> tuple[ForwardOutput, PackedBatch]:
        with self.forward_only():
            return self._forward(microbatch)

    def _expert_balance(self, batch: Batch, plan: list[list[int]]) -> ExpertBalance | None:
        """The load-balancing loss over the rows of all ranks, with their counts if there are
        several micro-batches."""
        coefficient = self.recipe.train.expert_balance
        if not coefficient:
            return None
        sum_counts = partial(all_sum, group=self.grid.shard_mesh.get_group())
        sum_loss = partial(all_sum, group=self.grid.context_mesh.get_group())
        counts_LE: Tensor | None = None
        if len(plan) > 1:
            for samples in plan:
                routing = self._forward_only(batch.take(samples))[0].routing
                assert routing is not None
                counts_LE = routing.counts_LE + (0 if counts_LE is None else counts_LE)
            assert counts_LE is not None
            sum_counts(counts_LE)
        rows = torch.tensor(len(trained_tokens(batch)[0]), device=self.device)
        if self.grid.shape.replicas > 1:
            all_sum(rows, self.grid.replica_mesh.get_group())
        return ExpertBalance(coefficient, int(rows), counts_LE, sum_counts, sum_loss)

"""The sharded strategy: a model sharded over many ranks, with FSDP2 on torch's device meshes.

All ranks make the same calls, each with its own samples of a batch (parallel/shares.py); ranks of
one replica get the same samples. Losses and metrics cover all samples, as in local.py. See
parallel/mesh.py for the grid of ranks, and parallel/rank_forward.py for a rank's share of a pack.

    this rank's Batch -> micro-batches -> PackedBatch -> this rank's rows of the pack
          -> hidden states -> log-probs of its share of the trained tokens -> gathered over the
          ranks of the pack -> the same loss on each of them -> backward

A rank with fewer micro-batches than another runs empty ones, because the collectives of a layer
need all ranks. Weights in a batch are global, so gradients are summed and never averaged.

Legend: N tokens of a batch, T trained ones of a pack, L layers, E experts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rollick.config.schema import Recipe
from rollick.data.batch import Batch
from rollick.models.bf16_probe import safe_environment
from rollick.models.loading.load import resolve_dtype, save_with_tokenizer, write_model
from rollick.models.loading.rope import check_lengths, fix_rope
from rollick.trainer.microbatch import PackedBatch, microbatches, pack, trained_tokens
from rollick.trainer.offload import OffloadedTensors
from rollick.trainer.optimizer import MasterAdamW, check_gradient_dtype
from rollick.trainer.parallel.checkpoint import (
    describe_shards,
    load_snapshots,
    load_state,
    save_state,
)
from rollick.trainer.parallel.collectives import all_sum, wait_for_all
from rollick.trainer.parallel.mesh import Grid, GridShape, join_process_group
from rollick.trainer.parallel.rank_forward import RankForward, share_pack
from rollick.trainer.parallel.shard import (
    Precision,
    ShardedOptimizer,
    build_model,
    gather_full_tensors,
    load_on_first_rank,
    load_shards,
    shard,
)
from rollick.trainer.parallel.shares import RowCost
from rollick.trainer.strategy import LossFn, LossReport, OptimReport, ShardedWeights, TrainState
from rollick.trainer.token_loss import ExpertBalance, ForwardOutput, Routing, add_token_loss
from rollick.trainer.trainable_model import LossAccumulator, token_indices
from rollick.types import FloatArray

TIMED_SIZE, TIMED_PRODUCTS = {"cpu": 256, "cuda": 2048}, 24
"""Size of the square matrices that `time_fixed_work` multiplies, by device type, and the number of
products. It takes milliseconds."""


class FsdpStrategy:
    """Trains a model that is sharded over the ranks of torch's process group. `dtype` overrides the
    recipe's, for parameters and computation."""

    def __init__(
        self, recipe: Recipe, *, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        join_process_group(None, 0, device=device)
        self.recipe = recipe
        self.device = device
        parallel = recipe.train.parallel
        self.grid = Grid(GridShape.of(parallel, dist.get_world_size()), device=device)
        compute = dtype or resolve_dtype(recipe.model, device)
        if compute is torch.bfloat16 and device.startswith("cpu"):
            os.environ.update(safe_environment())
        self.precision = Precision(dtype or torch.float32, compute)
        self.offload = parallel.offload
        train, grid, precision, offload = recipe.train, self.grid, self.precision, self.offload
        model, experts = build_model(recipe.model, grid, parallel=parallel, master=precision.master)
        self.model = model.eval()
        config: Any = model.config
        self.cost = RowCost.of(config.get_text_config())
        self.forward = RankForward(
            model, grid, chunk=train.logprob_chunk_tokens, routers=train.expert_balance > 0
        )
        shard(self.forward, model, experts, grid=grid, precision=precision, offload=offload)
        source = load_on_first_rank(recipe.model, grid, max_length=recipe.infer.max_length)
        load_shards(model, source, device=device, offload=offload)
        fix_rope(model, recipe.infer.max_length)
        # The first forward moves shards to other memory (padded or pinned), so it must run before
        # the optimizer references them.
        self._forward_only(empty_batch())
        self.sharded_optimizer = ShardedOptimizer(model, recipe, grid=grid, device=device)
        self._offloaded = OffloadedTensors()

    @property
    def optimizer(self) -> MasterAdamW:
        """The optimizer of the shards on this rank."""
        return self.sharded_optimizer.local_optimizer

    @property
    def module(self) -> None:
        """None: an engine cannot share sharded parameters."""
        return None

    def logprobs(self, batch: Batch) -> FloatArray:
        logprobs_N = torch.zeros(batch.tokens, device=self.device)
        for samples in self._microbatches(batch):
            output, packed = self._forward_only(batch.take(samples))
            if samples:
                indices_T = token_indices(batch, samples)[packed.indices_T]
                logprobs_N[torch.as_tensor(indices_T)] = output.logprobs_T.float()
        return logprobs_N.cpu().numpy()

    def forward_backward(self, batch: Batch, loss: LossFn) -> LossReport:
        check_gradient_dtype(self.precision.compute)
        accumulator = LossAccumulator()
        plan = self._microbatches(batch)
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
        return self._sum_reports(accumulator)

    def step(self) -> OptimReport:
        return self.sharded_optimizer.step()

    def weights(self) -> ShardedWeights:
        """Copies of the full parameters under their public names, one at a time. A collective: all
        ranks must iterate in order."""
        dtype, named = self.precision.compute, self.sharded_optimizer.parameters.items()
        empty_tensor = partial(torch.empty, dtype=dtype, device="meta")
        shapes = [(name, empty_tensor(value.shape)) for name, value in named]
        return ShardedWeights(shapes, gather_full_tensors(named, dtype))

    def export(self, path: Path) -> None:
        """Write a Hugging Face folder with the tokenizer, on the first rank."""
        if self.grid.rank == 0:
            write_model(path, self.model, self.weights(), dtype=self.precision.compute)
            save_with_tokenizer(None, self.recipe.model, path)
        else:
            for _ in self.weights():
                pass
        wait_for_all()

    def save(self, path: Path) -> None:
        """Write masters, moments, counters and random states, for any number of ranks."""
        self.wake()
        save_state(path, self.sharded_optimizer.state(), steps=self.optimizer.steps)

    def load(self, path: Path) -> None:
        self.wake()
        self.sharded_optimizer.resume(load_state(path, self.sharded_optimizer.state()))

    def state(self) -> TrainState:
        """The state of the shards on this rank. Can be called while asleep."""
        tensors = self.optimizer.tensors() | self._offloaded.copies
        tensors["rng.cpu"] = torch.get_rng_state()
        return TrainState(
            tensors, self.optimizer.steps, describe_shards(self.sharded_optimizer.state())
        )

    def restore_all(self, states: Sequence[TrainState]) -> None:
        self.wake()
        self.sharded_optimizer.resume(load_snapshots(states, self.sharded_optimizer.state()))

    @torch.no_grad()
    def restore(self, state: TrainState) -> None:
        self.wake()
        for name, tensor in self.optimizer.tensors().items():
            tensor.copy_(state.tensors[name])
        self.sharded_optimizer.resume(state.steps)
        torch.set_rng_state(state.tensors["rng.cpu"])

    def sleep(self, *, keep_parameters: bool = False) -> None:
        """`keep_parameters` has no effect: no engine shares sharded parameters."""
        if self.device.startswith("cuda") and not self.offload and not self._offloaded:
            self._offloaded.move_to_host(self.optimizer.tensors())
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._offloaded.restore_from_host()

    def time_fixed_work(self) -> float:
        """Measure the seconds of some matrix products on this rank alone. Training calls cannot
        show a slow rank, because ranks wait for each other in every layer."""
        is_cuda = self.device.startswith("cuda")
        size = TIMED_SIZE["cuda" if is_cuda else "cpu"]
        matrix = torch.full((size, size), 1 / size, device=self.device)
        product = matrix @ matrix  # Loads the kernel before the timing starts.
        if is_cuda:
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(TIMED_PRODUCTS):
            product = matrix @ product
        if is_cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _forward(self, microbatch: Batch) -> tuple[ForwardOutput, PackedBatch]:
        check_lengths(self.model, microbatch.lengths_B.tolist())
        packed = pack(
            microbatch,
            device=self.device,
            deterministic=False,
            share_prefix=self.recipe.train.share_prefix,
            min_rows=self.grid.shape.context,
        )
        share = share_pack(packed, microbatch, grid=self.grid, cost=self.cost)
        logprobs_T, entropy_T, student_TK, counts_LE, sums_LE = self.forward(
            share, microbatch.entropy_weights_N is not None
        )
        routing = None if counts_LE is None else Routing(counts_LE, sums_LE)
        return ForwardOutput(logprobs_T, entropy_T, student_TK, routing), packed

    @torch.no_grad()
    def _forward_only(self, microbatch: Batch) -> tuple[ForwardOutput, PackedBatch]:
        """Reshards after the forward: the next one would otherwise use the gathered parameters even
        after an update."""
        result = self._forward(microbatch)
        assert isinstance(self.forward, FSDPModule)
        self.forward.reshard()
        return result

    def _microbatches(self, batch: Batch) -> list[list[int]]:
        """The samples of each micro-batch of this rank's replica. All ranks have equally many; the
        last ones may be empty."""
        train = self.recipe.train
        plan = microbatches(
            batch,
            # A pack is divided over the ranks of `context`.
            tokens=train.tokens_per_microbatch * self.grid.shape.context,
            by_uid=False,
            share_prefix=train.share_prefix,
            keep_groups=self.recipe.compares_pairs,
        )
        count = torch.tensor(len(plan), device=self.device)
        if self.grid.shape.replicas > 1:
            dist.all_reduce(count, dist.ReduceOp.MAX, group=self.grid.replicas.get_group())
        return plan + [[] for _ in range(int(count) - len(plan))]

    def _expert_balance(self, batch: Batch, plan: list[list[int]]) -> ExpertBalance | None:
        """The load-balancing loss over the rows of all ranks, with their counts if there are
        several micro-batches."""
        coefficient = self.recipe.train.expert_balance
        if not coefficient:
            return None
        sum_counts = partial(all_sum, group=self.grid.shards.get_group())
        sum_loss = partial(all_sum, group=self.grid.contexts.get_group())
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
            all_sum(rows, self.grid.replicas.get_group())
        return ExpertBalance(coefficient, int(rows), counts_LE, sum_counts, sum_loss)

    def _sum_reports(self, accumulator: LossAccumulator) -> LossReport:
        """The report over all replicas; the ranks of one replica have equal reports."""
        report = accumulator.report()
        if self.grid.shape.replicas == 1:
            return report
        reports: list[Any] = [None] * self.grid.shape.replicas
        dist.all_gather_object(reports, report, group=self.grid.replicas.get_group())
        return LossReport.of(reports)


def empty_batch() -> Batch:
    """A batch without samples, for a rank that takes part in collectives only."""
    integers, numbers = np.empty(0, np.int32), np.empty(0, np.float32)
    return Batch(
        token_ids_N=integers,
        lengths_B=integers,
        uids=(),
        group_B=integers,
        temperature_B=numbers,
        loss_mask_N=np.empty(0, np.bool_),
        logprobs_N=numbers,
        versions_N=integers,
        advantages_N=numbers,
        weights_N=numbers,
    )

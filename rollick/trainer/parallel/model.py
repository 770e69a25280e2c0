"""The base class of models that are sharded over ranks, with FSDP2 on torch's device meshes.

fsdp.py, critic.py and reward_model.py of this package add heads and losses. All ranks make the same
calls, each with its own samples of a batch (shares.py); ranks of one replica get the same samples.
See mesh.py for the grid of ranks, and rank_forward.py for a rank's share of a pack.

    this rank's Batch -> micro-batches -> PackedBatch -> PackShare -> RankForward -> results of all
          selected rows, on each rank of the pack

A rank with fewer micro-batches than another runs empty ones, because the collectives of a layer
need all ranks. Weights in a batch are global, so gradients are summed and never averaged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rollick.config.schema import ModelConfig, ParallelConfig, Recipe
from rollick.data.batch import Batch
from rollick.errors import ModelError
from rollick.models.bf16_probe import safe_environment
from rollick.models.loading.load import resolve_dtype
from rollick.models.loading.rope import check_lengths, fix_rope
from rollick.trainer.microbatch import PackedBatch, microbatches, pack
from rollick.trainer.offload import OffloadedTensors
from rollick.trainer.optimizer import MasterAdamW
from rollick.trainer.parallel.checkpoint import (
    describe_shards,
    load_snapshots,
    load_state,
    save_state,
)
from rollick.trainer.parallel.mesh import Grid, GridShape, join_process_group
from rollick.trainer.parallel.rank_forward import PackShare, RankForward, share_pack
from rollick.trainer.parallel.shard import (
    MakeOptimizer,
    Precision,
    ShardedOptimizer,
    load_on_first_rank,
    load_shards,
    local_tensor,
    shard,
    shard_model,
)
from rollick.trainer.parallel.shares import RowCost
from rollick.trainer.strategy import LossReport, OptimReport, TrainState
from rollick.trainer.trainable_model import LossAccumulator

TIMED_SIZE, TIMED_PRODUCTS = {"cpu": 256, "cuda": 2048}, 24
"""Size of the square matrices that `time_fixed_work` multiplies, by device type, and the number of
products. It takes milliseconds."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model and how to obtain it."""

    config: ModelConfig
    build: Callable[[], nn.Module]
    """Builds the module on the meta device."""
    load: Callable[[], nn.Module]
    """Loads the same module with its weights, on the CPU. Only the first rank calls it."""
    max_length: int
    """Longest sequence, in tokens."""


class ShardedModel:
    """A model whose parameters are sharded over the ranks of torch's process group.

    `make_optimizer`: None if the model is frozen. `dtype` overrides the recipe's, for parameters
    and computation.
    """

    has_random_state: ClassVar[bool] = False
    """Whether the state includes that of torch's random numbers: only that of the policy, because
    roles may share a process."""

    def __init__(
        self,
        recipe: Recipe,
        source: ModelSource,
        make_forward: Callable[[nn.Module, Grid], RankForward],
        *,
        parallel: ParallelConfig,
        device: str,
        dtype: torch.dtype | None = None,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        join_process_group(None, 0, device=device)
        self.recipe = recipe
        self.model_config = source.config
        self.device = device
        self.offload = parallel.offload
        self.grid = grid = Grid(GridShape.of(parallel, dist.get_world_size()), device=device)
        compute = dtype or resolve_dtype(source.config, device)
        if compute is torch.bfloat16 and device.startswith("cpu"):
            os.environ.update(safe_environment())
        # A frozen model needs no masters in higher precision.
        master = dtype or (compute if make_optimizer is None else torch.float32)
        self.precision = precision = Precision(master, compute)
        self.model = model = source.build().to(master).eval()
        model.requires_grad_(make_optimizer is not None)
        experts = shard_model(model, grid, parallel=parallel, master=master)
        config: Any = model.config
        self.cost = RowCost.of(config.get_text_config())
        self.forward = make_forward(model, grid)
        shard(self.forward, model, experts, grid=grid, precision=precision, offload=self.offload)
        loaded = load_on_first_rank(source.load, grid)
        load_shards(model, loaded, device=device, offload=self.offload)
        del loaded
        fix_rope(model, source.max_length)
        self._offloaded = OffloadedTensors()
        # The first forward moves shards to other memory (padded or pinned), so it must run before
        # the optimizer references them.
        self.run_empty_forward()
        self._sharded_optimizer = (
            None
            if make_optimizer is None
            else ShardedOptimizer(model, make_optimizer, grid=grid, device=device)
        )

    def run_empty_forward(self) -> None:
        """Run a forward without samples."""
        raise NotImplementedError

    @property
    def sharded_optimizer(self) -> ShardedOptimizer:
        if self._sharded_optimizer is None:
            raise ModelError(
                "this model is frozen: it has no optimizer and cannot be trained or saved",
                fix="build it with trainable=True",
            )
        return self._sharded_optimizer

    @property
    def optimizer(self) -> MasterAdamW:
        """The optimizer of the shards on this rank."""
        return self.sharded_optimizer.local_optimizer

    @property
    def module(self) -> None:
        """None: an engine cannot share sharded parameters."""
        return None

    def step(self) -> OptimReport:
        return self.sharded_optimizer.step()

    def save(self, path: Path) -> None:
        """Write masters, moments, counters and random states, for any number of ranks."""
        self.wake()
        save_state(
            path,
            self.sharded_optimizer.state(),
            steps=self.optimizer.steps,
            random_state=self.has_random_state,
        )

    def load(self, path: Path) -> None:
        self.wake()
        self.sharded_optimizer.resume(load_state(path, self.sharded_optimizer.state()))

    def state(self) -> TrainState:
        """The state of the shards on this rank. Can be called while asleep."""
        tensors = self.optimizer.tensors() | self._offloaded.copies
        if self.has_random_state:
            tensors["rng.cpu"] = torch.get_rng_state()
        return TrainState(
            tensors, self.optimizer.steps, describe_shards(self.sharded_optimizer.state())
        )

    @torch.no_grad()
    def restore(self, state: TrainState) -> None:
        self.wake()
        for name, tensor in self.optimizer.tensors().items():
            tensor.copy_(state.tensors[name])
        self.sharded_optimizer.resume(state.steps)
        if self.has_random_state:
            torch.set_rng_state(state.tensors["rng.cpu"])

    def restore_all(self, states: Sequence[TrainState]) -> None:
        self.wake()
        self.sharded_optimizer.resume(load_snapshots(states, self.sharded_optimizer.state()))

    def sleep(self, *, keep_parameters: bool = False) -> None:
        """`keep_parameters` has no effect: no engine shares sharded parameters."""
        if not self.device.startswith("cuda") or self.offload or self._offloaded:
            return
        if self._sharded_optimizer is not None:
            tensors = self.optimizer.tensors()
        else:
            tensors = {name: local_tensor(value) for name, value in self.model.named_parameters()}
        self._offloaded.move_to_host(tensors)
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

    def share(self, microbatch: Batch) -> tuple[PackedBatch, PackShare]:
        """Pack a micro-batch, and cut this rank's share."""
        check_lengths(self.model, microbatch.lengths_B.tolist())
        packed = pack(
            microbatch,
            device=self.device,
            deterministic=False,
            share_prefix=self.recipe.train.share_prefix,
            min_rows=self.grid.shape.context,
        )
        return packed, share_pack(packed, grid=self.grid, cost=self.cost)

    @contextmanager
    def forward_only(self) -> Generator[None]:
        """Run one forward in the block, without gradient. Reshards after it: the next one would
        otherwise use the gathered parameters even after an update."""
        with torch.no_grad():
            yield
        assert isinstance(self.forward, FSDPModule)
        self.forward.reshard()

    def plan_microbatches(self, batch: Batch) -> list[list[int]]:
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
            dist.all_reduce(count, dist.ReduceOp.MAX, group=self.grid.replica_mesh.get_group())
        return plan + [[] for _ in range(int(count) - len(plan))]

    def sum_reports(self, accumulator: LossAccumulator) -> LossReport:
        """The report over all replicas; the ranks of one replica have equal reports."""
        report = accumulator.report()
        if self.grid.shape.replicas == 1:
            return report
        reports: list[Any] = [None] * self.grid.shape.replicas
        dist.all_gather_object(reports, report, group=self.grid.replica_mesh.get_group())
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

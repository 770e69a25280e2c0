"""The sharded strategy: the parameters of a model over many ranks, on torch's device meshes.

Every rank has a FsdpStrategy, and all are called alike, with the same whole batch: a call is done
by the ranks together, and its answer is that of the whole batch on each of them. How the ranks lie,
what they share and who cuts what: parallel/mesh.py. Promises and results are those of local.py.

    Batch -> plan_ranks -> this rank's micro-batches -> Pack -> this rank's rows of it
          -> hidden states -> log-probs of its part of the counted tokens -> gathered over the ranks
          that work on this pack -> loss, the same on each of them -> backward

A rank that has fewer micro-batches than another computes empty ones, because the exchanges of a
layer need everybody. Weights in a batch are global, so gradients are summed and never averaged.

What a rank computes of a pack: parallel/trunk.py.

Legend: N tokens of a batch, T counted ones of a pack, K likeliest tokens of a position, L layers,
E experts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from rollick.config.schema import Recipe
from rollick.data.batch import Batch
from rollick.models.load import load_tokenizer, quietly, resolve_dtype, write_model
from rollick.models.probe import safe_environment
from rollick.train.body import Parked, Tally, token_places
from rollick.train.local import add_mismatch
from rollick.train.microbatch import (
    Pack,
    counted_tokens,
    loss_inputs,
    microbatches,
    pack,
    sample_prefixes,
)
from rollick.train.optimizer import MasterAdamW
from rollick.train.parallel.balance import RowCost, plan_ranks
from rollick.train.parallel.checkpoint import load_state, save_state
from rollick.train.parallel.exchange import all_sum, wait_for_all
from rollick.train.parallel.mesh import Grid, GridShape, join
from rollick.train.parallel.optimizer import ShardedOptimizer
from rollick.train.parallel.shard import Precision, build_tree, fill, shard, whole_tensors
from rollick.train.parallel.trunk import Found, Trunk, share_of
from rollick.train.routing import Routing, balance_loss
from rollick.train.strategy import (
    LossFn,
    LossReport,
    OptimReport,
    ShardedWeights,
    WeightStream,
)
from rollick.types import NOT_SAMPLED, FloatArray


class FsdpStrategy:
    """Trains a model that is spread over the ranks of torch's process group.

    `dtype` is that of parameters and computing together, in place of the recipe's.
    """

    def __init__(
        self, recipe: Recipe, *, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        join(None, 0, device=device)
        self.recipe = recipe
        self.device = device
        parallel = recipe.train.parallel
        self.grid = Grid(GridShape.of(parallel, dist.get_world_size()), device=device)
        compute = dtype or resolve_dtype(recipe.model, device)
        if compute is torch.bfloat16 and device.startswith("cpu"):
            os.environ.update(safe_environment())
        self.precision = Precision(dtype or torch.float32, compute)
        self.offload = parallel.offload
        tree, experts = build_tree(
            recipe.model, self.grid, parallel=parallel, master=self.precision.master
        )
        self.model = tree.eval()
        config: Any = tree.config
        self.cost = RowCost.of(config.get_text_config())
        self.trunk = Trunk(
            tree,
            self.grid,
            chunk=recipe.train.logprob_chunk_tokens,
            routers=recipe.train.expert_balance > 0,
        )
        shard(
            self.trunk,
            tree,
            experts,
            grid=self.grid,
            precision=self.precision,
            offload=self.offload,
        )
        fill(tree, recipe.model, grid=self.grid, device=device, offload=self.offload)
        self._forward_only(batch_of_nothing())
        self._sharded = ShardedOptimizer(tree, recipe, grid=self.grid, device=device)
        self._parked = Parked()

    @property
    def optimizer(self) -> MasterAdamW:
        """Of the parts that this rank holds."""
        return self._sharded.parts

    @property
    def module(self) -> None:
        """None: no engine can share parameters of which this process has a part."""
        return None

    def logprobs(self, batch: Batch) -> FloatArray:
        """[N] float32: log-prob of each token in the loss mask; 0 for all others."""
        logprobs_N = torch.zeros(batch.tokens, device=self.device)
        for samples in self._microbatches(batch):
            found, packed = self._forward_only(batch.take(samples))
            if samples:
                places_T = token_places(batch, samples)[packed.places_T]
                logprobs_N[torch.as_tensor(places_T)] = found.logprobs_T.float()
        if self.grid.shape.replicas > 1:
            all_sum(logprobs_N, self.grid.replicas.get_group())
        return logprobs_N.cpu().numpy()

    def forward_backward(self, batch: Batch, loss: LossFn) -> LossReport:
        """Accumulates the gradient of the loss over the counted tokens."""
        tally = Tally()
        parts = self._microbatches(batch)
        balance = self._balance(batch, parts)
        for samples in parts:
            part = batch.take(samples)
            found, packed = self._forward(part)
            total = (
                found.logprobs_T.sum()
                if not samples
                else self._loss(part, packed, found, loss=loss, tally=tally)
            )
            if balance is not None:
                total = total + balance.of(found, tally)
            total.backward()
        return self._summed_report(tally)

    def _loss(
        self, part: Batch, packed: Pack, found: Found, *, loss: LossFn, tally: Tally
    ) -> torch.Tensor:
        weighed = part.entropy_weights_N is not None
        inputs = loss_inputs(
            part,
            packed,
            found.logprobs_T,
            entropy_T=found.entropy_T if weighed else None,
            student_TK=found.student_TK,
        )
        result = loss(inputs)
        sums = {**result.sums, "entropy": found.entropy_T.detach().sum()}
        tally.add(result.total, sums, tokens=len(found.logprobs_T))
        add_mismatch(tally, inputs, part.versions_N[packed.places_T] != NOT_SAMPLED)
        return result.total

    def step(self) -> OptimReport:
        """One update of the masters, by the norm of the whole gradient; skipped by all ranks or by
        none."""
        return self._sharded.step()

    def drop_gradients(self) -> None:
        self._sharded.drop_gradients()

    def weights(self) -> ShardedWeights:
        """Whole parameters under their public names, one at a time: copies, which all ranks must
        take together, in order."""
        dtype, parameters = self.precision.compute, self._sharded.parameters
        shapes = [
            (name, torch.empty(value.shape, dtype=dtype, device="meta"))
            for name, value in parameters.items()
        ]
        return ShardedWeights(shapes, whole_tensors(parameters.items(), dtype))

    def gradients(self) -> WeightStream:
        """Whole gradients of what was accumulated, in the same way."""
        return whole_tensors(self._sharded.gradients(), self.precision.master)

    def export(self, path: Path) -> None:
        """Write a plain Hugging Face folder with the tokenizer; the first rank does."""
        if self.grid.rank == 0:
            write_model(path, self.model, self.weights(), dtype=self.precision.compute)
            tokenizer: Any = load_tokenizer(self.recipe.model)
            with quietly():
                tokenizer.save_pretrained(path)
        else:
            for _ in self.weights():
                pass
        wait_for_all()

    def save(self, path: Path) -> None:
        """Write masters, moments, counters and random states; on any number of ranks they can be
        loaded again."""
        self.wake()
        save_state(path, self._sharded.state(), steps=self.optimizer.steps)

    def load(self, path: Path) -> None:
        """Take what `save` wrote, on any number of ranks."""
        self.wake()
        self._sharded.resume(load_state(path, self._sharded.state()))

    def sleep(self) -> None:
        """Move this rank's part of parameters and optimizer state off the GPU."""
        if self.device.startswith("cuda") and not self.offload and not self._parked:
            self._parked.park(self.optimizer.tensors())
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._parked.bring_back()

    def _forward(self, part: Batch) -> tuple[Found, Pack]:
        train = self.recipe.train
        packed = pack(
            part,
            device=self.device,
            deterministic=False,
            share_prefix=train.share_prefix,
            min_rows=self.grid.shape.context,
        )
        share = share_of(packed, part, grid=self.grid, cost=self.cost)
        logprobs_T, entropy_T, student_TK, counts_LE, sums_LE = self.trunk(
            share, part.entropy_weights_N is not None
        )
        routing = None if counts_LE is None else Routing(counts_LE, sums_LE)
        return Found(logprobs_T, entropy_T, student_TK, routing), packed

    @torch.no_grad()
    def _forward_only(self, part: Batch) -> tuple[Found, Pack]:
        """What is gathered for a backward is given back: else the next forward would take it for
        the parameters, whatever has become of these."""
        result = self._forward(part)
        assert isinstance(self.trunk, FSDPModule)
        self.trunk.reshard()
        return result

    def _microbatches(self, batch: Batch) -> list[list[int]]:
        """Those of this rank's replica; as many on every rank, so the last ones may be empty."""
        train = self.recipe.train
        _, sequence_T = counted_tokens(batch)
        useful: list[int] = np.unique(sequence_T).tolist()
        own = self._own_samples(batch, useful)
        part = batch.take(own)
        cut = microbatches(
            part,
            # A pack lies over the ranks of `context`: each has its part of it in memory.
            tokens=train.tokens_per_microbatch * self.grid.shape.context,
            by_uid=False,
            share_prefix=train.share_prefix,
            keep_groups=self.recipe.compares_pairs,
        )
        count = torch.tensor(len(cut), device=self.device)
        if self.grid.shape.replicas > 1:
            dist.all_reduce(count, dist.ReduceOp.MAX, group=self.grid.replicas.get_group())
        parts = [[own[place] for place in each] for each in cut]
        return parts + [[] for _ in range(int(count) - len(parts))]

    def _own_samples(self, batch: Batch, useful: list[int]) -> list[int]:
        if self.grid.shape.replicas == 1 or not useful:
            return useful
        part = batch.take(useful)
        shares = self.recipe.train.share_prefix
        plan = plan_ranks(
            part.lengths_B.tolist(),
            ranks=self.grid.shape.replicas,
            cost=self.cost,
            groups_B=part.group_B.tolist(),
            shared_B=sample_prefixes(part).tolist() if shares else [0] * part.samples,
            keep_groups=self.recipe.compares_pairs,
        )
        return [useful[place] for place in plan[self.grid.replica]]

    def _balance(self, batch: Batch, parts: list[list[int]]) -> _Balance | None:
        """The loss of the experts' load, with the counts of the whole batch; None where it is not
        asked for."""
        coefficient = self.recipe.train.expert_balance
        if not coefficient:
            return None
        rows = len(counted_tokens(batch)[0])
        counts_LE = None
        if len(parts) > 1:
            for samples in parts:
                routing = self._forward_only(batch.take(samples))[0].routing
                assert routing is not None
                counts_LE = routing.counts_LE + (0 if counts_LE is None else counts_LE)
            assert counts_LE is not None
            all_sum(counts_LE, self.grid.shards.get_group())
        return _Balance(coefficient, rows, counts_LE, self.grid)

    def _summed_report(self, tally: Tally) -> LossReport:
        """Of all replicas; the ranks of one have the same."""
        own = tally.report()
        if self.grid.shape.replicas == 1:
            return own
        reports: list[Any] = [None] * self.grid.shape.replicas
        dist.all_gather_object(reports, own, group=self.grid.replicas.get_group())
        return add_reports(reports)


@dataclass(frozen=True, slots=True, eq=False)
class _Balance:
    """The loss of the experts' load. Without counts, those of the one micro-batch are all."""

    coefficient: float
    rows: int
    counts_LE: torch.Tensor | None
    grid: Grid

    def of(self, found: Found, tally: Tally) -> torch.Tensor:
        routing = found.routing
        assert routing is not None
        counts_LE = self.counts_LE
        if counts_LE is None:
            counts_LE = all_sum(routing.counts_LE.clone(), self.grid.shards.get_group())
        loss = balance_loss(routing, counts_LE=counts_LE, rows=self.rows)
        value = all_sum(loss.detach().clone(), self.grid.contexts.get_group())
        tally.add_balance(value, coefficient=self.coefficient, tokens=self.rows)
        return self.coefficient * loss


def add_reports(reports: list[LossReport]) -> LossReport:
    """The reports of parts of a batch as that of the whole."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for report in reports:
        for name, value in report.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in report.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    return LossReport(
        loss=sum(report.loss for report in reports),
        tokens=sum(report.tokens for report in reports),
        sums=sums,
        maxima=maxima,
    )


def batch_of_nothing() -> Batch:
    """No samples: what a rank packs that has to take part and has nothing to do."""
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

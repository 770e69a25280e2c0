"""The sharded critic: values and their gradient, equal to those of trainer/critic.py.

Legend: N tokens of a batch, T trained ones (in the loss mask, not first), B samples, n rows of a
pack on this rank, r those whose head is computed here, D hidden size.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from rollick.config.schema import ParallelConfig, RlRecipe
from rollick.data.batch import Batch, TokenValues
from rollick.models.attention.varlen import VARLEN
from rollick.models.loading.load import empty_model
from rollick.trainer.critic import ValueModel, critic_optimizer, value_inputs
from rollick.trainer.microbatch import PackedBatch
from rollick.trainer.optimizer import check_gradient_dtype
from rollick.trainer.parallel.mesh import Grid
from rollick.trainer.parallel.model import ModelSource, ShardedModel, empty_batch
from rollick.trainer.parallel.rank_forward import PackShare, RankForward
from rollick.trainer.parallel.shard import shard_in_master_dtype
from rollick.trainer.strategy import LossReport, ValueLossFn
from rollick.trainer.trainable_model import (
    LossAccumulator,
    check_packable,
    load_packed_model,
    token_indices,
)


class ValueForward(RankForward):
    """Values before tokens. The value head computes in its own dtype."""

    def forward(self, share: PackShare, with_last: bool) -> tuple[Tensor, ...]:
        """The value of each trained row; `with_last` also that of each sample's last row."""
        hidden_nD = self.compute_hidden(share)
        selections = (share.trained, share.last) if with_last else (share.trained,)
        rows_rD = hidden_nD.index_select(0, torch.cat([rows.rows_r for rows in selections]))
        values_r = self.model.compute_values(rows_rD)
        parts = values_r.split([len(rows.rows_r) for rows in selections])
        return tuple(self.gather(*pair) for pair in zip(parts, selections, strict=True))


class ShardedCritic(ShardedModel):
    """A decoder with a value head, sharded over ranks. `dtype` overrides the recipe's."""

    def __init__(
        self,
        recipe: RlRecipe,
        parallel: ParallelConfig,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        config, max_length = recipe.critic.model or recipe.model, recipe.infer.max_length
        seed = recipe.run.seed

        def build() -> nn.Module:
            check_packable(config)
            return ValueModel.of(empty_model(config, attention=VARLEN), seed=seed)

        def load() -> nn.Module:
            model = load_packed_model(config, device="cpu", max_length=max_length)
            return ValueModel.of(model, seed=seed)

        def make_forward(model: nn.Module, grid: Grid) -> ValueForward:
            assert isinstance(model, ValueModel)
            shard_in_master_dtype(model.head, grid, offload=parallel.offload)
            return ValueForward(model, grid)

        super().__init__(
            recipe,
            ModelSource(config, build, load, max_length),
            make_forward,
            parallel=parallel,
            device=device,
            dtype=dtype,
            make_optimizer=partial(critic_optimizer, recipe=recipe),
        )

    def run_empty_forward(self) -> None:
        self._values(empty_batch())

    def values(self, batch: Batch) -> TokenValues:
        """See LocalCritic.values; for the rows of this rank's replica."""
        values_N = np.zeros(batch.tokens, dtype=np.float32)
        last_B = np.zeros(batch.rows, dtype=np.float32)
        for samples in self.plan_microbatches(batch):
            packed, values_T, last_values_B = self._values(batch.take(samples))
            if samples:
                values_N[token_indices(batch, samples)[packed.indices_T]] = values_T.float().cpu()
                last_B[samples] = last_values_B.float().cpu()
        return TokenValues(values_N, last_B)

    def forward_backward(self, batch: Batch, loss: ValueLossFn) -> LossReport:
        check_gradient_dtype(self.precision.compute)
        accumulator = LossAccumulator()
        for samples in self.plan_microbatches(batch):
            microbatch = batch.take(samples)
            packed, share = self.share(microbatch)
            (values_T,) = self.forward(share, False)
            total = values_T.sum()
            if samples:
                result = loss(value_inputs(microbatch, packed, values_T))
                accumulator.add(result.total, result.sums, tokens=len(values_T))
                total = result.total
            total.backward()
        return self.sum_reports(accumulator)

    def _values(self, microbatch: Batch) -> tuple[PackedBatch, Tensor, Tensor]:
        """(pack, values of its trained tokens, value after each sample)."""
        packed, share = self.share(microbatch)
        with self.forward_only():
            values_T, last_values_B = self.forward(share, True)
        return packed, values_T, last_values_B

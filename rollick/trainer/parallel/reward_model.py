"""The sharded reward model: scores equal to those of trainer/reward_model.py.

Legend: B samples, r those whose head is computed on this rank, D hidden size.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from rollick.config.schema import ParallelConfig, Recipe
from rollick.config.schema.train import RewardModelConfig
from rollick.data.batch import Batch
from rollick.models.attention.varlen import VARLEN
from rollick.models.loading.load import empty_model
from rollick.trainer.parallel.model import ModelSource, ShardedModel, empty_batch
from rollick.trainer.parallel.rank_forward import PackShare, RankForward
from rollick.trainer.reward_model import compute_scores, load_packed_score_model, no_score_head
from rollick.types import FloatArray


class ScoreForward(RankForward):
    """A score for each sample."""

    def forward(self, share: PackShare) -> tuple[Tensor]:
        last_rD = self.compute_hidden(share).index_select(0, share.last.rows_r)
        return (self.gather(compute_scores(last_rD, self.model.score.weight), share.last),)


class ShardedRewardModel(ShardedModel):
    """A frozen decoder with a score head, sharded over ranks. `dtype` overrides the model's."""

    def __init__(
        self,
        recipe: Recipe,
        model: RewardModelConfig,
        parallel: ParallelConfig,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:

        def load() -> nn.Module:
            module, has_new_head = load_packed_score_model(
                model, device="cpu", max_length=model.max_length
            )
            if has_new_head:
                raise no_score_head(model)
            return module

        build = partial(empty_model, model, attention=VARLEN, with_score_head=True)
        source = ModelSource(model, build, load, model.max_length)
        super().__init__(
            recipe, source, ScoreForward, parallel=parallel, device=device, dtype=dtype
        )

    def run_empty_forward(self) -> None:
        self._scores(empty_batch())

    def scores(self, batch: Batch) -> FloatArray:
        """See LocalRewardModel.scores; for the rows of this rank's replica."""
        scores_B = np.zeros(batch.rows, dtype=np.float32)
        for samples in self.plan_microbatches(batch):
            microbatch_scores_B = self._scores(batch.take(samples))
            if samples:
                scores_B[samples] = microbatch_scores_B.float().cpu()
        return scores_B

    def _scores(self, microbatch: Batch) -> Tensor:
        _, share = self.share(microbatch)
        with self.forward_only():
            (scores_B,) = self.forward(share)
        return scores_B

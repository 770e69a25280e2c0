"""The built-in reward model: a decoder with a head that computes one score per sample.

The head reads the hidden state of the last token. Files have the format of transformers'
AutoModelForSequenceClassification with one label, so that other libraries can load them. A language
model without a score head gets a new one.

Legend: B samples, D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollick.algorithms.objective import Loss
from rollick.algorithms.reward import ScoreInputs
from rollick.config.schema import ModelConfig, Recipe
from rollick.config.schema.train import RewardModelConfig
from rollick.data.batch import Batch
from rollick.errors import ConfigError, ModelError
from rollick.models.attention.varlen import VARLEN, unsupported_layer_types
from rollick.models.loading.load import load_score_model, save_with_tokenizer
from rollick.models.loading.probe import check_learner
from rollick.models.loading.rope import fix_rope
from rollick.trainer.critic import INITIAL_STD
from rollick.trainer.microbatch import PackedBatch
from rollick.trainer.strategy import LossReport, ScoreLossFn
from rollick.trainer.trainable_model import TrainableModel, policy_optimizer
from rollick.types import FloatArray, stable_hash


def load_packed_score_model(
    model: ModelConfig, *, device: str, max_length: int
) -> tuple[nn.Module, bool]:
    """A model with a score head and attention over packed sequences of up to `max_length` tokens,
    and whether the head is randomly initialised."""
    module, has_new_head = load_score_model(model, device=device, attention=VARLEN)
    score_head(module, model)
    fix_rope(module, max_length)
    check_learner(module, max_length=max_length)
    return module, has_new_head


def no_score_head(model: ModelConfig) -> ModelError:
    fix = "use a sequence classification model with one label"
    return ModelError(f"{model.path!r} is a language model: it has no scoring head", fix=fix)


class LocalRewardModel(TrainableModel):
    """Scores samples and trains on pairs, on one device."""

    def __init__(
        self,
        recipe: Recipe,
        model: ModelConfig | None = None,
        *,
        device: str = "cpu",
        trainable: bool = True,
    ) -> None:
        """`model`: the model to load; None loads the policy's."""
        self.model_config = model or recipe.model
        max_length = recipe.infer.max_length
        if isinstance(self.model_config, RewardModelConfig):
            max_length = self.model_config.max_length
        module, self.has_new_head = load_packed_score_model(
            self.model_config, device=device, max_length=max_length
        )
        self.head = score_head(module, self.model_config)
        if self.has_new_head:
            _initialize_head(self.head, seed=recipe.run.seed)
        super().__init__(
            module,
            recipe,
            device=device,
            # A frozen model needs no optimizer, which would keep float32 copies of its weights.
            optimizer=policy_optimizer(module.named_parameters(), recipe=recipe)
            if trainable
            else None,
            name="reward_model",
            keep_groups=True,
        )

    @torch.no_grad()
    def scores(self, batch: Batch) -> FloatArray:
        scores_B = np.zeros(batch.rows, dtype=np.float32)
        for samples, _, packed in self.packed_batches(batch):
            scores_B[samples] = self._score(packed).cpu().numpy()
        return scores_B

    def forward_backward(self, batch: Batch, loss: ScoreLossFn) -> LossReport:
        def evaluate(microbatch: Batch, packed: PackedBatch) -> tuple[Loss, int]:
            return loss(_score_inputs(microbatch, self._score(packed))), len(packed.token_ids_N)

        return self.accumulate_gradients(batch, evaluate)

    def export(self, path: Path) -> None:
        """Write a folder that AutoModelForSequenceClassification can load."""
        save_with_tokenizer(self.module, self.model_config, path)

    def _score(self, packed: PackedBatch) -> Tensor:
        """One score per sample."""
        last_BD = self.hidden(packed).index_select(0, packed.last_rows_B)
        return compute_scores(last_BD, self.head.weight)


def compute_scores(last_BD: Tensor, weight_1D: Tensor) -> Tensor:
    """The scores of samples from the hidden states of their last tokens, in float64 if the head is
    float64, otherwise in float32."""
    dtype = torch.float64 if weight_1D.dtype is torch.float64 else torch.float32
    return (last_BD.to(dtype) @ weight_1D.to(dtype).t())[:, 0]


def score_head(module: nn.Module, model: ModelConfig) -> nn.Linear:
    head = getattr(module, "score", None)
    config: Any = module.config
    has_bias = getattr(head, "bias", None) is not None
    if not isinstance(head, nn.Linear) or has_bias or unsupported_layer_types(config):
        raise ModelError(
            f"{model.path!r} is not an attention-only decoder with a bias-free linear head `score`",
            fix="use a reward model based on a decoder, or start from a language model",
        )
    return head


def _initialize_head(head: nn.Linear, *, seed: int) -> None:
    """Set small random weights that depend only on the seed."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(stable_hash(seed, "reward_model"))
        head.weight.copy_(torch.randn(head.weight.shape) * INITIAL_STD / head.in_features**0.5)


def _score_inputs(microbatch: Batch, scores_B: Tensor) -> ScoreInputs:
    if microbatch.scores_B is None:
        raise ConfigError(
            "a reward model trains on pairs, and the batch does not mark the better answer",
            fix="build the batch with data.collate.examples_to_batch",
        )
    _, pair_B, count_P = np.unique(microbatch.group_B, return_inverse=True, return_counts=True)
    if (count_P != 2).any():
        raise ConfigError(
            f"a reward model trains on pairs, and a group has {count_P[count_P != 2][0]} answers",
            fix="give each prompt a better and a worse answer",
        )
    weights_B = np.add.reduceat(microbatch.weights_N, microbatch.offsets_B1[:-1])
    return ScoreInputs(
        scores_B=scores_B,
        better_B=torch.as_tensor(np.sign(microbatch.scores_B)).to(scores_B),
        pair_B=torch.as_tensor(pair_B, dtype=torch.int64, device=scores_B.device),
        weights_B=torch.as_tensor(weights_B).to(scores_B),
    )

"""The reference reward model: a decoder whose head gives one number, of a sample as a whole.

It is the number at the sample's last token, which has seen all others. The files are those of
transformers' models for sequence classification with one label, so that reward models of others can
be loaded, and others can load ours. A folder of a language model gets a new head.

    Batch -> microbatches (pairs stay together) -> Pack -> hidden states -> scores of the samples
    -> loss -> backward, per micro-batch; then step

Legend: B samples, D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rollick.algorithms.reward import ScoreInputs
from rollick.config.schema import ModelConfig, Recipe
from rollick.data.batch import Batch
from rollick.errors import ConfigError, ModelError
from rollick.models.attention import VARLEN, other_layers
from rollick.models.load import load_score_model, load_tokenizer, quietly
from rollick.train.body import Body, Tally
from rollick.train.critic import START_SPREAD
from rollick.train.microbatch import Pack, microbatches
from rollick.train.optimizer import MasterAdamW
from rollick.train.strategy import LossReport, OptimReport, ScoreLossFn
from rollick.types import FloatArray, stable_hash


class LocalRewardModel:
    """Scores samples and learns from pairs, on one device."""

    def __init__(
        self,
        recipe: Recipe,
        model: ModelConfig | None = None,
        *,
        device: str = "cpu",
        trainable: bool = True,
    ) -> None:
        """Without a `model` it starts from the policy's."""
        self.recipe = recipe
        self.model = model or recipe.model
        module, is_new = load_score_model(self.model, device=device, attention=VARLEN)
        self.head = _head_of(module, self.model)
        self.has_new_head = is_new
        if is_new:
            _start(self.head, seed=recipe.run.seed)
        train = recipe.train
        optimizer: MasterAdamW | None = None
        if trainable:  # of a frozen model it would only keep copies in float32
            optimizer = MasterAdamW(
                module.named_parameters(),
                train.optimizer,
                schedule=train.schedule,
                total_steps=recipe.optimizer_steps,
            )
        decoder: Any = module.base_model
        self.body = Body(
            module,
            recipe,
            decoder=decoder,
            device=device,
            optimizer=optimizer,
            name="reward_model",
        )

    def scores(self, batch: Batch) -> FloatArray:
        """[B] float32: of each sample."""
        scores_B = np.zeros(batch.samples, dtype=np.float32)
        with torch.no_grad():
            for samples in self._microbatches(batch):
                packed = self.body.pack(batch.take(samples))
                scores_B[samples] = self._scores(packed).cpu().numpy()
        return scores_B

    def forward_backward(self, batch: Batch, loss: ScoreLossFn) -> LossReport:
        """Accumulates the gradient of the loss over the pairs."""
        tally = Tally()
        for samples in self._microbatches(batch):
            part = batch.take(samples)
            packed = self.body.pack(part)
            result = loss(_score_inputs(part, self._scores(packed)))
            result.total.backward()
            self.body.optimizer.accumulate()
            tally.add(result.total, result.sums, tokens=len(packed.token_ids_N))
        return tally.report()

    def step(self) -> OptimReport:
        return self.body.optimizer.step()

    def export(self, path: Path) -> None:
        """Write a folder that transformers loads as a model for sequence classification."""
        module: Any = self.body.module
        tokenizer: Any = load_tokenizer(self.model)
        with quietly():
            module.save_pretrained(path)
            tokenizer.save_pretrained(path)

    def save(self, path: Path) -> None:
        self.body.save(path)

    def load(self, path: Path) -> None:
        self.body.load(path)

    def sleep(self) -> None:
        self.body.sleep()

    def wake(self) -> None:
        self.body.wake()

    def _microbatches(self, batch: Batch) -> list[list[int]]:
        return microbatches(
            batch,
            tokens=self.recipe.train.tokens_per_microbatch,
            by_uid=self.body.deterministic,
            share_prefix=self.recipe.train.share_prefix,
            keep_groups=True,
        )

    def _scores(self, packed: Pack) -> torch.Tensor:
        """In float32 (float64 stays), whatever the dtype of the body."""
        last_BD = self.body.hidden(packed).index_select(0, packed.last_rows_B)
        weight_1D = self.head.weight
        wide = torch.float64 if weight_1D.dtype is torch.float64 else torch.float32
        return (last_BD.to(wide) @ weight_1D.to(wide).t())[:, 0]


def _head_of(module: nn.Module, model: ModelConfig) -> nn.Linear:
    head = getattr(module, "score", None)
    config: Any = module.config
    has_bias = getattr(head, "bias", None) is not None
    if not isinstance(head, nn.Linear) or has_bias or other_layers(config):
        raise ModelError(
            f"{model.path!r} is no decoder with attention layers and one row `score` as its head",
            fix="use a reward model of a decoder, or a language model to start from",
        )
    return head


def _start(head: nn.Linear, *, seed: int) -> None:
    """A head that follows from the seed alone, and hardly tells samples apart."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(stable_hash(seed, "reward_model"))
        row = torch.randn(head.weight.shape) * START_SPREAD / head.in_features**0.5
        head.weight.copy_(row)


def _score_inputs(part: Batch, scores_B: torch.Tensor) -> ScoreInputs:
    if part.scores_B is None:
        raise ConfigError(
            "a reward model learns from pairs, and the batch does not say which answer is better",
            fix="make the batch of pairs of answers (data.collate.examples_to_batch)",
        )
    _, pair_B, count_P = np.unique(part.group_B, return_inverse=True, return_counts=True)
    if (count_P != 2).any():
        raise ConfigError(
            f"a reward model learns from pairs, and a group has {count_P[count_P != 2][0]} answers",
            fix="give each prompt a better and a worse answer",
        )
    weights_B = np.add.reduceat(part.weights_N, part.offsets_B1[:-1])

    def on_device(values_B: Any) -> torch.Tensor:
        return torch.as_tensor(values_B).to(scores_B)

    return ScoreInputs(
        scores_B=scores_B,
        better_B=on_device(np.sign(part.scores_B)),
        pair_B=torch.as_tensor(pair_B, dtype=torch.int64, device=scores_B.device),
        weights_B=on_device(weights_B),
    )

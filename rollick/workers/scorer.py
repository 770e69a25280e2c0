"""The scorer: a frozen model that gives log-probs (reference, teacher) or scores (reward model)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollick.cluster.worker import HostContext
from rollick.config.schema import ModelConfig, Recipe
from rollick.data.batch import Batch, TopTokens
from rollick.errors import ConfigError, ModelError
from rollick.models.load import load_config, load_tokenizer
from rollick.train.local import LocalStrategy
from rollick.train.reward_model import LocalRewardModel
from rollick.types import FloatArray
from rollick.workers.memory import Meter


class ScorerWorker:
    """The reference or the teacher role of a host. Its weights never change."""

    def __init__(
        self, strategy: LocalStrategy, *, top_k: int = 0, meter: Meter | None = None
    ) -> None:
        self.meter = meter or Meter()
        self.strategy = strategy
        self.top_k = top_k

    def logprobs(self, batch: Batch) -> FloatArray:
        return self.strategy.logprobs(batch)

    def top_logprobs(self, batch: Batch) -> TopTokens:
        """The likeliest tokens at each position in the loss mask, as many as the recipe says."""
        return self.strategy.top_logprobs(batch, k=self.top_k)

    def sleep(self) -> None:
        self.strategy.sleep()

    def wake(self) -> None:
        self.strategy.wake()

    def peak_memory(self) -> int:
        """Bytes that this process held at the most since the role began to be built."""
        return self.meter.peak()


class RewardModelWorker:
    """The reward model role of a host. Its weights never change."""

    def __init__(self, strategy: LocalRewardModel, *, meter: Meter | None = None) -> None:
        self.strategy = strategy
        self.meter = meter or Meter()

    def scores(self, batch: Batch) -> FloatArray:
        """[B]: of each sample as a whole."""
        return self.strategy.scores(batch)

    def sleep(self) -> None:
        self.strategy.sleep()

    def wake(self) -> None:
        self.strategy.wake()

    def peak_memory(self) -> int:
        """Bytes that this process held at the most since the role began to be built."""
        return self.meter.peak()


def create_reward_model(
    context: HostContext, rank: int, recipe: Recipe, model: ModelConfig
) -> RewardModelWorker:
    """Build a reward model on its host."""
    meter = Meter()
    torch.set_num_threads(context.threads)
    strategy = LocalRewardModel(recipe, model, device=context.device, trainable=False)
    if strategy.has_new_head:
        raise ModelError(
            f"{model.path!r} is a language model: it has no head that scores",
            fix="name a folder for sequence classification with one label",
        )
    return RewardModelWorker(strategy, meter=meter)


def create(context: HostContext, rank: int, recipe: Recipe) -> ScorerWorker:
    """Build the reference on its host."""
    meter = Meter()
    torch.set_num_threads(context.threads)
    strategy = LocalStrategy(recipe, device=context.device, trainable=False)
    return ScorerWorker(strategy, meter=meter)


def create_teacher(context: HostContext, rank: int, recipe: Recipe) -> ScorerWorker:
    """Build the teacher on its host; refused if it numbers its tokens otherwise than the policy."""
    meter = Meter()
    torch.set_num_threads(context.threads)
    teacher = recipe.teacher
    if teacher is None:
        raise ConfigError(
            "the algorithm learns from a teacher, and the recipe has none",
            fix="give teacher.path",
        )
    strategy = LocalStrategy(
        recipe,
        device=context.device,
        trainable=False,
        model=teacher,
        vocabulary=common_vocabulary(recipe.model, teacher),
    )
    return ScorerWorker(strategy, top_k=teacher.top_k, meter=meter)


def common_vocabulary(policy: ModelConfig, teacher: ModelConfig) -> int:
    """How many tokens the policy knows. The teacher must have the same, under the same ids.

    A larger model of a family may have more rows than its tokenizer has tokens, to be a round
    number: such a teacher is asked about the policy's tokens alone.
    """
    ours, theirs = _token_ids(policy), _token_ids(teacher)
    differ = sorted(
        token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)
    )
    if differ:
        token = differ[0]
        raise ConfigError(
            f"the teacher {teacher.path!r} has other tokens than the policy {policy.path!r}: "
            f"{len(differ)} differ, such as {token!r} ({ours.get(token)} in the policy, "
            f"{theirs.get(token)} in the teacher)",
            fix="take a teacher with the policy's tokenizer, such as a larger one of its family",
        )
    rows, known = _rows(policy), _rows(teacher)
    if known < rows:
        raise ConfigError(
            f"the policy {policy.path!r} can draw {rows} tokens, and the teacher "
            f"{teacher.path!r} knows {known}",
            fix="take a teacher whose vocabulary is at least as large",
        )
    return rows


def _token_ids(model: ModelConfig) -> Mapping[str, int]:
    return load_tokenizer(model).get_vocab()


def _rows(model: ModelConfig) -> int:
    return int(load_config(model).get_text_config().vocab_size)

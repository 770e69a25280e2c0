"""Frozen models: log-probs of the reference and teacher, scores of the reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollick.cluster.worker import HostContext
from rollick.config.schema import ModelConfig, Recipe, teacher_of
from rollick.config.schema.train import RewardModelConfig
from rollick.data.batch import Batch, TopTokens
from rollick.errors import ConfigError
from rollick.models.loading.load import load_config, load_tokenizer
from rollick.roles.protocols import RewardModelRole, ScorerRole
from rollick.trainer.fsdp import FsdpStrategy
from rollick.trainer.local import LocalStrategy
from rollick.trainer.parallel.mesh import Rendezvous
from rollick.trainer.parallel.reward_model import ShardedRewardModel
from rollick.trainer.reward_model import LocalRewardModel, no_score_head
from rollick.types import FloatArray, RoleName
from rollick.workers.model_worker import StrategyWorker, builds_worker, join_role


class ScorerWorker(StrategyWorker[LocalStrategy | FsdpStrategy], ScorerRole):
    """The reference or the teacher role of a host. Its weights never change."""

    def __init__(self, strategy: LocalStrategy | FsdpStrategy, *, top_k: int = 0) -> None:
        super().__init__(strategy)
        self.top_k = top_k

    def logprobs(self, batch: Batch) -> FloatArray:
        return self.strategy.logprobs(batch)

    def top_logprobs(self, batch: Batch) -> TopTokens:
        """The top-k tokens at each position in the loss mask; the recipe sets k."""
        return self.strategy.top_logprobs(batch, k=self.top_k)


class RewardModelWorker(StrategyWorker[LocalRewardModel | ShardedRewardModel], RewardModelRole):
    def scores(self, batch: Batch) -> FloatArray:
        return self.strategy.scores(batch)


@builds_worker
def create_reward_model(
    context: HostContext,
    rank: int,
    recipe: Recipe,
    model: RewardModelConfig,
    rendezvous: Rendezvous | None = None,
) -> RewardModelWorker:
    parallel = join_role(context, rank, recipe, "reward_model", rendezvous)
    if parallel is not None:
        sharded = ShardedRewardModel(recipe, model, parallel, device=context.device)
        return RewardModelWorker(sharded)
    strategy = LocalRewardModel(recipe, model, device=context.device, trainable=False)
    if strategy.has_new_head:
        raise no_score_head(model)
    return RewardModelWorker(strategy)


@builds_worker
def create(
    context: HostContext, rank: int, recipe: Recipe, rendezvous: Rendezvous | None = None
) -> ScorerWorker:
    """Build the reference; with a rendezvous, one rank of a sharded one."""
    return ScorerWorker(_build_scorer(context, rank, recipe, "reference", rendezvous))


@builds_worker
def create_teacher(
    context: HostContext, rank: int, recipe: Recipe, rendezvous: Rendezvous | None = None
) -> ScorerWorker:
    """As `create`, for the teacher. Raises if its token ids differ from the policy's."""
    teacher = teacher_of(recipe)
    if teacher is None:
        message = "the algorithm needs a teacher, but the recipe has none"
        raise ConfigError(message, fix="set teacher.path")
    model: dict[str, Any] = {
        "model": teacher,
        "vocabulary": common_vocabulary(recipe.model, teacher),
    }
    strategy = _build_scorer(context, rank, recipe, "teacher", rendezvous, **model)
    return ScorerWorker(strategy, top_k=teacher.top_k)


def _build_scorer(
    context: HostContext,
    rank: int,
    recipe: Recipe,
    role: RoleName,
    rendezvous: Rendezvous | None,
    **model: Any,
) -> LocalStrategy | FsdpStrategy:
    parallel, device = join_role(context, rank, recipe, role, rendezvous), context.device
    if parallel is None:
        return LocalStrategy(recipe, device=device, trainable=False, **model)
    return FsdpStrategy(recipe, device=device, trainable=False, parallel=parallel, **model)


def common_vocabulary(policy: ModelConfig, teacher: ModelConfig) -> int:
    """The policy's vocabulary size. Raises if the teacher has other tokens or ids. A larger model
    of a family may pad its vocabulary matrix; only the policy's tokens are used."""
    policy_ids, teacher_ids = _token_ids(policy), _token_ids(teacher)
    tokens = policy_ids.keys() | teacher_ids.keys()
    differing = sorted(token for token in tokens if policy_ids.get(token) != teacher_ids.get(token))
    if differing:
        token = differing[0]
        raise ConfigError(
            f"the teacher {teacher.path!r} has other tokens than the policy {policy.path!r}: "
            f"{len(differing)} differ, such as {token!r} ({policy_ids.get(token)} in the policy, "
            f"{teacher_ids.get(token)} in the teacher)",
            fix="use a teacher with the policy's tokenizer, such as a larger one of its family",
        )
    size, teacher_size = _vocabulary_size(policy), _vocabulary_size(teacher)
    if teacher_size < size:
        raise ConfigError(
            f"the policy {policy.path!r} has {size} tokens, but the teacher "
            f"{teacher.path!r} has only {teacher_size}",
            fix="use a teacher with a vocabulary at least as large",
        )
    return size


def _token_ids(model: ModelConfig) -> Mapping[str, int]:
    return load_tokenizer(model).get_vocab()


def _vocabulary_size(model: ModelConfig) -> int:
    return int(load_config(model).get_text_config().vocab_size)

"""The recipe of each pipeline: its sections, and values derived from several of them.

    Recipe -+- RlRecipe ---------- RlvrRecipe, PluginRecipe -- AgenticRecipe
            +- SupervisedRecipe -- SftRecipe, DpoRecipe, DistillRecipe

`recipe_type` returns the class of a pipeline. Code that reads a section that only some pipelines
have takes their class, such as RlRecipe for `rollout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rollick.config.schema.algorithm import (
    Algorithm,
    AlgorithmConfig,
    DistillAlgorithm,
    DpoAlgorithm,
    SftAlgorithm,
    Stream,
)
from rollick.config.schema.data import (
    AgenticDomain,
    DataConfig,
    DistillDomain,
    DpoDomain,
    RewardSpec,
    RlDataConfig,
    RlvrDomain,
    SftDomain,
    TrainingDomain,
    rewards_of,
)
from rollick.config.schema.losses import PAIRWISE, PlainLoss
from rollick.config.schema.rollout import EvaluateConfig, RolloutConfig, SamplingConfig
from rollick.config.schema.run import (
    CheckpointConfig,
    ClusterConfig,
    DevicesConfig,
    DistillDevices,
    DpoDevices,
    EnvironmentsConfig,
    InferConfig,
    ObserveConfig,
    RewardsConfig,
    RlDevices,
    RlObserveConfig,
    RunConfig,
    WeightsConfig,
)
from rollick.config.schema.section import Section
from rollick.config.schema.train import (
    CriticConfig,
    JudgeConfig,
    ModelConfig,
    ParallelConfig,
    RewardModelConfig,
    SupervisedTrainConfig,
    TeacherConfig,
    TrainConfig,
)
from rollick.errors import ConfigError
from rollick.types import RoleName, Sampling

_PICKLABLE = (
    *(RlDataConfig[RlvrDomain], RlDataConfig[AgenticDomain], DataConfig[TrainingDomain]),
    *(DataConfig[SftDomain], DataConfig[DpoDomain], DataConfig[DistillDomain]),
)
"""Specialised at module level, where pydantic registers the classes: recipes are pickled."""


# `frozen=True` repeats Section's model_config, which pyright does not read.
class Recipe(Section, frozen=True):  # pyright: ignore[reportGeneralTypeIssues]
    """The sections that every pipeline has."""

    pipeline: str
    """Which pipeline; see `rollick list`."""
    run: RunConfig = RunConfig()
    """Name, length, seed and threads of the run."""
    model: ModelConfig
    """The policy's model."""
    data: DataConfig[TrainingDomain]
    """Prompts to train and to validate on."""
    train: TrainConfig = TrainConfig()
    """The learner."""
    rewards: RewardsConfig = RewardsConfig()
    """The processes that run rewards."""
    environments: EnvironmentsConfig = EnvironmentsConfig()
    """The processes that run environments."""
    reward_model: RewardModelConfig | None = None
    """The reward model, if a reward uses it."""
    judge: JudgeConfig | None = None
    """The judge, if a reward uses one and has no url."""
    infer: InferConfig = InferConfig()
    """The engines that generate."""
    devices: DevicesConfig = DevicesConfig()
    """The devices of each role."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the worker processes run."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the engines."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Validation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    observe: ObserveConfig = ObserveConfig()
    """Records and views."""

    @property
    def algorithms(self) -> tuple[AlgorithmConfig, ...]:
        """The different algorithms of the run; a token's component in a batch is an index here."""
        raise NotImplementedError

    def component(self, domain: str) -> int:
        """The index of the domain's algorithm in `algorithms`."""
        return 0

    @property
    def max_staleness(self) -> float:
        """Policy versions that a trained token may lag; 0 if the pipeline does not sample."""
        return 0.0

    @property
    def max_new_tokens(self) -> int:
        """The longest answer that aggregation and the estimate of memory assume."""
        return self.evaluate.sampling.resolve(temperature=0).max_tokens

    def evaluation_sampling(self, domain: str) -> Sampling:
        validation = self.data.validation.get(domain)
        sampling = validation.sampling if validation else SamplingConfig()
        inherited = self.evaluate.sampling.with_defaults(self._inherited_limits(domain))
        return sampling.with_defaults(inherited).resolve(temperature=0.0)

    def _inherited_limits(self, domain: str) -> SamplingConfig:
        """Token limit and stop conditions that evaluation inherits from training."""
        return SamplingConfig()

    @property
    def compares_pairs(self) -> bool:
        """Whether the two answers of a pair must be in one micro-batch."""
        return any(algorithm.loss.name in PAIRWISE for algorithm in self.algorithms)

    def needs(self, stream: Stream) -> bool:
        """Whether an algorithm of the recipe reads this stream."""
        readers = [algorithm for algorithm in self.algorithms if stream in algorithm.needs]
        is_trained_policy = stream == "old" and self.train.steps_per_batch == 1
        return any(not (is_trained_policy and reader.old_only_in_loss) for reader in readers)

    @property
    def value_components(self) -> tuple[int, ...]:
        """Indices of the algorithms that read values."""
        algorithms = enumerate(self.algorithms)
        return tuple(index for index, each in algorithms if "values" in each.needs)

    @property
    def policy_is_reference(self) -> bool:
        """Whether the policy without its adapters gives the reference's log-probs."""
        return self.train.lora is not None and self.devices.of("reference") is None

    def parallel_of(self, role: RoleName) -> ParallelConfig | None:
        """How the devices of a model's role divide it, if it has several; None: each has a copy."""
        if role == "policy":
            return None if self.train.strategy == "local" else self.train.parallel
        inherited = None
        if self.train.strategy == "fsdp":
            inherited = self.train.parallel.model_copy(update={"data": 0})
        return self.own_parallel_of(role) or inherited

    def own_parallel_of(self, role: RoleName) -> ParallelConfig | None:
        """`parallel` in the section of a role."""
        critic = self.critic if isinstance(self, RlRecipe) else None
        sections: dict[RoleName, CriticConfig | TeacherConfig | RewardModelConfig | None] = {
            "critic": critic,
            "teacher": teacher_of(self),
            "reward_model": self.reward_model,
        }
        section = sections.get(role)
        return None if section is None else section.parallel

    @property
    def uses_judge(self) -> bool:
        return any(reward.uses_judge for reward in self.all_rewards)

    @property
    def uses_reward_model(self) -> bool:
        return any(reward.uses_reward_model for reward in self.all_rewards)

    @property
    def all_rewards(self) -> list[RewardSpec]:
        domains = (*self.data.domains.values(), *self.data.validation.values())
        return [reward for domain in domains for reward in rewards_of(domain)]

    @property
    def optimizer_steps(self) -> int:
        """Steps of the policy's optimizer and its schedule in the run."""
        return self.run.steps * self.train.steps_per_batch


class RlRecipe(Recipe, frozen=True):
    """Learns from samples of the policy."""

    data: RlDataConfig[RlvrDomain]
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training samples."""
    rollout: RolloutConfig = RolloutConfig()
    """How many samples, how stale they may be, and which are dropped."""
    algorithm: Algorithm = AlgorithmConfig()
    """How scores become a gradient."""
    critic: CriticConfig = CriticConfig()
    """The critic, if an advantage needs one."""
    teacher: TeacherConfig | None = None
    """The teacher, if an advantage or loss needs one."""
    devices: RlDevices = RlDevices()
    observe: RlObserveConfig = RlObserveConfig()

    @property
    def algorithms(self) -> tuple[AlgorithmConfig, ...]:
        """The different algorithms of the domains; the recipe's is first if a domain uses it."""
        used = [self._algorithm_of(name) for name in self.data.domains]
        shared = self.algorithm.without_preset_name
        candidates = [shared, *used] if shared in used or not used else used
        return tuple(item for i, item in enumerate(candidates) if item not in candidates[:i])

    def _algorithm_of(self, domain: str) -> AlgorithmConfig:
        return (self.data.domains[domain].algorithm or self.algorithm).without_preset_name

    def component(self, domain: str) -> int:
        return self.algorithms.index(self._algorithm_of(domain))

    @property
    def max_staleness(self) -> float:
        return self.rollout.max_staleness

    @property
    def max_new_tokens(self) -> int:
        limits = [self.training_sampling(name).max_tokens for name in self.data.domains]
        return max(limits, default=self.sampling.resolve(temperature=1).max_tokens)

    def training_sampling(self, domain: str) -> Sampling:
        sampling = self.data.domains[domain].sampling
        return sampling.with_defaults(self.sampling).resolve(temperature=1.0)

    def _inherited_limits(self, domain: str) -> SamplingConfig:
        training = self.data.domains.get(domain)
        sampling = training.sampling if training else SamplingConfig()
        return sampling.with_defaults(self.sampling).limits

    def rollout_of(self, domain: str) -> RolloutConfig:
        """The rollout's settings, overridden by the domain's filters."""
        filters = self.data.domains[domain].filters
        overrides = filters.model_dump(exclude_none=True, exclude={"scores"})
        return self.rollout.model_copy(update=overrides)

    def drops_no_signal(self, domain: str) -> bool:
        """Whether groups of the domain with equal scores are dropped."""
        drops = self.rollout_of(domain).drop_no_signal
        return self._algorithm_of(domain).needs_different_scores if drops is None else drops

    def keeps_no_signal(self, domain: str) -> bool:
        """Whether groups of the domain are trained on although equal scores give no gradient."""
        algorithm = self._algorithm_of(domain)
        return algorithm.needs_different_scores and not self.drops_no_signal(domain)

    @property
    def optimizer_steps(self) -> int:
        critic_only_steps = self.critic.warmup_steps if self.needs("values") else 0
        return max(self.run.steps - critic_only_steps, 0) * self.train.steps_per_batch


class RlvrRecipe(RlRecipe, frozen=True):
    """The policy answers each prompt once; rewards score the answers."""

    pipeline: Literal["rlvr"] = "rlvr"
    """Reinforcement learning from verifiable rewards."""


class PluginRecipe(RlRecipe, frozen=True):
    """A pipeline of another package, which has the sections of agentic."""

    data: RlDataConfig[AgenticDomain]
    """Prompts and tasks to train and to validate on."""


class AgenticRecipe(PluginRecipe, frozen=True):
    """The policy acts in environments, turn by turn, or serves an agent."""

    pipeline: Literal["agentic"]
    """Reinforcement learning in environments."""


class SupervisedRecipe(Recipe, frozen=True):
    """Learns from given answers."""

    train: SupervisedTrainConfig = SupervisedTrainConfig()


class SftRecipe(SupervisedRecipe, frozen=True):
    """Imitates answers, or the solver of an environment."""

    pipeline: Literal["sft"]
    """Supervised fine-tuning."""
    data: DataConfig[SftDomain]
    """Answers to imitate."""
    algorithm: SftAlgorithm = SftAlgorithm()
    """How token losses are aggregated."""

    @property
    def algorithms(self) -> tuple[AlgorithmConfig, ...]:
        loss, aggregation = PlainLoss(name="sft"), self.algorithm.aggregation
        return (AlgorithmConfig(loss=loss, aggregation=aggregation),)


class DpoRecipe(SupervisedRecipe, frozen=True):
    """Prefers the better of two answers."""

    pipeline: Literal["dpo"]
    """Direct preference optimisation."""
    data: DataConfig[DpoDomain]
    """Pairs of answers."""
    algorithm: DpoAlgorithm = DpoAlgorithm()
    """The loss of a pair."""
    devices: DpoDevices = DpoDevices()

    @property
    def algorithms(self) -> tuple[AlgorithmConfig, ...]:
        # Each token carries the loss of its pair: this is the mean over pairs.
        return (AlgorithmConfig(loss=self.algorithm.loss, aggregation="prompt_mean"),)


class DistillRecipe(SupervisedRecipe, frozen=True):
    """Imitates a teacher at each token of given answers."""

    pipeline: Literal["distill"]
    """Distillation from given answers."""
    data: DataConfig[DistillDomain]
    """Answers on whose tokens the teacher is imitated."""
    teacher: TeacherConfig
    """The teacher."""
    algorithm: DistillAlgorithm = DistillAlgorithm()
    """The divergence from the teacher."""
    devices: DistillDevices = DistillDevices()

    @property
    def algorithms(self) -> tuple[AlgorithmConfig, ...]:
        config = self.algorithm
        return (AlgorithmConfig(loss=config.loss, aggregation=config.aggregation),)


RECIPES: Mapping[str, type[Recipe]] = {
    "rlvr": RlvrRecipe,
    "agentic": AgenticRecipe,
    "sft": SftRecipe,
    "dpo": DpoRecipe,
    "distill": DistillRecipe,
}
"""The recipe class of each pipeline."""


def recipe_type(data: Mapping[str, Any]) -> type[Recipe]:
    pipeline = data.get("pipeline", "rlvr")
    return RECIPES.get(pipeline, PluginRecipe) if isinstance(pipeline, str) else PluginRecipe


def parse_recipe(data: Mapping[str, Any]) -> Recipe:
    """Parse a recipe from plain values; raises pydantic's ValidationError. Does not check rules."""
    return recipe_type(data).model_validate(data)


def rl_recipe(recipe: Recipe) -> RlRecipe:
    """The recipe as an RlRecipe; raises ConfigError for other pipelines."""
    if not isinstance(recipe, RlRecipe):
        fix = "use a recipe of pipeline rlvr or agentic"
        raise ConfigError(f"pipeline {recipe.pipeline} does not sample", fix=fix)
    return recipe


def model_of(recipe: Recipe, role: RoleName) -> ModelConfig:
    """The model of a role; that of the policy unless the role has its own."""
    critic = recipe.critic.model if isinstance(recipe, RlRecipe) else None
    others: dict[RoleName, ModelConfig | None] = {
        "critic": critic,
        "teacher": teacher_of(recipe),
        "reward_model": recipe.reward_model,
        "judge": recipe.judge,
    }
    return others.get(role) or recipe.model


def teacher_of(recipe: Recipe) -> TeacherConfig | None:
    return recipe.teacher if isinstance(recipe, RlRecipe | DistillRecipe) else None

"""The data section: domains to train and to validate on, and how prompts are drawn.

A domain is a source of prompts with its rewards and its environment.

Domain -+- ValidationDomain                     held-out prompts, of any pipeline
        +- TrainingDomain -+- RlvrDomain -- AgenticDomain
                           +- SftDomain, DpoDomain, DistillDomain
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from rollick.config.schema.algorithm import Algorithm
from rollick.config.schema.rollout import SamplingConfig
from rollick.config.schema.section import (
    NonNegative,
    Positive,
    Scalar,
    Section,
    Share,
    expand_short_form,
)


class RewardSpec(Section):
    """One reward of a domain."""

    name: str
    """A reward from `rollick list`, or your own as file.py:function."""
    weight: float = 1.0
    """Factor of its value in the sample's score."""
    options: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    """Keyword arguments of every call."""
    cache: bool | None = None
    """Cache scores by text and row; not set: as the reward itself declares."""
    error_budget: Share | None = None
    """The run stops if more than this fraction of the last 100 calls fail; not set: only
    rollout.max_failed_scores stops it."""
    max_cost: Annotated[float, Field(ge=0)] = 0.0
    """Cost limit of a run's calls (a judge's tokens times their prices); further calls fail. 0 is
    no limit."""

    @property
    def uses_judge(self) -> bool:
        """Whether it uses the recipe's judge, not one at a URL."""
        return self.name == "judge" and "url" not in self.options

    @property
    def uses_reward_model(self) -> bool:
        """Whether it uses the recipe's reward model."""
        return self.name == "model"


Reward = Annotated[
    RewardSpec, BeforeValidator(expand_short_form, json_schema_input_type=str | RewardSpec)
]


class SummarySpec(Section):
    """The summary that the policy writes before older turns leave its context."""

    tokens: Positive = 128
    """Maximum new tokens of a summary; they count towards sampling.max_tokens too."""
    request: Annotated[str, Field(min_length=1)] = (
        "Sum up the task so far for yourself: what you did, what you learnt and what is left to do."
        " After this you will see your summary in place of the messages above."
    )
    """The message that requests the summary."""
    trained: bool = True
    """Train on summaries, as turns that get the credit of later turns. false only shows them to the
    policy."""


def _expand_window(value: Any) -> Any:
    """`window: 4` is short for `window: {turns: 4}`; 0 is no window."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"turns": value} if value else None
    return value


class WindowSpec(Section):
    """The newest turns that the policy sees. When they are full a new segment starts, with the
    opening observation and the turns carried over; each segment is trained on as it was sampled."""

    turns: Positive
    """Turns in the context; with 1, every step is a separate segment."""
    carried: NonNegative = 0
    """Turns that a new segment takes over from the previous one; fewer than `turns`."""
    summary: SummarySpec | None = None
    """The policy summarises a segment; the summary follows the opening observation of the next
    one. Not set: turns outside the window are lost."""


Window = Annotated[
    WindowSpec | None, BeforeValidator(_expand_window, json_schema_input_type=int | WindowSpec)
]


class EnvironmentSpec(Section):
    """The environment of a domain's samples."""

    name: str
    """An environment from `rollick list`, or your own as file.py:Class."""
    options: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    """Keyword arguments of its constructor."""
    columns: tuple[str, ...] = ()
    """Columns of the domain's rows that are keyword arguments too, under their own names."""
    seed: NonNegative = 0
    """Seed of the tasks. It is separate from run.seed: every run has the same tasks."""
    turn_tokens: NonNegative = 0
    """Maximum new tokens of a turn; 0: the rest of sampling.max_tokens."""
    window: Window = None
    """The turns that the policy sees, such as 4; not set: all of them."""


Environment = Annotated[
    EnvironmentSpec,
    BeforeValidator(expand_short_form, json_schema_input_type=str | EnvironmentSpec),
]


class Domain(Section):
    """One source of prompts."""

    source: str = ""
    """A .jsonl, .jsonl.gz, .json or .parquet file, a hub dataset (hub:NAME, or
    hub:NAME?split=test) or file.py:function. Puzzles of reasoning-gym are
    reasoning_gym:TASK?seed=1&size=500. Optional with an environment."""
    prompt: str = "prompt"
    """Column with the prompt (a string, or a list of messages with role and content), or a string
    with columns in braces, such as "What is {a} + {b}?"."""
    system: str | None = None
    """A system message before the prompt."""
    limit: NonNegative = 0
    """Maximum rows to use; 0 is all. Tasks of an environment without a source: 0 is 1000."""
    where: dict[str, Scalar | tuple[Scalar, ...]] = Field(
        default_factory=dict[str, Scalar | tuple[Scalar, ...]]
    )
    """Columns and the value, or list of values, that they must hold; other rows are left out."""

    @property
    def prompt_format(self) -> str | None:
        """`prompt` if it is a string with columns in braces, otherwise None."""
        return self.prompt if "{" in self.prompt or "}" in self.prompt else None


class ScoredDomain(Domain):
    """A domain with samples from the policy, which are scored."""

    rewards: tuple[Reward, ...] = ()
    """Rewards of a sample; its score is their weighted sum."""
    sampling: SamplingConfig = SamplingConfig()
    """Overrides the sampling of the recipe (of `evaluate` for a validation domain)."""


class ValidationDomain(ScoredDomain):
    """Held-out prompts."""

    environment: Environment | None = None
    """The environment of its samples; not set: they answer once."""
    agent: str | None = None
    """A Python script that does the tasks, as in a training domain."""


class TrainingDomain(Domain):
    """Prompts to train on."""

    share: Annotated[float, Field(gt=0)] = 1.0
    """Fraction of the prompts drawn from here, relative to the other domains."""


class FilterConfig(Section):
    """Which groups of a domain are trained on, where that differs from `rollout`."""

    scores: tuple[float, float] | None = None
    """Groups whose mean score is outside this range are dropped and refilled; the reasons are
    too_hard (below) and too_easy (above)."""
    drop_no_signal: bool | None = None
    """Overrides rollout.drop_no_signal."""
    min_spread: Annotated[float, Field(ge=0)] | None = None
    """Overrides rollout.min_spread."""
    drop_truncated: bool | None = None
    """Overrides rollout.drop_truncated."""

    @field_validator("scores")
    @classmethod
    def _check_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] > value[1]:
            raise PydanticCustomError("range", "its lower bound is above its upper bound")
        return value


class RlvrDomain(TrainingDomain, ScoredDomain):
    """Prompts that the policy answers once, scored by rewards."""

    algorithm: Algorithm | None = None
    """Another algorithm for this domain; not set: the recipe's."""
    filters: FilterConfig = FilterConfig()
    """Which groups are trained on."""


class AgenticDomain(RlvrDomain):
    """Prompts or tasks of an agentic run."""

    environment: Environment | None = None
    """The environment of its samples, turn by turn; not set: they answer once."""
    agent: str | None = None
    """A Python script that does the tasks. It gets a row as JSON in ROLLICK_TASK, calls the model
    through any OpenAI client (OPENAI_BASE_URL, OPENAI_API_KEY) and prints its answer, which the
    rewards score."""


class SftDomain(TrainingDomain):
    """Answers to imitate."""

    completion: str | None = None
    """Column with the answer to imitate."""
    environment: Environment | None = None
    """Imitate the solver of this environment instead."""


class DpoDomain(TrainingDomain):
    """Pairs of answers."""

    chosen: str
    """Column with the better answer."""
    rejected: str
    """Column with the worse answer."""


class DistillDomain(TrainingDomain):
    """Answers on whose tokens the teacher is imitated."""

    completion: str
    """Column with the answer."""


def environment_of(domain: Domain) -> EnvironmentSpec | None:
    has_key = isinstance(domain, AgenticDomain | SftDomain | ValidationDomain)
    return domain.environment if has_key else None


def agent_of(domain: Domain) -> str | None:
    return domain.agent if isinstance(domain, AgenticDomain | ValidationDomain) else None


def rewards_of(domain: Domain) -> tuple[RewardSpec, ...]:
    return domain.rewards if isinstance(domain, ScoredDomain) else ()


D = TypeVar("D", bound=TrainingDomain, covariant=True)
R = TypeVar("R", bound=RlvrDomain, covariant=True)


class RetireConfig(Section):
    """When a prompt counts as solved and is no longer drawn."""

    pass_rate: Annotated[float, Field(gt=0, le=1)]
    """A prompt with at least this pass rate retires."""
    min_tries: Positive = 8
    """Scored samples that a prompt needs before it can retire."""


class PromptSelectionConfig(Section):
    """Which prompts are drawn, by the scores of their samples so far."""

    near_half_window: NonNegative = 0
    """Draw the prompt with the pass rate nearest one half among this many next ones; 0 keeps the
    order of data.shuffle."""
    retire: RetireConfig | None = None
    """Stop drawing solved prompts; not set: all prompts stay."""
    pass_score: float = 0.999
    """A sample passes if its score is at least this."""
    decay: Share = 1.0
    """Weight that a prompt's older samples keep each time it is scored again; 1 is full weight."""


class DataConfig(Section, Generic[D]):
    """Prompts to train and to validate on."""

    domains: Mapping[str, D]
    """Training prompts by domain."""
    validation: Mapping[str, ValidationDomain] = Field(default_factory=dict[str, ValidationDomain])
    """Held-out prompts by domain."""
    shuffle: bool = True
    """Shuffle rows by the seed, differently in each epoch."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are quarantined and counted."""
    max_bad_rows: Share = 0.05
    """The run stops if more than this fraction of a source is unusable."""


class RlDataConfig(DataConfig[R], Generic[R]):
    """Prompts to sample answers to."""

    shares_of: Literal["drawn", "trained"] = "drawn"
    """What the share of a domain counts: prompts drawn, or groups trained on. With trained, a
    domain whose groups are often dropped (no signal) is drawn more often, up to five times."""
    selection: PromptSelectionConfig = PromptSelectionConfig()
    """Which prompts are drawn more often, and which are retired."""

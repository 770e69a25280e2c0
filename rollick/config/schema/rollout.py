"""Sampling: how tokens are sampled, how many samples, how stale they may be, what is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rollick.config.schema.section import IgnoredWith, NonNegative, Positive, Section, Share
from rollick.types import Sampling


class SamplingConfig(Section):
    """How tokens are sampled. A key that is not set is inherited.

    Training takes a domain's `sampling`, then the recipe's. Evaluation takes a validation domain's
    `sampling`, then `evaluate.sampling`; max_tokens, stop and stop_ids then come from training.
    """

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Divides the logits; 0 is greedy (evaluation only). Default: 1 in training, 0 in
    evaluation."""
    max_tokens: Positive | None = None
    """Maximum new tokens of a sample; a sample that reaches it is truncated. Default: 256."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the smallest set of tokens with this probability mass (evaluation only).
    Default: 1."""
    top_k: NonNegative | None = None
    """Sample from the k most likely tokens; 0 is off (evaluation only). Default: 0."""
    min_p: Share | None = None
    """Exclude tokens with less than this fraction of the most likely token's probability
    (evaluation only). Default: 0."""
    min_tokens: NonNegative | None = None
    """No end-of-sequence token or stop string ends a sample before this many tokens (evaluation
    only). Default: 0."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids (evaluation only). Default: none."""
    stop: tuple[str, ...] | None = None
    """Strings that end a sample. Default: none."""
    stop_ids: tuple[NonNegative, ...] | None = None
    """Token ids that end a sample, besides the model's own. Default: none."""

    def with_defaults(self, defaults: SamplingConfig) -> SamplingConfig:
        """This section, with the values of `defaults` for keys that are not set."""
        return defaults.model_copy(update=self.model_dump(exclude_none=True))

    @property
    def limits(self) -> SamplingConfig:
        """The keys that evaluation inherits from training."""
        return SamplingConfig(max_tokens=self.max_tokens, stop=self.stop, stop_ids=self.stop_ids)

    def resolve(self, *, temperature: float) -> Sampling:
        """The sampling parameters; `temperature` is the default temperature."""
        values: dict[str, Any] = {"temperature": temperature, **self.model_dump(exclude_none=True)}
        if self.logit_bias is not None:
            values["logit_bias"] = tuple(sorted(self.logit_bias.items()))
        return Sampling(**values)


class EvaluateConfig(Section):
    """Validation during the run, and `rollick eval`."""

    every: NonNegative = 0
    """Steps between validations; 0 is never (but see at_end)."""
    at_start: bool | None = None
    """Validate before the first step, as a baseline; not set: yes if there is validation data."""
    at_end: bool = True
    """Validate after the last step if there is validation data."""
    samples: Positive = 1
    """Samples of each prompt."""
    pass_k: tuple[Positive, ...] = (1,)
    """Values of k for which pass@k is reported."""
    pass_threshold: float = 0.999
    """A sample passes if its score is at least this."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling for validation."""

    def is_due(self, step: int, *, steps: int) -> bool:
        """Whether to validate after `step`, if there is validation data."""
        if step == 0:
            return self.at_start is not False
        is_regular = bool(self.every) and step % self.every == 0
        return is_regular or (step == steps and self.at_end)


class RolloutConfig(Section):
    """Number, staleness and scheduling of samples."""

    groups_per_step: Positive = 64
    """Groups (prompts) of one batch."""
    group_size: Positive = 8
    """Samples of each prompt."""
    max_staleness: Annotated[float, Field(ge=0)] = 0
    """Policy versions a token may lag when trained on. 0 is strictly on-policy."""
    staleness_rule: Literal[
        "must_take", "drop_stale", "mask_stale_tokens", "first_finished", "long_rounds"
    ] = "must_take"
    """What happens to a group that would become too old. must_take: the batch waits for it (the
    only rule without bias). drop_stale: it is dropped. mask_stale_tokens: its old tokens are
    masked. first_finished: the first groups to finish are taken and the slowest dropped.
    long_rounds: the slowest wait for a later batch of long samples and are sampled again with
    the same random numbers; short answers then come earlier, and at the end of a run fewer than
    groups_per_step long groups are left over."""
    surplus_groups: Annotated[
        NonNegative,
        IgnoredWith("staleness_rule", ("must_take", "drop_stale", "mask_stale_tokens")),
    ] = 0
    """Extra groups in flight; the slowest are dropped (first_finished) or deferred
    (long_rounds)."""
    spare_samples: NonNegative = 0
    """Extra samples in each group; the slowest are aborted. Favours short answers."""
    longest_first: bool = False
    """Start waiting samples in order of expected length, longest first."""
    at_publish: Literal["continue", "move", "keep"] = "continue"
    """What happens to running samples when a version is published. continue: they recompute their
    KV cache on the same engine. move: they are aborted and continue on the engine with most
    room. keep: they continue with the KV cache of the old weights, which saves the
    recomputation; their tokens come from no single policy version and are flagged
    (Sample.kept_cache, rollout/kept_cache_tokens). Every token keeps its version and
    log-prob."""
    engine_restarts: NonNegative = 3
    """How often a lost engine is replaced in a run, by a new process with the current weights.
    An engine that shares a process with another role is replaced with it (cluster.restarts)."""
    engine_queue: Annotated[float, Field(ge=0)] = 1.0
    """Extra requests queued on an engine, as a fraction of its slots, so that no slot is idle."""
    drop_no_signal: bool | None = None
    """Drop groups whose scores are all equal, and replace each with another group. Default: true if
    such a group has no gradient, which is so with an advantage relative to the group (dr_grpo,
    grpo, rloo, lite_ppo, max_rl, reinforce++_baseline) and a loss that reads it; otherwise
    false."""
    min_spread: Annotated[float, Field(ge=0)] = 1e-8
    """A group has signal if its scores differ by more than this."""
    max_drops_per_step: NonNegative = 0
    """Stop refilling after this many dropped groups in a step; 0 is ten times groups_per_step."""
    drop_truncated: bool = False
    """Mask truncated samples in the loss."""
    max_failed_scores: Share = 0.2
    """The run stops if more than this fraction of a step's samples cannot be scored."""

    @property
    def drops_allowed(self) -> int:
        return self.max_drops_per_step or 10 * self.groups_per_step

"""The options of each policy loss, and of the KL to a reference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rollick.config.schema.section import (
    CustomPart,
    IgnoredWith,
    NamedUnion,
    Section,
    expand_short_form,
)

ClipLow = Annotated[float, Field(gt=0, le=1)]
ClipHigh = Annotated[float, Field(gt=0)]
MaxRatio = Annotated[float, Field(ge=1, description="Upper bound of the importance ratio.")]
DualClip = Annotated[float, Field(ge=0)]

ON_BEHAVIOUR_RATIO = frozenset({"dppo_tv", "dppo_kl", "truncated_is", "topr", "cispo"})
"""Losses that weight by pi/mu themselves."""

ON_OLD_RATIO = frozenset({"ppo", "gspo", "segment", "sapo", "gmpo", "raft++"})
"""Losses that bound pi/pi_old."""

WITHOUT_TRUST_REGION = frozenset({"reinforce", "raft", "sft"})
"""Losses that do not bound the policy's distance from stale tokens."""

SUPERVISED = frozenset({"sft", "dpo", "ipo", "distillation"})
"""Losses on tokens that are not scored."""

WITHOUT_ADVANTAGE = SUPERVISED | {"raft", "raft++"}
"""Losses that do not read the advantage."""

PAIRWISE = frozenset({"dpo", "ipo"})
"""Losses that compare the two answers of a pair, which must be in one micro-batch."""


class DppoTvLoss(Section):
    """Policy gradient on pi/mu with a trust region of delta on each token's probability."""

    name: Literal["dppo_tv"] = "dppo_tv"
    delta: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Largest change of a token's probability relative to the behaviour policy."""
    max_ratio: MaxRatio = 20.0


class DppoKlLoss(Section):
    """Policy gradient on pi/mu with a trust region of delta on each token's binary KL."""

    name: Literal["dppo_kl"] = "dppo_kl"
    delta: Annotated[float, Field(gt=0)] = 0.05
    """Largest KL(Bernoulli(mu) || Bernoulli(pi)) of a token, in nats."""
    max_ratio: MaxRatio = 20.0


class PpoLoss(Section):
    """PPO's clipped surrogate, with clip-higher and dual clip."""

    name: Literal["ppo"] = "ppo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: ClipHigh = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: DualClip = 3.0
    """Bound for negative advantages, as a multiple of them; 0 is off, otherwise above 1."""


class GspoLoss(Section):
    """gspo: PPO's clipped surrogate on the geometric-mean ratio of the sample.
    segment: PPO's clipped surrogate on the geometric-mean ratio of each turn of a sample."""

    name: Literal["gspo", "segment"] = "gspo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: ClipHigh = 4e-4
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: DualClip = 3.0
    """Bound for negative advantages, as a multiple of them; 0 is off, otherwise above 1."""


class PlainLoss(Section):
    """reinforce: plain policy gradient, without importance ratio or trust region: on-policy only.
    raft: likelihood of the good samples, which have a positive score.
    sft: negative log-likelihood of the response."""

    name: Literal["reinforce", "raft", "sft"] = "reinforce"


class TruncatedIsLoss(Section):
    """Policy gradient weighted by pi/mu, truncated at both ends."""

    name: Literal["truncated_is"] = "truncated_is"
    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Smallest weight."""
    high: Annotated[float, Field(ge=1)] = 2.0
    """Largest weight."""


class ToprLoss(Section):
    """Plain policy gradient for good samples; the others are weighted by truncated pi/mu."""

    name: Literal["topr"] = "topr"
    ratio: Literal["sequence", "token"] = "sequence"
    """Weight of tokens in other samples: pi/mu of the sample, or of the token."""
    cap: Annotated[float, Field(gt=0)] = 1.0
    """Largest weight of pi/mu."""
    positive_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the loss of samples with a positive score."""
    negative_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the loss of other samples."""


class CispoLoss(Section):
    """Policy gradient weighted by the clipped pi/mu: every token keeps a gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0
    """The weight is clipped from below at 1 - clip_low; 1 is no lower bound."""
    clip_high: ClipHigh = 4.0
    """The weight is clipped from above at 1 + clip_high."""


class SapoLoss(Section):
    """A soft gate instead of PPO's clip: the gradient fades with the ratio's distance from 1."""

    name: Literal["sapo"] = "sapo"
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """How fast the gradient fades where the advantage is positive."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """How fast it fades where the advantage is negative."""


class GmpoLoss(Section):
    """Geometric-mean ratio of a sample, each token's log-ratio clipped."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: Annotated[float, Field(gt=0)] = 0.4
    """The log-ratio is clipped from below at -clip_low if the advantage is negative."""
    clip_high: ClipHigh = 0.4
    """The log-ratio is clipped from above at clip_high if the advantage is positive."""


class KimiLoss(Section):
    """Policy gradient with a quadratic penalty on the distance to the old policy."""

    name: Literal["kimi"] = "kimi"
    tau: Annotated[float, Field(gt=0)] = 0.1
    """Coefficient of the penalty."""


class RaftPlusPlusLoss(Section):
    """PPO's clipped ratio on the good samples."""

    name: Literal["raft++"] = "raft++"
    clip_high: ClipHigh = 0.2
    """The ratio is clipped from above at 1 + clip_high."""


class PairLoss(Section):
    """dpo: prefer the chosen answer of a pair to the rejected one, more than the reference does.
    ipo: move the margin of a pair to 1 / (2 beta), so that it does not grow without bound."""

    name: Literal["dpo", "ipo"] = "dpo"
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Scale of the margin; a smaller one lets the policy move further from the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with swapped labels."""


class DistillationLoss(Section):
    """Divergence of the policy from a teacher, on the teacher's most likely tokens."""

    name: Literal["distillation"] = "distillation"
    divergence: Literal["forward", "reverse", "js", "skewed", "skewed_reverse", "adaptive"] = (
        "forward"
    )
    """Which divergence; see `rollick list`."""
    skew: Annotated[
        float,
        Field(gt=0, lt=1),
        IgnoredWith("divergence", ("forward", "reverse", "js", "adaptive")),
    ] = 0.1
    """Weight of the policy's own distribution in the mixture."""
    head: Annotated[
        float,
        Field(gt=0, lt=1),
        IgnoredWith("divergence", ("forward", "reverse", "js", "skewed", "skewed_reverse")),
    ] = 0.5
    """Probability mass of the teacher's most likely tokens that form the head."""


class ValueLoss(Section):
    """Squared distance of the critic's value to the return, clipped around the old value."""

    name: Literal["value"] = "value"
    clip: Annotated[float, Field(gt=0)] = 0.2
    """Values are clipped to this distance from the old value."""


NO_KL = IgnoredWith("coefficient", (0.0,))
IN_REWARD = IgnoredWith("place", ("reward",))
FIXED = IgnoredWith("controller", ("fixed",))


class KlConfig(Section):
    """KL to a frozen reference policy."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL; 0 needs no reference."""
    form: Annotated[Literal["k1", "k2", "k3"], NO_KL] = "k3"
    """Estimator in the loss: k2 (gradient of the reverse KL) or k3 (bounded). In the reward it is
    always k1."""
    place: Annotated[Literal["loss", "reward"], NO_KL] = "loss"
    """loss: added to the loss, with a separate denominator. reward: subtracted from the reward of
    each token."""
    max_ratio: Annotated[float, Field(ge=1), NO_KL, IN_REWARD] = 5.0
    """Upper bound of pi/mu, which weights each token in the loss."""
    controller: Annotated[Literal["fixed", "adaptive"], NO_KL] = "fixed"
    """adaptive: proportional control of the coefficient to the target."""
    target: Annotated[float, Field(gt=0), NO_KL, FIXED] = 0.05
    """Target KL per token of the adaptive controller, in nats."""
    horizon: Annotated[int, Field(gt=0), NO_KL, FIXED] = 10000
    """Samples over which the adaptive controller corrects an error."""

    @property
    def in_loss(self) -> bool:
        return self.coefficient > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coefficient > 0 and self.place == "reward"


TrustRegionLoss = DppoTvLoss | DppoKlLoss | PpoLoss | GspoLoss | SapoLoss | GmpoLoss | KimiLoss
WeightedLoss = TruncatedIsLoss | ToprLoss | CispoLoss
GivenAnswerLoss = PairLoss | DistillationLoss
LossPart = Annotated[
    TrustRegionLoss | WeightedLoss | RaftPlusPlusLoss | PlainLoss | GivenAnswerLoss | CustomPart,
    NamedUnion("losses", default="dppo_tv"),
]
ValuePart = Annotated[
    ValueLoss, BeforeValidator(expand_short_form, json_schema_input_type=str | ValueLoss)
]
PairLossPart = Annotated[PairLoss, BeforeValidator(expand_short_form)]
DistillationPart = Annotated[DistillationLoss, BeforeValidator(expand_short_form)]

"""The options of each policy loss, and of the KL to a reference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag

from rollick.config.section import CustomPart, Section, by_name, tag_of

ClipLow = Annotated[float, Field(gt=0, le=1)]
ClipHigh = Annotated[float, Field(gt=0)]
DualClip = Annotated[float, Field(ge=0)]

ON_BEHAVIOUR_RATIO = frozenset({"dppo_tv", "dppo_kl", "truncated_is", "topr", "cispo"})
"""Losses that weigh by pi/mu themselves."""

ON_OLD_RATIO = frozenset({"ppo", "gspo", "segment", "sapo", "gmpo", "raft++"})
"""Losses that bound pi/pi_old."""

WITHOUT_TRUST_REGION = frozenset({"reinforce", "raft", "sft"})
"""Losses that follow stale tokens however far the policy has moved."""

SUPERVISED = frozenset({"sft", "dpo", "ipo", "distillation"})
"""Losses of tokens that no score judges."""

PAIRWISE = frozenset({"dpo", "ipo"})
"""Losses that compare the two answers of a pair: a pair is never cut over micro-batches."""


class DppoTvLoss(Section):
    """Policy gradient on pi/mu that keeps a token while its probability moved less than delta."""

    name: Literal["dppo_tv"] = "dppo_tv"
    """The name."""
    delta: Annotated[float, Field(gt=0, le=1)] = 0.2
    """How far a token's probability may move away from the behaviour's."""
    max_ratio: Annotated[float, Field(ge=1)] = 20.0
    """Upper end of the importance ratio."""


class DppoKlLoss(Section):
    """Policy gradient on pi/mu that keeps a token while its binary KL is at most delta."""

    name: Literal["dppo_kl"] = "dppo_kl"
    """The name."""
    delta: Annotated[float, Field(gt=0)] = 0.05
    """Largest KL of drawing or not drawing the token, behaviour to now, in nats."""
    max_ratio: Annotated[float, Field(ge=1)] = 20.0
    """Upper end of the importance ratio."""


class PpoLoss(Section):
    """PPO's clipped surrogate, with clip-higher and dual clip."""

    name: Literal["ppo"] = "ppo"
    """The name."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: ClipHigh = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: DualClip = 3.0
    """Bound for negative advantages, as a multiple of them; 0 is off, otherwise above 1."""


class GspoLoss(Section):
    """PPO's clipped surrogate on the geometric-mean ratio of the whole sample."""

    name: Literal["gspo"] = "gspo"
    """The name."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: ClipHigh = 4e-4
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: DualClip = 3.0
    """Bound for negative advantages, as a multiple of them; 0 is off, otherwise above 1."""


class SegmentLoss(Section):
    """PPO's clipped surrogate on the geometric-mean ratio of each turn of a sample."""

    name: Literal["segment"] = "segment"
    """The name."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: ClipHigh = 4e-4
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: DualClip = 3.0
    """Bound for negative advantages, as a multiple of them; 0 is off, otherwise above 1."""


class ReinforceLoss(Section):
    """Plain policy gradient, without ratio and trust region: on-policy only."""

    name: Literal["reinforce"] = "reinforce"
    """The name."""


class TruncatedIsLoss(Section):
    """Policy gradient weighted by pi/mu, cut at both ends."""

    name: Literal["truncated_is"] = "truncated_is"
    """The name."""
    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Smallest weight."""
    high: Annotated[float, Field(ge=1)] = 2.0
    """Largest weight."""


class ToprLoss(Section):
    """Good samples by plain policy gradient, the others weighted by their truncated pi/mu."""

    name: Literal["topr"] = "topr"
    """The name."""
    ratio: Literal["sequence", "token"] = "sequence"
    """Whose pi/mu weighs a token that is pushed down: that of its whole sample, or its own."""
    cap: Annotated[float, Field(gt=0)] = 1.0
    """Largest weight of pi/mu."""
    positive_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the loss of samples with a positive score."""
    negative_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the loss of the others."""


class CispoLoss(Section):
    """Policy gradient weighted by the clipped pi/mu: every token keeps a gradient."""

    name: Literal["cispo"] = "cispo"
    """The name."""
    clip_low: ClipLow = 1.0
    """The weight is clipped from below at 1 - clip_low; 1 is no lower bound."""
    clip_high: ClipHigh = 4.0
    """The weight is clipped from above at 1 + clip_high."""


class SapoLoss(Section):
    """A soft gate in the place of PPO's clip: the gradient fades with the distance from 1."""

    name: Literal["sapo"] = "sapo"
    """The name."""
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """How fast the gradient fades where the advantage is positive."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """How fast it fades where the advantage is negative."""


class GmpoLoss(Section):
    """Geometric-mean ratio of a sample, each token's log-ratio clipped."""

    name: Literal["gmpo"] = "gmpo"
    """The name."""
    clip_low: Annotated[float, Field(gt=0)] = 0.4
    """A log-ratio pushed down is clipped from below at -clip_low."""
    clip_high: ClipHigh = 0.4
    """A log-ratio pushed up is clipped from above at clip_high."""


class KimiLoss(Section):
    """Policy gradient with a quadratic pull to the old policy."""

    name: Literal["kimi"] = "kimi"
    """The name."""
    tau: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the pull."""


class RaftLoss(Section):
    """Likelihood of the good samples: those with a positive score."""

    name: Literal["raft"] = "raft"
    """The name."""


class RaftPlusPlusLoss(Section):
    """The good samples by PPO's clipped ratio."""

    name: Literal["raft++"] = "raft++"
    """The name."""
    clip_high: ClipHigh = 0.2
    """The ratio is clipped from above at 1 + clip_high."""


class SftLoss(Section):
    """Negative log-likelihood of the response."""

    name: Literal["sft"] = "sft"
    """The name."""


class DpoLoss(Section):
    """Prefer the chosen answer of a pair to the rejected one, more than the reference does."""

    name: Literal["dpo"] = "dpo"
    """The name."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How much a margin counts; smaller lets the policy go further from the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs taken to be labelled the wrong way round."""


class IpoLoss(Section):
    """Bring the margin of a pair to 1 / (2 beta), instead of making it grow for ever."""

    name: Literal["ipo"] = "ipo"
    """The name."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """The margin to meet is 1 / (2 beta)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs taken to be labelled the wrong way round."""


class DistillationLoss(Section):
    """Divergence of the policy from a teacher, on the teacher's likeliest tokens."""

    name: Literal["distillation"] = "distillation"
    """The name."""
    divergence: Literal["forward", "reverse", "js", "skewed", "skewed_reverse", "adaptive"] = (
        "forward"
    )
    """Which one; see `rollick list`."""
    skew: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Part of the own distribution in the mixture (skewed ones only)."""
    head: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Mass of the teacher's likeliest tokens that counts as the head (adaptive only)."""


class ValueLoss(Section):
    """Squared distance of the critic's value to the return, clipped around the old value."""

    name: Literal["value"] = "value"
    """The name."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """How far a value may move from the old one before it gets no more gradient."""


class KlConfig(Section):
    """Distance kept to a frozen reference policy."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL; 0 needs no reference."""
    form: Literal["k1", "k2", "k3"] = "k3"
    """Estimator in the loss: k2 (gradient of the reverse KL) or k3 (bounded stand-in). In the
    reward it is always k1."""
    place: Literal["loss", "reward"] = "loss"
    """In the loss, with a denominator of its own, or taken from the reward of each token."""
    max_ratio: Annotated[float, Field(ge=1)] = 5.0
    """In the loss each token is weighted by pi/mu, which is 1 on-policy, up to this."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: proportional control of the coefficient to the target."""
    target: Annotated[float, Field(gt=0)] = 0.05
    """KL per token that the adaptive controller steers to, in nats."""
    horizon: Annotated[int, Field(gt=0)] = 10000
    """Samples over which the adaptive controller corrects an error."""

    @property
    def in_loss(self) -> bool:
        return self.coefficient > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coefficient > 0 and self.place == "reward"


_Loss = Annotated[
    Annotated[DppoTvLoss, Tag("dppo_tv")]
    | Annotated[DppoKlLoss, Tag("dppo_kl")]
    | Annotated[PpoLoss, Tag("ppo")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[SegmentLoss, Tag("segment")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[TruncatedIsLoss, Tag("truncated_is")]
    | Annotated[ToprLoss, Tag("topr")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[SapoLoss, Tag("sapo")]
    | Annotated[GmpoLoss, Tag("gmpo")]
    | Annotated[KimiLoss, Tag("kimi")]
    | Annotated[RaftLoss, Tag("raft")]
    | Annotated[RaftPlusPlusLoss, Tag("raft++")]
    | Annotated[SftLoss, Tag("sft")]
    | Annotated[DpoLoss, Tag("dpo")]
    | Annotated[IpoLoss, Tag("ipo")]
    | Annotated[DistillationLoss, Tag("distillation")]
    | Annotated[CustomPart, Tag("custom")],
    tag_of("losses", default="dppo_tv"),
]
LossPart = Annotated[_Loss, BeforeValidator(by_name, json_schema_input_type=str | _Loss)]

ValuePart = Annotated[ValueLoss, BeforeValidator(by_name, json_schema_input_type=str | ValueLoss)]

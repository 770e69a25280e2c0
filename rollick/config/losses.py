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
    """Factor of the loss where the advantage is positive."""
    negative_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the loss elsewhere."""


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
    """Likelihood of the good samples: those with a positive advantage."""

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


class KlConfig(Section):
    """Distance kept to a frozen reference policy."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL in the loss; 0 needs no reference."""
    form: Literal["k1", "k2", "k3"] = "k3"
    """Estimator: k2 (gradient of the reverse KL) or k3 (bounded stand-in)."""


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
    | Annotated[CustomPart, Tag("custom")],
    tag_of("losses", default="dppo_tv"),
]
LossPart = Annotated[_Loss, BeforeValidator(by_name, json_schema_input_type=str | _Loss)]

"""The options of each loss and correction, and of the KL to a reference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag

from rollick.config.section import CustomPart, Section, by_name, tag_of


class DppoTvLoss(Section):
    """Policy gradient on pi/mu that keeps a token while its probability moved less than delta."""

    name: Literal["dppo_tv"] = "dppo_tv"
    """The name."""
    delta: Annotated[float, Field(gt=0, le=1)] = 0.2
    """How far a token's probability may move away from the behaviour's."""
    max_ratio: Annotated[float, Field(ge=1)] = 20.0
    """Upper end of the importance ratio."""


class PpoLoss(Section):
    """PPO's clipped surrogate, with clip-higher and dual clip."""

    name: Literal["ppo"] = "ppo"
    """The name."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(ge=0)] = 3.0
    """Bound for negative advantages, as a multiple of them; 0 is off, otherwise above 1."""


class SftLoss(Section):
    """Negative log-likelihood of the response."""

    name: Literal["sft"] = "sft"
    """The name."""


class BypassCorrection(Section):
    """The behaviour policy stands in for the old one; saves a forward."""

    name: Literal["bypass"] = "bypass"
    """The name."""


class NoCorrection(Section):
    """The old policy's log-probs are computed by the learner; no weight for the mismatch."""

    name: Literal["none"] = "none"
    """The name."""


class TokenTisCorrection(Section):
    """Each token is weighted by old/behaviour, truncated from above."""

    name: Literal["token_tis"] = "token_tis"
    """The name."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight."""


class KlConfig(Section):
    """Distance kept to a frozen reference policy."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL in the loss; 0 needs no reference."""
    form: Literal["k1", "k2", "k3"] = "k3"
    """Estimator: k2 (gradient of the reverse KL) or k3 (bounded stand-in)."""


_Loss = Annotated[
    Annotated[DppoTvLoss, Tag("dppo_tv")]
    | Annotated[PpoLoss, Tag("ppo")]
    | Annotated[SftLoss, Tag("sft")]
    | Annotated[CustomPart, Tag("custom")],
    tag_of("losses", default="dppo_tv"),
]
LossPart = Annotated[_Loss, BeforeValidator(by_name, json_schema_input_type=str | _Loss)]
_Correction = Annotated[
    Annotated[BypassCorrection, Tag("bypass")]
    | Annotated[NoCorrection, Tag("none")]
    | Annotated[TokenTisCorrection, Tag("token_tis")]
    | Annotated[CustomPart, Tag("custom")],
    tag_of("corrections", default="bypass"),
]
CorrectionPart = Annotated[
    _Correction, BeforeValidator(by_name, json_schema_input_type=str | _Correction)
]

"""The options of each correction, and which corrections go with which losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag

from rollick.config.losses import ON_BEHAVIOUR_RATIO, ON_OLD_RATIO, SUPERVISED
from rollick.config.names import NAMES
from rollick.config.section import CustomPart, Section, by_name, tag_of

OLD_IS_BEHAVIOUR = frozenset({"bypass", "opsm"})
"""Corrections under which mu stands for pi_old in the loss."""

OLD_OVER_BEHAVIOUR = frozenset({"token_tis", "sequence_tis", "icepop", "decoupled"})
"""Corrections that weigh by pi_old/mu."""


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


class SequenceTisCorrection(Section):
    """Each sample is weighted by the product of its tokens' old/behaviour, truncated."""

    name: Literal["sequence_tis"] = "sequence_tis"
    """The name."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight; 2 to 10 is usual."""


class IcepopCorrection(Section):
    """Each token is weighted by old/behaviour, and dropped where that is far from 1."""

    name: Literal["icepop"] = "icepop"
    """The name."""
    low: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Tokens with a smaller weight are dropped."""
    high: Annotated[float, Field(ge=1)] = 5.0
    """Tokens with a larger weight are dropped."""


class GeometricCorrection(Section):
    """Samples whose mean old/behaviour (geometric) is not close to 1 are dropped."""

    name: Literal["geometric"] = "geometric"
    """The name."""
    low: Annotated[float, Field(gt=0, le=1)] = 0.999
    """Samples below are dropped."""
    high: Annotated[float, Field(ge=1)] = 1.001
    """Samples above are dropped."""


class K3Correction(Section):
    """Samples whose mean KL between behaviour and old policy is too large are dropped."""

    name: Literal["k3"] = "k3"
    """The name."""
    max_kl: Annotated[float, Field(gt=0)] = 0.01
    """Largest mean k3 of a sample's tokens, in nats."""


class DecoupledCorrection(Section):
    """PPO's ratio on the old policy, each token weighted by old/behaviour, truncated."""

    name: Literal["decoupled"] = "decoupled"
    """The name."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight."""
    old: Literal["learner", "interpolated"] = "learner"
    """learner: a forward before the step. interpolated: saves it, and takes a point between mu
    and pi, the nearer to pi the older the token."""


class OpsmCorrection(Section):
    """Off-policy sequence mask: bad samples that the policy has left behind are dropped.

    The learner's log-probs at the start of the step tell; in the loss the behaviour policy stands
    in for the old one, as in bypass.
    """

    name: Literal["opsm"] = "opsm"
    """The name."""
    delta: Annotated[float, Field(gt=0)] = 0.1
    """Largest mean fall of a sample's log-probs, in nats."""


def clash(loss: str, correction: str) -> str:
    """Why this correction makes no sense with this loss; empty if it does.

    Parts of the user's own are never judged.
    """
    if loss not in NAMES["losses"]:
        return ""
    if (
        loss in SUPERVISED
        and correction in NAMES["corrections"]
        and correction not in ("bypass", "none")
    ):
        return f"{correction} is about a policy, and no policy drew the tokens of the loss {loss}"
    if correction in OLD_OVER_BEHAVIOUR and loss in ON_BEHAVIOUR_RATIO:
        return f"{correction} weighs by old/mu, and the loss {loss} already weighs by pi/mu"
    if correction == "decoupled" and loss not in ON_OLD_RATIO:
        return f"decoupled needs a loss that bounds pi/old, and {loss} does not"
    return ""


_Correction = Annotated[
    Annotated[BypassCorrection, Tag("bypass")]
    | Annotated[NoCorrection, Tag("none")]
    | Annotated[TokenTisCorrection, Tag("token_tis")]
    | Annotated[SequenceTisCorrection, Tag("sequence_tis")]
    | Annotated[IcepopCorrection, Tag("icepop")]
    | Annotated[GeometricCorrection, Tag("geometric")]
    | Annotated[K3Correction, Tag("k3")]
    | Annotated[DecoupledCorrection, Tag("decoupled")]
    | Annotated[OpsmCorrection, Tag("opsm")]
    | Annotated[CustomPart, Tag("custom")],
    tag_of("corrections", default="bypass"),
]
CorrectionPart = Annotated[
    _Correction, BeforeValidator(by_name, json_schema_input_type=str | _Correction)
]

"""The options of each correction, and which losses they are compatible with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollick.config.names import NAMES
from rollick.config.schema.losses import ON_BEHAVIOUR_RATIO, ON_OLD_RATIO, SUPERVISED
from rollick.config.schema.section import CustomPart, NamedUnion, Section

OLD_IS_BEHAVIOUR = frozenset({"bypass", "opsm"})
"""Corrections with which the loss uses mu as pi_old."""

OLD_OVER_BEHAVIOUR = frozenset({"token_tis", "sequence_tis", "icepop", "decoupled"})
"""Corrections that weight by pi_old/mu."""


class NoCorrection(Section):
    """bypass: uses the behaviour policy as the old one, which saves a forward.
    none: the learner computes the old policy's log-probs; the mismatch is not corrected."""

    name: Literal["bypass", "none"] = "bypass"


class TisCorrection(Section):
    """token_tis: each token is weighted by old/behaviour, truncated from above.
    sequence_tis: each sample is weighted by the product of its tokens' old/behaviour, truncated."""

    name: Literal["token_tis", "sequence_tis"] = "token_tis"
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight; for a sequence 2 to 10 is usual."""


class IcepopCorrection(Section):
    """Each token is weighted by old/behaviour, and dropped where that is far from 1."""

    name: Literal["icepop"] = "icepop"
    low: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Tokens with a smaller weight are dropped."""
    high: Annotated[float, Field(ge=1)] = 5.0
    """Tokens with a larger weight are dropped."""


class GeometricCorrection(Section):
    """Samples with a geometric mean of old/behaviour that is not close to 1 are dropped."""

    name: Literal["geometric"] = "geometric"
    low: Annotated[float, Field(gt=0, le=1)] = 0.999
    """Samples with a smaller mean are dropped."""
    high: Annotated[float, Field(ge=1)] = 1.001
    """Samples with a larger mean are dropped."""


class K3Correction(Section):
    """Samples with a large mean KL between behaviour and old policy are dropped."""

    name: Literal["k3"] = "k3"
    max_kl: Annotated[float, Field(gt=0)] = 0.01
    """Largest mean k3 of a sample's tokens, in nats."""


class DecoupledCorrection(Section):
    """PPO's ratio to the old policy; each token is weighted by old/behaviour, truncated."""

    name: Literal["decoupled"] = "decoupled"
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight."""
    old: Literal["learner", "interpolated"] = "learner"
    """learner: a forward before the step. interpolated: no forward; a point between mu and pi,
    closer to pi for older tokens."""


class OpsmCorrection(Section):
    """Off-policy sequence mask: drops samples with negative advantage that became unlikely.

    Compares with the learner's log-probs at the start of the step. The loss uses the behaviour
    policy as the old one, as in bypass.
    """

    name: Literal["opsm"] = "opsm"
    delta: Annotated[float, Field(gt=0)] = 0.1
    """Largest mean decrease of a sample's log-probs, in nats."""


def find_conflict(loss: str, correction: str) -> str:
    """Why this correction is incompatible with this loss; empty if it is compatible.

    Custom parts are not checked.
    """
    if loss not in NAMES["losses"]:
        return ""
    is_correction = correction in NAMES["corrections"] and correction not in ("bypass", "none")
    if loss in SUPERVISED and is_correction:
        return f"{correction} corrects sampled tokens, and those of the loss {loss} are not sampled"
    if correction in OLD_OVER_BEHAVIOUR and loss in ON_BEHAVIOUR_RATIO:
        return f"{correction} weights by old/mu, and the loss {loss} already weights by pi/mu"
    if correction == "decoupled" and loss not in ON_OLD_RATIO:
        return f"decoupled needs a loss that bounds pi/old, and {loss} does not"
    return ""


WeightingCorrection = TisCorrection | IcepopCorrection | DecoupledCorrection
DroppingCorrection = GeometricCorrection | K3Correction | OpsmCorrection
CorrectionPart = Annotated[
    NoCorrection | WeightingCorrection | DroppingCorrection | CustomPart,
    NamedUnion("corrections", default="bypass"),
]

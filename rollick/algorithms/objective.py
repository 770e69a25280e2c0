"""The objective: one loss function from the parts that a recipe names.

    LossInputs -> policy loss * correction weight + coefficient * KL to the reference -> TokenLoss

The parts are resolved once, here, with their options bound; what comes back is a plain function
of a micro-batch. Weights of the aggregation are not applied: they are in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollick.algorithms.advantages import AdvantageFn, Advantages
from rollick.algorithms.aggregation import AggregationFn
from rollick.algorithms.kl import FORMS, bounded_ratio, k3
from rollick.algorithms.losses import LossInputs, TokenLoss, sums_by_sign
from rollick.algorithms.shaping import shape_scores
from rollick.config.advantages import ShapingConfig
from rollick.config.corrections import clash
from rollick.config.names import resolve
from rollick.config.schema import AlgorithmConfig
from rollick.config.section import CustomPart, Section
from rollick.errors import ConfigError
from rollick.types import Group

METRICS: Mapping[str, str] = {
    "policy_loss": "loss of the policy part, correction weight included, before aggregation",
    "clip_share": "tokens that the loss clipped: gradient stopped, or importance ratio cut",
    "clip_share_up": "those of them with a positive advantage",
    "clip_share_down": "those of them with a negative advantage",
    "mask_share": "tokens that the correction dropped",
    "mask_share_up": "those of them with a positive advantage",
    "mask_share_down": "those of them with a negative advantage",
    "correction_weight": "factor for the mismatch of engine and learner",
    "engine_kl": "k3 of the engine's behaviour policy and the learner's old one",
    "ratio": "pi / mu; its mean is 1 on-policy",
    "ratio_squared": "(pi / mu)^2; mean(ratio)^2 / mean(ratio_squared) is the effective share",
    "kl": "KL to the reference, before its coefficient",
}
"""Metric sums that the built-in parts add, each divided by the trained tokens when logged."""

Correct = Callable[[LossInputs], torch.Tensor]


def resolve_advantage(algorithm: AlgorithmConfig, *, base: Path | None = None) -> AdvantageFn:
    """The recipe's shaping and advantage, of the groups alone; the answer is checked."""
    compute = _bind("advantages", algorithm.advantage, base)
    name = algorithm.advantage.name
    if name == "gdpo" and algorithm.shaping != ShapingConfig():
        raise ConfigError(
            "algorithm.shaping changes the score, and advantage gdpo looks at its parts alone",
            fix="remove the shaping, or use another advantage",
        )

    def advantages(groups: Sequence[Group]) -> Advantages:
        shaped = shape_scores(groups, algorithm.shaping)
        return _checked_advantages(compute(shaped), groups, name)

    return advantages


def resolve_aggregation(name: str, *, base: Path | None = None) -> AggregationFn:
    """The aggregation of this name, or the user's own as file.py:function."""
    return resolve("aggregations", name, base=base)


def build_objective(
    algorithm: AlgorithmConfig, *, base: Path | None = None
) -> Callable[[LossInputs], TokenLoss]:
    """The loss of the recipe. Files of the user's are relative to `base`, the recipe's folder."""
    _refuse_bad_mixtures(algorithm)
    return _Objective(
        algorithm=algorithm,
        correct=_bind("corrections", algorithm.correction, base),
        loss=_bind("losses", algorithm.loss, base),
    )


@dataclass(frozen=True, slots=True)
class _Objective:
    """Parts with their options bound; a class so that it can be shown and compared."""

    algorithm: AlgorithmConfig
    correct: Correct
    loss: Callable[[LossInputs], TokenLoss]

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        if not self.algorithm.needs_old_logprobs:
            inputs = replace(inputs, old_T=inputs.behaviour_T)
        weight_T = self.correct(inputs).detach()
        policy = self.loss(inputs)
        loss_T = policy.loss_T * weight_T
        sums = {
            **policy.sums,
            **self._off_policy_sums(inputs, weight_T),
            "policy_loss": loss_T.detach().sum(),
        }
        if self.algorithm.needs_reference:
            kl_T = self._kl(inputs)
            loss_T = loss_T + self.algorithm.kl.coefficient * kl_T
            sums["kl"] = kl_T.detach().sum()
        return TokenLoss(loss_T, sums)

    def _kl(self, inputs: LossInputs) -> torch.Tensor:
        if inputs.reference_T is None:
            raise ConfigError(
                f"algorithm.kl.coefficient={self.algorithm.kl.coefficient:g} needs log-probs of a "
                "reference policy, and the batch has none",
                fix="annotate the batch with those of the reference, or set the coefficient to 0",
            )
        return FORMS[self.algorithm.kl.form](inputs.logprobs_T, inputs.reference_T.detach())

    @torch.no_grad()
    def _off_policy_sums(
        self, inputs: LossInputs, weight_T: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        if self.algorithm.loss.name == "sft":  # no policy drew these tokens: there is no mu
            return {}
        ratio_T = bounded_ratio(inputs.logprobs_T, inputs.behaviour_T)
        sums = {
            "ratio": ratio_T.sum(),
            "ratio_squared": ratio_T.square().sum(),
            **sums_by_sign("mask_share", weight_T == 0, inputs.advantages_T),
        }
        if self.algorithm.needs_old_logprobs:
            sums["correction_weight"] = weight_T.sum()
            sums["engine_kl"] = k3(inputs.behaviour_T, inputs.old_T).sum()
        return sums


def _bind(kind: str, part: Section, base: Path | None) -> Callable[..., Any]:
    """Import the part's function and close it over its options.

    A user's own function gets the plain dict of options that the recipe gives.
    """
    name: str = part.name  # pyright: ignore[reportAttributeAccessIssue]
    function = resolve(kind, name, base=base)
    if not callable(function):
        raise ConfigError(f"{name} is a {type(function).__name__}", fix="name a function")
    options: Any = dict(part.options) if isinstance(part, CustomPart) else part
    return lambda *inputs: function(*inputs, options)


def _refuse_bad_mixtures(algorithm: AlgorithmConfig) -> None:
    if algorithm.kl.coefficient > 0 and algorithm.kl.form == "k1":
        raise ConfigError(
            "algorithm.kl.form=k1 in the loss has an expected gradient of zero on-policy",
            fix="use k2 (gradient of the reverse KL) or k3",
        )
    if why := clash(algorithm.loss.name, algorithm.correction.name):
        raise ConfigError(f"algorithm.correction: {why}", fix="use correction: bypass")


def _checked_advantages(advantages: Any, groups: Sequence[Group], name: str) -> Advantages:
    """One finite value (or one per token) for every member of every group."""
    if len(advantages) != len(groups):
        raise ConfigError(
            f"advantage {name} gave {len(advantages)} lists for {len(groups)} groups",
            fix="return one list for each group",
        )
    for group, values in zip(groups, advantages, strict=True):
        if len(values) != len(group.members):
            raise ConfigError(
                f"advantage {name} gave {len(values)} values for group {group.uid} "
                f"of {len(group.members)} samples",
                fix="return one value for each sample, failed ones included (0.0)",
            )
        for value, sample in zip(values, group.samples, strict=True):
            _check_value(value, sample.length, f"advantage {name} of sample {sample.uid}")
    return advantages


def _check_value(value: Any, length: int, what: str) -> None:
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"{what} is {value!r}", fix="return numbers") from None
    if numbers.shape not in ((), (length,)):
        raise ConfigError(
            f"{what} has shape {numbers.shape}, the sample has {length} tokens",
            fix="return a float, or one value for each token of the sample",
        )
    if not np.isfinite(numbers).all():
        raise ConfigError(f"{what} is not finite: {value}", fix="guard divisions in the function")

"""The objective: one loss function from the parts that a recipe names.

    LossInputs -> of each component: policy loss, KL to the reference, entropy
               -> sum of weight * loss, each with weights of its own -> Loss

The parts are resolved once, here, with their options bound; what comes back is a plain function
of a micro-batch. Every denominator and coefficient is in the weights, which the batch carries, so
the trainer adds up what it is given and knows of no algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollick.algorithms.advantages import AdvantageFn, Advantages, Gae
from rollick.algorithms.aggregation import AggregationFn
from rollick.algorithms.correction import interpolated_old
from rollick.algorithms.kl import bounded_ratio
from rollick.algorithms.losses import LossInputs, TokenLoss, entropy
from rollick.config.advantages import ShapingConfig
from rollick.config.algorithm import AlgorithmConfig
from rollick.config.corrections import clash
from rollick.config.losses import SUPERVISED
from rollick.config.names import resolve
from rollick.config.section import CustomPart, Section
from rollick.errors import ConfigError
from rollick.types import Group

METRICS: Mapping[str, str] = {
    "policy_loss": "loss of the policy part, before correction and aggregation",
    "clip_share": "tokens that the loss clipped: gradient stopped, or importance ratio cut",
    "clip_share_up": "those of them with a positive advantage",
    "clip_share_down": "those of them with a negative advantage",
    "ratio": "pi / mu; its mean is 1 on-policy",
    "ratio_squared": "(pi / mu)^2; mean(ratio)^2 / mean(ratio_squared) is the effective share",
    "kl": "KL to the reference, before its coefficient",
    "preferred": "tokens of pairs whose chosen answer the policy prefers (DPO)",
    "margin": "margin of the pairs, by token (DPO)",
    "divergence": "divergence from the teacher (distillation)",
}
"""Metric sums that the built-in parts add, each divided by the trained tokens when logged."""

Correct = Callable[[LossInputs], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """What a micro-batch adds to the loss of the batch, and metrics as sums over its tokens."""

    total: torch.Tensor
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


def resolve_advantage(algorithm: AlgorithmConfig, *, base: Path | None = None) -> AdvantageFn:
    """The recipe's advantage, of shaped groups; the answer is checked."""
    compute = _bind("advantages", algorithm.advantage, base)
    name = algorithm.advantage.name
    if name == "gdpo" and algorithm.shaping != ShapingConfig(
        difficulty=algorithm.shaping.difficulty
    ):
        raise ConfigError(
            "algorithm.shaping changes the score, and advantage gdpo looks at its parts alone",
            fix="remove the shaping, or use another advantage",
        )

    def advantages(groups: Sequence[Group]) -> Advantages:
        return _checked_advantages(compute(groups), groups, name)

    return advantages


def resolve_aggregation(name: str, *, base: Path | None = None) -> AggregationFn:
    """The aggregation of this name, or the user's own as file.py:function."""
    return resolve("aggregations", name, base=base)


def resolve_correction(algorithm: AlgorithmConfig, *, base: Path | None = None) -> Correct:
    """The recipe's correction, of the tokens of a whole batch."""
    return _bind("corrections", algorithm.correction, base)


def build_objective(
    algorithms: Sequence[AlgorithmConfig] | AlgorithmConfig,
    *,
    base: Path | None = None,
    one_step: bool = False,
) -> Callable[[LossInputs], Loss]:
    """The loss of the recipe: tokens of component c go to algorithm number c.

    Files of the user's are relative to `base`, the recipe's folder. With `one_step` a batch makes
    one optimizer step: where only the loss asks for the old policy, it is the one that is trained.
    """
    several = [algorithms] if isinstance(algorithms, AlgorithmConfig) else list(algorithms)
    for algorithm in several:
        _refuse_bad_mixtures(algorithm)
    return _Objective(
        tuple(_component(algorithm, base, one_step=one_step) for algorithm in several)
    )


@dataclass(frozen=True, slots=True)
class _Objective:
    """The components, in order; a class so that it can be shown and compared."""

    components: tuple[_Component, ...]

    def __call__(self, inputs: LossInputs) -> Loss:
        if len(self.components) == 1 or inputs.component_T is None:
            return self.components[0](inputs)
        total = inputs.logprobs_T.new_zeros(())
        sums: dict[str, torch.Tensor] = {}
        for number, component in enumerate(self.components):
            chosen_T = inputs.component_T == number
            if chosen_T.any():
                part = component(inputs.where(chosen_T))
                total = total + part.total
                sums |= {name: sums.get(name, 0) + value for name, value in part.sums.items()}
        return Loss(total, sums)


@dataclass(frozen=True, slots=True)
class _Component:
    """One algorithm's loss, KL and entropy, with their options bound."""

    algorithm: AlgorithmConfig
    loss: Callable[[LossInputs], TokenLoss]
    kl: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    correct: Correct | None
    old_is_now: bool = False

    def __call__(self, inputs: LossInputs) -> Loss:
        inputs = self._with_old(inputs)
        policy = self.loss(inputs)
        weights_T = inputs.weights_T
        if self.correct is not None:
            weights_T = weights_T * self.correct(inputs).detach()
        total = _weighed(policy.loss_T, weights_T)
        sums = {
            **policy.sums,
            **self._off_policy_sums(inputs),
            "policy_loss": policy.loss_T.detach().sum(),
        }
        if self.algorithm.kl.in_loss:
            kl_T = self._kl(inputs)
            total = total + _weighed(kl_T, _given(inputs.kl_weights_T, "kl_weights"))
            sums["kl"] = kl_T.detach().sum()
        if self.algorithm.entropy:
            weights_T = _given(inputs.entropy_weights_T, "entropy_weights")
            total = total - _weighed(entropy(inputs), weights_T)
        return Loss(total, sums)

    def _with_old(self, inputs: LossInputs) -> LossInputs:
        if self.algorithm.old_is_behaviour:
            return replace(inputs, old_T=inputs.behaviour_T)
        if self.old_is_now:
            return replace(inputs, old_T=inputs.logprobs_T.detach())
        if self.algorithm.interpolates_old:
            age_T = _given(inputs.age_T, "age")
            old_T = interpolated_old(inputs.behaviour_T, inputs.logprobs_T.detach(), age_T)
            return replace(inputs, old_T=old_T)
        return inputs

    def _kl(self, inputs: LossInputs) -> torch.Tensor:
        """The estimate of each token, weighted by pi / mu: on-policy that is 1, off-policy the
        tokens would else tell of the KL where mu goes and not where pi goes."""
        reference_T = _given(inputs.reference_T, "reference log-prob").detach()
        kl_T = self.kl(inputs.logprobs_T, reference_T)
        ratio_T = bounded_ratio(inputs.logprobs_T.detach(), inputs.behaviour_T)
        return ratio_T.clamp(max=self.algorithm.kl.max_ratio) * kl_T

    @torch.no_grad()
    def _off_policy_sums(self, inputs: LossInputs) -> dict[str, torch.Tensor]:
        if self.algorithm.loss.name in SUPERVISED:  # no policy drew these tokens: there is no mu
            return {}
        ratio_T = bounded_ratio(inputs.logprobs_T, inputs.behaviour_T)
        return {"ratio": ratio_T.sum(), "ratio_squared": ratio_T.square().sum()}


def _component(algorithm: AlgorithmConfig, base: Path | None, *, one_step: bool) -> _Component:
    return _Component(
        algorithm=algorithm,
        loss=_bind("losses", algorithm.loss, base),
        kl=resolve("kl_forms", algorithm.kl.form),
        correct=resolve_correction(algorithm, base=base) if algorithm.interpolates_old else None,
        old_is_now=one_step and algorithm.old_only_in_loss,
    )


def _weighed(values_T: torch.Tensor, weights_T: torch.Tensor) -> torch.Tensor:
    """sum(weight * value); a value whose weight is 0 may be anything."""
    return (weights_T * torch.where(weights_T == 0, 0.0, values_T)).sum()


def _given(values_T: torch.Tensor | None, what: str) -> torch.Tensor:
    if values_T is None:
        raise ConfigError(
            f"the algorithm needs the {what} of each token, and the batch has none",
            fix="annotate the batch before it is trained on",
        )
    return values_T


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
    if algorithm.kl.in_loss and algorithm.kl.form == "k1":
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
            for stream in value if isinstance(value, Gae) else (value,):
                _check_value(stream, sample.length, f"advantage {name} of sample {sample.uid}")
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

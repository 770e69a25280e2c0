"""The objective: one loss function, composed of the parts that a recipe names.

    LossInputs -> per component: policy loss, KL to the reference, entropy
               -> sum of weight * loss, each with its own weights -> Loss

The weights in the batch include all denominators and coefficients: the trainer only sums losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollick.algorithms.advantages import AdvantageFn, Advantages, AdvantagesAndReturns
from rollick.algorithms.aggregation import AggregationFn
from rollick.algorithms.correction import interpolated_old
from rollick.algorithms.kl import bounded_ratio
from rollick.algorithms.losses import LossInputs, TokenLoss, entropy
from rollick.config.names import resolve
from rollick.config.schema.advantages import ShapingConfig
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.schema.corrections import find_conflict
from rollick.config.schema.losses import SUPERVISED
from rollick.config.schema.section import CustomPart, Section
from rollick.errors import ConfigError
from rollick.types import Group

CorrectionFn = Callable[[LossInputs], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """The share of a micro-batch in the loss of the batch, and metrics as sums over its tokens."""

    total: torch.Tensor
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


def resolve_advantage(algorithm: AlgorithmConfig, *, base: Path | None = None) -> AdvantageFn:
    """The recipe's advantage as a function of shaped groups. Its results are checked."""
    compute = _bind("advantages", algorithm.advantage, base)
    name = algorithm.advantage.name
    default = ShapingConfig(difficulty=algorithm.shaping.difficulty)
    if name == "gdpo" and algorithm.shaping != default:
        raise ConfigError(
            "algorithm.shaping changes the score, and advantage gdpo uses only its parts",
            fix="remove the shaping, or use another advantage",
        )

    def advantages(groups: Sequence[Group]) -> Advantages:
        return checked_advantages(compute(groups), groups, name)

    return advantages


def resolve_aggregation(name: str, *, base: Path | None = None) -> AggregationFn:
    """The aggregation of this name, or the user's function as file.py:function."""
    return resolve("aggregations", name, base_dir=base)


def resolve_correction(algorithm: AlgorithmConfig, *, base: Path | None = None) -> CorrectionFn:
    """The recipe's correction as a function of the tokens of a batch."""
    return _bind("corrections", algorithm.correction, base)


def build_objective(
    algorithms: Sequence[AlgorithmConfig] | AlgorithmConfig,
    *,
    base: Path | None = None,
    one_step: bool = False,
) -> Callable[[LossInputs], Loss]:
    """The loss of the recipe: algorithm c computes the loss of the tokens with component_T == c.

    Files of the user are relative to `base`, the recipe's folder. `one_step`: a batch makes one
    optimizer step, so the old policy is the current one if only the loss needs it.
    """
    configs = [algorithms] if isinstance(algorithms, AlgorithmConfig) else algorithms
    return _Objective(tuple(_compose(config, base, one_step=one_step) for config in configs))


@dataclass(frozen=True, slots=True)
class _Objective:
    """The loss of all components. A dataclass, for its repr and equality."""

    components: tuple[_Component, ...]

    def __call__(self, inputs: LossInputs) -> Loss:
        if len(self.components) == 1 or inputs.component_T is None:
            return self.components[0](inputs)
        total = inputs.logprobs_T.new_zeros(())
        sums: dict[str, torch.Tensor] = {}
        for number, component in enumerate(self.components):
            mask_T = inputs.component_T == number
            if mask_T.any():
                loss = component(inputs.where(mask_T))
                total = total + loss.total
                sums |= {name: sums.get(name, 0) + value for name, value in loss.sums.items()}
        return Loss(total, sums)


@dataclass(frozen=True, slots=True)
class _Component:
    """One algorithm's loss, KL and entropy, with their options bound."""

    algorithm: AlgorithmConfig
    loss: Callable[[LossInputs], TokenLoss]
    kl: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    correct: CorrectionFn | None
    old_is_current: bool = False
    """Use the current policy as the old one: equal if a batch makes one optimizer step."""

    def __call__(self, inputs: LossInputs) -> Loss:
        inputs = self._replace_old(inputs)
        policy = self.loss(inputs)
        weights_T = inputs.weights_T
        if self.correct is not None:
            weights_T = weights_T * self.correct(inputs).detach()
        total = _weighted_sum(policy.loss_T, weights_T)
        sums = {**policy.sums, **self._off_policy_sums(inputs)}
        sums["policy_loss"] = policy.loss_T.detach().sum()
        if self.algorithm.kl.in_loss:
            kl_T = self._kl(inputs)
            total = total + _weighted_sum(kl_T, _require(inputs.kl_weights_T, "kl_weights"))
            sums["kl"] = kl_T.detach().sum()
        if self.algorithm.entropy:
            weights_T = _require(inputs.entropy_weights_T, "entropy_weights")
            total = total - _weighted_sum(entropy(inputs), weights_T)
        return Loss(total, sums)

    def _replace_old(self, inputs: LossInputs) -> LossInputs:
        if self.algorithm.old_is_behaviour:
            return replace(inputs, old_T=inputs.behaviour_T)
        if self.old_is_current:
            return replace(inputs, old_T=inputs.logprobs_T.detach())
        if self.algorithm.interpolates_old:
            age_T = _require(inputs.age_T, "age")
            old_T = interpolated_old(inputs.behaviour_T, inputs.logprobs_T.detach(), age_T)
            return replace(inputs, old_T=old_T)
        return inputs

    def _kl(self, inputs: LossInputs) -> torch.Tensor:
        """The KL estimate of each token, weighted by pi / mu (1 on-policy), because the tokens were
        sampled from mu."""
        reference_T = _require(inputs.reference_T, "reference log-prob").detach()
        kl_T = self.kl(inputs.logprobs_T, reference_T)
        ratio_T = bounded_ratio(inputs.logprobs_T.detach(), inputs.behaviour_T)
        return ratio_T.clamp(max=self.algorithm.kl.max_ratio) * kl_T

    @torch.no_grad()
    def _off_policy_sums(self, inputs: LossInputs) -> dict[str, torch.Tensor]:
        if self.algorithm.loss.name in SUPERVISED:  # No policy sampled these tokens.
            return {}
        ratio_T = bounded_ratio(inputs.logprobs_T, inputs.behaviour_T)
        return {"ratio": ratio_T.sum(), "ratio_squared": ratio_T.square().sum()}


def _compose(algorithm: AlgorithmConfig, base: Path | None, *, one_step: bool) -> _Component:
    if algorithm.kl.in_loss and algorithm.kl.form == "k1":
        raise ConfigError(
            "algorithm.kl.form=k1 in the loss has an expected gradient of zero on-policy",
            fix="use k2 (gradient of the reverse KL) or k3",
        )
    if why := find_conflict(algorithm.loss.name, algorithm.correction.name):
        raise ConfigError(f"algorithm.correction: {why}", fix="use correction: bypass")
    return _Component(
        algorithm=algorithm,
        loss=_bind("losses", algorithm.loss, base),
        kl=resolve("kl_forms", algorithm.kl.form),
        correct=resolve_correction(algorithm, base=base) if algorithm.interpolates_old else None,
        old_is_current=one_step and algorithm.old_only_in_loss,
    )


def _weighted_sum(values_T: torch.Tensor, weights_T: torch.Tensor) -> torch.Tensor:
    """sum(weight * value); values with weight 0 may be infinite or NaN."""
    return (weights_T * torch.where(weights_T == 0, 0.0, values_T)).sum()


def _require(values_T: torch.Tensor | None, name: str) -> torch.Tensor:
    if values_T is None:
        raise ConfigError(
            f"the algorithm needs the {name} of each token, and the batch has none",
            fix="annotate the batch before training",
        )
    return values_T


def _bind(kind: str, part: Section, base: Path | None) -> Callable[..., Any]:
    """Import the part's function and bind its options; a user's function gets a plain dict."""
    name: str = part.name  # pyright: ignore[reportAttributeAccessIssue]
    function = resolve(kind, name, base_dir=base)
    if not callable(function):
        problem = f"{name} is a {type(function).__name__}, not a function"
        raise ConfigError(problem, fix="name a function")
    options: Any = dict(part.options) if isinstance(part, CustomPart) else part
    return lambda *inputs: function(*inputs, options)


def checked_advantages(advantages: Any, groups: Sequence[Group], name: str) -> Advantages:
    """Raises unless every member of every group has a finite value, or one per token."""
    if len(advantages) != len(groups):
        raise ConfigError(
            f"advantage {name} returned {len(advantages)} lists for {len(groups)} groups",
            fix="return one list for each group",
        )
    for group, values in zip(groups, advantages, strict=True):
        if len(values) != len(group.members):
            raise ConfigError(
                f"advantage {name} returned {len(values)} values for the {len(group.members)} "
                f"samples of group {group.uid}",
                fix="return one value for each sample, failed ones included (0.0)",
            )
        for value, sample in zip(values, group.samples, strict=True):
            for array in value if isinstance(value, AdvantagesAndReturns) else (value,):
                _check_value(array, sample.length, f"advantage {name} of sample {sample.uid}")
    return advantages


def _check_value(value: Any, length: int, name: str) -> None:
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {value!r}", fix="return numbers") from None
    if numbers.shape not in ((), (length,)):
        raise ConfigError(
            f"{name} has the shape {numbers.shape}, and the sample has {length} tokens",
            fix="return a float, or one value for each token of the sample",
        )
    if not np.isfinite(numbers).all():
        raise ConfigError(f"{name} is not finite: {value}", fix="guard divisions in the function")

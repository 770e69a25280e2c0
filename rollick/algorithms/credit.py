"""Credit assignment: from groups and an annotated batch to each token's advantage and weight.

    groups -> KL in the reward -> score shaping -> advantage ------> advantages_N, returns_N
    batch  -> correction (pi_old / mu) -> aggregation -------------> weights_N
                                        -> KL and entropy coefficients -> kl_weights_N,
                                                                          entropy_weights_N

The samples of all domains with the same algorithm form a component (component_N) with its own
denominators over the global batch. Tokens that the correction drops are excluded from the
denominator of the policy loss, and included in those of KL and entropy.

State kept between steps: running statistics of scores, and KL coefficients.

Shapes: B rows and N tokens of the batch; T trained tokens of a component.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollick.algorithms.advantages import AdvantageFn, AdvantagesAndReturns
from rollick.algorithms.aggregation import AggregationFn
from rollick.algorithms.annotated_groups import (
    RowRanges,
    annotate_group,
    drop_untrained_members,
    subtract_kl_penalty,
)
from rollick.algorithms.kl import adaptive_coefficient, fixed_coefficient, k3
from rollick.algorithms.losses import LossInputs, sums_by_sign
from rollick.algorithms.objective import (
    CorrectionFn,
    resolve_advantage,
    resolve_aggregation,
    resolve_correction,
)
from rollick.algorithms.score_statistics import RunningStatistics
from rollick.algorithms.shaping import (
    normalise_scores,
    penalise_length,
    trained_members,
    valid_scores,
)
from rollick.config.schema import RlRecipe
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.data.batch import Batch
from rollick.data.collate import token_weights
from rollick.types import BoolArray, Group

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Component:
    """An algorithm of the recipe with its functions."""

    algorithm: AlgorithmConfig
    advantage: AdvantageFn
    aggregation: AggregationFn
    correct: CorrectionFn
    max_tokens: int
    """The largest token limit of its domains: they share a denominator."""

    @property
    def reads_annotations(self) -> bool:
        """Whether advantages use model outputs, which only samples of the batch have."""
        return self.algorithm.kl.in_reward or bool(self.algorithm.needs & {"values", "teacher"})


@dataclass(slots=True)
class _TokenCredit:
    """The arrays that `assign` fills, and sums of metrics over the trained tokens."""

    advantages_N: Floats
    returns_N: Floats
    weights_N: Floats
    kl_weights_N: Floats
    entropy_weights_N: Floats
    scores_B: Floats
    sums: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, sums: Mapping[str, float]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value


class CreditAssigner:
    """Assigns an advantage, weights and an algorithm to each token of a step's batch."""

    def __init__(self, recipe: RlRecipe, *, base: Path | None) -> None:
        """`base` is the folder of files that the recipe names."""
        self.recipe = recipe
        domains = recipe.data.domains
        self._component_of = {name: recipe.component(name) for name in domains}
        self._max_tokens = {name: recipe.training_sampling(name).max_tokens for name in domains}
        self._components = tuple(
            self._resolve(number, algorithm, base)
            for number, algorithm in enumerate(recipe.algorithms)
        )
        self._running = [RunningStatistics() for _ in self._components]
        self._kl_coefficients = [c.algorithm.kl.coefficient for c in self._components]
        self._trained_tokens = [0 for _ in self._components]
        """Trained tokens of the last batch, for each component."""

    def _resolve(self, number: int, algorithm: AlgorithmConfig, base: Path | None) -> _Component:
        limits = [self._max_tokens[name] for name, c in self._component_of.items() if c == number]
        return _Component(
            algorithm,
            resolve_advantage(algorithm, base=base),
            resolve_aggregation(algorithm.aggregation, base=base),
            resolve_correction(algorithm, base=base),
            max_tokens=max(limits, default=0),
        )

    def trained_members(self, group: Group) -> list[bool]:
        """Marks the members of a group to train on."""
        domain = group.prompt.domain
        return trained_members(
            group,
            drop_truncated=self.recipe.rollout_of(domain).drop_truncated,
            difficulty=self._components[self._component_of[domain]].algorithm.shaping.difficulty,
        )

    def assign(self, groups: Sequence[Group], batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with advantages and weights, and metrics as means over the trained tokens."""
        component_of = {group.uid: self._component_of[group.prompt.domain] for group in groups}
        component_B = np.array([component_of[uid.group] for uid in batch.uids], np.int8)
        component_N = np.repeat(component_B, batch.lengths_B)
        trained_T = component_N[batch.loss_mask_N]
        self._trained_tokens = np.bincount(trained_T, minlength=len(self._components)).tolist()
        arrays = [np.zeros(batch.tokens) for _ in range(5)]
        credit = _TokenCredit(*arrays, scores_B=np.zeros(batch.rows))
        rows = batch.rows_by_sample()
        for number in range(len(self._components)):
            component_groups = [group for group in groups if component_of[group.uid] == number]
            if component_groups:
                self._fill_advantages(number, component_groups, batch, rows, credit)
                self._fill_weights(number, batch, component_N == number, credit)
        if batch.teacher_logprobs_N is not None:
            credit.add({"teacher_kl": _teacher_k1(batch)})
        has_kl = any(algorithm.kl.in_loss for algorithm in self.recipe.algorithms)
        has_entropy = any(algorithm.entropy for algorithm in self.recipe.algorithms)
        credited = replace(
            batch,
            advantages_N=credit.advantages_N,
            weights_N=credit.weights_N,
            scores_B=credit.scores_B,
            component_N=component_N,
            kl_weights_N=credit.kl_weights_N if has_kl else None,
            entropy_weights_N=credit.entropy_weights_N if has_entropy else None,
            returns_N=None if batch.values_N is None else credit.returns_N,
        )
        trained = max(int(np.count_nonzero(batch.loss_mask_N)), 1)
        return credited, {name: value / trained for name, value in credit.sums.items()}

    def update_kl_coefficients(self, samples: int, metrics: Mapping[str, float]) -> None:
        """Adapt the KL coefficients to the KL in the metrics of the learner and of `assign`."""
        for number, component in enumerate(self._components):
            kl = component.algorithm.kl
            mean_kl = metrics.get("reward_kl" if kl.in_reward else "kl")
            if mean_kl is None or kl.coefficient == 0 or not self._trained_tokens[number]:
                continue
            # The mean is over all trained tokens, including those of components without this KL.
            observed = mean_kl * sum(self._trained_tokens) / self._tokens_with_kl(kl.place)
            update = fixed_coefficient
            if kl.controller == "adaptive":
                update = partial(adaptive_coefficient, target=kl.target, horizon=kl.horizon)
            self._kl_coefficients[number] = update(
                self._kl_coefficients[number], observed=observed, samples=samples
            )

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of the adaptive KL coefficients of the next step, if there are any."""
        kls = [component.algorithm.kl for component in self._components]
        is_adaptive = [kl.coefficient != 0 and kl.controller == "adaptive" for kl in kls]
        adaptive = list(compress(self._kl_coefficients, is_adaptive))
        return {"train/kl_coefficient": sum(adaptive) / len(adaptive)} if adaptive else {}

    def state(self) -> dict[str, Any]:
        """JSON-serialisable state."""
        running = [statistics.to_state() for statistics in self._running]
        return {"running": running, "kl_coefficients": list(self._kl_coefficients)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._running = [RunningStatistics.from_state(entry) for entry in state["running"]]
        self._kl_coefficients = [float(value) for value in state["kl_coefficients"]]

    def _tokens_with_kl(self, place: str) -> int:
        """Trained tokens of the last batch whose algorithm has a KL in this place."""
        kls = [component.algorithm.kl for component in self._components]
        has_kl = [kl.coefficient != 0 and kl.place == place for kl in kls]
        return sum(compress(self._trained_tokens, has_kl))

    def _fill_advantages(
        self,
        number: int,
        groups: Sequence[Group],
        batch: Batch,
        rows: RowRanges,
        credit: _TokenCredit,
    ) -> None:
        component = self._components[number]
        annotated = [annotate_group(group, batch, rows) for group in groups]
        if component.reads_annotations:
            annotated = [drop_untrained_members(group, rows) for group in annotated]
        if component.algorithm.kl.in_reward:
            annotated, kl_sum = subtract_kl_penalty(annotated, self._kl_coefficients[number])
            credit.add({"reward_kl": kl_sum})
        shaped = self._shape_scores(number, annotated)
        offsets = batch.offsets_B1
        for group, values in zip(shaped, component.advantage(shaped), strict=True):
            for member, value in zip(group.members, values, strict=True):
                sample_rows = rows.get(member.sample.uid)
                if sample_rows is None:
                    continue
                span = slice(offsets[sample_rows.start], offsets[sample_rows.stop])
                credit.scores_B[sample_rows.start : sample_rows.stop] = member.score.value
                if isinstance(value, AdvantagesAndReturns):
                    credit.returns_N[span] = value.returns_T
                    value = value.advantages_T
                credit.advantages_N[span] = np.where(batch.loss_mask_N[span], value, 0.0)

    def _shape_scores(self, number: int, groups: Sequence[Group]) -> Sequence[Group]:
        shaping = self._components[number].algorithm.shaping
        limits = self._max_tokens
        penalised = [
            penalise_length(group, shaping, max_tokens=limits[group.prompt.domain])
            for group in groups
        ]
        if "running" in (shaping.mean, shaping.std):
            self._running[number] = self._running[number].updated(valid_scores(penalised))
        return normalise_scores(penalised, shaping, self._running[number])

    def _fill_weights(
        self, number: int, batch: Batch, component_N: BoolArray, credit: _TokenCredit
    ) -> None:
        component = self._components[number]
        algorithm = component.algorithm
        trained_N = component_N & batch.loss_mask_N
        correction_N = np.ones(batch.tokens)
        skips_old = algorithm.old_only_in_loss and batch.old_logprobs_N is None
        if algorithm.needs_old_logprobs and not skips_old:
            inputs = _correction_inputs(batch, trained_N, credit.advantages_N)
            weights_T = component.correct(inputs)
            correction_N[trained_N] = weights_T.numpy()
            credit.add(_correction_sums(inputs, weights_T))

        aggregate = partial(
            token_weights, batch, component.aggregation, max_tokens=component.max_tokens
        )
        weights_N = aggregate(among_N=trained_N & (correction_N != 0))
        credit.weights_N += algorithm.weight * weights_N * correction_N
        if not (algorithm.kl.in_loss or algorithm.entropy):
            return
        # KL and entropy also include the tokens that the correction drops.
        all_weights_N = algorithm.weight * aggregate(among_N=trained_N)
        if algorithm.kl.in_loss:
            credit.kl_weights_N += self._kl_coefficients[number] * all_weights_N
        credit.entropy_weights_N += algorithm.entropy * all_weights_N


def _teacher_k1(batch: Batch) -> float:
    """Sum of log pi_old - log p_teacher over the trained tokens; mu replaces an unknown pi_old."""
    old_N = batch.logprobs_N if batch.old_logprobs_N is None else batch.old_logprobs_N
    assert batch.teacher_logprobs_N is not None
    mask_N = batch.loss_mask_N
    return float((old_N[mask_N].astype(np.float64) - batch.teacher_logprobs_N[mask_N]).sum())


def _correction_inputs(batch: Batch, trained_N: BoolArray, advantages_N: Floats) -> LossInputs:
    """The inputs of a correction: the trained tokens of a component, in float64."""

    def select(values_N: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values_N[trained_N], np.float64))

    assert batch.old_logprobs_N is not None, "the correction needs old log-probs"
    old_T, reference_N = select(batch.old_logprobs_N), batch.reference_logprobs_N
    sequence_N = np.repeat(np.arange(batch.rows), batch.lengths_B)
    return LossInputs(
        logprobs_T=old_T,
        old_T=old_T,
        behaviour_T=select(batch.logprobs_N),
        advantages_T=select(advantages_N),
        weights_T=torch.ones_like(old_T),
        sequence_T=torch.from_numpy(sequence_N[trained_N]),
        reference_T=None if reference_N is None else select(reference_N),
        age_T=torch.from_numpy(batch.version - batch.versions_N[trained_N].astype(np.int64)),
    )


def _correction_sums(inputs: LossInputs, weights_T: torch.Tensor) -> dict[str, float]:
    sums = {
        **sums_by_sign("dropped_share", weights_T == 0, inputs.advantages_T),
        "correction_weight": weights_T.sum(),
        "engine_kl": k3(inputs.behaviour_T, inputs.old_T).sum(),
    }
    return {name: float(value) for name, value in sums.items()}

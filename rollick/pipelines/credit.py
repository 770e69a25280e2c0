"""Credit: from groups and an annotated batch to what each token counts for. No process, no model.

    groups -> KL in the reward -> shaping -> advantage ---------------> advantages_N, returns_N
    batch  -> correction (old against behaviour) -> aggregation ------> weights_N
                                                 -> coefficients -> kl_weights_N, entropy_weights_N

Every domain's samples go to its own algorithm (component_N), and every component has denominators
of its own over the whole batch: of the policy loss without the tokens that the correction drops,
of KL and entropy with them. The learner adds up what it finds and knows of no algorithm.

Holds what goes on from step to step: running statistics of scores, KL coefficients. N: tokens of
the batch; T: the trained ones of a component.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollick.algorithms.advantages import AdvantageFn, Gae
from rollick.algorithms.aggregation import AggregationFn
from rollick.algorithms.kl import adaptive_coefficient, fixed_coefficient, k3
from rollick.algorithms.losses import LossInputs, sums_by_sign
from rollick.algorithms.objective import (
    Correct,
    resolve_advantage,
    resolve_aggregation,
    resolve_correction,
)
from rollick.algorithms.shaping import (
    RunningMoments,
    judged_scores,
    normalise_scores,
    penalise_length,
    trained_members,
)
from rollick.config.algorithm import AlgorithmConfig
from rollick.config.schema import Recipe
from rollick.data.batch import Batch
from rollick.data.collate import weigh
from rollick.types import Annotations, BoolArray, Group, SampleId, Score, ScoredSample

CREDIT_METRICS: Mapping[str, str] = {
    "mask_share": "tokens that the correction dropped",
    "mask_share_up": "those of them with a positive advantage",
    "mask_share_down": "those of them with a negative advantage",
    "correction_weight": "factor for the mismatch of engine and learner",
    "engine_kl": "k3 of the engine's behaviour policy and the learner's old one",
    "reward_kl": "KL to the reference that was taken from the rewards, before its coefficient",
    "teacher_kl": "k1 of the old policy and the teacher: what the advantage opd brings down",
}
"""Means over the trained tokens of a batch."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One algorithm of the recipe, with its functions."""

    algorithm: AlgorithmConfig
    advantage: AdvantageFn
    aggregation: AggregationFn
    correct: Correct

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, base: Path | None) -> _Part:
        return cls(
            algorithm,
            resolve_advantage(algorithm, base=base),
            resolve_aggregation(algorithm.aggregation, base=base),
            resolve_correction(algorithm, base=base),
        )

    @property
    def reads_tokens(self) -> bool:
        """Whether advantages look at what models say of tokens, which only a batch has."""
        return self.algorithm.kl.in_reward or bool(self.algorithm.needs & {"values", "teacher"})


@dataclass(slots=True)
class _Streams:
    """The arrays of a batch while they are being filled."""

    advantages_N: npt.NDArray[np.float64]
    returns_N: npt.NDArray[np.float64]
    weights_N: npt.NDArray[np.float64]
    kl_weights_N: npt.NDArray[np.float64]
    entropy_weights_N: npt.NDArray[np.float64]
    scores_B: npt.NDArray[np.float64]
    sums: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, batch: Batch) -> _Streams:
        streams = [np.zeros(batch.tokens) for _ in range(5)]
        return cls(*streams, scores_B=np.zeros(batch.samples))

    def add(self, sums: Mapping[str, float]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value


class Credit:
    """Assigns credit to the tokens of each step's batch."""

    def __init__(self, recipe: Recipe, *, base: Path | None) -> None:
        self.recipe = recipe
        self._parts = tuple(_Part.of(algorithm, base) for algorithm in recipe.algorithms)
        self._component = {name: recipe.component(name) for name in recipe.data.domains}
        self._max_tokens = {n: recipe.sampling_of(n).max_tokens for n in recipe.data.domains}
        self._running = [RunningMoments() for _ in self._parts]
        self._coefficients = [part.algorithm.kl.coefficient for part in self._parts]
        self._tokens = [0 for _ in self._parts]

    def chosen(self, group: Group) -> list[bool]:
        """Which members of a group are trained on."""
        shaping = self._parts[self._component[group.prompt.domain]].algorithm.shaping
        return trained_members(
            group,
            drop_truncated=self.recipe.rollout_of(group.prompt.domain).drop_truncated,
            difficulty=shaping.difficulty,
        )

    def assign(self, groups: Sequence[Group], batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with its credit, and what was seen on the way, as means by trained token."""
        of_group = {group.uid: self._component[group.prompt.domain] for group in groups}
        component_B = np.array([of_group[uid.group] for uid in batch.uids], np.int8)
        component_N = np.repeat(component_B, batch.lengths_B)
        trained_T = component_N[batch.loss_mask_N]
        self._tokens = np.bincount(trained_T, minlength=len(self._parts)).tolist()
        streams = _Streams.of(batch)
        places = batch.places()
        for number in range(len(self._parts)):
            mine = [group for group in groups if of_group[group.uid] == number]
            if mine:
                self._advantages(number, mine, batch, places, streams)
                self._weights(number, batch, component_N == number, streams)
        if batch.teacher_logprobs_N is not None:
            streams.add({"teacher_kl": _teacher_k1(batch)})
        credited = replace(
            batch,
            advantages_N=streams.advantages_N,
            weights_N=streams.weights_N,
            scores_B=streams.scores_B,
            component_N=component_N,
            kl_weights_N=self._if(self._any_kl, streams.kl_weights_N),
            entropy_weights_N=self._if(self._any_entropy, streams.entropy_weights_N),
            returns_N=self._if(batch.values_N is not None, streams.returns_N),
        )
        trained = max(int(np.count_nonzero(batch.loss_mask_N)), 1)
        return credited, {name: value / trained for name, value in streams.sums.items()}

    def trained(self, samples: int, means: Mapping[str, float]) -> None:
        """Steer the KL coefficients by the KL of the step, as the learner or `assign` saw it."""
        for number, part in enumerate(self._parts):
            kl = part.algorithm.kl
            seen = means.get("reward_kl" if kl.in_reward else "kl")
            if seen is None or kl.coefficient == 0 or not self._tokens[number]:
                continue
            # The means are over all trained tokens, also those of domains that have no such KL.
            observed = seen * sum(self._tokens) / self._tokens_with_kl(kl.place)
            before = self._coefficients[number]
            self._coefficients[number] = (
                fixed_coefficient(before, observed=observed, samples=samples)
                if kl.controller == "fixed"
                else adaptive_coefficient(
                    before,
                    observed=observed,
                    samples=samples,
                    target=kl.target,
                    horizon=kl.horizon,
                )
            )

    @property
    def metrics(self) -> dict[str, float]:
        """The coefficients that the next step will use, where a KL is steered."""
        steered = [
            coefficient
            for coefficient, part in zip(self._coefficients, self._parts, strict=True)
            if part.algorithm.kl.coefficient and part.algorithm.kl.controller == "adaptive"
        ]
        return {"train/kl_coefficient": sum(steered) / len(steered)} if steered else {}

    def state(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "running": [moments.to_state() for moments in self._running],
            "kl_coefficients": list(self._coefficients),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._running = [RunningMoments.from_state(entry) for entry in state["running"]]
        self._coefficients = [float(value) for value in state["kl_coefficients"]]

    @property
    def _any_kl(self) -> bool:
        return any(part.algorithm.kl.in_loss for part in self._parts)

    @property
    def _any_entropy(self) -> bool:
        return any(part.algorithm.entropy for part in self._parts)

    def _tokens_with_kl(self, place: str) -> int:
        """Trained tokens of the last batch whose algorithm has a KL in this place."""
        counted = zip(self._tokens, self._parts, strict=True)
        kls = [(tokens, part.algorithm.kl) for tokens, part in counted]
        return sum(tokens for tokens, kl in kls if kl.coefficient and kl.place == place)

    @staticmethod
    def _if(wanted: bool, values_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
        return values_N if wanted else None

    def _advantages(
        self,
        number: int,
        groups: Sequence[Group],
        batch: Batch,
        places: Mapping[SampleId, range],
        streams: _Streams,
    ) -> None:
        part = self._parts[number]
        annotated = [_annotated(group, batch, places) for group in groups]
        if part.reads_tokens:
            annotated = [_without_strangers(group, places) for group in annotated]
        if part.algorithm.kl.in_reward:
            annotated, total = _with_penalty(annotated, self._coefficients[number])
            streams.add({"reward_kl": total})
        shaped = self._shaped(number, annotated)
        offsets = batch.offsets_B1
        for group, values in zip(shaped, part.advantage(shaped), strict=True):
            for member, value in zip(group.members, values, strict=True):
                place = places.get(member.sample.uid)
                if place is None:
                    continue
                span = slice(offsets[place.start], offsets[place.stop])
                streams.scores_B[place.start : place.stop] = member.score.value
                if isinstance(value, Gae):
                    streams.returns_N[span] = value.returns_T
                    value = value.advantages_T
                streams.advantages_N[span] = np.where(batch.loss_mask_N[span], value, 0.0)

    def _shaped(self, number: int, groups: Sequence[Group]) -> Sequence[Group]:
        shaping = self._parts[number].algorithm.shaping
        penalised = [
            one
            for group in groups
            for one in penalise_length(
                [group], shaping, max_tokens=self._max_tokens[group.prompt.domain]
            )
        ]
        if "running" in (shaping.mean, shaping.std):
            self._running[number] = self._running[number].updated(judged_scores(penalised))
        return normalise_scores(
            penalised,
            mean_from=shaping.mean,
            std_from=shaping.std,
            clip=shaping.clip,
            running=self._running[number],
        )

    def _weights(self, number: int, batch: Batch, mine_N: BoolArray, streams: _Streams) -> None:
        part, algorithm = self._parts[number], self._parts[number].algorithm
        trained_N = mine_N & batch.loss_mask_N
        correction_N = np.ones(batch.tokens)
        spared = algorithm.old_only_in_loss and batch.old_logprobs_N is None
        if algorithm.needs_old_logprobs and not spared:
            inputs = _correction_inputs(batch, trained_N, streams.advantages_N)
            weights_T = part.correct(inputs)
            correction_N[trained_N] = weights_T.numpy()
            streams.add(_correction_sums(inputs, weights_T))
        # Domains of one algorithm share its denominator, so they share the longest limit.
        max_tokens = max(
            limit for name, limit in self._max_tokens.items() if self._component[name] == number
        )
        kept_N = trained_N & (correction_N != 0)
        weights_N = weigh(batch, part.aggregation, max_tokens=max_tokens, among_N=kept_N)
        streams.weights_N += algorithm.weight * weights_N * correction_N
        if not (algorithm.kl.in_loss or algorithm.entropy):
            return
        # Dropped tokens still tell how far the policy is from its reference.
        every_N = algorithm.weight * weigh(
            batch, part.aggregation, max_tokens=max_tokens, among_N=trained_N
        )
        if algorithm.kl.in_loss:
            streams.kl_weights_N += self._coefficients[number] * every_N
        streams.entropy_weights_N += algorithm.entropy * every_N


def _annotated(group: Group, batch: Batch, places: Mapping[SampleId, range]) -> Group:
    """The group with what the batch knows of its members' tokens."""
    streams = {
        "old": batch.old_logprobs_N,
        "reference": batch.reference_logprobs_N,
        "teacher": batch.teacher_logprobs_N,
        "values": batch.values_N,
    }
    known = {name: values_N for name, values_N in streams.items() if values_N is not None}
    if not known:
        return group
    offsets, last_B = batch.offsets_B1, batch.last_values_B

    def annotations(uid: SampleId) -> Annotations:
        place = places.get(uid)
        if place is None:
            return Annotations()
        span = slice(offsets[place.start], offsets[place.stop])
        return Annotations(
            **{name: values_N[span] for name, values_N in known.items()},
            last_value=0.0 if last_B is None else float(last_B[place.stop - 1]),
        )

    return _with_members(
        group, (replace(m, annotations=annotations(m.sample.uid)) for m in group.members)
    )


def _without_strangers(group: Group, places: Mapping[SampleId, range]) -> Group:
    """Members that are not in the batch, and so have no annotations, as if they were not judged."""
    unknown = Score.failed("not trained on")
    return _with_members(
        group,
        (m if m.sample.uid in places else replace(m, score=unknown) for m in group.members),
    )


def _with_penalty(groups: Sequence[Group], coefficient: float) -> tuple[list[Group], float]:
    """The groups with coefficient * k1 taken from each token's reward, and the sum of all k1."""
    total = 0.0
    found: list[Group] = []
    for group in groups:
        members: list[ScoredSample] = []
        for member in group.members:
            if member.score.ok:
                kl_T = _k1_of(member)
                total += float(kl_T.sum())
                member = _penalised(member, coefficient * kl_T)
            members.append(member)
        found.append(_with_members(group, members))
    return found, total


def _k1_of(member: ScoredSample) -> npt.NDArray[np.float64]:
    """log pi_old - log pi_ref of the trained tokens, 0 elsewhere; mu stands in for pi_old."""
    sample, said = member.sample, member.annotations
    assert said.reference is not None, "a KL in the reward is annotated with the reference"
    old_T = sample.logprobs if said.old is None else said.old
    kl_T = np.zeros(sample.length)
    trained = np.flatnonzero(sample.loss_mask)
    kl_T[trained] = old_T[trained].astype(np.float64) - said.reference[trained]
    return kl_T


def _teacher_k1(batch: Batch) -> float:
    """Sum of log pi_old - log p_teacher over the trained tokens; mu stands in for pi_old."""
    old_N = batch.logprobs_N if batch.old_logprobs_N is None else batch.old_logprobs_N
    assert batch.teacher_logprobs_N is not None
    mask_N = batch.loss_mask_N
    return float((old_N[mask_N].astype(np.float64) - batch.teacher_logprobs_N[mask_N]).sum())


def _penalised(member: ScoredSample, penalty_T: npt.NDArray[np.float64]) -> ScoredSample:
    return replace(
        member,
        score=replace(member.score, value=member.score.value - float(penalty_T.sum())),
        annotations=replace(member.annotations, penalty=penalty_T),
    )


def _with_members(group: Group, members: Iterable[ScoredSample]) -> Group:
    return replace(group, members=tuple(members))


def _correction_inputs(
    batch: Batch, trained_N: BoolArray, advantages_N: npt.NDArray[np.float64]
) -> LossInputs:
    """What a correction looks at: the trained tokens of a component, in float64."""

    def picked(values_N: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values_N[trained_N], np.float64))

    assert batch.old_logprobs_N is not None, "the correction is annotated with old log-probs"
    old_T, reference_N = picked(batch.old_logprobs_N), batch.reference_logprobs_N
    sequence_N = np.repeat(np.arange(batch.samples), batch.lengths_B)
    return LossInputs(
        logprobs_T=old_T,
        old_T=old_T,
        behaviour_T=picked(batch.logprobs_N),
        advantages_T=picked(advantages_N),
        weights_T=torch.ones_like(old_T),
        sequence_T=torch.from_numpy(sequence_N[trained_N]),
        reference_T=None if reference_N is None else picked(reference_N),
        age_T=torch.from_numpy(batch.version - batch.versions_N[trained_N].astype(np.int64)),
    )


def _correction_sums(inputs: LossInputs, weights_T: torch.Tensor) -> dict[str, float]:
    sums = {
        **sums_by_sign("mask_share", weights_T == 0, inputs.advantages_T),
        "correction_weight": weights_T.sum(),
        "engine_kl": k3(inputs.behaviour_T, inputs.old_T).sum(),
    }
    return {name: float(value) for name, value in sums.items()}

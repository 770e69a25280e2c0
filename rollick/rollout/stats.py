"""The statistics of one step of the rollout.

They cover two sets of samples: the batch, and all samples scored since the previous batch. The
second set includes dropped groups, so its mean score is not biased by the selection of groups.

A staleness rule that drops groups biases the batch. `rollout/bias/*` measures this: the mean of the
batch minus the mean of batch and dropped samples. Cancelled samples have no length and no score, so
the bias excludes them; `rollout/cancelled` counts them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from statistics import fmean
from typing import Any

import numpy as np

from rollick.rewards.text import repeated_share
from rollick.types import Group, PolicyVersion, ScoredSample, ScoreStatus, stable_hash

NAN = float("nan")
"""One shared object: dataclasses with the same nan object compare as equal."""

REPETITION_CHARACTERS = 4000
"""Number of characters at the end of a response that are searched for repetition."""


def _metric(*names: str, default: float = NAN) -> Any:
    """A field that is logged under these names (see observe/metrics.py)."""
    return field(default=default, metadata={"metrics": names})


def _logged(stats: Any) -> dict[str, float]:
    logged = [(f.name, name) for f in fields(stats) for name in f.metadata.get("metrics", ())]
    return {metric: getattr(stats, name) for name, metric in logged}


@dataclass(frozen=True, slots=True)
class DomainStats:
    """Statistics of one domain. `groups` covers the batch, the others all ended samples."""

    score: float = _metric("score/domain/{}")
    groups: int = _metric("rollout/domain/{}/groups", default=0)
    dropped: int = _metric("rollout/domain/{}/dropped", default=0)
    scored: int = _metric("rollout/domain/{}/samples", default=0)
    failed_share: float = _metric("rollout/domain/{}/failed_scores", default=0.0)
    response_length: float = _metric("rollout/domain/{}/response_length")
    truncated: float = _metric("rollout/domain/{}/truncated")

    def metrics(self, domain: str) -> dict[str, float]:
        return {name.format(domain): value for name, value in _logged(self).items()}


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """observe/metric_table.py describes the metrics. Without samples, most means are nan."""

    step: int = 0
    scored: int = 0
    """Samples that ended in this step, those of dropped groups included."""
    mean_score: float = _metric("score/mean")
    tokens: int = _metric("rollout/tokens", default=0)
    response_length: float = _metric("rollout/response_length")
    truncated: float = _metric("rollout/truncated")
    failed_share: float = _metric("rollout/failed_scores", default=0.0)
    generate_seconds: float = _metric("time/sample_generate")
    reward_seconds: float = _metric("time/sample_reward")
    repetition: float = _metric("rollout/repetition")
    identical: float = _metric("rollout/identical")
    groups: int = _metric("rollout/groups", default=0)
    samples: int = _metric("rollout/samples", default=0)
    trained_score: float = _metric("score/trained", "rollout/bias/score_kept")
    age_mean: float = _metric("rollout/age_mean")
    age_max: int = _metric("rollout/age_max", default=0)
    wait_seconds: float = 0.0
    """How long `Rollout.take` waited for the batch."""
    kept_length: float = _metric("rollout/bias/length_kept")
    dropped_length: float = _metric("rollout/bias/length_dropped")
    length_bias: float = _metric("rollout/bias/length", default=0.0)
    dropped_score: float = _metric("rollout/bias/score_dropped")
    score_bias: float = _metric("rollout/bias/score", default=0.0)
    cancelled: int = _metric("rollout/cancelled", default=0)
    cancelled_share: float = _metric("rollout/cancelled_share", default=0.0)
    masked_tokens: int = _metric("rollout/masked_tokens", default=0)
    kept_cache_tokens: int = _metric("rollout/kept_cache_tokens", default=0)
    deferred: int = _metric("rollout/deferred", default=0)
    deferred_tokens: int = _metric("rollout/deferred_tokens", default=0)
    deferred_waiting: int = _metric("rollout/deferred_waiting", default=0)
    long_groups: int = _metric("rollout/long_groups", default=0)
    long_length: float = _metric("rollout/long_length")
    other_length: float = _metric("rollout/other_length")
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Groups dropped, by reason."""
    domains: Mapping[str, DomainStats] = field(default_factory=dict[str, "DomainStats"])
    score_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean of each entry of `Score.parts`: each reward, and the parts that it reports."""

    def metrics(self) -> dict[str, float]:
        metrics = _logged(self)
        for name, domain in self.domains.items():
            metrics |= domain.metrics(name)
        metrics |= {f"score/part/{part}": score for part, score in self.score_parts.items()}
        metrics |= {f"rollout/dropped/{reason}": n for reason, n in self.dropped.items()}
        return metrics


class StepWindow:
    """Sums over the samples that end between two batches."""

    def __init__(self) -> None:
        self.scored = 0
        self.failed = 0
        self.unavailable = 0
        self.first_failure = ""
        self.first_unavailable = ""
        self.tokens = 0
        self.truncated = 0
        self.generate_seconds = 0.0
        self.reward_seconds = 0.0
        self.dropped: Counter[str] = Counter()
        self.cancelled = 0
        self.masked_tokens = 0
        self.deferred = 0
        self.deferred_tokens = 0
        self.dropped_lengths: list[int] = []
        self.dropped_scores: list[float] = []
        self.domain_sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._scores: defaultdict[str, list[float]] = defaultdict(list)
        self._parts: defaultdict[str, list[float]] = defaultdict(list)
        self._answers: Counter[str] = Counter()
        self._repeated = 0.0

    @property
    def mean_score(self) -> float:
        return _mean([score for scores in self._scores.values() for score in scores])

    def add(self, member: ScoredSample, *, generate_s: float, reward_s: float) -> None:
        sample, score = member.sample, member.score
        self.scored += 1
        self.tokens += sample.response_length
        self.truncated += sample.truncated
        self.generate_seconds += generate_s
        self.reward_seconds += reward_s
        self._answers[f"{stable_hash(sample.text.strip()):x}"] += 1
        self._repeated += repeated_share(sample.text[-REPETITION_CHARACTERS:])
        of_domain = self.domain_sums[sample.prompt.domain]
        of_domain["scored"] += 1
        of_domain["tokens"] += sample.response_length
        of_domain["truncated"] += sample.truncated
        of_domain["failed"] += not score.ok
        if score.ok:
            self._scores[sample.prompt.domain].append(score.value)
            for name, value in score.parts.items():
                self._parts[name].append(value)
        else:
            self.failed += 1
            failure = f"{sample.uid}: {score.detail}"
            self.first_failure = self.first_failure or failure
            if score.status is ScoreStatus.UNAVAILABLE:
                self.unavailable += 1
                self.first_unavailable = self.first_unavailable or failure

    def count_drop(self, domain: str, reason: str) -> None:
        self.dropped[reason] += 1
        self.domain_sums[domain]["dropped"] += 1

    def add_dropped(self, members: Sequence[ScoredSample]) -> None:
        """Record ended samples whose group a staleness rule dropped."""
        self.dropped_lengths += [member.sample.response_length for member in members]
        self.dropped_scores += [member.score.value for member in members if member.score.ok]

    def state(self) -> dict[str, Any]:
        return deepcopy(vars(self))

    def restore(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.dropped = Counter(state["dropped"])
        domains = {name: Counter(sums) for name, sums in state["domain_sums"].items()}
        self.domain_sums = defaultdict(Counter, domains)
        self._scores = defaultdict(list, state["_scores"])
        self._parts = defaultdict(list, state["_parts"])
        self._answers = Counter(state["_answers"])

    def to_stats(
        self,
        batch: Sequence[Group],
        *,
        step: int,
        version: PolicyVersion,
        wait_s: float,
        long: Set[int] = frozenset(),
        deferred_waiting: int = 0,
    ) -> RolloutStats:
        """The statistics of the step that trains `batch` at `version`. `long`: uids of its groups
        that were deferred before; `deferred_waiting`: groups that still wait for a long round."""
        members = [member for group in batch for member in group.members]
        lengths = [member.sample.response_length for member in members]
        is_long = [group.uid in long for group in batch for _ in group.members]
        scores = [member.score.value for member in members if member.score.ok]
        ages = token_ages(batch, version)
        return replace(
            self._scored_stats(),
            step=step,
            groups=len(batch),
            samples=len(members),
            trained_score=_mean(scores),
            age_mean=float(ages.mean()) if len(ages) else NAN,
            age_max=int(ages.max(initial=0)),
            wait_seconds=wait_s,
            kept_length=_mean(lengths),
            length_bias=_bias(lengths, self.dropped_lengths),
            score_bias=_bias(scores, self.dropped_scores),
            kept_cache_tokens=sum(member.sample.kept_cache_tokens for member in members),
            deferred_waiting=deferred_waiting,
            long_groups=len(long),
            long_length=_mean(list(compress(lengths, is_long))),
            other_length=_mean(list(compress(lengths, [not one for one in is_long]))),
            domains=self._domains(batch),
        )

    def _scored_stats(self) -> RolloutStats:
        count = self.scored or NAN
        return RolloutStats(
            scored=self.scored,
            mean_score=self.mean_score,
            tokens=self.tokens,
            response_length=self.tokens / count,
            truncated=self.truncated / count,
            failed_share=self.failed / max(1, self.scored),
            generate_seconds=self.generate_seconds / count,
            reward_seconds=self.reward_seconds / count,
            repetition=self._repeated / count,
            identical=max(self._answers.values(), default=0) / count,
            dropped_length=_mean(self.dropped_lengths),
            dropped_score=_mean(self.dropped_scores),
            cancelled=self.cancelled,
            cancelled_share=self.cancelled / max(1, self.cancelled + self.scored),
            masked_tokens=self.masked_tokens,
            deferred=self.deferred,
            deferred_tokens=self.deferred_tokens,
            dropped=dict(self.dropped),
            score_parts={name: _mean(values) for name, values in self._parts.items()},
        )

    def _domains(self, batch: Sequence[Group]) -> dict[str, DomainStats]:
        trained = Counter(group.prompt.domain for group in batch)
        stats: dict[str, DomainStats] = {}
        for name in sorted({*self.domain_sums, *trained}):
            sums = self.domain_sums.get(name, Counter[str]())
            count = sums["scored"] or NAN
            stats[name] = DomainStats(
                score=_mean(self._scores.get(name, ())),
                groups=trained[name],
                dropped=sums["dropped"],
                scored=sums["scored"],
                failed_share=sums["failed"] / max(1, sums["scored"]),
                response_length=sums["tokens"] / count,
                truncated=sums["truncated"] / count,
            )
        return stats


def token_ages(
    batch: Sequence[Group], version: PolicyVersion
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each token in the loss mask: `version` minus the version that sampled it."""
    versions = [s.versions[s.loss_mask] for group in batch for s in group.samples]
    return version - np.concatenate([*versions, np.empty(0, np.int32)]).astype(np.int64)


def _mean(values: Sequence[float]) -> float:
    # Exactly rounded, so that it does not depend on the order in which samples end.
    return fmean(values) if len(values) else NAN


def _bias(kept: Sequence[float], dropped: Sequence[float]) -> float:
    """Mean of `kept` minus the mean of all; exactly 0 if nothing was dropped."""
    return _mean(kept) - _mean([*kept, *dropped]) if dropped else 0.0

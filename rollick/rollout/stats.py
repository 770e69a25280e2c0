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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """The statistics of a step."""

    metrics: Mapping[str, float]
    """See observe/metric_table.py. Without samples, most means are nan."""
    dropped: Mapping[str, int]
    """Groups dropped, by reason."""
    wait_seconds: float
    """How long `Rollout.take` waited for the batch."""


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
        domain_sums = self.domain_sums[sample.prompt.domain]
        domain_sums["scored"] += 1
        domain_sums["tokens"] += sample.response_length
        domain_sums["truncated"] += sample.truncated
        domain_sums["failed"] += not score.ok
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
        version: PolicyVersion,
        wait_s: float,
        long: Set[int] = frozenset(),
        deferred_waiting: int = 0,
    ) -> RolloutStats:
        """The statistics of the step that trains `batch` at `version`. `long`: uids of its groups
        that were deferred before; `deferred_waiting`: groups that still wait for a long round."""
        metrics = self._sample_metrics() | self._batch_metrics(batch, version, long)
        metrics |= self._domain_metrics(batch)
        metrics |= {f"score/part/{part}": _mean(scores) for part, scores in self._parts.items()}
        metrics |= {f"rollout/dropped/{reason}": n for reason, n in self.dropped.items()}
        metrics["rollout/deferred_waiting"] = deferred_waiting
        return RolloutStats(metrics, dict(self.dropped), wait_s)

    def _sample_metrics(self) -> dict[str, float]:
        """Of all samples that ended in this step, those of dropped groups included."""
        count = self.scored or NAN
        return {
            "score/mean": self.mean_score,
            "rollout/tokens": self.tokens,
            "rollout/response_length": self.tokens / count,
            "rollout/truncated": self.truncated / count,
            "rollout/failed_scores": self.failed / max(1, self.scored),
            "time/sample_generate": self.generate_seconds / count,
            "time/sample_reward": self.reward_seconds / count,
            "rollout/repetition": self._repeated / count,
            "rollout/identical": max(self._answers.values(), default=0) / count,
            "rollout/bias/length_dropped": _mean(self.dropped_lengths),
            "rollout/bias/score_dropped": _mean(self.dropped_scores),
            "rollout/cancelled": self.cancelled,
            "rollout/cancelled_share": self.cancelled / max(1, self.cancelled + self.scored),
            "rollout/masked_tokens": self.masked_tokens,
            "rollout/deferred": self.deferred,
            "rollout/deferred_tokens": self.deferred_tokens,
        }

    def _batch_metrics(
        self, batch: Sequence[Group], version: PolicyVersion, long: Set[int]
    ) -> dict[str, float]:
        members = [member for group in batch for member in group.members]
        lengths = [member.sample.response_length for member in members]
        is_long = [group.uid in long for group in batch for _ in group.members]
        scores = [member.score.value for member in members if member.score.ok]
        ages = token_ages(batch, version)
        return {
            "rollout/groups": len(batch),
            "rollout/samples": len(members),
            "score/trained": _mean(scores),
            "rollout/bias/score_kept": _mean(scores),
            "rollout/bias/score": _bias(scores, self.dropped_scores),
            "rollout/bias/length_kept": _mean(lengths),
            "rollout/bias/length": _bias(lengths, self.dropped_lengths),
            "rollout/age_mean": float(ages.mean()) if len(ages) else NAN,
            "rollout/age_max": int(ages.max(initial=0)),
            "rollout/kept_cache_tokens": sum(m.sample.kept_cache_tokens for m in members),
            "rollout/long_groups": len(long),
            "rollout/long_length": _mean(list(compress(lengths, is_long))),
            "rollout/other_length": _mean(list(compress(lengths, [not flag for flag in is_long]))),
        }

    def _domain_metrics(self, batch: Sequence[Group]) -> dict[str, float]:
        """By domain: `groups` covers the batch, the others all ended samples."""
        trained = Counter(group.prompt.domain for group in batch)
        metrics: dict[str, float] = {}
        for name in sorted({*self.domain_sums, *trained}):
            sums = self.domain_sums.get(name, Counter[str]())
            count = sums["scored"] or NAN
            domain = f"rollout/domain/{name}"
            metrics |= {
                f"score/domain/{name}": _mean(self._scores.get(name, ())),
                f"{domain}/groups": trained[name],
                f"{domain}/dropped": sums["dropped"],
                f"{domain}/samples": sums["scored"],
                f"{domain}/failed_scores": sums["failed"] / max(1, sums["scored"]),
                f"{domain}/response_length": sums["tokens"] / count,
                f"{domain}/truncated": sums["truncated"] / count,
            }
        return metrics


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

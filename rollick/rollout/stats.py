"""What happened in one step of the rollout, in numbers.

Two sets of samples are told apart: all that were scored since the batch before (dropped groups
included, so that the mean score is that of the policy and not of what was selected), and the batch.

A staleness rule that drops groups makes the batch another sample of the policy's answers than it
would be without. How much is measured: what was kept against all that ended, kept or shed. What was
cancelled on its way has no length and no score yet; it is counted, since the measure misses it.
What is put off to a long round is not shed: it costs the tokens that are thrown away, and what is
long goes to batches of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from rollick.rewards.structure import repeated_share
from rollick.types import Group, PolicyVersion, ScoredSample, stable_hash

NAN = float("nan")
"""One object, so that figures without a value compare as equal."""

LOOKED_AT = 4000
"""Characters at an answer's end that are searched for repetition: it is where answers run wild."""


@dataclass(frozen=True, slots=True)
class DomainStats:
    """Figures of one domain in one step: of all its samples that ended, and of the batch."""

    scored: int = 0
    failed: int = 0
    score: float = NAN
    response_length: float = NAN
    truncated: float = NAN
    groups: int = 0
    """In the batch."""
    dropped: int = 0
    """Groups dropped, for any reason."""

    def metrics(self, name: str) -> dict[str, float]:
        prefix = f"rollout/domain/{name}"
        return {
            f"score/domain/{name}": self.score,
            f"{prefix}/groups": self.groups,
            f"{prefix}/dropped": self.dropped,
            f"{prefix}/samples": self.scored,
            f"{prefix}/failed_scores": self.failed / max(1, self.scored),
            f"{prefix}/response_length": self.response_length,
            f"{prefix}/truncated": self.truncated,
        }


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Figures of one step. Means over no sample are nan."""

    step: int = 0
    groups: int = 0
    """Groups in the batch."""
    samples: int = 0
    """Samples in the batch."""
    scored: int = 0
    """Samples whose life ended in this step, those of dropped groups included."""
    failed_scores: int = 0
    """How many of them could not be scored."""
    tokens: int = 0
    """Tokens that they drew."""
    truncated: float = float("nan")
    """Share of them that reached the token limit."""
    generate_seconds: float = float("nan")
    """Mean time of one of them on its engine, the engine's queue included."""
    reward_seconds: float = float("nan")
    """Mean time of one of them with the rewards."""
    mean_score: float = float("nan")
    domains: Mapping[str, DomainStats] = field(default_factory=dict[str, "DomainStats"])
    mean_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of each reward, and of the parts that it gives."""
    repetition: float = float("nan")
    """Mean share of an answer's phrases that it had said before."""
    identical: float = float("nan")
    """Share of the samples that have the commonest answer."""
    trained_score: float = float("nan")
    """Mean score in the batch."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Groups dropped, by reason."""
    age_mean: float = float("nan")
    """Of the trained tokens of the batch, in versions."""
    age_max: int = 0
    wait_seconds: float = 0.0
    """How long the batch was waited for."""
    kept_length: float = float("nan")
    """Mean drawn tokens of a sample of the batch."""
    shed_length: float = float("nan")
    """The same of the ended samples in groups that a staleness rule dropped."""
    length_bias: float = 0.0
    """Mean of the kept minus that of the kept and the shed."""
    shed_score: float = float("nan")
    score_bias: float = 0.0
    cancelled: int = 0
    """Samples cancelled on their way: spares, and those of dropped groups."""
    masked_tokens: int = 0
    """Tokens of the batch that are too old to be trained on (mask_stale_tokens)."""
    kept_cache_tokens: int = 0
    """Tokens of the batch drawn over a cache of an older version (at_publish: keep)."""
    deferred: int = 0
    """Groups put off to a long round (long_rounds)."""
    deferred_tokens: int = 0
    """Tokens drawn for groups that were put off, and thrown away."""
    parked: int = 0
    """Groups that wait for a long round when the batch is taken."""
    long_groups: int = 0
    """Groups of the batch that were put off before."""
    long_length: float = float("nan")
    """Mean drawn tokens of their samples."""
    other_length: float = float("nan")
    """The same of the other samples of the batch."""

    def metrics(self) -> dict[str, float]:
        """Under the names that observe/metrics.py documents."""
        found: dict[str, float] = {
            "score/mean": self.mean_score,
            "score/trained": self.trained_score,
            "rollout/groups": self.groups,
            "rollout/samples": self.samples,
            "rollout/tokens": self.tokens,
            "rollout/response_length": self.tokens / max(1, self.scored),
            "rollout/truncated": self.truncated,
            "rollout/failed_scores": self.failed_scores / max(1, self.scored),
            "rollout/repetition": self.repetition,
            "rollout/identical": self.identical,
            "rollout/age_max": self.age_max,
            "rollout/age_mean": self.age_mean,
            "rollout/bias/length": self.length_bias,
            "rollout/bias/length_kept": self.kept_length,
            "rollout/bias/length_shed": self.shed_length,
            "rollout/bias/score": self.score_bias,
            "rollout/bias/score_kept": self.trained_score,
            "rollout/bias/score_shed": self.shed_score,
            "rollout/cancelled": self.cancelled,
            "rollout/cancelled_share": self.cancelled / max(1, self.cancelled + self.scored),
            "rollout/masked_tokens": self.masked_tokens,
            "rollout/kept_cache_tokens": self.kept_cache_tokens,
            "rollout/deferred": self.deferred,
            "rollout/deferred_tokens": self.deferred_tokens,
            "rollout/parked": self.parked,
            "rollout/long_groups": self.long_groups,
            "rollout/long_length": self.long_length,
            "rollout/other_length": self.other_length,
            "time/sample_generate": self.generate_seconds,
            "time/sample_reward": self.reward_seconds,
        }
        for name, domain in self.domains.items():
            found |= domain.metrics(name)
        for part, score in self.mean_parts.items():
            found[f"score/part/{part}"] = score
        for reason, count in self.dropped.items():
            found[f"rollout/dropped/{reason}"] = count
        return found


class StepWindow:
    """Sums over the samples that end between two batches."""

    def __init__(self) -> None:
        self.scored = 0
        self.failed = 0
        self.first_failure = ""
        self.tokens = 0
        self.truncated = 0
        self.generate_seconds = 0.0
        self.reward_seconds = 0.0
        self.dropped: Counter[str] = Counter()
        self.cancelled = 0
        self.masked_tokens = 0
        self.deferred = 0
        self.deferred_tokens = 0
        self.shed_lengths: list[int] = []
        self.shed_scores: list[float] = []
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
        self._repeated += repeated_share(sample.text[-LOOKED_AT:])
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
            self.first_failure = self.first_failure or f"{sample.uid}: {score.detail}"

    def drop(self, domain: str, reason: str) -> None:
        """A group of the domain is dropped."""
        self.dropped[reason] += 1
        self.domain_sums[domain]["dropped"] += 1

    def shed(self, members: Sequence[ScoredSample]) -> None:
        """These ended, and a staleness rule dropped their group."""
        self.shed_lengths += [member.sample.response_length for member in members]
        self.shed_scores += [member.score.value for member in members if member.score.ok]

    def state(self) -> dict[str, Any]:
        """The sums, as JSON."""
        scores = {name: list(values) for name, values in self._scores.items()}
        parts = {name: list(values) for name, values in self._parts.items()}
        domains = {name: dict(sums) for name, sums in self.domain_sums.items()}
        sums = {"dropped": dict(self.dropped), "_scores": scores, "_parts": parts}
        return vars(self) | sums | {"_answers": dict(self._answers), "domain_sums": domains}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from sums that `state` gave."""
        vars(self).update(state)
        self.dropped = Counter(state["dropped"])
        self.domain_sums = defaultdict(Counter)
        for name, sums in state["domain_sums"].items():
            self.domain_sums[name] = Counter(sums)
        self._scores = defaultdict(list, state["_scores"])
        self._parts = defaultdict(list, state["_parts"])
        self._answers = Counter(state["_answers"])

    def close(
        self,
        batch: Sequence[Group],
        *,
        step: int,
        version: PolicyVersion,
        wait_s: float,
        long: Set[int] = frozenset(),
        parked: int = 0,
    ) -> RolloutStats:
        """The figures of the step that trains `batch` at `version`. The groups `long` of it were
        put off before, and `parked` still wait for a long round."""
        members = [member for group in batch for member in group.members]
        lengths = [member.sample.response_length for member in members]
        is_long = [group.uid in long for group in batch for _ in group.members]
        scores = [member.score.value for member in members if member.score.ok]
        ages = token_ages(batch, version)
        count = self.scored or float("nan")
        return RolloutStats(
            step=step,
            groups=len(batch),
            samples=len(members),
            scored=self.scored,
            failed_scores=self.failed,
            tokens=self.tokens,
            truncated=self.truncated / count,
            generate_seconds=self.generate_seconds / count,
            reward_seconds=self.reward_seconds / count,
            mean_score=self.mean_score,
            domains=self._domains(batch),
            mean_parts={name: _mean(values) for name, values in self._parts.items()},
            repetition=self._repeated / count,
            identical=max(self._answers.values(), default=0) / count,
            trained_score=_mean(scores),
            dropped=dict(self.dropped),
            age_mean=float(ages.mean()) if len(ages) else float("nan"),
            age_max=int(ages.max(initial=0)),
            wait_seconds=wait_s,
            kept_length=_mean(lengths),
            shed_length=_mean(self.shed_lengths),
            length_bias=_bias(lengths, self.shed_lengths),
            shed_score=_mean(self.shed_scores),
            score_bias=_bias(scores, self.shed_scores),
            cancelled=self.cancelled,
            masked_tokens=self.masked_tokens,
            kept_cache_tokens=sum(member.sample.kept_cache_tokens for member in members),
            deferred=self.deferred,
            deferred_tokens=self.deferred_tokens,
            parked=parked,
            long_groups=len(long),
            long_length=_mean(list(compress(lengths, is_long))),
            other_length=_mean(
                [n for n, put_off in zip(lengths, is_long, strict=True) if not put_off]
            ),
        )

    def _domains(self, batch: Sequence[Group]) -> dict[str, DomainStats]:
        trained = Counter(group.prompt.domain for group in batch)
        found: dict[str, DomainStats] = {}
        for name in sorted({*self.domain_sums, *trained}):
            sums = self.domain_sums.get(name, Counter[str]())
            count = sums["scored"] or NAN
            found[name] = DomainStats(
                scored=sums["scored"],
                failed=sums["failed"],
                score=_mean(self._scores.get(name, ())),
                response_length=sums["tokens"] / count,
                truncated=sums["truncated"] / count,
                groups=trained[name],
                dropped=sums["dropped"],
            )
        return found


def token_ages(
    batch: Sequence[Group], version: PolicyVersion
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How many versions each token that can be trained on lags behind `version`."""
    versions = [s.versions[s.loss_mask] for group in batch for s in group.samples]
    return version - np.concatenate([*versions, np.empty(0, np.int32)]).astype(np.int64)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else NAN


def _bias(kept: Sequence[float], shed: Sequence[float]) -> float:
    """Exactly 0 where nothing was shed."""
    return _mean(kept) - _mean([*kept, *shed]) if shed else 0.0

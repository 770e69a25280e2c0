"""Evaluation: sample held-out prompts, score them, and say how sure the figures are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb, isnan, nan, sqrt
from typing import Any, cast

from rollick.types import Group

Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class DomainResult:
    """Figures of one domain (or of all together)."""

    prompts: int
    samples: int
    failed: int
    score: float
    response_length: float
    truncated: float
    pass_at: Mapping[int, Estimate]


@dataclass(frozen=True, slots=True)
class EvalReport:
    """What one evaluation found."""

    overall: DomainResult
    domains: Mapping[str, DomainResult]
    groups: tuple[Group, ...]

    def metrics(self) -> dict[str, float]:
        """As eval/… metrics: overall, and by domain where there are several."""
        found = _metrics("eval", self.overall)
        for name, result in self.domains.items():
            found |= _metrics(f"eval/{name}", result)
        return found

    def figures(self) -> dict[str, dict[str, float]]:
        """By domain and over all: what a table shows."""
        parts = {**self.domains, "all": self.overall}
        return {name: _figures(result) for name, result in parts.items()}

    def to_json(self) -> dict[str, object]:
        """Numbers that do not exist (no sample could be scored) are null."""
        return {
            "overall": _json(asdict(self.overall)),
            "domains": {name: _json(asdict(result)) for name, result in self.domains.items()},
        }


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without return, passed."""
    if samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def wilson(mean: float, count: int) -> Estimate:
    """95 % interval of a mean of `count` values in [0, 1]; never leaves [0, 1].

    Exact in form for passes and failures; for values in between it is wide, never narrow.
    """
    if count == 0:
        return Estimate(nan, 0.0, 1.0)
    scale = 1 + Z95**2 / count
    centre = (mean + Z95**2 / (2 * count)) / scale
    half = Z95 / scale * sqrt(mean * (1 - mean) / count + Z95**2 / (4 * count**2))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def summarise(groups: Sequence[Group], *, pass_k: Sequence[int], threshold: float) -> EvalReport:
    """Figures over all groups and by domain. Samples that could not be scored are left out.

    pass@1 is always among them: checkpoints are compared by it.
    """
    pass_k = sorted({1, *pass_k})
    by_domain: dict[str, list[Group]] = {}
    for group in groups:
        by_domain.setdefault(group.prompt.domain, []).append(group)
    domains = {
        name: _summarise(part, pass_k=pass_k, threshold=threshold)
        for name, part in by_domain.items()
    }
    overall = _summarise(groups, pass_k=pass_k, threshold=threshold)
    return EvalReport(overall, domains, tuple(groups))


def _summarise(groups: Sequence[Group], *, pass_k: Sequence[int], threshold: float) -> DomainResult:
    members = [member for group in groups for member in group.members]
    scored = [member for member in members if member.score.ok]
    pass_at: dict[int, Estimate] = {}
    for k in pass_k:
        chances: list[float] = []
        for group in groups:
            values = [m.score.value for m in group.members if m.score.ok]
            if len(values) >= k:
                passed = sum(value >= threshold for value in values)
                chances.append(pass_at_k(len(values), passed, k))
        pass_at[k] = wilson(_mean(chances), len(chances))
    return DomainResult(
        prompts=len(groups),
        samples=len(members),
        failed=len(members) - len(scored),
        score=_mean([member.score.value for member in scored]),
        response_length=_mean([float(m.sample.response_length) for m in members]),
        truncated=_mean([float(m.sample.truncated) for m in members]),
        pass_at=pass_at,
    )


def _mean(values: Sequence[float]) -> float:
    # No value is not the value 0: a domain that nobody could score did not score badly.
    return sum(values) / len(values) if values else nan


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        return {str(name): _json(part) for name, part in items}
    return None if isinstance(value, float) and isnan(value) else value


def _figures(result: DomainResult) -> dict[str, float]:
    found = {"prompts": float(result.prompts), "score": result.score}
    for k, estimate in result.pass_at.items():
        found[f"pass@{k}"] = estimate.value
        found |= {f"low@{k}": estimate.low, f"high@{k}": estimate.high}
    return found | {"length": result.response_length, "failed": float(result.failed)}


def _metrics(prefix: str, result: DomainResult) -> dict[str, float]:
    found = {
        f"{prefix}/score": result.score,
        f"{prefix}/response_length": result.response_length,
        f"{prefix}/truncated": result.truncated,
    }
    for k, estimate in result.pass_at.items():
        found[f"{prefix}/pass@{k}"] = estimate.value
        found[f"{prefix}/pass@{k}_interval"] = (estimate.high - estimate.low) / 2
    return found

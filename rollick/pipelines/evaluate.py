"""Evaluation of the policy: sample and score prompts; pass@k and scores with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import comb, isnan, nan, sqrt
from typing import Any, cast

from rollick.errors import EngineLost
from rollick.pipelines.domains import validation_sampling
from rollick.pipelines.open_run import OpenRun
from rollick.roles.engines import RemoteEngine
from rollick.rollout.sample_prompts import open_prompt_sampling
from rollick.types import Group, Prompt

Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class DomainResult:
    prompts: int
    samples: int
    failed: int
    score: float
    response_length: float
    truncated: float
    pass_at: Mapping[int, Estimate]


@dataclass(frozen=True, slots=True)
class EvalReport:
    overall: DomainResult
    domains: Mapping[str, DomainResult]
    groups: tuple[Group, ...]

    def metrics(self) -> dict[str, float]:
        metrics = _metrics("eval", self.overall)
        for name, result in self.domains.items():
            metrics |= _metrics(f"eval/{name}", result)
        return metrics

    def figures(self) -> dict[str, dict[str, float]]:
        """The rows of a table, by domain and overall."""
        parts = {**self.domains, "all": self.overall}
        return {name: _figures(result) for name, result in parts.items()}

    def to_json(self) -> dict[str, object]:
        """As JSON; NaN (no sample could be scored) becomes null."""
        domains = {name: asdict(result) for name, result in self.domains.items()}
        return _json({"overall": asdict(self.overall), "domains": domains})


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of k samples, drawn without replacement, passed."""
    if samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def wilson(mean: float, count: int) -> Estimate:
    """95 % Wilson score interval of a mean of `count` values in [0, 1].

    Derived for passes and failures; conservative for values in between.
    """
    if count == 0:
        return Estimate(nan, 0.0, 1.0)
    scale = 1 + Z95**2 / count
    centre = (mean + Z95**2 / (2 * count)) / scale
    half_width = Z95 / scale * sqrt(mean * (1 - mean) / count + Z95**2 / (4 * count**2))
    return Estimate(mean, max(0.0, centre - half_width), min(1.0, centre + half_width))


def summarise(groups: Sequence[Group], *, pass_k: Sequence[int], threshold: float) -> EvalReport:
    """Summarise all groups, overall and by domain. Skips samples that could not be scored.

    Always includes pass@1, because checkpoints are compared by it.
    """
    pass_k = sorted({1, *pass_k})
    by_domain: dict[str, list[Group]] = {}
    for group in groups:
        by_domain.setdefault(group.prompt.domain, []).append(group)
    domains = {name: _summarise(part, pass_k, threshold) for name, part in by_domain.items()}
    return EvalReport(_summarise(groups, pass_k, threshold), domains, tuple(groups))


def _summarise(groups: Sequence[Group], pass_k: Sequence[int], threshold: float) -> DomainResult:
    members = [member for group in groups for member in group.members]
    scored = [member for member in members if member.score.ok]
    passes = [[m.score.value >= threshold for m in g.members if m.score.ok] for g in groups]
    pass_at: dict[int, Estimate] = {}
    for k in pass_k:
        values = [pass_at_k(len(group), sum(group), k) for group in passes if len(group) >= k]
        pass_at[k] = wilson(_mean(values), len(values))
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
    # NaN, not 0: a domain without scored samples did not score badly.
    return sum(values) / len(values) if values else nan


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        return {str(name): _json(part) for name, part in items}
    return None if isinstance(value, float) and isnan(value) else value


def _figures(result: DomainResult) -> dict[str, float]:
    figures = {"prompts": float(result.prompts), "score": result.score}
    for k, estimate in result.pass_at.items():
        figures[f"pass@{k}"] = estimate.value
        figures |= {f"low@{k}": estimate.low, f"high@{k}": estimate.high}
    return figures | {"length": result.response_length, "failed": float(result.failed)}


def _metrics(prefix: str, result: DomainResult) -> dict[str, float]:
    metrics = {
        f"{prefix}/score": result.score,
        f"{prefix}/response_length": result.response_length,
        f"{prefix}/truncated": result.truncated,
    }
    for k, estimate in result.pass_at.items():
        metrics[f"{prefix}/pass@{k}"] = estimate.value
        metrics[f"{prefix}/pass@{k}_interval"] = (estimate.high - estimate.low) / 2
    return metrics


async def evaluate_prompts(run: OpenRun, prompts: Sequence[Prompt]) -> EvalReport:
    """Sample and score the prompts. If all engines are lost meanwhile, it begins again when one was
    restarted."""
    failure = EngineLost("all engines are lost", fix="check the log for why they died")
    while engines := await _wait_for_engines(run):
        try:
            return await _evaluate(run, prompts, engines)
        except EngineLost as error:
            failure = error
    raise failure


async def _wait_for_engines(run: OpenRun) -> list[RemoteEngine]:
    """The engines with the current weights; empty if there is none within the time limit."""
    generators, limit_s = run.roles.generators, run.recipe.cluster.place_timeout_s
    while await generators.wait_for_engine(limit_s):
        # Held until a restarted engine, which is alive before that, has the current weights.
        async with run.state.weights_lock:
            if alive := generators.alive:
                return alive
    return []


async def _evaluate(
    run: OpenRun, prompts: Sequence[Prompt], engines: Sequence[RemoteEngine]
) -> EvalReport:
    recipe, scoring = run.recipe, run.scoring
    config, sampling = recipe.evaluate, validation_sampling(recipe)
    async with open_prompt_sampling(
        prompts,
        engines,
        samples=config.samples,
        episode=run.episodes.build(sampling, scoring.held_out, purpose="eval"),
        score=scoring.score_held_out,
        stuck_after_s=recipe.run.stuck_after_s,
        score_limit_s=recipe.rewards.timeout_s,
        on_progress=partial(run.telemetry.view.count_samples, "validate"),
    ) as rollout:
        with run.status.follow(rollout, scoring.rewards):
            groups = await rollout.take()
    return summarise(groups, pass_k=config.pass_k, threshold=config.pass_threshold)

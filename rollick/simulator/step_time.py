"""The cost model of engine steps and training steps, and its fits to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist
from typing import Annotated, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from rollick.config.schema.section import Section
from rollick.errors import ConfigError, DataError
from rollick.types import StepRecord

Floats = npt.NDArray[np.float64]
NonNegativeSeconds = Annotated[float, Field(ge=0)]


class StepTime(Section):
    """Seconds of one engine step: base_s + per_sequence_s * batch + per_kv_token_s * kv_tokens,
    and with tokens to prefill: prefill_base_s + per_prefill_token_s * prefill."""

    base_s: NonNegativeSeconds = 0.020
    """For each step."""
    per_sequence_s: NonNegativeSeconds = 2e-5
    """For each sequence in the batch."""
    per_kv_token_s: NonNegativeSeconds = 2e-8
    """For each token in the cache."""
    per_prefill_token_s: NonNegativeSeconds = 2e-5
    """For each token that is prefilled."""
    prefill_base_s: NonNegativeSeconds = 0.0
    """For a step that prefills anything."""
    padded: bool = False
    """Whether every sequence counts as many cached tokens as the longest one."""

    @model_validator(mode="after")
    def _check_takes_time(self) -> Self:
        if self.base_s + self.per_sequence_s + self.per_kv_token_s <= 0:
            fix = "set base_s, per_sequence_s or per_kv_token_s above 0"
            raise ConfigError(f"a step of {self!r} would take no time", fix=fix)
        return self

    def seconds(self, batch: int, kv_tokens: int, prefill_tokens: int = 0) -> float:
        decode = self.base_s + self.per_sequence_s * batch + self.per_kv_token_s * kv_tokens
        return decode + self.prefill_seconds(prefill_tokens)

    def predict(self, record: StepRecord) -> float:
        cached = record.batch * record.longest if self.padded else record.kv_tokens
        return self.seconds(record.batch, cached, record.prefill_tokens)

    def prefill_seconds(self, tokens: int) -> float:
        return self.prefill_base_s + self.per_prefill_token_s * tokens if tokens else 0.0


_COEFFICIENTS = tuple(name for name in StepTime.model_fields if name != "padded")


class StepTimeFit(NamedTuple):
    """A fitted step time. Errors are relative: |fitted - measured| / measured."""

    step_time: StepTime
    worst_error: float
    mean_error: float
    records: int


def fit_step_time(records: Sequence[StepRecord], *, keep_total: bool = False) -> StepTimeFit:
    """Fit by non-negative least squares of the relative error. `keep_total` scales the fit to the
    measured total time: disturbances only lengthen steps, and the closest fit ignores most of them.
    If the records have the longest sequence, the fit may be a padded one."""
    if not records or min(record.seconds for record in records) <= 0:
        fix = "give at least one record, and only records with positive seconds"
        raise DataError(f"{len(records)} step records cannot be fitted", fix=fix)
    options = (False, True) if all(record.longest for record in records) else (False,)
    fits = [_fit_steps(records, padded=padded, keep_total=keep_total) for padded in options]
    return min(fits, key=lambda fit: fit.mean_error)


def _fit_steps(records: Sequence[StepRecord], *, padded: bool, keep_total: bool) -> StepTimeFit:
    cached = [r.batch * r.longest if padded else r.kv_tokens for r in records]
    pairs = zip(records, cached, strict=True)
    rows = [(1.0, r.batch, kv, r.prefill_tokens, r.prefill_tokens > 0) for r, kv in pairs]
    measured = np.array([record.seconds for record in records])
    columns = np.array(rows, np.float64) / measured[:, None]
    coefficients = _solve_non_negative(columns)
    if keep_total:
        coefficients = coefficients * (measured.sum() / (columns @ coefficients @ measured))
    errors = np.abs(columns @ coefficients - 1)
    return StepTimeFit(
        StepTime(**dict(zip(_COEFFICIENTS, map(float, coefficients), strict=True)), padded=padded),
        worst_error=float(errors.max()),
        mean_error=float(errors.mean()),
        records=len(records),
    )


def _solve_non_negative(columns: Floats) -> Floats:
    """The coefficients >= 0 for which `columns @ coefficients` is closest to 1 in each row. The
    best non-negative solution over all subsets of the columns is exact."""
    # The columns differ by many powers of ten; scaled to equal norms they are well conditioned.
    scale = np.linalg.norm(columns, axis=0)
    nonzero = [int(n) for n in np.flatnonzero(scale)]
    best = np.zeros(columns.shape[1])
    best_residual = float(len(columns))
    # The smallest subsets first: a further coefficient must improve the fit.
    for count in range(1, len(nonzero) + 1):
        for subset in combinations(nonzero, count):
            chosen = list(subset)
            scaled = columns[:, chosen] / scale[chosen]
            solution = np.linalg.lstsq(scaled, np.ones(len(columns)), rcond=None)[0]
            # A step without prefill must take some time too, whatever the records are.
            if solution.min() < 0 or not any(solution[n] for n in range(count) if chosen[n] < 3):
                continue
            residual = float(((scaled @ solution - 1) ** 2).sum())
            if residual < best_residual:
                best_residual = residual
                best = np.zeros(columns.shape[1])
                best[chosen] = solution / scale[chosen]
    return best


class TrainRecord(NamedTuple):
    """One measured training step: tokens, seconds, and the seconds that do not depend on tokens."""

    tokens: int
    seconds: float
    fixed_s: float


class TrainTimeFit(NamedTuple):
    """base_s + token_s * tokens. Errors are relative: |fitted - measured| / measured."""

    base_s: float
    token_s: float
    worst_error: float
    mean_error: float


def fit_train_time(records: Sequence[TrainRecord]) -> TrainTimeFit:
    """base_s is the mean of the measured fixed seconds, token_s the rest per token: the steps of a
    run have about as many tokens each, so a line fitted through them would extrapolate badly."""
    tokens = sum(record.tokens for record in records)
    if not tokens or min(record.seconds for record in records) <= 0:
        fix = "give at least one step with tokens, and only steps with positive seconds"
        raise DataError(f"{len(records)} training steps cannot be fitted", fix=fix)
    base_s = sum(record.fixed_s for record in records) / len(records)
    token_s = sum(record.seconds - record.fixed_s for record in records) / tokens
    errors = [abs((base_s + token_s * r.tokens) / r.seconds - 1) for r in records]
    return TrainTimeFit(base_s, token_s, max(errors), sum(errors) / len(errors))


def estimate_prompt_share(groups: Sequence[Sequence[int]]) -> float:
    """The share of the variance of lengths that the samples of a prompt have in common: the
    intraclass correlation (one-way analysis of variance) of the lengths' normal scores, where ties
    have their mean rank. 0 if it cannot be estimated."""
    sizes = np.array([len(group) for group in groups if group], np.float64)
    lengths = np.array([length for group in groups for length in group], np.float64)
    if len(sizes) < 2 or len(lengths) <= len(sizes) or lengths.min() == lengths.max():
        return 0.0
    _, index, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[index] / len(lengths)
    distribution = NormalDist()
    scores = np.array([distribution.inv_cdf(float(rank)) for rank in ranks])
    group_of = np.repeat(np.arange(len(sizes)), sizes.astype(int))
    means = np.bincount(group_of, scores) / sizes
    between = float((sizes * (means - scores.mean()) ** 2).sum()) / (len(sizes) - 1)
    within = float(((scores - means[group_of]) ** 2).sum()) / (len(lengths) - len(sizes))
    effective_size = (len(lengths) - float((sizes**2).sum()) / len(lengths)) / (len(sizes) - 1)
    total = between + (effective_size - 1) * within
    return min(1.0, max(0.0, (between - within) / total)) if total > 0 else 0.0

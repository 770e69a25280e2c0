"""Reward-hacking alarms: rules for a score that rises while something else gets worse.

    rows of metrics -> find_alarms -> messages by rule -> metrics, live view, log

Each rule compares the last steps of the run with the first. An alarm never changes the run: a
longer answer may be the better one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import isfinite, sqrt
from statistics import variance

from rollick.observe.metrics import MetricRows

WINDOW = 5
"""Steps averaged at the start and at the end; no alarms before 2 * WINDOW steps."""
MIN_RISE = 0.02
"""Smaller rises and falls do not count."""
LENGTH_FACTOR = 2.0
TRUNCATED_RISE = 0.2
REPETITION_RISE = 0.1
IDENTICAL_SHARE = 0.5
IDENTICAL_RISE = 0.25
SPREAD = 0.15
"""Mean range (max - min) of a judge's votes, for scores from 0 to 1, that raises an alarm."""
PART = "score/part/"
FORM = frozenset({"format", "tags", "regex", "length", "json_schema", "repetition", "language"})
"""Last name components of the score parts that reward the form of an answer."""


@dataclass(frozen=True, slots=True)
class MetricChange:
    """A metric's mean at the start and now, and the standard error of the difference."""

    before: float
    now: float
    noise: float

    @property
    def rise(self) -> float:
        return self.now - self.before

    @property
    def rose(self) -> bool:
        return self.rise > max(MIN_RISE, 2 * self.noise)

    @property
    def fell(self) -> bool:
        return -self.rise > max(MIN_RISE, 2 * self.noise)

    def __str__(self) -> str:
        return f"{self.before:.3g} to {self.now:.3g}"


def metric_change(rows: MetricRows, name: str) -> MetricChange | None:
    """How a metric changed over the run; None if fewer than 2 * WINDOW steps have it."""
    first = _first_values(rows, name, 2 * WINDOW)
    if len(first) < 2 * WINDOW:
        return None
    before, now = first[:WINDOW], _first_values(reversed(rows), name, WINDOW)
    noise = sqrt((variance(before) + variance(now)) / WINDOW)
    return MetricChange(sum(before) / WINDOW, sum(now) / WINDOW, noise)


def find_alarms(rows: MetricRows) -> dict[str, str]:
    """The messages of the rules that match, by rule. `rows`: all of the run."""
    score = metric_change(rows, "score/mean")
    risen = score if score is not None and score.rose else None
    messages = {rule: check(rows, risen) for rule, check in RULES.items()}
    return {rule: message for rule, message in messages.items() if message is not None}


def alarm_metrics(alarms: Container[str]) -> dict[str, float]:
    """1 for each rule with an alarm, 0 for the others."""
    return {f"reward_hacking/{rule}": float(rule in alarms) for rule in RULES}


def _check_length(rows: MetricRows, score: MetricChange | None) -> str | None:
    """Answers grow much longer, or more of them reach the token limit."""
    length = metric_change(rows, "rollout/response_length")
    if score is None or length is None:
        return None
    if length.now > LENGTH_FACTOR * length.before:
        return f"answers grew from {length} tokens while the score rose from {score}"
    cut = metric_change(rows, "rollout/truncated")
    if cut is not None and cut.rise > TRUNCATED_RISE:
        return f"truncated answers rose from {cut} while the score rose from {score}"
    return None


def _check_repetition(rows: MetricRows, score: MetricChange | None) -> str | None:
    """Answers repeat phrases."""
    repeated = metric_change(rows, "rollout/repetition")
    if score is None or repeated is None or repeated.rise <= REPETITION_RISE:
        return None
    return f"repeated phrases rose from {repeated} of an answer while the score rose from {score}"


def _check_format_only(rows: MetricRows, score: MetricChange | None) -> str | None:
    """Only the score parts about form rise, not those about content."""
    if score is None:
        return None
    parts = dict(_changes(rows, PART, ""))
    form = {name: change for name, change in parts.items() if _is_form(name)}
    content = {name: change for name, change in parts.items() if not _is_form(name, above=form)}
    gained = [name for name, change in form.items() if change.rose]
    if not content or not gained or any(change.rose for change in content.values()):
        return None
    return f"the score rose from {score} by {', '.join(gained)} alone, not by {', '.join(content)}"


def _check_identical(rows: MetricRows, score: MetricChange | None) -> str | None:
    """Different prompts get the same answer."""
    same = metric_change(rows, "rollout/identical")
    if score is None or same is None or same.now < IDENTICAL_SHARE or same.rise < IDENTICAL_RISE:
        return None
    return f"the most common answer rose from {same} of all while the score rose from {score}"


def _check_judge(rows: MetricRows, _: MetricChange | None) -> str | None:
    """A judge's score rises while its votes disagree more or another reward falls."""
    for name, spread in _changes(rows, "reward/mean/", "/spread"):
        part = metric_change(rows, PART + name)
        if part is None or not part.rose:
            continue
        if spread.now > SPREAD and spread.now > 1.5 * spread.before:
            return f"the votes of {name} differ by {spread} while its score rose from {part}"
        for other, change in _changes(rows, PART, ""):
            is_same_reward = f"{other}/".startswith(f"{name}/")
            if change.fell and not is_same_reward and not _is_form(other):
                return f"{name} rose from {part}, while {other} fell from {change}"
    return None


def _check_held_out(rows: MetricRows, score: MetricChange | None) -> str | None:
    """Training scores rise while validation scores fall."""
    held_out = metric_change(rows, "eval/score")
    if score is None or held_out is None or not held_out.fell:
        return None
    return f"the validation score fell from {held_out} while the score rose from {score}"


RULES: Mapping[str, Callable[[MetricRows, MetricChange | None], str | None]] = {
    "length": _check_length,
    "repetition": _check_repetition,
    "format_only": _check_format_only,
    "identical": _check_identical,
    "judge": _check_judge,
    "held_out": _check_held_out,
}
"""Rules by NAME; the metric is reward_hacking/NAME. A rule gets the rows and the change of the mean
score (None unless it rose). It returns a message with the values if it matches, else None."""


def _changes(rows: MetricRows, prefix: str, suffix: str) -> Iterator[tuple[str, MetricChange]]:
    """Changes of the newest row's metrics named prefix + NAME + suffix, by NAME."""
    for name in rows[-1] if rows else ():
        if name.startswith(prefix) and name.endswith(suffix):
            change = metric_change(rows, name)
            if change is not None:
                yield name[len(prefix) : len(name) - len(suffix)], change


def _is_form(name: str, *, above: Iterable[str] = ()) -> bool:
    """Whether a part (`math/format`) is about form, or a sum (`math`) of such a part in `above`."""
    if name.rpartition("/")[2].partition("#")[0] in FORM:
        return True
    return any(part.startswith(f"{name}/") for part in above)


def _first_values(rows: Iterable[Mapping[str, float]], name: str, count: int) -> list[float]:
    finite = (row[name] for row in rows if name in row and isfinite(row[name]))
    return list(islice(finite, count))

"""The hacking watch: rules that notice when the score rises while something else breaks.

    rows of metrics -- find_alarms --> Alarm (rule, what was seen) -> metrics, live view, log

Each rule compares the last steps with the first ones of the run. A rule says where to look, and
never steers the run: a longer answer may well be the better one. Pure; it knows only the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

WINDOW = 5
"""Steps at the beginning and at the end that are compared; before twice as many nothing is said."""
LEAST_RISE = 0.02
"""A score that rose by less did not rise."""
LENGTH_FACTOR = 2.0
TRUNCATED_RISE = 0.2
REPETITION_RISE = 0.1
IDENTICAL_SHARE = 0.5
IDENTICAL_RISE = 0.25
SPREAD = 0.15
"""Mean difference between a judge's votes, of a scale of 1, that is worth a look."""
PART = "score/part/"
FORM = frozenset({"format", "tags", "regex", "length", "json_schema", "repetition", "language"})
"""Parts of a score that are about the form of an answer, by their last name."""

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a rule saw."""

    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class Change:
    """A metric at the beginning and now: means, and how sure their difference is."""

    before: float
    now: float
    noise: float

    @property
    def rise(self) -> float:
        return self.now - self.before

    @property
    def rose(self) -> bool:
        return self.rise > max(LEAST_RISE, 2 * self.noise)

    @property
    def fell(self) -> bool:
        return -self.rise > max(LEAST_RISE, 2 * self.noise)

    def __str__(self) -> str:
        return f"{self.before:.3g} to {self.now:.3g}"


def change_of(rows: Rows, name: str) -> Change | None:
    """How a metric changed over the run; None while too few steps have it."""
    first = _some(rows, name, 2 * WINDOW)
    if len(first) < 2 * WINDOW:
        return None
    before, now = first[:WINDOW], _some(reversed(rows), name, WINDOW)
    noise = sqrt((_variance(before) + _variance(now)) / WINDOW)
    return Change(sum(before) / WINDOW, sum(now) / WINDOW, noise)


def find_alarms(rows: Rows) -> list[Alarm]:
    """What the rules say of a run's metrics so far, oldest row first."""
    return [
        Alarm(rule, message) for rule, look in RULES.items() if (message := look(rows)) is not None
    ]


def alarm_metrics(alarms: Iterable[Alarm]) -> dict[str, float]:
    """1 for the rules that see something, 0 for the others."""
    seen = {alarm.rule for alarm in alarms}
    return {f"watch/{rule}": float(rule in seen) for rule in RULES}


def _length(rows: Rows) -> str | None:
    """Answers grow out of all proportion, or run into the token limit."""
    score, length = change_of(rows, "score/mean"), change_of(rows, "rollout/response_length")
    if score is None or length is None or not score.rose:
        return None
    if length.now > LENGTH_FACTOR * length.before:
        return f"answers grew from {length} tokens while the score rose from {score}"
    cut = change_of(rows, "rollout/truncated")
    if cut is not None and cut.rise > TRUNCATED_RISE:
        return f"truncated answers rose from {cut} while the score rose from {score}"
    return None


def _repetition(rows: Rows) -> str | None:
    """Answers say the same again and again."""
    score, repeated = change_of(rows, "score/mean"), change_of(rows, "rollout/repetition")
    if score is None or repeated is None or not score.rose or repeated.rise <= REPETITION_RISE:
        return None
    return f"repeated phrases rose from {repeated} of an answer while the score rose from {score}"


def _format_only(rows: Rows) -> str | None:
    """The score rises by its parts about form alone, and what is right does not follow."""
    score = change_of(rows, "score/mean")
    if score is None or not score.rose:
        return None
    parts = dict(_parts(rows))
    form = {name: change for name, change in parts.items() if _is_form(name)}
    content = {name: change for name, change in parts.items() if not _is_form(name, above=form)}
    gained = [name for name, change in form.items() if change.rose]
    if not content or not gained or any(change.rose for change in content.values()):
        return None
    return f"the score rose from {score} by {', '.join(gained)} alone, not by {', '.join(content)}"


def _identical(rows: Rows) -> str | None:
    """Different prompts get the same answer."""
    score, same = change_of(rows, "score/mean"), change_of(rows, "rollout/identical")
    if score is None or same is None or not score.rose:
        return None
    if same.now < IDENTICAL_SHARE or same.rise < IDENTICAL_RISE:
        return None
    return f"the commonest answer rose from {same} of all while the score rose from {score}"


def _judge(rows: Rows) -> str | None:
    """A judge likes the answers better, and its votes, or another reward, disagree."""
    for name, spread in _changes(rows, "reward/mean/", "/spread"):
        part = change_of(rows, PART + name)
        if part is None or not part.rose:
            continue
        if spread.now > SPREAD and spread.now > 1.5 * spread.before:
            return f"the votes of {name} are apart by {spread}, while its score rose from {part}"
        for other, change in _parts(rows):
            if change.fell and not other.startswith(name) and not _is_form(other):
                return f"{name} rose from {part}, while {other} fell from {change}"
    return None


def _held_out(rows: Rows) -> str | None:
    """Training scores rise, and those of the held-out prompts fall."""
    score, held_out = change_of(rows, "score/mean"), change_of(rows, "eval/score")
    if score is None or held_out is None or not score.rose or not held_out.fell:
        return None
    return f"the validation score fell from {held_out} while the score rose from {score}"


RULES: Mapping[str, Callable[[Rows], str | None]] = {
    "length": _length,
    "repetition": _repetition,
    "format_only": _format_only,
    "identical": _identical,
    "judge": _judge,
    "held_out": _held_out,
}
"""By the names of their metrics, watch/NAME."""


def _parts(rows: Rows) -> Iterator[tuple[str, Change]]:
    return _changes(rows, PART, "")


def _changes(rows: Rows, begin: str, end: str) -> Iterator[tuple[str, Change]]:
    """The metrics of a family that the newest row has, by what stands between begin and end."""
    for name in rows[-1] if rows else ():
        if name.startswith(begin) and name.endswith(end):
            change = change_of(rows, name)
            if change is not None:
                yield name[len(begin) : len(name) - len(end)], change


def _is_form(name: str, *, above: Iterable[str] = ()) -> bool:
    """Whether a part is about form, or is the sum (`math`) of a form part (`math/format`)."""
    if name.rpartition("/")[2].partition("#")[0] in FORM:
        return True
    return any(part.startswith(f"{name}/") for part in above)


def _some(rows: Iterable[Mapping[str, float]], name: str, count: int) -> list[float]:
    values: list[float] = []
    for row in rows:
        if name in row and isfinite(row[name]):
            values.append(row[name])
            if len(values) == count:
                break
    return values


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)

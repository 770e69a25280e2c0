"""Rewards: how a plain function is called, and how several become one score.

A reward is any function, sync or async. Its arguments are taken by name:

    prompt      text of the prompt            sample      the Sample itself
    completion  text of the response          row         the dataset row, as a mapping
    domain      name of the prompt's domain   truncated   whether the token limit ended it
    ...         the options of the recipe, then the columns of the row

The six names of the library always win over a column of that name (`row` still has it), options
win over columns. A parameter with a default is optional; `**anything` gets the whole row. The
answer is a number, a bool or a Score; everything else is a failure with a reason, never a number.

A reward can say more of itself with `declare`: that it takes a batch (every argument but options is
then a list, and so is the answer), that equal samples score alike, and its version.

This module does no scheduling and starts no process (pool.py does); it needs neither torch nor
ray, so a reward process stays small.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import isfinite
from numbers import Real
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np

from rollick.errors import RewardError
from rollick.types import RewardFn, Sample, Score, ScoreStatus

BUILTIN_ARGUMENTS = ("prompt", "completion", "sample", "row", "domain", "truncated")
"""Names that the library fills; a column of the same name never shadows them."""

MAX_DETAIL = 500
"""Characters of a failure's detail that are kept: a reward may raise with a whole completion."""

RunCoroutine = Callable[[Coroutine[Any, Any, Any]], Any]
F = TypeVar("F", bound=RewardFn)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a reward says of itself."""

    batch: int = 0
    """Samples that it takes at once at the most, as lists; 0: one by one, and no lists."""
    cache: bool = False
    """Equal texts, rows and options always score alike, so that it need not be asked again."""
    version: str = ""
    """Changes when its scores do."""
    sees_sample: bool = False
    """Whether it takes the Sample itself: no two of these are alike, so it is never cached."""


def declare(fn: F, *, batch: int = 0, cache: bool = False, version: str = "") -> F:
    """Say of a reward that it takes a batch, that its scores may be kept, or which version it is.

    batch: the most samples of a call; 0 is a function that takes them one by one.
    """
    fn.__rollick_reward__ = Declaration(batch, cache, version)  # pyright: ignore
    return fn


def declaration_of(fn: RewardFn) -> Declaration:
    """What the reward declares; its version is a hash of its source where it names none."""
    said: Declaration = getattr(fn, "__rollick_reward__", Declaration())
    version = said.version or _source_hash(fn)
    sees_sample = "sample" in _parameters(fn)
    return replace(
        said, version=version, sees_sample=sees_sample, cache=said.cache and not sees_sample
    )


def _source_hash(fn: RewardFn) -> str:
    try:
        source = inspect.getsource(inspect.getmodule(fn) or fn).encode()
    except (OSError, TypeError):
        code = getattr(fn, "__code__", None)
        source = code.co_code + repr(code.co_consts).encode() if code else _name(fn).encode()
    return blake2b(source, digest_size=4).hexdigest()


def call_reward(
    fn: RewardFn,
    sample: Sample,
    options: Mapping[str, Any] | None = None,
    *,
    run: RunCoroutine = asyncio.run,
) -> Score:
    """Call one reward. What it raises or a wrong answer is a failed Score.

    A RewardError is raised only where the function cannot be called at all: an argument that
    nothing can fill, or an option that it does not take. `run` runs a coroutine to its end.
    """
    arguments, keywords = bind_arguments(fn, sample, options or {})
    begun = perf_counter()
    try:
        answer = fn(*arguments, **keywords)
        if inspect.isawaitable(answer):
            answer = run(_wait_for(answer))
        score = read_answer(answer)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        score = Score.failed(describe_failure(error))
    return replace(score, seconds=perf_counter() - begun)


def call_batch(
    fn: RewardFn,
    samples: Sequence[Sample],
    options: Mapping[str, Any] | None = None,
    *,
    run: RunCoroutine = asyncio.run,
) -> list[Score]:
    """Call a reward that takes a batch. If it raises, each sample is tried alone.

    RewardError as in `call_reward`.
    """
    bound = [bind_arguments(fn, sample, options or {}) for sample in samples]
    arguments = [list(column) for column in zip(*(place for place, _ in bound), strict=True)]
    keywords = _columns([names for _, names in bound], fn, options or {})
    begun = perf_counter()
    try:
        answer = fn(*arguments, **keywords)
        if inspect.isawaitable(answer):
            answer = run(_wait_for(answer))
        scores = _read_answers(answer, len(samples))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if len(samples) > 1:
            return [call_batch(fn, [sample], options, run=run)[0] for sample in samples]
        scores = [Score.failed(describe_failure(error))]
    seconds = (perf_counter() - begun) / len(samples)
    return [replace(score, seconds=seconds) for score in scores]


def _columns(
    bound: Sequence[Mapping[str, Any]], fn: RewardFn, options: Mapping[str, Any]
) -> dict[str, Any]:
    """By name: an option as it is, anything else as a list with a value for each sample."""
    defaults = {name: each.default for name, each in _parameters(fn).items()}
    names = dict.fromkeys(name for one in bound for name in one)
    return {
        name: options[name]
        if name in options
        else [one.get(name, defaults.get(name)) for one in bound]
        for name in names
    }


def _read_answers(answer: Any, count: int) -> list[Score]:
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        raise TypeError(f"returned a {type(answer).__name__}; a batch is answered with a list")
    answers = list(cast("Iterable[Any]", answer))
    if len(answers) != count:
        raise ValueError(f"returned {len(answers)} scores for {count} samples")
    return [read_answer(one) for one in answers]


def explain_signature(
    fn: RewardFn, *, columns: Iterable[str] = (), options: Iterable[str] = ()
) -> list[str]:
    """What keeps the function from being called with such rows and options; empty if nothing."""
    columns, options = list(columns), list(options)
    parameters = _parameters(fn)
    available = [*BUILTIN_ARGUMENTS, *options, *columns]
    problems = [
        f"{_name(fn)} needs the argument {name!r}, and neither the row nor the options have it; "
        f"available: {', '.join(dict.fromkeys(available))}"
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in available
    ]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option in BUILTIN_ARGUMENTS:
            problems.append(f"the option {option!r} of {_name(fn)} is a name that rollick fills")
        elif option not in parameters and not takes_all:
            takes = ", ".join(parameters) or "no arguments"
            problems.append(f"{_name(fn)} does not take the option {option!r}; it takes {takes}")
    return problems


def bind_arguments(
    fn: RewardFn, sample: Sample, options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of a call; RewardError if one cannot be filled."""
    builtins = dict(zip(BUILTIN_ARGUMENTS, _builtin_values(sample), strict=True))
    extras = {**{str(column): value for column, value in sample.prompt.row.items()}, **options}
    available = {**extras, **builtins}
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    fits = builtins.keys().isdisjoint(options)
    unused = set(options)
    for name, parameter in _parameters(fn).items():
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords |= {key: available[key] for key in extras if key not in keywords}
            unused.clear()
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif name not in available:
            fits = fits and parameter.default is not parameter.empty
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            arguments.append(available[name])
            extras.pop(name, None)
        else:
            keywords[name] = available[name]
        unused.discard(name)
    if unused or not fits:
        problems = explain_signature(fn, columns=map(str, sample.prompt.row), options=options)
        raise RewardError(
            "; ".join(problems),
            fix="rename the parameter, give it a default, or put it into the reward's options",
        )
    return arguments, keywords


def read_answer(answer: Any) -> Score:
    """A Score from what a reward returned; failed if it is no finite number, bool or Score."""
    if isinstance(answer, Score):
        if not answer.ok:
            return replace(answer, value=float("nan"), detail=_shorten(str(answer.detail)))
        score = read_answer(answer.value)
        parts = {str(name): read_answer(value) for name, value in answer.parts.items()}
        broken = next((name for name, part in parts.items() if not part.ok), None)
        if broken is not None:
            return Score.failed(f"part {broken!r}: {parts[broken].detail}")
        turns = [read_answer(value) for value in answer.turns]
        if not all(turn.ok for turn in turns):
            return Score.failed(f"turns {answer.turns!r} are not all finite numbers")
        return replace(
            score,
            parts={name: part.value for name, part in parts.items()},
            turns=tuple(turn.value for turn in turns),
            detail=score.detail or _shorten(str(answer.detail)),
            version=str(answer.version),
            isolation=str(answer.isolation),
            figures=answer.figures,
        )
    if isinstance(answer, Real | np.bool_):
        value = float(answer)
        if isfinite(value):
            return Score(value)
    return Score.failed(
        f"returned {_shorten(repr(answer))} ({type(answer).__name__}); "
        "a reward returns a finite number, a bool or a Score"
    )


def combine(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """The weighted sum of a sample's rewards; any failed one makes the whole failed.

    The parts are the unweighted values by name; a reward's own parts are `name/part`. The turns of
    rewards that give them are weighed and added up, turn by turn.
    """
    seconds = sum(score.seconds for score in scores.values())
    failed = {name: score for name, score in scores.items() if not score.ok}
    if failed:
        timed_out = any(score.status is ScoreStatus.TIMEOUT for score in failed.values())
        status = ScoreStatus.TIMEOUT if timed_out else ScoreStatus.FAILED
        reasons = {name: score.detail for name, score in failed.items() if score.detail}
        detail = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        failure = Score.failed(detail, status=status)
        return replace(failure, seconds=seconds, isolation=_isolations(scores))
    value = float(sum(weights[name] * score.value for name, score in scores.items()))
    if not isfinite(value):
        return Score.failed(f"the weighted sum of {', '.join(scores)} is {value}")
    parts: dict[str, float] = {}
    for name, score in scores.items():
        parts[name] = score.value
        parts |= {f"{name}/{part}": inner for part, inner in score.parts.items()}
    by_turn = {name: score.turns for name, score in scores.items() if score.turns}
    if len({len(turns) for turns in by_turn.values()}) > 1:
        counts = ", ".join(f"{name} {len(turns)}" for name, turns in by_turn.items())
        return Score.failed(f"the rewards do not agree on the number of turns: {counts}")
    weighed = [[weights[name] * turn for turn in turns] for name, turns in by_turn.items()]
    turns = tuple(float(sum(column)) for column in zip(*weighed, strict=True))
    detail = "; ".join(f"{name}: {score.detail}" for name, score in scores.items() if score.detail)
    versions = ", ".join(
        f"{name}@{score.version}" for name, score in scores.items() if score.version
    )
    return Score(
        value,
        parts=parts,
        detail=detail,
        seconds=seconds,
        turns=turns,
        version=versions,
        isolation=_isolations(scores),
        figures={
            f"{name}/{figure}": amount
            for name, score in scores.items()
            for figure, amount in score.figures.items()
        },
    )


def _isolations(scores: Mapping[str, Score]) -> str:
    """All levels that took part, each once: the weakest is what the score stands on."""
    return "+".join(sorted({score.isolation for score in scores.values() if score.isolation}))


def part_names(rewards: Iterable[str]) -> list[str]:
    """A name for each reward of a sample; a reward used twice becomes `name` and `name#2`."""
    seen: dict[str, int] = {}
    names: list[str] = []
    for reward in rewards:
        seen[reward] = seen.get(reward, 0) + 1
        names.append(reward if seen[reward] == 1 else f"{reward}#{seen[reward]}")
    return names


def describe_failure(error: BaseException) -> str:
    """The last line of the traceback, and where it was raised."""
    last = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return _shorten(last) + where


async def _wait_for(answer: Awaitable[Any]) -> Any:
    return await answer


def _builtin_values(sample: Sample) -> tuple[Any, ...]:
    prompt = sample.prompt
    return (prompt.text, sample.text, sample, prompt.row, prompt.domain, sample.truncated)


def _parameters(fn: RewardFn) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        raise RewardError(
            f"the arguments of {_name(fn)} cannot be read",
            fix="wrap it in a function of your own with named arguments",
        ) from None


def _name(fn: RewardFn) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 3] + "..."

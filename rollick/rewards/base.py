"""Rewards: how a plain function is called, and how several scores become one.

A reward is any function, sync or async. Arguments are passed by name:

    prompt      text of the prompt            sample      the Sample itself
    completion  text of the response          row         the dataset row, as a mapping
    domain      name of the prompt's domain   truncated   whether the token limit ended it
    ...         the options of the recipe, then the columns of the row

The six names above take precedence over columns of the same name (`row` still has those), and
options over columns. A parameter with a default is optional; `**kwargs` gets all options and
columns. A reward returns a number, a bool or a Score; anything else is a failed Score.

`declare` states that a reward takes a batch (every argument but the options is then a list, and so
is the return value), that its scores may be cached, or its version.

This module starts no process (pool.py does). It imports neither torch nor ray, so that a reward
process stays small.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import isfinite
from numbers import Real
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np

from rollick.children.process import describe_failure, shorten
from rollick.errors import RewardError
from rollick.types import RewardFn, Sample, Score, ScoreStatus

BUILTIN_ARGUMENTS = ("prompt", "completion", "sample", "row", "domain", "truncated")
"""Arguments that the library fills; a column of the same name never shadows them."""

Options = Mapping[str, Any]
NO_OPTIONS: Options = {}
Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to completion."""
F = TypeVar("F", bound=RewardFn)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a reward declares about itself; see `declare`."""

    batch: int = 0
    cache: bool = False
    version: str = ""
    sees_sample: bool = False
    """Whether it takes the Sample itself. No two samples are equal, so it is never cached."""


def declare(
    fn: F, *, batch: int = 0, cache: bool = False, version: str = "", options: Any = None
) -> F:
    """Declare properties of a reward function.

    batch: maximum samples of a call, passed as lists; 0 is one sample and no lists. cache: equal
    texts, rows and options always get the same score. version: changes when the scores change.
    options: a dataclass with the options of a function that takes them as **kwargs.
    """
    fn.__rollick_reward__ = Declaration(batch, cache, version)  # pyright: ignore
    if options is not None:
        named = inspect.signature(fn).parameters.values()
        fields = inspect.signature(options).parameters.values()
        fn.__signature__ = inspect.Signature(  # pyright: ignore
            [each for each in named if each.kind is not each.VAR_KEYWORD]
            + [each.replace(kind=each.KEYWORD_ONLY) for each in fields]
        )
    return fn


def declaration_of(fn: RewardFn) -> Declaration:
    """What the reward declares; without a version, a hash of its source."""
    declared: Declaration = getattr(fn, "__rollick_reward__", Declaration())
    sees_sample = "sample" in _parameters(fn)
    return replace(
        declared,
        version=declared.version or _source_hash(fn),
        sees_sample=sees_sample,
        cache=declared.cache and not sees_sample,
    )


def _source_hash(fn: RewardFn) -> str:
    try:
        source = inspect.getsource(inspect.getmodule(fn) or fn).encode()
    except (OSError, TypeError):
        code = getattr(fn, "__code__", None)
        source = code.co_code + repr(code.co_consts).encode() if code else _name_of(fn).encode()
    return blake2b(source, digest_size=4).hexdigest()


def call_reward(
    fn: RewardFn, sample: Sample, options: Options = NO_OPTIONS, *, run: Run = asyncio.run
) -> Score:
    """Call one reward. An exception or an invalid return value is a failed Score. Raises
    RewardError only if the arguments do not fit."""
    arguments, keywords = bind_arguments(fn, sample, options)
    started = perf_counter()
    try:
        score = to_score(_call(fn, arguments, keywords, run))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        score = Score.failed(describe_failure(error))
    return replace(score, seconds=perf_counter() - started)


def call_batch(
    fn: RewardFn,
    samples: Sequence[Sample],
    options: Options = NO_OPTIONS,
    *,
    run: Run = asyncio.run,
) -> list[Score]:
    """As `call_reward`, for a reward that takes a batch. If it raises, retry each sample alone."""
    bound = [bind_arguments(fn, sample, options) for sample in samples]
    arguments = [list(column) for column in zip(*(each[0] for each in bound), strict=True)]
    keywords = _collect_keywords([each[1] for each in bound], fn, options)
    started = perf_counter()
    try:
        scores = _to_scores(_call(fn, arguments, keywords, run), len(samples))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if len(samples) > 1:
            return [call_batch(fn, [sample], options, run=run)[0] for sample in samples]
        scores = [Score.failed(describe_failure(error))]
    seconds = (perf_counter() - started) / len(samples)
    return [replace(score, seconds=seconds) for score in scores]


def _call(fn: RewardFn, arguments: Sequence[Any], keywords: Options, run: Run) -> Any:
    result = fn(*arguments, **keywords)
    return run(_as_coroutine(result)) if inspect.isawaitable(result) else result


async def _as_coroutine(result: Awaitable[Any]) -> Any:
    return await result


def _collect_keywords(bound: Sequence[Options], fn: RewardFn, options: Options) -> dict[str, Any]:
    """Options unchanged; any other argument as a list with a value for each sample."""
    defaults = {name: each.default for name, each in _parameters(fn).items()}
    names = dict.fromkeys(name for keywords in bound for name in keywords)
    columns = {name: [each.get(name, defaults.get(name)) for each in bound] for name in names}
    return columns | {name: value for name, value in options.items() if name in names}


def _to_scores(result: Any, count: int) -> list[Score]:
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise TypeError(f"returned a {type(result).__name__}; a batch reward returns a list")
    values = list(cast("Iterable[Any]", result))
    if len(values) != count:
        raise ValueError(f"returned {len(values)} scores for {count} samples")
    return [to_score(value) for value in values]


def find_signature_problems(
    fn: RewardFn, *, columns: Iterable[str] = (), options: Collection[str] = ()
) -> list[str]:
    """Why the function cannot be called with these columns and options; empty if it can."""
    parameters, function = _parameters(fn), _name_of(fn)
    available = dict.fromkeys([*BUILTIN_ARGUMENTS, *options, *columns])
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: each for name, each in parameters.items() if each.kind not in variadic}
    problems = [
        f"{function} needs the argument {name!r}, but neither the row nor the options have it; "
        f"available: {', '.join(available)}"
        for name, parameter in named.items()
        if parameter.default is parameter.empty and name not in available
    ]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for option in options:
        if option in BUILTIN_ARGUMENTS:
            subject = f"the option {option!r} of {function}"
            problems.append(f"{subject} is an argument that rollick fills")
        elif option not in named and not takes_all:
            accepted = ", ".join(parameters) or "no arguments"
            problems.append(f"{function} does not take the option {option!r}; it takes {accepted}")
    return problems


def bind_arguments(
    fn: RewardFn, sample: Sample, options: Options
) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of a call; RewardError if they do not fit."""
    prompt = sample.prompt
    if problems := find_signature_problems(fn, columns=map(str, prompt.row), options=options):
        fix = "rename the parameter, give it a default, or put it into the reward's options"
        raise RewardError("; ".join(problems), fix=fix)
    builtins = (prompt.text, sample.text, sample, prompt.row, prompt.domain, sample.truncated)
    extras = {**{str(column): value for column, value in prompt.row.items()}, **options}
    available = {**extras, **dict(zip(BUILTIN_ARGUMENTS, builtins, strict=True))}
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, parameter in _parameters(fn).items():
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords |= {key: available[key] for key in extras if key not in keywords}
        elif name not in available or parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            arguments.append(available[name])
            extras.pop(name, None)
        else:
            keywords[name] = available[name]
    return arguments, keywords


def to_score(result: Any) -> Score:
    """The Score of what a reward returned; failed unless it is a finite number, bool or Score."""
    if isinstance(result, Score):
        if not result.ok:
            return replace(result, value=float("nan"), detail=shorten(str(result.detail)))
        score = to_score(result.value)
        parts = {str(name): to_score(value) for name, value in result.parts.items()}
        invalid = next((name for name, part in parts.items() if not part.ok), None)
        if invalid is not None:
            return Score.failed(f"part {invalid!r}: {parts[invalid].detail}")
        turns = [to_score(value) for value in result.turn_rewards]
        if not all(turn.ok for turn in turns):
            return Score.failed(f"turns {result.turn_rewards!r} are not all finite numbers")
        return replace(
            score,
            parts={name: part.value for name, part in parts.items()},
            turn_rewards=tuple(turn.value for turn in turns),
            detail=score.detail or shorten(str(result.detail)),
            version=str(result.version),
            isolation=str(result.isolation),
            metrics=result.metrics,
        )
    if isinstance(result, Real | np.bool_):
        value = float(result)
        if isfinite(value):
            return Score(value)
    returned = f"returned {shorten(repr(result))} ({type(result).__name__})"
    return Score.failed(f"{returned}; a reward returns a finite number, a bool or a Score")


def combine(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """The weighted sum of a sample's rewards; failed if one of them failed. The parts are the
    unweighted values by name; a reward's own parts are `name/part`. Rewards with scores for each
    turn are weighted and summed turn by turn."""
    seconds = sum(score.seconds for score in scores.values())
    failed = {name: score for name, score in scores.items() if not score.ok}
    isolation = "+".join(sorted({each.isolation for each in scores.values() if each.isolation}))
    if failed:
        statuses = {score.status for score in failed.values()}
        order = (ScoreStatus.TIMEOUT, ScoreStatus.UNAVAILABLE, ScoreStatus.FAILED)
        status = next(status for status in order if status in statuses)
        failure = Score.failed(_join_details(failed), status=status)
        return replace(failure, seconds=seconds, isolation=isolation)
    value = float(sum(weights[name] * score.value for name, score in scores.items()))
    if not isfinite(value):
        return Score.failed(f"the weighted sum of {', '.join(scores)} is {value}")
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for name, score in scores.items():
        parts[name] = score.value
        parts |= {f"{name}/{part}": inner for part, inner in score.parts.items()}
        metrics |= {f"{name}/{metric}": amount for metric, amount in score.metrics.items()}
    by_turn = {name: score.turn_rewards for name, score in scores.items() if score.turn_rewards}
    if len({len(turns) for turns in by_turn.values()}) > 1:
        counts = ", ".join(f"{name} {len(turns)}" for name, turns in by_turn.items())
        return Score.failed(f"the rewards differ in the number of turns: {counts}")
    weighted = [[weights[name] * turn for turn in turns] for name, turns in by_turn.items()]
    turns = tuple(float(sum(column)) for column in zip(*weighted, strict=True))
    versions = ", ".join(f"{name}@{each.version}" for name, each in scores.items() if each.version)
    return Score(
        value,
        parts=parts,
        detail=_join_details(scores),
        seconds=seconds,
        turn_rewards=turns,
        version=versions,
        isolation=isolation,
        metrics=metrics,
    )


def model(completion: str) -> float:
    """Placeholder of the reward `model`: a run calls pipelines/reward_model.py instead."""
    fix = "use it in a recipe with reward_model.path"
    raise RewardError("the reward `model` works only in a run", fix=fix)


def _join_details(scores: Mapping[str, Score]) -> str:
    return "; ".join(f"{name}: {score.detail}" for name, score in scores.items() if score.detail)


def part_names(rewards: Iterable[str]) -> list[str]:
    """A unique name for each reward; one that is used twice becomes `name` and `name#2`."""
    seen: dict[str, int] = {}
    names: list[str] = []
    for reward in rewards:
        seen[reward] = seen.get(reward, 0) + 1
        names.append(reward if seen[reward] == 1 else f"{reward}#{seen[reward]}")
    return names


def _parameters(fn: RewardFn) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        fix = "wrap it in a function of your own with named arguments"
        raise RewardError(f"the signature of {_name_of(fn)} cannot be read", fix=fix) from None


def _name_of(fn: RewardFn) -> str:
    return getattr(fn, "__name__", type(fn).__name__)

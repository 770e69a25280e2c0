"""Rows of a source: what a row must hold to be a Prompt, and the quarantine of those that do not.

    source -> rows (read, numbered) -> Prompt or BadRow

A uid is "domain/row", where rows are counted from 0 over the whole source, bad ones included.
Nothing is tokenised here: a function that counts a prompt's tokens is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from rollick.config.names import nearest
from rollick.config.schema import DomainConfig
from rollick.data.sources import RawRow, shown
from rollick.errors import DataError
from rollick.types import Prompt, Row, Turn

CountTokens = Callable[[Prompt], int]
AnswerColumn = Literal["completion", "chosen", "rejected"]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: where it is, why (a reason to count by), and what was seen."""

    domain: str
    place: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason} ({self.detail})"


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The unusable rows of all sources: counted by reason, the first ones listed."""

    counts: Mapping[str, int]
    rows: tuple[BadRow, ...]

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class TokenLimit(NamedTuple):
    """Tokens that a prompt may have, and what says so."""

    tokens: int
    said: str


class _Unusable(Exception):
    """Why a row is bad; becomes a BadRow once the place is known."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(reason, detail)


def sort_out(
    name: str,
    config: DomainConfig,
    *,
    rows: Iterable[RawRow],
    count_tokens: CountTokens | None,
    limit: TokenLimit,
) -> tuple[list[Prompt], list[BadRow]]:
    """Prompts of the usable rows, and the others."""
    prompts: list[Prompt] = []
    bad: list[BadRow] = []
    for number, raw in enumerate(rows):
        try:
            if raw.problem:
                raise _Unusable("not_json", raw.problem)
            if not _is_wanted(raw.value, config):
                continue
            prompt = _to_prompt(raw.value, config, domain=name, number=number)
            if count_tokens is not None:
                _refuse_long(prompt, count_tokens, limit=limit)
            prompts.append(prompt)
        except _Unusable as problem:
            bad.append(BadRow(name, raw.place, problem.reason, problem.detail))
    return prompts, bad


def _refuse_long(prompt: Prompt, count_tokens: CountTokens, *, limit: TokenLimit) -> None:
    try:
        tokens = count_tokens(prompt)
    except DataError as error:  # such as a chat template that refuses these roles
        raise _Unusable("cannot_encode", error.message) from error
    if tokens > limit.tokens:
        raise _Unusable("too_long", f"{tokens} tokens, {limit.said} is {limit.tokens}")


def _is_wanted(row: Any, config: DomainConfig) -> bool:
    """Whether the columns hold what the domain's filters ask for."""
    for column, wanted in config.filters.where.items():
        if not isinstance(row, Mapping):
            return True  # a bad row, and told as one
        value = _column(cast("Mapping[str, Any]", row), column)
        if value not in (wanted if isinstance(wanted, tuple) else (wanted,)):
            return False
    return True


def _to_prompt(row: Any, config: DomainConfig, *, domain: str, number: int) -> Prompt:
    if not isinstance(row, Mapping):
        raise _Unusable("not_a_row", f"expected columns with names, got {shown(row)}")
    columns = dict(cast("Mapping[str, Any]", row))
    turns = _turns_of(columns, config)
    if not any(turn.content.strip() for turn in turns):
        raise _Unusable("empty_prompt", "the prompt has no text")
    for turn in turns:
        _refuse_broken_text(turn.content)
    if config.system is not None and turns[0].role != "system":
        # A row that brings its own system message keeps it: most templates take only one.
        turns = (Turn("system", config.system), *turns)
    _refuse_bad_answers(columns, config)
    return Prompt(uid=f"{domain}/{number}", domain=domain, turns=turns, row=columns)


def answer_columns(config: DomainConfig) -> dict[AnswerColumn, str]:
    """The columns that hold given answers, by what they are."""
    columns: dict[AnswerColumn, str | None] = {
        "completion": config.completion,
        "chosen": config.chosen,
        "rejected": config.rejected,
    }
    return {which: column for which, column in columns.items() if column is not None}


def _refuse_bad_answers(row: Row, config: DomainConfig) -> None:
    answers: dict[AnswerColumn, str] = {}
    for which, column in answer_columns(config).items():
        answer = _column(row, column)
        if not isinstance(answer, str):
            raise _Unusable("wrong_type", f"{column!r} is {shown(answer)}")
        if not answer:
            raise _Unusable(f"empty_{which}", f"{column!r} has no text")
        _refuse_broken_text(answer)
        answers[which] = answer
    if "chosen" in answers and answers["chosen"] == answers.get("rejected"):
        raise _Unusable(
            "no_preference", f"{config.chosen!r} and {config.rejected!r} are the same text"
        )


def _refuse_broken_text(text: str) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Unusable("not_text", str(error)) from error


def _turns_of(row: Row, config: DomainConfig) -> tuple[Turn, ...]:
    if config.prompt_format is not None:
        return (Turn("user", _filled(config.prompt_format, row)),)
    value = _column(row, config.prompt)
    if isinstance(value, str):
        return (Turn("user", value),)
    if not isinstance(value, list) or not value:
        raise _Unusable(
            "wrong_type",
            f"{config.prompt!r} is {shown(value)}, expected text or a list of messages",
        )
    return tuple(_turn_of(message, config.prompt) for message in cast("list[Any]", value))


def _turn_of(message: Any, column: str) -> Turn:
    parts = cast("Mapping[str, Any]", message) if isinstance(message, Mapping) else {}
    role, content = parts.get("role"), parts.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise _Unusable(
            "wrong_type",
            f"a message in {column!r} is {shown(message)}, expected role and content as text",
        )
    return Turn(role, content)


def _filled(template: str, row: Row) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        raise _missing(str(error.args[0]), row) from error
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise _Unusable("wrong_type", f"{template!r} cannot be filled: {error}") from error


def _column(row: Row, name: str) -> Any:
    if name not in row:
        raise _missing(name, row)
    return row[name]


def _missing(name: str, row: Row) -> _Unusable:
    close = nearest(name, [str(column) for column in row], count=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return _Unusable("missing_column", f"no {name!r} among {', '.join(map(str, row))}{hint}")


def refuse_bad_source(
    name: str, config: DomainConfig, *, usable: int, bad: Sequence[BadRow], allowed: float
) -> None:
    """Stop on a source without a usable row, or with too many bad ones."""
    total = usable + len(bad)
    if total == 0 and config.filters.where:
        raise DataError(
            f"no row of {config.source} (domain {name!r}) passes its filters",
            fix=f"look at data.domains.{name}.filters.where",
        )
    if total == 0:
        raise DataError(f"{config.source} (domain {name!r}) has no rows", fix="give it some rows")
    reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(r.reason for r in bad).items())
    if usable == 0:
        raise DataError(
            f"none of the {total} rows of domain {name!r} is usable: {reasons}; first: {bad[0]}",
            fix=f"correct the rows, or the columns named in domain {name!r} (prompt, "
            "prompt_format, completion, chosen, rejected)",
        )
    if len(bad) > allowed * total:
        raise DataError(
            f"{len(bad)} of the {total} rows of domain {name!r} are unusable ({reasons}), "
            f"data.max_bad_rows allows {allowed:.0%}; first: {bad[0]}",
            fix="correct or remove these rows, or raise data.max_bad_rows",
        )

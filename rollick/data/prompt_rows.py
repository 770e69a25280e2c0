"""Validates the rows of a source: a usable row becomes a Prompt, any other a BadRow.

The uid of a prompt is "domain/row"; rows are numbered from 0 in their source, including bad rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from rollick.config.problems import describe_value, did_you_mean
from rollick.config.schema import DistillDomain, Domain, DpoDomain, SftDomain
from rollick.data.sources import RawRow
from rollick.errors import DataError
from rollick.types import Prompt, Row, Turn

CountTokens = Callable[[Prompt], int]
AnswerKind = Literal["completion", "chosen", "rejected"]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: its location, a reason to count by, and details."""

    location: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason} ({self.detail})"


class TokenLimit(NamedTuple):
    """The longest prompt in tokens, and the setting that limits it."""

    tokens: int
    setting: str


class _Unusable(Exception):
    """A row cannot be used. Becomes a BadRow with the row's location."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail


def partition_rows(
    name: str, config: Domain, rows: Iterable[RawRow], count: CountTokens | None, limit: TokenLimit
) -> tuple[list[Prompt], list[BadRow]]:
    prompts: list[Prompt] = []
    bad: list[BadRow] = []
    for number, raw in enumerate(rows):
        try:
            if raw.problem:
                raise _Unusable("not_json", raw.problem)
            if not _passes_filters(raw.value, config):
                continue
            prompt = _to_prompt(raw.value, config, domain=name, number=number)
            if count is not None:
                _check_length(prompt, count, limit=limit)
            prompts.append(prompt)
        except _Unusable as problem:
            bad.append(BadRow(raw.location, problem.reason, problem.detail))
    return prompts, bad


def _check_length(prompt: Prompt, count_tokens: CountTokens, *, limit: TokenLimit) -> None:
    try:
        tokens = count_tokens(prompt)
    except DataError as error:  # For example, the chat template rejects these roles.
        raise _Unusable("cannot_encode", error.message) from error
    if tokens > limit.tokens:
        raise _Unusable("too_long", f"{tokens} tokens, {limit.setting} is {limit.tokens}")


def _passes_filters(row: Any, config: Domain) -> bool:
    for column, allowed in config.where.items():
        if not isinstance(row, Mapping):
            return True  # _to_prompt reports it as a bad row.
        value = _get_column(cast("Mapping[str, Any]", row), column)
        if value not in (allowed if isinstance(allowed, tuple) else (allowed,)):
            return False
    return True


def _to_prompt(row: Any, config: Domain, *, domain: str, number: int) -> Prompt:
    if not isinstance(row, Mapping):
        raise _Unusable("not_a_row", f"expected named columns, got {describe_value(row)}")
    columns = dict(cast("Mapping[str, Any]", row))
    turns = _read_turns(columns, config)
    if not any(turn.content.strip() for turn in turns):
        raise _Unusable("empty_prompt", "the prompt has no text")
    for turn in turns:
        _check_encodable(turn.content)
    if config.system is not None and turns[0].role != "system":
        # A row with its own system message keeps it: most templates accept only one.
        turns = (Turn("system", config.system), *turns)
    _check_answers(columns, config)
    return Prompt(uid=f"{domain}/{number}", domain=domain, turns=turns, row=columns)


def answer_columns(config: Domain) -> dict[AnswerKind, str]:
    if isinstance(config, DpoDomain):
        return {"chosen": config.chosen, "rejected": config.rejected}
    if isinstance(config, SftDomain | DistillDomain) and config.completion is not None:
        return {"completion": config.completion}
    return {}


def _check_answers(row: Row, config: Domain) -> None:
    columns = answer_columns(config)
    for kind, column in columns.items():
        answer = _get_column(row, column)
        if not isinstance(answer, str):
            raise _Unusable("wrong_type", f"{column!r} is {describe_value(answer)}")
        if not answer:
            raise _Unusable(f"empty_{kind}", f"{column!r} has no text")
        _check_encodable(answer)
    if "rejected" in columns and row[columns["chosen"]] == row[columns["rejected"]]:
        names = f"{columns['chosen']!r} and {columns['rejected']!r}"
        raise _Unusable("no_preference", f"{names} are the same text")


def _check_encodable(text: str) -> None:
    """Raises on an unpaired surrogate, which JSON allows and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Unusable("not_text", str(error)) from error


def _read_turns(row: Row, config: Domain) -> tuple[Turn, ...]:
    if config.prompt_format is not None:
        return (Turn("user", _fill_template(config.prompt_format, row)),)
    value = _get_column(row, config.prompt)
    if isinstance(value, str):
        return (Turn("user", value),)
    if not isinstance(value, list) or not value:
        problem = f"{config.prompt!r} is {describe_value(value)}"
        raise _Unusable("wrong_type", f"{problem}, expected text or a list of messages")
    return tuple(_read_turn(message, config.prompt) for message in cast("list[Any]", value))


def _read_turn(message: Any, column: str) -> Turn:
    parts = cast("Mapping[str, Any]", message) if isinstance(message, Mapping) else {}
    role, content = parts.get("role"), parts.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        problem = f"a message in {column!r} is {describe_value(message)}"
        raise _Unusable("wrong_type", f"{problem}, expected text for role and content")
    return Turn(role, content)


def _fill_template(template: str, row: Row) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        raise _missing_column(str(error.args[0]), row) from error
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise _Unusable("wrong_type", f"{template!r} cannot be filled: {error}") from error


def _get_column(row: Row, name: str) -> Any:
    if name not in row:
        raise _missing_column(name, row)
    return row[name]


def _missing_column(name: str, row: Row) -> _Unusable:
    columns = [str(column) for column in row]
    problem, hint = f"no {name!r} among {', '.join(columns)}", did_you_mean(name, columns)
    return _Unusable("missing_column", f"{problem}; {hint}" if hint else problem)


def check_source(
    name: str, config: Domain, *, usable: int, bad: Sequence[BadRow], allowed: float
) -> None:
    total = usable + len(bad)
    if total == 0 and config.where:
        raise DataError(
            f"no row of {config.source} (domain {name!r}) passes its filters",
            fix=f"change data.domains.{name}.where",
        )
    if total == 0:
        raise DataError(f"{config.source} (domain {name!r}) has no rows", fix="add rows")
    reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(r.reason for r in bad).items())
    if usable == 0:
        raise DataError(
            f"none of the {total} rows of domain {name!r} is usable: {reasons}; first: {bad[0]}",
            fix="correct the rows, or the columns of the domain (prompt, completion, …)",
        )
    if len(bad) > allowed * total:
        raise DataError(
            f"{len(bad)} of the {total} rows of domain {name!r} are unusable ({reasons}), "
            f"data.max_bad_rows allows {allowed:.0%}; first: {bad[0]}",
            fix="correct or remove these rows, or raise data.max_bad_rows",
        )

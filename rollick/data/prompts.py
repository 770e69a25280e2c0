"""PromptStream: rows of mixed sources, in an order that follows from the seed, resumable.

Owns what a row must hold, quarantine of bad rows, shuffling and mixing. Reading is in sources.py;
nothing is tokenised here: a function that counts a prompt's tokens is passed in.

    source -> rows (read, numbered) -> Prompt or BadRow -> per domain: order of the epoch -> next()

A uid is "domain/row", where rows are counted from 0 over the whole source, bad ones included.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np

from rollick.config.names import nearest
from rollick.config.schema import DataConfig, DomainConfig
from rollick.data.sources import RawRow, read_rows, shown
from rollick.errors import DataError
from rollick.types import Prompt, Row, Turn, stable_hash

CountTokens = Callable[[Prompt], int]

NO_OBJECTS: Mapping[str, Any] = MappingProxyType({})
LISTED_BAD_ROWS = 20


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


class _Limit(NamedTuple):
    """Tokens that a prompt may have, and what says so."""

    tokens: int
    said: str


class _Unusable(Exception):
    """Why a row is bad; becomes a BadRow once the place is known."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(reason, detail)


@dataclass(frozen=True, slots=True)
class _Domain:
    """The usable prompts of one source, in file order."""

    name: str
    config: DomainConfig
    prompts: tuple[Prompt, ...]
    fingerprint: str

    def order(self, epoch: int, *, seed: int) -> Sequence[int]:
        """The epoch's permutation: a function of seed, domain and epoch alone.

        Sorting raw Philox words, because numpy promises their stream, but not that of `shuffle`.
        """
        words = np.random.Philox(key=stable_hash(seed, self.name, epoch))
        return np.argsort(words.random_raw(len(self.prompts)), kind="stable").tolist()


class PromptStream:
    """Draws prompts without end; every domain keeps its share over any window."""

    def __init__(
        self, domains: Sequence[_Domain], *, seed: int, shuffle: bool, quarantine: Quarantine
    ) -> None:
        self.quarantine = quarantine
        self._domains = {domain.name: domain for domain in domains}
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = dict.fromkeys(self._domains, 0)
        self._credit = dict.fromkeys(self._domains, 0.0)
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}

    @classmethod
    def open(
        cls,
        data: DataConfig,
        *,
        seed: int,
        base: Path | None,
        objects: Mapping[str, Any] = NO_OBJECTS,
        validation: bool = False,
        count_tokens: CountTokens | None = None,
        room: int | None = None,
    ) -> PromptStream:
        """Read every source. Files are looked for beside the recipe (`base`), then in the cwd.

        `room`: prompt tokens that the engines' cache takes, where prompts are to be answered.
        """
        limit = _Limit(data.max_prompt_tokens, "data.max_prompt_tokens")
        if room is not None and room < limit.tokens:
            limit = _Limit(room, "what infer.max_length has room for")
        domains: list[_Domain] = []
        bad: list[BadRow] = []
        for name, config in (data.validation if validation else data.domains).items():
            rows = read_rows(config, base=base or Path.cwd(), objects=objects)
            prompts, unusable = _sort_out(
                name, config, rows=rows, count_tokens=count_tokens, limit=limit
            )
            _refuse_bad_source(
                name, config, usable=len(prompts), bad=unusable, allowed=data.max_bad_rows
            )
            domains.append(_Domain(name, config, tuple(prompts), _fingerprint(prompts)))
            bad.extend(unusable)
        counts = Counter(row.reason for row in bad)
        quarantine = Quarantine(counts=dict(counts), rows=tuple(bad[:LISTED_BAD_ROWS]))
        return cls(domains, seed=seed, shuffle=data.shuffle, quarantine=quarantine)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Usable rows by domain."""
        return {name: len(domain.prompts) for name, domain in self._domains.items()}

    def next(self) -> Prompt:
        """The next prompt; after the last row of a domain its next epoch begins."""
        domain = self._pick_domain()
        epoch, place = divmod(self._drawn[domain.name], len(domain.prompts))
        self._drawn[domain.name] += 1
        return domain.prompts[self._order_of(domain, epoch)[place] if self._shuffle else place]

    def all(self) -> list[Prompt]:
        """Every usable prompt, domain after domain, in file order; moves no cursor."""
        return [prompt for domain in self._domains.values() for prompt in domain.prompts]

    def completion_of(self, prompt: Prompt) -> str:
        """The answer to imitate (SFT)."""
        column = self._domains[prompt.domain].config.completion
        if column is None:
            raise DataError(
                f"domain {prompt.domain!r} has no completion column",
                fix=f"set data.domains.{prompt.domain}.completion to the column with the answers",
            )
        return prompt.row[column]

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON: what `restore` needs to go on with the very next prompt."""
        domains = {
            name: {
                "drawn": self._drawn[name],
                "credit": self._credit[name],
                "rows": len(domain.prompts),
                "fingerprint": domain.fingerprint,
            }
            for name, domain in self._domains.items()
        }
        return {"seed": self._seed, "shuffle": self._shuffle, "domains": domains}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Refuses a cursor into other rows or another order."""
        saved: Mapping[str, Mapping[str, Any]] = state["domains"]
        self._refuse_other_order(state)
        for name, domain in self._domains.items():
            if saved[name]["fingerprint"] != domain.fingerprint:
                raise DataError(
                    f"the rows of domain {name!r} ({domain.config.source}) are not those of the "
                    f"saved run: {saved[name]['rows']} usable rows then, "
                    f"{len(domain.prompts)} now",
                    fix="put the old rows back (a generator must give the same ones each time), "
                    "or start a new run",
                )
        self._drawn = {name: int(saved[name]["drawn"]) for name in self._domains}
        self._credit = {name: float(saved[name]["credit"]) for name in self._domains}

    def _refuse_other_order(self, state: Mapping[str, Any]) -> None:
        if set(state["domains"]) != set(self._domains):
            raise DataError(
                f"the saved run had the domains {', '.join(state['domains'])}; "
                f"this one has {', '.join(self._domains) or 'none'}",
                fix="resume with the same data.domains, or start a new run",
            )
        now = {"seed": self._seed, "shuffle": self._shuffle}
        for key, value in now.items():
            if state[key] != value:
                raise DataError(
                    f"the saved run drew its prompts with {key}={state[key]}, this one {value}",
                    fix=f"resume with {key}={state[key]}, or start a new run",
                )

    def _pick_domain(self) -> _Domain:
        """Smooth weighted round robin: each domain earns its share, the richest one pays."""
        if not self._domains:
            raise DataError("there are no domains to draw from", fix="name one under data.domains")
        shares = {name: domain.config.share for name, domain in self._domains.items()}
        for name, share in shares.items():
            self._credit[name] += share
        richest = max(self._credit, key=lambda name: self._credit[name])
        self._credit[richest] -= sum(shares.values())
        return self._domains[richest]

    def _order_of(self, domain: _Domain, epoch: int) -> Sequence[int]:
        known = self._orders.get(domain.name)
        if known is None or known[0] != epoch:
            known = (epoch, domain.order(epoch, seed=self._seed))
            self._orders[domain.name] = known
        return known[1]


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    """Hash of the usable rows; a value that is not JSON counts by its type alone."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        row = json.dumps([prompt.uid, prompt.row], skipkeys=True, default=lambda v: str(type(v)))
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()


def _sort_out(
    name: str,
    config: DomainConfig,
    *,
    rows: Iterable[RawRow],
    count_tokens: CountTokens | None,
    limit: _Limit,
) -> tuple[list[Prompt], list[BadRow]]:
    """Prompts of the usable rows, and the others."""
    prompts: list[Prompt] = []
    bad: list[BadRow] = []
    for number, raw in enumerate(rows):
        try:
            if raw.problem:
                raise _Unusable("not_json", raw.problem)
            prompt = _to_prompt(raw.value, config, domain=name, number=number)
            if count_tokens is not None:
                _refuse_long(prompt, count_tokens, limit=limit)
            prompts.append(prompt)
        except _Unusable as problem:
            bad.append(BadRow(name, raw.place, problem.reason, problem.detail))
    return prompts, bad


def _refuse_long(prompt: Prompt, count_tokens: CountTokens, *, limit: _Limit) -> None:
    try:
        tokens = count_tokens(prompt)
    except DataError as error:  # such as a chat template that refuses these roles
        raise _Unusable("cannot_encode", error.message) from error
    if tokens > limit.tokens:
        raise _Unusable("too_long", f"{tokens} tokens, {limit.said} is {limit.tokens}")


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
    if config.completion is not None:
        completion = _column(columns, config.completion)
        if not isinstance(completion, str):
            raise _Unusable("wrong_type", f"{config.completion!r} is {shown(completion)}")
        if not completion:
            raise _Unusable("empty_completion", f"{config.completion!r} has no text")
        _refuse_broken_text(completion)
    return Prompt(uid=f"{domain}/{number}", domain=domain, turns=turns, row=columns)


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


def _refuse_bad_source(
    name: str, config: DomainConfig, *, usable: int, bad: Sequence[BadRow], allowed: float
) -> None:
    """Stop on a source without a usable row, or with too many bad ones."""
    total = usable + len(bad)
    if total == 0:
        raise DataError(f"{config.source} (domain {name!r}) has no rows", fix="give it some rows")
    reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(r.reason for r in bad).items())
    if usable == 0:
        raise DataError(
            f"none of the {total} rows of domain {name!r} is usable: {reasons}; first: {bad[0]}",
            fix=f"correct the rows, or the columns named in domain {name!r} (prompt, "
            "prompt_format, completion)",
        )
    if len(bad) > allowed * total:
        raise DataError(
            f"{len(bad)} of the {total} rows of domain {name!r} are unusable ({reasons}), "
            f"data.max_bad_rows allows {allowed:.0%}; first: {bad[0]}",
            fix="correct or remove these rows, or raise data.max_bad_rows",
        )

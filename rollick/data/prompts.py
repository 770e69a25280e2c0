"""PromptStream: rows of mixed sources, in an order that follows from the seed, resumable.

Owns shuffling, mixing and the choice among prompts. Reading is in sources.py, what a row must hold
in rows.py, and what is known of the prompts' pass rates in curriculum.py.

    prompts of a domain -> orders of its epochs, end to end -> less the retired -> next()
                                                  ^
                  judged(group), learn() -> Curriculum
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rollick.config.schema import DataConfig, DomainConfig
from rollick.data.curriculum import Curriculum
from rollick.data.rows import (
    AnswerColumn,
    BadRow,
    CountTokens,
    Quarantine,
    TokenLimit,
    answer_columns,
    refuse_bad_source,
    sort_out,
)
from rollick.data.shares import TrainedShares
from rollick.data.sources import read_rows
from rollick.errors import DataError
from rollick.types import Group, Prompt, stable_hash

NO_OBJECTS: Mapping[str, Any] = MappingProxyType({})
LISTED_BAD_ROWS = 20


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
        self, data: DataConfig, domains: Sequence[_Domain], *, seed: int, quarantine: Quarantine
    ) -> None:
        self.quarantine = quarantine
        self._domains = {domain.name: domain for domain in domains}
        self._seed = seed
        self._shuffle = data.shuffle
        self._selection = data.selection
        self._curriculum = Curriculum(data.selection, self.sizes)
        self._fixed_shares = {domain.name: domain.config.share for domain in domains}
        self._trained_shares: TrainedShares | None = None
        if data.shares_of == "trained":
            self._trained_shares = TrainedShares(self._fixed_shares)
        # How far each domain is in its endless order; a retired prompt is passed and not drawn.
        self._drawn = dict.fromkeys(self._domains, 0)
        self._credit = dict.fromkeys(self._domains, 0.0)
        self._orders: dict[tuple[str, int], Sequence[int]] = {}
        self._by_uid: dict[str, Prompt] = {}
        # Places of an epoch's order whose prompts are not retired; good until the next `learn`.
        self._live: dict[tuple[str, int], Sequence[int]] = {}

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
        limit = TokenLimit(data.max_prompt_tokens, "data.max_prompt_tokens")
        if room is not None and room < limit.tokens:
            limit = TokenLimit(room, "what infer.max_length has room for")
        domains: list[_Domain] = []
        bad: list[BadRow] = []
        for name, config in (data.validation if validation else data.domains).items():
            rows = read_rows(
                config,
                base=base or Path.cwd(),
                objects=objects,
                purpose="held_out" if validation else "train",
            )
            prompts, unusable = sort_out(
                name, config, rows=rows, count_tokens=count_tokens, limit=limit
            )
            refuse_bad_source(
                name, config, usable=len(prompts), bad=unusable, allowed=data.max_bad_rows
            )
            domains.append(_Domain(name, config, tuple(prompts), _fingerprint(prompts)))
            bad.extend(unusable)
        counts = Counter(row.reason for row in bad)
        quarantine = Quarantine(counts=dict(counts), rows=tuple(bad[:LISTED_BAD_ROWS]))
        return cls(data, domains, seed=seed, quarantine=quarantine)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Usable rows by domain."""
        return {name: len(domain.prompts) for name, domain in self._domains.items()}

    def next(self) -> Prompt:
        """The next prompt; after the last row of a domain its next epoch begins."""
        domain = self._pick_domain()
        position, prompt = next(self._ahead(domain))
        if self._selection.order == "near_half":
            prompt = self._near_half(domain, position) or prompt
        return self._draw(domain, position, prompt)

    def find(self, uid: str) -> Prompt:
        """The prompt of this uid, drawn in place of the one that is next: what comes after it is
        what would have come anyway. So a run that was killed draws the same prompts again."""
        if not self._by_uid:
            self._by_uid = {prompt.uid: prompt for prompt in self.all()}
        prompt = self._by_uid.get(uid)
        if prompt is None:
            raise DataError(
                f"prompt {uid!r}, which the run had drawn before it was stopped, is not there",
                fix="put the old rows back, or start a new run",
            )
        domain = self._pick_domain()
        position, _ = next(self._ahead(domain))
        return self._draw(domain, position, prompt)

    def judged(self, group: Group, *, kept: bool = True) -> None:
        """Every group of a drawn prompt is told here once it is scored, trained on or dropped."""
        self._curriculum.judged(group)
        if self._trained_shares is not None:
            self._trained_shares.judged(group.prompt.domain, kept=kept)

    def learn(self) -> None:
        """Let what was judged count from now on; called between steps, so that no clock shows."""
        self._curriculum.learn()
        if self._trained_shares is not None:
            self._trained_shares.learn()
        self._live.clear()

    def metrics(self) -> dict[str, float]:
        """Figures of the rows and of what is known of them, by name."""
        return {"data/quarantined": float(self.quarantine.total)} | self._curriculum.metrics()

    def all(self) -> list[Prompt]:
        """Every usable prompt, domain after domain, in file order; moves no cursor."""
        return [prompt for domain in self._domains.values() for prompt in domain.prompts]

    def completion_of(self, prompt: Prompt) -> str:
        """The answer to imitate (SFT, distillation)."""
        return self._answer(prompt, "completion")

    def pair_of(self, prompt: Prompt) -> tuple[str, str]:
        """The better and the worse answer (DPO)."""
        return self._answer(prompt, "chosen"), self._answer(prompt, "rejected")

    def _answer(self, prompt: Prompt, which: AnswerColumn) -> str:
        column = answer_columns(self._domains[prompt.domain].config).get(which)
        if column is None:
            raise DataError(
                f"domain {prompt.domain!r} has no {which} column",
                fix=f"set data.domains.{prompt.domain}.{which} to the column with the answers",
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
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "domains": domains,
            "curriculum": self._curriculum.state(),
            "shares": self._trained_shares.state() if self._trained_shares else None,
        }

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
        self._curriculum.restore(state["curriculum"])
        if self._trained_shares is not None and state["shares"] is not None:
            self._trained_shares.restore(state["shares"])
        self._live.clear()

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

    def _draw(self, domain: _Domain, position: int, prompt: Prompt) -> Prompt:
        if self._selection.order == "near_half":
            self._curriculum.begin(prompt.uid)
        self._drawn[domain.name] = position + 1
        return prompt

    def _pick_domain(self) -> _Domain:
        """Smooth weighted round robin: each domain earns its share, the richest one pays."""
        if not self._domains:
            raise DataError("there are no domains to draw from", fix="name one under data.domains")
        trained = self._trained_shares
        shares = trained.weights if trained is not None else self._fixed_shares
        for name, share in shares.items():
            self._credit[name] += share
        richest = max(self._credit, key=lambda name: self._credit[name])
        self._credit[richest] -= sum(shares.values())
        return self._domains[richest]

    def _ahead(self, domain: _Domain) -> Iterator[tuple[int, Prompt]]:
        """What comes next in the domain's order, without the retired, and each where it stands.

        Goes to the end of the next epoch, by which every prompt has come; at least one is not
        retired, so there is a first.
        """
        start, size = self._drawn[domain.name], len(domain.prompts)
        for epoch in (start // size, start // size + 1):
            order, live = self._order_of(domain, epoch), self._live_of(domain, epoch)
            for n in range(bisect_left(live, start - epoch * size), len(live)):
                yield epoch * size + live[n], domain.prompts[order[live[n]]]

    def _near_half(self, domain: _Domain, position: int) -> Prompt | None:
        """Of the next `window` prompts the one to draw; None where all are under way.

        The window moves on by one at each draw, whichever prompt is taken: each is a candidate for
        `window` draws of an epoch, drawn in several of them or in none.
        """
        candidates = list(islice(self._not_under_way(domain), self._selection.window))
        if not candidates:
            return None
        key = stable_hash(self._seed, domain.name, "near_half", position)
        uids = [prompt.uid for prompt in candidates]
        return candidates[self._curriculum.choose(uids, domain=domain.name, key=key)]

    def _not_under_way(self, domain: _Domain) -> Iterator[Prompt]:
        """What comes next, each prompt once, without those whose last group is not learned from:
        so a step has no prompt twice as long as there are others."""
        seen: set[str] = set()
        for _, prompt in self._ahead(domain):
            if prompt.uid not in seen and not self._curriculum.is_under_way(prompt.uid):
                seen.add(prompt.uid)
                yield prompt

    def _live_of(self, domain: _Domain, epoch: int) -> Sequence[int]:
        """The places of the epoch's order whose prompts are not retired, in order."""
        retired, order = self._curriculum.retired(domain.name), self._order_of(domain, epoch)
        if not retired:
            return range(len(order))
        if (domain.name, epoch) not in self._live:
            self._live[domain.name, epoch] = [
                place for place, row in enumerate(order) if domain.prompts[row].uid not in retired
            ]
        return self._live[domain.name, epoch]

    def _order_of(self, domain: _Domain, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(domain.prompts))
        if (domain.name, epoch) not in self._orders:
            # A draw looks into the epoch that it is in and the next one; older ones never return.
            self._orders.pop((domain.name, epoch - 2), None)
            self._orders[domain.name, epoch] = domain.order(epoch, seed=self._seed)
        return self._orders[domain.name, epoch]


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    """Hash of the usable rows; a value that is not JSON counts by its type alone."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        row = json.dumps([prompt.uid, prompt.row], skipkeys=True, default=lambda v: str(type(v)))
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()

"""PromptStream: an endless, resumable stream of prompts from several sources.

prompts of a domain -> one permutation per epoch -> without retired prompts -> next()
                                                              ^
                    record_group(), update_selection() -> Curriculum
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rollick.config.schema import (
    DataConfig,
    Domain,
    PromptSelectionConfig,
    RlDataConfig,
    TrainingDomain,
)
from rollick.data.curriculum import Curriculum, TrainedShares
from rollick.data.prompt_rows import (
    AnswerKind,
    BadRow,
    CountTokens,
    TokenLimit,
    answer_columns,
    check_source,
    partition_rows,
)
from rollick.data.sources import read_rows
from rollick.errors import DataError
from rollick.types import Group, Prompt, stable_hash

LISTED_BAD_ROWS = 20


@dataclass(frozen=True, slots=True)
class _Domain:
    """The usable prompts of a domain, in file order."""

    name: str
    config: Domain
    prompts: tuple[Prompt, ...]
    fingerprint: str


class PromptStream:
    """Draws prompts without end. Every domain keeps its share over any window of draws."""

    def __init__(
        self,
        data: DataConfig[TrainingDomain],
        domains: Sequence[_Domain],
        *,
        seed: int,
        bad_rows: Sequence[BadRow],
    ) -> None:
        self.bad_rows = bad_rows[:LISTED_BAD_ROWS]
        self._bad_row_count = len(bad_rows)
        self._domains = {domain.name: domain for domain in domains}
        self._seed = seed
        self._shuffle = data.shuffle
        is_rl = isinstance(data, RlDataConfig)
        selection = data.selection if is_rl else PromptSelectionConfig()
        self._near_half_window = selection.near_half_window
        self._curriculum = Curriculum(selection, self.sizes)
        self._fixed_shares = {
            name: domain.config.share if isinstance(domain.config, TrainingDomain) else 1.0
            for name, domain in self._domains.items()
        }
        is_adaptive = is_rl and data.shares_of == "trained"
        self._trained_shares = TrainedShares(self._fixed_shares) if is_adaptive else None
        # Position of each domain in its endless order. Retired prompts are skipped.
        self._drawn = dict.fromkeys(self._domains, 0)
        self._credit = dict.fromkeys(self._domains, 0.0)
        self._orders: dict[tuple[str, int], Sequence[int]] = {}
        self._by_uid: dict[str, Prompt] = {}

    @classmethod
    def open(
        cls,
        data: DataConfig[TrainingDomain],
        *,
        seed: int,
        base: Path | None,
        objects: Mapping[str, Any] | None = None,
        validation: bool = False,
        count_tokens: CountTokens | None = None,
        engine_limit: int | None = None,
    ) -> PromptStream:
        """Read every source. Paths are relative to the recipe (`base`), then to the cwd.

        `engine_limit` is the longest prompt that the engines accept, in tokens.
        """
        limit = TokenLimit(data.max_prompt_tokens, "data.max_prompt_tokens")
        if engine_limit is not None and engine_limit < limit.tokens:
            limit = TokenLimit(engine_limit, "the limit of infer.max_length")
        domains, all_bad = list[_Domain](), list[BadRow]()
        base, purpose = base or Path.cwd(), "held_out" if validation else "train"
        for name, config in (data.validation if validation else data.domains).items():
            rows = read_rows(config, base=base, objects=objects or {}, purpose=purpose)
            prompts, bad = partition_rows(name, config, rows, count_tokens, limit)
            check_source(name, config, usable=len(prompts), bad=bad, allowed=data.max_bad_rows)
            domains.append(_Domain(name, config, tuple(prompts), _fingerprint(prompts)))
            all_bad += bad
        return cls(data, domains, seed=seed, bad_rows=all_bad)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: len(domain.prompts) for name, domain in self._domains.items()}

    def next(self) -> Prompt:
        """The next prompt. A domain starts its next epoch after its last row."""
        domain = self._pick_domain()
        position, prompt = next(self._upcoming_prompts(domain))
        if self._near_half_window:
            prompt = self._choose_near_half(domain, position) or prompt
        return self._draw(domain, position, prompt)

    def redraw(self, uid: str) -> Prompt:
        """Draw the prompt with this uid instead of the next one. A resumed run repeats its draws
        this way; later draws are unaffected."""
        if not self._by_uid:
            self._by_uid = {prompt.uid: prompt for prompt in self.all()}
        prompt = self._by_uid.get(uid)
        if prompt is None:
            raise DataError(
                f"prompt {uid!r}, which the run drew before it stopped, does not exist any more",
                fix="restore the old rows, or start a new run",
            )
        domain = self._pick_domain()
        position, _ = next(self._upcoming_prompts(domain))
        return self._draw(domain, position, prompt)

    def record_group(self, group: Group, *, kept: bool = True) -> None:
        """Record a scored group, trained on (`kept`) or dropped. Call once for each group."""
        self._curriculum.record_group(group)
        if self._trained_shares is not None:
            self._trained_shares.record(group.prompt.domain, kept=kept)

    def update_selection(self) -> None:
        """Use the recorded groups for later draws.

        Call between steps, so that the order in which groups finish cannot change the draws.
        """
        self._curriculum.update()
        if self._trained_shares is not None:
            self._trained_shares.update()

    def metrics(self) -> dict[str, float]:
        return {"data/quarantined": float(self._bad_row_count)} | self._curriculum.metrics()

    def all(self) -> list[Prompt]:
        """All usable prompts by domain, in file order. Does not advance the stream."""
        return [prompt for domain in self._domains.values() for prompt in domain.prompts]

    def answers_of(self, prompt: Prompt, *kinds: AnswerKind) -> list[str]:
        """The answer to imitate (SFT, distillation), or the chosen and the rejected one (DPO)."""
        columns = answer_columns(self._domains[prompt.domain].config)
        for kind in kinds:
            if kind not in columns:
                raise DataError(
                    f"domain {prompt.domain!r} has no {kind} column",
                    fix=f"set data.domains.{prompt.domain}.{kind} to the column with the answers",
                )
        return [prompt.row[columns[kind]] for kind in kinds]

    def state(self) -> dict[str, Any]:
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
        """Continue from a state. Raises if the rows or their order differ."""
        saved: Mapping[str, Mapping[str, Any]] = state["domains"]
        self._check_same_order(state)
        for name, domain in self._domains.items():
            if saved[name]["fingerprint"] != domain.fingerprint:
                counts = f"{saved[name]['rows']} usable rows then, {len(domain.prompts)} now"
                source = f"domain {name!r} ({domain.config.source})"
                raise DataError(
                    f"the rows of {source} differ from those of the saved run: {counts}",
                    fix="restore the old rows (generators must repeat theirs), or start a new run",
                )
        self._drawn = {name: int(saved[name]["drawn"]) for name in self._domains}
        self._credit = {name: float(saved[name]["credit"]) for name in self._domains}
        self._curriculum.restore(state["curriculum"])
        if self._trained_shares is not None and state["shares"] is not None:
            self._trained_shares.restore(state["shares"])

    def _check_same_order(self, state: Mapping[str, Any]) -> None:
        if set(state["domains"]) != set(self._domains):
            raise DataError(
                f"the saved run has the domains {', '.join(state['domains'])}, "
                f"this one {', '.join(self._domains) or 'none'}",
                fix="resume with the same data.domains, or start a new run",
            )
        for key, value in {"seed": self._seed, "shuffle": self._shuffle}.items():
            if state[key] != value:
                raise DataError(
                    f"the saved run has {key}={state[key]}, this one {value}",
                    fix=f"resume with {key}={state[key]}, or start a new run",
                )

    def _draw(self, domain: _Domain, position: int, prompt: Prompt) -> Prompt:
        if self._near_half_window:
            self._curriculum.in_flight[prompt.uid] += 1
        self._drawn[domain.name] = position + 1
        return prompt

    def _pick_domain(self) -> _Domain:
        """Smooth weighted round robin: add each domain's share to its credit, choose the domain
        with the most credit, and subtract the sum of all shares from it."""
        if not self._domains:
            raise DataError("there are no domains to draw from", fix="add one to data.domains")
        shares = self._trained_shares.weights if self._trained_shares else self._fixed_shares
        for name, share in shares.items():
            self._credit[name] += share
        chosen = max(self._credit, key=lambda name: self._credit[name])
        self._credit[chosen] -= sum(shares.values())
        return self._domains[chosen]

    def _upcoming_prompts(self, domain: _Domain) -> Iterator[tuple[int, Prompt]]:
        """The next prompts of the domain with their positions, without retired ones.

        Ends with the next epoch, so that every prompt occurs. At least one is not retired.
        """
        start, size = self._drawn[domain.name], len(domain.prompts)
        retired = self._curriculum.retired(domain.name)
        for position in range(start, (start // size + 2) * size):
            epoch, n = divmod(position, size)
            prompt = domain.prompts[self._order_of(domain, epoch)[n]]
            if prompt.uid not in retired:
                yield position, prompt

    def _choose_near_half(self, domain: _Domain, position: int) -> Prompt | None:
        """The prompt to draw from the next `window` ones; None if all are in flight.

        Every draw moves the window by one, whichever prompt it chooses. So each prompt is a
        candidate for `window` draws per epoch, and may be drawn several times or never.
        """
        candidates = list(islice(self._idle_prompts(domain), self._near_half_window))
        if not candidates:
            return None
        key = stable_hash(self._seed, domain.name, "near_half", position)
        uids = [prompt.uid for prompt in candidates]
        return candidates[self._curriculum.choose(uids, domain=domain.name, key=key)]

    def _idle_prompts(self, domain: _Domain) -> Iterator[Prompt]:
        """The next prompts, each once, without those in flight: a step repeats a prompt only if
        there is no other."""
        seen: set[str] = set()
        for _, prompt in self._upcoming_prompts(domain):
            if prompt.uid not in seen and not self._curriculum.in_flight[prompt.uid]:
                seen.add(prompt.uid)
                yield prompt

    def _order_of(self, domain: _Domain, epoch: int) -> Sequence[int]:
        """The permutation of an epoch, determined by seed, domain and epoch."""
        if not self._shuffle:
            return range(len(domain.prompts))
        if (domain.name, epoch) not in self._orders:
            # Draws use the present epoch and the next one only.
            self._orders.pop((domain.name, epoch - 2), None)
            # Sorts raw Philox words: numpy guarantees their stream, but not that of `shuffle`.
            words = np.random.Philox(key=stable_hash(self._seed, domain.name, epoch))
            order = np.argsort(words.random_raw(len(domain.prompts)), kind="stable")
            self._orders[domain.name, epoch] = order.tolist()
        return self._orders[domain.name, epoch]


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    """Hash of the usable rows. A value that JSON cannot hold is hashed by its type."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        row = json.dumps([prompt.uid, prompt.row], skipkeys=True, default=lambda v: str(type(v)))
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()

"""Filling rows of the cache with what their sequences begin with: copied where it is known,
computed where it is not.

Owns which row copies from which, and in what order; does not own who is admitted (runner.py).
Rows are filled in waves. Most are in wave 0; a row that begins like one of the same wave and then
goes on differently is computed in the next, after a copy.

    find(context) -> add(row, context, found) ... -> run: wave 0, copies, wave 1, copies
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollick.infer.native.cache import SlotCache
from rollick.infer.native.forward import Forward, Prefix
from rollick.infer.native.rows import Found, Rows

WORTH_A_COPY = 4
"""Tokens that must be shared before they are copied instead of computed."""
WORTH_A_WAVE = 32
"""The same, where the copy makes another forward necessary."""

Context = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Copy:
    source: int
    target: int
    length: int
    after: int
    """The wave after which the source has what is copied."""


class Filling:
    """What one step puts into the cache. `budget` is the most tokens of one forward."""

    def __init__(self, rows: Rows, cache: SlotCache, forward: Forward, *, budget: int) -> None:
        self.computed_tokens = 0
        self._rows = rows
        self._cache = cache
        self._forward = forward
        self._budget = budget
        self._waves: defaultdict[int, list[Prefix]] = defaultdict(list)
        self._copies: list[_Copy] = []
        self._ready: dict[int, int] = {}
        """The wave after which a row of this step has its keys and values."""

    def find(self, context: Context) -> Found:
        """The best row to copy the context's beginning from; shares 0 where none is worth it."""
        found = self._rows.longest_prefix(context)
        if self._is_worth(found, context):
            return found
        # A row that is computed late would make this one later still: look at the others.
        early = [row for row in np.flatnonzero(self._rows.held) if not self._ready.get(row)]
        found = self._rows.longest_prefix(context, among=np.asarray(early, np.int64))
        return found if self._is_worth(found, context) else Found(0, 0)

    def _is_worth(self, found: Found, context: Context) -> bool:
        whole = found.shared == len(context) - 1
        ready = self._ready.get(found.row)
        if ready is None or whole:
            return whole or found.shared >= WORTH_A_COPY
        return ready == 0 and found.shared >= WORTH_A_WAVE

    def add(self, row: int, context: Context, found: Found) -> None:
        """`row` will hold all of the context but its last token, as far as shared from `found`."""
        self._reserve(row, len(context))
        wanted, shared = context[:-1], found.shared
        ready = self._ready.get(found.row) if shared else None
        if ready is not None:
            self._copies.append(_Copy(found.row, row, shared, ready))
        elif shared and found.row != row:
            # At once: a later row of this step may be put where the source is.
            self._cache.copy(found.row, [row], length=shared)
        wave = 0 if ready is None else ready
        if shared < len(wanted):
            wave += ready is not None
            self._waves[wave].append(Prefix(row, wanted[shared:], start=shared))
        if ready is not None or shared < len(wanted):
            self._ready[row] = wave

    def run(self) -> None:
        """Compute and copy what was added."""
        for wave in range(max(self._ready.values(), default=-1) + 1):
            for prefixes in _forwards(self._waves[wave], self._budget):
                self._forward.prefill(prefixes)
                self.computed_tokens += sum(len(prefix.token_ids) for prefix in prefixes)
            self._copy_after(wave)

    def _copy_after(self, wave: int) -> None:
        targets: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for copy in self._copies:
            if copy.after == wave:
                targets[copy.source, copy.length].append(copy.target)
        for (source, length), rows in targets.items():
            self._cache.copy(source, rows, length=length)

    def _reserve(self, row: int, length: int) -> None:
        self._cache.reserve(slots=row + 1, length=length)


def _forwards(prefixes: Sequence[Prefix], budget: int) -> list[list[Prefix]]:
    """Cut into forwards of at most `budget` tokens; a longer prefix goes through in parts."""
    forwards: list[list[Prefix]] = []
    room = 0
    for whole in prefixes:
        for first in range(0, len(whole.token_ids), budget):
            part = Prefix(
                whole.row, whole.token_ids[first : first + budget], start=whole.start + first
            )
            if len(part.token_ids) > room:
                forwards.append([])
                room = budget
            forwards[-1].append(part)
            room -= len(part.token_ids)
    return forwards

"""Plans one step's prefills: copy the prefixes that the cache has, compute the rest.

Rows are computed in waves. Most are in wave 0; a row that shares a prefix with a row of wave 0 and
then differs is computed in the next wave, after a copy.

    find_prefix(context) -> add(row, context, prefix) ... -> run: wave 0, copies, wave 1, copies
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollick.infer.native.forward import Forward, PrefillChunk
from rollick.infer.native.sequence_table import NO_MATCH, PrefixMatch, SequenceTable
from rollick.infer.native.slot_cache import SlotCache

MIN_COPY = 4
"""The shortest prefix that is copied instead of computed."""
MIN_COPY_IN_NEXT_WAVE = 32
"""The same, if the copy needs another forward."""

Context = npt.NDArray[np.int32]


class PrefillPlan:
    """The prefills of one step. `budget`: the maximum tokens of one forward."""

    def __init__(
        self, table: SequenceTable, cache: SlotCache, forward: Forward, *, budget: int
    ) -> None:
        self._table = table
        self._cache = cache
        self._forward = forward
        self._budget = budget
        self._waves: defaultdict[int, list[PrefillChunk]] = defaultdict(list)
        self._copies: defaultdict[int, defaultdict[PrefixMatch, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        """For the wave that computes the source: each prefix, and the rows that copy it."""
        self._wave_of: dict[int, int] = {}
        """The wave after which a row of this step is cached."""

    def find_prefix(self, context: Context) -> PrefixMatch:
        """The best row to copy the start of the context from; of length 0 if none pays off."""
        match = self._table.longest_prefix(context)
        if self._pays_off(match, context):
            return match
        # Copying from a row of a later wave would delay this one further: try the other rows.
        early = [row for row in np.flatnonzero(self._table.cached) if not self._wave_of.get(row)]
        match = self._table.longest_prefix(context, rows=np.asarray(early, np.int64))
        return match if self._pays_off(match, context) else NO_MATCH

    def _pays_off(self, match: PrefixMatch, context: Context) -> bool:
        is_complete = match.length == len(context) - 1
        wave = self._wave_of.get(match.row)
        if wave is None or is_complete:
            return is_complete or match.length >= MIN_COPY
        return wave == 0 and match.length >= MIN_COPY_IN_NEXT_WAVE

    def add(self, row: int, context: Context, prefix: PrefixMatch) -> None:
        """Plan that `row` caches the context without its last token, copying the prefix."""
        self._cache.reserve(slots=row + 1, length=len(context))
        tokens, copied = context[:-1], prefix.length
        source_wave = self._wave_of.get(prefix.row) if copied else None
        if source_wave is not None:
            self._copies[source_wave][prefix].append(row)
        elif copied and prefix.row != row:
            # Copy now, because a later row of this step may overwrite the source.
            self._cache.copy(prefix.row, [row], length=copied)
        wave = 0 if source_wave is None else source_wave
        if copied < len(tokens):
            wave += source_wave is not None
            self._waves[wave].append(PrefillChunk(row, tokens[copied:], start=copied))
        if source_wave is not None or copied < len(tokens):
            self._wave_of[row] = wave

    def run(self) -> int:
        """Run the plan; returns the number of tokens computed."""
        computed_tokens = 0
        for wave in range(max(self._wave_of.values(), default=-1) + 1):
            for chunks in _split_forwards(self._waves[wave], self._budget):
                self._forward.prefill(chunks)
                computed_tokens += sum(len(chunk.token_ids) for chunk in chunks)
            for (source, length), rows in self._copies[wave].items():
                self._cache.copy(source, rows, length=length)
        return computed_tokens


def _split_forwards(chunks: Sequence[PrefillChunk], budget: int) -> list[list[PrefillChunk]]:
    """Forwards of at most `budget` tokens; a longer chunk is split."""
    forwards: list[list[PrefillChunk]] = []
    remaining = 0
    for chunk in chunks:
        for offset in range(0, len(chunk.token_ids), budget):
            token_ids = chunk.token_ids[offset : offset + budget]
            part = PrefillChunk(chunk.row, token_ids, start=chunk.start + offset)
            if len(part.token_ids) > remaining:
                forwards.append([])
                remaining = budget
            forwards[-1].append(part)
            remaining -= len(part.token_ids)
    return forwards

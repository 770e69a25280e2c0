"""When a sequence ends: stop ids, stop strings, limits; and what may not end it yet.

Works on the table of rows after their new tokens were written, for the runners of CPU and GPU
alike. A GPU knows the engine's stop ids and the limits by itself; what only the host knows ends a
row a launch later there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.infer.native.rows import Job, Rows
from rollick.infer.native.sampler import Bias
from rollick.types import StopReason

Decode = Callable[[Sequence[int]], str]
RowNumbers = npt.NDArray[np.intp]

_TAIL_MARGIN = 4
"""Tokens looked at besides a stop string's own: some decode to nothing, or lose a leading space."""


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a sequence besides its length: token ids, and strings where text can be read."""

    ids: tuple[int, ...]
    text_of: Decode | None = None


def stop_tail(stops: Sequence[str]) -> int:
    """How many of the last tokens surely hold the longest string: none is less than a byte."""
    return max(len(stop.encode()) for stop in stops) + _TAIL_MARGIN


class Endings:
    """The rules of one engine."""

    def __init__(self, stops: Stops, *, max_length: int) -> None:
        self.ids = np.asarray(sorted(set(stops.ids)), np.int64)
        self.text_of = stops.text_of
        self._max_length = max_length

    def before_start(self, job: Job) -> StopReason | None:
        """A continued request may already have all the tokens it can get."""
        earlier = job.request.continue_from
        if earlier is None or len(earlier.token_ids) == 0:
            return None
        last = int(earlier.token_ids[-1])
        if last in self.ids or last in job.request.sampling.stop_ids:
            return StopReason.STOP
        full = len(job.context) >= job.length_limit(self._max_length)
        return StopReason.LENGTH if full else None

    def of(
        self, table: Rows, rows: RowNumbers, tokens: npt.NDArray[np.integer[Any]]
    ) -> list[tuple[int, StopReason]]:
        """Rows that ended with the tokens just written."""
        stopped = np.isin(tokens, self.ids)
        for number in np.flatnonzero(table.own_stops[rows]).tolist():
            own = table.job(int(rows[number])).request.sampling.stop_ids
            stopped[number] |= int(tokens[number]) in own
        late = table.length[rows] >= table.min_length[rows]
        for number in np.flatnonzero(table.watches_text[rows] & late).tolist():
            stopped[number] |= self._ends_with_text(table, int(rows[number]))
        ended = stopped | (table.length[rows] >= table.limit[rows])
        return [
            (int(rows[number]), StopReason.STOP if stopped[number] else StopReason.LENGTH)
            for number in np.flatnonzero(ended).tolist()
        ]

    def bias(self, table: Rows, rows: RowNumbers, ahead: npt.NDArray[np.int64]) -> Bias | None:
        """What requests add to logits, and -inf for what may not end a sequence yet.

        `ahead` is the length of each row with the tokens that the host has not seen."""
        parts: list[Bias] = []
        early = ahead < table.min_length[rows]
        for number in np.flatnonzero(table.biased[rows] | early).tolist():
            row = int(rows[number])
            sampling = table.job(row).request.sampling
            ends = [*self.ids.tolist(), *sampling.stop_ids] if early[number] else []
            entries = [*sampling.logit_bias, *((token, float("-inf")) for token in ends)]
            parts.append(
                Bias(
                    np.full(len(entries), row, np.int64),
                    np.asarray([token for token, _ in entries], np.int64),
                    np.asarray([value for _, value in entries], np.float32),
                )
            )
        return Bias.join(parts)

    def _ends_with_text(self, table: Rows, row: int) -> bool:
        """Whether the last tokens hold a stop string; a string ends with the token just drawn."""
        assert self.text_of is not None
        stops = table.job(row).request.sampling.stop
        first = max(int(table.prompt[row]), int(table.length[row]) - stop_tail(stops))
        text = self.text_of(table.tokens[row, first : table.length[row]].tolist())
        return any(stop in text for stop in stops)

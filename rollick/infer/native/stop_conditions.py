"""When a sequence ends: stop ids, stop strings, length limits, and `min_tokens`.

PagedRunner checks the engine's stop ids and the length limits on the device. The other conditions
end a row one launch later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.infer.engine import StopRules
from rollick.infer.native.sampler import LogitBias, RowIndices
from rollick.infer.native.sequence_table import SequenceTable
from rollick.types import StopReason

_EXTRA_TOKENS = 4
"""Tokens decoded besides a stop string's own: some decode to nothing, or lose a leading space."""


def stop_string_window(stops: Sequence[str]) -> int:
    """How many last tokens can contain the longest stop string: each has at least one byte."""
    return max(len(stop.encode()) for stop in stops) + _EXTRA_TOKENS


class StopConditions:
    def __init__(self, rules: StopRules) -> None:
        self.stop_ids = np.asarray(sorted(set(rules.stop_ids)), np.int64)
        self._decode = rules.decode

    def find_ended(
        self, table: SequenceTable, rows: RowIndices, tokens: npt.NDArray[np.integer[Any]]
    ) -> list[tuple[int, StopReason]]:
        """The rows that end with `tokens`, which were just appended."""
        stopped = np.isin(tokens, self.stop_ids)
        for index in np.flatnonzero(table.has_stop_ids[rows]).tolist():
            stop_ids = table.request(int(rows[index])).request.sampling.stop_ids
            stopped[index] |= int(tokens[index]) in stop_ids
        may_stop = table.length[rows] >= table.min_length[rows]
        for index in np.flatnonzero(table.has_stop_strings[rows] & may_stop).tolist():
            stopped[index] |= self._ends_with_stop_string(table, int(rows[index]))
        ended = stopped | (table.length[rows] >= table.limit[rows])
        return [
            (int(rows[index]), StopReason.STOP if stopped[index] else StopReason.LENGTH)
            for index in np.flatnonzero(ended).tolist()
        ]

    def logit_bias(
        self, table: SequenceTable, rows: RowIndices, length_R: npt.NDArray[np.int64]
    ) -> LogitBias | None:
        """The requests' logit biases, and -inf for stop ids before `min_tokens`. `length_R`
        includes tokens in flight."""
        entries: list[tuple[int, int, float]] = []
        too_short = length_R < table.min_length[rows]
        for index in np.flatnonzero(table.has_bias[rows] | too_short).tolist():
            row = int(rows[index])
            sampling = table.request(row).request.sampling
            banned = [*self.stop_ids.tolist(), *sampling.stop_ids] if too_short[index] else []
            entries += [(row, token, value) for token, value in sampling.logit_bias]
            entries += [(row, token, float("-inf")) for token in banned]
        if not entries:
            return None
        row_B, token_B, value_B = (np.asarray(column) for column in zip(*entries, strict=True))
        return LogitBias(row_B, token_B, value_B.astype(np.float32))

    def _ends_with_stop_string(self, table: SequenceTable, row: int) -> bool:
        assert self._decode is not None
        stops = table.request(row).request.sampling.stop
        prompt_length, length = int(table.prompt_length[row]), int(table.length[row])
        start = max(prompt_length, length - stop_string_window(stops))
        text = self._decode(table.tokens[row, start:length].tolist())
        return any(stop in text for stop in stops)

"""The host's view of the rows on the device: their progress, their pages, and the changes that are
not uploaded yet."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rollick.infer.native.gpu.device_sampler import DeviceState, SamplingField, StateField
from rollick.infer.native.sampler import RowIndices
from rollick.infer.native.sequence_table import SequenceTable
from rollick.models.attention.paged import PAGE, to_device


class RowProgress:
    def __init__(self, *, rows: int, pages: int) -> None:
        self.filled = np.zeros(rows, np.int64)
        """Tokens whose keys and values are in the row's pages, or are being computed."""
        self.active = np.zeros(rows, np.bool_)
        """Rows that sample: all of their tokens but the last are cached."""
        self.in_flight = np.zeros(rows, np.int64)
        """Launched tokens that the host has not read."""
        self.epoch = np.zeros(rows, np.int64)
        """Increments when the row's sequence changes."""
        self.page_count = np.zeros(rows, np.int64)
        self.page_table = np.zeros((rows, pages), np.int32)
        self.pages: list[list[int]] = [[] for _ in range(rows)]
        self._changed: set[int] = set()
        self._pages_changed = False

    def set_pages(self, row: int, pages: Iterable[int]) -> None:
        self.pages[row] = list(pages)
        count = len(self.pages[row])
        self.page_table[row, :count] = self.pages[row]
        self.page_table[row, count : self.page_count[row]] = 0
        self.page_count[row] = count
        self._pages_changed = True

    def add_page(self, row: int, page: int) -> None:
        self.page_table[row, len(self.pages[row])] = page
        self.pages[row].append(page)
        self.page_count[row] += 1
        self._pages_changed = True

    def activate(self, row: int) -> None:
        self.active[row] = True
        self._changed.add(row)

    def reset(self, row: int) -> list[int]:
        """Reset the row; returns the pages that it held."""
        pages = self.pages[row]
        if pages:
            self.set_pages(row, ())
        self.filled[row] = self.in_flight[row] = 0
        self.active[row] = False
        self.epoch[row] += 1
        self._changed.add(row)
        return pages

    def move(self, source: int, target: int) -> None:
        """Move a row. Neither row may have tokens in flight."""
        self.set_pages(target, self.pages[source])
        self.set_pages(source, ())
        for column in (self.filled, self.active):
            column[target] = column[source]
        self.active[source] = False
        for row in (source, target):
            self.epoch[row] += 1
            self._changed.add(row)

    def clear(self) -> None:
        for row in range(len(self.pages)):
            self.reset(row)
        self._changed.clear()
        self._pages_changed = False

    def next_rows(self, table: SequenceTable) -> tuple[RowIndices, RowIndices]:
        """Rows that sample another token, and those of them that have no page for it."""
        next_length = table.length[: table.count] + self.in_flight[: table.count]
        is_sampling = self.active[: table.count] & (next_length < table.limit[: table.count])
        without_page = is_sampling & (-(-next_length // PAGE) > self.page_count[: table.count])
        return np.flatnonzero(is_sampling), np.flatnonzero(without_page)

    def upload(self, device_state: DeviceState, table: SequenceTable, *, device: str) -> None:
        if self._pages_changed:
            device_state.page_table.copy_(to_device(self.page_table, device), non_blocking=True)
            self._pages_changed = False
        if not self._changed:
            return
        rows = np.asarray(sorted(self._changed), np.int64)
        self._changed.clear()
        state, sampling = self._make_columns(rows, table)
        index = to_device(rows, device)
        device_state.state[:, index] = to_device(state, device)
        device_state.sampling[:, index] = to_device(sampling, device)

    def _make_columns(
        self, rows: npt.NDArray[np.int64], table: SequenceTable
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The state and sampling columns of these rows; an inactive row has length 1."""
        table_rows = rows[rows < len(table.requests)]
        state = np.zeros((len(StateField), len(rows)), np.int64)
        sampling = np.zeros((len(SamplingField), len(rows)), np.float32)
        columns = slice(len(table_rows))
        active = self.active[table_rows]
        length = np.where(active, table.length[table_rows], 1)
        state[StateField.LENGTH] = 1
        state[StateField.TOKEN, columns] = table.tokens[table_rows, length - 1]
        state[StateField.LENGTH, columns] = length
        state[StateField.PROMPT, columns] = table.prompt_length[table_rows]
        state[StateField.LIMIT, columns] = table.limit[table_rows]
        state[StateField.STREAM, columns] = table.stream[table_rows].view(np.int64)
        state[StateField.ACTIVE, columns] = active
        state[StateField.TOP_K, columns] = table.top_k[table_rows]
        sampling[SamplingField.TEMPERATURE, columns] = table.temperature[table_rows]
        sampling[SamplingField.TOP_P, columns] = table.top_p[table_rows]
        sampling[SamplingField.MIN_P, columns] = table.min_p[table_rows]
        return state, sampling

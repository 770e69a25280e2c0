"""The host's view of the rows on the device: their progress, their pages, and the changes that were
not uploaded yet."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rollick.infer.native.gpu.device_sampler import DeviceState, SamplingField, StateField
from rollick.infer.native.sampler import Rows
from rollick.infer.native.sequence_table import SequenceTable
from rollick.models.attention.paged import PAGE, to_device


class RowProgress:
    def __init__(self, *, width: int, pages: int) -> None:
        self.filled = np.zeros(width, np.int64)
        """Tokens whose keys and values are in the row's pages, or are being computed."""
        self.active = np.zeros(width, np.bool_)
        """Rows that sample: all but their last token is cached."""
        self.in_flight = np.zeros(width, np.int64)
        """Tokens that were launched and that the host has not read."""
        self.epoch = np.zeros(width, np.int64)
        """Changes with the sequence in the row."""
        self.page_count = np.zeros(width, np.int64)
        self.page_table = np.zeros((width, pages), np.int32)
        self.pages: list[list[int]] = [[] for _ in range(width)]
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

    def next_rows(self, table: SequenceTable) -> tuple[Rows, Rows]:
        """Rows that sample another token, and those of them that have no page for it."""
        ahead = table.length[: table.count] + self.in_flight[: table.count]
        samples = self.active[: table.count] & (ahead < table.limit[: table.count])
        without_page = samples & (-(-ahead // PAGE) > self.page_count[: table.count])
        return np.flatnonzero(samples), np.flatnonzero(without_page)

    def upload(self, device_state: DeviceState, table: SequenceTable, *, device: str) -> None:
        if self._pages_changed:
            device_state.page_table.copy_(to_device(self.page_table, device), non_blocking=True)
            self._pages_changed = False
        if not self._changed:
            return
        rows = np.asarray(sorted(self._changed), np.int64)
        self._changed.clear()
        state, sampling = self._columns(rows, table)
        index = to_device(rows, device)
        device_state.state[:, index] = to_device(state, device)
        device_state.sampling[:, index] = to_device(sampling, device)

    def _columns(
        self, rows: npt.NDArray[np.int64], table: SequenceTable
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The device's state of these rows; an inactive row has length 1."""
        known = rows[rows < len(table.requests)]
        state = np.zeros((len(StateField), len(rows)), np.int64)
        sampling = np.zeros((len(SamplingField), len(rows)), np.float32)
        first = slice(len(known))
        active = self.active[known]
        length = np.where(active, table.length[known], 1)
        state[StateField.LENGTH] = 1
        state[StateField.TOKEN, first] = table.tokens[known, length - 1]
        state[StateField.LENGTH, first] = length
        state[StateField.PROMPT, first] = table.prompt[known]
        state[StateField.LIMIT, first] = table.limit[known]
        state[StateField.STREAM, first] = table.stream[known].view(np.int64)
        state[StateField.ACTIVE, first] = active
        state[StateField.TOP_K, first] = table.top_k[known]
        sampling[SamplingField.TEMPERATURE, first] = table.temperature[known]
        sampling[SamplingField.TOP_P, first] = table.top_p[known]
        sampling[SamplingField.MIN_P, first] = table.min_p[known]
        return state, sampling

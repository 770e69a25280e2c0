"""How far each row is, and which pages it holds: the host's side of what the device computes.

Owns one array for each property of a row, the pages of each row, and what the device has not been
told yet. Does not own the sequences (rows.py), nor which pages are free (pages.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rollick.infer.native.endings import RowNumbers
from rollick.infer.native.gpu.draw import DeviceRows, Field, Share
from rollick.infer.native.rows import Rows
from rollick.models.paged_attention import PAGE, to_device


class Progress:
    """Of `width` rows, each with room for `pages` pages."""

    def __init__(self, *, width: int, pages: int) -> None:
        self.filled = np.zeros(width, np.int64)
        """Tokens whose keys and values are in the row's pages, or on their way."""
        self.active = np.zeros(width, np.bool_)
        self.flying = np.zeros(width, np.int64)
        """Tokens that were launched and have not arrived."""
        self.epoch = np.zeros(width, np.int64)
        """Tells one sequence of a row from the next."""
        self.page_count = np.zeros(width, np.int64)
        self.table = np.zeros((width, pages), np.int32)
        self.pages: list[list[int]] = [[] for _ in range(width)]
        self._changed: set[int] = set()
        self._table_changed = False

    def set_pages(self, row: int, pages: Iterable[int]) -> None:
        self.pages[row] = list(pages)
        count = len(self.pages[row])
        self.table[row, :count] = self.pages[row]
        self.table[row, count : self.page_count[row]] = 0
        self.page_count[row] = count
        self._table_changed = True

    def add_page(self, row: int, page: int) -> None:
        self.table[row, len(self.pages[row])] = page
        self.pages[row].append(page)
        self.page_count[row] += 1
        self._table_changed = True

    def start(self, row: int) -> None:
        """The row is complete but for its last token: from now on it draws."""
        self.active[row] = True
        self._changed.add(row)

    def empty(self, row: int) -> list[int]:
        """The row holds nothing and is not computed; gives the pages that it held."""
        pages = self.pages[row]
        if pages:
            self.set_pages(row, ())
        self.filled[row] = self.flying[row] = 0
        self.active[row] = False
        self.epoch[row] += 1
        self._changed.add(row)
        return pages

    def move(self, source: int, target: int) -> None:
        """Nothing of either row is flying."""
        self.set_pages(target, self.pages[source])
        self.set_pages(source, ())
        for column in (self.filled, self.active):
            column[target] = column[source]
        self.active[source] = False
        for row in (source, target):
            self.epoch[row] += 1
            self._changed.add(row)

    def clear(self) -> None:
        """All rows are empty and the device knows nothing."""
        for row in range(len(self.pages)):
            self.empty(row)
        self._changed.clear()
        self._table_changed = False

    def draws_next(self, table: Rows) -> tuple[RowNumbers, RowNumbers]:
        """Rows that want one more token, and those of them that have no page for it."""
        ahead = table.length[: table.count] + self.flying[: table.count]
        wants = self.active[: table.count] & (ahead < table.limit[: table.count])
        short = wants & (-(-ahead // PAGE) > self.page_count[: table.count])
        return np.flatnonzero(wants), np.flatnonzero(short)

    def upload(self, there: DeviceRows, table: Rows, *, device: str) -> None:
        """Tell the device of rows that came, ended or moved, and of new pages."""
        if self._table_changed:
            there.table.copy_(to_device(self.table, device), non_blocking=True)
            self._table_changed = False
        if not self._changed:
            return
        rows = np.asarray(sorted(self._changed), np.int64)
        self._changed.clear()
        state, shares = self._columns(rows, table)
        index = to_device(rows, device)
        there.state[:, index] = to_device(state, device)
        there.shares[:, index] = to_device(shares, device)

    def _columns(
        self, rows: npt.NDArray[np.int64], table: Rows
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """What the device is told of these rows; one that is not active stands at the start."""
        known = rows[rows < len(table.jobs)]
        state = np.zeros((len(Field), len(rows)), np.int64)
        shares = np.zeros((len(Share), len(rows)), np.float32)
        here = slice(len(known))
        active = self.active[known]
        length = np.where(active, table.length[known], 1)
        state[Field.LENGTH] = 1
        state[Field.TOKEN, here] = table.tokens[known, length - 1]
        state[Field.LENGTH, here] = length
        state[Field.PROMPT, here] = table.prompt[known]
        state[Field.LIMIT, here] = table.limit[known]
        state[Field.STREAM, here] = table.stream[known].view(np.int64)
        state[Field.ACTIVE, here] = active
        state[Field.TOP_K, here] = table.top_k[known]
        shares[Share.TEMPERATURE, here] = table.temperature[known]
        shares[Share.TOP_P, here] = table.top_p[known]
        shares[Share.MIN_P, here] = table.min_p[known]
        return state, shares


def is_cut(table: Rows, rows: RowNumbers) -> bool:
    """Whether one of these rows cannot draw every token."""
    cuts = (table.top_k[rows] > 0) | (table.top_p[rows] < 1) | (table.min_p[rows] > 0)
    return bool((cuts & (table.temperature[rows] > 0)).any())

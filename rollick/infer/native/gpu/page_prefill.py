"""The prefill queue: sequences (rows) that are not yet in the KV cache.

queued row -> pages (reused for a cached prefix, else new) -> prefilled in chunks, within each
step's token budget -> active: all tokens but the last are cached; the next decode caches that one
"""

from __future__ import annotations

from collections import deque

from rollick.infer.native.gpu.forward import PagedChunk, PagedForward
from rollick.infer.native.gpu.page_pool import PagePool
from rollick.infer.native.gpu.row_progress import RowProgress
from rollick.infer.native.sequence_table import SequenceTable
from rollick.models.attention.paged import PAGE


class PrefillQueue:
    def __init__(self, table: SequenceTable, progress: RowProgress, forward: PagedForward) -> None:
        self.rows: deque[int] = deque()
        self._table = table
        self._progress = progress
        self._forward = forward

    def run(self, pool: PagePool, *, budget: int) -> int:
        """Prefill at most `budget` tokens; returns the number of tokens computed."""
        chunks: list[PagedChunk] = []
        copies: list[tuple[int, int]] = []
        progress, remaining = self._progress, budget
        while self.rows and remaining > 0:
            row = self.rows[0]
            if not progress.pages[row] and not self._allocate_pages(row, pool, copies):
                break
            target, start = int(self._table.length[row]) - 1, int(progress.filled[row])
            stop = min(target, start + remaining)
            if stop > start:
                tokens = self._table.tokens[row, start:stop].copy()
                chunks.append(PagedChunk(list(progress.pages[row]), tokens, start))
                remaining -= stop - start
                progress.filled[row] = stop
                self.index_prefix(row, pool)
            if stop == target:
                self.rows.popleft()
                progress.activate(row)
        if chunks:
            self._forward.prefill(chunks)
        if copies:
            self._forward.copy_pages(copies)
            pool.release([source for source, _ in copies])
        return budget - remaining

    def index_prefix(self, row: int, pool: PagePool) -> None:
        """Add the row's filled pages to the prefix cache, for reuse by other sequences."""
        filled = int(self._progress.filled[row])
        pool.index_prefix(self._table.tokens[row, :filled], self._progress.pages[row])

    def _allocate_pages(self, row: int, pool: PagePool, copies: list[tuple[int, int]]) -> bool:
        """Allocate pages for all tokens of a row, reusing cached prefix pages. Returns False if the
        pool has too few free pages."""
        length = int(self._table.length[row])
        tokens = self._table.tokens[row, : length - 1]
        cached = pool.find_prefix(tokens)
        # Includes the partly filled last page: until it is copied, it must not be reallocated.
        shared = [page for page in (*cached.pages, cached.last_page) if page is not None]
        for page in shared:
            pool.share(page)
        new_pages = pool.allocate(-(-length // PAGE) - len(cached.pages))
        if new_pages is None:
            pool.release(shared)
            return False
        self._progress.filled[row] = len(cached.pages) * PAGE
        if cached.last_page is not None:
            copies.append((cached.last_page, new_pages[0]))
            self._progress.filled[row] = len(tokens)
        self._progress.set_pages(row, [*cached.pages, *new_pages])
        return True

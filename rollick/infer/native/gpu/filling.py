"""How rows get the keys and values of their contexts: found in the pool, copied, or computed.

Owns the order in which rows wait for that. Does not own the pages or the forward.

    row waits -> pages (those that hold its beginning, and new ones) -> parts of it computed, as far
    as a step's budget reaches -> complete but for its last token, which the next decode feeds
"""

from __future__ import annotations

from collections import deque

from rollick.infer.native.gpu.forward import Chunk, PagedForward
from rollick.infer.native.gpu.pages import PagePool
from rollick.infer.native.gpu.progress import Progress
from rollick.infer.native.rows import Rows
from rollick.models.paged_attention import PAGE


class PageFilling:
    """The rows that wait for their contexts, first come first served."""

    def __init__(self, rows: Rows, progress: Progress, cache: PagedForward) -> None:
        self.queue: deque[int] = deque()
        self._rows = rows
        self._progress = progress
        self._cache = cache

    def run(self, pool: PagePool, *, budget: int) -> int:
        """Fill rows in their order; gives the number of tokens that were computed."""
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        progress, left = self._progress, budget
        while self.queue and left > 0:
            row = self.queue[0]
            if not progress.pages[row] and not self._take_pages(row, pool, copies):
                break
            goal, start = int(self._rows.length[row]) - 1, int(progress.filled[row])
            stop = min(goal, start + left)
            if stop > start:
                tokens = self._rows.tokens[row, start:stop].copy()
                chunks.append(Chunk(list(progress.pages[row]), tokens, start))
                left -= stop - start
                progress.filled[row] = stop
                self.remember(row, pool)
            if stop == goal:
                self.queue.popleft()
                progress.start(row)
        if chunks:
            self._cache.prefill(chunks)
        if copies:
            self._cache.copy_pages(copies)
            pool.release([source for source, _ in copies])
        return budget - left

    def remember(self, row: int, pool: PagePool) -> None:
        """Others may begin with what the row's pages hold."""
        filled = int(self._progress.filled[row])
        pool.remember(self._rows.tokens[row, :filled], self._progress.pages[row])

    def _take_pages(self, row: int, pool: PagePool, copies: list[tuple[int, int]]) -> bool:
        """Pages for all of a row's tokens: those that hold its beginning, and new ones."""
        length = int(self._rows.length[row])
        tokens = self._rows.tokens[row, : length - 1]
        found = pool.match(tokens)
        for page in found.pages:
            pool.share(page)
        if found.rest is not None:
            # Kept until it was copied, or it might be given to another row of this step.
            pool.share(found.rest)
        new = pool.allocate(-(-length // PAGE) - len(found.pages))
        if new is None:
            pool.release([*found.pages, *([found.rest] if found.rest is not None else [])])
            return False
        self._progress.filled[row] = len(found.pages) * PAGE
        if found.rest is not None:
            copies.append((found.rest, new[0]))
            self._progress.filled[row] = len(tokens)
        self._progress.set_pages(row, [*found.pages, *new])
        return True

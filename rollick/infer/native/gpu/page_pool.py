"""The allocation of cache pages, and the index of the prefixes they hold.

Page 0 is never allocated: unused rows write there. Sequences with a common prefix share its full
pages. The last page of a prefix, which is not full, is copied by each sequence that continues it. A
page without users keeps its content until it is allocated again, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from rollick.models.attention.paged import PAGE

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    pages: tuple[int, ...]
    """Full pages, which can be shared."""
    last_page: int | None = None
    """A page that starts with all remaining tokens, to be copied."""


class PagePool:
    """Allocates pages 1..count-1."""

    def __init__(self, count: int) -> None:
        # OrderedDict: removing from the front of a dict gets slower with each removal.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        self._users = [0] * count
        self._page_of: dict[bytes, int] = {}
        self._keys_of: dict[int, list[bytes]] = {}
        self.count = count

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """The capacity of all pages, in tokens."""
        return (self.count - 1) * PAGE

    def allocate(self, count: int) -> list[int] | None:
        """Allocate pages with one user each; None if too few are free."""
        if count > len(self._free):
            return None
        pages: list[int] = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            self._users[page] = 1
            for key in self._keys_of.pop(page, ()):
                del self._page_of[key]
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        if self._users[page] == 0:
            del self._free[page]
        self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        # Reversed: the last pages of a sequence are the least likely to be reused.
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free[page] = None

    def find_prefix(self, tokens: Tokens) -> CachedPrefix:
        pages: list[int] = []
        for index, key in enumerate(_prefix_keys(tokens)):
            page = self._page_of.get(key)
            if index == len(tokens) // PAGE:
                return CachedPrefix(tuple(pages), page)
            if page is None:
                break
            pages.append(page)
        return CachedPrefix(tuple(pages))

    def index_prefix(self, tokens: Tokens, pages: Sequence[int]) -> None:
        """Record that these pages hold the keys and values of `tokens`."""
        for key, page in zip(_prefix_keys(tokens), pages, strict=False):
            if key not in self._page_of:
                self._page_of[key] = page
                self._keys_of.setdefault(page, []).append(key)

    def forget_prefixes(self) -> None:
        """Drop the index after a change of weights: no page can be reused."""
        self._page_of.clear()
        self._keys_of.clear()


def _prefix_keys(tokens: Tokens) -> Iterator[bytes]:
    """A key of the tokens up to the end of each page; the last page may not be full."""
    key = b""
    for start in range(0, len(tokens), PAGE):
        key = blake2b(key + tokens[start : start + PAGE].tobytes(), digest_size=16).digest()
        yield key

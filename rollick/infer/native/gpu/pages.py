"""Which page of the cache belongs to whom, and which prefix it holds.

Owns the free pages, how often each one is used, and an index from a prefix of tokens to the pages
that hold its keys and values. Knows neither tensors nor requests. Page 0 belongs to nobody: rows
that are not in use write there.

A full page is shared by all sequences that begin alike. The last page of a prefix, not yet full,
is copied by whoever goes on from it. A page that nobody uses keeps what it holds until it is
given out again, the longest unused one first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from rollick.models.paged_attention import PAGE

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache holds of a prefix: full pages, and perhaps a copy of the rest."""

    pages: tuple[int, ...]
    rest: int | None = None
    """The page that begins with all the remaining tokens."""


class PagePool:
    """Hands out pages 1..count-1."""

    def __init__(self, count: int) -> None:
        # Taken from the front all the time, which a dict would get slower and slower at.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        self._uses = [0] * count
        self._index: dict[bytes, int] = {}
        self._keys: dict[int, list[bytes]] = {}
        self.count = count

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that all pages hold."""
        return (self.count - 1) * PAGE

    def allocate(self, count: int) -> list[int] | None:
        """Pages for one user; None where there are not enough."""
        if count > len(self._free):
            return None
        pages: list[int] = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            self._uses[page] = 1
            self._forget(page)
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """One more user of a page."""
        if self._uses[page] == 0:
            del self._free[page]
        self._uses[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        # The last pages of a sequence are the least likely to be wanted again.
        for page in reversed(pages):
            self._uses[page] -= 1
            if self._uses[page] == 0:
                self._free[page] = None

    def match(self, tokens: Tokens) -> Match:
        """The pages that hold the beginning of `tokens`; all of them, where `rest` is given."""
        pages: list[int] = []
        key = b""
        whole = len(tokens) // PAGE
        for number in range(whole):
            key = _key(key, tokens[number * PAGE : (number + 1) * PAGE])
            page = self._index.get(key)
            if page is None:
                return Match(tuple(pages))
            pages.append(page)
        rest = self._index.get(_key(key, tokens[whole * PAGE :])) if len(tokens) % PAGE else None
        return Match(tuple(pages), rest)

    def remember(self, tokens: Tokens, pages: Sequence[int]) -> None:
        """From now on these pages hold the keys and values of `tokens`."""
        key = b""
        for number in range(-(-len(tokens) // PAGE)):
            key = _key(key, tokens[number * PAGE : (number + 1) * PAGE])
            if key not in self._index:
                self._index[key] = pages[number]
                self._keys.setdefault(pages[number], []).append(key)

    def forget_all(self) -> None:
        """The weights changed: no prefix is worth anything."""
        self._index.clear()
        self._keys.clear()

    def _forget(self, page: int) -> None:
        for key in self._keys.pop(page, ()):
            del self._index[key]


def _key(before: bytes, tokens: Tokens) -> bytes:
    return blake2b(before + tokens.tobytes(), digest_size=16).digest()

"""BM25 search: an inverted index with precomputed weights.

Okapi's formula (Robertson and Zaragoza, 2009) with k1 = 1.2 and b = 0.75. A query sums the postings
of its words: tens of microseconds for a thousand products.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from heapq import nlargest
from math import log

K1, B = 1.2, 0.75
_WORD = re.compile(r"[a-z0-9]+")


def split_words(text: str) -> list[str]:
    return _WORD.findall(text.lower().replace("'s ", " "))


class SearchIndex:
    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(split_words(text)) for text in texts]
        lengths = [sum(count.values()) for count in counts]
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        text_counts = Counter(word for count in counts for word in count)
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for index, count in enumerate(counts):
            norm = K1 * (1 - B + B * lengths[index] / mean)
            for word, times in count.items():
                rarity = log(1 + (len(texts) - text_counts[word] + 0.5) / (text_counts[word] + 0.5))
                weight = rarity * times * (K1 + 1) / (times + norm)
                self._postings[word].append((index, weight))

    def search(self, query: str, *, limit: int) -> list[int]:
        """Indices of the best texts, best first; ties go to the lower index."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(split_words(query)):
            for index, weight in self._postings.get(word, ()):
                scores[index] += weight
        return nlargest(limit, scores, key=lambda index: (scores[index], -index))

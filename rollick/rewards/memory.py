"""What equal samples scored: a bounded memory, by content.

A key is a hash of all that a reward without a Sample can see (its version and options, prompt, row,
completion, whether it was cut short), so two samples with one key cannot score differently. Only
judgements are kept; a failure may pass.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from rollick.config.schema import RewardSpec
from rollick.types import Sample, Score

MOST_SCORES = 50_000


def content_key(sample: Sample, spec: RewardSpec, *, version: str) -> bytes | None:
    """None for a row that JSON cannot tell from others."""
    prompt = sample.prompt
    asked = [spec.name, version, spec.options]
    said = [prompt.domain, [[turn.role, turn.content] for turn in prompt.turns], dict(prompt.row)]
    try:
        text = json.dumps([asked, said, sample.text, sample.truncated], sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(slots=True)
class ScoreMemory:
    """Scores by key; those that were not asked for for longest are forgotten first."""

    limit: int = MOST_SCORES
    _scores: OrderedDict[bytes, Score] = field(default_factory=OrderedDict[bytes, Score])

    def find(self, key: bytes | None) -> Score | None:
        """As it was, but without its time and costs: it took none again."""
        if key is None or key not in self._scores:
            return None
        self._scores.move_to_end(key)
        return replace(self._scores[key], seconds=0.0, figures={})

    def keep(self, key: bytes | None, score: Score) -> None:
        if key is None or not score.ok:
            return
        self._scores[key] = score
        while len(self._scores) > self.limit:
            self._scores.popitem(last=False)

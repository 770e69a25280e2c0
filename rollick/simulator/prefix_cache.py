"""The jobs of a simulated engine and its prefix cache, in numbers of tokens."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rollick.types import SampleId

WAITING = -1
"""The order of a job that is not running."""

VersionSpan = tuple[int, int, bool]
"""(version, tokens, whether generated over a cache that an older version computed)"""


@dataclass(slots=True, eq=False)
class EngineJob:
    """One request on an engine, in numbers of tokens."""

    uid: SampleId
    group: int | None
    prompt: int
    target: int
    """Response tokens at its end, including those that it started with."""
    generated: int = 0
    """Response tokens, without those of the current run."""
    spans: tuple[VersionSpan, ...] = ()
    """Spans that this engine generated, in order, without those of the current run."""
    order: int = WAITING
    """Number of its admission to the batch, ascending; WAITING if it is not running."""
    began: int = 0
    """Step of the engine at which the current run began."""
    prefill: int = 0
    """Tokens that the first step of the current run prefills."""
    epoch: int = -1
    """The prefix cache's epoch at the start of the current run; `clear` may begin a new epoch."""
    entered_s: float = -1.0
    """When it first got a slot; negative: not yet."""
    first_token_s: float = -1.0
    """End of its first step in that slot."""

    @property
    def context(self) -> int:
        return self.prompt + self.generated


class PrefixCache:
    """The cached prefixes of one engine. A group's prompt is held while a member runs. When a job
    ends, its context (for its next turn) and its group's prompt are kept; the oldest are evicted
    first."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._epoch = 0
        self._held: dict[int, tuple[int, int]] = {}  # group -> (running members, prompt tokens)
        self._kept: OrderedDict[int | SampleId, int] = OrderedDict()
        self._kept_tokens = 0

    def enter(self, job: EngineJob, context: int) -> int:
        """Add a job that starts. Returns how many of its tokens are cached."""
        job.epoch = self._epoch
        cached = min(self._pop(job.uid), context)
        group, prompt = job.group, job.prompt
        if group is None:
            return cached
        held = self._held.get(group)
        members, tokens = held if held else (0, self._pop(group))
        shared = min(tokens, prompt)
        self._held[group] = (members + 1, shared or prompt)
        return max(cached, shared)

    def leave(self, job: EngineJob, context: int, *, keep: bool) -> None:
        if job.epoch != self._epoch:
            return
        if keep:
            self._keep(job.uid, context)
        if job.group is None:
            return
        members, tokens = self._held.pop(job.group)
        if members > 1:
            self._held[job.group] = (members - 1, tokens)
        elif keep:
            self._keep(job.group, tokens)

    def evict(self, free_tokens: int) -> None:
        """Evict kept prefixes that do not fit beside the running jobs."""
        while self._kept and self._kept_tokens > free_tokens:
            self._kept_tokens -= self._kept.popitem(last=False)[1]

    def clear(self, *, include_held: bool) -> None:
        """Evict the kept prefixes; with `include_held`, also those of running jobs."""
        self._kept.clear()
        self._kept_tokens = 0
        if include_held:
            self._held.clear()
            self._epoch += 1

    def _keep(self, key: int | SampleId, tokens: int) -> None:
        self._pop(key)
        self._kept[key] = tokens
        self._kept_tokens += tokens
        if len(self._kept) > self._max_entries:
            self._kept_tokens -= self._kept.popitem(last=False)[1]

    def _pop(self, key: int | SampleId) -> int:
        tokens = self._kept.pop(key, 0)
        self._kept_tokens -= tokens
        return tokens

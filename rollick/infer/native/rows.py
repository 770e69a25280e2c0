"""The running sequences as a table: one row each, one array for each property.

Owns what the host knows of a sequence: its tokens, log-probs and versions, how it draws, when it
ends. Arrays instead of objects, so that a decode step costs little Python whatever the number of
rows. Rows 0..count-1 are in use, except for the holes that finished sequences left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.infer.native.sampler import DrawRules
from rollick.types import Completion, Request, StopReason, frozen_array

_STREAM_MASK = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the engine; compared by identity."""

    request: Request
    context: npt.NDArray[np.int32] = field(init=False)
    """Prompt and the tokens that an earlier generation drew."""
    prefix_key: bytes = field(init=False)
    """Names what is prefilled: all of the context but its last token."""
    placed_at: float | None = field(default=None, init=False)
    """When it got a row (perf_counter); None: not yet."""
    first_at: float | None = field(default=None, init=False)
    """When it had drawn its first token."""

    def __post_init__(self) -> None:
        earlier = self.request.continue_from
        parts = (
            [self.request.token_ids]
            if earlier is None
            else [
                self.request.token_ids,
                earlier.token_ids,
            ]
        )
        self.context = np.concatenate(parts).astype(np.int32)
        self.prefix_key = self.context[:-1].tobytes()

    def length_limit(self, max_length: int) -> int:
        """Tokens, prompt included, at which the sequence ends."""
        return min(len(self.request.token_ids) + self.request.sampling.max_tokens, max_length)

    def untouched(self, stop: StopReason, *, seconds: float = 0.0) -> Completion:
        """The completion with nothing drawn: what the request brought along."""
        earlier = self.request.continue_from
        return Completion(
            uid=self.request.uid,
            token_ids=frozen_array([] if earlier is None else earlier.token_ids, np.int32),
            logprobs=frozen_array([] if earlier is None else earlier.logprobs, np.float32),
            versions=frozen_array([] if earlier is None else earlier.versions, np.int32),
            stop=stop,
            seconds=seconds,
            kept_cache=None if earlier is None else earlier.kept_cache,
        )


class Rows:
    """A table of at most `slots` sequences of at most `max_length` tokens."""

    def __init__(self, *, slots: int, max_length: int) -> None:
        self.count = 0
        self.holes: list[int] = []
        self.jobs: list[Job | None] = [None] * slots
        self._max_length = max_length
        # Zeros are mapped lazily by the system: rows and positions never used cost no memory.
        self.tokens = np.zeros((slots, max_length), np.int32)
        self.logprobs = np.zeros((slots, max_length), np.float32)
        self.versions = np.zeros((slots, max_length), np.int32)
        self.kept = np.zeros((slots, max_length), np.bool_)
        self.cache_version = np.zeros(slots, np.int64)
        self.length = np.zeros(slots, np.int64)
        self.prompt = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.stream = np.zeros(slots, np.uint64)
        self.temperature = np.zeros(slots, np.float64)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.zeros(slots, np.float64)
        self.watches_text = np.zeros(slots, np.bool_)
        self._columns: tuple[npt.NDArray[Any], ...] = (
            self.cache_version,
            self.length,
            self.prompt,
            self.limit,
            self.stream,
            self.temperature,
            self.top_k,
            self.top_p,
            self.watches_text,
        )

    @property
    def running(self) -> int:
        return self.count - len(self.holes)

    @property
    def free(self) -> int:
        return len(self.jobs) - self.running

    @property
    def used(self) -> list[int]:
        return [row for row in range(self.count) if self.jobs[row] is not None]

    def rules(self) -> DrawRules:
        rows = slice(self.count)
        return DrawRules(self.temperature[rows], self.top_k[rows], self.top_p[rows])

    def place(self, preferred: int | None) -> int:
        """An unused row: `preferred` if it is a hole, else another hole, else one more."""
        if preferred is not None and preferred in self.holes:
            self.holes.remove(preferred)
            return preferred
        if self.holes:
            return self.holes.pop()
        self.count += 1
        return self.count - 1

    def put(self, row: int, job: Job, *, version: int) -> None:
        """A sequence begins, over a cache of `version`."""
        request = job.request
        prompt, length = len(request.token_ids), len(job.context)
        self.jobs[row] = job
        self.tokens[row, :length] = job.context
        if request.continue_from is not None:
            self.logprobs[row, prompt:length] = request.continue_from.logprobs
            self.versions[row, prompt:length] = request.continue_from.versions
            kept = request.continue_from.kept_cache
            self.kept[row, prompt:length] = False if kept is None else kept
        self.cache_version[row] = version
        self.length[row] = length
        self.prompt[row] = prompt
        self.limit[row] = job.length_limit(self._max_length)
        self.stream[row] = request.stream & _STREAM_MASK
        self.temperature[row] = request.sampling.temperature
        self.top_k[row] = request.sampling.top_k
        self.top_p[row] = request.sampling.top_p
        self.watches_text[row] = bool(request.sampling.stop)

    def append(
        self,
        tokens_R: npt.NDArray[np.int64],
        logprobs_R: npt.NDArray[np.float64],
        *,
        version: int,
    ) -> None:
        """One drawn token for every row 0..count-1."""
        rows = np.arange(self.count)
        ends = self.length[: self.count]
        self.tokens[rows, ends] = tokens_R
        self.logprobs[rows, ends] = logprobs_R
        self.versions[rows, ends] = version
        self.kept[rows, ends] = self.cache_version[: self.count] < version
        self.length[: self.count] += 1

    def take(self, row: int, stop: StopReason) -> tuple[Job, Completion]:
        """End a sequence; its row becomes a hole."""
        job = self.jobs[row]
        assert job is not None
        drawn = slice(int(self.prompt[row]), int(self.length[row]))
        self.jobs[row] = None
        self.watches_text[row] = False
        self.holes.append(row)
        kept = self.kept[row, drawn]
        return job, Completion(
            uid=job.request.uid,
            token_ids=frozen_array(self.tokens[row, drawn], np.int32),
            logprobs=frozen_array(self.logprobs[row, drawn], np.float32),
            versions=frozen_array(self.versions[row, drawn], np.int32),
            stop=stop,
            kept_cache=frozen_array(kept, np.bool_) if kept.any() else None,
        )

    def close_holes(self) -> list[tuple[int, int]]:
        """Move the last rows into the holes; gives the moves (from, to), in order."""
        moves: list[tuple[int, int]] = []
        while self.holes:
            hole = min(self.holes)
            last = self.count - 1
            self.holes.remove(last if last in self.holes else hole)
            if self.jobs[last] is not None:
                self._move(last, hole)
                moves.append((last, hole))
            self.count -= 1
        return moves

    def _move(self, source: int, target: int) -> None:
        length = int(self.length[source])
        for table in (self.tokens, self.logprobs, self.versions, self.kept):
            table[target, :length] = table[source, :length]
        for column in self._columns:
            column[target] = column[source]
        self.watches_text[source] = False
        self.jobs[target], self.jobs[source] = self.jobs[source], None

    def clear(self) -> list[Job]:
        """Empty the table; gives the jobs that were in it."""
        jobs = [job for job in self.jobs if job is not None]
        self.jobs = [None] * len(self.jobs)
        self.watches_text[:] = False
        self.count = 0
        self.holes.clear()
        return jobs

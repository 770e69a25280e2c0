"""The running sequences as a table: one row each, one array for each property.

Owns what the host knows of a sequence: its tokens, log-probs and versions, how it draws, when it
ends, and how much of it the cache holds. Arrays instead of objects, so that a decode step costs
little Python whatever the number of rows. Rows 0..count-1 are in use, except for the holes that
finished sequences left.

A row's number is also its slot in the cache. `held` says how many of the row's tokens have their
keys and values there, also after the sequence ended, until something else takes the slot: that is
what a group, a continued sample or the next turn of a session begins with. A row that is `kept`
gives its slot away last; it may lie behind the rows in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollick.infer.native.sampler import Bias, DrawRules
from rollick.types import Completion, Request, StopReason, frozen_array

_STREAM_MASK = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the engine; compared by identity."""

    request: Request
    context: npt.NDArray[np.int32] = field(init=False)
    """Prompt and the tokens that an earlier generation drew."""
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


class Found(NamedTuple):
    """A row whose first `shared` tokens are those of a context, with keys and values."""

    row: int
    shared: int


class Move(NamedTuple):
    """A sequence changes its row; with `swaps`, what the target holds goes back the same way."""

    source: int
    target: int
    length: int
    swaps: bool = False


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
        self.over_old = np.zeros((slots, max_length), np.bool_)
        """Tokens drawn over a cache that an older version had computed."""
        self.cache_version = np.zeros(slots, np.int64)
        self.length = np.zeros(slots, np.int64)
        self.prompt = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.stream = np.zeros(slots, np.uint64)
        self.temperature = np.zeros(slots, np.float64)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.zeros(slots, np.float64)
        self.min_p = np.zeros(slots, np.float64)
        self.min_length = np.zeros(slots, np.int64)
        self.watches_text = np.zeros(slots, np.bool_)
        self.own_stops = np.zeros(slots, np.bool_)
        self.biased = np.zeros(slots, np.bool_)
        self.held = np.zeros(slots, np.int64)
        self.kept = np.zeros(slots, np.int64)
        """When the row was last kept, by a count; 0 is not at all."""
        self._clock = 0
        self._columns: tuple[npt.NDArray[Any], ...] = (
            self.cache_version,
            self.length,
            self.prompt,
            self.limit,
            self.stream,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.min_length,
            self.watches_text,
            self.own_stops,
            self.biased,
            self.held,
            self.kept,
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

    @property
    def kv_tokens(self) -> int:
        """Tokens of running sequences that the cache holds."""
        return int(sum(self.length[row] - 1 for row in self.used))

    def rules(self, bias: Bias | None) -> DrawRules:
        """How rows 0..count-1 draw now."""
        rows = slice(self.count)
        return DrawRules(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            bias=bias,
        )

    def job(self, row: int) -> Job:
        job = self.jobs[row]
        assert job is not None
        return job

    def longest_prefix(
        self, context: npt.NDArray[np.int32], *, among: npt.NDArray[np.int64] | None = None
    ) -> Found:
        """The row that holds most of the context's first tokens, its last one not counted."""
        wanted = context[:-1]
        candidates = np.flatnonzero(self.held) if among is None else among
        if len(candidates) == 0 or len(wanted) == 0:
            return Found(0, 0)
        width = min(len(wanted), int(self.held[candidates].max()))
        # Most rows differ at once: only those that begin alike are compared as a whole.
        candidates = candidates[self.tokens[candidates, 0] == wanted[0]]
        if len(candidates) == 0:
            return Found(0, 0)
        differs = self.tokens[candidates, :width] != wanted[:width]
        alike = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        shared = np.minimum(alike, self.held[candidates])
        best = int(shared.argmax())
        return Found(int(candidates[best]), int(shared[best]))

    def place(self, preferred: int | None) -> int:
        """An unused row: `preferred` if it can be had, else a hole (one that is not kept, if there
        is any), else one more."""
        if preferred is not None and preferred in self.holes:
            self.holes.remove(preferred)
            return preferred
        if self.holes and preferred != self.count:
            row = min(self.holes, key=lambda hole: (self.kept[hole] > 0, -hole))
            self.holes.remove(row)
            return row
        self.count += 1
        return self.count - 1

    def keep(self, row: int) -> None:
        """What the row holds will be wanted again: other rows give their slots away first."""
        self._clock += 1
        self.kept[row] = self._clock

    def refuge(self, row: int, *, avoid: int | None) -> int | None:
        """Where something kept in `row` can go when its slot is taken; None where all other slots
        (`avoid` is one that must stay) are in use or were kept later."""
        behind = np.arange(self.count, len(self.jobs))
        behind = behind[(behind != row) & (behind != avoid)]
        if len(behind) == 0:
            return None
        oldest = int(behind[self.kept[behind].argmin()])
        return oldest if self.kept[oldest] < self.kept[row] else None

    def flee(self, row: int, refuge: int) -> None:
        """What is kept in `row` is now kept in `refuge`."""
        held = int(self.held[row])
        self.tokens[refuge, :held] = self.tokens[row, :held]
        self.held[refuge], self.kept[refuge] = held, self.kept[row]
        self.kept[row] = 0

    def store(self, row: int, context: npt.NDArray[np.int32], *, held: int) -> None:
        """The slot holds the first `held` tokens of a context that is not running."""
        self.tokens[row, : len(context)] = context
        self.held[row] = held

    def give_up(self, row: int) -> None:
        """A row that was placed is not used after all."""
        self.holes.append(row)

    def put(self, row: int, job: Job, *, version: int) -> None:
        """A sequence begins, over a cache of `version`."""
        request = job.request
        prompt, length = len(request.token_ids), len(job.context)
        self.jobs[row] = job
        self.tokens[row, :length] = job.context
        if request.continue_from is not None:
            self.logprobs[row, prompt:length] = request.continue_from.logprobs
            self.versions[row, prompt:length] = request.continue_from.versions
            old = request.continue_from.kept_cache
            self.over_old[row, prompt:length] = False if old is None else old
        self.cache_version[row] = version
        self.length[row] = length
        self.held[row] = length - 1
        self.kept[row] = 0
        self.prompt[row] = prompt
        self.limit[row] = job.length_limit(self._max_length)
        self.stream[row] = request.stream & _STREAM_MASK
        self.temperature[row] = request.sampling.temperature
        self.top_k[row] = request.sampling.top_k
        self.top_p[row] = request.sampling.top_p
        self.min_p[row] = request.sampling.min_p
        self.min_length[row] = prompt + request.sampling.min_tokens
        self.watches_text[row] = bool(request.sampling.stop)
        self.own_stops[row] = bool(request.sampling.stop_ids)
        self.biased[row] = bool(request.sampling.logit_bias)

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
        old_R = self.cache_version[: self.count] < version
        self.over_old[rows, ends] = old_R
        self.length[: self.count] += 1
        # Nobody begins with what an older version computed.
        self.held[: self.count] += ~old_R

    def drawn(
        self, job: Job, since: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Ids, log-probs and versions of a running job's tokens from number `since` on."""
        if job not in self.jobs:
            return self.tokens[0, :0], self.logprobs[0, :0], self.versions[0, :0]
        row = self.jobs.index(job)
        new = slice(int(self.prompt[row]) + since, int(self.length[row]))
        return (
            self.tokens[row, new].copy(),
            self.logprobs[row, new].copy(),
            self.versions[row, new].copy(),
        )

    def take(self, row: int, stop: StopReason) -> tuple[Job, Completion]:
        """End a sequence; its row becomes a hole."""
        job = self.jobs[row]
        assert job is not None
        drawn = slice(int(self.prompt[row]), int(self.length[row]))
        self._leave(row)
        self.holes.append(row)
        old = self.over_old[row, drawn]
        if job.request.session is not None and self.held[row]:
            self.keep(row)
        return job, Completion(
            uid=job.request.uid,
            token_ids=frozen_array(self.tokens[row, drawn], np.int32),
            logprobs=frozen_array(self.logprobs[row, drawn], np.float32),
            versions=frozen_array(self.versions[row, drawn], np.int32),
            stop=stop,
            kept_cache=frozen_array(old, np.bool_) if old.any() else None,
        )

    def close_holes(self) -> list[Move]:
        """Move the last rows into the holes; gives the moves, in order."""
        moves: list[Move] = []
        while self.holes:
            hole = min(self.holes)
            last = self.count - 1
            self.holes.remove(last if last in self.holes else hole)
            if self.jobs[last] is not None:
                moves.append(self._move(last, hole))
            self.count -= 1
        return moves

    def _move(self, source: int, target: int) -> Move:
        """A running row goes into a hole; what is kept there goes the other way."""
        swaps = bool(self.kept[target])
        length = int(self.length[source])
        tables = (self.tokens, self.logprobs, self.versions, self.over_old)
        if swaps:
            length = max(length, int(self.held[target]) + 1)
            both = [target, source], [source, target]
            for table in tables:
                table[both[0], :length] = table[both[1], :length]
            for column in self._columns:
                column[both[0]] = column[both[1]]
        else:
            for table in tables:
                table[target, :length] = table[source, :length]
            for column in self._columns:
                column[target] = column[source]
        self.jobs[target] = self.jobs[source]
        self._leave(source)
        return Move(source, target, length - 1, swaps)

    def _leave(self, row: int) -> None:
        """No sequence is in the row any more. What the cache holds of it stays known."""
        self.jobs[row] = None
        for column in (self.watches_text, self.own_stops, self.biased, self.min_length):
            column[row] = 0

    def forget_held(self) -> None:
        """Nothing that the cache holds is found any more."""
        self.held[:] = 0
        self.kept[:] = 0

    def clear(self) -> list[Job]:
        """Empty the table; gives the jobs that were in it."""
        jobs = [job for job in self.jobs if job is not None]
        for row in range(self.count):
            self._leave(row)
        self.count = 0
        self.holes.clear()
        self.forget_held()
        return jobs

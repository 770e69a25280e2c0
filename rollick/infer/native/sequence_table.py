"""The running sequences as a table: one row per sequence, one array per property.

Arrays instead of objects: the Python cost of a decode step hardly grows with the number of rows.
Rows 0..count-1 are in use, except the holes that finished sequences left.

In SlotRunner, a row's number is also its slot in the cache. `cached` counts the row's tokens whose
keys and values are in the slot. It stays after the sequence ends, until another sequence gets the
slot, so that other samples of the group, a continued sample or the session's next turn can reuse
that prefix. A `retained` row is reused last; its number may be `count` or more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollick.infer.native.sampler import LogitBias, RowIndices, SamplingMetadata
from rollick.types import (
    Completion,
    FloatArray,
    IntArray,
    Request,
    SampleId,
    StopReason,
    frozen_array,
)

_STREAM_MASK = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request inside the engine, compared by identity. Times are perf_counter values."""

    request: Request
    context: npt.NDArray[np.int32] = field(init=False)
    """The prompt and the tokens of an earlier generation that it continues."""
    arrived_at: float = field(default_factory=perf_counter, init=False)
    admitted_at: float = field(default=inf, init=False)
    first_token_at: float = field(default=inf, init=False)

    def __post_init__(self) -> None:
        earlier = self.request.continue_from
        generated = [] if earlier is None else [earlier.token_ids]
        self.context = np.concatenate([self.request.token_ids, *generated]).astype(np.int32)

    def completion_without_tokens(self, stop: StopReason) -> Completion:
        """A completion of only the tokens that the request continues."""
        if (earlier := self.request.continue_from) is not None:
            return replace(earlier, uid=self.request.uid, stop=stop)
        empty = frozen_array([], np.int32)
        return Completion(self.request.uid, empty, frozen_array([], np.float32), empty, stop)


class PrefixMatch(NamedTuple):
    """A row whose first `length` tokens equal those of a context and are cached."""

    row: int
    length: int


NO_MATCH = PrefixMatch(0, 0)


class RowMove(NamedTuple):
    """A sequence moves to another row; with `swaps` the target's cache moves to the source."""

    source: int
    target: int
    length: int
    swaps: bool = False


class SequenceTable:
    def __init__(self, *, slots: int, max_length: int) -> None:
        self.count = 0
        self.holes: list[int] = []
        self.requests: list[EngineRequest | None] = [None] * slots
        # The system maps zeros lazily: unused rows and positions cost no memory.
        self.tokens = np.zeros((slots, max_length), np.int32)
        self.logprobs = np.zeros((slots, max_length), np.float32)
        self.versions = np.zeros((slots, max_length), np.int32)
        self.kept_cache = np.zeros((slots, max_length), np.bool_)
        """Tokens sampled with a cache that an older version computed."""
        # `limit` is the length at which the sequence ends. `retained` grows with each call of
        # `retain`, so that the lowest is the oldest; 0 if the row is not retained.
        self.length, self.prompt_length, self.limit = np.zeros((3, slots), np.int64)
        self.min_length, self.cached, self.retained = np.zeros((3, slots), np.int64)
        self.cache_version, self.top_k = np.zeros((2, slots), np.int64)
        self.temperature, self.top_p, self.min_p = np.zeros((3, slots), np.float64)
        self.stream = np.zeros(slots, np.uint64)
        self.has_stop_strings, self.has_stop_ids = np.zeros((2, slots), np.bool_)
        self.has_bias, self.awaits_first_token = np.zeros((2, slots), np.bool_)
        self._retain_calls = 0
        arrays: list[npt.NDArray[Any]] = [a for a in vars(self).values() if type(a) is np.ndarray]
        self._per_token = [array for array in arrays if array.ndim == 2]
        self._per_row = [array for array in arrays if array.ndim == 1]

    @property
    def num_running(self) -> int:
        return self.count - len(self.holes)

    @property
    def num_free(self) -> int:
        return len(self.requests) - self.num_running

    @property
    def running_rows(self) -> list[int]:
        return [row for row in range(self.count) if self.requests[row] is not None]

    def sampling_metadata(self, bias: LogitBias | None) -> SamplingMetadata:
        rows = slice(self.count)
        temperature, top_k = self.temperature[rows], self.top_k[rows]
        return SamplingMetadata(temperature, top_k, self.top_p[rows], self.min_p[rows], bias)

    def request(self, row: int) -> EngineRequest:
        request = self.requests[row]
        assert request is not None
        return request

    def uid(self, row: int) -> SampleId:
        return self.request(row).request.uid

    def row_of(self, uid: SampleId) -> int | None:
        return next((row for row in self.running_rows if self.uid(row) == uid), None)

    def longest_prefix(
        self, context: npt.NDArray[np.int32], *, rows: npt.NDArray[np.int64] | None = None
    ) -> PrefixMatch:
        """The row that caches the longest prefix of the context without its last token."""
        tokens = context[:-1]
        candidates = np.flatnonzero(self.cached) if rows is None else rows
        # Most rows differ in the first token: compare only the others further.
        candidates = candidates[self.tokens[candidates, 0] == context[0]]
        if len(candidates) == 0 or len(tokens) == 0:
            return NO_MATCH
        width = min(len(tokens), int(self.cached[candidates].max()))
        differs = self.tokens[candidates, :width] != tokens[:width]
        equal = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        lengths = np.minimum(equal, self.cached[candidates])
        best = int(lengths.argmax())
        return PrefixMatch(int(candidates[best]), int(lengths[best]))

    def allocate_row(self, preferred: int | None) -> int:
        """Allocate an unused row: `preferred` if it is a hole, else another hole (one that is not
        retained if possible), else the next row."""
        if preferred is not None and preferred in self.holes:
            self.holes.remove(preferred)
            return preferred
        if self.holes and preferred != self.count:
            row = min(self.holes, key=lambda hole: (self.retained[hole] > 0, -hole))
            self.holes.remove(row)
            return row
        self.count += 1
        return self.count - 1

    def retain(self, row: int) -> None:
        """Reuse other slots first: the row's cached prefix will be needed again."""
        self._retain_calls += 1
        self.retained[row] = self._retain_calls

    def spare_slot(self, row: int, *, avoid: int | None) -> int | None:
        """An unused slot to which the prefix retained in `row` can move. None if all slots (other
        than `avoid`) are in use or were retained later."""
        unused = np.arange(self.count, len(self.requests))
        unused = unused[(unused != row) & (unused != avoid)]
        if len(unused) == 0:
            return None
        oldest = int(unused[self.retained[unused].argmin()])
        return oldest if self.retained[oldest] < self.retained[row] else None

    def relocate(self, row: int, slot: int) -> None:
        """Move the prefix retained in `row` to `slot`."""
        cached = int(self.cached[row])
        self.tokens[slot, :cached] = self.tokens[row, :cached]
        self.cached[slot], self.retained[slot] = cached, self.retained[row]
        self.retained[row] = 0

    def store_prefix(self, row: int, context: npt.NDArray[np.int32], *, cached: int) -> None:
        """Retain the first `cached` tokens of a context in an allocated row that does not run."""
        self.tokens[row, : len(context)] = context
        self.cached[row] = cached
        self.retain(row)
        self.holes.append(row)

    def start(self, row: int, request: EngineRequest, *, version: int) -> None:
        """Start a sequence, with a cache of `version`."""
        sampling, earlier = request.request.sampling, request.request.continue_from
        prompt, length = len(request.request.token_ids), len(request.context)
        self.requests[row] = request
        request.admitted_at = perf_counter()
        self.tokens[row, :length] = request.context
        if earlier is not None:
            self.logprobs[row, prompt:length] = earlier.logprobs
            self.versions[row, prompt:length] = earlier.versions
            flags = earlier.kept_cache
            self.kept_cache[row, prompt:length] = False if flags is None else flags
        self.cache_version[row] = version
        self.length[row] = length
        self.cached[row] = length - 1
        self.retained[row] = 0
        self.prompt_length[row] = prompt
        self.limit[row] = min(prompt + sampling.max_tokens, self.tokens.shape[1])
        self.stream[row] = request.request.stream & _STREAM_MASK
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.min_length[row] = prompt + sampling.min_tokens
        self.has_stop_strings[row] = bool(sampling.stop)
        self.has_stop_ids[row] = bool(sampling.stop_ids)
        self.has_bias[row] = bool(sampling.logit_bias)
        self.awaits_first_token[row] = True

    def append(
        self,
        rows: RowIndices,
        tokens_R: npt.NDArray[np.integer[Any]],
        logprobs_R: npt.NDArray[np.floating[Any]],
        *,
        version: int,
    ) -> None:
        ends = self.length[rows]
        self.tokens[rows, ends] = tokens_R
        self.logprobs[rows, ends] = logprobs_R
        self.versions[rows, ends] = version
        outdated_R = self.cache_version[rows] < version
        self.kept_cache[rows, ends] = outdated_R
        self.length[rows] = ends + 1
        # No other sequence may start with a prefix that an older version computed.
        self.cached[rows] += ~outdated_R
        for row in rows[self.awaits_first_token[rows]].tolist():
            self.request(row).first_token_at = perf_counter()
        self.awaits_first_token[rows] = False

    def tokens_since(self, row: int, num_sent: int) -> tuple[IntArray, FloatArray, IntArray]:
        """Ids, log-probs and versions of the row's generated tokens after the first `num_sent`."""
        new = slice(int(self.prompt_length[row]) + num_sent, int(self.length[row]))
        return (
            frozen_array(self.tokens[row, new], np.int32),
            frozen_array(self.logprobs[row, new], np.float32),
            frozen_array(self.versions[row, new], np.int32),
        )

    def finish(self, row: int, stop: StopReason) -> tuple[EngineRequest, Completion]:
        """End a sequence; its row becomes a hole."""
        request = self.request(row)
        self._vacate(row)
        self.holes.append(row)
        if request.request.session is not None and self.cached[row]:
            self.retain(row)
        flags = self.kept_cache[row, self.prompt_length[row] : self.length[row]]
        return request, Completion(
            request.request.uid,
            *self.tokens_since(row, 0),
            stop=stop,
            kept_cache=frozen_array(flags, np.bool_) if flags.any() else None,
        )

    def compact(self) -> list[RowMove]:
        """Move the last rows into the holes; returns the moves in order."""
        moves: list[RowMove] = []
        while self.holes:
            hole = min(self.holes)
            last = self.count - 1
            self.holes.remove(last if last in self.holes else hole)
            if self.requests[last] is not None:
                moves.append(self._move(last, hole))
            self.count -= 1
        return moves

    def _move(self, source: int, target: int) -> RowMove:
        """Move a running row into a hole; a prefix retained in the hole moves to the source."""
        swaps = bool(self.retained[target])
        length = int(self.length[source])
        targets, sources = [target], [source]
        if swaps:
            length = max(length, int(self.cached[target]) + 1)
            targets, sources = [target, source], [source, target]
        for array in self._per_token:
            array[targets, :length] = array[sources, :length]
        for array in self._per_row:
            array[targets] = array[sources]
        self.requests[target] = self.requests[source]
        self._vacate(source)
        return RowMove(source, target, length - 1, swaps)

    def _vacate(self, row: int) -> None:
        """Remove the sequence from the row. `cached` stays valid."""
        self.requests[row] = None
        for array in (self.has_stop_strings, self.has_stop_ids, self.has_bias, self.min_length):
            array[row] = 0

    def forget_prefixes(self) -> None:
        self.cached[:] = 0
        self.retained[:] = 0

    def clear(self) -> None:
        for row in range(self.count):
            self._vacate(row)
        self.count = 0
        self.holes.clear()
        self.forget_prefixes()

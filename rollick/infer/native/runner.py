"""What the engine drives: the protocol of runners, and the parts that both of them use.

A runner owns the queued requests, the running sequences and the cache, and knows nothing of
asyncio. SlotRunner (slot_runner.py) runs on any device; PagedRunner (gpu/runner.py) is fast on
GPUs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rollick.infer.native.sequence_table import EngineRequest, SequenceTable
from rollick.types import Completion, SampleId, StepRecord, StopReason

FinishedRequest = tuple[EngineRequest, Completion]


@dataclass(slots=True)
class RunnerStats:
    """Counts since the runner was created, and what its last step did."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    decode_steps: int = 0
    busy_seconds: float = 0.0
    preempted: int = 0
    last_step: StepRecord = field(default_factory=lambda: StepRecord(0, 0, 0, 0.0))
    last_step_decodes: int = 1

    def record_step(
        self,
        lengths: npt.NDArray[np.int64],
        *,
        started: float,
        prefilled_before: int,
        decodes: int = 1,
    ) -> None:
        """Record a step that began at `started` (perf_counter) and decoded rows of these lengths,
        unless `decodes` is 0."""
        seconds = perf_counter() - started
        self.busy_seconds += seconds
        self.last_step_decodes = max(1, decodes)
        self.last_step = StepRecord(
            len(lengths) if decodes else 0,
            int(lengths.sum()),
            self.prefilled_tokens - prefilled_before,
            seconds=seconds,
            longest=int(lengths.max(initial=0)),
        )


class AdmissionQueue:
    """Requests that wait for a row, first come first served. `submit` and `drop` may be called
    while a step runs in another thread; the rest may not."""

    def __init__(self) -> None:
        self.waiting: deque[EngineRequest] = deque()
        self._submitted: deque[EngineRequest] = deque()
        self._dropped: deque[EngineRequest] = deque()

    def __len__(self) -> int:
        return len(self.waiting) + len(self._submitted)

    @property
    def has_work(self) -> bool:
        return bool(len(self) or self._dropped)

    def submit(self, request: EngineRequest) -> None:
        self._submitted.append(request)

    def drop(self, request: EngineRequest) -> None:
        """Its caller is gone: the next step discards it."""
        self._dropped.append(request)

    def receive(self) -> list[EngineRequest]:
        """Queue what was submitted; returns dropped requests that may be running."""
        while self._submitted:
            self.waiting.append(self._submitted.popleft())
        running: list[EngineRequest] = []
        while self._dropped:
            request = self._dropped.popleft()
            if request in self.waiting:
                self.waiting.remove(request)
            else:
                running.append(request)
        return running

    def abort(self, uid: SampleId) -> FinishedRequest | None:
        """End a waiting request; None if none has this id."""
        for request in self.waiting:
            if request.request.uid == uid:
                self.waiting.remove(request)
                return request, request.completion_without_tokens(StopReason.ABORTED)
        return None

    def clear(self) -> None:
        for requests in (self.waiting, self._submitted, self._dropped):
            requests.clear()


class Runner(Protocol):
    """Generates for many requests at once. The engine calls `step` in its thread, and everything
    else while no step runs, except `queue.submit` and `queue.drop`."""

    version: int
    table: SequenceTable
    queue: AdmissionQueue
    stats: RunnerStats

    @property
    def has_work(self) -> bool: ...

    @property
    def kv_tokens(self) -> int:
        """Tokens of running requests that the cache holds."""
        ...

    @property
    def kv_capacity(self) -> int:
        """Tokens that fit the cache; 0 if every slot fits a full sequence."""
        ...

    def step(self) -> list[FinishedRequest]:
        """One or more tokens for every running request; returns the requests that ended."""
        ...

    def probe_logits(self, sequences: Sequence[Sequence[int]], *, prefilled: int) -> Tensor:
        """Logits [tokens, V] of the tokens after the first `prefilled` of each sequence, which are
        decoded one by one. Longest sequence first; only while there are no requests."""
        ...

    def settle(self) -> list[FinishedRequest]:
        """Wait until the device is idle; returns the requests that ended since the last step."""
        ...

    def abort(self, uid: SampleId) -> FinishedRequest | None:
        """End a waiting or running request with its tokens so far."""
        ...

    def commit(self, version: int, *, keep_cache: bool) -> None:
        """The weights are now those of `version`. Running rows recompute their cache before they
        continue, or keep it."""

    def free(self) -> None:
        """Free the cache; running rows recompute it when they continue."""

    def clear(self) -> None:
        """Discard all requests and free the cache."""

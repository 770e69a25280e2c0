"""The parts that both runners use: the queue of requests, and statistics.

A runner owns the queued requests, the running sequences and the cache. It does not use
asyncio. SlotRunner (slot_runner.py) runs on any device; PagedRunner (gpu/runner.py) is fast on
GPUs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt

from rollick.infer.native.sequence_table import EngineRequest
from rollick.types import Completion, SampleId, StepRecord, StopReason

FinishedRequest = tuple[EngineRequest, Completion]


@dataclass(slots=True)
class RunnerStats:
    """Counts since the runner was created, and a record of its last step."""

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


@dataclass(eq=False)
class AdmissionQueue:
    """Requests that wait for a row, first come first served. `submit` and `drop` may be called
    while a step runs in another thread; no other method may."""

    waiting: deque[EngineRequest] = field(default_factory=deque[EngineRequest])
    _submitted: deque[EngineRequest] = field(default_factory=deque[EngineRequest])
    _dropped: deque[EngineRequest] = field(default_factory=deque[EngineRequest])

    def __len__(self) -> int:
        return len(self.waiting) + len(self._submitted)

    @property
    def has_work(self) -> bool:
        return bool(len(self) or self._dropped)

    def submit(self, request: EngineRequest) -> None:
        self._submitted.append(request)

    def drop(self, request: EngineRequest) -> None:
        """Discard the request at the next step: its caller was cancelled."""
        self._dropped.append(request)

    def receive(self) -> list[EngineRequest]:
        """Queue the submitted requests; returns the dropped ones that are not waiting."""
        while self._submitted:
            self.waiting.append(self._submitted.popleft())
        not_waiting: list[EngineRequest] = []
        while self._dropped:
            request = self._dropped.popleft()
            if request in self.waiting:
                self.waiting.remove(request)
            else:
                not_waiting.append(request)
        return not_waiting

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

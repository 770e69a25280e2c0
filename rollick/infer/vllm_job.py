"""A request to the vLLM engine and what is drawn of it, over all its parts. Knows no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from rollick.errors import EngineError, RollickError
from rollick.infer.native.endings import Decode, stop_tail
from rollick.types import Completion, Request, StopReason, frozen_array


@dataclass(slots=True, eq=False)
class Job:
    """A request and what is drawn of it. `go` is set while it may run, or must look at itself."""

    request: Request
    go: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    part: str | None = None
    aborted: bool = False
    recalled: bool = False
    failure: RollickError | None = None
    arrived_at: float = field(default_factory=perf_counter)
    queued_s: float | None = None
    prefill_s: float = 0.0
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        earlier = self.request.continue_from
        if earlier is not None:
            self.token_ids += earlier.token_ids.tolist()
            self.logprobs += earlier.logprobs.tolist()
            self.versions += earlier.versions.tolist()

    def note_times(self, began: float, times: Any) -> None:
        """Of its first part, which was handed over at `began`; vLLM's own clock tells the rest."""
        if self.queued_s is None and times is not None and times.first_token_ts:
            self.queued_s = began - self.arrived_at + times.scheduled_ts - times.queued_ts
            self.prefill_s = times.first_token_ts - times.scheduled_ts

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """The next tokens. More log-probs than tokens are those of tokens that came before: vLLM
        0.23 gives all of a part again when it is recalled."""
        known = len(logprobs) - len(token_ids)
        if known < 0:
            raise EngineError(
                f"{self.request.uid}: vLLM gave {len(token_ids)} tokens and the log-probs of "
                f"{len(logprobs)}"
            )
        self.token_ids += token_ids
        self.logprobs += logprobs[known:]
        self.versions += [version] * len(token_ids)

    def cut(self, length: int) -> None:
        for values in (self.token_ids, self.logprobs, self.versions):
            del values[length:]

    def completion(self, stop: StopReason) -> Completion:
        seconds, earlier = perf_counter() - self.arrived_at, self.request.continue_from
        old = None if earlier is None else earlier.kept_cache
        if old is not None:
            old = np.pad(old, (0, len(self.token_ids) - len(old)))
        return Completion(
            uid=self.request.uid,
            token_ids=frozen_array(self.token_ids, np.int32),
            logprobs=frozen_array(self.logprobs, np.float32),
            versions=frozen_array(self.versions, np.int32),
            stop=stop,
            seconds=seconds,
            queued_s=seconds if self.queued_s is None else self.queued_s,
            prefill_s=self.prefill_s,
            kept_cache=None if old is None else frozen_array(old, np.bool_),
        )

    def ended_before_start(self, stop_ids: Sequence[int], max_length: int) -> StopReason | None:
        """A continued request may already have all the tokens it can get."""
        if not self.token_ids:
            return None
        sampling = self.request.sampling
        if self.token_ids[-1] in (*stop_ids, *sampling.stop_ids):
            return StopReason.STOP
        length = len(self.request.token_ids) + len(self.token_ids)
        full = len(self.token_ids) >= sampling.max_tokens or length >= max_length
        return StopReason.LENGTH if full else None

    def cut_at_text(self, text_of: Decode, before: int) -> bool:
        """Whether a stop string ends with one of the tokens from number `before` on; what comes
        after it is dropped."""
        sampling = self.request.sampling
        if not sampling.stop:
            return False
        tail = stop_tail(sampling.stop)
        for length in range(before + 1, len(self.token_ids) + 1):
            text = text_of(self.token_ids[max(0, length - tail) : length])
            if length >= sampling.min_tokens and any(stop in text for stop in sampling.stop):
                self.cut(length)
                return True
        return False

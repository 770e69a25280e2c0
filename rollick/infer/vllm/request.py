"""A request of the vLLM engine and the tokens of all its segments. Does not import vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from rollick.errors import EngineError, RollickError
from rollick.infer.engine import Decode
from rollick.infer.native.stop_conditions import stop_string_window
from rollick.types import Completion, FloatArray, IntArray, Request, StopReason, frozen_array


@dataclass(slots=True, eq=False)
class VllmRequest:
    request: Request
    may_run: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a segment may start, and when the request was aborted."""
    segment_ended: asyncio.Event = field(default_factory=asyncio.Event)
    segment_id: str | None = None
    aborted: bool = False
    interrupted: bool = False
    """Its segment was aborted and the request will continue."""
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

    def record_times(self, started: float, times: Any) -> None:
        """Record the times of the first segment, submitted at `started`, from vLLM's clock."""
        if self.queued_s is None and times is not None and times.first_token_ts:
            self.queued_s = started - self.arrived_at + times.scheduled_ts - times.queued_ts
            self.prefill_s = times.first_token_ts - times.scheduled_ts

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens. Surplus log-probs belong to earlier tokens: vLLM 0.23 repeats all of a
        segment's when it is aborted."""
        surplus = len(logprobs) - len(token_ids)
        if surplus < 0:
            counts = f"{len(token_ids)} tokens and the log-probs of {len(logprobs)}"
            raise EngineError(f"{self.request.uid}: vLLM returned {counts}")
        self.token_ids += token_ids
        self.logprobs += logprobs[surplus:]
        self.versions += [version] * len(token_ids)

    def tokens_since(self, num_sent: int) -> tuple[IntArray, FloatArray, IntArray]:
        """Ids, log-probs and versions of the tokens after the first `num_sent`."""
        return (
            frozen_array(self.token_ids[num_sent:], np.int32),
            frozen_array(self.logprobs[num_sent:], np.float32),
            frozen_array(self.versions[num_sent:], np.int32),
        )

    def completion(self, stop: StopReason) -> Completion:
        seconds, earlier = perf_counter() - self.arrived_at, self.request.continue_from
        flags = None if earlier is None else earlier.kept_cache
        if flags is not None:
            flags = frozen_array(np.pad(flags, (0, len(self.token_ids) - len(flags))), np.bool_)
        return Completion(
            self.request.uid,
            *self.tokens_since(0),
            stop=stop,
            seconds=seconds,
            queued_s=seconds if self.queued_s is None else self.queued_s,
            prefill_s=self.prefill_s,
            kept_cache=flags,
        )

    def truncate_at_stop_string(self, decode: Decode, num_before: int) -> bool:
        """Drop the tokens after a stop string that ends beyond the first `num_before` tokens;
        returns whether there is one."""
        sampling = self.request.sampling
        if not sampling.stop:
            return False
        window = stop_string_window(sampling.stop)
        for length in range(num_before + 1, len(self.token_ids) + 1):
            text = decode(self.token_ids[max(0, length - window) : length])
            if length >= sampling.min_tokens and any(stop in text for stop in sampling.stop):
                for values in (self.token_ids, self.logprobs, self.versions):
                    del values[length:]
                return True
        return False

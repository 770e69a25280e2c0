"""A closed-form model of continuous batching: the batch of one simulated engine. Does no I/O.

There is no event loop here: callers pass times as numbers and get the time of the next change.

    submit -> waiting -> (slot and cache free, between two steps) -> running -> reach() returns it
                 ^                                                     |
                 +---------- preempted: the cache is full -------------+

Each step samples one token for every running job. So between two changes of the batch, each step
adds one token per running job to the cache, and m steps take

    prefill_s + step_s * m + step_growth_s * m (m - 1) / 2

where prefill_s is the prefill time of the first step, and step_growth_s the time to read the tokens
that a step adds to the cache.

A job's last step and the step at which the cache is full are known in advance. So only changes
of the batch are simulated (O(log slots) each); the steps between two changes cost nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from heapq import heappop, heappush
from math import sqrt

from rollick.simulator.prefix_cache import WAITING, EngineJob, PrefixCache, VersionSpan
from rollick.simulator.step_time import StepTime
from rollick.types import EngineLoad

HEADROOM = 16
"""Free cache tokens per running job that the start of another job requires. With fewer, a job could
be preempted one step after its start."""


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """How one engine, or several (see `total_usage`), spent its time."""

    elapsed_s: float = 0.0
    busy_s: float = 0.0
    """Seconds in which a step ran."""
    slot_s: float = 0.0
    """Seconds in which a slot held a job of a running step, summed over slots."""
    capacity_s: float = 0.0
    """Slots times elapsed seconds: the upper bound of slot_s."""
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    """Prefilled again: after a preemption, a move to another engine, or a new version."""
    preempted: int = 0

    @property
    def busy_share(self) -> float:
        return self.busy_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def slot_share(self) -> float:
        return self.slot_s / self.capacity_s if self.capacity_s else 0.0


def total_usage(usages: Iterable[EngineUsage]) -> EngineUsage:
    """The sum over engines. busy_share is then a mean over engines, slot_share over slots."""
    return EngineUsage(*map(sum, zip(*map(astuple, usages), strict=True)))


class EngineBatch:
    """The batch of one engine. A boundary is the time between two steps. `settle` chooses the jobs
    that run from a boundary on and returns the time of the next boundary; `reach` advances to it.
    Call `take` and `commit` only at a boundary, and `settle` afterwards."""

    def __init__(
        self, step_time: StepTime, slots: int, kv_capacity: int, *, speed: float, version: int
    ) -> None:
        self.slots = slots
        self.kv_capacity = kv_capacity
        self.version = version
        self.running: dict[EngineJob, None] = {}
        self.waiting: OrderedDict[EngineJob, None] = OrderedDict()
        self.preempted = 0
        self._step_time = step_time
        self.speed = speed
        self._prefixes = PrefixCache(max_entries=slots)
        self._cancelled: list[EngineJob] = []
        self._end_heap: list[tuple[int, int, EngineJob]] = []
        self._new_jobs: list[EngineJob] = []  # entered for the first time at the last boundary
        # (step, version after that step, whether the jobs running then kept their cache)
        self._commits = [(0, version, False)]
        self._last_order = 0
        self._is_blocked = False
        # The last boundary, and the tokens in the cache there.
        self._step = 0
        self._boundary_s = 0.0
        self._kv_tokens = 0
        # Tokens that the next step prefills: of new jobs, and of jobs with order <= _stale_before.
        self._prefill_tokens = 0
        self._stale_tokens = 0
        self._stale_before = 0
        # The next boundary (time, step), and the coefficients of the step times until then.
        self._next_boundary: tuple[float, int] | None = None
        self._prefill_s = self._step_s = self._step_growth_s = 0.0
        self._busy_s = self._slot_s = 0.0
        self._generated = self._prefilled = self._recomputed = 0

    def submit(self, job: EngineJob) -> bool:
        """Queue a job, at any time. Returns whether it may start at the next boundary."""
        self.waiting[job] = None
        return len(self.running) < self.slots and not self._is_blocked

    def drop(self, job: EngineJob) -> None:
        """Cancel a job, at any time; a running one leaves at the next boundary."""
        if job.order != WAITING:
            self._cancelled.append(job)
        self.waiting.pop(job, None)

    def take(self, job: EngineJob) -> None:
        """Remove a waiting or running job immediately, to continue it elsewhere with its tokens."""
        if job.order != WAITING:
            self._remove_job(job, keep=False)
        self.waiting.pop(job, None)

    def in_step(self, now: float) -> bool:
        """Whether a step is running, so that changes must wait for its end."""
        return self._next_boundary is not None and now > self._boundary_s

    def settle(self, now: float, *, hold: bool = False, boundary: bool = False) -> float | None:
        """Return the time of the next change; None if nothing changes until a job is submitted.
        During a step that is the step's end if `boundary` or `hold` is set, or a job can start or
        must leave. At a boundary, `hold` starts no further step."""
        if self.in_step(now) and self._next_boundary is not None:
            can_admit = self.waiting and len(self.running) < self.slots and not self._is_blocked
            if boundary or hold or can_admit or self._cancelled:
                self._next_boundary = self._find_step_end(now)
            return self._next_boundary[0]
        self._boundary_s = now
        self._next_boundary = None
        for job in self._cancelled:
            if job.order != WAITING:
                self._remove_job(job, keep=False)
        self._cancelled.clear()
        if not hold:
            self._preempt()
            self._admit()
            self._next_boundary = self._find_next_boundary()
        return self._next_boundary[0] if self._next_boundary else None

    def reach(self) -> list[EngineJob]:
        """Advance to the boundary that `settle` returned. Returns the jobs that ended, in order."""
        assert self._next_boundary is not None
        end_s, step = self._next_boundary
        self._busy_s, self._slot_s = self._busy_and_slot_s(end_s)
        self._next_boundary = None
        self._boundary_s = end_s
        self._complete_steps(step - self._step)
        ended: list[EngineJob] = []
        while self._end_heap and self._end_heap[0][0] <= step:
            _, order, job = heappop(self._end_heap)
            if job.order == order:
                self._remove_job(job, keep=True)
                ended.append(job)
        return ended

    def stop(self, now: float) -> None:
        """Stop the engine. Counts the busy time so far, also of an unfinished step."""
        self._busy_s, self._slot_s = self._busy_and_slot_s(now)
        self._complete_steps(self._steps_until(now))
        self._next_boundary = None
        self._boundary_s = now

    def commit(self, version: int, *, keep_cache: bool) -> None:
        """The next step samples with `version`. Running jobs prefill again, or keep their cache
        (`keep_cache`). Cached prefixes of the old version are evicted."""
        if keep_cache and version == self.version:
            return
        # A stale cache cannot be kept: the next step recomputes it with the new version.
        keep_cache = keep_cache and not self._stale_tokens
        self.version = version
        self._prefixes.clear(include_held=keep_cache)
        self._commits.append((self._step, version, keep_cache))
        if not keep_cache:
            self._stale_tokens = self._kv_tokens
            self._stale_before = self._last_order
            self._prefill_tokens = 0

    def load(self, now: float) -> EngineLoad:
        generated = self._steps_until(now) * len(self.running)
        return EngineLoad(
            running=len(self.running),
            waiting=len(self.waiting),
            slots=self.slots,
            generated_tokens=self._generated + generated,
            busy_seconds=self._busy_and_slot_s(now)[0],
            version=self.version,
            kv_tokens=self._kv_tokens + generated,
            kv_capacity=self.kv_capacity,
            preempted=self.preempted,
        )

    def usage(self, now: float, *, elapsed_s: float) -> EngineUsage:
        busy_s, slot_s = self._busy_and_slot_s(now)
        return EngineUsage(
            elapsed_s=elapsed_s,
            busy_s=busy_s,
            slot_s=slot_s,
            capacity_s=self.slots * elapsed_s,
            generated_tokens=self._generated + self._steps_until(now) * len(self.running),
            prefilled_tokens=self._prefilled,
            recomputed_tokens=self._recomputed,
            preempted=self.preempted,
        )

    def _admit(self) -> None:
        """Start waiting jobs in free slots, first come first served, while the cache has room."""
        running, capacity = self.running, self.kv_capacity
        self._is_blocked = False
        while self.waiting and len(running) < self.slots:
            job = next(iter(self.waiting))
            needed = job.context + HEADROOM * (len(running) + 1)
            if capacity and running and self._kv_tokens + needed > capacity:
                self._is_blocked = True
                break
            del self.waiting[job]
            self._start_job(job)
        if capacity:
            self._prefixes.evict(capacity - self._kv_tokens)

    def _start_job(self, job: EngineJob) -> None:
        self._last_order += 1
        context, generated = job.context, job.generated
        job.order = self._last_order
        job.began = self._step
        job.prefill = prefill = context - self._prefixes.enter(job, context)
        self._prefill_tokens += prefill
        self._kv_tokens += context
        if generated:
            self._recomputed += prefill
        self.running[job] = None
        if job.entered_s < 0:
            job.entered_s = self._boundary_s
            self._new_jobs.append(job)
        heappush(self._end_heap, (self._step + job.target - generated, self._last_order, job))

    def _remove_job(self, job: EngineJob, *, keep: bool) -> None:
        """Remove a job from the batch and update its counts. `keep`: its prefix stays cached."""
        steps = self._step - job.began
        context = job.context + steps
        if self._stale_tokens and job.order <= self._stale_before:
            self._stale_tokens -= context
        elif not steps:
            self._prefill_tokens -= job.prefill
        self._record_versions(job)
        job.generated += steps
        job.order = WAITING
        self._kv_tokens -= context
        self._is_blocked = False
        del self.running[job]
        self._prefixes.leave(job, context, keep=keep)

    def _preempt(self) -> None:
        """Preempt the last admitted jobs until the next step fits; requeue them at the front."""
        while self.kv_capacity and self._kv_tokens + len(self.running) > self.kv_capacity:
            job = next(reversed(self.running))
            self._remove_job(job, keep=False)
            self.waiting[job] = None
            self.waiting.move_to_end(job, last=False)
            self.preempted += 1

    def _record_versions(self, job: EngineJob) -> None:
        """Add the version spans of the tokens since `began`; a commit at step s applies after s."""
        upper = self._step
        spans: tuple[VersionSpan, ...] = ()
        for step, version, kept in reversed(self._commits):
            if upper <= job.began:
                break
            if step < upper:
                lower = max(step, job.began)
                spans = ((version, upper - lower, kept and step > job.began), *spans)
                upper = lower
        job.spans += spans

    def _find_next_boundary(self) -> tuple[float, int] | None:
        """Time and step of the boundary at which a job ends or the cache is full."""
        batch = len(self.running)
        if not batch:
            return None
        costs, speed = self._step_time, self.speed
        self._prefill_s = costs.prefill_seconds(self._prefill_tokens + self._stale_tokens) / speed
        self._step_s = costs.seconds(batch, self._kv_read(batch)) / speed
        self._step_growth_s = costs.per_kv_token_s * batch / speed
        for job in self._new_jobs:
            job.first_token_s = self._boundary_s + self._prefill_s + self._step_s
        while self._end_heap[0][1] != self._end_heap[0][2].order:
            heappop(self._end_heap)
        steps = self._end_heap[0][0] - self._step
        if self.kv_capacity:
            steps = min(steps, (self.kv_capacity - self._kv_tokens) // batch)
        return self._boundary_s + self._duration_s(steps), self._step + steps

    def _kv_read(self, batch: int) -> int:
        """Cached tokens that the next step reads. Padded or not, they grow by `batch` per step."""
        if not self._step_time.padded:
            return self._kv_tokens
        return batch * max(job.context + self._step - job.began for job in self.running)

    def _find_step_end(self, now: float) -> tuple[float, int]:
        """The end of the step that runs at `now`; `now` itself, if a step ends there."""
        steps = self._steps_until(now)
        if steps == 0 or self._boundary_s + self._duration_s(steps) < now:
            steps += 1
        return self._boundary_s + self._duration_s(steps), self._step + steps

    def _duration_s(self, steps: int) -> float:
        return (
            self._prefill_s + self._step_s * steps + self._step_growth_s * (steps * (steps - 1) / 2)
        )

    def _steps_until(self, now: float) -> int:
        """Steps completed by `now`: solves `_duration_s(steps) = elapsed` for steps."""
        elapsed = now - self._boundary_s - self._prefill_s
        if self._next_boundary is None or elapsed < self._step_s:
            return 0
        b = self._step_s - self._step_growth_s / 2
        steps = int(2 * elapsed / (b + sqrt(b * b + 2 * self._step_growth_s * elapsed)))
        # Rounding may be one step off to either side.
        if self._boundary_s + self._duration_s(steps) > now:
            return steps - 1
        return steps + (self._boundary_s + self._duration_s(steps + 1) <= now)

    def _busy_and_slot_s(self, now: float) -> tuple[float, float]:
        elapsed = now - self._boundary_s if self._next_boundary is not None else 0.0
        return self._busy_s + elapsed, self._slot_s + elapsed * len(self.running)

    def _complete_steps(self, steps: int) -> None:
        if not steps:
            return
        generated = steps * len(self.running)
        self._new_jobs.clear()
        self._step += steps
        self._kv_tokens += generated
        self._generated += generated
        self._prefilled += self._prefill_tokens + self._stale_tokens
        self._recomputed += self._stale_tokens
        self._prefill_tokens = self._stale_tokens = 0

"""Continuous batching as arithmetic: what a simulated engine's batch does, change by change. Pure.

Owns the jobs of one engine (waiting, running), its cache in tokens and the count of its steps.
Knows no event loop: times come in as numbers, and the next time at which something changes goes
out.

    submit -> waiting -> (slot and cache free, between two steps) -> running -> reach() returns it
                 ^                                                     |
                 +---------- preempted: the cache is full -------------+

Each step draws one token for every running job, so from one change of the batch to the next the
cache grows by the batch each step, and m steps take

    lead + each * m + growth * m (m - 1) / 2      lead: the first step's prefill
                                                  growth: reading the tokens that came to the cache

A job's last step is known when it starts, and so is the step at which the cache is full. So the
work is O(log slots) for each change, and none for the steps between.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush
from math import sqrt

from rollick.rollout.usage import Usage
from rollick.rollout.workload import StepTime
from rollick.types import SampleId

HEADROOM = 16
"""Tokens for each running job that must be free in the cache before one more starts: without it, a
job could be thrown out a step after it came in."""

KEPT_PER_SLOT = 1
"""Prefixes that a cache without a limit keeps for jobs to come, for each slot."""

WAITING = -1
"""The order of a job that does not run."""


@dataclass(slots=True, eq=False)
class Job:
    """One request on an engine, in numbers of tokens."""

    uid: SampleId
    group: int | None
    prompt: int
    wanted: int
    """Tokens in all when it ends, those that it came with among them."""
    drawn: int = 0
    """Tokens it has, without those of the run under way."""
    spans: tuple[tuple[int, int, bool], ...] = ()
    """(version, tokens, whether over a cache that an older version computed) that this engine drew,
    in order, without the run under way."""
    order: int = WAITING
    began: int = 0
    prefill: int = 0
    epoch: int = -1
    entered_s: float = -1.0
    """When it first had a slot; negative: not yet."""
    first_s: float = -1.0
    """When the first step after that ends."""

    @property
    def context(self) -> int:
        return self.prompt + self.drawn


class Batching:
    """The batch of one engine. Changes happen at boundaries, between two steps.

    `settle` decides at a boundary who runs and gives the time of the next one; `reach` goes there.
    What else changes the batch (take, commit, free) must be called at a boundary, and be followed
    by `settle`.
    """

    def __init__(
        self,
        step_time: StepTime,
        slots: int,
        *,
        kv_capacity: int = 0,
        speed: float = 1.0,
        version: int = 0,
    ) -> None:
        self.slots = slots
        self.kv_capacity = kv_capacity
        self.version = version
        self.running: dict[Job, None] = {}
        self.waiting: OrderedDict[Job, None] = OrderedDict()
        self.preempted = 0
        self._step_time = step_time
        self.speed = speed
        self._prefixes = _Prefixes(slots * KEPT_PER_SLOT)
        self._leaving: list[Job] = []
        self._ending: list[tuple[int, int, Job]] = []
        self._fresh: list[Job] = []  # entered for the first time at the last boundary
        # (step, version from then on, whether jobs that run then keep their cache)
        self._commits = [(0, version, False)]
        self._orders = 0
        self._blocked = False
        # The last boundary, and what the cache holds there.
        self._step = 0
        self._since = 0.0
        self._kv = 0
        # What the next step prefills: of new jobs, and of those whose cache is stale.
        self._prefill = 0
        self._stale = 0
        self._stale_before = 0
        # The boundary to come, and the time of the steps up to it.
        self._plan: tuple[float, int] | None = None
        self._lead = self._each = self._growth = 0.0
        self._busy_s = self._slot_s = 0.0
        self._generated = self._prefilled = self._recomputed = 0

    def submit(self, job: Job) -> bool:
        """At any time. Says whether the job could run at the next boundary."""
        self.waiting[job] = None
        return len(self.running) < self.slots and not self._blocked

    def drop(self, job: Job) -> None:
        """At any time: nobody wants it; it leaves at the next boundary, if it runs."""
        if job.order == WAITING:
            self.waiting.pop(job, None)
        else:
            self._leaving.append(job)

    def take(self, job: Job) -> None:
        """Remove a job that waits or runs; it keeps the tokens it has."""
        if job.order == WAITING:
            self.waiting.pop(job, None)
        else:
            self._leave(job, keep=False)

    def in_step(self, now: float) -> bool:
        """Whether a step is half done, so that changes must wait for its end."""
        return self._plan is not None and now > self._since

    def settle(self, now: float, *, hold: bool = False, boundary: bool = False) -> float | None:
        """The time of the next boundary that matters; None: nothing moves until something comes.

        In a step nothing can change; then it is that step's end if `boundary` is wanted, or if
        somebody can come or must go. `hold` stops the engine at this boundary.
        """
        if self._plan is not None and now > self._since:
            room = self.waiting and len(self.running) < self.slots and not self._blocked
            if boundary or hold or room or self._leaving:
                self._plan = self._boundary_after(now)
            return self._plan[0]
        self._since = now
        self._plan = None
        for job in self._leaving:
            if job.order != WAITING:
                self._leave(job, keep=False)
        self._leaving.clear()
        if not hold:
            self._preempt()
            self._admit()
            self._plan = self._next_change()
        return self._plan[0] if self._plan else None

    def reach(self) -> list[Job]:
        """Go to the boundary that `settle` gave. Returns the jobs that ended there, in order."""
        assert self._plan is not None
        time, step = self._plan
        self._plan = None
        self._count_steps(step - self._step, time)
        ended: list[Job] = []
        while self._ending and self._ending[0][0] <= step:
            _, order, job = heappop(self._ending)
            if job.order == order:
                self._leave(job, keep=True)
                ended.append(job)
        return ended

    def stop(self, now: float) -> None:
        """Nothing moves any more: count what was done, half a step too."""
        self._busy_s, self._slot_s = self._times(now)
        self._count_tokens(self._steps_until(now))
        self._plan = None
        self._since = now

    def commit(self, version: int, *, keep_cache: bool = False) -> None:
        """From the next step on tokens are of `version`. Running jobs go on, with their cache
        computed anew, or kept (`keep_cache`). New jobs find no prefix of the old version."""
        if keep_cache and version == self.version:
            return
        # What is to be computed anew at the next step is so by the new version.
        keep_cache = keep_cache and not self._stale
        self.version = version
        self._prefixes.forget(held=keep_cache)
        self._commits.append((self._step, version, keep_cache))
        if not keep_cache:
            self._invalidate()

    def free(self) -> None:
        """The cache's memory is gone: running jobs compute theirs anew."""
        self._prefixes.forget(held=False)
        self._commits.append((self._step, self.version, False))
        self._invalidate()

    def kv_tokens(self, now: float) -> int:
        return self._kv + self._steps_until(now) * len(self.running)

    def generated_tokens(self, now: float) -> int:
        return self._generated + self._steps_until(now) * len(self.running)

    def busy_s(self, now: float) -> float:
        return self._times(now)[0]

    def usage(self, now: float, *, elapsed_s: float) -> Usage:
        busy_s, slot_s = self._times(now)
        return Usage(
            elapsed_s=elapsed_s,
            busy_s=busy_s,
            slot_s=slot_s,
            capacity_s=self.slots * elapsed_s,
            steps=self._step + self._steps_until(now),
            generated_tokens=self.generated_tokens(now),
            prefilled_tokens=self._prefilled,
            recomputed_tokens=self._recomputed,
            preempted=self.preempted,
        )

    def _admit(self) -> None:
        """Waiting jobs into free slots, first come first served, as far as the cache has room."""
        running, capacity = self.running, self.kv_capacity
        self._blocked = False
        while self.waiting and len(running) < self.slots:
            job = next(iter(self.waiting))
            needed = job.context + HEADROOM * (len(running) + 1)
            if capacity and running and self._kv + needed > capacity:
                self._blocked = True
                break
            del self.waiting[job]
            self._enter(job)
        if capacity:
            self._prefixes.trim(capacity - self._kv)

    def _enter(self, job: Job) -> None:
        self._orders += 1
        context, drawn = job.context, job.drawn
        job.order = self._orders
        job.began = self._step
        job.prefill = prefill = context - self._prefixes.enter(job, context)
        self._prefill += prefill
        self._kv += context
        if drawn:
            self._recomputed += prefill
        self.running[job] = None
        if job.entered_s < 0:
            job.entered_s = self._since
            self._fresh.append(job)
        heappush(self._ending, (self._step + job.wanted - drawn, self._orders, job))

    def _leave(self, job: Job, *, keep: bool) -> None:
        """Out of the batch; the run's tokens become the job's. `keep`: its cache stays."""
        ran = self._step - job.began
        context = job.context + ran
        if self._stale and job.order <= self._stale_before:
            self._stale -= context
        elif not ran:
            self._prefill -= job.prefill
        self._note_versions(job)
        job.drawn += ran
        job.order = WAITING
        self._kv -= context
        self._blocked = False
        del self.running[job]
        self._prefixes.leave(job, context, keep=keep)

    def _preempt(self) -> None:
        """Throw the youngest jobs out until the next step's tokens fit; they wait in front."""
        while self.kv_capacity and self._kv + len(self.running) > self.kv_capacity:
            job = next(reversed(self.running))
            self._leave(job, keep=False)
            self.waiting[job] = None
            self.waiting.move_to_end(job, last=False)
            self.preempted += 1

    def _note_versions(self, job: Job) -> None:
        """Which version drew which of the run's tokens: a commit at step s holds after s."""
        upper = self._step
        spans: tuple[tuple[int, int, bool], ...] = ()
        for step, version, kept in reversed(self._commits):
            if upper <= job.began:
                break
            if step < upper:
                lower = max(step, job.began)
                spans = ((version, upper - lower, kept and step > job.began), *spans)
                upper = lower
        job.spans += spans

    def _invalidate(self) -> None:
        self._stale = self._kv
        self._stale_before = self._orders
        self._prefill = 0

    def _next_change(self) -> tuple[float, int] | None:
        """The boundary at which a job ends or the cache is full."""
        batch = len(self.running)
        if not batch:
            return None
        time, speed = self._step_time, self.speed
        self._lead = time.prefill_seconds(self._prefill + self._stale) / speed
        self._each = time.seconds(batch, self._kv_read(batch)) / speed
        self._growth = time.per_kv_token_s * batch / speed
        for job in self._fresh:
            job.first_s = self._since + self._lead + self._each
        while self._ending[0][1] != self._ending[0][2].order:
            heappop(self._ending)
        steps = self._ending[0][0] - self._step
        if self.kv_capacity:
            steps = min(steps, (self.kv_capacity - self._kv) // batch)
        return self._since + self._seconds(steps), self._step + steps

    def _kv_read(self, batch: int) -> int:
        """Tokens in the cache that the next step pays for. Either count grows by the batch with
        each step."""
        if not self._step_time.padded:
            return self._kv
        return batch * max(job.context + self._step - job.began for job in self.running)

    def _boundary_after(self, now: float) -> tuple[float, int]:
        """The end of the step that runs at `now`; `now` itself, if a step ends there."""
        steps = self._steps_until(now)
        if steps == 0 or self._since + self._seconds(steps) < now:
            steps += 1
        return self._since + self._seconds(steps), self._step + steps

    def _seconds(self, steps: int) -> float:
        return self._lead + self._each * steps + self._growth * (steps * (steps - 1) / 2)

    def _steps_until(self, now: float) -> int:
        """Steps that are over at `now`: the closed form solved for the number of steps."""
        elapsed = now - self._since - self._lead
        if self._plan is None or elapsed < self._each:
            return 0
        b = self._each - self._growth / 2
        steps = int(2 * elapsed / (b + sqrt(b * b + 2 * self._growth * elapsed)))
        # Rounding may be one step off to either side.
        if self._since + self._seconds(steps) > now:
            return steps - 1
        if self._since + self._seconds(steps + 1) <= now:
            return steps + 1
        return steps

    def _times(self, now: float) -> tuple[float, float]:
        passed = now - self._since if self._plan is not None else 0.0
        return self._busy_s + passed, self._slot_s + passed * len(self.running)

    def _count_steps(self, steps: int, time: float) -> None:
        seconds = time - self._since
        self._busy_s += seconds
        self._slot_s += seconds * len(self.running)
        self._since = time
        self._count_tokens(steps)

    def _count_tokens(self, steps: int) -> None:
        if steps:
            drawn = steps * len(self.running)
            self._fresh.clear()
            self._step += steps
            self._kv += drawn
            self._generated += drawn
            self._prefilled += self._prefill + self._stale
            self._recomputed += self._stale
            self._prefill = self._stale = 0


class _Prefixes:
    """What an arriving job finds in the cache: the prompt of its group, or its own earlier turns.

    A group's prompt is there while a member that computed or found it runs; what ended jobs leave
    behind is kept, the oldest given up first.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._epoch = 0
        self._held: dict[int, tuple[int, int]] = {}  # group -> members that run, prompt's tokens
        self._kept: OrderedDict[int | SampleId, int] = OrderedDict()
        self._kept_tokens = 0

    def enter(self, job: Job, context: int) -> int:
        """The job starts; returns how many of its tokens need no prefill."""
        job.epoch = self._epoch
        found = min(self._pop(job.uid), context)
        group, prompt = job.group, job.prompt
        if group is None:
            return found
        held = self._held.get(group)
        members, tokens = held if held else (0, self._pop(group))
        shared = min(tokens, prompt)
        self._held[group] = (members + 1, shared or prompt)
        return max(found, shared)

    def leave(self, job: Job, context: int, *, keep: bool) -> None:
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

    def trim(self, room: int) -> None:
        """Running jobs go first: give up what no longer fits beside them."""
        while self._kept and self._kept_tokens > room:
            self._kept_tokens -= self._kept.popitem(last=False)[1]

    def forget(self, *, held: bool) -> None:
        """What was kept is no use any more; nor, if `held`, is what running jobs have."""
        self._kept.clear()
        self._kept_tokens = 0
        if held:
            self._held.clear()
            self._epoch += 1

    def _keep(self, key: int | SampleId, tokens: int) -> None:
        self._pop(key)
        self._kept[key] = tokens
        self._kept_tokens += tokens
        if len(self._kept) > self._entries:
            self._kept_tokens -= self._kept.popitem(last=False)[1]

    def _pop(self, key: int | SampleId) -> int:
        tokens = self._kept.pop(key, 0)
        self._kept_tokens -= tokens
        return tokens

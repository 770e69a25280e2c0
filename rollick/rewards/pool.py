"""RewardPool: runs rewards in local child processes, so that a reward cannot stop or slow the run.

    score() --queue--> task 1 <--frames--> child process 1 (child.py)
      ^                task 2 <--frames--> child process 2         watchdog: kills the children
      +---- Score -----+                                           if this process dies

Each task serves one child: it sends several waiting samples in a frame and reads the scores as
they arrive. If a call times out or crashes the child, only the running sample fails: the rest of
the frame returns to the front of the queue, the child's process group is killed, and a new child
starts. If the child was killed or stopped from outside, the running sample is scored again too. If
the child exceeded its own CPU limit (call_limits.py), the running sample scores 0. In-process
rewards, such as the run's reward model, are called in this process.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import ceil
from pathlib import Path
from typing import Any

import cloudpickle

from rollick.children.child_loop import ChildSetup
from rollick.children.process import Child, ChildLost, FrameKind, pickle_payload
from rollick.children.supervisor import ChildSupervisor, pickle_definitions
from rollick.config.schema import RewardSpec
from rollick.errors import RewardError, RollickError
from rollick.observe.faults import FaultLog
from rollick.rewards.base import Declaration, combine, part_names
from rollick.rewards.call_counts import RewardCallCounts
from rollick.rewards.call_limits import KILL_SIGNAL
from rollick.rewards.child import RewardCall, decode_scores
from rollick.types import RewardFn, Sample, Score, ScoreStatus

PROGRAM = "rollick.rewards.child"
FRAME_SECONDS = 0.02
"""Target duration of a frame: long enough to amortise the pipe, short enough to balance load."""
MAX_FRAME_JOBS = 64
IN_PROCESS = Declaration(cache=True)
"""Declaration of in-process rewards: frozen models, whose scores can be cached."""
NOT_CALLED = Score.failed("")
"""Score of a sample's other rewards, after one of its rewards timed out or crashed the child."""
InProcessReward = Callable[[Sample], Coroutine[Any, Any, Score]]
MAX_CACHED_SCORES = 50_000
MAX_LOST_CHILDREN = 3
"""A job fails after this many children were lost with it and no call was at fault."""


@dataclass(slots=True)
class RewardPoolStats:
    """Counts since the pool was opened. A call is one sample with all its rewards."""

    calls: int = 0
    failures: int = 0
    timeouts: int = 0
    restarts: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """A sample to score in a child."""

    payload: bytes
    """The pickled sample and its calls."""
    num_rewards: int
    scores: asyncio.Future[list[Score]]
    batch: int = 0
    """Largest batch size of its rewards; 0: none supports batches."""
    unbatched: bool = False
    """Retry this job alone, because a batch with it was lost."""
    lost_children: int = 0


@dataclass(slots=True)
class ScoreCache:
    """An LRU cache of scores, by a hash of the content. Failed scores are not cached: a retry may
    succeed."""

    limit: int = MAX_CACHED_SCORES
    _scores: OrderedDict[bytes, Score] = field(default_factory=OrderedDict[bytes, Score])

    def get(self, key: bytes | None) -> Score | None:
        """The cached score, without the seconds and metrics of the call that computed it."""
        if key is None or key not in self._scores:
            return None
        self._scores.move_to_end(key)
        return replace(self._scores[key], seconds=0.0, metrics={})

    def put(self, key: bytes | None, score: Score) -> None:
        if key is None or not score.ok:
            return
        self._scores[key] = score
        while len(self._scores) > self.limit:
            self._scores.popitem(last=False)


@dataclass(slots=True, eq=False)
class RewardPool:
    """Open it with `async with RewardPool.open(...)`; on exit every process has ended."""

    processes: int
    timeout_s: float
    _supervisor: ChildSupervisor
    in_process: Mapping[str, InProcessReward] = field(default_factory=dict[str, InProcessReward])
    stats: RewardPoolStats = field(default_factory=RewardPoolStats)
    call_counts: RewardCallCounts = field(default_factory=RewardCallCounts)
    declared: Mapping[str, Declaration] = field(default_factory=dict[str, Declaration])
    samples_in_flight: int = 0
    """Samples with rewards being computed; a cached score is not counted."""
    _cache: ScoreCache = field(default_factory=ScoreCache)
    _waiting: deque[_Job] = field(default_factory=deque[_Job])
    _pending: set[asyncio.Future[Any]] = field(default_factory=set[asyncio.Future[Any]])
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _error: RollickError | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        rewards: Mapping[str, RewardFn | str],
        *,
        processes: int,
        timeout_s: float,
        base: Path | None = None,
        output: Path | None = None,
        secrets: Mapping[str, str] | None = None,
        in_process: Mapping[str, InProcessReward] | None = None,
        faults: FaultLog | None = None,
    ) -> AsyncGenerator[RewardPool, None]:
        """Start the children and wait until all have loaded the rewards.

        `rewards`: by the name that a RewardSpec uses, a function or a reference (a built-in name,
        file.py:function relative to `base`, module:function). `output`: file for what rewards
        print. `secrets`: environment variables for the children. `faults`: records children that
        were replaced.
        """
        setup = ChildSetup(pickle_definitions("reward", rewards, RewardError), base)
        supervisor = ChildSupervisor(
            PROGRAM, "reward", setup, RewardError, output, secrets or {}, faults
        )
        pool = cls(processes, timeout_s, supervisor, in_process or {})
        async with supervisor.run(processes if rewards else 0, pool._serve, pool._fail_pending):
            if rewards:
                declared = json.loads(supervisor.ready_body)
                pool.declared = {name: Declaration(**values) for name, values in declared.items()}
            yield pool

    async def score(self, sample: Sample, specs: Sequence[RewardSpec]) -> Score:
        """The weighted score of a sample. Waits for a child; a failed reward is a failed Score.
        Raises RewardError if the pool itself cannot score."""
        if self._error is not None:
            raise self._error
        _check_specs(specs, {*self._supervisor.setup.definitions, *self.in_process}, sample)
        scores = self._lookup_scores(sample, specs)
        missing = [index for index, score in enumerate(scores) if score is None]
        if missing:
            self.samples_in_flight += 1
            try:
                computed = await self._compute_scores(sample, [specs[index] for index in missing])
            finally:
                self.samples_in_flight -= 1
            for index, score in zip(missing, computed, strict=True):
                scores[index] = score
        return self._combine(specs, [score for score in scores if score is not None])

    def _lookup_scores(self, sample: Sample, specs: Sequence[RewardSpec]) -> list[Score | None]:
        """For each reward: the cached score, a failed score if max_cost is spent, or None."""
        scores: list[Score | None] = []
        for spec in specs:
            score = self._cache.get(self._cache_key(sample, spec))
            cost = self.call_counts.cost(spec.name)
            if score is None and spec.max_cost and cost >= spec.max_cost:
                score = Score.failed(f"its max_cost of {spec.max_cost:g} is spent: {cost:.4g}")
                self.call_counts.count(spec.name, score)
            elif score is not None:
                self.call_counts.count_cached(spec.name)
            scores.append(score)
        return scores

    def _cache_key(self, sample: Sample, spec: RewardSpec) -> bytes | None:
        declared = self.declared.get(spec.name, IN_PROCESS)
        use_cache = declared.cache if spec.cache is None else spec.cache
        if not use_cache or declared.sees_sample:
            return None
        return content_key(sample, spec, version=declared.version)

    async def _compute_scores(self, sample: Sample, specs: Sequence[RewardSpec]) -> list[Score]:
        """Call rewards in a child and in this process, concurrently; cache and count the scores."""
        for_child = [spec for spec in specs if spec.name not in self.in_process]
        in_process = [self.in_process[spec.name] for spec in specs if spec.name in self.in_process]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(reward(sample)) for reward in in_process]
                child_scores = iter(await self._call_child(sample, for_child) if for_child else ())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        in_process_scores = (task.result() for task in tasks)
        scores = [
            next(in_process_scores if spec.name in self.in_process else child_scores)
            for spec in specs
        ]
        for spec, score in zip(specs, scores, strict=True):
            self._cache.put(self._cache_key(sample, spec), score)
            if score is not NOT_CALLED:
                self.call_counts.count(spec.name, score)
                self.call_counts.check_error_budget(spec)
        return scores

    async def _call_child(self, sample: Sample, specs: Sequence[RewardSpec]) -> list[Score]:
        """The score of each reward. If a reward exceeded its CPU limit, which ended the process,
        call the other rewards again."""
        scores = await self._run_job(sample, specs)
        missing = [index for index, score in enumerate(scores) if score is NOT_CALLED]
        if not missing or not any(score.ok for score in scores):
            return scores
        others = iter(await self._call_child(sample, [specs[index] for index in missing]))
        return [next(others) if score is NOT_CALLED else score for score in scores]

    async def _run_job(self, sample: Sample, specs: Sequence[RewardSpec]) -> list[Score]:
        calls = [RewardCall(spec.name, spec.options) for spec in specs]
        try:
            payload = pickle_payload((sample, calls))
        except Exception as error:
            reason = f"the sample cannot be sent to a reward process: {error}"
            return [Score.failed(reason)] * len(specs)
        scores: asyncio.Future[list[Score]] = asyncio.get_running_loop().create_future()
        self._pending.add(scores)
        batch = max(self.declared[spec.name].batch for spec in specs)
        self._waiting.append(_Job(payload, len(specs), scores, batch))
        self._wake.set()
        try:
            return await scores
        finally:
            self._pending.discard(scores)

    def _combine(self, specs: Sequence[RewardSpec], scores: Sequence[Score]) -> Score:
        labels = part_names(spec.name for spec in specs)
        weights = {label: spec.weight for label, spec in zip(labels, specs, strict=True)}
        score = combine(dict(zip(labels, scores, strict=True)), weights)
        self.stats.calls += 1
        self.stats.failures += not score.ok
        self.stats.timeouts += score.status is ScoreStatus.TIMEOUT
        return score

    async def _serve(self, child: Child, rank: int) -> None:
        """Take waiting jobs, run them on the child and replace it when lost. Never returns."""
        now = asyncio.get_running_loop().time
        frame_size = 1
        while True:
            jobs = await self._take_jobs(frame_size)
            started = now()
            failure = await self._run_frame(child, jobs)
            job_s = max((now() - started) / len(jobs), 1e-6)
            frame_size = max(1, min(MAX_FRAME_JOBS, 2 * frame_size, int(FRAME_SECONDS / job_s)))
            if failure is not None:
                frame_size = 1
                self.stats.restarts += 1
                timed_out, cause = failure.status is ScoreStatus.TIMEOUT, failure.detail
                child = await self._supervisor.replace(
                    child, rank=rank, timed_out=timed_out, cause=cause
                )

    async def _take_jobs(self, size: int) -> list[_Job]:
        """Wait for jobs and take up to `size`, or up to the first job's batch size if that is more,
        but no more than this child's share of the queue. Skips jobs that were cancelled."""
        while True:
            jobs: list[_Job] = []
            share = ceil(len(self._waiting) / self.processes)
            while self._waiting and len(jobs) < share:
                job = self._waiting[0]
                max_jobs = max(size, jobs[0].batch if jobs else job.batch)
                if jobs and (job.unbatched or jobs[0].unbatched or len(jobs) >= max_jobs):
                    break
                self._waiting.popleft()
                if not job.scores.done():
                    jobs.append(job)
            if jobs:
                return jobs
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()

    async def _run_frame(self, child: Child, jobs: Sequence[_Job]) -> Score | None:
        """Send the jobs and resolve them as scores arrive. Returns the failure if the child was
        lost."""
        now = asyncio.get_running_loop().time
        remaining = dict(enumerate(jobs))
        running: dict[int, int] = {}
        deadline = now() + self.timeout_s
        body = cloudpickle.dumps([(number, job.payload) for number, job in remaining.items()])
        try:
            await child.send(FrameKind.WORK, body, deadline=deadline)
            while remaining:
                for kind, content in await child.receive(deadline=deadline):
                    deadline = now() + self.timeout_s
                    if kind == FrameKind.STARTED:
                        running = dict(json.loads(content))
                    else:
                        number, scores = decode_scores(content)
                        running = {}
                        _resolve_job(remaining.pop(number), scores)
            return None
        except TimeoutError:
            child.failed_at = time.time() - self.timeout_s
            reason = f"no result within {self.timeout_s:g} s; its process was killed"
            failed = Score.failed(reason, status=ScoreStatus.TIMEOUT)
            failure = replace(failed, seconds=self.timeout_s)
        except (ChildLost, ConnectionError):
            await child.wait()
            failure = _score_of_exit(child)
            if child.was_killed_externally:
                running = {}
        self._handle_loss(remaining, running, failure)
        return failure

    def _handle_loss(self, jobs: dict[int, _Job], running: dict[int, int], failure: Score) -> None:
        """Fail the job that was running; return the others to the front of the queue, in order. If
        a batch was running, retry each of its jobs alone. If no call is at fault (`running` is
        empty), count the loss for each job, so that a job that kills its child is not retried
        forever."""
        for number in running:
            jobs[number].unbatched = len(running) > 1
        if len(running) == 1:
            [(number, index)] = running.items()
            job = jobs.pop(number)
            scores = [NOT_CALLED] * job.num_rewards
            scores[index] = failure
            _resolve_job(job, scores)
        elif not running:
            for number, job in list(jobs.items()):
                job.lost_children += 1
                if job.lost_children >= MAX_LOST_CHILDREN:
                    _resolve_job(jobs.pop(number), [failure])
        self._waiting.extendleft(reversed(jobs.values()))
        self._wake.set()

    def _fail_pending(self, error: RollickError) -> None:
        """Stop the pool: every pending and later call raises the error."""
        self._error = error
        self._waiting.clear()
        for scores in self._pending:
            if not scores.done():
                scores.set_exception(error)


def _score_of_exit(child: Child) -> Score:
    """0 if the child was killed because its call exceeded the CPU limit. Every other exit is a
    failure."""
    if child.process.returncode == -KILL_SIGNAL:
        return Score(0.0, detail="too expensive to check: its process exceeded the CPU limit")
    return Score.failed(f"its process died ({child.exit_text})")


def _resolve_job(job: _Job, scores: list[Score]) -> None:
    """Set the result of a job: a score for each reward, or one failure for all of them."""
    if not job.scores.done():
        is_complete = len(scores) == job.num_rewards
        job.scores.set_result(scores if is_complete else scores[:1] * job.num_rewards)


def _check_specs(specs: Sequence[RewardSpec], known: set[str], sample: Sample) -> None:
    if not specs:
        message = f"sample {sample.uid} of domain {sample.prompt.domain!r} has no reward"
        raise RewardError(message, fix="give the domain at least one reward")
    for spec in specs:
        if spec.name not in known:
            fix = f"use one of its rewards: {', '.join(sorted(known)) or 'none'}"
            raise RewardError(f"the reward {spec.name!r} was not given to the pool", fix=fix)


def content_key(sample: Sample, spec: RewardSpec, *, version: str) -> bytes | None:
    """A hash of everything that a reward can read if it does not get the Sample, so that equal keys
    have equal scores. None if the row or the options cannot be JSON."""
    prompt = sample.prompt
    turns = [[turn.role, turn.content] for turn in prompt.turns]
    reward, task = [spec.name, version, spec.options], [prompt.domain, turns, dict(prompt.row)]
    try:
        text = json.dumps([reward, task, sample.text, sample.truncated], sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

"""RewardPool: runs rewards in local child processes, so that no reward can stop or slow the run.

    score() --queue--> lane 1 <--frames--> child process 1 (child.py)
      ^                lane 2 <--frames--> child process 2         guard.py: kills the children
      +---- Score -----+                                           if this process dies

A lane is a task that owns one child: it sends the samples that wait as one frame and reads the
scores as they come. A call past its deadline, or a child that dies, costs the sample that was
running and nobody else: the rest of the frame goes back to the head of the queue, the child's
whole process group is killed, and a fresh child takes over. Of a batch that is lost so, each sample
is tried again alone. A failure is a status, not a number.

What equal samples scored is remembered (memory.py), where the reward says that it may be; who was
called how often, failed and cost what is counted, and held against budgets (tally.py). A reward of
a model that the run holds (`here`) is asked for in this process, and counted like the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import cloudpickle

from rollick.children.nursery import Nursery
from rollick.children.process import Child, ChildLost
from rollick.config.schema import RewardSpec
from rollick.errors import RewardError
from rollick.rewards.base import Declaration, combine, part_names
from rollick.rewards.child import Call, Definitions, Kind, decode_declarations, decode_scores
from rollick.rewards.memory import ScoreMemory, content_key
from rollick.rewards.process import define_reward, pack_job
from rollick.rewards.tally import RewardTally
from rollick.types import RewardFn, Sample, Score, ScoreStatus

PROGRAM = "rollick.rewards.child"
FRAME_SECONDS = 0.02
"""Work sent to a child at once: long enough to hide the pipe, short enough to share fairly."""
MAX_FRAME = 64
ANSWERED_HERE = Declaration(cache=True)
"""A frozen model says the same of equal samples."""
NOT_CALLED = Score.failed("")
"""Of a reward whose process was lost to another one of the same sample."""
AskHere = Callable[[Sample], Coroutine[Any, Any, Score]]
"""A reward that this process answers."""
MAX_LOSSES = 3
"""A job whose child dies this often before the job's turn."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Since the pool was opened. A call is one sample, with all its rewards."""

    calls: int = 0
    failures: int = 0
    timeouts: int = 0
    restarts: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Job:
    """A sample on its way: pickled, with the names of its rewards and who waits for the scores."""

    payload: bytes
    rewards: Sequence[str]
    answer: asyncio.Future[list[Score]]
    batch: int = 0
    """Samples that its rewards take at once; 0: one."""
    alone: bool = False
    """Whether a batch with it was lost, so that it must go by itself."""
    losses: int = 0


@dataclass(slots=True, eq=False)
class RewardPool:
    """Open it with `async with RewardPool.open(...)`; when that ends, so has every process."""

    definitions: Definitions
    processes: int
    timeout_s: float
    _nursery: Nursery
    here: Mapping[str, AskHere] = field(default_factory=dict[str, AskHere])
    stats: PoolStats = field(default_factory=PoolStats)
    tally: RewardTally = field(default_factory=RewardTally)
    declared: Mapping[str, Declaration] = field(default_factory=dict[str, Declaration])
    _memory: ScoreMemory = field(default_factory=ScoreMemory)
    _waiting: deque[_Job] = field(default_factory=deque[_Job])
    _unanswered: set[asyncio.Future[Any]] = field(default_factory=set[asyncio.Future[Any]])
    _scoring: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _broken: RewardError | None = None

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
        here: Mapping[str, AskHere] | None = None,
    ) -> AsyncGenerator[RewardPool, None]:
        """Start the children and wait until each has loaded the rewards.

        `rewards`: by the name that a RewardSpec uses, a function or a reference (a built-in name,
        file.py:function relative to `base`, module:function). `output`: a file for what rewards
        print; by default the error stream of this process. `secrets`: environment variables that
        the children get besides those of this process. `here`: rewards that no child is asked for.
        """
        loads = {name: define_reward(name, reward) for name, reward in rewards.items()}
        lanes: list[asyncio.Task[None]] = []
        with contextlib.ExitStack() as files:
            log = files.enter_context(output.open("ab")) if output is not None else None
            definitions = Definitions(loads, base)
            names, body = ", ".join(loads), cloudpickle.dumps(definitions)
            nursery = Nursery(PROGRAM, "reward", names, body, RewardError, log, secrets or {})
            pool = cls(definitions, processes, timeout_s, nursery, here or {})
            try:
                children = await nursery.start_all(processes if loads else 0)
                pool.declared = decode_declarations(nursery.said) if children else {}
                for child in children:
                    lanes.append(asyncio.create_task(pool._serve(child)))
                    lanes[-1].add_done_callback(pool._notice_end)
                yield pool
            finally:
                await pool._close(lanes)

    @property
    def under_way(self) -> int:
        """Samples whose score somebody waits for."""
        return self._scoring

    async def score(self, sample: Sample, specs: Sequence[RewardSpec]) -> Score:
        """The weighted score of a sample. Waits for a child; failures come as a status.

        Raises RewardError if the pool cannot score at all.
        """
        if self._broken is not None:
            raise self._broken
        _check_specs(specs, {**self.definitions.rewards, **self.here}, sample)
        known = self._known(sample, specs)
        asked = [place for place, score in enumerate(known) if score is None]
        if asked:
            self._scoring += 1
            try:
                answers = await self._ask(sample, [specs[place] for place in asked])
            finally:
                self._scoring -= 1
            for place, score in zip(asked, answers, strict=True):
                known[place] = score
        return self._sum_up(specs, [score for score in known if score is not None])

    def _known(self, sample: Sample, specs: Sequence[RewardSpec]) -> list[Score | None]:
        """Of each reward: what an equal sample scored, or a failure where its budget is spent."""
        known: list[Score | None] = []
        for spec in specs:
            score = self._memory.find(self._key(sample, spec))
            if score is None and spec.max_cost and self.tally.cost(spec.name) >= spec.max_cost:
                score = Score.failed(
                    f"its budget (max_cost) of {spec.max_cost:g} is spent: "
                    f"{self.tally.cost(spec.name):.4g}"
                )
                self.tally.count(spec.name, score)
            elif score is not None:
                self.tally.count_cached(spec.name)
            known.append(score)
        return known

    def _key(self, sample: Sample, spec: RewardSpec) -> bytes | None:
        said = self.declared.get(spec.name, ANSWERED_HERE)
        wanted = said.cache if spec.cache is None else spec.cache and not said.sees_sample
        return content_key(sample, spec, version=said.version) if wanted else None

    async def _ask(self, sample: Sample, specs: Sequence[RewardSpec]) -> list[Score]:
        """A score for each of them, from a child or from here, side by side."""
        away = [spec for spec in specs if spec.name not in self.here]
        asks = [self.here[spec.name] for spec in specs if spec.name in self.here]
        try:
            async with asyncio.TaskGroup() as tasks:
                told = [tasks.create_task(ask(sample)) for ask in asks]
                from_child = iter(await self._ask_child(sample, away) if away else ())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        from_here = (task.result() for task in told)
        scores = [next(from_here if spec.name in self.here else from_child) for spec in specs]
        for spec, score in zip(specs, scores, strict=True):
            self._memory.keep(self._key(sample, spec), score)
            if score is not NOT_CALLED:
                self.tally.count(spec.name, score)
                self.tally.refuse_failures(spec)
        return scores

    async def _ask_child(self, sample: Sample, specs: Sequence[RewardSpec]) -> list[Score]:
        calls = [Call(spec.name, spec.options) for spec in specs]
        try:
            payload = pack_job(sample, calls)
        except Exception as error:
            failed = Score.failed(f"the sample cannot be sent to a reward process: {error}")
            return [failed for _ in specs]
        answer: asyncio.Future[list[Score]] = asyncio.get_running_loop().create_future()
        self._unanswered.add(answer)
        batch = max(self.declared[spec.name].batch for spec in specs)
        self._waiting.append(_Job(payload, [spec.name for spec in specs], answer, batch))
        self._wake.set()
        try:
            return await answer
        finally:
            self._unanswered.discard(answer)

    def _sum_up(self, specs: Sequence[RewardSpec], scores: Sequence[Score]) -> Score:
        labels = part_names(spec.name for spec in specs)
        weights = {label: spec.weight for label, spec in zip(labels, specs, strict=True)}
        score = combine(dict(zip(labels, scores, strict=True)), weights)
        self._count(score)
        return score

    async def _serve(self, child: Child) -> None:
        """A lane. Consumes waiting jobs, produces scores; waits for jobs and for its child."""
        now = asyncio.get_running_loop().time
        size = 1
        while True:
            jobs = await self._take_jobs(size)
            begun = now()
            lost = await self._run_frame(child, jobs)
            seconds_each = max((now() - begun) / len(jobs), 1e-6)
            size = max(1, min(MAX_FRAME, 2 * size, int(FRAME_SECONDS / seconds_each)))
            if lost:
                size = 1
                self.stats = replace(self.stats, restarts=self.stats.restarts + 1)
                child = await self._nursery.replace(child)

    async def _take_jobs(self, size: int) -> list[_Job]:
        """Up to `size` jobs that somebody still waits for, or a batch where the first one's rewards
        take one; but no more than this lane's share."""
        while True:
            jobs: list[_Job] = []
            share = ceil(len(self._waiting) / self.processes)
            while self._waiting and len(jobs) < share:
                first = self._waiting[0]
                most = max(size, jobs[0].batch if jobs else first.batch)
                if jobs and (first.alone or jobs[0].alone or len(jobs) >= most):
                    break
                self._waiting.popleft()
                if not first.answer.done():
                    jobs.append(first)
            if jobs:
                return jobs
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()

    async def _run_frame(self, child: Child, jobs: Sequence[_Job]) -> bool:
        """Send the jobs and settle them as their scores come; whether the child was lost."""
        now = asyncio.get_running_loop().time
        left = dict(enumerate(jobs))
        running: dict[int, int] = {}
        deadline = now() + self.timeout_s
        body = cloudpickle.dumps([(number, job.payload) for number, job in left.items()])
        try:
            await child.send(Kind.JOBS, body, deadline=deadline)
            while left:
                for kind, content in await child.receive(deadline=deadline):
                    deadline = now() + self.timeout_s
                    if kind == Kind.STARTED:
                        running = dict(json.loads(content))
                    else:
                        number, scores = decode_scores(content)
                        running = {}
                        self._settle(left.pop(number), scores)
            return False
        except TimeoutError:
            reason = f"no answer within {self.timeout_s:g} s; its process was killed"
            failure = Score.failed(reason, status=ScoreStatus.TIMEOUT)
            failure = replace(failure, seconds=self.timeout_s)
        except (ChildLost, ConnectionError):
            await child.wait()
            failure = Score.failed(f"its process died ({child.exit_text})")
        self._blame(left, running, failure)
        return True

    def _blame(self, left: dict[int, _Job], running: Mapping[int, int], failure: Score) -> None:
        """Fail the job that was running; the others go back to the head of the queue, in order.

        Of several that ran together each is tried alone. With nobody running the loss counts
        against each of them, so that no job can cost processes for ever.
        """
        for number in running:
            left[number].alone = len(running) > 1
        if len(running) == 1:
            [(number, place)] = running.items()
            culprit = left.pop(number)
            scores = [NOT_CALLED for _ in culprit.rewards]
            scores[place] = failure
            self._settle(culprit, scores)
        elif not running:
            for number, job in list(left.items()):
                job.losses += 1
                if job.losses >= MAX_LOSSES:
                    self._settle(left.pop(number), [failure for _ in job.rewards])
        self._waiting.extendleft(reversed(left.values()))
        self._wake.set()

    def _settle(self, job: _Job, scores: Sequence[Score]) -> None:
        if not job.answer.done():
            whole = len(scores) == len(job.rewards)
            job.answer.set_result(list(scores) if whole else [scores[0] for _ in job.rewards])

    def _count(self, score: Score) -> None:
        stats = self.stats
        self.stats = replace(
            stats,
            calls=stats.calls + 1,
            failures=stats.failures + (not score.ok),
            timeouts=stats.timeouts + (score.status is ScoreStatus.TIMEOUT),
            seconds=stats.seconds + score.seconds,
        )

    def _notice_end(self, lane: asyncio.Task[None]) -> None:
        """A lane ends only by being cancelled; any other end breaks the pool, loudly."""
        if lane.cancelled() or (error := lane.exception()) is None:
            return
        if not isinstance(error, RewardError):
            error = RewardError(f"the pool lost the thread of a reward process: {error!r}")
        self._give_up(error)

    def _give_up(self, error: RewardError) -> None:
        self._broken = error
        self._waiting.clear()
        for answer in self._unanswered:
            if not answer.done():
                answer.set_exception(error)

    async def _close(self, lanes: Sequence[asyncio.Task[None]]) -> None:
        self._nursery.kill_all()
        for lane in lanes:
            lane.cancel()
        self._give_up(RewardError("the reward pool is closed", fix="score inside its `async with`"))
        try:
            await asyncio.gather(*lanes, return_exceptions=True)
        finally:
            await self._nursery.close()


def _check_specs(specs: Sequence[RewardSpec], known: Mapping[str, Any], sample: Sample) -> None:
    if not specs:
        raise RewardError(
            f"sample {sample.uid} of domain {sample.prompt.domain!r} has no reward",
            fix="give the domain at least one reward",
        )
    for spec in specs:
        if spec.name not in known:
            raise RewardError(
                f"the reward {spec.name!r} was not given to the pool",
                fix=f"it has: {', '.join(known) or 'none'}",
            )

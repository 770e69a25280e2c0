"""The rollout: every sample by itself, from a prompt to a group that can be trained on.

    prompts() -> Ledger -> router -> episode on an engine -> score -> Group -> take()
                   ^                                                    |
                   +------------- a dropped or trained group frees its place

Owns the tasks (one for each sample under way) and the clock. Which group may start and which make a
batch is decided by the ledger, which engine a sample goes to by the router. There is no loop that
polls: each event (a sample ends, is scored, a version is published) starts what it makes possible.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rollick.config.schema import RolloutConfig
from rollick.errors import CheckpointError, EngineError, StuckError
from rollick.infer.engine import Engine
from rollick.rollout.episode import ChatCodec, RememberingCodec, run_episode, stream_of
from rollick.rollout.ledger import GroupState, Ledger, SampleState
from rollick.rollout.limits import (
    check_ages,
    check_scores,
    name_waits,
    no_signal_error,
    nothing_can_be_scored,
    stuck_error,
)
from rollick.rollout.router import choose_engine
from rollick.rollout.stats import RolloutStats, StepWindow, token_ages
from rollick.types import (
    Group,
    PolicyVersion,
    Prompt,
    Sample,
    SampleId,
    Sampling,
    Score,
    ScoredSample,
    frozen_array,
)

CLOSE_S = 5.0
"""How long engines have to end aborted requests before the tasks are cancelled."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a rollout works with; see Rollout.open."""

    config: RolloutConfig
    sampling: Sampling
    prompts: Callable[[], Prompt]
    engines: Sequence[Engine]
    codec: ChatCodec
    score: Callable[[Sample], Awaitable[Score]]
    signal: Callable[[Group], str | None] | None
    judged: Callable[[Group], None] | None
    seed: int
    purpose: str
    stuck_after_s: float
    progress: Callable[[int, int], None] | None


class Rollout:
    """Groups on their way to a batch. Made by `open`; all methods belong to one event loop."""

    def __init__(self, wiring: Wiring, tasks: asyncio.TaskGroup, version: PolicyVersion) -> None:
        config = wiring.config
        self.ledger = Ledger(
            config.groups_per_step,
            config.group_size,
            config.max_staleness,
            drops_allowed=config.drops_allowed,
            count_down=wiring.purpose != "train",
        )
        self.version = version
        self.step = 0
        self._wiring = wiring
        self._task_group = tasks
        self._clock = asyncio.get_running_loop().time
        self._waiting: deque[SampleId] = deque()
        self._tasks: dict[SampleId, asyncio.Task[None]] = {}
        self._engine_of: dict[SampleId, int] = {}
        self._in_flight = [0] * len(wiring.engines)
        self._home: dict[int, int] = {}
        self._since: dict[SampleId, float] = {}
        self._members: dict[int, dict[int, ScoredSample]] = {}
        self._groups: dict[int, Group] = {}
        self._window = StepWindow()
        self._stats = RolloutStats()
        self._last_event = self._clock()
        self._changed = asyncio.Event()
        self._admission = asyncio.Event()
        self._engines_empty = asyncio.Event()
        self._failure: Exception | None = None
        self._failure_told = False
        self._closing = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        *,
        config: RolloutConfig,
        sampling: Sampling,
        prompts: Callable[[], Prompt],
        engines: Sequence[Engine],
        codec: ChatCodec,
        score: Callable[[Sample], Awaitable[Score]],
        seed: int,
        stuck_after_s: float,
        signal: Callable[[Group], str | None] | None = None,
        judged: Callable[[Group], None] | None = None,
        version: int = 0,
        state: Mapping[str, Any] | None = None,
        groups: Iterable[Group] = (),
        purpose: str = "train",
        progress: Callable[[int, int], None] | None = None,
    ) -> AsyncGenerator[Rollout]:
        """Start sampling at once. Leaving aborts what still runs; nothing outlives the block.

        `signal` gives the reason to drop a group, or None to keep it (config.drop_no_signal turns
        it off). `judged` is told every group whose samples are all scored, kept or dropped, once.
        `state` and `groups` are what `state()` and `untrained()` gave a former run.
        An exception in a sample's task is raised by `take`, as it is.
        """
        if not engines:
            raise EngineError("there is no engine to generate with", fix="set devices.generators")
        wiring = Wiring(
            config=config,
            sampling=sampling,
            prompts=prompts,
            engines=engines,
            codec=RememberingCodec(codec),
            score=score,
            signal=signal if config.drop_no_signal else None,
            judged=judged,
            seed=seed,
            purpose=purpose,
            stuck_after_s=stuck_after_s,
            progress=progress,
        )
        async with cls._supervised(wiring, PolicyVersion(version)) as rollout:
            rollout._begin(state, groups)
            yield rollout

    async def take(self, count: int | None = None) -> list[Group]:
        """The next batch, ordered by id. Waits for the groups that the ledger names.

        With max_staleness 0 nothing is in flight afterwards, until `trained` and `published`.
        """
        begun = self._last_event = self._clock()
        uids = self._take_now(count)
        while uids is None:
            await self._wait_for_change(count)
            uids = self._take_now(count)
        batch = [self._groups[uid] for uid in uids]
        check_ages(batch, self.version, oldest_allowed=self.ledger.horizon)
        self.step += 1
        self._stats = self._window.close(
            batch, step=self.step, version=self.version, wait_s=self._clock() - begun
        )
        self._window = StepWindow()
        return batch

    def trained(self, groups: Iterable[Group], version: int) -> None:
        """The taken groups were trained on. `version` is the one that this made: their places open
        when it is published (at once if the step was skipped and it is the current one)."""
        uids = [group.uid for group in groups]
        self.ledger.trained(uids, PolicyVersion(version))
        for uid in uids:
            del self._groups[uid]
        self._admit()

    def published(self, version: int) -> None:
        """All engines draw from `version` now."""
        self.ledger.published(PolicyVersion(version))
        self.version = PolicyVersion(version)
        self._admit()

    def pause_admission(self) -> None:
        """Start no group and send no sample to an engine; what runs there goes on."""
        self._admission.clear()

    def resume_admission(self) -> None:
        self._admission.set()
        self._admit()

    async def interrupt(self) -> None:
        """Pause admission and abort what runs; waits until the engines hold none of our requests.

        After `resume_admission` each goes on where it stopped, with the tokens it has.
        """
        self.pause_admission()
        try:
            async with asyncio.timeout(self._wiring.stuck_after_s):
                await self._abort_all()
                while self._engine_of:
                    self._engines_empty.clear()
                    await self._engines_empty.wait()
        except TimeoutError:
            raise StuckError(
                f"{len(self._engine_of)} aborted samples still run, "
                f"{next(iter(self._engine_of), '')} among them",
                fix="an engine does not answer; see its log",
            ) from None

    def forgive_step(self) -> None:
        """Forget what stopped the step under way (drops, failed scores): a run that is resumed
        with the cause mended begins the step with a clean sheet."""
        self.ledger.forgive_drops()
        self._window = StepWindow()

    def state(self) -> dict[str, Any]:
        """What `open` needs to go on, as JSON; save it with `untrained()`."""
        window = self._window.state()
        return {"ledger": self.ledger.state(), "step": self.step, "window": window}

    def untrained(self) -> list[Group]:
        """Groups that are not trained, ordered by id; of an open one, the members that are done."""
        return [
            self._groups.get(live.uid) or self._group_of(live.uid)
            for live in self.ledger.live()
            if live.done
        ]

    def stats(self) -> RolloutStats:
        """Figures of the step whose batch was taken last."""
        return self._stats

    @classmethod
    @asynccontextmanager
    async def _supervised(cls, wiring: Wiring, version: PolicyVersion) -> AsyncGenerator[Rollout]:
        """A rollout whose tasks end with the block. The block's own error goes first; a task's
        error that `take` had no chance to raise is raised at the end."""
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            rollout = cls(wiring, tasks, version)
            # Kept from the task group, which would wrap the block's own error in an ExceptionGroup.
            try:
                yield rollout
            except Exception as error:
                failure = error
            finally:
                await rollout._close()
        if failure is None and not rollout._failure_told:
            failure = rollout._failure
        if failure is not None:
            raise failure

    def _begin(self, state: Mapping[str, Any] | None, groups: Iterable[Group]) -> None:
        if state is not None:
            self.ledger.restore(state["ledger"])
            self.step = state["step"]
            self._window.restore(state["window"])
            saved = {group.uid: group for group in groups}
            self._refuse_older(list(saved.values()))
            self._restore_members(saved)
        self.ledger.published(self.version)
        self.resume_admission()

    def _refuse_older(self, saved: Sequence[Group]) -> None:
        oldest = int(token_ages(saved, self.version).max(initial=0))
        if oldest > self.ledger.horizon:
            raise CheckpointError(
                f"the checkpoint has samples with tokens {oldest} versions old, and "
                f"rollout.max_staleness is {self._wiring.config.max_staleness:g}",
                fix=f"resume with rollout.max_staleness={oldest}",
            )

    def _restore_members(self, saved: Mapping[int, Group]) -> None:
        for live in self.ledger.live():
            scored = saved[live.uid].members if live.uid in saved else ()
            members = {member.sample.uid.index: member for member in scored}
            done = {n for n, state in enumerate(live.samples) if state is SampleState.DONE}
            if set(members) != done:
                raise CheckpointError(
                    f"samples {sorted(done)} of group {live.uid} are done, but the checkpoint has "
                    f"samples {sorted(members)}",
                    fix="resume from another checkpoint",
                )
            if live.state is GroupState.COMPLETE:
                self._groups[live.uid] = saved[live.uid]
                continue
            self._members[live.uid] = members
            self._enqueue(live.uid, set(range(len(live.samples))) - done)

    def _admit(self) -> None:
        """Start what the ledger allows, and send what the engines have room for."""
        if not self._admission.is_set() or self._failure is not None or self._closing:
            return
        while self.ledger.may_start():
            uid = self.ledger.start_group(self._wiring.prompts(), self.version)
            self._members[uid] = {}
            self._enqueue(uid, range(self._wiring.config.group_size))
        loads = [engine.load() for engine in self._wiring.engines]
        while self._waiting:
            home = self._home.get(self._waiting[0].group)
            engine = choose_engine(loads, self._in_flight, home=home)
            if engine is None:
                return
            self._launch(self._waiting.popleft(), engine)

    def _enqueue(self, group: int, indices: Iterable[int]) -> None:
        for index in indices:
            uid = SampleId(group, index)
            self._waiting.append(uid)
            self._note_event(uid)

    def _launch(self, uid: SampleId, engine: int) -> None:
        self._home.setdefault(uid.group, engine)
        self.ledger.sample_started(uid)
        self._note_event(uid)
        self._enter_engine(uid, engine)
        self._tasks[uid] = self._task_group.create_task(self._follow(uid), name=str(uid))

    async def _follow(self, uid: SampleId) -> None:
        """A sample's life, from an engine to its score; ends the group if it is the last."""
        try:
            if self._closing:
                return
            begun = self._clock()
            sample = await self._generate(uid)
            generated = self._clock()
            if self._closing:
                return
            self.ledger.sample_finished(uid)
            self._note_event(uid)
            self._admit()
            score = await self._wiring.score(sample)
            member = ScoredSample(sample if score.ok else _masked(sample), score)
            reward_s = self._clock() - generated
            self._window.add(member, generate_s=generated - begun, reward_s=reward_s)
            self._members[uid.group][uid.index] = member
            self._last_event = self._clock()
            del self._since[uid]
            if self.ledger.sample_scored(uid):
                self._end_group(uid.group)
        except Exception as error:
            # The boundary of a task: the first error is the root cause, and take() raises it.
            self._fail(error)
        finally:
            del self._tasks[uid]

    async def _generate(self, uid: SampleId) -> Sample:
        wiring = self._wiring
        try:
            return await run_episode(
                uid,
                self.ledger.group(uid.group).prompt,
                engine=wiring.engines[self._engine_of[uid]],
                codec=wiring.codec,
                sampling=wiring.sampling,
                stream=stream_of(wiring.seed, wiring.purpose, uid),
                resume=partial(self._resume, uid),
            )
        finally:
            self._leave_engine(uid)

    async def _resume(self, uid: SampleId) -> Engine | None:
        """An aborted sample waits for admission and then goes to the engine with the least load."""
        self._leave_engine(uid)
        await self._admission.wait()
        if self._closing:
            return None
        loads = [engine.load() for engine in self._wiring.engines]
        engine = choose_engine(loads, self._in_flight, home=self._home.get(uid.group))
        if engine is None:
            engine = self._in_flight.index(min(self._in_flight))
        self._enter_engine(uid, engine)
        return self._wiring.engines[engine]

    def _enter_engine(self, uid: SampleId, engine: int) -> None:
        self._engine_of[uid] = engine
        self._in_flight[engine] += 1

    def _leave_engine(self, uid: SampleId) -> None:
        engine = self._engine_of.pop(uid, None)
        if engine is not None:
            self._in_flight[engine] -= 1
        if not self._engine_of:
            self._engines_empty.set()

    def _end_group(self, uid: int) -> None:
        """Keep or drop a group whose members are all scored; a drop is refilled at once."""
        wiring = self._wiring
        group = self._group_of(uid)
        if wiring.judged is not None:
            wiring.judged(group)
        reason = wiring.signal(group) if wiring.signal else None
        if reason is None:
            self.ledger.complete(uid)
            self._groups[uid] = group
        else:
            self.ledger.drop(uid, reason)
            self._window.dropped[reason] += 1
        del self._members[uid]
        del self._home[uid]
        self._admit()
        self._changed.set()
        if wiring.progress is not None:
            wiring.progress(self.ledger.complete_groups, wiring.config.groups_per_step)

    def _group_of(self, uid: int) -> Group:
        live = self.ledger.group(uid)
        members = tuple(member for _, member in sorted(self._members[uid].items()))
        return Group(uid, live.prompt, members, live.started)

    def _note_event(self, uid: SampleId) -> None:
        self._since[uid] = self._last_event = self._clock()

    def _fail(self, error: Exception) -> None:
        if self._failure is None and not self._closing:
            self._failure = error
            self._changed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure_told = True
            raise self._failure

    def _take_now(self, count: int | None) -> list[int] | None:
        """What the ledger gives, or the error that says why it never will."""
        self._changed.clear()
        self._raise_failure()
        config, step = self._wiring.config, self.step + 1
        uids = self.ledger.take(self.version, count)
        exhausted = uids is None and self.ledger.exhausted
        if uids is not None or exhausted or nothing_can_be_scored(self._window, config):
            check_scores(self._window, config, step=step)
        if exhausted:
            raise no_signal_error(self._window)
        return uids

    async def _wait_for_change(self, count: int | None) -> None:
        """Waits for a group to end; any sample's event puts the deadline off."""
        try:
            async with asyncio.timeout_at(self._last_event + self._wiring.stuck_after_s):
                await self._changed.wait()
        except TimeoutError:
            if self._clock() >= self._last_event + self._wiring.stuck_after_s:
                raise stuck_error(
                    self._waits_for(count),
                    step=self.step + 1,
                    stuck_after_s=self._wiring.stuck_after_s,
                ) from None

    def _waits_for(self, count: int | None) -> str:
        waits = self.ledger.waits_for(self.version, count)
        if waits:
            return name_waits(waits, self._since, now=self._clock())
        if not self._admission.is_set():
            return "groups to start, but admission is paused"
        return f"version {self.ledger.held_until} to be published"

    async def _close(self) -> None:
        """Abort what runs on the engines, give it a moment to end, then cancel what is left."""
        self._closing = True
        self._admission.set()
        for uid, task in self._tasks.items():
            if uid not in self._engine_of:
                task.cancel()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._abort_all()
                if self._tasks:
                    await asyncio.wait(self._tasks.values())
        except TimeoutError:
            pass
        for task in self._tasks.values():
            task.cancel()

    async def _abort_all(self) -> None:
        engines = self._wiring.engines
        aborts = [engines[engine].abort(uid) for uid, engine in self._engine_of.items()]
        # An engine that cannot be reached has failed its requests too, and that is told there.
        await asyncio.gather(*aborts, return_exceptions=True)


async def sample_all(
    prompts: Sequence[Prompt],
    *,
    samples: int,
    sampling: Sampling,
    engines: Sequence[Engine],
    codec: ChatCodec,
    score: Callable[[Sample], Awaitable[Score]],
    seed: int,
    purpose: str = "eval",
    progress: Callable[[int, int], None] | None = None,
    stuck_after_s: float = 600.0,
) -> list[Group]:
    """A group of samples for each prompt, in the order of the prompts: a rollout of one step.

    Nothing is dropped, and failed scores are members. Ids are -1, -2, … (see Ledger); `purpose`
    keys the random streams. `progress` is told (groups done, groups in all).
    """
    if not prompts:
        return []
    config = RolloutConfig(
        groups_per_step=len(prompts), group_size=samples, drop_no_signal=False, max_failed_scores=1
    )
    remaining = iter(prompts)
    async with Rollout.open(
        config=config,
        sampling=sampling,
        prompts=lambda: next(remaining),
        engines=engines,
        codec=codec,
        score=score,
        seed=seed,
        stuck_after_s=stuck_after_s,
        version=min(engine.load().version for engine in engines),
        purpose=purpose,
        progress=progress,
    ) as rollout:
        return await rollout.take()


def _masked(sample: Sample) -> Sample:
    """A sample that could not be scored has nothing to train on."""
    return replace(sample, loss_mask=frozen_array(np.zeros(sample.length), np.bool_))

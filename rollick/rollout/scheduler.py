"""The rollout: every sample by itself, from a prompt to a group that can be trained on.

    prompts() -> Ledger -> Fleet (queue, router, engines) <-> episode -> score -> Group -> take()
                   ^                                                              |
                   +------------------ a dropped or trained group frees its place

Owns the tasks (one for each sample under way) and the clock. Which group may start and which make a
batch is decided by the ledger, which engine a request goes to by the fleet's router. There is no
loop that polls: each event (a sample ends, is scored, a version is published) starts what it makes
possible. Time is the event loop's, so all of it runs on a virtual clock as well (virtual.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from rollick.config.schema import RolloutConfig
from rollick.errors import EngineError, StuckError
from rollick.infer.engine import Engine
from rollick.rollout.access import SampleAccess
from rollick.rollout.episode import (
    ChatCodec,
    Episode,
    RememberingCodec,
    SamplingOf,
    single_turn,
)
from rollick.rollout.events import Event
from rollick.rollout.fleet import Fleet
from rollick.rollout.garbage import rare_collections
from rollick.rollout.ledger import GroupState, LiveGroup, Removed, Taken
from rollick.rollout.lengths import LengthPredictor
from rollick.rollout.limits import (
    check_ages,
    check_scores,
    no_signal_error,
    nothing_can_be_scored,
    stuck_error,
)
from rollick.rollout.lives import Life, Lives
from rollick.rollout.rules import Rule, count_places
from rollick.rollout.scored import Scored, mask_older, refuse_older, without_loss
from rollick.rollout.stats import RolloutStats, StepWindow
from rollick.rollout.waits import IN_GROUP, SCORING, name_waits
from rollick.rollout.wiring import Span, Wiring, make_ledger
from rollick.types import (
    Group,
    PolicyVersion,
    Prompt,
    Sample,
    SampleId,
    Sampling,
    Score,
    ScoredSample,
)

CLOSE_S = 5.0
"""How long engines have to end aborted requests before the tasks are cancelled."""


class Rollout:
    """Groups on their way to a batch. Made by `open`; all methods belong to one event loop."""

    def __init__(
        self,
        wiring: Wiring,
        engines: Iterable[Engine],
        tasks: asyncio.TaskGroup,
        version: PolicyVersion,
    ) -> None:
        config = wiring.config
        self.ledger = make_ledger(wiring)
        self.fleet = Fleet(
            engines,
            launch=self._launch,
            queue=config.engine_queue,
            order="longest" if config.longest_first else "oldest",
        )
        self.lengths = LengthPredictor(initial=256)
        self.version = version
        self.step = 0
        self._wiring = wiring
        self._task_group = tasks
        self._clock = asyncio.get_running_loop().time
        self._lives = Lives(self.ledger, self.fleet, lengths=self.lengths, span=wiring.span)
        self._scored = Scored()
        self._window = StepWindow()
        self._stats = RolloutStats()
        self._changed = asyncio.Event()
        self._letting_go: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._failure_told = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        *,
        config: RolloutConfig,
        prompts: Callable[[], Prompt],
        engines: Sequence[Engine],
        score: Callable[[Sample], Awaitable[Score]],
        seed: int,
        stuck_after_s: float,
        codec: ChatCodec | None = None,
        sampling: Sampling | SamplingOf | None = None,
        episode: Episode | None = None,
        signal: Callable[[Group], str | None] | None = None,
        judged: Callable[[Group], None] | None = None,
        version: int = 0,
        state: Mapping[str, Any] | None = None,
        groups: Iterable[Group] = (),
        started: Iterable[tuple[int, str]] = (),
        find_prompt: Callable[[str], Prompt] | None = None,
        purpose: str = "train",
        progress: Callable[[int, int], None] | None = None,
        record: Callable[[Event], None] | None = None,
        span: Span | None = None,
    ) -> AsyncGenerator[Rollout]:
        """Start sampling at once. Leaving aborts what still runs; nothing outlives the block.

        `episode` is what a sample does; without one, `codec` and `sampling` make the single turn.
        `signal` gives the reason to drop a group, or None to keep it. `judged` is told
        every group once, when it has all its scored samples, or without
        any when a staleness rule drops it before. `span` and `record` are told what happens.
        `state` and `groups` are what `state()` and `untrained()` gave a former run, `started` the
        groups that its log knows beyond them: for these, `find_prompt` gives the prompt by its uid
        in place of `prompts`.
        An exception in a sample's task is raised by `take`, as it is.
        """
        if not engines:
            raise EngineError("there is no engine to generate with", fix="set devices.generators")
        if episode is None:
            assert codec is not None
            assert sampling is not None
            episode = single_turn(RememberingCodec(codec), sampling, seed=seed, purpose=purpose)
        wiring = Wiring(
            config=config,
            prompts=prompts,
            episode=episode,
            score=score,
            signal=signal,
            judged=judged,
            purpose=purpose,
            stuck_after_s=stuck_after_s,
            progress=progress,
            record=record,
            span=span,
            find_prompt=find_prompt,
        )
        places = count_places(config.groups_per_step, config.max_staleness)
        with rare_collections(places * config.group_size):
            async with cls._supervised(wiring, engines, PolicyVersion(version)) as rollout:
                rollout._begin(state, groups, started)
                yield rollout

    async def take(self, count: int | None = None) -> list[Group]:
        """The next batch, ordered by id. Waits for the groups that the ledger names.

        With max_staleness 0 nothing is in flight afterwards, until `trained` and `published`.
        """
        begun = self._lives.now()
        taken = self._take_now(count)
        while taken is None:
            await self._wait_for_change(count)
            taken = self._take_now(count)
        self._remove(Removed(taken.dropped, taken.cancelled, taken.deferred))
        if not self.ledger.horizon and self._letting_go is not None:
            await asyncio.wait({self._letting_go})
        batch = [self._fresh(self._scored.group(uid)) for uid in taken.uids]
        check_ages(batch, self.version, oldest_allowed=self.ledger.horizon)
        self.step += 1
        self._stats = self._window.close(
            batch,
            step=self.step,
            version=self.version,
            wait_s=self._clock() - begun,
            long={uid for uid in taken.uids if self.ledger.group(uid).deferred},
            parked=self.ledger.parked_groups,
        )
        self._window = StepWindow()
        return batch

    def trained(self, groups: Iterable[Group], version: int) -> None:
        """The taken groups were trained on. `version` is the one that this made: their places open
        when it is published (at once if the step was skipped and it is the current one)."""
        uids = [group.uid for group in groups]
        self.ledger.trained(uids, PolicyVersion(version))
        for uid in uids:
            self._scored.remove(uid)
        self._admit()

    def published(self, version: int) -> None:
        """All engines draw from `version` now."""
        self.version = PolicyVersion(version)
        self._remove(self.ledger.published(self.version))
        self._admit()

    def pause_admission(self) -> None:
        """Start no group and send no sample to an engine; what runs there goes on."""
        self.fleet.close()

    def resume_admission(self) -> None:
        self.fleet.open()
        self._admit()

    async def interrupt(self) -> None:
        """Pause admission and abort what runs; waits until the engines hold none of our requests.

        After `resume_admission` each goes on where it stopped, with the tokens it has, on the
        engine that has most room.
        """
        self.pause_admission()
        try:
            async with asyncio.timeout(self._wiring.stuck_after_s):
                await self.fleet.abort_all()
                await self.fleet.until_empty()
        except TimeoutError:
            on = self.fleet.on()
            raise StuckError(
                f"{len(on)} aborted samples still run, {next(iter(on), '')} among them",
                fix="an engine does not answer; see its log",
            ) from None

    def fail(self, error: Exception) -> None:
        """Somebody else knows that no batch will come: `take` raises this."""
        self._fail(error)

    def forgive_step(self) -> None:
        """Forget what stopped the step under way (drops, failed scores): a run that is resumed
        with the cause mended begins the step with a clean sheet."""
        self.ledger.forgive_drops()
        self._window = StepWindow()

    def state(self) -> dict[str, Any]:
        """What `open` needs to go on, as JSON; save it with `untrained()`."""
        return {
            "ledger": self.ledger.state(),
            "step": self.step,
            "window": self._window.state(),
            "lengths": self.lengths.state(),
        }

    def untrained(self) -> list[Group]:
        """Groups that are not trained, ordered by id; of an open one, the members that are done."""
        return [self._scored.group(live.uid) for live in self.ledger.live() if live.done]

    def stats(self) -> RolloutStats:
        """Figures of the step whose batch was taken last."""
        return self._stats

    def waits(self, count: int | None = None) -> str:
        """Who the next batch waits for: `group 37: sample 3 in tool search for 310 s`."""
        waits = self.ledger.waits_for(self.version, count)
        doing = self._lives.doing(wait.uid for wait in waits)
        said = [name_waits(doing, now=self._clock())] if doing else []
        if not self.fleet.is_open:
            said.append("groups to start, but admission is paused")
        elif not doing and self.ledger.held_until is not None:
            said.append(f"version {self.ledger.held_until} to be published")
        elif not doing and self._lives.leaving:
            said.append(f"{self._lives.leaving} samples that were put off to leave their engines")
        return "; ".join(said) or "nothing"

    @classmethod
    @asynccontextmanager
    async def _supervised(
        cls, wiring: Wiring, engines: Iterable[Engine], version: PolicyVersion
    ) -> AsyncGenerator[Rollout]:
        """A rollout whose tasks end with the block. The block's own error goes first; a task's
        error that `take` had no chance to raise is raised at the end."""
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            rollout = cls(wiring, engines, tasks, version)
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

    def _begin(
        self,
        state: Mapping[str, Any] | None,
        groups: Iterable[Group],
        started: Iterable[tuple[int, str]],
    ) -> None:
        ledger = self.ledger
        ledger.restore(state["ledger"] if state else ledger.state(), started=started)
        if state is not None:
            self.step = state["step"]
            self._window.restore(state["window"])
            self.lengths.restore(state["lengths"])
            saved = {group.uid: group for group in groups}
            if ledger.rule is not Rule.MASK_STALE_TOKENS:
                limit = self._wiring.config.max_staleness
                refuse_older(list(saved.values()), self.version, max_staleness=limit)
            self._scored.restore(ledger.live(), saved)
            for live in ledger.live():
                if live.state is GroupState.OPEN:
                    self._lives.begin(live.under_way(), live.prompt)
        self._remove(ledger.published(self.version))
        self.resume_admission()

    def _admit(self) -> None:
        """Start what the ledger allows, and send what the engines have room for."""
        if not self.fleet.is_open or self._failure is not None or self._lives.closing:
            return
        for uid in self.ledger.resume_parked(self.version, ready=self._lives.has_left):
            self._start(self.ledger.group(uid))
        while self.ledger.may_start():
            prompt = self._next_prompt()
            self._start(self.ledger.group(self.ledger.start_group(prompt, self.version)))
        self.fleet.pump()

    def _start(self, live: LiveGroup) -> None:
        self._scored.begin(live)
        self._lives.begin(live.under_way(), live.prompt)

    def _next_prompt(self) -> Prompt:
        """The next one; after a kill first those that the same groups had before it."""
        promised, find = self.ledger.promised, self._wiring.find_prompt
        return self._wiring.prompts() if promised is None or find is None else find(promised)

    def _launch(self, uid: SampleId, engine: int) -> None:
        self.ledger.sample_started(uid)
        life = self._lives[uid]
        life.placed(engine)
        life.task = self._task_group.create_task(self._follow(life, engine), name=str(uid))

    async def _follow(self, life: Life, engine: int) -> None:
        """A sample's life, from an engine to its score; ends the group if it is the last."""
        uid = life.uid
        life.is_followed = True
        try:
            if not life.goes_on:
                return
            access = SampleAccess(uid, self.fleet, granted=engine, follower=life)
            sample = await self._wiring.episode(uid, life.prompt, access)
            if not life.goes_on:
                return
            self.lengths.update(life.prompt.uid, life.prompt.domain, sample.response_length)
            self.ledger.sample_finished(uid)
            life.note(SCORING)
            score = await self._wiring.score(sample)
            if not life.unwanted:
                self._end_sample(life, sample, score)
        except asyncio.CancelledError:
            if not life.unwanted:
                raise
        except Exception as error:
            # The boundary of a task: the first error is the root cause, and take() raises it.
            self._fail(error)
        finally:
            self._lives.end(life)
            if life.is_put_off:
                self._has_left(life)

    def _end_sample(self, life: Life, sample: Sample, score: Score) -> None:
        uid = life.uid
        member = ScoredSample(sample if score.ok else without_loss(sample), score)
        reward_s = self._clock() - life.doing.since
        self._window.add(member, generate_s=life.generate_s, reward_s=reward_s)
        life.note(IN_GROUP)
        self._scored.add(uid, member)
        if self.ledger.sample_scored(uid):
            self._end_group(uid.group)

    def _end_group(self, uid: int) -> None:
        """Keep or drop a group that has enough members; a drop is refilled at once."""
        wiring = self._wiring
        group = self._scored.group(uid)
        if wiring.judged is not None and not self.ledger.group(uid).judged:
            wiring.judged(group)
        reason = wiring.signal(group) if wiring.signal else None
        if reason is None:
            self._scored.keep(group)
            self._cancel(self.ledger.complete(uid))
        else:
            self._scored.remove(uid)
            self._window.drop(group.prompt.domain, reason)
            self._cancel(self.ledger.drop(uid, reason))
        self.fleet.end_group(uid)
        self._admit()
        self._changed.set()
        if wiring.progress is not None:
            wiring.progress(self.ledger.complete_groups, wiring.config.groups_per_step)

    def _remove(self, removed: Removed) -> None:
        """Forget what a rule dropped or put off; its place is refilled."""
        if removed.deferred:
            self._put_off(removed.deferred, removed.cancelled)
            return
        for uid, reason in removed.dropped:
            was_judged = self._scored.is_whole(uid)
            group = self._scored.remove(uid)
            self.fleet.end_group(uid)
            self._window.drop(group.prompt.domain, reason)
            self._window.shed(group.members)
            if self._wiring.judged is not None and not was_judged:
                # Only its fast samples are known, which say too much good of the prompt.
                self._wiring.judged(replace(group, members=()))
        self._cancel(removed.cancelled)
        if removed.dropped:
            self._admit()
            self._changed.set()

    def _put_off(self, groups: Sequence[int], under_way: Sequence[SampleId]) -> None:
        """Groups wait for a long round; what they have drawn is thrown away."""
        for uid in groups:
            members = self._scored.remove(uid).members
            self._window.deferred += 1
            self._window.deferred_tokens += sum(m.sample.response_length for m in members)
            self.fleet.end_group(uid)
        on_engines = self._lives.put_off(under_way)
        if on_engines:
            let_go = self._lives.let_go(on_engines, within_s=CLOSE_S)
            self._letting_go = self._task_group.create_task(let_go, name="put off")
        self._admit()
        self._changed.set()

    def _has_left(self, life: Life) -> None:
        """A sample that was put off is nowhere any more: its group may start again."""
        self._window.deferred_tokens += life.tokens
        try:
            self._admit()
        except Exception as error:
            # The boundary of a task, as in _follow.
            self._fail(error)

    def _cancel(self, uids: Sequence[SampleId]) -> None:
        self._window.cancelled += len(uids)
        self._lives.cancel(uids)

    def _fresh(self, group: Group) -> Group:
        """Without the tokens that are too old, where the rule masks them."""
        if self.ledger.rule is not Rule.MASK_STALE_TOKENS:
            return group
        fresh, masked = mask_older(group, self.ledger.oldest_allowed(self.version))
        self._window.masked_tokens += masked
        return fresh

    def _fail(self, error: Exception) -> None:
        if self._failure is None and not self._lives.closing:
            self._failure = error
            self._changed.set()

    def _take_now(self, count: int | None) -> Taken | None:
        """What the ledger gives, or the error that says why it never will."""
        self._changed.clear()
        if self._failure is not None:
            self._failure_told = True
            raise self._failure
        config, step = self._wiring.config, self.step + 1
        taken = self.ledger.take(self.version, count)
        exhausted = taken is None and self.ledger.exhausted
        if taken is not None or exhausted or nothing_can_be_scored(self._window, config):
            check_scores(self._window, config, step=step)
        if exhausted:
            raise no_signal_error(self._window)
        return taken

    async def _wait_for_change(self, count: int | None) -> None:
        """Waits for a group to end; any sample's event puts the deadline off."""
        limit_s = self._wiring.stuck_after_s
        try:
            async with asyncio.timeout_at(self._lives.last_event + limit_s):
                await self._changed.wait()
        except TimeoutError:
            if self._clock() >= self._lives.last_event + limit_s:
                who = self.waits(count)
                raise stuck_error(who, step=self.step + 1, stuck_after_s=limit_s) from None

    async def _close(self) -> None:
        """Abort what runs on the engines, give it a moment to end, then cancel what is left."""
        self._lives.closing = True
        self.fleet.close()
        on = self.fleet.on()
        tasks = self._lives.tasks()
        for uid, task in tasks.items():
            if uid not in on:
                task.cancel()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.fleet.abort_all()
                if tasks:
                    await asyncio.wait(tasks.values())
        except TimeoutError:
            pass
        for task in tasks.values():
            task.cancel()

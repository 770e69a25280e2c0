"""The rollout: schedules every sample independently, from a prompt to a group to train on.

    prompt -> Ledger -> Fleet (queue, router, engines) <-> episode -> score -> Group -> take()
                ^                                                                 |
                +------------- a dropped or trained group frees its slot ---------+

Owns the tasks, one for each sample. The ledger decides which groups start and make a batch, the
router which engine gets a request. No loop polls: each event starts what it makes possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from rollick.errors import EngineError
from rollick.infer.engine import InferenceClient
from rollick.observe.sample_stage import SCORING, WAITING_FOR_GROUP
from rollick.rollout import limits
from rollick.rollout.deps import RolloutDeps, SavedRollout, make_ledger
from rollick.rollout.event_loop import rare_garbage_collection
from rollick.rollout.fleet import Fleet
from rollick.rollout.in_flight import (
    InFlightSample,
    InFlightSamples,
    SampleAccess,
    describe_activities,
)
from rollick.rollout.ledger.group_record import GroupRecord, RemovedGroups, TakenBatch
from rollick.rollout.ledger.staleness import StalenessPolicy, StalenessRule
from rollick.rollout.lengths import LengthPredictor
from rollick.rollout.request_queue import QueueOrder
from rollick.rollout.scored_groups import ScoredGroups, mask_old_tokens, without_loss
from rollick.rollout.stats import StepWindow
from rollick.rollout.unchecked import DAMAGED
from rollick.types import Group, PolicyVersion, Prompt, Sample, SampleId, Score, ScoredSample

PROGRESS_CHECKS = 4
"""How often a wait looks for progress within `stuck_after_s`."""


class Rollout:
    """Groups on their way to a batch. Made by `open`; all methods belong to one event loop."""

    def __init__(
        self,
        deps: RolloutDeps,
        engines: Iterable[InferenceClient],
        tasks: asyncio.TaskGroup,
        version: PolicyVersion,
    ) -> None:
        self.ledger = make_ledger(deps)
        order: QueueOrder = "longest" if deps.config.longest_first else "oldest"
        self.fleet = Fleet(
            engines,
            self._launch,
            engine_queue=deps.config.engine_queue,
            order=order,
            checks=deps.is_training,
        )
        self.lengths = LengthPredictor(initial=256)
        self.version = version
        self.step = 0
        self._deps = deps
        self._task_group = tasks
        self._clock = asyncio.get_running_loop().time
        self._samples = InFlightSamples(self.ledger, self.fleet, self.lengths, deps.record_span)
        self._scored = ScoredGroups()
        self._window = StepWindow()
        self.stats = self._window.to_stats((), version=version, wait_s=0.0)
        """Of the last taken batch's step."""
        self._taken_samples = 0
        """Samples of the taken batch until it is trained on."""
        self._changed = asyncio.Event()
        self._aborting: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._failure_raised = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        deps: RolloutDeps,
        engines: Sequence[InferenceClient],
        *,
        version: int = 0,
        saved: SavedRollout | None = None,
    ) -> AsyncGenerator[Rollout]:
        """Starts sampling, from `saved` if given. Leaving the block aborts what still runs, and
        raises its error, or that of a task, if `take` did not."""
        if not engines:
            raise EngineError("there is no engine to generate with", fix="set devices.generators")
        config = deps.config
        slots = StalenessPolicy(config.groups_per_step, config.max_staleness).slots
        failure: Exception | None = None
        with rare_garbage_collection(slots * config.group_size):
            async with asyncio.TaskGroup() as tasks:
                rollout = cls(deps, engines, tasks, PolicyVersion(version))
                try:  # The task group would wrap the block's error in an ExceptionGroup.
                    rollout._start(saved or SavedRollout())
                    yield rollout
                except Exception as error:
                    failure = error
                finally:
                    rollout.fleet.close()
                    await rollout._samples.close()
        if failure is None and not rollout._failure_raised:
            failure = rollout._failure
        if failure is not None:
            raise failure

    async def take(self, count: int | None = None) -> list[Group]:
        """Waits for the next batch; ordered by id. Raises the first exception of a sample's task.
        With max_staleness 0 no sample is in flight afterwards, until `trained` and `published`."""
        started = self._samples.record_progress()
        while (taken := await self._take_checked(count)) is None:
            await self._wait_for_change(count)
        self._remove(taken.removed)
        if not self.ledger.horizon and self._aborting is not None:
            await asyncio.wait({self._aborting})
        batch = [self._mask_stale(self._scored.group(uid)) for uid in taken.uids]
        self._taken_samples = sum(len(group.members) for group in batch)
        limits.check_token_ages(batch, self.version, max_age=self.ledger.horizon)
        self.step += 1
        self.stats = self._window.to_stats(
            batch,
            version=self.version,
            wait_s=self._clock() - started,
            long={uid for uid in taken.uids if self.ledger.group(uid).was_deferred},
            deferred_waiting=self.ledger.deferred_count,
        )
        self._window = StepWindow()
        return batch

    def trained(self, groups: Iterable[Group], version: int) -> None:
        """The taken groups were trained on, which made `version` (the current one if the step was
        skipped). Their slots are free when it is published."""
        uids = [self._scored.remove(group.uid).uid for group in groups]
        self._taken_samples = 0
        self.ledger.trained(uids, PolicyVersion(version))
        self._admit()

    def published(self, version: int, *, drop_older: str = "") -> None:
        """All engines generate with `version` now. `drop_older`: why earlier groups are dropped."""
        self.version = PolicyVersion(version)
        self._remove(self.ledger.published(self.version))
        if drop_older:
            older = [g.uid for g in self.ledger.active_groups() if g.start_version < self.version]
            self._remove(self.ledger.drop_groups(older, drop_older))
        self._admit()

    def pause_admission(self) -> None:
        """Start no group and send no request to an engine; running requests continue."""
        self.fleet.close()

    def resume_admission(self) -> None:
        self.fleet.open()
        self._admit()

    async def interrupt(self) -> None:
        """Pauses admission, aborts our requests and waits until the engines hold none of them.
        After `resume_admission` each continues with its tokens, on the engine with most room."""
        self.pause_admission()
        try:
            async with asyncio.timeout(self._deps.stuck_after_s):
                await self.fleet.abort(self.fleet.engine_of)
                await self.fleet.wait_until_empty()
        except TimeoutError:
            raise limits.abort_error(list(self.fleet.engine_of)) from None

    def fail(self, error: Exception) -> None:
        """Make `take` raise this error: no batch can come."""
        if self._failure is None and not self._samples.closing:
            self._failure = error
            self._changed.set()

    def reset_step_counters(self) -> None:
        """Reset what can stop a run (drops, failed scores) and drop groups that a lost server left
        without scores, so that a checkpoint saved after such a stop can be resumed."""
        self._remove(self.ledger.drop_groups(self._scored.find_unavailable(), "unavailable"))
        self.ledger.reset_drops()
        self._window = StepWindow()

    def state(self) -> dict[str, Any]:
        """The state for `SavedRollout`, as JSON; save it with `untrained()`."""
        return {
            "ledger": self.ledger.state(),
            "step": self.step,
            "window": self._window.state(),
            "lengths": self.lengths.state(),
        }

    def untrained(self) -> list[Group]:
        """Groups that are not trained, ordered by id; of an open one, the members that are done."""
        return [self._scored.group(g.uid) for g in self.ledger.active_groups() if g.done]

    def last_progress(self) -> float:
        """When a sample last made progress, in seconds of the event loop's clock."""
        return self._samples.last_progress()

    def describe_waits(self, count: int | None = None) -> str:
        """What the next batch waits for: `group 37: sample 3 in tool search for 310 s`."""
        activities = self._samples.activities(self.ledger.awaited_samples(self.version, count))
        reasons = [describe_activities(activities, now=self._clock())] if activities else []
        if not self.fleet.is_open:
            reasons.append("groups to start, but admission is paused")
        elif not activities and self.ledger.held_until is not None:
            reasons.append(f"version {self.ledger.held_until} to be published")
        elif not activities and self._samples.stopping:
            reasons.append(f"{self._samples.stopping} deferred samples to leave their engines")
        return "; ".join(reasons) or "nothing"

    def _start(self, saved: SavedRollout) -> None:
        ledger, state = self.ledger, saved.state
        ledger.restore(state["ledger"] if state else ledger.state(), started=saved.started)
        if state is not None:
            self.step = state["step"]
            self._window.restore(state["window"])
            self.lengths.restore(state["lengths"])
            groups = {group.uid: group for group in saved.groups}
            if ledger.policy.rule is not StalenessRule.MASK_STALE_TOKENS:
                max_staleness = ledger.policy.max_staleness
                limits.check_saved_ages(list(groups.values()), self.version, max_staleness)
            self._scored.restore(ledger.active_groups(), groups)
            for group in ledger.active_groups():
                self._samples.submit(group.unfinished(), group.prompt)
        self._remove(ledger.published(self.version))
        self.resume_admission()

    def _admit(self) -> None:
        """Start the groups that the ledger admits, and dispatch requests to engines with room."""
        if not self.fleet.is_open or self._failure is not None or self._samples.closing:
            return
        for uid in self.ledger.restart_deferred(self.version, is_ready=self._samples.has_stopped):
            self._submit(self.ledger.group(uid))
        while self.ledger.may_start():
            prompt = self._next_prompt()
            self._submit(self.ledger.group(self.ledger.start_group(prompt, self.version)))
        self.fleet.dispatch()

    def _submit(self, group: GroupRecord) -> None:
        self._scored.begin(group)
        self._samples.submit(group.unfinished(), group.prompt)

    def _next_prompt(self) -> Prompt:
        """The next prompt; in a resumed run, first those of groups started after the checkpoint."""
        uid, find = self.ledger.next_prompt_uid, self._deps.find_prompt
        return self._deps.next_prompt() if uid is None or find is None else find(uid)

    def _launch(self, uid: SampleId, engine: int) -> None:
        self.ledger.sample_started(uid)
        sample = self._samples[uid]
        sample.assigned(engine)
        sample.task = self._task_group.create_task(self._run(sample, engine), name=str(uid))

    async def _run(self, in_flight: InFlightSample, engine: int) -> None:
        """The task of a sample, from its first engine to its score."""
        uid, prompt = in_flight.uid, in_flight.prompt
        in_flight.has_begun = True
        try:
            if not in_flight.should_continue:
                return
            access = SampleAccess(uid, self.fleet, reserved=engine, tracker=in_flight)
            sample = await self._deps.episode(uid, prompt, access)
            if not in_flight.should_continue:
                return
            self.lengths.update(prompt.uid, prompt.domain, sample.response_length)
            self.ledger.sample_finished(uid)
            in_flight.set_activity(SCORING)
            score = await self._deps.score(sample)
            if not in_flight.is_cancelled:
                self._end_sample(in_flight, sample, score)
        except asyncio.CancelledError:
            if not in_flight.is_cancelled:
                raise
        except Exception as error:  # Task boundary: take() raises the first error.
            self.fail(error)
        finally:
            self._samples.end(in_flight)
            if in_flight.is_deferred:
                self._end_deferred(in_flight)

    def _end_sample(self, in_flight: InFlightSample, sample: Sample, score: Score) -> None:
        uid = in_flight.uid
        member = ScoredSample(sample if score.ok else without_loss(sample), score)
        reward_s = self._clock() - in_flight.since
        self._window.add(member, generate_s=in_flight.generate_s, reward_s=reward_s)
        in_flight.set_activity(WAITING_FOR_GROUP)
        self._scored.add(uid, member)
        if self.ledger.sample_scored(uid):
            self._end_group(uid.group)
        if self._deps.on_progress is not None:
            config = self._deps.config
            done = self._scored.sample_count - self._taken_samples
            self._deps.on_progress(done, config.groups_per_step * config.group_size)

    def _end_group(self, uid: int) -> None:
        """Keep or drop a group that has enough members; a dropped one is replaced immediately."""
        deps = self._deps
        group = self._scored.group(uid)
        if deps.on_group_scored is not None and not self.ledger.group(uid).was_reported:
            deps.on_group_scored(group)
        reason = deps.drop_reason(group) if deps.drop_reason else None
        if reason is None:
            self._scored.complete(group)
            self._cancel(self.ledger.complete(uid))
        else:
            self._scored.remove(uid)
            self._window.count_drop(group.prompt.domain, reason)
            self._cancel(self.ledger.drop(uid, reason))
        self.fleet.router.end_group(uid)
        self._admit()
        self._changed.set()

    def _remove(self, removed: RemovedGroups) -> None:
        """Forget what a staleness rule dropped or deferred, and start other groups."""
        if removed.deferred:
            self._defer(removed.deferred, removed.unfinished)
            return
        for uid, reason in removed.dropped:
            was_reported = self._scored.is_complete(uid)
            group = self._scored.remove(uid)
            self.fleet.router.end_group(uid)
            self._window.count_drop(group.prompt.domain, reason)
            self._window.add_dropped(group.members)
            if self._deps.on_group_scored is not None and not was_reported:
                # Its fast samples alone would make the prompt look easier than it is.
                self._deps.on_group_scored(replace(group, members=()))
        self._cancel(removed.unfinished)
        if removed.dropped:
            self._admit()
            self._changed.set()

    def _defer(self, groups: Sequence[int], unfinished: Sequence[SampleId]) -> None:
        """Groups wait for a long round; the tokens that they have are discarded."""
        for uid in groups:
            members = self._scored.remove(uid).members
            self._window.deferred += 1
            self._window.deferred_tokens += sum(m.sample.response_length for m in members)
            self.fleet.router.end_group(uid)
        on_engines = self._samples.defer(unfinished)
        if on_engines:
            abort = self._samples.abort_deferred(on_engines)
            self._aborting = self._task_group.create_task(abort, name="abort deferred samples")
        self._admit()
        self._changed.set()

    def _end_deferred(self, in_flight: InFlightSample) -> None:
        """The task of a deferred sample has ended: its group may start again."""
        self._window.deferred_tokens += in_flight.tokens
        try:
            self._admit()
        except Exception as error:  # Task boundary, as in _run.
            self.fail(error)

    def _cancel(self, uids: Sequence[SampleId]) -> None:
        self._window.cancelled += len(uids)
        self._samples.cancel(uids)

    def _mask_stale(self, group: Group) -> Group:
        """Mask the tokens that are too old, under the rule mask_stale_tokens."""
        if self.ledger.policy.rule is not StalenessRule.MASK_STALE_TOKENS:
            return group
        group, tokens = mask_old_tokens(group, self.ledger.policy.oldest_allowed(self.version))
        self._window.masked_tokens += tokens
        return group

    async def _take_checked(self, count: int | None) -> TakenBatch | None:
        """The batch if there is one, without samples of engines whose weights are damaged."""
        while self.fleet.unchecked.contains_any(self.ledger.next_batch(self.version, count)):
            self._remove(self.ledger.drop_groups(await self.fleet.check_engines(), DAMAGED))
        return self._take_now(count)

    def _take_now(self, count: int | None) -> TakenBatch | None:
        """The batch if there is one; raises if there will never be one."""
        self._changed.clear()
        if self._failure is not None:
            self._failure_raised = True
            raise self._failure
        has_batch = bool(self.ledger.next_batch(self.version, count))
        exhausted = not has_batch and self.ledger.exhausted
        flags = {"has_batch": has_batch, "exhausted": exhausted}
        limits.check_step(self._window, self._deps.config, self.step + 1, **flags)
        return self.ledger.take(self.version, count)

    async def _wait_for_change(self, count: int | None) -> None:
        """Waits for a group to end, at most until the next look at the engines' tokens. Raises
        StuckError if there is no progress for too long."""
        limit_s = self._deps.stuck_after_s
        try:
            async with asyncio.timeout(limit_s / PROGRESS_CHECKS):
                await self._changed.wait()
        except TimeoutError:
            awaited = self.ledger.awaited_samples(self.version, count)
            limits_s = {"limit_s": limit_s, "score_limit_s": self._deps.score_limit_s}
            if self._clock() >= self._samples.stuck_at(awaited, **limits_s):
                waits = self.describe_waits(count)
                raise limits.stuck_error(waits, step=self.step + 1, stuck_after_s=limit_s) from None

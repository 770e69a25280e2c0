"""A whole run, simulated: the real Rollout with simulated engines, environments, rewards, trainer.

    Scenario -> Rollout (scheduler.py, as in a real run) <-> SimulatedEngine x generators
                   | take                                       ^ pause, commit, resume
                   v                                            |
                 SimulatedTrainer ---- trained -------------> publish      on the virtual clock

Owns the loop over the steps and what is observed of it. Everything follows from the scenario: the
same one gives the same report, to the last digit. `simulate` is the entry; bubbles.py says who
waited for whom, observe/picture.py draws the timeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from rollick.algorithms.selection import judge_group
from rollick.config.scenario import Scenario
from rollick.errors import ConfigError, EngineLost
from rollick.rollout.bubbles import Bias, Bubbles, Mark, Phase, Report, Timeline, make_report
from rollick.rollout.episode import Access
from rollick.rollout.events import Dropped, Event
from rollick.rollout.scheduler import Rollout
from rollick.rollout.simulated import SimulatedEngine, SimulatedReward, SimulatedTrainer
from rollick.rollout.usage import total_usage
from rollick.rollout.virtual import run_virtual
from rollick.rollout.work import Work, step_time_of
from rollick.types import (
    NOT_SAMPLED,
    BoolArray,
    Completion,
    Group,
    IntArray,
    PolicyVersion,
    Prompt,
    Request,
    Sample,
    SampleId,
    Sampling,
)

STUCK_AFTER_S = 1e7
"""Virtual seconds without any event before a run counts as stuck."""

SYNCHRONOUS_SHARE = 0.7
"""Of a synchronous step, the part that is rollout, where nothing better is known."""

_SHARED = 1 << 17
_ZEROS = np.zeros(_SHARED, np.int32)
_FLOATS = np.zeros(_SHARED, np.float32)
_NOT_DRAWN = np.full(_SHARED, NOT_SAMPLED, np.int32)
for _array in (_ZEROS, _FLOATS, _NOT_DRAWN):
    _array.setflags(write=False)


def simulate(scenario: Scenario) -> Report:
    """Run the scenario on a virtual clock."""
    return run_virtual(Simulation(scenario).run())


def simulate_timeline(scenario: Scenario) -> tuple[Report, Timeline]:
    """The same, with what observe/picture.py draws."""
    timeline = Timeline()
    return run_virtual(Simulation(scenario, timeline).run()), timeline


def barrier(scenario: Scenario) -> Scenario:
    """The synchronous run of the same work: all devices generate, then all of them train."""
    count = scenario.devices.count
    devices = {"generators": count, "trainers": count, "colocated": True}
    rollout = {"max_staleness": 0, "staleness_rule": "must_take", "surplus_groups": 0}
    return scenario.change(devices=devices, rollout=rollout, failures=())


def calibrate(scenario: Scenario, share: float) -> Scenario:
    """With the training cost at which rollout is this share of the step of the synchronous run."""
    devices = {"train_token_s": 0.0, "train_base_s": 0.0, "transfer_s": 0.0, "publish_s": 0.0}
    report = simulate(barrier(scenario).change(devices=devices))
    train_s = report.seconds * (1 - share) / share
    each = train_s * scenario.devices.count / report.tokens
    return scenario.change(devices={"train_token_s": each, "train_base_s": 0.0})


def complete(scenario: Scenario) -> Scenario:
    """A scenario that says nothing of the training's cost gets one: rollout is then
    SYNCHRONOUS_SHARE of a synchronous step."""
    devices = scenario.devices
    if devices.train_token_s or devices.train_base_s:
        return scenario
    return calibrate(scenario, SYNCHRONOUS_SHARE)


class Simulation:
    """One run. Make it anywhere, run it once, on an event loop whose time may pass as it likes."""

    def __init__(self, scenario: Scenario, timeline: Timeline | None = None) -> None:
        self.scenario = scenario
        self.work = Work(scenario.work, scenario.seed)
        self.bubbles = Bubbles()
        self.bias = Bias(
            self.work, size=scenario.rollout.group_size + scenario.rollout.spare_samples
        )
        self.timeline = timeline
        self.marks: list[Mark] = []
        self.engines: list[SimulatedEngine] = []
        self.sampling = Sampling(max_tokens=scenario.work.lengths.max_tokens)
        self._groups = 0

    async def run(self) -> Report:
        scenario, devices, work = self.scenario, self.scenario.devices, self.scenario.work
        self._refuse_impossible()
        self.trainer = SimulatedTrainer(
            devices.train_token_s / devices.trainers,
            devices.train_base_s,
            slowdown=self._slowdown if devices.contention > 1 else None,
        )
        reward = SimulatedReward(
            self.work.reward, seed=scenario.seed, flat=work.flat, failed=work.failed_scores
        )
        engines = [self._make_engine(number) for number in range(devices.generators)]
        async with AsyncExitStack() as stack:
            self.rollout = await stack.enter_async_context(
                Rollout.open(
                    config=scenario.rollout,
                    prompts=self._next_prompt,
                    engines=engines,
                    score=reward.score,
                    seed=scenario.seed,
                    stuck_after_s=STUCK_AFTER_S,
                    episode=self._episode,
                    signal=partial(judge_group, min_spread=scenario.rollout.min_spread)
                    if scenario.rollout.drop_no_signal
                    else None,
                    record=self._record,
                    span=self.bubbles.span,
                )
            )
            self._tell_predictor()
            self._plan_failures(engines)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            watch = tasks.create_task(self._watch()) if self.timeline else None
            for _ in range(scenario.warmup_steps + scenario.steps):
                await self._step()
            if watch is not None:
                watch.cancel()
            # Started and not trained on: at this moment that is a bias.
            self.bias.ended(group.uid for group in self.rollout.ledger.parked())
        return make_report(self.scenario, self.marks, work=self.work, bias=self.bias)

    def _refuse_impossible(self) -> None:
        devices = self.scenario.devices
        for failure in self.scenario.failures:
            if failure.engine >= devices.generators:
                raise ConfigError(
                    f"engine {failure.engine} cannot fail: there are {devices.generators}",
                    fix="count engines from 0",
                )

    def _make_engine(self, number: int, version: int = 0) -> SimulatedEngine:
        devices = self.scenario.devices
        engine = SimulatedEngine(
            step_time_of(devices.step_time),
            self._length_of,
            slots=devices.slots,
            kv_capacity=devices.kv_tokens,
            speed=devices.speeds[number % len(devices.speeds)],
            call_s=devices.call_s,
            version=version,
        )
        self.engines.append(engine)
        return engine

    def _length_of(self, request: Request) -> int:
        """An episode here puts the number of the turn where a real one has the random stream."""
        return self.work.lengths.tokens(request.uid, request.stream)

    def _next_prompt(self) -> Prompt:
        uid = self.work.prompt_of(self._groups)
        self._groups += 1
        return Prompt(uid, "simulated", ())

    def _tell_predictor(self) -> None:
        """What earlier epochs told of the prompts; their samples have ids of their own. The first
        groups have started by now, without this: they belong to the warm-up."""
        config = self.scenario.work
        for prompt in range(config.prompts if config.seen_before else 0):
            for index in range(config.seen_before):
                uid = SampleId(prompt, -1 - index)
                tokens = sum(self.work.tokens(uid))
                self.rollout.lengths.update(self.work.prompt_of(prompt), "simulated", tokens)

    async def _episode(self, uid: SampleId, prompt: Prompt, access: Access) -> Sample:
        """Turns on engines, and the environment between them."""
        config = self.scenario.work
        turns, context = self.work.turns(uid), config.prompt_tokens
        parts: list[IntArray] = [_NOT_DRAWN[:context]]
        kept: list[tuple[int, BoolArray]] = []
        completion: Completion | None = None
        for turn in range(turns):
            if turn:
                with access.doing("environment"):
                    await asyncio.sleep(self.work.environment.seconds(uid, turn))
                context += config.observation_tokens
                parts.append(_NOT_DRAWN[: config.observation_tokens])
            group = None if turn else uid.group
            request = Request(uid, _zeros(context), self.sampling, turn, group=group)
            completion = await access.generate(request)
            if completion.kept_cache is not None:
                kept.append((context, completion.kept_cache))
            context += len(completion.token_ids)
            parts.append(completion.versions)
        assert completion is not None
        sample = _sample(uid, prompt, completion, np.concatenate(parts))
        return replace(sample, kept_cache=_flags(context, kept)) if kept else sample

    async def _step(self) -> None:
        """One training step: wait for a batch, train, publish."""
        self._mark("generate")
        groups = await self.rollout.take()
        stats = self.rollout.stats()
        self.bubbles.waited(self._now() - stats.wait_seconds, self._now())
        self._mark("train")
        if self.scenario.devices.colocated:
            await self._engines("pause", below=self.scenario.devices.trainers)
        await self._train(groups)
        self._mark("publish")
        version = PolicyVersion(self.rollout.version + 1)
        await self._publish(version)
        if self.scenario.devices.controller_s:
            await asyncio.sleep(self.scenario.devices.controller_s)
        self.rollout.trained(groups, version)
        self.rollout.published(version)
        self.bubbles.forget(group.uid for group in groups)
        self.bias.trained(sample.uid for group in groups for sample in group.samples)
        self._mark("done", groups=groups)

    async def _train(self, groups: Sequence[Group]) -> None:
        """Engines that share cores or memory with the trainer are slower meanwhile."""
        contention = self.scenario.devices.contention
        if contention > 1:
            self._slow_engines(contention)
        await self.trainer.train(groups)
        if contention > 1:
            self._slow_engines(1.0)

    def _slow_engines(self, times: float) -> None:
        for engine in self.engines:
            engine.slow_down(times)

    def _slowdown(self) -> float:
        """Of the trainer, now: engines that compute slow it down."""
        computing = any(engine.load().running for engine in self.engines)
        return self.scenario.devices.contention if computing else 1.0

    async def _publish(self, version: PolicyVersion) -> None:
        """As a real run does: engines go on while the weights are on their way, and pause between
        two steps while they take them."""
        await asyncio.sleep(self.scenario.devices.transfer_s)
        if self.scenario.rollout.at_publish == "move":
            await self.rollout.interrupt()
        await self._engines("pause")
        await asyncio.sleep(self.scenario.devices.publish_s)
        keep = self.scenario.rollout.at_publish == "keep"
        await self._engines("commit_shared", version, keep_cache=keep)
        await self._engines("resume")
        if self.scenario.rollout.at_publish == "move":
            self.rollout.resume_admission()

    async def _engines(
        self, method: str, *args: PolicyVersion, below: int | None = None, **options: bool
    ) -> None:
        """All that are there, or those with a number below; a lost one that nobody has used since
        is found out here."""
        fleet = self.rollout.fleet
        numbers = [number for number in fleet.engines if below is None or number < below]
        calls = [getattr(fleet.engines[number], method)(*args, **options) for number in numbers]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for number, result in zip(numbers, results, strict=True):
            if isinstance(result, EngineLost):
                fleet.remove(number)
            elif isinstance(result, BaseException):
                raise result

    def _plan_failures(self, engines: Sequence[SimulatedEngine]) -> None:
        loop = asyncio.get_running_loop()
        for failure in self.scenario.failures:
            engines[failure.engine].fail_at(failure.at_s)
            if failure.back_s:
                loop.call_at(failure.back_s, self._join, failure.engine)

    def _join(self, number: int) -> None:
        self.rollout.fleet.add(self._make_engine(number, self.rollout.version))

    def _record(self, event: Event) -> None:
        if isinstance(event, Dropped):
            self.bias.ended([event.group])

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _mark(self, phase: Phase, groups: Iterable[Group] = ()) -> None:
        """The state of all sums at the beginning of a phase."""
        stats = self.rollout.stats()
        self.marks.append(
            Mark(
                phase,
                self._now(),
                usage=total_usage(engine.usage() for engine in self.engines),
                trainer_busy_s=self.trainer.busy_s,
                trained=tuple(s.uid for group in groups for s in group.samples),
                tokens=sum(s.length for group in groups for s in group.samples),
                stats=stats,
                waited=dict(self.bubbles.waits),
            )
        )
        if self.timeline is not None:
            self.timeline.phases.append((self._now(), phase))

    async def _watch(self) -> None:
        """Looks at the engines at times that lie apart as far as a picture of the whole needs."""
        assert self.timeline is not None
        while True:
            running = sum(engine.load().running for engine in self.engines)
            self.timeline.add(self._now(), running=running, waiting=self.rollout.fleet.waiting)
            await asyncio.sleep(self.timeline.every_s)


def _flags(length: int, kept: Iterable[tuple[int, BoolArray]]) -> BoolArray:
    flags = np.zeros(length, np.bool_)
    for start, turn in kept:
        flags[start : start + len(turn)] = turn
    flags.setflags(write=False)
    return flags


def _zeros(length: int) -> IntArray:
    return _ZEROS[:length] if length <= _SHARED else np.zeros(length, np.int32)


def _sample(uid: SampleId, prompt: Prompt, last: Completion, versions: IntArray) -> Sample:
    length = len(versions)
    mask: npt.NDArray[np.bool_] = versions != NOT_SAMPLED
    versions.setflags(write=False)
    mask.setflags(write=False)
    floats = _FLOATS[:length] if length <= _SHARED else np.zeros(length, np.float32)
    return Sample(
        uid=uid,
        prompt=prompt,
        token_ids=_zeros(length),
        logprobs=floats,
        versions=versions,
        loss_mask=mask,
        temperature=1.0,
        stop=last.stop,
        text="",
    )

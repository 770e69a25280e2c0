"""A simulated run: the real Rollout with simulated engines, environments, rewards and trainer.

    Scenario -> Rollout (scheduler.py, as in a real run) <-> SimulatedEngine x generators
                   | take                                       ^ pause, commit, resume
                   v                                            |
                 training ------------ trained -------------> publish      on the virtual clock

Owns the loop over the steps and its measurements. Deterministic: the same scenario gives the same
report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from rollick.algorithms.selection import group_drop_reason
from rollick.episodes.base import EngineAccess
from rollick.errors import ConfigError, EngineLost
from rollick.rollout.deps import RolloutDeps
from rollick.rollout.ledger.events import Event, GroupDropped
from rollick.rollout.scheduler import Rollout
from rollick.simulator.batching import total_usage
from rollick.simulator.engine import SimulatedEngine, constant_array
from rollick.simulator.report import (
    PhaseSnapshot,
    Report,
    SlotTimeline,
    TrainerPhase,
    WaitAttribution,
    length_bias,
    make_report,
)
from rollick.simulator.scenario import Scenario
from rollick.simulator.virtual_clock import run_virtual
from rollick.simulator.workload import SampleWork, SimulatedReward
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
    frozen_array,
)

STUCK_AFTER_S = 1e7
"""Virtual seconds without any event before a run counts as stuck."""

TRAINING_PARTS = 20
"""Parts of a training step; the slowdown is updated at the beginning of each."""

SYNCHRONOUS_SHARE = 0.7
"""Share of a synchronous step that is rollout, if the scenario does not give training costs."""


def simulate(scenario: Scenario, timeline: SlotTimeline | None = None) -> Report:
    """Run the simulation. Fills `timeline`, which observe/report.py draws."""
    return run_virtual(Simulation(scenario, timeline).run())


def make_synchronous(scenario: Scenario) -> Scenario:
    """The synchronous run of the same work: all devices generate, then all of them train."""
    count = scenario.devices.count
    devices = {"generators": count, "trainers": count, "colocated": True}
    rollout = {"max_staleness": 0, "staleness_rule": "must_take", "surplus_groups": 0}
    return scenario.change(devices=devices, rollout=rollout, failures=())


def set_rollout_share(scenario: Scenario, share: float) -> Scenario:
    """Sets the training cost so that rollout is this share of a synchronous step."""
    devices = {"train_token_s": 0.0, "train_base_s": 0.0, "transfer_s": 0.0, "publish_s": 0.0}
    report = simulate(make_synchronous(scenario).change(devices=devices))
    train_s = report.seconds * (1 - share) / share
    token_s = train_s * scenario.devices.count / report.tokens
    return scenario.change(devices={"train_token_s": token_s, "train_base_s": 0.0})


def add_training_cost(scenario: Scenario) -> Scenario:
    """Without a training cost, add one: rollout is then SYNCHRONOUS_SHARE of a synchronous step."""
    has_cost = scenario.devices.train_token_s or scenario.devices.train_base_s
    return scenario if has_cost else set_rollout_share(scenario, SYNCHRONOUS_SHARE)


class Simulation:
    """One simulated run. Call `run` only once."""

    def __init__(self, scenario: Scenario, timeline: SlotTimeline | None = None) -> None:
        self.scenario = scenario
        self.work = SampleWork(scenario.work, scenario.seed)
        self.waits = WaitAttribution()
        self.trained: list[SampleId] = []
        self.ended_groups: list[int] = []
        """Groups that were trained on or dropped."""
        self.timeline = timeline
        self.snapshots: list[PhaseSnapshot] = []
        self.engines: list[SimulatedEngine] = []
        self.trainer_busy_s = 0.0
        self.sampling = Sampling(max_tokens=scenario.work.lengths.max_tokens)
        self._num_groups = 0

    async def run(self) -> Report:
        scenario = self.scenario
        engines = [self._make_engine(number) for number in range(scenario.devices.generators)]
        async with AsyncExitStack() as stack:
            self.rollout = await stack.enter_async_context(Rollout.open(self._make_deps(), engines))
            self._train_length_predictor()
            self._schedule_failures(engines)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            recorder = tasks.create_task(self._record_timeline()) if self.timeline else None
            for _ in range(scenario.warmup_steps + scenario.steps):
                await self._step()
            if recorder is not None:
                recorder.cancel()
            # Deferred groups were started but not trained on; the bias counts them.
            self.ended_groups += (group.uid for group in self.rollout.ledger.deferred_groups())
        num_samples = scenario.rollout.group_size + scenario.rollout.spare_samples
        started = [SampleId(group, n) for group in self.ended_groups for n in range(num_samples)]
        bias = length_bias(self.work, self.trained, started)
        return make_report(scenario, self.snapshots, work=self.work, bias=bias)

    def _make_deps(self) -> RolloutDeps:
        config, work = self.scenario.rollout, self.scenario.work
        flat, failed = work.flat, work.failed_scores
        reward = SimulatedReward(self.work.reward, self.scenario.seed, flat=flat, failed=failed)
        drop_reason = partial(group_drop_reason, min_spread=config.min_spread)
        return RolloutDeps(
            config=config,
            next_prompt=self._next_prompt,
            episode=self._episode,
            score=reward.score,
            stuck_after_s=STUCK_AFTER_S,
            drop_reason=None if config.drop_no_signal is False else drop_reason,
            record_event=self._record_event,
            record_span=self.waits.add_span,
        )

    def _make_engine(self, number: int, version: int = 0) -> SimulatedEngine:
        devices = self.scenario.devices
        engine = SimulatedEngine(
            devices.step_time,
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
        """`_episode` puts the turn into the random stream of its requests."""
        return self.work.lengths.tokens(request.uid, request.stream)

    def _next_prompt(self) -> Prompt:
        uid = self.work.prompt_uid(self._num_groups)
        self._num_groups += 1
        return Prompt(uid, "simulated", ())

    def _train_length_predictor(self) -> None:
        """Give the length predictor the samples of earlier epochs, with unused ids. The rollout has
        started its first groups without them; those belong to the warm-up."""
        config = self.scenario.work
        for prompt in range(config.prompts if config.seen_before else 0):
            for index in range(config.seen_before):
                uid = SampleId(prompt, -1 - index)
                tokens = sum(self.work.tokens(uid))
                self.rollout.lengths.update(self.work.prompt_uid(prompt), "simulated", tokens)

    async def _episode(self, uid: SampleId, prompt: Prompt, access: EngineAccess) -> Sample:
        """Turns on engines, and the environment between them."""
        config = self.scenario.work
        turns, context = self.work.turns(uid), config.prompt_tokens
        parts: list[IntArray] = [constant_array(NOT_SAMPLED, context, np.int32)]
        kept_spans: list[tuple[int, BoolArray]] = []
        completion: Completion | None = None
        for turn in range(turns):
            if turn:
                with access.activity("environment"):
                    await asyncio.sleep(self.work.environment.seconds(uid, turn))
                context += config.observation_tokens
                parts.append(constant_array(NOT_SAMPLED, config.observation_tokens, np.int32))
            group = None if turn else uid.group
            tokens = constant_array(0, context, np.int32)
            request = Request(uid, tokens, self.sampling, turn, group=group)
            completion = await access.generate(request)
            if completion.kept_cache is not None:
                kept_spans.append((context, completion.kept_cache))
            context += len(completion.token_ids)
            parts.append(completion.versions)
        assert completion is not None
        sample = _make_sample(uid, prompt, completion, np.concatenate(parts))
        if not kept_spans:
            return sample
        flags = np.zeros(context, np.bool_)
        for start, turn_flags in kept_spans:
            flags[start : start + len(turn_flags)] = turn_flags
        return replace(sample, kept_cache=frozen_array(flags, np.bool_))

    async def _step(self) -> None:
        """One training step: wait for a batch, train, publish."""
        self._snapshot("generate")
        groups = await self.rollout.take()
        self.waits.add_wait(self._now() - self.rollout.stats.wait_seconds, self._now())
        self._snapshot("train")
        if self.scenario.devices.colocated:
            num_engines = self.scenario.devices.trainers
            await self._call_engines(SimulatedEngine.pause, first=num_engines)
        await self._train(groups)
        self._snapshot("publish")
        version = PolicyVersion(self.rollout.version + 1)
        await self._publish(version)
        if self.scenario.devices.controller_s:
            await asyncio.sleep(self.scenario.devices.controller_s)
        self.rollout.trained(groups, version)
        self.rollout.published(version)
        self.waits.forget(group.uid for group in groups)
        self.trained += (sample.uid for group in groups for sample in group.samples)
        self.ended_groups += (group.uid for group in groups)
        self._snapshot("done", groups=groups)

    async def _train(self, groups: Sequence[Group]) -> None:
        """Wait as long as training on all tokens takes, prompts included. Engines that share cores
        or memory with the trainer are slower meanwhile, and slow it down."""
        devices, contention = self.scenario.devices, self.scenario.devices.contention
        tokens = sum(sample.length for group in groups for sample in group.samples)
        seconds = devices.train_base_s + devices.train_token_s / devices.trainers * tokens
        slowed_engines = self.engines if contention > 1 else []
        for engine in slowed_engines:
            engine.slow_down(contention)
        num_parts, busy_s = TRAINING_PARTS if slowed_engines else 1, 0.0
        for _ in range(num_parts):
            are_computing = any(engine.load().running for engine in slowed_engines)
            part_s = seconds / num_parts * (contention if are_computing else 1.0)
            busy_s += part_s
            await asyncio.sleep(part_s)
        self.trainer_busy_s += busy_s
        for engine in slowed_engines:
            engine.slow_down(1.0)

    async def _publish(self, version: PolicyVersion) -> None:
        """As in a real run, engines continue during the transfer and pause to load the weights."""
        await asyncio.sleep(self.scenario.devices.transfer_s)
        if self.scenario.rollout.at_publish == "move":
            await self.rollout.interrupt()
        await self._call_engines(SimulatedEngine.pause)
        await asyncio.sleep(self.scenario.devices.publish_s)
        keep = self.scenario.rollout.at_publish == "keep"
        await self._call_engines(lambda engine: engine.commit_shared(version, keep_cache=keep))
        await self._call_engines(SimulatedEngine.resume)
        if self.scenario.rollout.at_publish == "move":
            self.rollout.resume_admission()

    async def _call_engines(
        self, call: Callable[[SimulatedEngine], Awaitable[None]], *, first: int | None = None
    ) -> None:
        """Call all engines, or those with the `first` numbers. Remove lost engines."""
        fleet = self.rollout.fleet
        numbers = [number for number in fleet.engines if first is None or number < first]
        calls = [call(cast(SimulatedEngine, fleet.engines[number])) for number in numbers]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for number, result in zip(numbers, results, strict=True):
            if isinstance(result, EngineLost):
                fleet.remove(number)
            elif isinstance(result, BaseException):
                raise result

    def _schedule_failures(self, engines: Sequence[SimulatedEngine]) -> None:
        for failure in self.scenario.failures:
            if failure.engine >= len(engines):
                message = f"engine {failure.engine} cannot fail: there are {len(engines)} engines"
                raise ConfigError(message, fix="number engines from 0")
            engines[failure.engine].fail_at(failure.at_s)
            if failure.back_s:
                call_at = asyncio.get_running_loop().call_at
                call_at(failure.back_s, self._add_engine, failure.engine)

    def _add_engine(self, number: int) -> None:
        self.rollout.fleet.add(self._make_engine(number, self.rollout.version))

    def _record_event(self, event: Event) -> None:
        if isinstance(event, GroupDropped):
            self.ended_groups.append(event.group)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _snapshot(self, phase: TrainerPhase, groups: Iterable[Group] = ()) -> None:
        """Record the run's totals at the beginning of a phase."""
        samples = [sample for group in groups for sample in group.samples]
        snapshot = PhaseSnapshot(
            phase,
            self._now(),
            usage=total_usage(engine.usage() for engine in self.engines),
            trainer_busy_s=self.trainer_busy_s,
            trained=tuple(sample.uid for sample in samples),
            tokens=sum(sample.length for sample in samples),
            stats=self.rollout.stats,
            waited=dict(self.waits.waits),
        )
        self.snapshots.append(snapshot)
        if self.timeline is not None:
            self.timeline.phases.append((self._now(), phase))

    async def _record_timeline(self) -> None:
        assert self.timeline is not None
        while True:
            running = sum(engine.load().running for engine in self.engines)
            self.timeline.add(self._now(), running=running, waiting=len(self.rollout.fleet.queue))
            await asyncio.sleep(self.timeline.every_s)


def _make_sample(uid: SampleId, prompt: Prompt, last: Completion, versions: IntArray) -> Sample:
    length = len(versions)
    return Sample(
        uid=uid,
        prompt=prompt,
        token_ids=constant_array(0, length, np.int32),
        logprobs=constant_array(0, length, np.float32),
        versions=frozen_array(versions, np.int32),
        loss_mask=frozen_array(versions != NOT_SAMPLED, np.bool_),
        temperature=1.0,
        stop=last.stop,
        text="",
    )

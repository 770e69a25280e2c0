"""The run loop that all pipelines share: steps, validation, checkpoints, and how a run stops.

    until all steps are done, the time is up or a signal stops the run:
        step -> measure -> validate if due -> log -> write outputs -> checkpoint if due

A stopped run saves a checkpoint. On an error during generation or validation, which change no
checkpointed state, the loop saves the last consistent state and raises the error again.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import ClassVar, Generic, TypeVar

from rollick.data.batch import Batch
from rollick.data.store import samples_to_rows
from rollick.errors import CheckpointError, RollickError
from rollick.observe.faults import FaultLog, read_faults
from rollick.observe.goodput import fault_metrics
from rollick.observe.learning_advice import find_advice
from rollick.pipelines.checkpoints import SAVE_FAILED, PipelineState
from rollick.pipelines.evaluate import EvalReport, evaluate_prompts
from rollick.pipelines.open_run import OpenRun
from rollick.pipelines.phases import phase
from rollick.pipelines.state import INTERRUPTIBLE, HeldOutScore, RunResult
from rollick.pipelines.step_guard import StepGuard
from rollick.roles.handles import Policy
from rollick.rollout.relative_speeds import MIN_TOKENS, RelativeSpeeds
from rollick.types import Prompt

LOG = logging.getLogger("rollick")
R = TypeVar("R")


@dataclass(slots=True)
class RankSpeeds:
    """Reports the slow ranks of a sharded policy, for which all ranks wait, and gives them less
    work."""

    policy: Policy
    faults: FaultLog
    adapts: bool
    """Whether slow ranks get less work. Not in deterministic mode: the division of a batch decides
    how its sums are rounded."""
    speeds: RelativeSpeeds = field(default_factory=RelativeSpeeds)

    def __post_init__(self) -> None:
        for rank in range(self.policy.ranks):
            self.speeds.add(rank)

    async def measure(self) -> None:
        """Compare the ranks after a step. The batches from now on are divided by their speeds."""
        if self.policy.ranks < 2:
            return
        for rank, seconds in enumerate(await self.policy.time_fixed_work()):
            # The same work on each rank counts like the same number of tokens.
            self.speeds.observe(rank, tokens=MIN_TOKENS, seconds=seconds)
        for rank in self.speeds.end_step():
            cause = f"computes at {self.speeds.relative_speed(rank):.0%} of the median speed"
            self.faults.begin("policy", rank, kind="slow", cause=cause)
            work = "; it gets less work" if self.adapts else ""
            LOG.warning("rank %d of the policy %s%s", rank, cause, work)
        if self.adapts:
            self.policy.set_rank_speeds([self.speeds.weight(r) for r in range(self.policy.ranks)])

    def metrics(self) -> dict[str, float]:
        if self.policy.ranks < 2:
            return {}
        return {"speed/slow_ranks": float(len(self.speeds.slow_workers))}


class Pipeline(ABC, Generic[R]):
    """The part of the loop that depends on the kind of training. R: type of a step's report."""

    generates: ClassVar[bool] = True
    """Whether a step waits for samples: snapshots are written meanwhile and cost no time."""

    def __init__(self, run: OpenRun) -> None:
        self.run = run
        self.state = run.state
        self.phases = run.phases
        self.roles = run.roles
        self.publisher = run.publisher
        dumps, faults = run.state.folder.dumps, run.telemetry.faults
        self.guard = StepGuard(run.recipe, dumps, faults, run.recovery)
        self.guard.restore_history(run.telemetry.log.history)
        adapts = not run.recipe.run.deterministic
        self.ranks = RankSpeeds(run.roles.policy, faults, adapts)

    @abstractmethod
    async def step(self) -> R: ...

    @abstractmethod
    def measure(self, report: R) -> dict[str, float]:
        """Return the metrics of a finished step."""

    @abstractmethod
    def checkpoint_state(self) -> PipelineState: ...

    @phase("annotate")
    async def annotate(self, batch: Batch) -> Batch:
        """Add the log-probs and values that the recipe's algorithms need for training."""
        recipe, roles = self.run.recipe, self.roles
        if recipe.needs("old"):
            batch = replace(batch, old_logprobs_N=await roles.policy.logprobs(batch))
        if recipe.needs("reference"):
            of_policy = roles.policy.reference_logprobs
            reference = of_policy if recipe.policy_is_reference else roles.reference.logprobs
            batch = replace(batch, reference_logprobs_N=await reference(batch))
        if recipe.needs("teacher"):
            batch = replace(batch, teacher_logprobs_N=await roles.teacher.logprobs(batch))
        if recipe.needs("teacher_top"):
            ids_NK, top_NK = await roles.teacher.top_logprobs(batch)
            batch = replace(batch, teacher_ids_NK=ids_NK, teacher_top_NK=top_NK)
        if recipe.needs("values"):
            values_N, last_values_B = await roles.critic.values(batch)
            batch = replace(batch, values_N=values_N, last_values_B=last_values_B)
        return batch

    async def write_outputs(self, report: R) -> None:
        """Write the samples and dumps of a step to the run's folder."""

    async def prepare_validation(self) -> None:
        """Called before each validation."""

    def closing_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics computed last, from the step's other metrics and its phase times."""
        return {}

    def undo_failed_step(self) -> None:
        """Called after an error in generation or validation, before the state is saved."""

    def warn_unfinished(self) -> None:
        """Called when all steps are done or a signal stopped the run."""


class RunLoop(Generic[R]):
    def __init__(self, run: OpenRun, pipeline: Pipeline[R]) -> None:
        self.recipe = run.recipe
        self.state = run.state
        self.telemetry = run.telemetry
        self.phases = run.phases
        self.checkpoints = run.checkpoints
        self.opened = run
        self.pipeline = pipeline
        self.time_is_up = False
        self.first_step = run.state.step
        self.validation: Sequence[Prompt] = run.open_prompts(validation=True).all()
        self.earlier_faults = {fault.id: fault for fault in read_faults(run.state.folder.path)}
        """Those of the run's earlier processes by id."""
        self._saved_at = monotonic()

    async def run(self) -> RunResult:
        checkpoint = self.recipe.checkpoint
        if not checkpoint.every and not checkpoint.every_s:
            LOG.warning(
                "checkpoint.every and checkpoint.every_s are 0: a crash loses all steps of this run"
            )
        try:
            return await self._make_steps()
        except RollickError:
            # For example, every group of a solved task has zero variance. An error of the save
            # must not hide this one.
            is_healthy = not self.pipeline.guard.has_bad_steps
            if is_healthy and self.state.step and self.state.phase in INTERRUPTIBLE:
                self.pipeline.undo_failed_step()
                with suppress(RollickError):
                    await self._save(self.telemetry.log.last)
            raise

    async def _make_steps(self) -> RunResult:
        state, steps = self.state, self.recipe.run.steps
        await self.checkpoints.recovery.take_snapshots()
        self.telemetry.goodput.begin_steps()
        metrics = self.telemetry.log.last
        if state.step == 0 and self.validation and self.recipe.evaluate.is_due(0, steps=steps):
            metrics = await self._record({})
        while state.step < steps and not self.time_is_up and not state.stop.is_set():
            began = time.time()
            report = await state.until_stopped(self.pipeline.step(), timeout_s=self._time_left())
            if report is None:
                if (
                    not state.stop.is_set()
                ):  # An interrupted step's samples would delay a validation.
                    self._end_for_time_limit()
                break
            state.step += 1
            # Before anything is awaited: then samples of the next step would be counted too.
            measured = self.pipeline.measure(report)
            await self.pipeline.ranks.measure()
            self.checkpoints.recovery.finish_step(
                amortise=not self.pipeline.generates, hold=self.pipeline.guard.has_bad_steps
            )
            if self._time_left(after_s=time.time() - began) == 0:
                self._end_for_time_limit()
            metrics = await self._record(measured)
            await self.pipeline.write_outputs(report)
            if self._checkpoint_is_due() and not self.pipeline.guard.has_bad_steps:
                try:
                    await self._save(metrics, in_background=True)
                except CheckpointError as error:  # For example, a full disk.
                    LOG.error(SAVE_FAILED, error)
        with self.telemetry.goodput.during("save"):
            await self.checkpoints.settle()
        stopped = state.step < steps and not self.time_is_up
        if not stopped:
            self.pipeline.guard.check_end()
        self.pipeline.warn_unfinished()
        if stopped or state.saved_step != state.step:
            await self._save(metrics)
        return self._result(metrics, interrupted=stopped)

    def _time_left(self, *, after_s: float = 0.0) -> float | None:
        """Seconds that run.max_minutes leaves, less `after_s`; None if there is no limit, or before
        this process has made a step."""
        run, state = self.recipe.run, self.state
        if not run.max_minutes or state.step in (self.first_step, run.steps):
            return None
        return max(0.0, state.started_at + 60 * run.max_minutes - time.time() - after_s)

    def _end_for_time_limit(self) -> None:
        run, state = self.recipe.run, self.state
        self.time_is_up = True
        LOG.warning(
            "ending at step %d of %d after %.1f minutes, by run.max_minutes=%g; resume the run to "
            "continue it",
            *(state.step, run.steps, (time.time() - state.started_at) / 60, run.max_minutes),
        )

    def _result(self, metrics: dict[str, float], *, interrupted: bool) -> RunResult:
        folder, history = self.state.folder, self.telemetry.log.history
        return RunResult(
            folder.path,
            self.state.step,
            metrics,
            interrupted=interrupted,
            held_out=tuple(HeldOutScore.of(row) for row in history if "eval/pass@1" in row),
            best_checkpoint=folder.checkpoints.best_step(),
        )

    async def _record(self, metrics: dict[str, float]) -> dict[str, float]:
        """Validate if due, then log the step's metrics. Returns them."""
        state = self.state
        last_step = state.step if self.time_is_up else self.recipe.run.steps
        due = self.recipe.evaluate.is_due(state.step, steps=last_step)
        metrics |= await self.telemetry.memory.metrics()
        if self.validation and due and not state.stop.is_set():
            await self.pipeline.prepare_validation()
            try:
                report = await state.until_stopped(self._validate())
            except RollickError:
                if state.step:
                    self._log(metrics)
                raise
            if report is not None:
                metrics |= report.metrics()
                rows = [{"step": state.step, **row} for row in samples_to_rows(report.groups)]
                state.folder.append_rows("validation.jsonl", rows)
        self._log(metrics)
        return metrics

    @phase("validate")
    async def _validate(self) -> EvalReport:
        return await evaluate_prompts(self.opened, self.validation)

    def _log(self, metrics: dict[str, float]) -> None:
        goodput, faults = self.telemetry.goodput, self.telemetry.faults
        metrics |= self.telemetry.stopwatch.finish() | goodput.finish_step(self.state.step)
        metrics |= fault_metrics((self.earlier_faults | {f.id: f for f in faults.faults}).values())
        if self.recipe.cluster.backend == "ray":
            metrics["controller/batch_mb"] = self.pipeline.roles.group.take_batch_bytes() / 1e6
        metrics |= self.pipeline.ranks.metrics() | self.pipeline.closing_metrics(metrics)
        self.telemetry.log.log(self.state.step, metrics)
        self.telemetry.view.finish_step(self.state.step, metrics)
        self.telemetry.view.advise(find_advice(self.telemetry.log.history))

    def _checkpoint_is_due(self) -> bool:
        config = self.recipe.checkpoint
        by_step = bool(config.every) and self.state.step % config.every == 0
        return by_step or (bool(config.every_s) and monotonic() >= self._saved_at + config.every_s)

    async def _save(self, metrics: dict[str, float], *, in_background: bool = False) -> None:
        self._saved_at = monotonic()
        state = self.pipeline.checkpoint_state()
        with self.telemetry.goodput.during("save"):
            await self.checkpoints.save(state, metrics, in_background=in_background)

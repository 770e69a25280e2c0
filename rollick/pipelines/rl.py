"""The RL step of the pipelines `rlvr` and `agentic`. Start reading the library here.

    generate -> collate -> annotate -> credit -> train (critic, then policy) -> publish

This code is the same for synchronous, one-step-off and asynchronous runs (rollout.max_staleness),
for colocated and separated roles (the device map), and for single answers, environments and agents
(episodes.py).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollick.algorithms.credit import CreditAssigner
from rollick.config.load import LoadedRecipe
from rollick.config.schema import rl_recipe
from rollick.data.batch import Batch
from rollick.data.collate import collate
from rollick.data.store import samples_to_rows, save_batch, save_groups
from rollick.observe.reward_hacking import alarm_metrics, find_alarms
from rollick.pipelines.checkpoints import PipelineState
from rollick.pipelines.domains import count_kept_no_signal
from rollick.pipelines.group_source import GroupSource, open_group_source
from rollick.pipelines.loop import Pipeline, RunLoop
from rollick.pipelines.open_run import OpenRun, open_run
from rollick.pipelines.phases import phase
from rollick.pipelines.state import RunObjects, RunResult
from rollick.roles.reports import CriticReport, TrainReport
from rollick.run_folder import ENGINE_STEPS
from rollick.simulator.run_records import record_row
from rollick.types import Group, PolicyVersion

LOG = logging.getLogger("rollick")

ROLLED_BACK = "rolled_back"
"""Drop reason of groups that a policy generated before it was rolled back."""


@dataclass(frozen=True, slots=True)
class StepReport:
    groups: Sequence[Group]
    batch: Batch
    train: TrainReport | None
    """None while only the critic is trained."""
    critic: CriticReport | None


class RLPipeline(Pipeline[StepReport]):
    def __init__(self, run: OpenRun, source: GroupSource) -> None:
        super().__init__(run)
        self.recipe = rl_recipe(run.recipe)
        self.telemetry = run.telemetry
        self.scoring = run.scoring
        self.source = source
        self.credit = CreditAssigner(self.recipe, base=run.loaded.base_dir)
        self.credit_means: dict[str, float] = {}

    async def step(self) -> StepReport:
        """One policy update.

        Takes sampled, scored and filtered groups (dropped groups are counted and replaced).
        When it returns, every engine samples from the new policy version.
        """
        groups = await self.generate()
        trained = self.credit.trained_members
        batch = collate(groups, select_members=trained, version=self.state.version)
        batch = await self.annotate(batch)
        batch, self.credit_means = self.credit.assign(groups, batch)
        critic = await self.train_critic(batch) if self.recipe.needs("values") else None
        async with self.state.weights_lock:
            report = await self.train(batch)
            rolled_back = await self.guard.roll_back_if_due(self.state.step + 1)
            changed = rolled_back or (report is not None and report.changed)
            drop_older = ROLLED_BACK if rolled_back else ""
            await self.publish(groups, changed=changed, drop_older=drop_older)
        return StepReport(groups, batch, report, critic)

    @phase("generate")
    async def generate(self) -> list[Group]:
        """Waits for the groups of one step."""
        groups = await self.source.take()
        uids = [sample.uid for group in groups for sample in group.samples]
        self.telemetry.trace.record_batch(uids, step=self.state.step + 1)
        return groups

    @phase("train_critic")
    async def train_critic(self, batch: Batch) -> CriticReport:
        """Train the critic on the returns; the advantages used the same values."""
        report = await self.roles.critic.train(batch)
        self.guard.check(report, batch, role="critic")
        return report

    @phase("train")
    async def train(self, batch: Batch) -> TrainReport | None:
        """Loss, gradient, optimizer step; None during the critic's warm-up steps."""
        if self.state.step + 1 in self.recipe.observe.dump_steps:
            await self.roles.policy.save(self._dump_path(self.state.step + 1) / "learner")
        if self.recipe.needs("values") and self.state.step < self.recipe.critic.warmup_steps:
            return None
        report = await self.roles.policy.train(batch)
        self.guard.check(report, batch)
        samples = len(set(batch.uids))
        self.credit.update_kl_coefficients(samples, self.credit_means | report.means)
        return report

    @phase("publish")
    async def publish(
        self, groups: Sequence[Group], *, changed: bool, drop_older: str = ""
    ) -> None:
        """Send the new weights to the engines, unless the step changed none. `drop_older`: why
        groups of earlier versions are dropped; empty: they are not."""
        state, rollout, at_publish = self.state, self.source.rollout, self.recipe.rollout.at_publish
        moves = False
        if changed:
            state.version = PolicyVersion(state.version + 1)
            moves = at_publish == "move"
            if moves:
                await rollout.interrupt()
            await self.publisher.publish_to_alive(state.version, keep_cache=at_publish == "keep")
        is_last = state.step + 1 == self.recipe.run.steps
        if is_last:
            rollout.pause_admission()
        rollout.trained(groups, state.version)
        self.telemetry.trace.record_training(state.version, step=state.step + 1)
        rollout.published(state.version, drop_older=drop_older)
        if moves and not is_last:
            rollout.resume_admission()

    def measure(self, report: StepReport) -> dict[str, float]:
        metrics = self.source.metrics()
        for trained in (report.train, report.critic):
            metrics |= trained.metrics() if trained else {}
        metrics |= {f"train/mean/{name}": value for name, value in self.credit_means.items()}
        metrics |= count_kept_no_signal(self.recipe, report.groups)
        return metrics | self.credit.metrics | self.scoring.metrics()

    def closing_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Version, throughput and reward-hacking alarms; also logs the alarms."""
        closing = {
            "controller/event_loop_lag_ms": self.source.lag.take_ms(),
            "version": float(self.state.version),
        }
        if "rollout/tokens" in metrics:
            closing["speed/tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/step"]
        alarms = find_alarms([*self.telemetry.log.history, metrics | closing])
        self.telemetry.view.warn(alarms)
        return closing | alarm_metrics(alarms)

    async def write_outputs(self, report: StepReport) -> None:
        """Write a few samples of the step, and the dumps enabled under `observe`."""
        step, observe, folder = self.state.step, self.recipe.observe, self.state.folder
        rows = samples_to_rows(report.groups)[: observe.samples_per_step]
        folder.append_rows("samples.jsonl", [{"step": step, **row} for row in rows])
        if step in observe.dump_steps:
            self._dump(report)
        if observe.engine_steps:
            # For the calibration of a simulation.
            records = await self.roles.generators.take_records()
            row = record_row(step, report.groups, train=report.train, engines=records)
            folder.append_rows(ENGINE_STEPS, [row])

    def _dump(self, report: StepReport) -> None:
        """Write the step for `rollick replay`."""
        try:
            path = self._dump_path(self.state.step)
            save_groups(path / "groups", report.groups)
            save_batch(path / "batch", report.batch)
        except OSError as error:  # For example, a full disk.
            LOG.error("the dump of step %d was not written: %s", self.state.step, error)

    def _dump_path(self, step: int) -> Path:
        path = self.state.folder.dumps / f"step-{step:06d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def checkpoint_state(self) -> PipelineState:
        """A consistent snapshot of ledger, prompt cursor, credit, reward counts and samples."""
        source, rollout = self.source, self.source.rollout.state()
        source.journal.mark_checkpoint(self.state.step, started=rollout["ledger"]["next"])
        prompts, credit = source.prompts.state(), self.credit.state()
        scoring = self.scoring.state()
        values = {"rollout": rollout, "prompts": prompts, "credit": credit, "scoring": scoring}
        return PipelineState(values, source.rollout.untrained())

    def undo_failed_step(self) -> None:
        self.source.rollout.pause_admission()
        self.source.rollout.reset_step_counters()

    def warn_unfinished(self) -> None:
        if deferred := [group.uid for group in self.source.rollout.ledger.deferred_groups()]:
            LOG.warning(
                "%d groups were deferred to a long round and are not trained on, group %d first: "
                "they are in the checkpoint, and a resumed run with more steps trains on them",
                len(deferred),
                deferred[0],
            )


async def run_rl(
    loaded: LoadedRecipe, *, objects: RunObjects | None = None, resume: bool = False
) -> RunResult:
    """Train to the end (or to a signal)."""
    async with (
        open_run(loaded, objects=objects, resume=resume) as run,
        open_rl(run, resume=resume) as pipeline,
    ):
        return await RunLoop(run, pipeline).run()


@asynccontextmanager
async def open_rl(run: OpenRun, *, resume: bool = False) -> AsyncGenerator[RLPipeline]:
    """Open the pipeline of a run; on resume, restore the newest checkpoint."""
    checkpoint = run.checkpoints.latest() if resume else None
    restored = await run.checkpoints.restore(checkpoint) if checkpoint else None
    async with open_group_source(run, restored, resume=resume) as source:
        pipeline = RLPipeline(run, source)
        if restored:
            pipeline.credit.restore(restored.values["credit"])
            if "scoring" in restored.values:  # Not in checkpoints of the first version.
                run.scoring.restore(restored.values["scoring"])
        yield pipeline

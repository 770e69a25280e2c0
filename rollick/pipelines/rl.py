"""The RL step: the map of the library. RLVR and the other pipelines are wirings of it.

    generate -> collate -> annotate -> credit -> train (critic, then policy) -> publish

Synchronous, one-step-off and asynchronous are one number (rollout.max_staleness); colocated and
separated are one device map. Neither shows here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollick.data.batch import Batch
from rollick.data.collate import collate
from rollick.data.prompts import PromptStream
from rollick.data.store import samples_to_rows, save_batch, save_groups
from rollick.errors import EngineLost, RollickError, WorkerError
from rollick.observe.watch import alarm_metrics, find_alarms
from rollick.pipelines.annotate import annotate
from rollick.pipelines.base import INTERRUPTIBLE, HasSession, RunResult, Session, phase
from rollick.pipelines.calibrate import record_row
from rollick.pipelines.credit import Credit
from rollick.pipelines.domains import validation_sampling
from rollick.pipelines.episodes import environment_metrics, playing_episode
from rollick.pipelines.evaluate import EvalReport, summarise
from rollick.pipelines.folder import ENGINE_STEPS
from rollick.pipelines.revive import Revival
from rollick.rollout.journal import Journal
from rollick.rollout.lag import LagMeter
from rollick.rollout.once import sample_all
from rollick.rollout.scheduler import Rollout
from rollick.types import Group, PolicyVersion, Prompt
from rollick.workers.critic import CriticReport
from rollick.workers.generator import ask_for_life, lost_ranks, take_records
from rollick.workers.learner import TrainReport

LOG = logging.getLogger("rollick")


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step."""

    groups: Sequence[Group]
    batch: Batch
    train: TrainReport | None
    """None while only the critic is trained."""
    critic: CriticReport | None


class RLPipeline(HasSession):
    """Runs steps over an open session and rollout."""

    def __init__(
        self,
        session: Session,
        rollout: Rollout,
        *,
        prompts: PromptStream,
        journal: Journal,
        lag: LagMeter,
        revival: Revival,
    ) -> None:
        self.session = session
        self.recipe = session.recipe
        self.rollout = rollout
        self.prompts = prompts
        self.journal = journal
        self.lag = lag
        self.revival = revival
        self.validation = session.open_prompts(validation=True).all()
        self.credit = Credit(self.recipe, base=session.base)
        self.credit_means: dict[str, float] = {}

    async def step(self) -> StepReport:
        """One policy update.

        Consumes groups that were sampled, scored and selected (drops are counted and refilled);
        produces a new policy version, which every engine samples from when this returns.
        """
        groups = await self.generate()
        batch = collate(groups, chosen=self.credit.chosen, version=self.session.version)
        batch = await annotate(self, batch)
        batch, self.credit_means = self.credit.assign(groups, batch)
        critic = await self.train_critic(batch) if self.recipe.needs("values") else None
        async with self.session.changing:
            report = await self.train(batch)
            await self.publish(groups, report)
        return StepReport(groups, batch, report, critic)

    @phase("generate")
    async def generate(self) -> list[Group]:
        """Waits until the ledger gives a batch of groups. What was judged on the way, dropped
        groups too, counts in the choice of prompts from the next step on."""
        groups = await self.rollout.take()
        self.journal.flush()
        self.prompts.learn()
        uids = [sample.uid for group in groups for sample in group.samples]
        self.session.trace.taken(uids, step=self.session.step + 1)
        return groups

    @phase("train_critic")
    async def train_critic(self, batch: Batch) -> CriticReport:
        """The critic moves towards the returns, from the values that the advantages stand on."""
        report: CriticReport = await self.session.group.call("critic", "train", batch)
        self.session.refuse_skips(report.changed, batch, role="critic")
        return report

    @phase("train")
    async def train(self, batch: Batch) -> TrainReport | None:
        """Loss, gradient, optimizer step; None in the first steps if they are the critic's."""
        if self.session.step + 1 in self.recipe.observe.dump_steps:
            path = self.dump_path(f"step-{self.session.step + 1:06d}")
            await self.session.group.together("policy", "save", path / "learner")
        if self.recipe.needs("values") and self.session.step < self.recipe.critic.warmup_steps:
            return None
        report: TrainReport = await self.session.group.together("policy", "train", batch)
        self.session.refuse_skips(report.changed, batch)
        self.credit.trained(batch.samples, self.credit_means | report.means)
        return report

    @phase("publish")
    async def publish(self, groups: Sequence[Group], report: TrainReport | None) -> None:
        """Engines sample the new policy; a step that changed nothing publishes nothing new."""
        moves = False
        if report is not None and report.changed:
            self.session.version = PolicyVersion(self.session.version + 1)
            moves = self.recipe.rollout.at_publish == "move"
            if moves:
                await self.rollout.interrupt()
            await publish_version(self.session)
        is_last = self.session.step + 1 == self.recipe.run.steps
        if is_last:
            self.rollout.pause_admission()
        self.rollout.trained(groups, self.session.version)
        self.session.trace.trained(self.session.version, step=self.session.step + 1)
        self.rollout.published(self.session.version)
        if moves and not is_last:
            self.rollout.resume_admission()

    @phase("validate")
    async def validate(self) -> EvalReport:
        """Sample and score the held-out prompts."""
        return await evaluate_prompts(self.session, self.validation)

    async def run(self) -> RunResult:
        """All steps; saves when asked to stop, and what is whole when a step cannot be made."""
        try:
            return await self.make_steps()
        except RollickError:
            # Such as a task that is learned, so that no group has a signal any more. The error is
            # the news: a save that fails after it must not hide it.
            if self.session.step and self.session.phase_name in INTERRUPTIBLE:
                self.rollout.forgive_step()
                with suppress(RollickError):
                    await self.save(self.session.log.last)
            raise

    async def make_steps(self) -> RunResult:
        """The loop over the steps, with validation and checkpoints on the way."""
        session, steps = self.session, self.recipe.run.steps
        every = self.recipe.checkpoint.every
        metrics = session.log.last
        if session.step == 0 and self.recipe.evaluate.at_start and self.validation:
            metrics = await self.record(0, {})
        while session.step < steps and not session.stop.is_set():
            report = await session.until_stopped(self.step())
            if report is None:
                break
            session.step += 1
            metrics = await self.record(session.step, self.measure(report))
            self.keep(report)
            if self.recipe.observe.engine_steps:
                await self.keep_record(report)
            if every and session.step % every == 0:
                with session.outliving_a_failed_save():
                    await self.save(metrics)
        stopped = session.step < steps
        self.tell_parked()
        if stopped or session.saved_step != session.step:
            await self.save(metrics)
        return RunResult(session.folder.path, session.step, metrics, interrupted=stopped)

    def tell_parked(self) -> None:
        """At the end: the groups that were put off to a long round which has not come."""
        parked = [group.uid for group in self.rollout.ledger.parked()]
        if parked:
            LOG.warning(
                "%d groups were put off to a long round and are not trained on (the first is group "
                "%d): they are in the checkpoint, and a resumed run with more steps goes on with "
                "them",
                len(parked),
                parked[0],
            )

    def measure(self, report: StepReport) -> dict[str, float]:
        """A finished step as metrics."""
        credit = {f"train/mean/{name}": value for name, value in self.credit_means.items()}
        return (
            self.rollout.stats().metrics()
            | (report.train.metrics() if report.train else {})
            | (report.critic.metrics() if report.critic else {})
            | credit
            | self.credit.metrics
            | self.prompts.metrics()
            | self.session.rewards.tally.take_metrics()
            | environment_metrics(self.session)
            | {
                "controller/engines": float(len(self.rollout.fleet.engines)),
                "controller/engine_restarts": float(self.revival.restarts),
            }
        )

    async def record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Log a step, with validation where it is due."""
        due = self.recipe.evaluate.is_due(step, steps=self.recipe.run.steps)
        metrics |= await self.session.memory.metrics(without=lost_ranks(self.session.engines))
        if self.validation and due and not self.session.stop.is_set():
            try:
                report = await self.session.until_stopped(self.validate())
            except RollickError:
                if step:
                    self.log_step(step, metrics)
                raise
            if report is not None:
                metrics |= report.metrics()
                keep_evaluation(self.session, step, report)
        self.log_step(step, metrics)
        return metrics

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Add times, version and speed to the metrics of a step, and write and show them."""
        metrics |= self.session.watch.finish()
        metrics["controller/lag_ms"] = self.lag.take_ms()
        metrics["version"] = float(self.session.version)
        if "rollout/tokens" in metrics:
            metrics["speed/tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/step"]
        alarms = find_alarms([*self.session.log.history, metrics])
        metrics |= alarm_metrics(alarms)
        self.session.view.warn({alarm.rule: alarm.message for alarm in alarms})
        self.session.log.log(step, metrics)
        self.session.view.step(step, metrics)

    def keep(self, report: StepReport) -> None:
        """Write a few samples of the step, and its dump where one is asked for."""
        step, observe = self.session.step, self.recipe.observe
        rows = samples_to_rows(report.groups)[: observe.samples_per_step]
        self.session.folder.append_rows("samples.jsonl", [{"step": step, **row} for row in rows])
        if step in observe.dump_steps:
            self.dump(f"step-{step:06d}", report.groups, report.batch)

    async def keep_record(self, report: StepReport) -> None:
        """What a calibration needs of the step; see calibrate.py."""
        records = await take_records(self.session.engines)
        row = record_row(self.session.step, report.groups, train=report.train, engines=records)
        self.session.folder.append_rows(ENGINE_STEPS, [row])

    def dump_path(self, name: str) -> Path:
        path = self.session.folder.dumps / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def dump(self, name: str, groups: Sequence[Group], batch: Batch) -> None:
        """Groups and batch of a step, for `rollick replay`."""
        path = self.dump_path(name)
        save_groups(path / "groups", groups)
        save_batch(path / "batch", batch)

    async def save(self, metrics: dict[str, float]) -> None:
        """A checkpoint of the whole run. Ledger, cursor and samples are of one moment."""
        rollout = self.rollout.state()
        self.journal.mark(self.session.step, started=rollout["ledger"]["next"])
        facts = {
            "rollout": rollout,
            "prompts": self.prompts.state(),
            "credit": self.credit.state(),
        }
        await self.session.save(facts, metrics, groups=self.rollout.untrained())


async def publish_version(session: Session) -> None:
    """All engines that live take the session's version; one that dies over it is left out."""
    engines, version = session.engines, session.version
    keep = session.recipe.rollout.at_publish == "keep"
    lost = lost_ranks(engines)
    try:
        await session.publisher.publish(version, without=lost, keep_cache=keep)
    except (WorkerError, EngineLost):
        # Who did not answer is asked for, and who says that it is lost will say so again; if all
        # live, the failure is not that of a lost engine.
        await ask_for_life(engines)
        known, lost = lost, lost_ranks(engines)
        if lost == known or len(lost) == len(engines):
            raise
        await session.publisher.publish(version, without=lost, keep_cache=keep)
    if lost:
        named = ", ".join(str(rank) for rank in sorted(lost))
        LOG.warning("version %d was published without the lost generators %s", version, named)


def keep_evaluation(session: Session, step: int, report: EvalReport) -> None:
    """Write all samples of a validation."""
    rows = [{"step": step, **row} for row in samples_to_rows(report.groups)]
    session.folder.append_rows("validation.jsonl", rows)


async def evaluate_prompts(session: Session, prompts: Sequence[Prompt]) -> EvalReport:
    """Sample and score prompts with the recipe's evaluation settings."""
    config, sampling = session.recipe.evaluate, validation_sampling(session.recipe)
    groups = await sample_all(
        prompts,
        samples=config.samples,
        sampling=sampling,
        episode=playing_episode(session, sampling, session.held_out, purpose="eval"),
        engines=[engine for engine in session.engines if not engine.lost],
        codec=session.codec,
        score=session.score_held_out,
        seed=session.recipe.run.seed,
        stuck_after_s=session.recipe.run.stuck_after_s,
        progress=lambda done, total: session.view.role("generators", f"validate {done}/{total}"),
        follow=session.follow,
    )
    return summarise(groups, pass_k=config.pass_k, threshold=config.pass_threshold)

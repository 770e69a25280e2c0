"""The source of an RL step's groups: the rollout over the training prompts.

PromptStream -> Rollout (engines, rewards, filters) -> GroupSource.take -> the RL step
                  |  every change                        restarter: restarts lost engines
                  v
                Journal (ledger.jsonl)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from rollick.config.schema import rl_recipe
from rollick.data.prompts import PromptStream
from rollick.observe.goodput import State, TimeAccount
from rollick.pipelines.checkpoints import PipelineState
from rollick.pipelines.domains import group_filter, training_sampling
from rollick.pipelines.engine_restarts import RolloutRestarter
from rollick.pipelines.open_run import OpenRun
from rollick.rollout.deps import RolloutDeps, SavedRollout
from rollick.rollout.event_loop import LagMeter
from rollick.rollout.fleet import Fleet
from rollick.rollout.ledger.log import Journal, open_journal
from rollick.rollout.scheduler import Rollout
from rollick.types import Group


@dataclass(frozen=True, slots=True)
class GroupSource:
    """The open rollout of a run, with its prompts, journal and restarter."""

    rollout: Rollout
    prompts: PromptStream
    journal: Journal
    lag: LagMeter
    restarter: RolloutRestarter

    async def take(self) -> list[Group]:
        """Wait for a batch of groups. All groups scored meanwhile, dropped ones too, affect the
        choice of prompts from the next step on."""
        groups = await self.rollout.take()
        self._report_slow_engines(self.rollout.fleet.end_step())
        self.journal.flush()
        self.prompts.update_selection()
        return groups

    def _report_slow_engines(self, numbers: Sequence[int]) -> None:
        fleet = self.rollout.fleet
        for engine in self.restarter.group.engines:
            for number in numbers:
                if fleet.engines[number] is engine:
                    speed = fleet.speeds.relative_speed(number)
                    cause = f"decodes at {speed:.0%} of the median speed"
                    self.restarter.faults.begin("generators", engine.rank, kind="slow", cause=cause)

    def metrics(self) -> dict[str, float]:
        engines = {
            "controller/engines": float(len(self.rollout.fleet.engines)),
            "controller/engine_restarts": float(self.restarter.restarts),
        }
        if len(self.rollout.fleet.engines) > 1:
            engines["speed/slow_engines"] = float(len(self.rollout.fleet.speeds.slow_workers))
        return {**self.rollout.stats.metrics, **self.prompts.metrics(), **engines}


@asynccontextmanager
async def open_group_source(
    run: OpenRun, restored: PipelineState | None, *, resume: bool
) -> AsyncGenerator[GroupSource]:
    """Open the rollout of the training prompts; `restored` is the state of a checkpoint."""
    prompts, state = run.open_prompts(), run.state
    if restored:
        prompts.restore(restored.values["prompts"])
    with open_journal(
        state.folder.path / "ledger.jsonl",
        resume=resume,
        step=state.step if restored else None,
        started=restored.values["rollout"]["ledger"]["next"] if restored else 0,
    ) as journal:
        # Models that run in this process block its event loop: do not warn about it.
        warn = run.recipe.cluster.backend != "inline"
        async with (
            LagMeter.open(lambda: state.phase, warn=warn) as lag,
            _open_rollout(run, prompts, journal, restored) as rollout,
            RolloutRestarter(
                group=run.roles.generators,
                recovery=run.recovery,
                faults=run.telemetry.faults,
                budget=rl_recipe(run.recipe).rollout.engine_restarts,
                publisher=run.publisher,
                state=state,
                rollout=rollout,
                residency=run.phases.residency,
            ).watch() as restarter,
        ):
            attribute_waits(run.telemetry.goodput, rollout.fleet)
            with run.status.follow(rollout, run.scoring.rewards):
                yield GroupSource(rollout, prompts, journal, lag, restarter)


def attribute_waits(goodput: TimeAccount, fleet: Fleet) -> None:
    """Count the time in which a step waits for groups as `recover`, `generate` or `wait`, by what
    the engines do."""

    def waiting_state() -> State:
        if not fleet.engines and fleet.may_gain_engine():
            return "recover"
        return "generate" if fleet.is_generating else "wait"

    goodput.waiting_state, fleet.on_activity_change = waiting_state, goodput.refresh


def _open_rollout(
    run: OpenRun, prompts: PromptStream, journal: Journal, restored: PipelineState | None
) -> AbstractAsyncContextManager[Rollout]:
    recipe = rl_recipe(run.recipe)
    drop_reason, sampling = group_filter(recipe), training_sampling(recipe)
    deps = RolloutDeps(
        config=recipe.rollout,
        next_prompt=prompts.next,
        episode=run.episodes.build(sampling, recipe.data.domains, purpose="train"),
        score=run.scoring.score,
        stuck_after_s=recipe.run.stuck_after_s,
        score_limit_s=recipe.rewards.timeout_s,
        drop_reason=drop_reason,
        on_group_scored=lambda group: prompts.record_group(group, kept=drop_reason(group) is None),
        on_progress=partial(run.telemetry.view.count_samples, "generate"),
        record_event=journal.record,
        record_span=run.telemetry.trace.record_span,
        find_prompt=prompts.redraw,
    )
    values, groups = (restored.values["rollout"], restored.groups) if restored else (None, ())
    saved = SavedRollout(values, groups, journal.started)
    engines = run.roles.generators.engines
    return Rollout.open(deps, engines, version=run.state.version, saved=saved)

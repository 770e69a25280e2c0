"""RLVR: reinforcement learning from rewards that can be verified. A wiring of the RL step."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from rollick.config.load import LoadedRecipe
from rollick.data.prompts import PromptStream
from rollick.pipelines.base import RunObjects, RunResult, Session, open_session
from rollick.pipelines.domains import group_filter, training_sampling
from rollick.pipelines.episodes import playing_episode
from rollick.pipelines.revive import Revival
from rollick.pipelines.rl import RLPipeline
from rollick.rollout.journal import Journal, open_journal
from rollick.rollout.lag import LagMeter
from rollick.rollout.scheduler import Rollout


async def run_rlvr(
    loaded: LoadedRecipe, *, objects: RunObjects | None = None, resume: bool = False
) -> RunResult:
    """Train to the end (or to a signal); returns where the run is and its last metrics."""
    async with (
        open_session(loaded, objects=objects, resume=resume) as session,
        open_pipeline(session, resume=resume) as pipeline,
    ):
        return await pipeline.run()


@asynccontextmanager
async def open_pipeline(session: Session, *, resume: bool = False) -> AsyncGenerator[RLPipeline]:
    """Prompts and rollout over the session, taken up from the newest checkpoint on resume."""
    checkpoint = session.folder.checkpoints.latest() if resume else None
    state: dict[str, Any] = await session.restore(checkpoint) if checkpoint else {}
    prompts = session.open_prompts()
    if checkpoint:
        prompts.restore(state["prompts"])
    with open_journal(
        session.folder.path / "ledger.jsonl",
        resume=resume,
        step=checkpoint.step if checkpoint else None,
        started=state["rollout"]["ledger"]["next"] if checkpoint else 0,
    ) as journal:
        async with (
            # Models that run in this process hold it up, as they must.
            LagMeter.open(
                lambda: session.phase_name, warn=session.recipe.cluster.backend != "inline"
            ) as lag,
            open_rollout(session, prompts, journal=journal, state=state) as rollout,
            Revival.open(session, rollout) as revival,
        ):
            pipeline = RLPipeline(
                session, rollout, prompts=prompts, journal=journal, lag=lag, revival=revival
            )
            if checkpoint:
                pipeline.credit.restore(state["credit"])
            with session.follow(rollout):
                yield pipeline


def open_rollout(
    session: Session, prompts: PromptStream, *, journal: Journal, state: Mapping[str, Any]
) -> AbstractAsyncContextManager[Rollout]:
    """The rollout of the training prompts; `state` is the checkpoint's, or empty."""
    recipe = session.recipe
    why_dropped, sampling = group_filter(recipe), training_sampling(recipe)
    return Rollout.open(
        config=recipe.rollout,
        sampling=sampling,
        episode=playing_episode(session, sampling, recipe.data.domains, purpose="train"),
        prompts=prompts.next,
        engines=session.engines,
        codec=session.codec,
        score=session.score,
        signal=why_dropped,
        judged=lambda group: prompts.judged(group, kept=why_dropped(group) is None),
        seed=recipe.run.seed,
        stuck_after_s=recipe.run.stuck_after_s,
        version=session.version,
        state=state.get("rollout"),
        groups=state.get("groups", ()),
        started=journal.started,
        find_prompt=prompts.find,
        record=journal.record,
        span=session.trace.span,
    )

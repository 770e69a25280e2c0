"""Checkpoints of a run: the trained roles, the pipeline's state and finished samples."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollick.checkpoint import TIE_BREAK, Checkpoint, Finish, Writer
from rollick.config.load import LoadedRecipe
from rollick.data.store import load_groups, save_groups
from rollick.errors import CheckpointError
from rollick.infer.cancellation import run_to_completion
from rollick.pipelines.phases import Residency, Telemetry
from rollick.pipelines.state import RunState
from rollick.roles.handles import Critic, Policy, Roles
from rollick.roles.publisher import Publisher
from rollick.roles.worker_recovery import WorkerRecovery
from rollick.trainer.snapshot import SnapshotMemory, SnapshotRecord, read_snapshot
from rollick.trainer.trainable_model import save_snapshot
from rollick.types import Group, PolicyVersion

LOG = logging.getLogger("rollick")

SAVE_FAILED = "%s; the run continues and saves at the next checkpoint"


@dataclass(frozen=True, slots=True)
class PipelineState:
    """Saved state of a pipeline: values by name, and groups not yet trained on."""

    values: Mapping[str, Any]
    groups: Sequence[Group] = ()


@dataclass(slots=True)
class RunCheckpoints:
    loaded: LoadedRecipe
    tokenizer: str
    """Fingerprint of the tokenizer; a checkpoint with another one cannot be restored."""
    state: RunState
    telemetry: Telemetry
    roles: Roles
    publisher: Publisher
    residency: Residency
    recovery: WorkerRecovery
    _saving: asyncio.Task[None] | None = None

    async def save(
        self,
        pipeline: PipelineState,
        metrics: Mapping[str, float],
        *,
        in_background: bool = False,
    ) -> None:
        """Save a checkpoint. With `in_background`, return early and finish while the run trains;
        `settle` waits for it. If all trained roles have snapshots, these are written in the
        background; otherwise the workers write their files before the early return."""
        await self.settle()
        state = self.state
        self.telemetry.trace.flush(step=state.step)
        meta: dict[str, Any] = {"seed": self.loaded.recipe.run.seed, "tokenizer": self.tokenizer}
        # The mean score breaks ties: with fractional rewards, pass@1 may stay 0 for a long time.
        meta[TIE_BREAK] = metrics.get("eval/score")
        score, step = metrics.get("eval/pass@1"), state.step
        values = json.dumps({"version": state.version, **pipeline.values})

        async def begin(write_roles: Writer) -> Finish:
            def write(path: Path) -> None:
                (path / "state.json").write_text(values, encoding="utf-8")
                save_groups(path / "groups", pipeline.groups)
                write_roles(path)

            folder = state.folder.checkpoints
            return await asyncio.to_thread(folder.begin, step, write, meta=meta, score=score)

        async with AsyncExitStack() as stack:
            snapshots = await self._hold_snapshots(stack)
            if snapshots is None:
                finish = await begin(self._make_role_writer())
                saving = self._finish_save(finish, step)
            else:
                saving = self._save_snapshots(partial(begin, snapshots), step, stack.pop_all())
        if in_background:
            self._saving = asyncio.create_task(_log_failure(saving), name="checkpoint")
        else:
            await saving

    def _make_role_writer(self) -> Writer:
        """The Writer that calls the workers to write their files."""
        loop = asyncio.get_running_loop()

        def write(path: Path) -> None:
            for role, name in self._trained_roles:
                asyncio.run_coroutine_threadsafe(role.save(path / name), loop).result()

        return write

    async def _hold_snapshots(self, stack: AsyncExitStack) -> Writer | None:
        """The Writer of the newest snapshots of all trained roles, which do not change until the
        stack is closed. None if a role has no snapshot of its current state."""
        await self.recovery.settle()
        held: dict[str, list[tuple[SnapshotMemory, SnapshotRecord]]] = {}
        for role, name in self._trained_roles:
            snapshots = self.recovery.snapshots.get(role.role)
            newest = await stack.enter_async_context(snapshots.hold()) if snapshots else None
            if newest is None:
                return None
            held[name] = newest

        def write(path: Path) -> None:
            for name, ranks in held.items():
                _write_snapshot(path / name, name, ranks)

        return write

    async def _save_snapshots(
        self, begin: Callable[[], Awaitable[Finish]], step: int, held_snapshots: AsyncExitStack
    ) -> None:
        async with held_snapshots:
            finish = await begin()
        await self._finish_save(finish, step)

    async def settle(self) -> None:
        """Wait until the save in the background, if any, has completed or failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def _finish_save(self, finish: Finish, step: int) -> None:
        await run_to_completion(asyncio.to_thread(finish))
        self.state.saved_step = step

    def latest(self) -> Checkpoint | None:
        return self.state.folder.checkpoints.latest()

    async def restore(self, checkpoint: Checkpoint) -> PipelineState:
        """Restore roles, engines and records; returns the pipeline's state."""
        if checkpoint.meta.get("tokenizer") != self.tokenizer:
            raise CheckpointError(
                f"{checkpoint.path} was written with another tokenizer",
                fix="resume with the model and tokenizer that the run started with",
            )
        values: dict[str, Any] = json.loads((checkpoint.path / "state.json").read_text("utf-8"))
        for role, name in self._trained_roles:
            await role.load(checkpoint.path / name)
            if snapshots := self.recovery.snapshots.get(role.role):
                snapshots.loaded_from = checkpoint.path / name
        state = self.state
        state.step = state.saved_step = checkpoint.step
        state.version = PolicyVersion(values["version"])
        await self.residency.enter("publish")
        await self.publisher.publish(state.version)
        # A run restored to step 0 repeats the records of step 0 (a first validation).
        self.drop_rows_after(state.step or -1)
        groups = load_groups(checkpoint.path / "groups")
        state.folder.write_recipe(self.loaded)
        return PipelineState(values, groups)

    def drop_rows_after(self, step: int) -> None:
        """Remove the records of later steps, because the run repeats them."""
        telemetry = self.telemetry
        for recorder in (telemetry.log, telemetry.trace, telemetry.goodput, self.state.folder):
            recorder.drop_rows_after(step)

    @property
    def _trained_roles(self) -> list[tuple[Policy | Critic, str]]:
        roles = ((self.roles.policy, "learner"), (self.roles.critic, "critic"))
        return [(role, name) for role, name in roles if role.ranks]


def _write_snapshot(
    path: Path, name: str, ranks: Sequence[tuple[SnapshotMemory, SnapshotRecord]]
) -> None:
    memory, record = ranks[0]
    if not record.shards:
        save_snapshot(path, name, memory, steps=record.steps)
        return
    # Imported here, because it takes a second and few runs need it.
    from rollick.trainer.parallel.checkpoint import save_states

    save_states(path, [read_snapshot(record) for _, record in ranks])


async def _log_failure(saving: Coroutine[Any, Any, None]) -> None:
    try:
        await saving
    except CheckpointError as error:  # For example, a full disk.
        LOG.error(SAVE_FAILED, error)

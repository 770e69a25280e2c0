"""What every pipeline stands on: the run's folder, its workers, and the residency of phases.

    open_session: folder and lock -> tokenizer -> workers -> engines -> rewards -> live view

A Session owns what is open and closes it in reverse; pipelines decide what to do with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from rollick.checkpoint import Checkpoint
from rollick.cluster.devices import DeviceMap, plan_run
from rollick.cluster.group import WorkerGroup, open_group
from rollick.cluster.worker import RoleSpec
from rollick.config.load import LoadedRecipe
from rollick.config.names import resolve
from rollick.config.schema import SUPERVISED_LOSSES, DomainConfig, Recipe
from rollick.data.batch import Batch
from rollick.data.chat import ChatCodec
from rollick.data.prompts import PromptStream
from rollick.data.store import load_groups, save_batch, save_groups
from rollick.envs.pool import EnvLimits, EnvPool
from rollick.errors import (
    CheckpointError,
    ConfigError,
    MissingExtra,
    NoSignalError,
    RollickError,
    StuckError,
)
from rollick.infer.engine import Capability
from rollick.models.load import load_config, load_tokenizer
from rollick.models.probe import safe_environment
from rollick.models.shape import ModelShape
from rollick.observe.live import LiveView, Stopwatch
from rollick.observe.metrics import MetricLog
from rollick.observe.sinks import open_sink
from rollick.observe.trace import Trace
from rollick.pipelines.doctor import reporting, tell_stuck
from rollick.pipelines.episodes import has_agents
from rollick.pipelines.folder import RunFolder, open_folder
from rollick.pipelines.judge import OwnJudge, open_judge
from rollick.pipelines.memory import MemoryWatch, Shapes, models_of
from rollick.pipelines.residency import Residency
from rollick.pipelines.reward_model import AskedRewardModel
from rollick.rewards.pool import AskHere, RewardPool
from rollick.rollout.plays import PlayTally
from rollick.rollout.scheduler import Rollout
from rollick.train.parallel.mesh import Meeting, open_meeting
from rollick.types import Group, PolicyVersion, RewardFn, RoleName, Sample, Score
from rollick.weights.channels.broadcast import own_address
from rollick.weights.sync import Publisher
from rollick.workers.generator import RemoteEngine, open_engines

if TYPE_CHECKING:
    # Its server is an extra (rollick[serve]), which only runs with agents need.
    from rollick.pipelines.agents import Agents

LOG = logging.getLogger("rollick")

P = ParamSpec("P")
T = TypeVar("T")

INTERRUPTIBLE = frozenset({"generate", "validate"})
"""Phases that a signal may cut short: nothing that a checkpoint holds is half-done in them."""


@dataclass(frozen=True, slots=True)
class RunObjects:
    """Prompts and rewards given as Python objects, which a recipe names as object:NAME."""

    prompts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rewards: Mapping[str, RewardFn] = field(default_factory=dict[str, RewardFn])

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.prompts) | frozenset(self.rewards)


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended."""

    folder: Path
    step: int
    metrics: Mapping[str, float]
    interrupted: bool = False

    @property
    def score(self) -> float:
        """Validation's pass@1 where there was one, else the last step's mean score."""
        return self.metrics.get("eval/pass@1", self.metrics.get("score/mean", float("nan")))


class Session:
    """A run with everything open."""

    def __init__(self, loaded: LoadedRecipe, folder: RunFolder, objects: RunObjects) -> None:
        self.recipe = loaded.recipe
        self.base = loaded.base
        self.folder = folder
        self.objects = objects
        self.stop = asyncio.Event()
        self.watch = Stopwatch()
        self.phase_name = "start"
        self.began_at = self.phase_since = time.time()
        self.rollouts: list[Rollout] = []
        self.changing = asyncio.Lock()
        """Held while the learner's weights are not those of `version`."""
        self.trace = Trace(
            folder.path,
            clock=asyncio.get_running_loop().time,
            limit_bytes=round(self.recipe.observe.trace_mb * 1e6),
        )
        self.step = 0
        self.saved_step: int | None = None
        self.skipped_in_a_row: dict[RoleName, int] = {}
        self._told: StuckError | None = None
        self.version = PolicyVersion(0)
        self.group: WorkerGroup
        self.engines: list[RemoteEngine]
        self.codec: ChatCodec
        self.rewards: RewardPool
        self.judge: OwnJudge | None = None
        self.environments: EnvPool | None = None
        self.agents: Agents | None = None
        self.plays = PlayTally()
        self.publisher: Publisher
        self.residency: Residency
        self.log: MetricLog
        self.view: LiveView
        self.memory: MemoryWatch

    @asynccontextmanager
    async def phase(self, name: str) -> AsyncGenerator[None]:
        """Times a phase, shows it, and brings residency to what it needs."""
        now = asyncio.get_running_loop().time
        begun = now()
        self.phase_name, self.phase_since = name, time.time()
        plan = self.residency.plans.get(name)
        for role in self.group.device_map.roles:
            self.view.role(role, name if plan and role in plan.phase.uses else "-")
        await self.residency.enter(name)
        try:
            with self._telling_a_hang():
                yield
        finally:
            self.watch.add(name, now() - begun)
            self.trace.phase(name, begun, now(), step=self.step + 1)

    @contextmanager
    def follow(self, rollout: Rollout) -> Generator[None]:
        """While the block runs, the run's report of who waits for whom is about this rollout."""
        self.rollouts.append(rollout)
        try:
            with self._telling_a_hang():
                yield
        finally:
            self.rollouts.remove(rollout)

    @contextmanager
    def _telling_a_hang(self) -> Generator[None]:
        """A hang is told where it is found, while the tasks still are where they hang."""
        try:
            yield
        except StuckError as error:
            if error is not self._told and not isinstance(error, NoSignalError):
                self._told = error
                tell_stuck(self, error)
            raise

    async def until_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The work's result; None if a signal cut it short.

        A caller that is cancelled itself never gets None: it would save a step as not made whose
        training may still run on.
        """
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self.stop.wait())
        cut = False
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self.phase_name in INTERRUPTIBLE:
                cut = task.cancel()
            await asyncio.wait({task})
        finally:
            stopped.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return None if cut and task.cancelled() else task.result()

    async def save(
        self,
        facts: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        groups: Sequence[Group] = (),
    ) -> None:
        """A checkpoint: the state of what learns, the pipeline's facts, finished samples."""
        self.trace.flush(step=self.step)
        loop = asyncio.get_running_loop()
        state = json.dumps({"version": self.version, **facts})

        def write(path: Path) -> None:
            (path / "state.json").write_text(state, encoding="utf-8")
            save_groups(path / "groups", groups)
            for role, name in self._learning:
                saved = self.group.together(role, "save", path / name)
                asyncio.run_coroutine_threadsafe(saved, loop).result()

        await asyncio.to_thread(
            self.folder.checkpoints.save,
            self.step,
            write,
            meta={"seed": self.recipe.run.seed, "tokenizer": self.codec.fingerprint},
            score=_finite(metrics.get("eval/pass@1")),
        )
        self.saved_step = self.step

    @contextmanager
    def outliving_a_failed_save(self) -> Generator[None]:
        """A checkpoint on the way that cannot be written (a full disk) does not end the run."""
        try:
            yield
        except CheckpointError as error:
            LOG.error("%s; the run goes on, and the next checkpoint tries again", error)

    def refuse_skips(self, changed: bool, batch: Batch, *, role: RoleName = "policy") -> None:
        """Stop a run whose gradients are not finite for many steps; the last batch is kept."""
        skipped = 0 if changed else self.skipped_in_a_row.get(role, 0) + 1
        self.skipped_in_a_row[role] = skipped
        if skipped < self.recipe.train.max_skipped_steps:
            return
        path = self.folder.dumps / "non_finite"
        path.mkdir(parents=True, exist_ok=True)
        save_batch(path / "batch", batch)
        section = "critic" if role == "critic" else "train"
        raise RollickError(
            f"{skipped} steps in a row had a non-finite gradient in the {role}",
            fix=f"the last batch is in {path}; lower {section}.optimizer.lr or look at its scores",
        )

    async def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Bring what learns, engines and metrics to the checkpoint; the pipeline's facts."""
        if checkpoint.meta.get("tokenizer") != self.codec.fingerprint:
            raise CheckpointError(
                f"{checkpoint.path} was made with another tokenizer",
                fix="resume with the model and tokenizer that the run began with",
            )
        facts: dict[str, Any] = json.loads((checkpoint.path / "state.json").read_text("utf-8"))
        for role, name in self._learning:
            await self.group.together(role, "load", checkpoint.path / name)
        self.step, self.version = checkpoint.step, PolicyVersion(facts["version"])
        self.saved_step = checkpoint.step
        await self.residency.enter("publish")
        await self.publisher.publish(self.version)
        # What step 0 leaves (a first validation) is made again by a run that is still there.
        self.forget_after(self.step or -1)
        facts["groups"] = load_groups(checkpoint.path / "groups")
        self.folder.keep_recipe(self.recipe)
        return facts

    @property
    def _learning(self) -> list[tuple[RoleName, str]]:
        """The roles whose state a checkpoint holds, and their folders in it."""
        named: tuple[tuple[RoleName, str], ...] = (("policy", "learner"), ("critic", "critic"))
        return [(role, name) for role, name in named if self.group.device_map.ranks(role)]

    def forget_after(self, step: int) -> None:
        """Remove what was recorded of later steps, which will be made again."""
        self.log.resume_at(step)
        self.trace.forget_after(step)
        self.folder.forget_after(step)

    async def score(self, sample: Sample) -> Score:
        """What environment and rewards of its training domain say of a sample; 0 if it has none."""
        if sample.played is not None:
            self.plays.add(sample.played)
        return await self._score(sample, self.recipe.data.domains[sample.prompt.domain])

    async def score_held_out(self, sample: Sample) -> Score:
        """What those of its validation domain say of it, where there is validation."""
        return await self._score(sample, self.held_out[sample.prompt.domain])

    @property
    def held_out(self) -> Mapping[str, DomainConfig]:
        """The domains to validate on: those of training where there are no others."""
        return self.recipe.data.validation or self.recipe.data.domains

    async def _score(self, sample: Sample, domain: DomainConfig) -> Score:
        earned = Score(0.0) if sample.played is None else sample.played.score
        if not earned.ok or not domain.rewards:
            return earned
        judge, specs = self.judge, domain.rewards
        said = await self.rewards.score(
            sample, [judge.addressed(spec) for spec in specs] if judge else specs
        )
        if not said.ok or sample.played is None:
            return said
        parts = {**earned.parts, **said.parts}
        return replace(said, value=earned.value + said.value, parts=parts, turns=earned.turns)

    def open_prompts(self, *, validation: bool = False) -> PromptStream:
        """The prompts to train or to validate on; those that no engine can answer are left out."""
        answered = validation or self.recipe.pipeline not in SUPERVISED_LOSSES
        return PromptStream.open(
            self.recipe.data,
            seed=self.recipe.run.seed,
            base=self.base,
            objects=self.objects.prompts,
            validation=validation,
            count_tokens=lambda prompt: len(self.codec.encode_prompt(prompt.turns)),
            room=self.recipe.infer.max_length - 1 if answered else None,
        )


class HasSession:
    """Anything with a session: what @phase needs."""

    session: Session


H = TypeVar("H", bound=HasSession)


def phase(
    name: str,
) -> Callable[
    [Callable[Concatenate[H, P], Awaitable[T]]], Callable[Concatenate[H, P], Coroutine[Any, Any, T]]
]:
    """Marks a pipeline's method as a phase of the step."""

    def mark(
        method: Callable[Concatenate[H, P], Awaitable[T]],
    ) -> Callable[Concatenate[H, P], Coroutine[Any, Any, T]]:
        @wraps(method)
        async def run(self: H, *args: P.args, **kwargs: P.kwargs) -> T:
            async with self.session.phase(name):
                return await method(self, *args, **kwargs)

        return run

    return mark


@asynccontextmanager
async def open_session(
    loaded: LoadedRecipe, *, objects: RunObjects | None = None, resume: bool = False
) -> AsyncGenerator[Session]:
    """Everything that a run needs, opened in order and closed in reverse."""
    objects = objects or RunObjects()
    recipe = loaded.recipe
    device_map = DeviceMap.of(recipe)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(open_folder(recipe, resume=resume))
        session = Session(loaded, folder, objects)
        await stack.enter_async_context(reporting(session))
        stack.callback(session.trace.flush)
        session.codec = ChatCodec(load_tokenizer(recipe.model), recipe.model.template)
        session.log = MetricLog(folder.path, _sinks(recipe, folder.path))
        stack.callback(session.log.close)
        stack.enter_context(_signals(session.stop))
        meeting = stack.enter_context(_meeting(recipe, device_map))
        session.group = await stack.enter_async_context(
            open_group(
                device_map,
                _roles(recipe, device_map, loaded.base, meeting),
                cluster=recipe.cluster,
                threads=_threads(recipe),
                env=_environment(recipe),
            )
        )
        session.engines = []
        if device_map.ranks("generators"):
            session.engines = await stack.enter_async_context(open_engines(session.group))
            _check_engines(recipe, session.engines)
            if device_map.ranks("judge"):
                session.judge = await stack.enter_async_context(open_judge(session.group, recipe))
            here: dict[str, AskHere] = {}
            if device_map.ranks("reward_model"):
                opened = AskedRewardModel.open(session.group, recipe)
                here["model"] = (await stack.enter_async_context(opened)).score
            session.rewards = await stack.enter_async_context(
                _rewards(recipe, loaded, objects, judge=session.judge, here=here)
            )
        if environments := _environments(recipe, loaded, folder.path):
            session.environments = await stack.enter_async_context(environments)
        if has_agents(recipe.data.domains) or has_agents(recipe.data.validation):
            session.agents = await stack.enter_async_context(_agents(session))
        plans = {plan.phase.name: plan for plan in plan_run(recipe)}
        session.publisher = Publisher(session.group, recipe.weights)
        session.residency = Residency(session.group, plans, session.engines)
        title = f"{recipe.pipeline} {recipe.run.name}"
        session.view = stack.enter_context(
            LiveView(title, recipe.run.steps, mode=recipe.observe.live)
        )
        if resume and folder.checkpoints.latest() is None:
            session.forget_after(-1)
        session.memory = MemoryWatch(recipe, session.group, _shapes(recipe))
        session.memory.tell()
        session.watch.finish()
        yield session


def _shapes(recipe: Recipe) -> Shapes | None:
    """The sizes of the run's models, which are all on this machine by now."""
    found = {model.path: ModelShape.of(load_config(model).to_dict()) for model in models_of(recipe)}
    known = {path: shape for path, shape in found.items() if shape is not None}
    return known if len(known) == len(found) else None


def _check_engines(recipe: Recipe, engines: Sequence[RemoteEngine]) -> None:
    """Refuse what only the engines themselves know that they cannot do."""
    can = all(Capability.KEEP_CACHE in engine.capabilities for engine in engines)
    if recipe.rollout.at_publish == "keep" and not can:
        raise ConfigError(
            f"rollout.at_publish=keep, but the engine {recipe.infer.engine} cannot keep caches",
            fix="use continue or move",
        )


def _finite(score: float | None) -> float | None:
    return score if score is not None and isfinite(score) else None


@contextmanager
def _meeting(recipe: Recipe, device_map: DeviceMap) -> Generator[Meeting | None]:
    """Where the ranks of a sharded learner find each other; None if there is one rank."""
    ranks = device_map.ranks("policy")
    if ranks == 1:
        yield None
        return
    store, meeting = open_meeting(
        own_address(), ranks=ranks, timeout_s=recipe.cluster.call_timeout_s
    )
    yield meeting
    del store  # It serves for as long as it is held.


def _roles(
    recipe: Recipe, device_map: DeviceMap, base: Path, meeting: Meeting | None
) -> list[RoleSpec]:
    known = {
        "policy": RoleSpec("policy", "rollick.workers.learner:create", (recipe, base, meeting)),
        "reference": RoleSpec("reference", "rollick.workers.scorer:create", (recipe,)),
        "critic": RoleSpec("critic", "rollick.workers.critic:create", (recipe,)),
        "teacher": RoleSpec("teacher", "rollick.workers.scorer:create_teacher", (recipe,)),
        "reward_model": RoleSpec(
            "reward_model",
            "rollick.workers.scorer:create_reward_model",
            (recipe, recipe.reward_model),
        ),
        "judge": RoleSpec("judge", "rollick.workers.generator:create_judge", (recipe,)),
        "generators": RoleSpec("generators", "rollick.workers.generator:create", (recipe,)),
    }
    return [known[role] for role in device_map.roles]


def _threads(recipe: Recipe) -> int:
    """Threads of each worker process: the cores, shared by the processes that compute."""
    if recipe.run.threads:
        return recipe.run.threads
    if recipe.run.deterministic:
        return 1
    return max(1, (os.cpu_count() or 1) // len(DeviceMap.of(recipe).hosts()))


def _environment(recipe: Recipe) -> dict[str, str]:
    """bf16 dies on some CPUs; a probe in a child process tells, and the setting avoids it."""
    on_cpu = any("cpu" in (devices or "") for devices in recipe.devices.model_dump().values())
    scoring = (recipe.reward_model, recipe.judge)
    models = (recipe.model, recipe.critic.model, recipe.teacher, *scoring)
    is_bf16 = any(model is not None and model.dtype == "bfloat16" for model in models)
    return safe_environment() if on_cpu and is_bf16 else {}


def _rewards(
    recipe: Recipe,
    loaded: LoadedRecipe,
    objects: RunObjects,
    *,
    judge: OwnJudge | None,
    here: Mapping[str, AskHere],
) -> Any:
    domains = [*recipe.data.domains.values(), *recipe.data.validation.values()]
    names = {reward.name for domain in domains for reward in domain.rewards}
    functions: dict[str, RewardFn | str] = {}
    for name in sorted(names - set(here)):
        own = objects.rewards.get(name.removeprefix("object:")) if ":" in name else None
        functions[name] = own if own is not None else name
    return RewardPool.open(
        functions,
        processes=recipe.rollout.reward_processes,
        timeout_s=recipe.rollout.reward_timeout_s,
        base=loaded.base,
        secrets=judge.secrets if judge else {},
        here=here,
    )


def _environments(
    recipe: Recipe, loaded: LoadedRecipe, folder: Path
) -> AbstractAsyncContextManager[EnvPool] | None:
    """The processes of all environments that some domain names; None if none does."""
    domains = [*recipe.data.domains.values(), *recipe.data.validation.values()]
    names = sorted({domain.environment.name for domain in domains if domain.environment})
    if not names:
        return None
    config = recipe.rollout
    limits = EnvLimits(step_s=config.env_step_timeout_s, episode_s=config.env_episode_timeout_s)
    return EnvPool.open(
        {name: name for name in names},
        processes=config.env_processes,
        threads=config.env_threads,
        limits=limits,
        base=loaded.base,
        output=folder / "environments.log",
    )


def _agents(session: Session) -> AbstractAsyncContextManager[Agents]:
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtra.of(package, "serve")
    from rollick.pipelines.agents import Agents

    recipe = session.recipe
    return Agents.open(
        session.codec,
        base=session.base,
        max_length=recipe.infer.max_length,
        timeout_s=recipe.rollout.env_episode_timeout_s,
        seed=recipe.run.seed,
    )


def _sinks(recipe: Recipe, folder: Path) -> list[Any]:
    config = recipe.model_dump(mode="json")
    return [
        open_sink(name, resolve("sinks", name), folder, run_name=recipe.run.name, config=config)
        for name in recipe.observe.sinks
    ]


@contextmanager
def _signals(stop: asyncio.Event) -> Generator[None]:
    """SIGINT and SIGTERM ask the run to save and stop; a second one ends it at once."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: signal.Signals) -> None:
        LOG.warning("%s: saving and stopping; once more ends the run at once", number.name)
        loop.remove_signal_handler(number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, ask, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

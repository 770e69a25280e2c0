"""Opens the parts of a run in order, and closes them in reverse.

preflight -> folder and lock -> status reports -> metric log -> workers -> engines
          -> environments -> rewards -> agents -> live view
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollick.cluster.devices import DeviceMap, HostSpec, plan_run
from rollick.cluster.group import open_group
from rollick.cluster.worker import RoleSpec
from rollick.config.devices import Device
from rollick.config.load import LoadedRecipe
from rollick.config.names import resolve
from rollick.config.problems import raise_problems
from rollick.config.schema import Recipe, RlRecipe, SupervisedRecipe, model_of, teacher_of
from rollick.data.chat import ChatCodec
from rollick.data.prompts import PromptStream
from rollick.errors import ConfigError, MissingExtra
from rollick.infer.engine import Capability
from rollick.models.bf16_probe import safe_environment
from rollick.models.loading.load import load_config, load_tokenizer
from rollick.models.loading.shape import ModelShape
from rollick.observe.faults import FaultLog
from rollick.observe.goodput import TimeAccount
from rollick.observe.live_view import LiveView, Stopwatch
from rollick.observe.log_folding import fold_repeats
from rollick.observe.metrics import GuardedSink, MetricLog
from rollick.observe.trace import Trace
from rollick.pipelines.checkpoints import RunCheckpoints
from rollick.pipelines.episodes import Episodes, has_agents, open_environments
from rollick.pipelines.memory import MemoryWatch, Shapes, measure_models
from rollick.pipelines.phases import Phases, Residency, Telemetry
from rollick.pipelines.preflight import check_machine, check_rows
from rollick.pipelines.run_guard import guard_run
from rollick.pipelines.run_report import report_run
from rollick.pipelines.scoring import Scoring, open_scoring
from rollick.pipelines.state import RunObjects, RunState, stop_on_signals
from rollick.pipelines.status import StatusReporter
from rollick.roles.engines import RemoteEngine
from rollick.roles.handles import Roles
from rollick.roles.publisher import Publisher
from rollick.roles.worker_recovery import WorkerRecovery
from rollick.run_folder import RunFolder, open_folder
from rollick.trainer.parallel.mesh import Rendezvous, open_rendezvous
from rollick.trainer.parallel.shares import BatchSplit, RowCost
from rollick.types import SHARDABLE_ROLES, RoleName
from rollick.weights.channels.broadcast import local_address

if TYPE_CHECKING:
    # Agents imports the server, which needs the extra rollick[serve].
    from rollick.pipelines.agents import Agents


@dataclass(frozen=True, slots=True)
class OpenRun:
    loaded: LoadedRecipe
    objects: RunObjects
    state: RunState
    status: StatusReporter
    telemetry: Telemetry
    roles: Roles
    publisher: Publisher
    phases: Phases
    scoring: Scoring
    episodes: Episodes
    checkpoints: RunCheckpoints

    @property
    def recovery(self) -> WorkerRecovery:
        return self.checkpoints.recovery

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    def open_prompts(self, *, validation: bool = False) -> PromptStream:
        """Load the prompts, without those too long for the engines if engines complete them."""
        recipe, codec = self.recipe, self.episodes.codec
        uses_engines = validation or not isinstance(recipe, SupervisedRecipe)
        return PromptStream.open(
            recipe.data,
            seed=recipe.run.seed,
            base=self.loaded.base_dir,
            objects=self.objects.prompts,
            validation=validation,
            count_tokens=lambda prompt: len(codec.encode_prompt(prompt.turns)),
            engine_limit=recipe.infer.max_length - 1 if uses_engines else None,
        )


@asynccontextmanager
async def open_run(
    loaded: LoadedRecipe, *, objects: RunObjects | None = None, resume: bool = False
) -> AsyncGenerator[OpenRun]:
    objects, recipe = objects or RunObjects(), loaded.recipe
    _check_recipe(loaded, objects)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        folder = stack.enter_context(_open_folder(loaded, resume=resume))
        state, stopwatch = RunState(folder), Stopwatch()
        faults = FaultLog(folder.path, step=lambda: state.step)
        goodput = TimeAccount.open(folder.path, resume=resume)
        trace = stack.enter_context(_open_trace(recipe, folder.path))
        status = await enter(StatusReporter.open(recipe, state, trace))
        codec = ChatCodec(load_tokenizer(recipe.model), recipe.model.template)
        log = MetricLog(folder.path, _make_sinks(recipe, folder.path))
        stack.callback(log.close)
        stack.enter_context(_open_guards(recipe, state))
        view = _make_live_view(recipe, folder.path)
        roles, recovery = await enter(_open_roles(loaded, faults, goodput))
        status.worker_processes = roles.generators.group.worker_processes
        await enter(roles.generators.connect())
        _check_engines(recipe, roles.generators.engines)
        pool = await enter(open_environments(loaded, folder.path, faults))
        scoring = await enter(open_scoring(loaded, objects, roles, pool, recovery, faults))
        agents = await enter(_open_agents(loaded, codec))
        episodes = Episodes(codec, pool, agents, recipe.infer.max_length, recipe.run.seed)
        stack.enter_context(view)
        stack.enter_context(_close_goodput(goodput, state))
        memory = MemoryWatch(recipe, roles, _measure_models(recipe))
        telemetry = Telemetry(log, view, trace, stopwatch, memory, faults, goodput)
        publisher = Publisher(roles, recipe.weights)
        residency = Residency(roles, {plan.phase.name: plan for plan in plan_run(recipe)})
        recovery.on_replaced = partial(_reconnect_host, publisher=publisher, residency=residency)
        checkpoints = RunCheckpoints(
            loaded=loaded,
            tokenizer=codec.fingerprint,
            state=state,
            telemetry=telemetry,
            roles=roles,
            publisher=publisher,
            residency=residency,
            recovery=recovery,
        )
        stack.push_async_callback(checkpoints.settle)
        if resume and checkpoints.latest() is None:
            checkpoints.drop_rows_after(-1)
            folder.write_recipe(loaded)
        stopwatch.finish()
        yield OpenRun(
            loaded=loaded,
            objects=objects,
            state=state,
            status=status,
            telemetry=telemetry,
            roles=roles,
            publisher=publisher,
            phases=Phases(state, telemetry, residency, status),
            scoring=scoring,
            episodes=episodes,
            checkpoints=checkpoints,
        )


@contextmanager
def _open_guards(recipe: Recipe, state: RunState) -> Generator[None]:
    with (
        stop_on_signals(state.stop),
        guard_run(
            lambda: state.folder.checkpoints.newest_step() is not None,
            stop_grace_s=recipe.run.stop_grace_s,
            blocked_limit_s=recipe.cluster.place_timeout_s,
        ),
    ):
        yield


def _make_live_view(recipe: Recipe, folder: Path) -> LiveView:
    """Make the view, to be opened later, and announce the run."""
    title, run = f"{recipe.pipeline} {recipe.run.name}", recipe.run
    limit_s = 60 * run.max_minutes or inf
    view = LiveView(title, run.steps, mode=recipe.observe.live, limit_s=limit_s)
    view.announce(f"{folder}: starting the workers")
    return view


def _measure_models(recipe: Recipe) -> Shapes | None:
    return measure_models(recipe, lambda model: ModelShape.of(load_config(model).to_dict()))


def _check_recipe(loaded: LoadedRecipe, objects: RunObjects) -> None:
    """Raises if this machine cannot run the recipe, or if rows or rewards passed in Python do not
    fit it; `rollick check` cannot see the latter."""
    problems = check_machine(loaded)
    if objects.names:
        problems += check_rows(loaded, objects=objects)
    raise_problems(problems, origin=loaded.source.location.origin)


@contextmanager
def _open_folder(loaded: LoadedRecipe, *, resume: bool) -> Generator[RunFolder]:
    """Open the run's folder, fold repeated warnings, and write the report when the block ends."""
    recipe = loaded.recipe
    with fold_repeats(), open_folder(loaded, resume=resume) as folder:
        try:
            yield folder
        finally:
            if recipe.observe.report:
                report_run(folder.path, recipe)


@contextmanager
def _close_goodput(goodput: TimeAccount, state: RunState) -> Generator[None]:
    """Close the account when the block ends, before the workers end: their end is not counted."""
    try:
        yield
    except BaseException:
        goodput.close(state.step, failed=True)
        raise
    goodput.close(state.step)


@contextmanager
def _open_trace(recipe: Recipe, folder: Path) -> Generator[Trace]:
    clock, limit = asyncio.get_running_loop().time, round(recipe.observe.trace_mb * 1e6)
    trace = Trace(folder, clock=clock, limit_bytes=limit)
    try:
        yield trace
    finally:
        trace.flush()


def _make_sinks(recipe: Recipe, folder: Path) -> list[GuardedSink]:
    options = (folder, recipe.run.name, recipe.model_dump(mode="json"))
    names = recipe.observe.sinks
    return [GuardedSink(name, partial(resolve("sinks", name), *options)) for name in names]


@asynccontextmanager
async def _open_roles(
    loaded: LoadedRecipe, faults: FaultLog, goodput: TimeAccount
) -> AsyncGenerator[tuple[Roles, WorkerRecovery]]:
    recipe, device_map = loaded.recipe, DeviceMap.of(loaded.recipe)
    specs = _RoleSpecs(loaded)
    async with open_group(
        device_map,
        specs(device_map),
        cluster=recipe.cluster,
        threads=worker_threads(recipe),
        env=worker_environment(recipe),
    ) as group:
        # An inline worker runs in the controller's process, so it cannot be replaced.
        is_inline, restarts = recipe.cluster.backend == "inline", recipe.cluster.restarts
        options: dict[str, Any] = {
            "splits": _batch_splits(recipe, device_map),
            "value_components": recipe.value_components,
        }
        recovery = WorkerRecovery(
            Roles(group, **options),
            specs,
            faults=faults,
            goodput=goodput,
            restarts=restarts,
            replica_ranks=recipe.train.parallel.non_data_ranks,
        )
        async with recovery.open(snapshots=recipe.checkpoint.snapshot and not is_inline):
            yield Roles(group, None if is_inline else recovery, **options), recovery


def _batch_splits(recipe: Recipe, device_map: DeviceMap) -> dict[RoleName, BatchSplit]:
    """How the ranks of the trained and the sharded roles divide a batch."""
    splits: dict[RoleName, BatchSplit] = {}
    trained = device_map.roles.keys() & {"policy", "critic"}
    for role in SHARDABLE_ROLES:
        if role not in trained | device_map.sharded:
            continue
        cost = RowCost.of(load_config(model_of(recipe, role)).get_text_config())
        splits[role] = BatchSplit.of(recipe, cost, role=role)
    return splits


async def _reconnect_host(host: HostSpec, *, publisher: Publisher, residency: Residency) -> None:
    """Switch to the new process of a host: forget the publisher's state of its roles, and put them
    to sleep if the phase requires it."""
    if "policy" in host.roles:
        publisher.forget_policy()
    if "generators" in host.roles:
        publisher.forget(host.roles["generators"])
    await residency.restore_roles(host)


class _RoleSpecs:
    """How to build all roles. Each call opens new rendezvous for the ranks of sharded roles: a
    process group cannot be joined twice."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        self._loaded = loaded
        self._stores: list[Any] = []
        """The stores of the rendezvous, which end when they are garbage-collected."""

    def __call__(self, device_map: DeviceMap) -> list[RoleSpec]:
        timeout_s = self._loaded.recipe.cluster.call_timeout_s
        self._stores.clear()
        rendezvous: dict[tuple[Device, ...], Rendezvous] = {}
        for devices in {device_map.roles[role] for role in device_map.sharded}:
            store, rendezvous[devices] = open_rendezvous(
                local_address(), ranks=len(devices), timeout_s=timeout_s
            )
            self._stores.append(store)
        return role_specs(self._loaded, device_map, rendezvous)


def role_specs(
    loaded: LoadedRecipe,
    device_map: DeviceMap,
    rendezvous: Mapping[tuple[Device, ...], Rendezvous],
) -> list[RoleSpec]:
    """How to build each role; `rendezvous`: of the ranks on the devices of sharded roles."""
    recipe = _fit_parallel(loaded.recipe) if device_map.earlier else loaded.recipe
    creators: Mapping[RoleName, tuple[str, *tuple[Any, ...]]] = {
        "policy": ("learner:create", loaded.base_dir),
        "reference": ("scorer:create",),
        "critic": ("critic:create",),
        "teacher": ("scorer:create_teacher",),
        "reward_model": ("scorer:create_reward_model", recipe.reward_model),
        "judge": ("generator:create_judge",),
        "generators": ("generator:create",),
    }
    specs: list[RoleSpec] = []
    for role in device_map.roles:
        function, *arguments = creators[role]
        ranks = rendezvous.get(device_map.roles[role]) if role in device_map.sharded else None
        target, joined = f"rollick.workers.{function}", () if ranks is None else (ranks,)
        specs.append(RoleSpec(role, target, (recipe, *arguments, *joined)))
    return specs


def _fit_parallel(recipe: Recipe) -> Recipe:
    """The recipe for a policy that lost ranks: data=0 derives `data` from the number of ranks."""
    train = recipe.train
    parallel = train.parallel.model_copy(update={"data": 0})
    return recipe.model_copy(update={"train": train.model_copy(update={"parallel": parallel})})


def worker_threads(recipe: Recipe) -> int:
    """CPU threads of each worker process: run.threads, or cores divided by processes."""
    if recipe.run.threads:
        return recipe.run.threads
    if recipe.run.deterministic:
        return 1
    return max(1, (os.cpu_count() or 1) // len(DeviceMap.of(recipe).hosts()))


def worker_environment(recipe: Recipe) -> dict[str, str]:
    """Environment variables of the workers: avoid bfloat16 kernels that crash on some CPUs."""
    on_cpu = any("cpu" in (devices or "") for devices in recipe.devices.model_dump().values())
    scoring_models = (recipe.reward_model, recipe.judge)
    critic = recipe.critic.model if isinstance(recipe, RlRecipe) else None
    models = (recipe.model, critic, teacher_of(recipe), *scoring_models)
    has_bf16 = any(model is not None and model.dtype == "bfloat16" for model in models)
    return safe_environment() if on_cpu and has_bf16 else {}


def _check_engines(recipe: Recipe, engines: Sequence[RemoteEngine]) -> None:
    can_keep = all(Capability.KEEP_CACHE in engine.capabilities for engine in engines)
    if isinstance(recipe, RlRecipe) and recipe.rollout.at_publish == "keep" and not can_keep:
        raise ConfigError(
            f"rollout.at_publish=keep, but the engine {recipe.infer.engine} cannot keep caches",
            fix="use continue or move",
        )


@asynccontextmanager
async def _open_agents(loaded: LoadedRecipe, codec: ChatCodec) -> AsyncGenerator[Agents | None]:
    """Run the API server that agents call, on a free local port, until the block ends. None if the
    recipe has no agents."""
    recipe = loaded.recipe
    if not (has_agents(recipe.data.domains) or has_agents(recipe.data.validation)):
        yield None
        return
    try:
        from rollick.pipelines.agents import Agents
        from rollick.serve.gateway import Gateway
        from rollick.serve.server import ServeSettings, run_server
    except ImportError as error:  # Only a run with agents needs the server.
        raise MissingExtra.of(error.name or "uvicorn", "serve") from error
    length, timeout_s = recipe.infer.max_length, recipe.environments.episode_timeout_s
    gateway = Gateway(codec, model="policy", max_length=length, supports_top_p=False)
    async with run_server(gateway, ServeSettings(grace_s=1)) as served:
        yield Agents(gateway, served, loaded.base_dir, timeout_s, recipe.run.seed)

"""Predicts and measures the memory of each process in each phase. Does not import torch.

    recipe, sizes of its models -> plan_memory -> a row for each host and phase -> describe_memory
    the roles of a run -> MemoryWatch.metrics -> metrics

Counted: weights, optimizer state, gradients, activations, the head's chunks, caches and publish
buffers. Not counted: libraries, the CUDA context, kernel workspaces, allocator fragmentation.
Each number has two bounds: the least, however short the samples are, and the most, with full
micro-batches and full slots.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from rollick.cluster.devices import (
    DeviceMap,
    HostSpec,
    PhasePlan,
    RoleRank,
    align,
    numbers_to_ranges,
    plan_run,
)
from rollick.cluster.worker import BUILD_ORDER
from rollick.config.schema import (
    ModelConfig,
    Recipe,
    RlRecipe,
    SupervisedRecipe,
    model_of,
    rl_recipe,
    teacher_of,
)
from rollick.errors import RollickError
from rollick.models.loading.shape import ModelShape
from rollick.trainer.memory_estimate import FLOAT32, Footprint, frozen_footprint, trained_footprint
from rollick.types import RoleName

if TYPE_CHECKING:
    # `rollick check` imports this module and must not load torch.
    from rollick.roles.handles import Roles

LOG = logging.getLogger("rollick")

GB = 1e9
TRAINING_PHASES: Mapping[RoleName, str] = {"policy": "train", "critic": "train_critic"}
"""The phase in which a role is trained; other phases only run its forward pass."""

Shapes = Mapping[str, ModelShape]
"""Model sizes by path."""


class Bounds(NamedTuple):
    """Bytes with no token in memory, and with as many as the recipe allows."""

    least: int
    most: int


class MachineBounds(NamedTuple):
    """Bytes of host memory; `snapshots` of them are in both."""

    least: int
    most: int
    snapshots: int


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The memory of one process in one phase, by role."""

    host: HostSpec
    phase: str
    bytes: dict[RoleName, int]
    """Upper bounds."""
    least: int = 0
    snapshots: int = 0
    """Bytes of the controller's memory for the snapshots of this process."""

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def measure_models(
    recipe: Recipe, shape_of: Callable[[ModelConfig], ModelShape | None]
) -> Shapes | None:
    """Sizes of all models of the run; None if `shape_of` does not know one."""
    critic = rl_recipe(recipe).critic.model if recipe.needs("values") else None
    models = (recipe.model, critic, teacher_of(recipe), recipe.reward_model, recipe.judge)
    shapes = {model.path: shape_of(model) for model in models if model is not None}
    known = {path: shape for path, shape in shapes.items() if shape is not None}
    return known if len(known) == len(shapes) else None


def read_shapes(recipe: Recipe) -> Shapes | None:
    """Sizes of the models; None if a model is not on this machine."""
    return measure_models(recipe, lambda model: ModelShape.read(model.path))


def plan_memory(recipe: Recipe, shapes: Shapes) -> tuple[PhaseMemory, ...]:
    rows: list[PhaseMemory] = []
    for host, plan in product(DeviceMap.of(recipe).hosts(), plan_run(recipe)):
        most: dict[RoleName, int] = {}
        least = 0
        for rank in host.role_ranks:
            bounds = _bounds(recipe, shapes, host, rank, plan)
            most[rank.role], least = bounds.most, least + bounds.least
        snapshots = _snapshot_bytes(recipe, shapes, host)
        rows.append(PhaseMemory(host, plan.phase.name, most, least, snapshots))
    return tuple(rows)


def predicted_bytes(recipe: Recipe, rows: Sequence[PhaseMemory]) -> int:
    """The largest peak of any process; an inline run has one process."""
    if recipe.cluster.backend == "inline":
        phases = {row.phase for row in rows}
        return max(sum(row.total for row in rows if row.phase == phase) for phase in phases)
    return max(row.total for row in rows)


def machine_bounds(rows: Sequence[PhaseMemory]) -> MachineBounds:
    """Bytes of host memory that all CPU workers of a phase take together, in the largest phase,
    with the snapshots of all workers."""
    snapshots = _all_snapshots(rows)
    on_cpu = [row for row in rows if row.host.device.kind == "cpu"]
    phases = {row.phase for row in on_cpu}
    of_phase = [[row for row in on_cpu if row.phase == phase] for phase in phases]
    least = max((sum(row.least for row in part) for part in of_phase), default=0)
    most = max((sum(row.total for row in part) for part in of_phase), default=0)
    return MachineBounds(least + snapshots, most + snapshots, snapshots)


def _all_snapshots(rows: Sequence[PhaseMemory]) -> int:
    return sum({row.host.index: row.snapshots for row in rows}.values())


def describe_memory(rows: Sequence[PhaseMemory]) -> str:
    """A table; phases with the same numbers share a line, and so do hosts with the same phases."""
    tables: dict[int, dict[tuple[str, str], list[str]]] = {}
    for row in rows:
        parts = ", ".join(f"{role} {_gb(size)}" for role, size in row.bytes.items() if size)
        least, most = _gb(row.least), _gb(row.total)
        key = (most if least == most else f"{least} to {most}", parts or "-")
        tables.setdefault(row.host.index, {}).setdefault(key, []).append(row.phase)
    lines = [("memory", "phase", "GB", "of which, at the most")]
    for table in {str(table): table for table in tables.values()}.values():
        hosts = numbers_to_ranges([host for host, other in tables.items() if other == table])
        for (size, parts), phases in table.items():
            lines.append((f"host {hosts}", ", ".join(phases), size, parts))
    if snapshots := _all_snapshots(rows):
        lines.append(("controller", "all", _gb(snapshots), "snapshots (checkpoint.snapshot)"))
    return "\n".join(align(lines))


def describe_bounds(bounds: MachineBounds) -> str:
    """In gigabytes, with what the higher number assumes."""
    if _gb(bounds.least) == _gb(bounds.most):
        return f"{_gb(bounds.most)} GB"
    return (
        f"{_gb(bounds.least)} GB with short samples, {_gb(bounds.most)} GB with full "
        "micro-batches and slots"
    )


def _gb(size: float) -> str:
    return f"{size / GB:.3g}"


def _bounds(
    recipe: Recipe, shapes: Shapes, host: HostSpec, rank: RoleRank, plan: PhasePlan
) -> Bounds:
    if rank.role == "generators":
        return _generator_bounds(recipe, shapes, host, asleep=rank in plan.sleeps)
    if rank.role == "judge" and (judge := recipe.judge) is not None:  # It never sleeps.
        parameters = shapes[judge.path].parameters
        return _engine_bounds(judge, shapes, host, parameters, judge.slots * judge.max_length)
    is_shared = rank.role == "policy" and _shares_weights(recipe, host)
    footprint = _footprint(recipe, shapes, host, rank.role)
    idle = footprint.idle
    if rank in plan.sleeps:
        asleep = footprint.weights if is_shared else 0
        return Bounds(asleep, asleep)
    if rank.role not in plan.phase.uses:
        return Bounds(idle, idle)
    if TRAINING_PHASES.get(rank.role) == plan.phase.name:
        return Bounds(footprint.training_without_tokens, footprint.training)
    if plan.phase.name != "publish":
        return Bounds(idle, footprint.scoring)
    # The learner holds one more copy while it publishes to other processes of its machine.
    publishing = idle + (0 if is_shared else footprint.weights)
    return Bounds(publishing, publishing)


def _footprint(recipe: Recipe, shapes: Shapes, host: HostSpec, role: RoleName) -> Footprint:
    train = recipe.train
    model = model_of(recipe, role)
    device_map = DeviceMap.of(recipe)
    ranks = device_map.ranks(role) if role in device_map.sharded else 1
    shape, itemsize = shapes[model.path], _itemsize(model, host)
    if role in ("teacher", "reward_model", "reference"):
        return frozen_footprint(shape, train, itemsize=itemsize, ranks=ranks)
    return trained_footprint(
        shape,
        train,
        itemsize=itemsize,
        tokens=microbatch_tokens(recipe),
        lora=train.lora if role == "policy" else None,
        is_critic=role == "critic",
        ranks=ranks,
    )


def _snapshot_bytes(recipe: Recipe, shapes: Shapes, host: HostSpec) -> int:
    """Two copies of the float32 weights and the optimizer's moments of each trained role."""
    if recipe.cluster.backend == "inline" or not recipe.checkpoint.snapshot:
        return 0
    size = 0
    for role in TRAINING_PHASES:
        if role in host.roles:
            footprint = _footprint(recipe, shapes, host, role)
            # A float32 parameter is its own master.
            is_master = role == "critic" or recipe.train.lora is None
            is_master = is_master and _itemsize(model_of(recipe, role), host) == FLOAT32
            size += footprint.state + (footprint.weights if is_master else 0)
    return 2 * size


def microbatch_tokens(recipe: Recipe) -> int:
    """Tokens of the largest possible micro-batch: the limit, or a full batch of the longest
    samples. A sample longer than the limit forms its own micro-batch."""
    limit = recipe.train.tokens_per_microbatch
    longest = recipe.data.max_prompt_tokens + recipe.max_new_tokens
    if isinstance(recipe, SupervisedRecipe):
        samples = recipe.train.batch_size * (2 if recipe.compares_pairs else 1)
    else:
        rollout = rl_recipe(recipe).rollout
        samples = rollout.groups_per_step * rollout.group_size
        longest = min(longest, recipe.infer.max_length)
    return max(longest, min(limit, samples * longest))


def _generator_bounds(recipe: Recipe, shapes: Shapes, host: HostSpec, *, asleep: bool) -> Bounds:
    shape, lora = shapes[recipe.model.path], recipe.train.lora
    shares = _shares_weights(recipe, host)
    # The engine owns merged weights; outside the learner's process it owns base weights too.
    parameters = shape.matrix_parameters(lora.targets) if lora is not None else 0
    parameters += 0 if shares else shape.parameters
    bounds = _engine_bounds(recipe.model, shapes, host, parameters, _cached_tokens(recipe, host))
    if asleep and (recipe.infer.free_cache or not shares):
        sleeping = bounds.least if shares else 0
        return Bounds(sleeping, sleeping)
    return bounds


def _engine_bounds(
    model: ModelConfig, shapes: Shapes, host: HostSpec, parameters: int, cached_tokens: int
) -> Bounds:
    """The engine's own weights; at most with its full cache. On a CPU also weights packed for the
    kernels, and the vocabulary matrix in float32."""
    shape, itemsize = shapes[model.path], _itemsize(model, host)
    size = parameters * itemsize
    if host.device.kind == "cpu":
        size += shape.parameters * itemsize + shape.vocabulary * shape.hidden * FLOAT32
    return Bounds(size, size + cached_tokens * shape.cache_per_token * itemsize)


def _shares_weights(recipe: Recipe, host: HostSpec) -> bool:
    """Whether the engine of this process uses the policy's parameters."""
    rank = host.roles.get("generators")
    return rank is not None and DeviceMap.of(recipe).shares_weights(rank)


def _cached_tokens(recipe: Recipe, host: HostSpec) -> int:
    """Tokens in the cache of an engine. On a CPU the cache grows with the samples: at most those in
    flight, as long as a prompt and an answer can be."""
    infer = recipe.infer
    if host.device.kind != "cpu" or not isinstance(recipe, RlRecipe):
        return infer.slots * infer.max_length
    longest = min(infer.max_length, recipe.data.max_prompt_tokens + recipe.max_new_tokens)
    if recipe.pipeline != "rlvr":  # Turns of an episode are prompts too.
        longest = infer.max_length
    rollout = recipe.rollout
    groups = ceil(rollout.groups_per_step * (1 + rollout.max_staleness)) + rollout.surplus_groups
    samples = groups * (rollout.group_size + rollout.spare_samples)
    # The number of held-out prompts is not known here.
    slots = infer.slots if recipe.data.validation else min(infer.slots, samples)
    return slots * longest


def _itemsize(model: ModelConfig, host: HostSpec) -> int:
    if model.dtype == "auto":
        return FLOAT32 if host.device.kind == "cpu" else 2
    return FLOAT32 if model.dtype == "float32" else 2


class MemoryWatch:
    def __init__(self, recipe: Recipe, roles: Roles, shapes: Shapes | None) -> None:
        self.roles = roles
        self.rows = plan_memory(recipe, shapes) if shapes else ()
        self.predicted = predicted_bytes(recipe, self.rows) if self.rows else 0
        if self.rows:
            LOG.info("%s", describe_memory(self.rows))
        # The role that was built first on a host measures its process.
        role_ranks = [
            min(host.role_ranks, key=lambda r: BUILD_ORDER.index(r.role))
            for host in roles.device_map.hosts()
        ]
        # Inline, all roles share one process.
        self._role_ranks = role_ranks[:1] if recipe.cluster.backend == "inline" else role_ranks

    async def metrics(self) -> dict[str, float]:
        """Predicted and measured peaks so far, in GB; skips lost generators."""
        lost = {RoleRank("generators", rank) for rank in self.roles.generators.lost_ranks}
        peaks = [await self._peak(rank) for rank in self._role_ranks if rank not in lost]
        metrics = {"memory/peak_gb": max(peaks, default=0) / GB}
        return metrics | ({"memory/predicted_gb": self.predicted / GB} if self.rows else {})

    async def _peak(self, role_rank: RoleRank) -> int:
        with suppress(RollickError):
            return await self.roles.handle(role_rank.role).peak_memory(role_rank.rank)
        return 0

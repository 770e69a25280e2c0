"""How much memory each process will hold in each phase, and how much it held. Light: no torch.

    recipe, sizes of its models -> plan_memory -> a row for each host and phase -> describe_memory
    the roles of a run -> MemoryWatch.seen -> metrics

What is counted: weights, optimizer state, gradients, activations, the head's chunks, caches and
what publishing holds. Not counted: libraries, the CUDA context, work space of kernels, what an
allocator wastes. Activations are those of full micro-batches and caches those of full slots, so a
run with short samples stays below.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollick.cluster.devices import DeviceMap, HostSpec, PhasePlan, Seat, plan_run
from rollick.cluster.group import WorkerGroup
from rollick.cluster.worker import BUILD_ORDER
from rollick.config.schema import SUPERVISED_LOSSES, JudgeConfig, ModelConfig, Recipe
from rollick.errors import RollickError
from rollick.models.shape import ModelShape
from rollick.train.footprint import FLOAT32, Footprint, frozen_footprint, trained_footprint
from rollick.types import RoleName

LOG = logging.getLogger("rollick")

GB = 1e9
TRAINS: Mapping[RoleName, str] = {"policy": "train", "critic": "train_critic"}
"""The phase in which a role is trained; in others that use it, it gives numbers of a batch."""

Shapes = Mapping[str, ModelShape]
"""The sizes of models, by path."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """What one process holds in one phase, by role."""

    host: HostSpec
    phase: str
    bytes: Mapping[RoleName, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def models_of(recipe: Recipe) -> list[ModelConfig]:
    """The models of a run, the policy's first."""
    named = [recipe.model]
    if recipe.needs("values") and recipe.critic.model is not None:
        named.append(recipe.critic.model)
    if recipe.teacher is not None:
        named.append(recipe.teacher)
    named += [model for model in (recipe.reward_model, recipe.judge) if model is not None]
    return named


def read_shapes(recipe: Recipe) -> Shapes | None:
    """Of models that are folders on this machine; None if one of them is not."""
    found = {model.path: ModelShape.read(model.path) for model in models_of(recipe)}
    known = {path: shape for path, shape in found.items() if shape is not None}
    return known if len(known) == len(found) else None


def plan_memory(recipe: Recipe, shapes: Shapes) -> tuple[PhaseMemory, ...]:
    """Every process in every phase."""
    device_map = DeviceMap.of(recipe)
    return tuple(
        PhaseMemory(
            host,
            plan.phase.name,
            {seat.role: _bytes(recipe, shapes, host, seat, plan) for seat in host.seats},
        )
        for host in device_map.hosts()
        for plan in plan_run(recipe)
    )


def predicted_bytes(recipe: Recipe, rows: Sequence[PhaseMemory]) -> int:
    """The peak of the process that holds most; all roles are one process if the run is inline."""
    if recipe.cluster.backend == "inline":
        phases = {row.phase for row in rows}
        return max(sum(row.total for row in rows if row.phase == phase) for phase in phases)
    return max(row.total for row in rows)


def describe_memory(rows: Sequence[PhaseMemory]) -> str:
    """The rows as aligned text."""
    lines = [("memory", "phase", "GB at the most", "of which")]
    for row in rows:
        parts = ", ".join(f"{role} {_gb(size)}" for role, size in row.bytes.items() if size)
        lines.append((f"host {row.host.index}", row.phase, _gb(row.total), parts or "-"))
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _gb(size: float) -> str:
    return f"{size / GB:.3g}"


def _bytes(recipe: Recipe, shapes: Shapes, host: HostSpec, seat: Seat, plan: PhasePlan) -> int:
    if seat.role == "generators":
        return _generator_bytes(recipe, shapes, host, asleep=seat in plan.sleeps)
    if seat.role == "judge" and recipe.judge is not None:
        return _judge_bytes(recipe.judge, shapes, host)
    asleep, lends = seat in plan.sleeps, "generators" in host.roles and seat.role == "policy"
    footprint = _footprint(recipe, shapes, host, seat.role)
    if asleep:
        return footprint.weights if lends else 0
    if seat.role not in plan.phase.uses:
        return footprint.resting
    if TRAINS.get(seat.role) == plan.phase.name:
        return footprint.training
    # While it publishes to other processes of its machine, the learner holds one more copy.
    sent = footprint.weights if plan.phase.name == "publish" and not lends else 0
    return footprint.resting + sent if plan.phase.name == "publish" else footprint.scoring


def _footprint(recipe: Recipe, shapes: Shapes, host: HostSpec, role: RoleName) -> Footprint:
    train = recipe.train
    frozen = {"teacher": recipe.teacher, "reward_model": recipe.reward_model}.get(role)
    if frozen is not None:
        shape, itemsize = shapes[frozen.path], _itemsize(frozen, host)
        return frozen_footprint(shape, train, itemsize=itemsize)
    model = recipe.critic.model or recipe.model if role == "critic" else recipe.model
    shape, itemsize = shapes[model.path], _itemsize(model, host)
    if role == "reference":
        return frozen_footprint(shape, train, itemsize=itemsize)
    return trained_footprint(
        shape,
        train,
        itemsize=itemsize,
        tokens=microbatch_tokens(recipe),
        lora=train.lora if role == "policy" else None,
        values=role == "critic",
    )


def microbatch_tokens(recipe: Recipe) -> int:
    """Tokens of the largest micro-batch that the recipe can make: its limit, or what a whole batch
    of the longest samples has; a sample that is longer than the limit goes alone."""
    rollout, limit = recipe.rollout, recipe.train.tokens_per_microbatch
    drawn = [recipe.sampling_of(name).max_tokens for name in recipe.data.domains]
    longest = recipe.data.max_prompt_tokens + max(drawn, default=recipe.sampling.max_tokens)
    samples = rollout.groups_per_step * rollout.group_size
    if recipe.pipeline in SUPERVISED_LOSSES:
        samples = recipe.train.batch_size * (2 if recipe.compares_pairs else 1)
    else:
        longest = min(longest, recipe.infer.max_length)
    return max(longest, min(limit, samples * longest))


def _generator_bytes(recipe: Recipe, shapes: Shapes, host: HostSpec, *, asleep: bool) -> int:
    """Weights of its own, and the cache of full slots."""
    shape, itemsize = shapes[recipe.model.path], _itemsize(recipe.model, host)
    lora, infer = recipe.train.lora, recipe.infer
    adapted = shape.adapted(lora.targets) if lora is not None else 0
    shares = "policy" in host.roles
    # Sums with adapters are its own; elsewhere also the weights that these are added to.
    weights = adapted if shares else shape.parameters + adapted
    if host.device.kind == "cpu":
        # Weights in the order of its kernels, and the vocabulary matrix in float32.
        weights += shape.parameters + shape.vocabulary * shape.hidden * FLOAT32 // itemsize
    cache = infer.slots * infer.max_length * shape.cache_per_token
    if asleep and (infer.free_cache or not shares):
        return weights * itemsize if shares else 0
    return (weights + cache) * itemsize


def _judge_bytes(judge: JudgeConfig, shapes: Shapes, host: HostSpec) -> int:
    """The weights of its engine and the cache of full slots; it never sleeps."""
    shape, itemsize = shapes[judge.path], _itemsize(judge, host)
    weights = shape.parameters
    if host.device.kind == "cpu":
        weights += shape.parameters + shape.vocabulary * shape.hidden * FLOAT32 // itemsize
    return (weights + judge.slots * judge.max_length * shape.cache_per_token) * itemsize


def _itemsize(model: ModelConfig, host: HostSpec) -> int:
    if model.dtype == "auto":
        return FLOAT32 if host.device.kind == "cpu" else 2
    return FLOAT32 if model.dtype == "float32" else 2


class MemoryWatch:
    """What was predicted for a run, and what its processes say that they held."""

    def __init__(self, recipe: Recipe, group: WorkerGroup, shapes: Shapes | None) -> None:
        self.group = group
        self.rows = plan_memory(recipe, shapes) if shapes else ()
        self.predicted = predicted_bytes(recipe, self.rows) if self.rows else 0
        hosts = group.device_map.hosts()
        # Inline, all roles live in one process, and the first that was built has seen them all.
        self._seats = [_first(host) for host in hosts][: 1 if _is_inline(recipe) else None]

    def tell(self) -> None:
        """Before the start."""
        if self.rows:
            LOG.info("%s", describe_memory(self.rows))

    async def metrics(self, *, without: Iterable[int] = ()) -> dict[str, float]:
        """Predicted and seen so far, in GB; generators of lost ranks are not asked."""
        lost = {Seat("generators", rank) for rank in without}
        seen = [await self._peak(seat) for seat in self._seats if seat not in lost]
        found = {"memory/seen_gb": max(seen, default=0) / GB}
        return found | ({"memory/predicted_gb": self.predicted / GB} if self.rows else {})

    async def _peak(self, seat: Seat) -> int:
        with suppress(RollickError):
            return await self.group.call(seat.role, "peak_memory", rank=seat.rank)
        return 0


def _first(host: HostSpec) -> Seat:
    """The role of a host that was built first."""
    return min(host.seats, key=lambda seat: BUILD_ORDER.index(seat.role))


def _is_inline(recipe: Recipe) -> bool:
    return recipe.cluster.backend == "inline"

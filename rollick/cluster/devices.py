"""Which role lives on which device, and who steps aside in which phase. Pure: no process, no torch.

Owns the device map (one host process for each distinct device) and the residency plan. Does not
start anything: group.py opens the hosts, and the pipeline acts on the plan.

    recipe.devices -> DeviceMap -> hosts            (who lives together)
    recipe -> phases -> plan_residency -> PhasePlan (who pauses, sleeps and wakes in each phase)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollick.config.devices import Device, parse_devices
from rollick.config.model_sizes import ModelSizes
from rollick.config.schema import SUPERVISED_LOSSES, Recipe
from rollick.errors import ConfigError, PlacementError
from rollick.types import ROLES, RoleName

SCORING: tuple[RoleName, ...] = ("reward_model", "judge")
"""Roles that work while samples are drawn."""


class Seat(NamedTuple):
    """One rank of a role."""

    role: RoleName
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One process: its device and the rank that each of its roles has there."""

    index: int
    device: Device
    roles: Mapping[RoleName, int]

    @property
    def seats(self) -> tuple[Seat, ...]:
        return tuple(Seat(role, rank) for role, rank in self.roles.items())

    def __str__(self) -> str:
        return f"host {self.index} ({self.device}: {_join(self.seats)})"


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The devices of each role, by rank. Roles that share a device share a host process."""

    roles: Mapping[RoleName, tuple[Device, ...]]

    def __post_init__(self) -> None:
        for role, devices in self.roles.items():
            if len(set(devices)) < len(devices):
                raise ConfigError(
                    f"devices.{role} names a device twice: {_join(devices)}",
                    fix="a role has one rank on a device",
                )

    @classmethod
    def of(cls, recipe: Recipe) -> DeviceMap:
        """The roles that the recipe needs, and no others."""
        devices = recipe.devices
        roles: dict[RoleName, tuple[Device, ...]] = {"policy": parse_devices(devices.policy)}
        if recipe.pipeline not in SUPERVISED_LOSSES or recipe.data.validation:
            roles["generators"] = parse_devices(devices.generators)
        if recipe.needs("reference") and not recipe.policy_is_reference:
            roles["reference"] = parse_devices(devices.reference or devices.policy)
        if recipe.needs("values"):
            roles["critic"] = parse_devices(devices.critic or devices.policy)
        if recipe.needs("teacher") or recipe.needs("teacher_top"):
            roles["teacher"] = parse_devices(devices.teacher or devices.policy)
        first = parse_devices(devices.policy)[:1]
        if recipe.reward_model is not None and recipe.asks_reward_model:
            own = devices.reward_model
            roles["reward_model"] = parse_devices(own) if own else first
        if recipe.judge is not None and recipe.asks_judge:
            roles["judge"] = parse_devices(devices.judge) if devices.judge else first
        return cls(roles)

    def hosts(self) -> tuple[HostSpec, ...]:
        """One host for each distinct device, in the order of the devices."""
        distinct = sorted({device for devices in self.roles.values() for device in devices})
        return tuple(
            HostSpec(index, device, self._roles_on(device)) for index, device in enumerate(distinct)
        )

    def _roles_on(self, device: Device) -> dict[RoleName, int]:
        return {
            role: self.roles[role].index(device)
            for role in ROLES
            if device in self.roles.get(role, ())
        }

    def ranks(self, role: RoleName) -> int:
        """How many ranks the role has; 0 where the run does not have the role."""
        return len(self.roles.get(role, ()))

    def host_of(self, role: RoleName, rank: int) -> HostSpec:
        if not 0 <= rank < self.ranks(role):
            raise PlacementError(
                f"there is no {role} rank {rank}: the device map has {self.ranks(role)} of them",
                fix=f"give devices.{role} more devices",
            )
        device = self.roles[role][rank]
        return next(host for host in self.hosts() if host.device == device)

    def overlaps(self, a: RoleName, b: RoleName) -> bool:
        """Whether some device holds both roles."""
        return not set(self.roles.get(a, ())).isdisjoint(self.roles.get(b, ()))

    def shares_weights(self, rank: int) -> bool:
        """Whether this generator lives in the policy's process and can use its parameters; of a
        policy on several devices no process has them whole."""
        policy = self.roles.get("policy", ())
        return len(policy) == 1 and self.roles["generators"][rank] in policy


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step, and the roles that work in it."""

    name: str
    uses: tuple[RoleName, ...]


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """What to do before a phase begins. `pauses` are generator ranks.

    Every seat that ever sleeps is in `sleeps` or in `wakes` of every plan, so a plan holds
    whatever phase came before it: phases may be skipped or come in another order.
    """

    phase: Phase
    pauses: tuple[int, ...] = ()
    sleeps: tuple[Seat, ...] = ()
    wakes: tuple[Seat, ...] = ()


def plan_phases(recipe: Recipe) -> tuple[Phase, ...]:
    """The phases of one step of the recipe, in order."""
    validates = bool(recipe.data.validation)
    device_map = DeviceMap.of(recipe)
    asked: list[RoleName] = [role for role in SCORING if device_map.ranks(role)]
    drawing: tuple[RoleName, ...] = ("generators", *asked)
    if recipe.pipeline in SUPERVISED_LOSSES:
        phases = [Phase("annotate", _annotators(recipe)), Phase("train", ("policy",))]
        if validates:
            phases.append(Phase("publish", ("policy", "generators")))
    else:
        phases = [
            Phase("generate", drawing),
            Phase("annotate", _annotators(recipe)),
            Phase("train_critic", ("critic",) if recipe.needs("values") else ()),
            Phase("train", ("policy",)),
            Phase("publish", ("policy", "generators")),
        ]
    if validates:
        phases.append(Phase("validate", drawing))
    return tuple(phase for phase in phases if phase.uses)


def _annotators(recipe: Recipe) -> tuple[RoleName, ...]:
    reference = recipe.needs("reference")
    asked: dict[RoleName, bool] = {
        "policy": recipe.needs("old") or (reference and recipe.policy_is_reference),
        "reference": reference and not recipe.policy_is_reference,
        "critic": recipe.needs("values"),
        "teacher": recipe.needs("teacher") or recipe.needs("teacher_top"),
    }
    return tuple(role for role, needed in asked.items() if needed)


def plan_residency(
    device_map: DeviceMap,
    phases: Sequence[Phase],
    *,
    max_staleness: float = 0,
    policy_sleeps: bool = False,
) -> tuple[PhasePlan, ...]:
    """Who pauses, sleeps and wakes in each phase.

    A generator pauses while another role works on its device, but for those that score samples
    while others are drawn; these never sleep. On a GPU that roles share, a reference, a critic or a
    teacher sleeps outside the phases that use it, and a paused generator drops its cache, but only
    at staleness 0: otherwise samples in the middle of their generation live in that cache. With
    `policy_sleeps` the policy sleeps too (see train.sleep).
    """
    beside: tuple[RoleName, ...] = ("reference", "critic", "teacher")
    if policy_sleeps:
        beside += ("policy",)
    paused = [_paused_generators(device_map, phase) for phase in phases]
    asleep = [
        _sleepers(device_map, phase, beside, ranks if max_staleness == 0 else ())
        for phase, ranks in zip(phases, paused, strict=True)
    ]
    ever = sorted(set[Seat]().union(*asleep))
    return tuple(
        PhasePlan(
            phase,
            pauses=ranks,
            sleeps=tuple(seat for seat in ever if seat in sleeping),
            wakes=tuple(seat for seat in ever if seat not in sleeping),
        )
        for phase, ranks, sleeping in zip(phases, paused, asleep, strict=True)
    )


def _paused_generators(device_map: DeviceMap, phase: Phase) -> tuple[int, ...]:
    busy = {
        device
        for role in phase.uses
        if role != "generators" and role not in SCORING
        for device in device_map.roles.get(role, ())
    }
    generators = device_map.roles.get("generators", ())
    return tuple(rank for rank, device in enumerate(generators) if device in busy)


def _sleepers(
    device_map: DeviceMap, phase: Phase, beside: Sequence[RoleName], droppable: Iterable[int]
) -> set[Seat]:
    seats = [Seat(role, rank) for role in beside for rank in range(device_map.ranks(role))]
    seats += [Seat("generators", rank) for rank in droppable]
    return {
        seat
        for seat in seats
        if seat.role not in phase.uses and _is_shared_gpu(device_map.host_of(*seat))
    }


def _is_shared_gpu(host: HostSpec) -> bool:
    return host.device.kind == "cuda" and len(host.roles) > 1


def plan_run(recipe: Recipe) -> tuple[PhasePlan, ...]:
    """The residency plan of a recipe."""
    return plan_residency(
        DeviceMap.of(recipe),
        plan_phases(recipe),
        max_staleness=recipe.rollout.max_staleness,
        policy_sleeps=recipe.train.sleep,
    )


def describe_plan(recipe: Recipe) -> str:
    """The hosts, the phases and the timeline as aligned text."""
    device_map = DeviceMap.of(recipe)
    staleness = recipe.rollout.max_staleness
    plans = plan_run(recipe)
    hosts = [("host", "device", "roles")]
    hosts += [(str(h.index), str(h.device), _join(h.seats)) for h in device_map.hosts()]
    phases = [("phase", "uses", "pauses", "sleeps", "wakes")]
    phases += [
        (
            plan.phase.name,
            _join(plan.phase.uses),
            _join(Seat("generators", rank) for rank in plan.pauses),
            _join(plan.sleeps),
            _join(plan.wakes),
        )
        for plan in plans
    ]
    lines = [*_align(hosts), "", *_align(phases), ""]
    if recipe.train.strategy == "fsdp":
        lines.append(f"learner   {_describe_ranks(recipe, device_map.ranks('policy'))}")
        if (sizes := ModelSizes.read(recipe.model.path)) is not None:
            lines.append(f"model     {sizes.describe()}")
    if device_map.ranks("generators"):
        adapters = recipe.train.lora is not None
        lines.append(f"weights   {_describe_weights(device_map, adapters=adapters)}")
    lines.append(f"timeline  {_describe_timeline(device_map, plans, staleness)}")
    return "\n".join(lines)


def _describe_ranks(recipe: Recipe, ranks: int) -> str:
    parallel = recipe.train.parallel
    axes = {
        "samples": ("data", parallel.data_of(ranks)),
        "the matrices of layers": ("tensor", parallel.tensor),
        "the tokens of a micro-batch": ("context", parallel.context),
        "experts, with samples of their own": ("expert", parallel.expert),
    }
    divided = [f"{what} ({axis} {count})" for what, (axis, count) in axes.items() if count > 1]
    if not divided:
        return "1 rank, which has everything"
    return f"{ranks} ranks divide {'; '.join(divided)}"


def _describe_weights(device_map: DeviceMap, *, adapters: bool) -> str:
    seats = [Seat("generators", rank) for rank in range(device_map.ranks("generators"))]
    sharing = [seat for seat in seats if device_map.shares_weights(seat.rank)]
    copying = [seat for seat in seats if seat not in sharing]
    own = "the policy's own, but for the sums with its adapters" if adapters else "the policy's own"
    sent = (
        "a copy; adapters are sent at each publish" if adapters else "a copy, sent at each publish"
    )
    parts = [
        f"{_join(sharing)}: {own}" if sharing else "",
        f"{_join(copying)}: {sent}" if copying else "",
    ]
    return "; ".join(part for part in parts if part)


def _describe_timeline(
    device_map: DeviceMap, plans: Sequence[PhasePlan], max_staleness: float
) -> str:
    if all(plan.phase.name != "generate" for plan in plans):
        return "turns: the policy trains; generators, if any, work only to validate"
    if max_staleness == 0:
        return "turns: generate, then train; every sample is drawn by the newest policy"
    training = next(plan for plan in plans if plan.phase.name == "train")
    ranks = range(device_map.ranks("generators"))
    free = [Seat("generators", rank) for rank in ranks if rank not in training.pauses]
    if not free:
        return (
            "turns: the generators pause while the policy trains on their device; unfinished "
            f"samples are carried over (at most {max_staleness:g} versions old)"
        )
    late = f"samples are at most {max_staleness:g} versions old"
    if training.pauses:
        return f"part overlap: {_join(free)} go on while the policy trains, the rest pause; {late}"
    return f"overlap: generation goes on while the policy trains; {late}"


def _join(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items) or "-"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]

"""The device of each role, and the roles that pause or sleep in each phase.

Owns the device map (one host process for each distinct device) and the residency plan. Starts
nothing: group.py opens the hosts, and the pipeline applies the plan.

    recipe.devices -> DeviceMap -> hosts            (roles that share a process)
    recipe -> phases -> plan_residency -> PhasePlan (roles that pause, sleep and wake in each phase)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollick.config.devices import Device, parse_devices
from rollick.config.model_sizes import ModelSizes
from rollick.config.schema import ParallelConfig, Recipe, SupervisedRecipe
from rollick.errors import PlacementError
from rollick.types import ROLES, SHARDABLE_ROLES, RoleName

SCORING: tuple[RoleName, ...] = ("reward_model", "judge")
"""Roles that score samples during generation."""


class RoleRank(NamedTuple):
    role: RoleName
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One process: its device and the ranks of its roles."""

    index: int
    device: Device
    roles: Mapping[RoleName, int]

    @property
    def role_ranks(self) -> tuple[RoleRank, ...]:
        return tuple(RoleRank(role, rank) for role, rank in self.roles.items())

    def __str__(self) -> str:
        return f"host {self.index} ({self.device}: {_join(self.role_ranks)})"


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The devices of each role, by rank. Roles that share a device share a host process."""

    roles: Mapping[RoleName, tuple[Device, ...]]
    earlier: tuple[Device, ...] = ()
    """Devices that were in use before a role lost ranks, so that hosts keep their index."""
    sharded: frozenset[RoleName] = frozenset()
    """Roles whose ranks have parts of one model, and communicate."""

    @classmethod
    def of(cls, recipe: Recipe) -> DeviceMap:
        devices = recipe.devices
        policy = parse_devices(devices.policy)
        roles: dict[RoleName, tuple[Device, ...]] = {"policy": policy}
        if not isinstance(recipe, SupervisedRecipe) or recipe.data.validation:
            roles["generators"] = parse_devices(devices.generators)
        for role in _annotators(recipe):
            if role != "policy":
                roles[role] = parse_devices(devices.of(role) or devices.policy)
        if recipe.reward_model is not None and recipe.uses_reward_model:
            text = devices.reward_model
            roles["reward_model"] = parse_devices(text) if text else policy[:1]
        if recipe.judge is not None and recipe.uses_judge:
            roles["judge"] = parse_devices(devices.judge) if devices.judge else policy[:1]
        sharded: list[RoleName] = [
            role
            for role in SHARDABLE_ROLES
            if len(roles.get(role, ())) > 1 and recipe.parallel_of(role) is not None
        ]
        return cls(roles, sharded=frozenset(sharded))

    def hosts(self) -> tuple[HostSpec, ...]:
        """One host for each distinct device, in the order of the devices."""
        hosts: list[HostSpec] = []
        for index, device in enumerate(self._devices):
            names: list[RoleName] = [role for role in ROLES if device in self.roles.get(role, ())]
            ranks: dict[RoleName, int] = {role: self.roles[role].index(device) for role in names}
            hosts.append(HostSpec(index, device, ranks))
        return tuple(host for host in hosts if host.roles)

    @property
    def _devices(self) -> list[Device]:
        used = {device for devices in self.roles.values() for device in devices}
        return sorted(used.union(self.earlier))

    def with_ranks(self, role: RoleName, ranks: Sequence[int]) -> DeviceMap:
        """The map after the role keeps only these ranks, renumbered from 0."""
        devices = tuple(self.roles[role][rank] for rank in ranks)
        sharded = self.sharded if len(devices) > 1 else self.sharded - {role}
        return DeviceMap({**self.roles, role: devices}, tuple(self._devices), sharded)

    def ranks(self, role: RoleName) -> int:
        """Number of ranks of the role; 0 if the run does not have the role."""
        return len(self.roles.get(role, ()))

    def host_of(self, role: RoleName, rank: int) -> HostSpec:
        if not 0 <= rank < self.ranks(role):
            message = f"{role} rank {rank} does not exist: the device map has {self.ranks(role)}"
            raise PlacementError(message, fix=f"add devices to devices.{role}")
        device = self.roles[role][rank]
        return next(host for host in self.hosts() if host.device == device)

    def shares_weights(self, rank: int) -> bool:
        """Whether this generator shares the policy's process and can use its parameters. A policy
        on several devices is sharded, so none can."""
        policy = self.roles.get("policy", ())
        return len(policy) == 1 and self.roles["generators"][rank] in policy


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step, and the roles that work in it."""

    name: str
    uses: tuple[RoleName, ...]


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """What to do before a phase begins: pause these generator ranks and put these role ranks to
    sleep; resume and wake all others. A plan does not depend on the previous phase, so phases may
    be skipped or reordered."""

    phase: Phase
    pauses: tuple[int, ...] = ()
    sleeps: tuple[RoleRank, ...] = ()


def plan_phases(recipe: Recipe) -> tuple[Phase, ...]:
    validates = bool(recipe.data.validation)
    device_map = DeviceMap.of(recipe)
    scoring: list[RoleName] = [role for role in SCORING if device_map.ranks(role)]
    sampling: tuple[RoleName, ...] = ("generators", *scoring)
    if isinstance(recipe, SupervisedRecipe):
        phases = [Phase("annotate", _annotators(recipe)), Phase("train", ("policy",))]
        if validates:
            phases.append(Phase("publish", ("policy", "generators")))
    else:
        phases = [
            Phase("generate", sampling),
            Phase("annotate", _annotators(recipe)),
            Phase("train_critic", ("critic",) if recipe.needs("values") else ()),
            Phase("train", ("policy",)),
            Phase("publish", ("policy", "generators")),
        ]
    if validates:
        phases.append(Phase("validate", sampling))
    return tuple(phase for phase in phases if phase.uses)


def _annotators(recipe: Recipe) -> tuple[RoleName, ...]:
    reference = recipe.needs("reference")
    is_needed: dict[RoleName, bool] = {
        "policy": recipe.needs("old") or (reference and recipe.policy_is_reference),
        "reference": reference and not recipe.policy_is_reference,
        "critic": recipe.needs("values"),
        "teacher": recipe.needs("teacher") or recipe.needs("teacher_top"),
    }
    return tuple(role for role, needed in is_needed.items() if needed)


def plan_residency(
    device_map: DeviceMap,
    phases: Sequence[Phase],
    *,
    max_staleness: float = 0,
    policy_sleeps: bool = False,
) -> tuple[PhasePlan, ...]:
    """Plan which roles pause, sleep and wake in each phase.

    A generator pauses while another role works on its device. Roles that score samples during
    generation are the exception: they do not pause it, and never sleep. On a shared GPU, a
    reference, critic or teacher sleeps outside the phases that use it. A paused generator drops its
    cache only at staleness 0, because otherwise the cache holds unfinished samples. With
    `policy_sleeps` the policy sleeps too (see train.sleep).
    """
    may_sleep: tuple[RoleName, ...] = ("reference", "critic", "teacher")
    if policy_sleeps:
        may_sleep += ("policy",)
    plans: list[PhasePlan] = []
    for phase in phases:
        paused = _paused_generators(device_map, phase)
        asleep = _sleepers(device_map, phase, may_sleep, paused if max_staleness == 0 else ())
        plans.append(PhasePlan(phase, paused, tuple(sorted(asleep))))
    return tuple(plans)


def _paused_generators(device_map: DeviceMap, phase: Phase) -> tuple[int, ...]:
    working = set(phase.uses).difference(("generators", *SCORING))
    busy_devices = {device for role in working for device in device_map.roles.get(role, ())}
    generators = device_map.roles.get("generators", ())
    return tuple(rank for rank, device in enumerate(generators) if device in busy_devices)


def _sleepers(
    device_map: DeviceMap, phase: Phase, roles: Sequence[RoleName], generators: Iterable[int]
) -> set[RoleRank]:
    role_ranks = [RoleRank(role, rank) for role in roles for rank in range(device_map.ranks(role))]
    role_ranks += [RoleRank("generators", rank) for rank in generators]
    hosts = {role_rank: device_map.host_of(*role_rank) for role_rank in role_ranks}
    return {
        role_rank
        for role_rank, host in hosts.items()
        if role_rank.role not in phase.uses and host.device.kind == "cuda" and len(host.roles) > 1
    }


def plan_run(recipe: Recipe) -> tuple[PhasePlan, ...]:
    device_map, phases, staleness = DeviceMap.of(recipe), plan_phases(recipe), recipe.max_staleness
    sleeps = recipe.train.sleep
    return plan_residency(device_map, phases, max_staleness=staleness, policy_sleeps=sleeps)


def describe_plan(recipe: Recipe) -> str:
    device_map, plans = DeviceMap.of(recipe), plan_run(recipe)
    rows: list[tuple[str, ...]] = [("phase", "uses", "pauses", "sleeps")]
    for plan in plans:
        paused = [RoleRank("generators", rank) for rank in plan.pauses]
        cells = (_join(plan.phase.uses), _join_ranks(paused), _join_ranks(plan.sleeps))
        rows.append((plan.phase.name, *cells))
    notes: list[tuple[str, ...]] = []
    for role in SHARDABLE_ROLES:
        parallel = recipe.parallel_of(role)
        if parallel is not None and (role == "policy" or role in device_map.sharded):
            notes.append((role, _describe_ranks(parallel, device_map.ranks(role))))
    if recipe.train.strategy == "fsdp" and (sizes := ModelSizes.read(recipe.model.path)):
        notes.append(("model", sizes.describe()))
    if device_map.ranks("generators"):
        adapters = recipe.train.lora is not None
        notes.append(("weights", _describe_weights(device_map, adapters=adapters)))
    notes.append(("timeline", _describe_timeline(device_map, plans, recipe.max_staleness)))
    tables = (_describe_hosts(device_map), rows, notes)
    return "\n\n".join("\n".join(align(table)) for table in tables)


def _describe_hosts(device_map: DeviceMap) -> list[tuple[str, ...]]:
    """A row for hosts with the same roles on devices of one kind."""
    by_roles: dict[tuple[str, ...], list[HostSpec]] = {}
    for host in device_map.hosts():
        by_roles.setdefault((host.device.kind, *host.roles), []).append(host)
    rows: list[tuple[str, ...]] = [("host", "device", "roles")]
    for (kind, *_), hosts in by_roles.items():
        numbers = numbers_to_ranges([host.index for host in hosts])
        devices = f"{kind}:{numbers_to_ranges([host.device.index for host in hosts])}"
        ranks = [role_rank for host in hosts for role_rank in host.role_ranks]
        rows.append((numbers, devices, _join_ranks(ranks)))
    return rows


def _describe_ranks(parallel: ParallelConfig, num_ranks: int) -> str:
    axes = {
        "samples": ("data", parallel.data_of(num_ranks)),
        "the matrices of layers": ("tensor", parallel.tensor),
        "the tokens of a micro-batch": ("context", parallel.context),
        "experts, with separate samples": ("expert", parallel.expert),
    }
    divided = [f"{work} ({axis} {count})" for work, (axis, count) in axes.items() if count > 1]
    return f"{num_ranks} ranks divide {'; '.join(divided)}" if divided else "1 rank, not sharded"


def _describe_weights(device_map: DeviceMap, *, adapters: bool) -> str:
    role_ranks = [RoleRank("generators", rank) for rank in range(device_map.ranks("generators"))]
    sharing = [role_rank for role_rank in role_ranks if device_map.shares_weights(role_rank.rank)]
    copying = [role_rank for role_rank in role_ranks if role_rank not in sharing]
    shared, copied = "the policy's own", "a copy, sent at each publish"
    if adapters:
        shared = "the policy's own, except weights with merged adapters"
        copied = "a copy; adapters are sent at each publish"
    parts = ((sharing, shared), (copying, copied))
    return "; ".join(f"{_join_ranks(group)}: {weights}" for group, weights in parts if group)


def _describe_timeline(
    device_map: DeviceMap, plans: Sequence[PhasePlan], max_staleness: float
) -> str:
    if all(plan.phase.name != "generate" for plan in plans):
        return "the policy trains; generators, if any, only validate"
    if max_staleness == 0:
        return "sequential: generate, then train; the newest policy samples everything"
    training = next(plan for plan in plans if plan.phase.name == "train")
    ranks = range(device_map.ranks("generators"))
    running = [RoleRank("generators", rank) for rank in ranks if rank not in training.pauses]
    age = f"at most {max_staleness:g} versions old"
    if not running:
        pauses = "sequential: the generators pause while the policy trains on their device"
        return f"{pauses}; unfinished samples are carried over ({age})"
    age = f"samples are {age}"
    if training.pauses:
        names = _join_ranks(running)
        return f"partial overlap: {names} continue while the policy trains, others pause; {age}"
    return f"overlap: generation continues while the policy trains; {age}"


def numbers_to_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in the form of device lists: [0, 1, 2, 6] is 0-2,6."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in pairs)


def _join_ranks(role_ranks: Iterable[RoleRank]) -> str:
    ranks: dict[RoleName, list[int]] = {}
    for role, rank in role_ranks:
        ranks.setdefault(role, []).append(rank)
    return _join(f"{role} {numbers_to_ranges(sorted(numbers))}" for role, numbers in ranks.items())


def _join(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items) or "-"


def align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows of a table as lines, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

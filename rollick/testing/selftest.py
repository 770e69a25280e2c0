"""The checks of `rollick selftest`: does what a run needs work on these devices, and how fast?

    devices      what each worker finds
    all-reduce   the result and speed of a collective over all devices
    weights      the bytes and speed of each channel between the first two devices
    offload      device memory is freed and restored (GPU)
    learning     a run on the first device, with engines on all, learns a toy
    engines      its engines compute the learner's log-probs
    sharding     the first step of the same run with the model over all devices
    shards       engines get the weights from these ranks
    recovery     an engine's process is killed; the run completes

Each check is a part of a run as users make it, on Ray, with a randomly initialised tiny model. A
check that these devices cannot make is skipped, with the command that makes it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any, Literal

from rollick.cluster.devices import DeviceMap, numbers_to_ranges
from rollick.cluster.group import open_group
from rollick.cluster.machine import count_gpus, torch_supports_cuda
from rollick.cluster.worker import RoleSpec
from rollick.config.devices import Device, parse_devices
from rollick.config.load import load_recipe, recipe_from_dict
from rollick.config.schema import ClusterConfig
from rollick.errors import ConfigError, RollickError
from rollick.observe.faults import read_faults
from rollick.observe.metrics import read_metrics
from rollick.pipelines.loop import RunLoop
from rollick.pipelines.open_run import open_run
from rollick.pipelines.rl import open_rl
from rollick.pipelines.state import RunResult
from rollick.roles.selftest import SelfTestRanks
from rollick.testing.learning import LETTERS, SMALL_MODEL, echo_recipe
from rollick.testing.tiny import save_tiny
from rollick.trainer.parallel.mesh import open_rendezvous
from rollick.weights.channels.broadcast import local_address
from rollick.weights.plan import Channel

STEPS, FINAL_STEPS = 30, 5
LEARNED = 0.6
"""Mean score of the last steps; it is about 0.15 at the start."""
SAME_LOSS = 1e-4
"""Largest difference between one device and several, in float32."""
SAME_POLICY = 1e-6
"""Largest KL between engine and learner, in nats, in float32."""
COLLECTIVE_MB = {"cpu": 16, "cuda": 256}
OFFLOADED_MB = 1024
WEIGHTS_MB = {"cpu": 64, "cuda": 1024}
JOIN_TIMEOUT_S = 120.0
NEEDS_TWO = "needs two devices"
REPORT = "report a bug with the output of `rollick selftest --json`"

Status = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `fix`: what to do if it did not pass."""

    name: str
    status: Status
    detail: str
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    fix: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    devices: str
    checks: Sequence[Check]

    def count(self, status: Status) -> int:
        return sum(check.status == status for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        counts = {"passed": "pass", "failed": "fail", "skipped": "skip"}
        return {
            "devices": self.devices,
            **{name: self.count(status) for name, status in counts.items()},  # pyright: ignore
            "checks": [asdict(check) for check in self.checks],
        }


@dataclass(slots=True)
class SelfTest:
    """Runs the checks on devices of one kind."""

    devices: Sequence[Device]
    cluster: ClusterConfig
    folder: Path
    learned_rows: Sequence[Mapping[str, float]] = ()
    """Metrics of the run that learned."""

    @property
    def kind(self) -> str:
        return self.devices[0].kind

    @property
    def names(self) -> str:
        """The devices, as recipes name them."""
        numbers = numbers_to_ranges([device.index for device in self.devices])
        return f"cpu:{numbers}" if self.kind == "cpu" else numbers

    def first(self, count: int) -> str:
        """The first devices."""
        return SelfTest(self.devices[:count], self.cluster, self.folder).names

    async def check_devices(self, ranks: SelfTestRanks) -> Check:
        facts = await ranks.describe()
        machines = len({each.machine for each in facts})
        names = ", ".join(sorted({f"{each.device} ({each.memory_gb:.0f} GB)" for each in facts}))
        detail = f"{len(facts)} on {machines} machine{'s' * (machines > 1)}: {names}; torch "
        detail += ", ".join(sorted({each.torch for each in facts}))
        return Check("devices", "pass", detail, {"devices": len(facts), "machines": machines})

    async def check_all_reduce(self, ranks: SelfTestRanks) -> Check:
        if len(self.devices) < 2:
            return _skip("all-reduce", NEEDS_TWO, self.kind)
        results = await ranks.all_reduce(COLLECTIVE_MB[self.kind])
        speed = min(result.gb_per_s for result in results)
        if not all(result.is_exact for result in results):
            fix = "run it again; if it repeats, check network and memory of the machines"
            return Check("all-reduce", "fail", "a sum over the ranks is wrong", fix=fix)
        detail = f"exact on {len(results)} ranks, {speed:.3g} GB/s"
        return Check("all-reduce", "pass", detail, {"gb_per_s": speed})

    async def check_weights(self, ranks: SelfTestRanks) -> Check:
        if len(self.devices) < 2:
            return _skip("weights", NEEDS_TWO, self.kind)
        first, second = (await ranks.describe())[:2]
        channels: list[Channel] = ["broadcast"]
        if first.machine == second.machine:
            channels.append("host")
            if self.kind == "cuda":
                channels.append("cuda_ipc")
        speeds: dict[str, float] = {}
        for channel in channels:
            megabytes = WEIGHTS_MB[self.kind]
            seconds = await ranks.send_weights(megabytes, channel)
            speeds[channel] = megabytes * 2**20 / seconds / 1e9
        listed = ", ".join(f"{channel} {speed:.3g} GB/s" for channel, speed in speeds.items())
        figures = {f"{channel}_gb_per_s": speed for channel, speed in speeds.items()}
        return Check("weights", "pass", f"verified: {listed}", figures)

    async def check_offload(self, ranks: SelfTestRanks) -> Check:
        if self.kind == "cpu":
            return _skip("offload", "needs a GPU", self.kind)
        result = await ranks.offload(OFFLOADED_MB)
        detail = f"freed {result.freed_mb:.0f} of {result.expected_mb:.0f} MB, "
        detail += f"{result.gb_per_s:.3g} GB/s"
        figures = {"freed_mb": result.freed_mb, "gb_per_s": result.gb_per_s}
        passed = result.is_intact and result.freed_mb >= 0.95 * result.expected_mb
        fix = "another process may use the GPU; stop it and run this again"
        return Check("offload", "pass" if passed else "fail", detail, figures, fix)

    async def check_learning(self) -> Check:
        result = await self._run_toy("learning", steps=STEPS, generators=self.names)
        self.learned_rows = read_metrics(result.folder / "metrics.jsonl")
        scores = [row["score/mean"] for row in self.learned_rows]
        begin, end = scores[0], mean(scores[-FINAL_STEPS:])
        step_s = mean(row["time/step"] for row in self.learned_rows[1:])
        detail = f"score {begin:.2f} to {end:.2f} in {STEPS} steps of {step_s:.3g} s"
        figures = {"score": end, "step_s": step_s}
        return Check("learning", "pass" if end >= LEARNED else "fail", detail, figures, REPORT)

    async def check_engines(self) -> Check:
        worst = max(row["train/mean/mismatch_kl"] for row in self.learned_rows)
        detail = f"KL to the learner's policy at most {worst:.1e} nats"
        fix = "set infer.zero_mismatch=true on a GPU, and report a bug with this output"
        status: Status = "pass" if worst <= SAME_POLICY else "fail"
        return Check("engines", status, detail, {"kl": worst}, fix)

    async def check_sharding(self) -> Check:
        if len(self.devices) < 2:
            return _skip("sharding", NEEDS_TWO, self.kind)
        layouts: list[dict[str, int]] = [{}]
        if len(self.devices) % 2 == 0:
            layouts += [{"tensor": 2}, {"context": 2}]
        return await self._compare_first_step("sharding", layouts)

    async def check_shards(self) -> Check:
        if len(self.devices) < 2:
            return _skip("shards", NEEDS_TWO, self.kind)
        return await self._compare_first_step("shards", [{}], channel="broadcast")

    async def check_recovery(self) -> Check:
        if self.kind == "cuda" and len(self.devices) < 2:
            return _skip("recovery", "needs an engine on a device of its own", self.kind)
        last = self.devices[-1].index
        engine = f"cpu:{last + 1}" if self.kind == "cpu" else f"{last}"
        loaded = self._load("recovery", steps=4, generators=engine)
        async with open_run(loaded) as run, open_rl(run) as pipeline:
            await pipeline.step()
            pids = run.roles.generators.group.worker_processes()
            os.kill(pids["generators 0"], signal.SIGKILL)
            result = await RunLoop(run, pipeline).run()
        fault = next(iter(read_faults(result.folder)), None)
        if fault is None or fault.rejoined_at is None:
            return Check("recovery", "fail", "the killed engine did not return", fix=REPORT)
        seconds = fault.rejoined_at - fault.failed_at
        detail = f"a killed engine returned after {seconds:.1f} s, and the run completed"
        return Check("recovery", "pass", detail, {"recovery_s": seconds})

    async def _compare_first_step(
        self, name: str, layouts: Sequence[Mapping[str, int]], *, channel: str = "auto"
    ) -> Check:
        """Compare the first step of the run that learned with the model over all devices."""
        difference = kl = 0.0
        for parallel in layouts:
            result = await self._run_toy(
                f"{name}-{'-'.join(parallel)}",
                steps=2,
                policy=self.names,
                generators=self.names,
                train={"strategy": "fsdp", "parallel": parallel},
                weights={"channel": channel},
            )
            rows = read_metrics(result.folder / "metrics.jsonl")
            for key in ("train/loss", "train/grad_norm"):
                difference = max(difference, abs(rows[0][key] - self.learned_rows[0][key]))
            kl = max(kl, *(row["train/mean/mismatch_kl"] for row in rows))
        passed = difference <= SAME_LOSS and kl <= SAME_POLICY
        detail = f"loss and gradient norm differ by {difference:.1e} from one device; "
        detail += f"engines after a publish by {kl:.1e} nats"
        figures = {"difference": difference, "kl": kl, "layouts": len(layouts)}
        return Check(name, "pass" if passed else "fail", detail, figures, REPORT)

    async def _run_toy(self, name: str, *, steps: int, **options: Any) -> RunResult:
        loaded = self._load(name, steps=steps, **options)
        async with open_run(loaded) as run, open_rl(run) as pipeline:
            return await RunLoop(run, pipeline).run()

    def _load(
        self,
        name: str,
        *,
        steps: int,
        generators: str,
        policy: str = "",
        train: Mapping[str, Any] | None = None,
        weights: Mapping[str, Any] | None = None,
    ) -> Any:
        model = self.folder / "model"
        recipe = echo_recipe(model, self.folder, algorithm="grpo", steps=steps, seed=0)
        recipe["run"] |= {"name": name}
        # float32, so that one device and several can be compared.
        recipe["model"] |= {"dtype": "float32"}
        recipe["train"] |= train or {}
        recipe["weights"] = weights or {}
        recipe["devices"] = {"policy": policy or self.first(1), "generators": generators}
        recipe["cluster"] = self.cluster.model_dump() | {"backend": "ray"}
        recipe["observe"] |= {"report": False}
        return recipe_from_dict(recipe)

    @asynccontextmanager
    async def open_ranks(self) -> AsyncGenerator[SelfTestRanks]:
        ranks, store, rendezvous = len(self.devices), None, None
        if ranks > 1:
            store, rendezvous = open_rendezvous(
                local_address(), ranks=ranks, timeout_s=JOIN_TIMEOUT_S
            )
        device_map = DeviceMap({"policy": tuple(self.devices)}, sharded=frozenset({"policy"}))
        spec = RoleSpec("policy", "rollick.workers.selftest:create", (rendezvous,))
        async with open_group(device_map, [spec], cluster=self.cluster, threads=1) as group:
            yield SelfTestRanks(group, "policy")
        del store


def _skip(name: str, why: str, kind: str) -> Check:
    devices = "cpu:0-1" if kind == "cpu" and why == NEEDS_TWO else "0-1"
    return Check(name, "skip", why, fix=f"to make it: rollick selftest --devices {devices}")


def choose_devices(
    recipe: Path | None, devices: str | None, address: str | None
) -> tuple[Sequence[Device], ClusterConfig]:
    """The devices to test and their cluster: as given, those of the recipe, or all GPUs of this
    machine, or two CPU workers."""
    cluster = ClusterConfig()
    chosen: Sequence[Device] = ()
    if recipe is not None:
        loaded = load_recipe(recipe).recipe
        cluster, roles = loaded.cluster, DeviceMap.of(loaded).roles.values()
        chosen = sorted({device for role in roles for device in role})
    if address is not None:
        cluster = cluster.model_copy(update={"address": address})
    if devices is not None:
        chosen = parse_devices(devices)
    gpus = count_gpus() if torch_supports_cuda() else 0
    chosen = chosen or parse_devices(f"0-{gpus - 1}" if gpus else "cpu:0-1")
    kinds = {device.kind for device in chosen}
    if len(kinds) > 1:
        raise ConfigError("the devices are CPU workers and GPUs", fix="test one kind at a time")
    return chosen, cluster


def run_selftest(
    devices: Sequence[Device], cluster: ClusterConfig, on_check: Callable[[Check], None]
) -> SelfTestReport:
    """Run all checks, also after one has failed. Calls `on_check` with each result."""
    with _silence_warnings(), tempfile.TemporaryDirectory(prefix="rollick-selftest-") as temporary:
        folder = Path(temporary)
        save_tiny(folder / "model", alphabet=LETTERS, **SMALL_MODEL)
        test = SelfTest(devices, cluster, folder)
        return SelfTestReport(test.names, asyncio.run(_run_checks(test, on_check)))


@contextmanager
def _silence_warnings() -> Generator[None]:
    """The runs are short and one of them is disturbed: their warnings would be read as results."""
    logger = logging.getLogger("rollick")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _run_checks(test: SelfTest, on_check: Callable[[Check], None]) -> list[Check]:
    checks: list[Check] = []

    async def run(name: str, check: Awaitable[Check]) -> None:
        checks.append(await _run_check(name, check))
        on_check(checks[-1])

    try:
        async with test.open_ranks() as ranks:
            await run("devices", test.check_devices(ranks))
            await run("all-reduce", test.check_all_reduce(ranks))
            await run("weights", test.check_weights(ranks))
            await run("offload", test.check_offload(ranks))
    except RollickError as error:
        checks.append(Check("devices", "fail", error.message, fix=error.fix))
        on_check(checks[-1])
        return checks
    await run("learning", test.check_learning())
    if checks[-1].status == "pass":
        await run("engines", test.check_engines())
        await run("sharding", test.check_sharding())
        await run("shards", test.check_shards())
    await run("recovery", test.check_recovery())
    return checks


async def _run_check(name: str, check: Awaitable[Check]) -> Check:
    started = perf_counter()
    try:
        result = await check
    except RollickError as error:
        result = Check(name, "fail", error.message, fix=error.fix)
    fix = "" if result.status == "pass" else result.fix
    return replace(result, fix=fix, seconds=round(perf_counter() - started, 1))

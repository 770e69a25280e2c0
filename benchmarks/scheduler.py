"""Speedup and cost of the scheduler.

    python benchmarks/scheduler.py [--json] [--only speed table cost ray growth clock] [--seeds 5 6]
    python benchmarks/scheduler.py --picture docs/pictures/scheduler_grid.png     (the grid alone)

speed    On the virtual clock, with the real Rollout: time per trained sample of the best barrier
         baseline over ours. The baseline: all devices generate until the batch is complete, with
         continuous batching, then all of them train; or the same with another split of the
         devices; with longest first, if that helps it. Ours: devices split, staleness 2,
         must_take, nothing dropped. Both do the same work, which is checked. The loads are in
         scheduler_load.yaml (it says how they were chosen), the engine in scheduler_engine.json.
         of_bound is work / capacity, the smaller of the two loads' minima.
table    What each mechanism adds, on the RLVR load.
cost     Samples per second through the whole lifecycle on one core, with an engine and a reward
         that answer immediately; CPU seconds.
ray      The same through a generator worker on Ray; wall-clock seconds.
growth   Cost of a sample with a million in flight over that with a thousand; CPU seconds.
clock    Virtual over real seconds of 1,024 engines x 32 slots, all in use.

The last line of --json has one figure for each; null where it was not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rollick.config.schema import ClusterConfig, RolloutConfig
from rollick.episodes.base import CachingCodec
from rollick.episodes.single_turn import single_turn
from rollick.infer.engine import Engine
from rollick.rollout.deps import RolloutDeps
from rollick.rollout.scheduler import Rollout
from rollick.simulator.report import Report
from rollick.simulator.run import make_synchronous, set_rollout_share, simulate
from rollick.simulator.scenario import Scenario, build_scenario
from rollick.types import (
    Completion,
    EngineLoad,
    IntArray,
    Prompt,
    Request,
    Sample,
    SampleId,
    Sampling,
    Score,
    StopReason,
    Turn,
    frozen_array,
)

HERE = Path(__file__).parent
PARTS = ("speed", "table", "cost", "ray", "growth", "clock")
GROUP_SIZE = 8
EQUAL_WORK = 0.01
"""Largest difference of the trained tokens of two compared runs."""
TOKENS = 32
"""Of a response in the measurements of cost, and half of them in a prompt."""
TAILS, SHARES = (5, 10, 20, 30, 40), (0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class Load:
    """A load of the file, and the numbers of generating devices to try."""

    name: str
    scenario: Scenario
    splits: tuple[int, ...]
    share: float
    seeds: tuple[int, ...]

    @property
    def devices(self) -> int:
        return self.scenario.devices.count

    def split(self, generators: int) -> dict[str, int]:
        return {"generators": generators, "trainers": self.devices - generators}


@dataclass(frozen=True)
class Result:
    """One seed: the baseline and ours."""

    seed: int
    baseline: Report
    ours: Report

    @property
    def speedup(self) -> float:
        return self.ours.samples_per_s / self.baseline.samples_per_s


def read_load(name: str, seeds: Sequence[int] = ()) -> Load:
    settings_file: Any = yaml.safe_load((HERE / "scheduler_load.yaml").read_text(encoding="utf-8"))
    engine = json.loads((HERE / "scheduler_engine.json").read_text(encoding="utf-8"))
    settings = dict(settings_file[name])
    splits = tuple(settings.pop("splits", ()))
    scenario = build_scenario(settings, origin=f"scheduler_load.yaml: {name}")
    parts = ("base_s", "per_sequence_s", "per_kv_token_s", "per_prefill_token_s")
    scenario = scenario.change(devices={"step_time": {part: engine[part] for part in parts}})
    return Load(
        name, scenario, splits, settings_file["share"], tuple(seeds or settings_file["seeds"])
    )


def compare(load: Load, map_: Callable[..., Iterable[Report]]) -> list[Result]:
    """The best baseline and the best split are chosen with seed 0, then kept."""
    # Choosing needs fewer steps than measuring, and always uses seed 0.
    first = load.scenario.change(seed=0, steps=load.scenario.steps // 2)
    plain = first.change(rollout={"longest_first": False})
    calibrated = list(map_(set_rollout_share, (first, plain), (load.share, load.share)))
    reports = list(map_(simulate, [make_synchronous(scenario) for scenario in calibrated]))
    longest_first = reports[0].step_s <= reports[1].step_s
    show(f"{load.name}: barrier, longest first", reports[0])
    show(f"{load.name}: barrier, oldest first", reports[1])
    best = calibrated[0 if longest_first else 1]
    parts = [load.devices // 4, load.devices // 2, 3 * load.devices // 4]
    separated = [best.change(rollout={"max_staleness": 0}, devices=load.split(n)) for n in parts]
    for part, report in zip(parts, map_(simulate, separated), strict=True):
        show(f"{load.name}: barrier, {part} of {load.devices} generate", report)
        assert report.step_s > min(r.step_s for r in reports), "the baseline is not the best one"
    tried = [ours_of(best, load, split) for split in load.splits]
    actual = list(map_(simulate, tried))
    for split, report in zip(load.splits, actual, strict=True):
        show(f"{load.name}: ours, {split} of {load.devices} generate", report)
    split = load.splits[int(np.argmin([report.step_s for report in actual]))]
    scenarios = [
        load.scenario.change(seed=s, rollout={"longest_first": longest_first}) for s in load.seeds
    ]
    calibrated = list(map_(set_rollout_share, scenarios, [load.share] * len(scenarios)))
    baselines = map_(simulate, [make_synchronous(scenario) for scenario in calibrated])
    ours = map_(simulate, [ours_of(scenario, load, split) for scenario in calibrated])
    results = [Result(*row) for row in zip(load.seeds, baselines, ours, strict=True)]
    for result in results:
        check(result, load.share)
        print(
            f"  seed {result.seed}: {result.speedup:.3f} x, "
            f"{result.ours.of_bound:.1%} of the bound, age {result.ours.age_max}, "
            f"rollout {result.baseline.rollout_share:.1%} of the "
            f"baseline's step, tokens {result.ours.tokens / result.baseline.tokens - 1:+.2%}"
        )
    return results


def ours_of(scenario: Scenario, load: Load, split: int) -> Scenario:
    """The scheduler with the settings of the load file, on that many generating devices."""
    rollout = load.scenario.rollout.model_dump()
    return scenario.change(rollout=rollout, devices=load.split(split) | {"colocated": False})


def check(result: Result, share: float) -> None:
    """Both trained equally many samples of equal work; nothing was dropped; the bound holds."""
    ours, baseline = result.ours, result.baseline
    assert ours.samples == baseline.samples
    assert abs(ours.tokens / baseline.tokens - 1) < EQUAL_WORK, "the work is not the same"
    assert not ours.dropped
    assert ours.age_max <= 2
    assert abs(baseline.rollout_share - share) < 0.01, "rollout has another share"


def show(name: str, report: Report) -> None:
    print(
        f"{name:<44} step {report.step_s:8.2f} s  bound {report.of_bound:6.1%}  trainer "
        f"{report.trainer_busy:6.1%}  slots {report.slots_used:6.1%}  age {report.age_mean:.2f}  "
        f"length bias {report.length_bias:+.1%}",
        flush=True,
    )


def table(load: Load, split: int, map_: Callable[..., Iterable[Report]]) -> list[tuple[str, float]]:
    """From the barrier to ours, one mechanism after another; then ours with one thing changed.

    Speedups are time per trained sample: where groups or samples are dropped, the batch is another.
    """
    ours = ours_of(set_rollout_share(load.scenario, load.share), load, split)
    plain = {"longest_first": False, "engine_queue": 0.0}
    alone = {"max_staleness": 0} | plain
    rows: list[tuple[str, Scenario]] = [
        ("barrier, all devices generate, then train", make_synchronous(ours).change(rollout=alone)),
        ("the same on split devices", ours.change(rollout=alone)),
        ("+ no barrier, staleness 0.5", ours.change(rollout=plain | {"max_staleness": 0.5})),
        ("+ staleness 1", ours.change(rollout=plain | {"max_staleness": 1})),
        ("+ staleness 2", ours.change(rollout=plain)),
        ("+ engines have a queue of their own", ours.change(rollout={"longest_first": False})),
        ("+ longest first = ours", ours),
        ("ours, at a publish samples move", ours.change(rollout={"at_publish": "move"})),
        ("ours, at a publish caches are kept", ours.change(rollout={"at_publish": "keep"})),
        ("biased: 2 spare samples a group", ours.change(rollout={"spare_samples": 2})),
        ("biased: drop_stale", ours.change(rollout={"staleness_rule": "drop_stale"})),
        (
            "biased: first_finished, surplus 1/4 of a batch",
            ours.change(rollout={
                "staleness_rule": "first_finished",
                "surplus_groups": load.scenario.rollout.groups_per_step // 4,
            }),
        ),
        (
            "all trained, order biased: long_rounds, surplus 1/4 of a batch",
            ours.change(rollout={
                "staleness_rule": "long_rounds",
                "surplus_groups": load.scenario.rollout.groups_per_step // 4,
            }),
        ),
    ]  # fmt: skip
    reports = list(map_(simulate, [scenario for _, scenario in rows]))
    speedups = [report.samples_per_s / reports[0].samples_per_s for report in reports]
    for (name, _), report, speedup in zip(rows, reports, speedups, strict=True):
        show(f"{speedup:5.2f} x  {name}", report)
    return [(name, speedup) for (name, _), speedup in zip(rows, speedups, strict=True)]


def grid(load: Load, picture: Path, map_: Callable[..., Iterable[Any]]) -> None:
    """Speedup over tails and shares, at half of the load's size, as a picture."""
    half = load.scenario.change(
        steps=6,
        rollout={"groups_per_step": load.scenario.rollout.groups_per_step // 2},
        devices={"generators": load.devices // 4, "trainers": load.devices // 4},
    )
    cells = [
        half.change(work={**half.work.model_dump(), "lengths": lengths_of(half, tail)})
        for tail in TAILS
    ]
    cases = [(cell, share) for cell in cells for share in SHARES]
    speedups = list(map_(best_speedup, *zip(*cases, strict=True)))
    shape = np.array(speedups).reshape(len(TAILS), len(SHARES))
    for tail, row in zip(TAILS, shape, strict=True):
        print(f"tail {tail:>3} x: " + "  ".join(f"{value:.2f}" for value in row))
    draw_grid(picture, shape)


def lengths_of(scenario: Scenario, tail: float) -> dict[str, Any]:
    """Another tail, with the token limit as far above it."""
    lengths = scenario.work.lengths
    limit = round(lengths.max_tokens * tail / lengths.tail)
    return lengths.model_dump() | {"tail": tail, "max_tokens": limit}


def best_speedup(scenario: Scenario, share: float) -> float:
    """Over splits around the one at which both sides would have the same work."""
    calibrated = set_rollout_share(scenario, share)
    base = simulate(make_synchronous(calibrated))
    count = scenario.devices.count
    training = base.tokens * calibrated.devices.train_token_s
    generating = base.bound_s * count - training
    even = count * generating / (generating + training)
    splits = sorted({min(count - 1, max(1, round(even * more))) for more in (1.0, 1.2, 1.45)})
    ours = [{"generators": n, "trainers": count - n, "colocated": False} for n in splits]
    reports = [simulate(calibrated.change(devices=devices)) for devices in ours]
    return max(report.samples_per_s for report in reports) / base.samples_per_s


def draw_grid(path: Path, speedups: np.ndarray[Any, Any]) -> None:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(speedups, origin="lower", aspect="auto", cmap="viridis")
    for (row, column), value in np.ndenumerate(speedups):
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="white")
    axes.set(
        xticks=range(len(SHARES)),
        xticklabels=[f"{share:.0%}" for share in SHARES],
        yticks=range(len(TAILS)),
        yticklabels=[f"{tail}" for tail in TAILS],
        xlabel="rollout's share of a synchronous step",
        ylabel="tail of the lengths (p99.9 / p50)",
        title="Speedup over the barrier, staleness 2, nothing dropped",
    )
    figure.colorbar(image, label="times as fast")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


class InstantEngine:
    """An engine that answers in the next iteration of the event loop."""

    capabilities: frozenset[Any] = frozenset()

    def __init__(self, slots: int) -> None:
        self._load = EngineLoad(slots=slots)
        self._zeros = frozen_array(np.zeros(TOKENS), np.int32)
        self._logprobs = frozen_array(np.zeros(TOKENS), np.float32)
        self._versions: IntArray = self._zeros

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        return Completion(request.uid, self._zeros, self._logprobs, self._versions, StopReason.STOP)

    async def commit_shared(self, version: int, *, keep_cache: bool = False) -> None:
        self._versions = frozen_array(np.full(TOKENS, version), np.int32)

    async def abort(self, uid: SampleId) -> None:
        """Requests end before they can be aborted."""

    async def close(self) -> None:
        """Holds no resources."""

    def load(self) -> EngineLoad:
        return self._load


class ConstantCodec:
    """Every prompt is the same, and so is every answer."""

    def __init__(self) -> None:
        self._ids = frozen_array(np.zeros(TOKENS // 2), np.int32)

    def encode_prompt(self, turns: Sequence[Turn]) -> IntArray:
        return self._ids

    def decode(self, token_ids: Any) -> str:
        return ""


@asynccontextmanager
async def open_minimal_rollout(engines: Sequence[Engine], groups: int) -> AsyncGenerator[Rollout]:
    """A minimal rollout: `groups` a step, and as many again in flight."""
    numbers = iter(range(1 << 40))

    async def score(sample: Sample) -> Score:
        return Score(float(sample.uid.index))

    sampling = Sampling(max_tokens=TOKENS)
    deps = RolloutDeps(
        config=RolloutConfig(groups_per_step=groups, group_size=GROUP_SIZE, max_staleness=1),
        next_prompt=lambda: Prompt(f"cheap/{next(numbers)}", "cheap", (Turn("text", "?"),)),
        episode=single_turn(CachingCodec(ConstantCodec()), sampling, seed=0),
        score=score,
        stuck_after_s=600,
    )
    async with Rollout.open(deps, engines) as rollout:
        yield rollout


async def run_samples(
    engines: Sequence[Engine], in_flight: int, *, samples: int, clock: Callable[[], float]
) -> float:
    """Seconds per sample, with `in_flight` started and not trained at the beginning of each step.

    The first step is not counted: it fills the pipeline, of which half is left for the others.
    """
    groups = in_flight // (2 * GROUP_SIZE)
    steps = max(1, round(samples / (groups * GROUP_SIZE)))
    async with open_minimal_rollout(engines, groups) as rollout:
        begun = clock()
        for version in range(1, steps + 2):
            batch = await rollout.take()
            for engine in engines:
                await engine.commit_shared(version)  # pyright: ignore[reportArgumentType]
            rollout.trained(batch, version)
            rollout.published(version)
            del batch
            if version == 1:
                begun = clock()
        return (clock() - begun) / (steps * groups * GROUP_SIZE)


def measure_cost(in_flight: int, *, samples: int, engines: int = 1) -> float:
    """CPU seconds per sample with engines in this process."""
    slots = min(in_flight, 32_768) // engines
    instant: list[Any] = [InstantEngine(slots) for _ in range(engines)]
    seconds = asyncio.run(run_samples(instant, in_flight, samples=samples, clock=time.process_time))
    gc.collect()
    return seconds


def make_worker(context: Any, rank: int) -> Any:
    """The generators role with an engine that answers at once; runs on the Ray host."""
    from rollick.workers.generator import GeneratorWorker

    engine: Any = InstantEngine(256)
    return GeneratorWorker(engine)


async def ray_cost(samples: int) -> float:
    """Wall-clock seconds per sample through a worker process on Ray."""
    from rollick.cluster.devices import DeviceMap
    from rollick.cluster.group import open_group
    from rollick.cluster.worker import RoleSpec
    from rollick.config.devices import parse_devices
    from rollick.roles.engines import Generators

    devices = DeviceMap({"generators": parse_devices("cpu")})
    specs = [RoleSpec("generators", "scheduler:make_worker")]
    cluster = ClusterConfig(backend="ray")
    env = {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
    async with (
        open_group(devices, specs, cluster=cluster, threads=1, env=env) as group,
        Generators(group, "generators").connect() as generators,
    ):
        remote: list[Any] = list(generators.engines)
        return await run_samples(remote, 1024, samples=samples, clock=time.perf_counter)


def measure_growth() -> tuple[float, float]:
    """Seconds per sample with a thousand and with a million in flight.

    The thousand is measured before and after, because the machine's speed may drift.
    """
    before = measure_cost(1_000, samples=100_000, engines=8)
    million = measure_cost(1_000_000, samples=500_000, engines=8)
    after = measure_cost(1_000, samples=100_000, engines=8)
    return (before + after) / 2, million


def measure_clock(load: Load) -> float:
    begun = time.perf_counter()
    report = simulate(load.scenario.change(devices={"train_token_s": 1e-6}))
    real_s = time.perf_counter() - begun
    show(f"1,024 engines, {real_s:.1f} real seconds", report)
    return report.seconds / real_s


def measure(
    parts: Sequence[str], seeds: Sequence[int], map_: Callable[..., Iterable[Any]]
) -> dict[str, float]:
    actual: dict[str, float] = {}
    rlvr = read_load("rlvr", seeds)
    if "speed" in parts:
        bounds: list[float] = []
        for load in (rlvr, read_load("agentic", seeds)):
            results = compare(load, map_)
            actual[f"speedup_{load.name}"] = min(result.speedup for result in results)
            bounds.append(min(result.ours.of_bound for result in results))
            print(f"{load.name}: at least {bounds[-1]:.1%} of the bound")
        actual["of_bound"] = min(bounds)
    if "table" in parts:
        table(rlvr, rlvr.scenario.devices.generators, map_)
    if "cost" in parts:
        actual["samples_per_s"] = 1 / min(measure_cost(1024, samples=30_000) for _ in range(3))
    if "ray" in parts:
        actual["samples_per_s_ray"] = 1 / asyncio.run(ray_cost(20_000))
    if "growth" in parts:
        thousand, million = measure_growth()
        print(
            f"a sample costs {thousand * 1e6:.0f} us, with a million in flight {million * 1e6:.0f}"
        )
        actual["growth"] = million / thousand
    if "clock" in parts:
        actual["faster_than_clock"] = measure_clock(read_load("many"))
    return actual


NAMES = (
    "speedup_rlvr", "speedup_agentic", "of_bound", "samples_per_s", "samples_per_s_ray", "growth",
    "faster_than_clock",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="the figures as the last line")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="other than the file's")
    parser.add_argument("--jobs", type=int, default=2, help="processes for the simulations")
    parser.add_argument("--picture", type=Path, help="draw the grid there, and nothing else")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as pool:
        if options.picture:
            grid(read_load("rlvr"), options.picture, pool.map)
            return
        figures = measure(options.only, options.seeds, pool.map)
    if options.json:
        print(json.dumps({name: figures.get(name) for name in NAMES}))
    else:
        for name, value in figures.items():
            print(f"{name:<20}{value:.4g}")


if __name__ == "__main__":
    main()

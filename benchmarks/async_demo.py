"""A synchronous run against an asynchronous one: the demo's task on Ray, equal work and cores.

    python benchmarks/async_demo.py [--json] [--seeds 0 1 2] [--steps 120] [--latency 0.45]
                                    [--picture docs/pictures/async_demo.png]

Learner and engine are two processes with one thread each. Every score arrives `latency` seconds
late, as from a judge over the network: at least 30 % of a synchronous step (asserted). Groups
without signal are kept. The only difference is rollout.max_staleness. Each pair of runs starts from
the same warmed-up model; both make the same number of updates on the same number of samples
(asserted). The score is measured on held-out prompts, greedy. The interval of the synchronous runs
is Student's t, 95 %, over the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from rollick.commands.export import export_run
from rollick.config.load import recipe_from_dict
from rollick.observe.metrics import read_metrics
from rollick.pipelines.loop import RunLoop
from rollick.pipelines.open_run import open_run
from rollick.pipelines.rl import open_rl
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunObjects
from rollick.testing import demo
from rollick.testing.tiny import save_tiny
from rollick.types import Sample, Score


@dataclass(frozen=True)
class Run:
    """One run: its time without start and validation, and its final score."""

    seed: int
    staleness: float
    seconds: float
    step_seconds: float
    samples: float
    score: float
    age_max: float
    elapsed: list[float]
    """Seconds since the start of the first step, at the end of each."""
    curve: list[float]
    """The mean score of each step's samples."""


def warm_model(seed: int, home: Path, tasks: demo.Tasks) -> Path:
    model = save_tiny(home / "model", seed=seed, alphabet=demo.ALPHABET, **demo.MODEL)
    recipe = demo.warm_up_recipe(model, home, seed)
    warm = run_recipe(
        recipe_from_dict(recipe, objects=demo.DOMAINS), objects=RunObjects(prompts=tasks.warm_up)
    )
    return export_run(warm.folder, home / "warm")


def rl_recipe(
    policy: Path, home: Path, *, seed: int, staleness: float, steps: int
) -> dict[str, Any]:
    recipe = demo.rl_recipe(policy, home, seed, control=False)
    recipe["run"] |= {"name": f"staleness-{staleness:g}", "steps": steps}
    # Refills would make a synchronous step wait for the rewards several times.
    recipe["rollout"] |= {"max_staleness": staleness, "drop_no_signal": False}
    recipe["devices"] = {"policy": "cpu:0", "generators": "cpu:1"}
    recipe["evaluate"] = {"every": 0, "at_start": False, "at_end": True}
    recipe["observe"] = {"sinks": [], "live": "off"}
    return recipe


async def train(recipe: dict[str, Any], objects: RunObjects, *, latency: float) -> Path:
    loaded = recipe_from_dict(recipe, objects=objects.names)
    async with open_run(loaded, objects=objects) as run:
        plain = run.scoring.score

        async def slow_score(sample: Sample) -> Score:
            score = await plain(sample)
            await asyncio.sleep(latency)
            return score

        run.scoring.score = slow_score
        async with open_rl(run) as pipeline:
            result = await RunLoop(run, pipeline).run()
    return result.folder


def measure(folder: Path, *, seed: int, staleness: float) -> Run:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "rollout/samples" in row]
    seconds = [row["time/step"] - row.get("time/validate", 0.0) for row in rows]
    return Run(
        seed=seed,
        staleness=staleness,
        seconds=sum(seconds),
        step_seconds=sorted(seconds)[len(seconds) // 2],
        samples=sum(row["rollout/samples"] for row in rows),
        score=rows[-1]["eval/pass@1"],
        age_max=max(row["rollout/age_max"] for row in rows),
        elapsed=list(accumulate(seconds)),
        curve=[row["score/trained"] for row in rows],
    )


def compare(seed: int, *, steps: int, latency: float, staleness: float) -> tuple[Run, Run]:
    tasks = demo.make_tasks(seed)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        policy = warm_model(seed, home, tasks)
        objects = demo.run_objects(tasks)
        runs: list[Run] = []
        for lag in (0.0, staleness):
            recipe = rl_recipe(policy, home, seed=seed, staleness=lag, steps=steps)
            begun = time.perf_counter()
            run_folder = asyncio.run(train(recipe, objects, latency=latency))
            runs.append(measure(run_folder, seed=seed, staleness=lag))
            print(f"seed {seed} staleness {lag:g}: {time.perf_counter() - begun:.0f} s", flush=True)
    assert runs[0].samples == runs[1].samples, "both must train on the same number of samples"
    return runs[0], runs[1]


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean, for two to five values."""
    student = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
    return student[len(values)] * stdev(values) / len(values) ** 0.5


def draw(path: Path, pairs: Sequence[tuple[Run, Run]]) -> None:
    """Plots the score over time, smoothed over nine steps, one thin line per run."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    for runs, color in zip(zip(*pairs, strict=True), ("tab:gray", "tab:blue"), strict=True):
        for number, run in enumerate(runs):
            name = f"staleness {run.staleness:g}" if number == 0 else None
            smooth = np.convolve(run.curve, np.ones(9) / 9, mode="valid")
            axes.plot(run.elapsed[8:], smooth, color=color, label=name, linewidth=1.2)
    axes.set(xlabel="seconds", ylabel="score of the samples", ylim=(0, 1.02), xlim=(0, None))
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--latency", type=float, default=0.45)
    parser.add_argument("--staleness", type=float, default=1)
    parser.add_argument("--out", type=Path, help="write all figures and curves there")
    parser.add_argument("--picture", type=Path, help="draw the curves there")
    options = parser.parse_args()
    pairs = [
        compare(seed, steps=options.steps, latency=options.latency, staleness=options.staleness)
        for seed in options.seeds
    ]
    sync = [pair[0].score for pair in pairs]
    half = half_width(sync) if len(sync) > 1 else 0.0
    facts = {
        "speedup": min(slow.seconds / fast.seconds for slow, fast in pairs),
        "speedups": [slow.seconds / fast.seconds for slow, fast in pairs],
        "latency_share": options.latency / max(slow.step_seconds for slow, _ in pairs),
        "sync_score": mean(sync),
        "sync_interval": [mean(sync) - half, mean(sync) + half],
        "async_score": mean(pair[1].score for pair in pairs),
        "runs": [asdict(run) for pair in pairs for run in pair],
    }
    if options.out:
        options.out.write_text(json.dumps(facts), encoding="utf-8")
    assert facts["latency_share"] >= 0.3, f"the reward takes {facts['latency_share']:.0%} of a step"
    if options.picture:
        draw(options.picture, pairs)
    shown = {name: value for name, value in facts.items() if name != "runs"}
    print(json.dumps(shown, indent=None if options.json else 1))


if __name__ == "__main__":
    main()

"""Accuracy of the simulator: calibrated on one run, it predicts the step time of others.

    python benchmarks/simulator.py [--json] [--keep FOLDER] [--steps 20] [--rounds 2]

Every run is real: engine and learner are two processes on Ray with one thread each, on this CPU.
One run calibrates (`rollick simulate --from` does the same); the others differ from it in seed,
batch size, staleness, or all three. Answers end at random, after about 60 tokens on average and 128
at most. The learning rate is so small that the lengths do not change: a simulator cannot know what
a policy will learn. The first steps of a run are not counted. The speed of a shared machine drifts
(the same run twice differed by up to 46 %, and by 13 to 15 % within ten minutes). So the
calibrating run is repeated before and after every predicted run, and the mean of the two
predictions counts. An error is predicted / measured - 1, both averaged over the rounds. The errors
of each round and the difference of neighbouring calibrations (the same run twice) are reported
too: no prediction can be better than that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rollick.config.load import recipe_from_dict
from rollick.observe.metrics import read_metrics
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunObjects
from rollick.simulator.calibrate import Calibration, calibrate_run
from rollick.simulator.run import simulate
from rollick.simulator.scenario import recipe_scenario
from rollick.testing.tiny import ALPHABET, save_tiny

MODEL: dict[str, Any] = {"hidden": 192, "layers": 4, "heads": 4, "kv_heads": 4, "max_length": 160}
MAX_TOKENS = 128
WARMUP_STEPS = 3
SIMULATED_STEPS = 400


@dataclass(frozen=True)
class Case:
    """A run, by its differences from the calibrating run."""

    name: str
    seed: int = 0
    groups: int = 12
    staleness: float = 1

    def run_name(self, number: int) -> str:
        """The name of the case's run in that round."""
        plain = "".join(c if c.isalnum() else "-" for c in self.name)
        return f"{plain}-{number}"


CALIBRATION = Case("calibration")
CASES = (
    Case("another seed", seed=1),
    Case("half the batch", groups=6),
    Case("twice the batch", groups=24),
    Case("staleness 0", staleness=0),
    Case("staleness 2", staleness=2),
    Case("all: seed 2, half, staleness 2", seed=2, groups=6, staleness=2),
    Case("all: seed 3, twice, staleness 0", seed=3, groups=24, staleness=0),
)


@dataclass(frozen=True)
class Round:
    """Every run once, with calibrations between them."""

    steps: dict[Case, tuple[float, float]]
    """Measured and predicted seconds of a step."""
    calibrations: list[float]
    """Measured seconds of a step of the calibrating run, in the order they were made."""


@dataclass(frozen=True)
class Outcome:
    """Measured and predicted."""

    name: str
    step_s: tuple[float, ...]
    """In each round, as what follows."""
    predicted_s: tuple[float, ...]

    @property
    def error(self) -> float:
        return sum(self.predicted_s) / sum(self.step_s) - 1

    @property
    def round_errors(self) -> list[float]:
        return [
            predicted / measured - 1
            for predicted, measured in zip(self.predicted_s, self.step_s, strict=True)
        ]


def digits(completion: str) -> float:
    """The share of digits in the completion, which differs in nearly every group."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def make_prompts(count: int = 2000) -> list[dict[str, str]]:
    draw = random.Random(0)
    return [{"prompt": "".join(draw.choices(ALPHABET[:36], k=12))} for _ in range(count)]


def recipe_of(case: Case, model: Path, home: Path, *, steps: int, number: int) -> dict[str, Any]:
    name = case.run_name(number)
    return {
        "run": {"name": name, "folder": str(home), "steps": steps, "seed": case.seed, "threads": 1},
        "model": {"path": str(model), "template": "plain"},
        "data": {
            "domains": {"words": {"source": "object:words", "rewards": ["object:digits"]}},
        },
        "sampling": {"max_tokens": MAX_TOKENS},
        "rollout": {
            "groups_per_step": case.groups,
            "group_size": 4,
            "max_staleness": case.staleness,
        },
        "train": {"optimizer": {"lr": 1e-8}},
        "infer": {"slots": 24, "max_length": 160},
        "devices": {"policy": "cpu:0", "generators": "cpu:1"},
        "evaluate": {"at_end": False},
        "checkpoint": {"every": 0},
        "observe": {"sinks": [], "live": "off", "engine_steps": True},
    }


class RunMaker:
    """Runs recipes from one model and keeps their folders under `home`."""

    def __init__(self, home: Path, *, steps: int) -> None:
        self.home = home
        self.steps = steps
        self.model = save_tiny(home / "model", **MODEL)
        self.objects = RunObjects(prompts={"words": make_prompts()}, rewards={"digits": digits})

    def recipe(self, case: Case, *, number: int) -> Any:
        # Runs of about the same length, whatever their batch.
        counted = max(6, round(self.steps * CALIBRATION.groups / case.groups))
        steps = WARMUP_STEPS + counted
        recipe = recipe_of(case, self.model, self.home, steps=steps, number=number)
        return recipe_from_dict(recipe, objects=self.objects.names)

    def run(self, case: Case, *, number: int) -> Path:
        begun = time.perf_counter()
        folder = run_recipe(self.recipe(case, number=number), objects=self.objects).folder
        run_s = time.perf_counter() - begun
        print(f"{case.name}: {run_s:.0f} s, a step {self.measure(folder):.3f} s", flush=True)
        return folder

    def run_round(self, number: int) -> Round:
        """Calibration, a run, calibration, the next run, and so on to a last calibration."""
        links = len(CASES) + 1
        measured: dict[Case, float] = {}
        calibrations: list[Path] = []
        for link in range(links):
            calibrations.append(self.run(CALIBRATION, number=number * links + link))
            for case in CASES[link : link + 1]:
                measured[case] = self.measure(self.run(case, number=number))
        results = [calibrate_run(folder) for folder in calibrations]
        for name, text in results[0].describe():
            print(f"{name:<16}{text}", flush=True)
        predicted = {
            case: fmean(self.predict(case, c) for c in results[link : link + 2])
            for link, case in enumerate(CASES)
        }
        calibration_s = [self.measure(folder) for folder in calibrations]
        measured[CALIBRATION] = fmean(calibration_s)
        predicted[CALIBRATION] = fmean(self.predict(CALIBRATION, c) for c in results)
        steps = {case: (measured[case], predicted[case]) for case in (CALIBRATION, *CASES)}
        return Round(steps, calibration_s)

    def measure(self, folder: Path) -> float:
        """Seconds of a step of a run."""
        rows = read_metrics(folder / "metrics.jsonl")[WARMUP_STEPS:]
        return fmean(row["time/step"] for row in rows)

    def predict(self, case: Case, calibration: Calibration) -> float:
        """Simulated seconds of a step of a case."""
        recipe = self.recipe(case, number=0).recipe
        scenario = calibration.apply(recipe_scenario(recipe))
        changed = scenario.change(steps=SIMULATED_STEPS, warmup_steps=WARMUP_STEPS)
        return simulate(changed).step_s


def show(outcomes: list[Outcome]) -> None:
    print(f"{'run':<34}{'step s':>9}{'predicted':>11}{'error':>9}   in each round")
    for o in outcomes:
        each = "  ".join(
            f"{measured:.3f} {error:+.1%}"
            for measured, error in zip(o.step_s, o.round_errors, strict=True)
        )
        print(
            f"{o.name:<34}{fmean(o.step_s):>9.3f}{fmean(o.predicted_s):>11.3f}{o.error:>+9.1%}   "
            f"{each}"
        )


def main() -> None:
    # Ray lowers the priority of its workers by default.
    os.environ.setdefault("RAY_worker_niceness", "0")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which then stay")
    parser.add_argument("--steps", type=int, default=20, help="counted in a run of a round")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with ExitStack() as stack:
        home = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = RunMaker(home, steps=options.steps)
        rounds = [bench.run_round(number) for number in range(options.rounds)]
    itself, *outcomes = (
        Outcome(case.name, *zip(*(results.steps[case] for results in rounds), strict=True))
        for case in (CALIBRATION, *CASES)
    )
    show([itself, *outcomes])
    drift = [
        abs(after / before - 1)
        for results in rounds
        for before, after in pairwise(results.calibrations)
    ]
    print(f"neighbouring calibrations differ by {max(drift):.1%} at most, {fmean(drift):.1%} mean")
    facts = {
        "worst_error": max(abs(o.error) for o in outcomes),
        "errors": {o.name: o.error for o in outcomes},
        "itself": itself.error,
        "calibrations": [results.calibrations for results in rounds],
        "drift": {"worst": max(drift), "mean": fmean(drift)},
        "runs": [asdict(o) for o in [itself, *outcomes]],
    }
    if options.json:
        print(json.dumps(facts))


if __name__ == "__main__":
    main()

"""Environments with variable latency: scheduling by sample against a batch barrier, on Ray.

    python benchmarks/agentic.py [--json] [--seeds 0 1 2] [--steps 4] [--turns 24] [--unit 0.05]

Every step of the environment waits between 1 and 50 units of `--unit` seconds, log-uniformly, by
the task's seed, the turn and the reply. Three modes run the same tasks with the same model, engine,
cores, threads and numbers of samples and turns:

    lockstep   a batch barrier: no sample generates its turn before all have their observation
    sample     each sample continues as soon as its own observation arrives
    stale      the same with rollout.max_staleness 1: the next step's samples start meanwhile

The time covers all training steps, from one batch to the next (work that `stale` does ahead in the
first step is missing in the last). Each mode trains the same number of samples (asserted). The last
line with --json has the seconds, the ratios, and `waits_alone`: the ratio of lockstep and sample if
only these waits took time. It grows with the number of turns, because the waits of a sample average
out: 1.96 with 8 turns, 2.16 with 12, 2.5 with 24, with a limit of 3.8.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from rollick.config.load import recipe_from_dict
from rollick.episodes.base import EngineAccess, RunEpisode
from rollick.observe.metrics import read_metrics
from rollick.pipelines.episodes import Episodes
from rollick.pipelines.run import run_recipe
from rollick.testing.tiny import save_tiny
from rollick.types import Completion, Prompt, Request, Sample, SampleId

GROUPS, SIZE = 8, 8
ENVIRONMENT = '''
import time
from rollick import TextEnv
from rollick.types import stable_hash

class Waits(TextEnv):
    """`most` turns, each of which takes 1 to 50 units of time."""
    def __init__(self, *, unit, most):
        self.unit, self.most, self.turns, self.seed, self.replies = unit, most, 0, 0, ""
    def reset(self, seed):
        self.seed = seed
        return "go", {}
    def step(self, action):
        self.turns += 1
        self.replies += action
        chance = (stable_hash("waits", self.seed, self.turns, self.replies) % 10**6) / 10**6
        time.sleep(self.unit * 50**chance)
        over = self.turns == self.most
        return "on", float(len(action) % 2), over, False, {}
'''


class Lockstep:
    """A barrier: each running sample waits until all others wait too."""

    def __init__(self, samples: int) -> None:
        self._samples = self._live = samples
        self._waiting = 0
        self._go = asyncio.Event()

    async def wait(self) -> None:
        self._waiting += 1
        go = self._go
        self._let_go()
        await go.wait()

    def leave(self) -> None:
        self._live -= 1
        if self._live == 0:
            self._live = self._samples
        self._let_go()

    def _let_go(self) -> None:
        if self._waiting == self._live:
            self._waiting = 0
            self._go.set()
            self._go = asyncio.Event()


class LockstepAccess:
    """An EngineAccess whose generations begin together."""

    def __init__(self, access: EngineAccess, lockstep: Lockstep) -> None:
        self._access = access
        self._lockstep = lockstep

    async def generate(self, request: Request) -> Completion:
        with self._access.activity("lockstep"):
            await self._lockstep.wait()
        return await self._access.generate(request)

    @contextmanager
    def activity(self, label: str) -> Generator[None]:
        with self._access.activity(label):
            yield


@contextmanager
def in_lockstep(samples: int) -> Generator[None]:
    """Inside the block, all samples of a run generate in lockstep."""
    plain = Episodes.build

    def build(*args: Any, **options: Any) -> RunEpisode:
        run_episode = plain(*args, **options)
        lockstep = Lockstep(samples)

        async def run_in_lockstep(uid: SampleId, prompt: Prompt, access: EngineAccess) -> Sample:
            try:
                return await run_episode(uid, prompt, LockstepAccess(access, lockstep))
            finally:
                lockstep.leave()

        return run_in_lockstep

    Episodes.build = build
    try:
        yield
    finally:
        Episodes.build = plain


def waits_alone(turns: int, *, tries: int = 200) -> float:
    """The ratio of lockstep and by-sample time if only the waits took time."""
    random = Random(0)
    ratios: list[float] = []
    for _ in range(tries):
        waits = [[50 ** random.random() for _ in range(turns)] for _ in range(GROUPS * SIZE)]
        lockstep = sum(max(of_turn) for of_turn in zip(*waits, strict=True))
        ratios.append(lockstep / max(sum(of_sample) for of_sample in waits))
    return mean(ratios)


def recipe_of(
    home: Path, name: str, *, seed: int, steps: int, turns: int, unit: float
) -> dict[str, Any]:
    (home / "waits.py").write_text(ENVIRONMENT)
    # A turn has at most 4 tokens of the policy and 3 of the environment.
    length = 8 * turns + 16
    sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 2, "max_length": length}
    model = save_tiny(home / f"model{seed}", seed=seed, **sizes)
    environment: dict[str, Any] = {"name": "waits.py:Waits", "turn_tokens": 4}
    environment |= {"options": {"unit": unit, "most": turns}}
    return {
        "pipeline": "agentic",
        "run": {
            "steps": steps,
            "seed": seed,
            "name": name,
            "folder": str(home / "runs"),
            # With two threads, a model this small mostly waits for synchronisation.
            "threads": 1,
        },
        "model": {"path": str(model)},
        "data": {"domains": {"waits": {"environment": environment}}},
        "sampling": {"max_tokens": 4 * turns + 4},
        "rollout": {
            "groups_per_step": GROUPS,
            "group_size": SIZE,
            "drop_no_signal": False,
            "max_staleness": 1 if name.startswith("stale") else 0,
        },
        "environments": {"threads": 2 * GROUPS * SIZE},
        "train": {"optimizer": {"lr": 1e-6}},
        "infer": {"slots": 2 * GROUPS * SIZE, "max_length": length},
        "observe": {"sinks": [], "live": "off"},
    }


def measure(home: Path, mode: str, **load: Any) -> float:
    """Seconds of a training step."""
    name = f"{mode}{load['seed']}"
    loaded = recipe_from_dict(recipe_of(home, name, **load), base_dir=home, origin=name)
    if mode == "lockstep":
        with in_lockstep(GROUPS * SIZE):
            result = run_recipe(loaded)
    else:
        result = run_recipe(loaded)
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert all(row["rollout/samples"] == GROUPS * SIZE for row in rows)
    return mean(row["time/step"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--unit", type=float, default=0.05)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"lockstep": [], "sample": [], "stale": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for mode, times in seconds.items():
                load = {"steps": args.steps, "turns": args.turns, "unit": args.unit}
                times.append(measure(Path(folder), mode, seed=seed, **load))
                sys.stderr.write(f"{mode} seed {seed}: {times[-1]:.2f} s a step\n")
    quotients = {
        mode: [slow / fast for slow, fast in zip(seconds["lockstep"], times, strict=True)]
        for mode, times in seconds.items()
        if mode != "lockstep"
    }
    figures: dict[str, Any] = {
        "turns": args.turns,
        "seconds": seconds,
        "times_faster_than_lockstep": quotients,
    }
    figures["waits_alone"] = waits_alone(args.turns)
    sys.stdout.write(json.dumps(figures, indent=None if args.json else 1) + "\n")


if __name__ == "__main__":
    main()

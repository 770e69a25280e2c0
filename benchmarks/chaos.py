"""A run with a random fault every 30 seconds, beside one that restarts everything after each fault.

    python benchmarks/chaos.py [--json] [--minutes 30] [--every 30] [--seed 0] [--out FOLDER]

An agentic run of a tiny model (chaos_task.py): a learner, two engines, an environment process and a
reward process, under `rollick train --restarts`. A fault kills (SIGKILL) or stops (SIGSTOP) the
process of a role; every role and signal occurs equally often, in random order.

    recovery         the faults, repaired by rollick, with a standby and a spare worker
    restart_all      the same faults at the same times; each kills the controller, so that the whole
                     run restarts from its newest checkpoint, which every step writes
    without_faults   three seeds at once: the interval of the final score

All of them have the same recipe and the same number of steps, about --minutes without faults.
restart_all is stopped after the wall time that `recovery` took; a standby would spare it the start
of processes too, so it has one with --standby-for-both. ETTR is that of `rollick doctor`: time of
progress that was not lost / wall time, with the start. `lost` and `doubled` count samples, from the
ledger's log and the last checkpoint. `leftovers` are processes, shared memory and listening sockets
that outlive a run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from chaos_audit import Resources, count_samples

from rollick.children.process_tree import find_descendants
from rollick.commands.supervise import last_logged_step
from rollick.observe.diagnosis import read_run_snapshot
from rollick.observe.faults import read_faults
from rollick.observe.goodput import read_goodput, summarise_faults
from rollick.observe.metrics import read_metrics

HERE = Path(__file__).parent
ROLES = ("policy 0", "generators 0", "generators 1", "environment", "reward", "controller")
CHILDREN = {"environment": b"rollick.envs.child", "reward": b"rollick.rewards.child"}
STEPS_PER_MINUTE = 24
ARMS = ("recovery", "restart_all", "without_faults")
SEEDS = (0, 1, 2)
STUDENT_95 = 4.303
"""Of three values."""
SHOW_EVERY_S = 10.0
FAILED_SCORES = re.compile(r"rollout/domain/.+/failed_scores")


@dataclass(frozen=True, slots=True)
class PlannedFault:
    at_s: float
    role: str
    signal: signal.Signals


@dataclass(slots=True)
class Outcome:
    """The result of a run."""

    exit_code: int
    wall_s: float
    steps: int
    ettr: float
    shares: dict[str, float]
    faults: dict[str, int]
    """That were injected, by role."""
    recovery_s: dict[str, tuple[int, float, float]] = field(default_factory=dict[str, Any])
    """By role: faults, median and longest seconds to recover."""
    score: float | None = None
    lost: int = 0
    doubled: int = 0
    leftovers: list[str] = field(default_factory=list[str])


def plan_faults(seed: int, *, every_s: float, hours: float = 24) -> list[PlannedFault]:
    """Each round has every role with both signals, shuffled."""
    order = random.Random(seed)
    kinds = [(role, number) for role in ROLES for number in (signal.SIGKILL, signal.SIGSTOP)]
    faults: list[PlannedFault] = []
    while len(faults) * every_s < hours * 3600:
        order.shuffle(kinds)
        for role, number in kinds:
            faults.append(PlannedFault((len(faults) + 1) * every_s, role, number))
    return faults


def write_recipe(folder: Path, name: str, *, seed: int, steps: int, wait_s: float) -> Path:
    task = HERE / "chaos_task.py"
    environment = {"name": f"{task}:Letters", "turn_tokens": 2, "options": {"wait_s": wait_s}}
    recipe = {
        "pipeline": "agentic",
        "run": {"name": name, "folder": str(folder), "steps": steps, "seed": seed, "threads": 1},
        "model": {"path": str(folder / "model"), "template": "plain"},
        "data": {
            "domains": {
                "turns": {"environment": environment},
                "answers": {"source": f"{task}:rows", "rewards": [f"{task}:right"]},
            },
            "validation": {"turns": {"environment": {**environment, "seed": 1}, "limit": 64}},
        },
        "sampling": {"max_tokens": 8},
        "rollout": {
            "groups_per_step": 8,
            "group_size": 8,
            "max_staleness": 1,
            "drop_no_signal": False,
            "engine_restarts": 100_000,
        },
        "environments": {"threads": 256},
        "rewards": {"timeout_s": 10},
        "train": {"optimizer": {"lr": 1e-3}},
        "infer": {"slots": 128, "max_length": 64},
        "devices": {"policy": "cpu:0", "generators": "cpu:1-2"},
        "cluster": {"spare_workers": 1, "restarts": 1000},
        "checkpoint": {"every": 1, "every_s": 0},
        "evaluate": {"at_start": False, "samples": 4, "sampling": {"temperature": 1}},
        "observe": {"sinks": [], "live": "off", "report": False, "samples_per_step": 0},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe))
    return path


class ChaosRun:
    """A supervised run in a child process, and its faults."""

    def __init__(
        self,
        recipe: Path,
        name: str,
        faults: Sequence[PlannedFault],
        *,
        restart_all: bool,
        standby: bool,
    ) -> None:
        self.folder, self.name = recipe.parent / name, name
        self.resources = Resources()
        self._faults, self._restart_all = list(faults), restart_all
        self.injected: Counter[str] = Counter()
        self._begun = time.monotonic()
        command = [sys.executable, "-m", "rollick.cli", "train", str(recipe), "--restarts", "1000"]
        command += ["--standby"] if standby else []
        with (recipe.parent / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, env=self.resources.environment(), stdout=log, stderr=log
            )

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    def step(self) -> int:
        return last_logged_step(self.folder) or 0

    def inject_due(self) -> None:
        """Inject the next fault if it is due. One whose process does not run at the moment waits
        for it, until the next fault is due."""
        if not self._faults or self.elapsed_s < self._faults[0].at_s:
            return
        fault = self._faults[0]
        self.resources.observe()
        controller = self._controller()
        role, number = fault.role, fault.signal
        pid = controller if self._restart_all else self._process_of(role, controller)
        if self._restart_all:
            number = signal.SIGKILL
        if pid is not None and _send(pid, number):
            self.injected[role] += 1
            what = "everything" if self._restart_all else f"{role} {number.name}"
            self.show(f"fault {self.injected.total()}: {what}")
        elif self.elapsed_s < self._faults[1].at_s:
            return
        del self._faults[0]

    def _controller(self) -> int | None:
        """The run's main process. A standby has the same command line before and after it takes
        over, so the run itself tells which one it is."""
        snapshot = read_run_snapshot(self.folder)
        for process in find_descendants(self.process.pid):
            words = _command(process.pid)
            is_run = b"train" in words and b"--restarts" not in words
            is_first = is_run and b"--wait" not in words
            if is_first or (snapshot is not None and snapshot.pid == process.pid):
                return process.pid
        return None

    def _process_of(self, role: str, controller: int | None) -> int | None:
        if controller is None or role == "controller":
            return controller
        if role in CHILDREN:
            children = find_descendants(controller)
            return next((p.pid for p in children if CHILDREN[role] in _command(p.pid)), None)
        snapshot = read_run_snapshot(self.folder)
        return snapshot.processes.get(role) if snapshot and snapshot.pid == controller else None

    def show(self, what: str = "") -> None:
        ettr = read_goodput(self.folder).ettr if self.step() else 0.0
        text = f"{self.name}: {self.elapsed_s:.0f} s, step {self.step()}, ETTR {ettr:.2f}  {what}"
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def end(self) -> Outcome:
        """The outcome of an ended run."""
        code, wall_s = self.process.wait(), self.elapsed_s
        goodput = read_goodput(self.folder)
        roles = summarise_faults(read_faults(self.folder))
        outcome = Outcome(
            exit_code=code,
            wall_s=round(wall_s, 1),
            steps=self.step(),
            ettr=round(goodput.ettr, 4),
            shares={state: round(share, 3) for state, share in goodput.shares.items()},
            faults=dict(self.injected),
            recovery_s={
                role.role: (role.count, round(role.median_s, 1), round(role.longest_s or 0, 1))
                for role in roles
                if role.median_s is not None
            },
            leftovers=self.resources.leftovers(),
        )
        outcome.lost, outcome.doubled = count_samples(self.folder)
        rows = _metrics(self.folder)
        # A sample that could not be scored is masked: it is lost too.
        outcome.lost += sum(map(count_failed_scores, rows))
        scores = [row["eval/score"] for row in rows if "eval/score" in row]
        outcome.score = round(scores[-1], 4) if scores else None
        return outcome


def count_failed_scores(row: dict[str, float]) -> int:
    """From a row of metrics, which has the share of failed scores and the samples by domain."""
    shares = {key: share for key, share in row.items() if FAILED_SCORES.fullmatch(key)}
    return sum(
        round(share * row[key.replace("failed_scores", "samples")]) for key, share in shares.items()
    )


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def watch(runs: Sequence[ChaosRun], *, until_s: float | None = None) -> list[Outcome]:
    """Inject the faults and show the progress until all runs have ended, or `until_s`."""
    shown = 0.0
    try:
        while any(run.process.poll() is None for run in runs):
            for run in runs:
                run.inject_due()
            if time.monotonic() - shown > SHOW_EVERY_S:
                shown = time.monotonic()
                for run in runs:
                    run.show()
            if until_s is not None and runs[0].elapsed_s > until_s:
                break
            time.sleep(0.1)
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.process.terminate()
    return [run.end() for run in runs]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from rollick.testing.tiny import save_tiny

    alphabet = "abcdefghijkl"
    save_tiny(folder / "model", alphabet=alphabet, hidden=32, layers=2, heads=2, max_length=64)
    steps = max(4, round(options.minutes * STEPS_PER_MINUTE))
    faults = plan_faults(options.seed, every_s=options.every)

    def start(
        name: str, planned: Sequence[PlannedFault] = (), *, seed: int = 0, standby: bool = False
    ) -> ChaosRun:
        recipe = write_recipe(folder, name, seed=seed, steps=steps, wait_s=options.wait_s)
        restart_all = name == "restart_all"
        return ChaosRun(recipe, name, planned, restart_all=restart_all, standby=standby)

    runs: dict[str, list[Outcome]] = {}
    if "recovery" in options.only:
        runs["recovery"] = watch([start("recovery", faults, standby=options.standby)])
    if "restart_all" in options.only:
        limit_s = runs["recovery"][0].wall_s if "recovery" in runs else 60 * options.minutes
        other = start("restart_all", faults, standby=options.standby_for_both)
        runs["restart_all"] = watch([other], until_s=limit_s)
    if "without_faults" in options.only:
        runs["without_faults"] = watch([start(f"seed{seed}", seed=seed) for seed in SEEDS])
    return {"steps": steps, **summarise(runs)}


def summarise(runs: dict[str, list[Outcome]]) -> dict[str, Any]:
    every = [outcome for outcomes in runs.values() for outcome in outcomes]
    finished = [*runs.get("recovery", ()), *runs.get("without_faults", ())]
    figures: dict[str, Any] = {
        "all_finished": all(outcome.exit_code == 0 for outcome in finished),
        "lost": sum(outcome.lost for outcome in every),
        "doubled": sum(outcome.doubled for outcome in every),
        "leftovers": sum(len(outcome.leftovers) for outcome in every),
    }
    if recovery := runs.get("recovery"):
        figures |= {"ettr": recovery[0].ettr, "score": recovery[0].score}
    if restart_all := runs.get("restart_all"):
        figures["ettr_restart_all"] = restart_all[0].ettr
    finals = [outcome.score for outcome in runs.get("without_faults", ())]
    scores = [score for score in finals if score is not None]
    if len(scores) == len(SEEDS):
        half_width = STUDENT_95 * stdev(scores) / len(scores) ** 0.5
        interval = [round(mean(scores) - half_width, 4), round(mean(scores) + half_width, 4)]
        figures["score_without_faults"] = {"seeds": scores, "interval": interval}
    return figures | {
        "runs": {name: [asdict(o) for o in outcomes] for name, outcomes in runs.items()}
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=30, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS, help="some of the runs")
    parser.add_argument("--wait-s", type=float, default=1.5, help="of a turn, on average")
    parser.add_argument("--no-standby", dest="standby", action="store_false")
    parser.add_argument("--standby-for-both", action="store_true")
    parser.add_argument("--out", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # Ends the runs.
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.out or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        figures = measure(folder, options)
    sys.stdout.write(json.dumps(figures, indent=None if options.json else 1) + "\n")
    if not figures["all_finished"]:
        sys.exit("a run did not finish; use --out, and read its log there")


if __name__ == "__main__":
    main()

"""SmolLM2-135M on three domains at once: several seeds side by side on one device.

    python benchmarks/multidomain.py --out FOLDER [--seeds 0,1,2] [--minutes 8.5] [a.b=c ...]

Each seed is `rollick train recipes/rlvr_multidomain_smollm2.yaml` in its own process. When the time
is over they get SIGTERM. FOLDER gets each seed's metrics and log, and summary.json: first and last
validation of every domain with intervals, and the ratio of the means. The files are rewritten every
few seconds, so an interrupted run keeps its results. Without bubblewrap the code domain runs with
allow_unsafe, which the summary records.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "rlvr_multidomain_smollm2.yaml"
DOMAINS = ("math", "code", "instructions")
UNSAFE = "[{name: code, options: {timeout_s: 5, allow_unsafe: true}}]"
GRACE_S = 25.0
COLLECT_S = 10.0
LEAST_RATIO, LEAST_GAIN = 2.89, 0.1
"""What every seed is to reach: of the mean of the domains, and in each domain."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/multidomain")))
    parser.add_argument("--seeds", type=read_seeds, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("overrides", nargs="*", help="settings of the recipe, as a.b=c")
    options = parser.parse_intermixed_args()
    overrides: list[str] = options.overrides
    options.out.mkdir(parents=True, exist_ok=True)
    unsafe = shutil.which("bwrap") is None
    if unsafe:
        overrides += [f"data.{part}.code.rewards={UNSAFE}" for part in ("domains", "validation")]
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        started = [start(options, seed, runs, overrides) for seed in options.seeds]
        ends = time.monotonic() + 60 * options.minutes
        summary: dict[str, Any] = {}
        while not summary.get("done"):
            summary = {
                "recipe": options.recipe.name,
                "overrides": overrides,
                "code_domain": "allow_unsafe: no sandbox here" if unsafe else "sandboxed",
                "done": wait(started, until=ends),
                "exit_codes": [process.returncode for process in started],
                "seeds": {seed: collect(options.out, runs, seed) for seed in options.seeds},
            }
            (options.out / "summary.json").write_text(json.dumps(summary, indent=1))
    sys.stdout.write(json.dumps(summary) + "\n")


def read_seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


def start(
    options: argparse.Namespace, seed: int, runs: Path, overrides: list[str]
) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // (2 * len(options.seeds)))
    own = [f"run.name=seed{seed}", f"run.folder={runs}", f"run.seed={seed}"]
    own += [f"run.threads={threads}", "observe.live=off", "observe.sinks=[]", "checkpoint.every=0"]
    command = [sys.executable, "-m", "rollick.cli", "train", str(options.recipe), *own, *overrides]
    with (options.out / f"seed{seed}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def wait(started: list[subprocess.Popen[bytes]], *, until: float) -> bool:
    """Wait a few seconds, at most `until`; return whether all have ended."""
    if time.monotonic() >= until:
        stop(started)
    else:
        time.sleep(max(0.0, min(COLLECT_S, until - time.monotonic())))
    return all(process.poll() is not None for process in started)


def stop(started: list[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to all, then kill those that do not exit."""
    running = [process for process in started if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def collect(out: Path, runs: Path, seed: int) -> dict[str, Any]:
    """Copy the metrics of a seed and return its first and last validation."""
    path = runs / f"seed{seed}" / "metrics.jsonl"
    if not path.is_file():
        return {"error": "no metrics; see the log"}
    shutil.copy(path, out / f"seed{seed}.jsonl")
    lines = path.read_text("utf-8").split("\n")[:-1]  # The last one may be half written.
    rows = [json.loads(line) for line in lines]
    validated = [row for row in rows if "eval/pass@1" in row]
    if not validated:
        return {"error": "no validation", "steps": rows[-1]["step"] if rows else 0}
    first, last = (figures(row) for row in (validated[0], validated[-1]))
    times = [row["time/step"] for row in rows if row["step"] > 0 and "time/step" in row]
    ratio = last["mean"] / first["mean"] if first["mean"] else None
    gains = {name: last[name] - first[name] for name in DOMAINS}
    return {
        "first": first,
        "last": last,
        "ratio": ratio,
        "gains": gains,
        "reached": (ratio or 0.0) >= LEAST_RATIO and min(gains.values()) >= LEAST_GAIN,
        "step_seconds": mean(times) if times else None,
    }


def figures(row: dict[str, float]) -> dict[str, float]:
    actual = {"step": row["step"], "mean": mean(row[f"eval/{name}/pass@1"] for name in DOMAINS)}
    for name in DOMAINS:
        actual[name] = row[f"eval/{name}/pass@1"]
        actual[f"{name}_interval"] = row[f"eval/{name}/pass@1_interval"]
    return actual


if __name__ == "__main__":
    main()

"""Warm-up and RL of a game with several seeds: the figures of `docs/notes/games.md`.

    python benchmarks/games.py frozen_lake --model tiny --seeds 0 1 2 --out runs/games
    python benchmarks/games.py sokoban --model smollm2 --device 0 --seeds 0 1 2 --minutes 8.5

Each seed runs in its own process, all side by side:

    (tiny: a randomly initialised model) -> imitation of the solver, validated and saved every few
    steps, until it solves more than `--cap` of the held-out tasks -> the last checkpoint below the
    cap -> RL -> held-out tasks, greedy

A run that exceeds its minutes is stopped; its last validation counts. The last line is JSON: the
success of each seed after the warm-up and at the end, and their means with Student's 95 % interval.
`--out` has the same. Runs and logs are in `--scratch`, some gigabytes for each seed of SmolLM2.
Warm-up, training and validation have different tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rollick.envs.webshop import PRODUCTS
from rollick.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
CAPS = {"frozen_lake": 0.425, "sokoban": 0.30, "webshop": 0.30, "tools_math": 0.45}
"""Half of what RL is to reach, at most."""
STUDENT = {1: float("nan"), 2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def evaluations(run: Path) -> list[tuple[int, float, float]]:
    """(step, success on held-out tasks, seconds since the first step) of each validation."""
    points: list[tuple[int, float, float]] = []
    seconds = 0.0
    for row in read_metrics(run / "metrics.jsonl"):
        seconds += row.get("time/step", 0.0)
        if "eval/pass@1" in row:
            points.append((int(row["step"]), row["eval/pass@1"], seconds))
    return points


@contextmanager
def stop_above(cap: float, run: Path) -> Generator[None]:
    """Inside the block, a run that validates above the cap is signalled to save and stop."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            known = evaluations(run) if (run / "metrics.jsonl").is_file() else []
            if any(success > cap for _, success, _ in known):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def save_tiny_model(args: argparse.Namespace, folder: Path, seed: int) -> Path:
    """Save the randomly initialised model of the game's recipes."""
    sys.path.insert(0, str(ROOT / "recipes"))
    import tiny_agents
    import tiny_games

    if args.game == "webshop":
        return tiny_agents.save_shop_model(folder, args.products or PRODUCTS, seed)
    if args.game == "tools_math":
        return tiny_agents.save_tools_model(folder, seed)
    return tiny_games.save_model(folder, seed)


def run_seed(args: argparse.Namespace, seed: int) -> None:
    """Run one seed in this process."""
    from rollick.commands.export import export_run
    from rollick.config.load import load_recipe
    from rollick.pipelines.run import run_recipe

    home = args.scratch / f"seed{seed}"
    tail = "" if args.model == "tiny" else f"_{args.model}"
    shared = [f"run.seed={seed}", f"run.folder={json.dumps(str(home))}", "observe.live=off"]
    shared += ["cluster.backend=inline", "observe.sinks=[]", *args.set]
    if args.device != "cpu":
        shared += [f"devices.policy={args.device}", f"devices.generators={args.device}"]
    warm = ["run.name=warm_up"]
    if args.model == "tiny":
        warm.append(f"model.path={json.dumps(str(save_tiny_model(args, home / 'model', seed)))}")
    recipe = ROOT / "recipes" / f"{args.game}_warm_up{tail}.yaml"
    with stop_above(args.cap, home / "warm_up"):
        result = run_recipe(load_recipe(recipe, [*shared, *warm, *args.warm]))
    kept = {int(path.name.split("-")[1]) for path in result.folder.glob("checkpoints/step-*")}
    known = [entry for entry in evaluations(result.folder) if entry[0] in kept]
    known = [entry for entry in known if entry[1] <= args.cap]
    if not known:
        raise SystemExit("no checkpoint of the warm-up is below the cap: validate it earlier")
    step, success, _ = max(known)
    start = export_run(result.folder, home / "start", step=step)
    shutil.rmtree(result.folder / "checkpoints")
    (home / "warm_up.json").write_text(json.dumps({"step": step, "success": success}))
    recipe = ROOT / "recipes" / f"{args.game}{tail}.yaml"
    overrides = [*shared, "run.name=rl", f"model.path={json.dumps(str(start))}", *args.rl]
    run_recipe(load_recipe(recipe, overrides))


def interval(values: list[float]) -> list[float]:
    """The mean and its Student 95 % interval, clipped to [0, 1]."""
    centre = mean(values)
    if len(values) < 2:
        return [centre, float("nan"), float("nan")]
    half = STUDENT[len(values)] * stdev(values) / len(values) ** 0.5
    return [centre, max(0.0, centre - half), min(1.0, centre + half)]


def summarise(args: argparse.Namespace) -> dict[str, Any]:
    seeds: dict[str, Any] = {}
    for seed in args.seeds:
        home = args.scratch / f"seed{seed}"
        if not (home / "rl" / "metrics.jsonl").is_file():
            log = (args.scratch / f"seed{seed}.log").read_text(errors="replace")
            seeds[str(seed)] = {"failed": log[-2000:]}
            continue
        curve = evaluations(home / "rl")
        warm = json.loads((home / "warm_up.json").read_text())
        seeds[str(seed)] = {
            "warm_up": warm["success"],
            "warm_up_step": warm["step"],
            "start": curve[0][1] if curve else None,
            "final": curve[-1][1] if curve else None,
            "steps": curve[-1][0] if curve else 0,
            "rl_seconds": curve[-1][2] if curve else 0.0,
            "curve": curve,
        }
    finished = [entry for entry in seeds.values() if entry.get("final") is not None]
    figures: dict[str, Any] = {"game": args.game, "model": args.model, "seeds": seeds}
    if finished:
        figures["warm_up"] = interval([entry["warm_up"] for entry in finished])
        figures["final"] = interval([entry["final"] for entry in finished])
    return figures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("game", choices=list(CAPS))
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--device", default="cpu", help="cpu, or the number of a GPU")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/games"))
    parser.add_argument("--scratch", type=Path, help="for the runs; by default OUT/GAME_MODEL")
    parser.add_argument("--products", help="WebShop's product file")
    parser.add_argument("--cap", type=float, default=0.0, help="success of the warm-up at most")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--set", nargs="*", default=[], help="A.B=C for both recipes")
    parser.add_argument("--warm", nargs="*", default=[], help="A.B=C for the warm-up")
    parser.add_argument("--rl", nargs="*", default=[], help="A.B=C for RL")
    parser.add_argument("--child", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.cap = args.cap or CAPS[args.game]
    args.scratch = args.scratch or args.out / f"{args.game}_{args.model}"
    args.scratch = args.scratch.resolve()
    if args.products:
        args.products = str(Path(args.products).resolve())
        path = json.dumps(args.products)
        for part in ("domains", "validation"):
            args.set.append(f"data.{part}.shop.environment.options.products={path}")
    return args


def main() -> None:
    args = parse()
    if args.child >= 0:
        run_seed(args, args.child)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.scratch.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    children: list[subprocess.Popen[bytes]] = []
    for seed in args.seeds:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", str(seed)]
        log = (args.scratch / f"seed{seed}.log").open("wb")
        children.append(
            subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ}, cwd=ROOT)
        )
    # SIGTERM makes a run save and stop; a run that does not is killed later.
    for wait_s, number in ((60 * args.minutes, signal.SIGTERM), (45.0, signal.SIGKILL)):
        deadline = (begun if number == signal.SIGTERM else time.monotonic()) + wait_s
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.send_signal(number)
    for child in children:
        child.wait()
    figures = summarise(args)
    figures["minutes"] = (time.monotonic() - begun) / 60
    (args.out / f"{args.game}_{args.model}.json").write_text(json.dumps(figures, indent=1))
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()

"""All measurements of training on one GPU, each with its own time limit and file.

    python benchmarks/training_cuda.py --out FOLDER [--only check mfu prefix head step]
                                       [--trl-python PYTHON]

    check    tests/gpu: training and head                                 check.log
    mfu      mfu.py, 135M to 7B                                          mfu.json
    prefix   prefix.py, 135M and 1.5B                                    prefix_SHAPE.json
    head     head_memory.py                                              head_memory.json
    step     step_vs_trl.py beside TRL with vLLM colocated               step.json

A part that fails or times out leaves its output in NAME.log and does not stop the others. Together
they take at most 8 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).parent
SMALL_WORK = {"prompts": 2, "group_size": 2, "tokens": 4}


def commands(
    out: Path, *, trl_python: str | None, device: str
) -> dict[str, tuple[float, list[str]]]:
    """The time limit in seconds and the command of each part."""
    python = sys.executable
    small = device == "cpu"

    def script(name: str, *options: str) -> list[str]:
        return [python, str(HERE / name), "--device", device, "--json", *options]

    def prefix(shape: str) -> list[str]:
        sizes = ["--prompt", "16", "--samples", "2", "--new", "8", "--sizes", "64"] if small else []
        shape = "tiny" if small else shape
        return script(
            "prefix.py", "--shape", shape, "--out", str(out / f"prefix_{shape}.json"), *sizes
        )

    tiny = ["--shapes", "tiny", "--steps", "1", "--tokens", "64", "--length", "32"] if small else []
    few = ["--tokens", "8", "16", "--vocabulary", "512"] if small else []
    trl = ["--trl-python", trl_python] if trl_python else []
    work = (
        ["--micro-batch", "4", "--steps", "1", "--work", json.dumps(SMALL_WORK)]
        if small
        else ["--steps", "4"]
    )
    tests = [
        str(HERE.parent / "tests" / "gpu" / f"test_gpu_{name}.py") for name in ("training", "head")
    ]
    return {
        "check": (90, [python, "-m", "pytest", "-q", "-p", "no:xdist", *tests]),
        "mfu": (170, script("mfu.py", "--out", str(out / "mfu.json"), *tiny)),
        "step": (
            160,
            script("step_vs_trl.py", "--out", str(out / "step.json"), *work, *trl),
        ),
        "prefix_135M": (75, prefix("135M")),
        "prefix_1.5B": (75, prefix("1.5B")),
        "head": (30, script("head_memory.py", "--out", str(out / "head_memory.json"), *few)),
    }


def run(name: str, command: list[str], *, limit_s: float, out: Path) -> dict[str, object]:
    """Run one part in its own process group, which is killed at the end."""
    begun = perf_counter()
    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code = "too long"
    lines = (out / f"{name}.log").read_text(encoding="utf-8").splitlines()
    print(f"== {name}: {code} after {perf_counter() - begun:.0f} s", flush=True)
    print("\n".join(line[:2000] for line in lines[-3:]), flush=True)
    return {"code": code, "seconds": round(perf_counter() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--trl-python")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = commands(options.out, trl_python=options.trl_python, device=options.device)
    ended: dict[str, object] = {}
    for name, (limit_s, command) in parts.items():
        if not options.only or any(name.startswith(only) for only in options.only):
            ended[name] = run(name, command, limit_s=limit_s, out=options.out)
            (options.out / "parts.json").write_text(json.dumps(ended), encoding="utf-8")


if __name__ == "__main__":
    main()

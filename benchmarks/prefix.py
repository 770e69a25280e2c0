"""Training with shared prefixes against the fastest packed training without them, in one process.

    python benchmarks/prefix.py --json [--device cpu] [--shape 135M] [--prompt 512] [--samples 16]
                                [--new 128] [--groups 1] [--rounds 5]

Forward, backward and optimizer step through the local strategy: one prompt (or several), 16 samples
of 128 new tokens each. Both sides compute the head for the new tokens only, over packs without
padding; the only difference is train.share_prefix. Each side first finds its best micro-batch size;
then the two alternate, and the medians count. Both losses are equal (asserted).

    ratio        seconds without over seconds with
    computed     tokens that each side computes
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from training_parts import SHAPES, objective, random_batch, random_strategy, synchronize

SIZES = {"cpu": (1024, 2560, 5120), "cuda": (16384, 65536)}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


class Side:
    """A strategy, with or without shared prefixes."""

    def __init__(self, options: argparse.Namespace, *, share: bool, tokens: int) -> None:
        self.device = options.device
        self.tokens = tokens
        self.strategy = random_strategy(
            options.shape,
            device=options.device,
            dtype=getattr(torch, options.dtype),
            share_prefix=share,
            tokens_per_microbatch=tokens,
            optimizer={"lr": 1e-9},
        )
        self.objective = objective()

    def step(self, batch: Any) -> tuple[float, float, float]:
        """(seconds, CPU seconds, loss)."""
        synchronize(self.device)
        begun, worked = perf_counter(), process_time()
        report = self.strategy.forward_backward(batch, self.objective)
        self.strategy.step()
        synchronize(self.device)
        return perf_counter() - begun, process_time() - worked, report.loss


def best_side(options: argparse.Namespace, batch: Any, *, share: bool) -> tuple[Side, Any]:
    tried: dict[int, float] = {}
    best: Side | None = None
    sizes = options.sizes or SIZES[options.device]
    for tokens in sizes:
        side = Side(options, share=share, tokens=tokens)
        warming_up = side.step(batch)[0]
        again = range(2 if len(sizes) > 1 else 0)
        tried[tokens] = min([warming_up, *(side.step(batch)[0] for _ in again)])
        print(f"share={share} {tokens}: {tried[tokens]:.3f} s", file=sys.stderr, flush=True)
        if best is None or tried[tokens] == min(tried.values()):
            best = side
    assert best is not None
    return best, {tokens: round(seconds, 4) for tokens, seconds in tried.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    vocabulary = SHAPES[options.shape].vocab_size
    batch = random_batch(
        options.groups,
        options.samples,
        prompt=options.prompt,
        new=options.new,
        vocabulary=vocabulary,
    )
    sides: dict[str, Side] = {}
    tried: dict[str, Any] = {}
    for name, share in (("without", False), ("with", True)):
        sides[name], tried[name] = best_side(options, batch, share=share)
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, side in sides.items():
            taken[name].append(side.step(batch))
    losses = {name: rounds[0][2] for name, rounds in taken.items()}
    scale = max(abs(losses["without"]), 1e-3)
    assert abs(losses["with"] - losses["without"]) <= TOLERANCE[options.dtype] * scale, losses
    seconds = {name: median(one[0] for one in rounds) for name, rounds in taken.items()}
    worked = {name: median(one[1] for one in rounds) for name, rounds in taken.items()}
    prompts, new = options.groups * options.prompt, options.groups * options.samples * options.new
    return {
        "ratio": round(seconds["without"] / seconds["with"], 3),
        "ratio_cpu_seconds": round(worked["without"] / worked["with"], 3),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "computed": {
            "without": options.samples * prompts + new,
            "with": prompts + new,
        },
        "micro_batch_tokens": {name: side.tokens for name, side in sides.items()},
        "tried": tried,
        "losses": losses,
        "work": {
            name: getattr(options, name)
            for name in ("device", "shape", "dtype", "groups", "prompt", "samples", "new", "rounds")
        },
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", help="a file for the result too")
    parser.add_argument("--shape", choices=list(SHAPES), default="135M")
    parser.add_argument("--dtype", choices=list(TOLERANCE))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", help="tokens of a micro-batch")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    if options.threads:
        torch.set_num_threads(options.threads)
    result = measure(options)
    text = json.dumps(result)
    if options.out:
        Path(options.out).write_text(text + "\n", encoding="utf-8")
    print(text if options.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

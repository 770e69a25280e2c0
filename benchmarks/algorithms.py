"""Seconds and memory of the algorithms alone, for a step of a million trained tokens.

    python benchmarks/algorithms.py [--json] [--tokens 1000000] [--threads 2] [--loss ppo ...]

For each loss, with log-probs given: advantages of the groups, correction, loss and its gradient
with respect to the log-probs. Memory is the growth of the process over its inputs at the highest
point (Linux only; 0 elsewhere).
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from rollick.algorithms.losses import LossInputs
from rollick.algorithms.objective import build_objective, resolve_advantage
from rollick.config.corrections import clash
from rollick.config.names import NAMES
from rollick.config.schema import AlgorithmConfig
from rollick.types import (
    Group,
    PolicyVersion,
    Prompt,
    Sample,
    SampleId,
    Score,
    ScoredSample,
    StopReason,
)

GROUP_SIZE = 8
SAMPLE_TOKENS = 1000
REPEATS = 3
PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Cost:
    """One measurement: the best of the repeats, the highest of the memory."""

    loss: str
    correction: str
    advantage_s: float
    loss_s: float
    total_s: float
    peak_mb: float


def make_groups(samples: int, prompt: Prompt) -> list[Group]:
    draw = np.random.default_rng(0)
    sampled = np.ones(SAMPLE_TOKENS, np.bool_)
    ids, versions = np.ones(SAMPLE_TOKENS, np.int32), np.zeros(SAMPLE_TOKENS, np.int32)
    logprobs = np.full(SAMPLE_TOKENS, -1.0, np.float32)

    def member(group: int, index: int) -> ScoredSample:
        uid = SampleId(group, index)
        sample = Sample(
            uid, prompt, ids, logprobs, versions, sampled, 1.0, StopReason.STOP, text=""
        )
        return ScoredSample(sample, Score(float(draw.integers(2))))

    return [
        Group(g, prompt, tuple(member(g, i) for i in range(GROUP_SIZE)), started=PolicyVersion(0))
        for g in range(samples // GROUP_SIZE)
    ]


def make_inputs(tokens: int) -> LossInputs:
    draw = torch.Generator().manual_seed(0)

    def rand(scale: float) -> torch.Tensor:
        return torch.randn(tokens, generator=draw) * scale

    behaviour_T = -rand(1).abs() - 0.1
    sequence_T = torch.arange(tokens) // SAMPLE_TOKENS
    return LossInputs(
        logprobs_T=(behaviour_T + rand(0.1)).requires_grad_(),
        old_T=behaviour_T + rand(0.05),
        behaviour_T=behaviour_T,
        advantages_T=rand(1)[sequence_T],
        weights_T=torch.full((tokens,), 1 / tokens),
        sequence_T=sequence_T,
        segment_T=torch.arange(tokens) // (SAMPLE_TOKENS // 2),
    )


def measure(
    parts: AlgorithmConfig, groups: list[Group], *, inputs: LossInputs, held_mb: float
) -> Cost:
    advantage, objective = resolve_advantage(parts), build_objective(parts)
    seconds: list[tuple[float, float]] = []
    _reset_peak_mb()
    for _ in range(REPEATS):
        start = perf_counter()
        advantage(groups)
        middle = perf_counter()
        loss_T = objective(inputs).loss_T
        torch.autograd.grad((inputs.weights_T * loss_T).sum(), inputs.logprobs_T)
        seconds.append((middle - start, perf_counter() - middle))
        del loss_T
    first, second = min(seconds, key=sum)
    return Cost(
        loss=parts.loss.name,
        correction=parts.correction.name,
        advantage_s=round(first, 4),
        loss_s=round(second, 4),
        total_s=round(first + second, 4),
        peak_mb=round(_peak_mb() - held_mb, 1),
    )


def _reset_peak_mb() -> float:
    """Forget the highest point so far; the memory held now."""
    if not (PROCESS / "clear_refs").exists():
        return 0.0
    (PROCESS / "clear_refs").write_text("5")
    return _peak_mb()


def _peak_mb() -> float:
    status = PROCESS / "status"
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 1024 if found else 0.0


def mixtures(losses: list[str]) -> list[AlgorithmConfig]:
    """Every loss with bypass, and ppo with every correction."""
    pairs = [(loss, "bypass") for loss in losses]
    if "ppo" in losses:
        others = [name for name in NAMES["corrections"] if name != "bypass"]
        pairs += [("ppo", name) for name in others if not clash("ppo", name)]
    return [
        AlgorithmConfig.model_validate({"loss": loss, "correction": correction})
        for loss, correction in pairs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--loss", nargs="+", choices=sorted(NAMES["losses"]), default=list(NAMES["losses"])
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompt = Prompt(uid="bench/0", domain="bench", turns=())
    groups = make_groups(options.tokens // SAMPLE_TOKENS, prompt)
    inputs = make_inputs(options.tokens)
    held_mb = _reset_peak_mb()  # once: freed memory stays with the process and would hide the next
    costs = [
        measure(parts, groups, inputs=inputs, held_mb=held_mb) for parts in mixtures(options.loss)
    ]
    if options.json:
        facts = {
            "tokens": options.tokens,
            "threads": options.threads,
            "load_average": round(os.getloadavg()[0], 2),
            "results": [asdict(cost) for cost in costs],
        }
        print(json.dumps(facts, indent=2))
        return
    for cost in costs:
        print(
            f"{cost.loss:14} {cost.correction:14} {cost.advantage_s:8.4f} s advantages "
            f"{cost.loss_s:8.4f} s loss {cost.total_s:8.4f} s {cost.peak_mb:8.1f} MB"
        )


if __name__ == "__main__":
    main()

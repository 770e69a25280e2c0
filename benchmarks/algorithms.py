"""Seconds and memory of the algorithms alone, for a step of a million trained tokens.

    python benchmarks/algorithms.py [--json] [--tokens 1000000] [--threads 2] [--only gae ppo ...]

For each advantage, loss and correction, with log-probs and annotations given:

    credit   groups and batch -> advantages, correction, weights (algorithms/credit.py)
    loss     the objective, and its gradient with respect to the log-probs

Seconds are wall-clock, the best of several repeats. CPU seconds cover all threads and are more
reliable on a busy machine. Memory is the peak growth of the process over its inputs (Linux only; 0
elsewhere). The bound is 0.5 s and 400 MB on two threads.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from rollick.algorithms.credit import CreditAssigner
from rollick.algorithms.losses import LossInputs, ValueInputs, value
from rollick.algorithms.objective import build_objective
from rollick.config.names import NAMES
from rollick.config.schema import RlvrRecipe
from rollick.config.schema.corrections import find_conflict
from rollick.config.schema.losses import ValueLoss
from rollick.data.batch import Batch
from rollick.data.collate import collate
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
TURNS = 4
TOP_K = 8
REPEATS = 5
SECONDS, MEGABYTES = 0.5, 400
"""The bound of a step."""
PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Cost:
    """One measurement: the best time and the highest memory of the repeats."""

    part: str
    advantage: str
    loss: str
    correction: str
    credit_s: float
    loss_s: float
    total_s: float
    processor_s: float
    peak_mb: float

    @property
    def within(self) -> bool:
        return self.total_s <= SECONDS and self.peak_mb <= MEGABYTES


@dataclass(frozen=True)
class Step:
    """The inputs of a step: groups, their annotated batch, and the current log-probs."""

    groups: list[Group]
    batch: Batch
    now_T: torch.Tensor
    student_TK: torch.Tensor


def make_groups(samples: int) -> list[Group]:
    """Samples of four turns, each after one observation token; states repeat in a group."""
    draw = np.random.default_rng(0)
    length = SAMPLE_TOKENS + TURNS
    drawn = np.arange(length) % (SAMPLE_TOKENS // TURNS + 1) > 0
    ids, versions = np.ones(length, np.int32), np.where(drawn, 3, -1).astype(np.int32)
    prompt = Prompt(uid="bench/0", domain="bench", turns=())

    def member(group: int, index: int) -> ScoredSample:
        logprobs = (-np.abs(draw.normal(size=length)) - 0.1).astype(np.float32)
        states = tuple(str(number) for number in draw.integers(3, size=TURNS))
        sample = Sample(
            uid=SampleId(group, index),
            prompt=prompt,
            token_ids=ids,
            logprobs=logprobs,
            versions=versions,
            loss_mask=drawn,
            temperature=1.0,
            stop=StopReason.STOP,
            text="",
            states=states,
        )
        rewards = tuple(draw.integers(2, size=TURNS).tolist())
        return ScoredSample(sample, Score(float(sum(rewards)), turn_rewards=rewards))

    return [
        Group(
            g,
            prompt,
            tuple(member(g, i) for i in range(GROUP_SIZE)),
            start_version=PolicyVersion(3),
        )
        for g in range(samples // GROUP_SIZE)
    ]


def make_step(tokens: int) -> Step:
    draw = np.random.default_rng(1)
    groups = make_groups(tokens // SAMPLE_TOKENS)
    batch = collate(groups, version=4)

    def near(scale: float) -> Any:
        noise_N = draw.standard_normal(batch.tokens, np.float32) * np.float32(scale)
        return batch.logprobs_N + noise_N

    batch = replace(
        batch,
        old_logprobs_N=near(0.05),
        reference_logprobs_N=near(0.1),
        teacher_logprobs_N=near(0.5),
        values_N=draw.standard_normal(batch.tokens, np.float32),
        last_values_B=np.zeros(batch.rows, np.float32),
        teacher_top_NK=_top_logprobs(draw, batch.tokens),
    )
    now_T = torch.from_numpy(near(0.1)[batch.loss_mask_N])
    student_TK = torch.from_numpy(_top_logprobs(draw, len(now_T)))
    return Step(groups, batch, now_T.requires_grad_(), student_TK.requires_grad_())


def _top_logprobs(draw: np.random.Generator, rows: int) -> Any:
    logits = torch.from_numpy(draw.standard_normal((rows, 2 * TOP_K), np.float32))
    return torch.log_softmax(logits, -1)[:, :TOP_K].numpy().copy()


def make_inputs(step: Step, batch: Batch, loss: str) -> LossInputs:
    """The objective's inputs for one micro-batch; building them is not measured."""
    indices_T = np.flatnonzero(batch.loss_mask_N)
    sequence_N = np.repeat(np.arange(batch.rows), batch.lengths_B)

    def picked(values_N: Any) -> Any:
        return None if values_N is None else torch.from_numpy(values_N[indices_T]).float()

    sequence_T = torch.from_numpy(sequence_N[indices_T])
    advantages_T = picked(batch.advantages_N)
    if loss in ("dpo", "ipo"):
        advantages_T = 1.0 - 2.0 * (sequence_T % 2).float()
    assert batch.scores_B is not None
    distils = loss == "distillation"
    return LossInputs(
        logprobs_T=step.now_T,
        old_T=picked(batch.old_logprobs_N),
        behaviour_T=picked(batch.logprobs_N),
        advantages_T=advantages_T,
        weights_T=picked(batch.weights_N),
        sequence_T=sequence_T,
        reference_T=picked(batch.reference_logprobs_N),
        turn_T=torch.from_numpy(np.cumsum(np.diff(indices_T, prepend=indices_T[:1]) > 1)),
        scores_T=picked(np.repeat(batch.scores_B, batch.lengths_B)),
        pair_T=sequence_T // 2,
        age_T=torch.from_numpy(batch.version - batch.versions_N[indices_T].astype(np.int64)),
        teacher_TK=picked(batch.teacher_top_NK) if distils else None,
        student_TK=step.student_TK if distils else None,
        entropy_T=torch.ones_like(step.now_T),
        kl_weights_T=picked(batch.kl_weights_N),
        entropy_weights_T=picked(batch.entropy_weights_N),
    )


def measure(part: str, algorithm: dict[str, Any], step: Step) -> Cost:
    data = {"domains": {"bench": {"source": "none.jsonl"}}}
    recipe = RlvrRecipe.model_validate(
        {"model": {"path": "m"}, "data": data, "algorithm": algorithm}
    )
    config = recipe.algorithm
    credit, objective = CreditAssigner(recipe, base=None), build_objective(config)
    inputs = make_inputs(step, credit.assign(step.groups, step.batch)[0], config.loss.name)
    leaf = step.student_TK if config.loss.name == "distillation" else step.now_T

    def assign() -> object:
        return credit.assign(step.groups, step.batch)

    def differentiate() -> object:
        return torch.autograd.grad(objective(inputs).total, leaf)

    names = (config.advantage.name, config.loss.name, config.correction.name)
    return best_of(part, names, assign, differentiate)


def measure_value(step: Step) -> Cost:
    """The loss of a critic over the current values."""
    values_T = step.now_T.detach().clone().requires_grad_()
    inputs = ValueInputs(values_T, values_T.detach() + 0.1, step.now_T.detach(), values_T.detach())

    def differentiate() -> object:
        return torch.autograd.grad(value(inputs, ValueLoss()).loss_T.sum(), values_T)

    return best_of("value", ("", "value", ""), lambda: None, differentiate)


def best_of(
    part: str,
    names: tuple[str, str, str],
    assign: Callable[[], object],
    differentiate: Callable[[], object],
) -> Cost:
    """Repeats both; the result of `assign` stays alive during `differentiate`, as in a step."""
    seconds: list[tuple[float, float]] = []
    processor: list[float] = []
    held_mb = _reset_peak_mb()
    for _ in range(REPEATS):
        start, used = perf_counter(), process_time()
        credited = assign()
        middle = perf_counter()
        differentiate()
        seconds.append((middle - start, perf_counter() - middle))
        processor.append(process_time() - used)
        del credited
    first, second = min(seconds, key=sum)
    return Cost(
        part,
        *names,
        credit_s=round(first, 4),
        loss_s=round(second, 4),
        total_s=round(first + second, 4),
        processor_s=round(min(processor), 4),
        peak_mb=round(_status_mb("VmHWM") - held_mb, 1),
    )


def _reset_peak_mb() -> float:
    """Release freed memory, reset the peak, and return the current memory."""
    if not (PROCESS / "clear_refs").exists():
        return 0.0
    gc.collect()
    # Freed memory that the process keeps would hide the next measurement.
    with suppress(AttributeError):  # not every libc has it
        ctypes.CDLL(None).malloc_trim(0)
    (PROCESS / "clear_refs").write_text("5")
    return _status_mb("VmRSS")


def _status_mb(field: str) -> float:
    status = PROCESS / "status"
    actual = re.search(rf"{field}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(actual[1]) / 1024 if actual else 0.0


def mixtures() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every variant by name; its other parts are the defaults or those of ppo."""
    for name in NAMES["advantages"]:
        yield name, {"advantage": name}
    for name in NAMES["losses"]:
        yield name, {"loss": name}
    for name in NAMES["corrections"]:
        if not find_conflict("ppo", name):
            yield name, {"loss": "ppo", "correction": name}
    part = {"name": "decoupled", "old": "interpolated"}
    yield "interpolated", {"loss": "ppo", "correction": part}
    yield "discounted", {"advantage": {"name": "reinforce", "gamma": 0.99, "whiten": True}}
    yield "kl_in_loss", {"kl": {"coefficient": 0.1}, "entropy": 0.01}
    kl = {"coefficient": 0.1, "place": "reward"}
    yield "kl_in_reward", {"advantage": "reinforce++", "kl": kl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts by name; default: all")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    step = make_step(options.tokens)
    chosen = [(part, given) for part, given in mixtures() if part in (options.only or [part])]
    costs = [measure(part, given, step) for part, given in chosen]
    if not options.only or "value" in options.only:
        costs.append(measure_value(step))
    if options.json:
        facts = {
            "tokens": options.tokens,
            "threads": options.threads,
            "load_average": round(os.getloadavg()[0], 2),
            "bound": {"seconds": SECONDS, "mb": MEGABYTES},
            "over": [cost.part for cost in costs if not cost.within],
            "results": [asdict(cost) for cost in costs],
        }
        print(json.dumps(facts, indent=2))
        return
    for cost in costs:
        print(
            f"{cost.part:20} {cost.advantage:20} {cost.loss:13} {cost.correction:13} "
            f"{cost.credit_s:7.3f} s credit {cost.loss_s:7.3f} s loss {cost.total_s:7.3f} s "
            f"({cost.processor_s:.3f} s processor) {cost.peak_mb:7.1f} MB"
            f"{'' if cost.within else '  OVER'}"
        )


if __name__ == "__main__":
    main()

"""Step times of the native engine: records of each step and a fitted model.

    python benchmarks/engine_steps.py [--device cpu] [--shape tiny] [--out steps.jsonl]

Sequences of log-normal length run until the last one ends, so the batch shrinks from full to one.
Each step is recorded with its batch size, cached tokens, prefilled tokens and seconds.
benchmarks/scheduler.py simulates an engine with a fit of these records.
Weights are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from engine_native import SHAPES, make_model

from rollick.config.schema import InferConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine, Runner
from rollick.infer.native.weight_update import EngineWeights
from rollick.models.attention.slot_cache import CACHED
from rollick.models.loading.load import empty_model, share_parameters
from rollick.simulator.step_time import fit_step_time
from rollick.types import Request, SampleId, Sampling, StepRecord, frozen_array

PROMPT_TOKENS = 128
GROUP_SIZE = 8
MAX_LENGTH = 2048


def record_steps(runner: Runner, steps: list[StepRecord]) -> None:
    """From now on, append a record of every step of the runner."""
    plain = runner.step

    def step():
        prefilled, begun = runner.stats.prefilled_tokens, perf_counter()
        finished = plain()
        seconds = perf_counter() - begun
        batch = runner.table.count
        kv_tokens = int(runner.table.length[:batch].sum())
        steps.append(
            StepRecord(batch, kv_tokens, runner.stats.prefilled_tokens - prefilled, seconds)
        )
        return finished

    runner.step = step


async def record(shape_name: str, sequences: int, *, median: int, device: str) -> list[StepRecord]:
    shape = SHAPES[shape_name]
    model = make_model(shape, device=device)
    if device != "cpu":
        model = model.to(torch.bfloat16)
    module = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    infer = InferConfig(slots=sequences, max_length=MAX_LENGTH)
    engine = NativeEngine(
        EngineWeights(module, device=device, shared=True),
        infer,
        deterministic=False,
        stops=StopRules(),
    )
    random = np.random.default_rng(0)
    lengths = np.exp(np.log(median) + 0.9 * random.standard_normal(sequences)).astype(int)
    lengths = np.clip(lengths, 4, MAX_LENGTH - PROMPT_TOKENS - 1)
    groups = -(-sequences // GROUP_SIZE)
    prompts = random.integers(1, shape.vocabulary, (groups, PROMPT_TOKENS)).astype(np.int32)

    async def run(count: int, limit: int) -> None:
        requests = [
            Request(
                SampleId(number // GROUP_SIZE, number % GROUP_SIZE),
                frozen_array(prompts[number // GROUP_SIZE], np.int32),
                Sampling(max_tokens=min(int(lengths[number]), limit)),
                stream=number,
            )
            for number in range(count)
        ]
        await asyncio.gather(*(engine.generate(request) for request in requests))

    await run(sequences, 4)
    steps: list[StepRecord] = []
    record_steps(engine.runner, steps)
    await run(sequences, MAX_LENGTH)
    await engine.close()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--median", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps: list[StepRecord] = []
    for sequences in options.sequences:
        steps += asyncio.run(
            record(options.shape, sequences, median=options.median, device=options.device)
        )
    if options.out:
        lines = [json.dumps(asdict(step)) for step in steps]
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    fit = fit_step_time(steps)
    errors = {"mean_error": fit.mean_error, "worst_error": fit.worst_error}
    about = {"device": options.device, "shape": options.shape, "steps": fit.records}
    print(json.dumps({**about, **fit.step_time.model_dump(), **errors}))


if __name__ == "__main__":
    main()

"""The difference between the engine's and the learner's log-probs of the same tokens.

    python benchmarks/mismatch.py [--device cpu|cuda] [--json] [--tokens 10000] [--without vllm]

SmolLM2-135M, 32 samples at a time, at temperatures 0.7, 1.0 and 1.3; float32 on the CPU, bfloat16
on a GPU. The learner scores the sampled tokens, packed, as in training. Modes:

    plain          each side with its fastest kernels
    deterministic  run.deterministic (CPU)
    zero_mismatch  infer.zero_mismatch (GPU)

    k3             the mean of exp(d) - 1 - d over the differences d: an estimate of the KL
                   divergence between the two
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import traceback
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rollout_vllm import SMOLLM2

from rollick.config.schema import Recipe
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.infer.vllm.engine import VllmEngine
from rollick.models.loading.load import load_tokenizer
from rollick.testing.batches import completions_to_batch, recipe_of
from rollick.trainer.local import LocalStrategy
from rollick.types import Completion, Request, SampleId, Sampling, frozen_array

TEMPERATURES = (0.7, 1.0, 1.3)
NEW_TOKENS = 64
SLOTS = 32
QUESTIONS = ("What is {} plus {}?", "Write a story about {} cats and {} dogs.", "List {} of {}:")


def requests_of(recipe: Recipe, count: int, temperature: float) -> list[Request]:
    """Prompts of several lengths, in groups of 8, with NEW_TOKENS new tokens each."""
    tokenizer: Any = load_tokenizer(recipe.model)
    prompts: list[Any] = []
    for group in range(-(-count // 8)):
        text = QUESTIONS[group % len(QUESTIONS)].format(3 + group, 2 * group)
        prompts.append(frozen_array(tokenizer.encode(text * (1 + group % 4)), np.int32))
    return [
        Request(
            SampleId(number // 8, number % 8),
            prompts[number // 8],
            Sampling(temperature=temperature, max_tokens=NEW_TOKENS),
            stream=number,
        )
        for number in range(count)
    ]


def settings_of(device: str, mode: str, engine: str) -> Recipe:
    return recipe_of(
        SMOLLM2,
        model={"path": SMOLLM2, "dtype": "float32" if device == "cpu" else "bfloat16"},
        run={"deterministic": mode == "deterministic"},
        infer={
            "engine": engine,
            "slots": SLOTS if device == "cpu" else 256,
            "max_length": 256,
            "zero_mismatch": mode == "zero_mismatch",
            "vllm": {"kv_cache_gb": 1.0},
        },
    )


async def generate_all(
    engine: Any, batches: Sequence[list[Request]]
) -> tuple[list[Any], list[float]]:
    completions: list[list[Completion]] = []
    seconds: list[float] = []
    for requests in batches:
        begun = perf_counter()
        completions.append(await asyncio.gather(*(engine.generate(one) for one in requests)))
        seconds.append(perf_counter() - begun)
    await engine.close()
    return completions, seconds


async def measure(device: str, mode: str, name: str, *, tokens: int) -> list[dict[str, Any]]:
    recipe = settings_of(device, mode, name)
    strategy = LocalStrategy(recipe, device=device, trainable=False)
    options: dict[str, Any] = {"device": device, "stops": StopRules()}
    if name == "native":
        shared = {"deterministic": mode == "deterministic", "shared": strategy.module}
        engine: Any = NativeEngine.create(recipe.infer, recipe.model, **options, **shared)
    else:
        engine = VllmEngine.create(recipe.infer, recipe.model, **options)
    count = -(-tokens // NEW_TOKENS)
    # The first batch warms up.
    temperatures = [TEMPERATURES[0], *TEMPERATURES]
    batches = [requests_of(recipe, count, temperature) for temperature in temperatures]
    completions, seconds = await generate_all(engine, batches)
    rows: list[dict[str, Any]] = []
    for index in range(1, len(temperatures)):
        batch = completions_to_batch(batches[index], completions[index])
        begun = perf_counter()
        own_N = strategy.logprobs(batch).astype(np.float64)
        scored_s = perf_counter() - begun
        gap = (own_N - batch.logprobs_N)[batch.loss_mask_N]
        rows.append(
            {
                "engine": name,
                "mode": mode,
                "temperature": temperatures[index],
                "tokens": len(gap),
                "mean_abs": float(np.abs(gap).mean()),
                "max_abs": float(np.abs(gap).max()),
                "mean_k3": float((np.expm1(gap) - gap).mean()),
                "equal": float((gap == 0).mean()),
                "mean_logprob": float(batch.logprobs_N[batch.loss_mask_N].mean()),
                "engine_tokens_per_s": round(len(gap) / seconds[index]),
                "learner_tokens_per_s": round(batch.tokens / scored_s),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--without", nargs="*", choices=("native", "vllm"), default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    exact = "deterministic" if options.device == "cpu" else "zero_mismatch"
    sides = [("plain", "native"), (exact, "native"), ("plain", "vllm")]
    actual: list[dict[str, Any]] = []
    for mode, name in sides:
        if name in options.without:
            continue
        try:
            rows = asyncio.run(measure(options.device, mode, name, tokens=options.tokens))
        except Exception:
            rows = [{"engine": name, "mode": mode, "error": traceback.format_exc()[-2000:]}]
        for row in rows:
            print(row, file=sys.stderr, flush=True)
        actual += rows
        gc.collect()
        torch._dynamo.reset()
    if options.json:
        print(json.dumps({"device": options.device, "rows": actual}))


if __name__ == "__main__":
    main()

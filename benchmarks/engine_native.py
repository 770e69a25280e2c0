"""Tokens per second of the native engine, beside transformers' generate in the same run.

    python benchmarks/engine_native.py [--json] [--threads 2] [--device cpu] [--shape tiny ...]

Weights are random: speed does not depend on them. Both generate the same number of tokens for the
same prompts (asserted); the native engine also returns log-probs. Two shapes: `tiny` (2 layers,
hidden 128, 256 sequences) shows the overhead of a step, `smollm2-135m` its arithmetic.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import asdict, dataclass
from time import perf_counter

import numpy as np
import torch
from rollout_vllm import GROUP_SIZE, PROMPT_TOKENS, random_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from rollick.config.schema import InferConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.infer.native.weight_update import EngineWeights
from rollick.models.attention.slot_cache import CACHED
from rollick.models.loading.load import empty_model, share_parameters
from rollick.types import Request, SampleId, Sampling, frozen_array


@dataclass(frozen=True)
class Shape:
    """A model's sizes and the amount of work."""

    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    sequences: int
    tokens: int


SHAPES = {
    "tiny": Shape(128, 384, 2, 4, 2, 96, sequences=256, tokens=64),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 49152, sequences=32, tokens=64),
}


@dataclass(frozen=True)
class Speed:
    """One measurement."""

    engine: str
    shape: str
    tokens_per_s: float
    step_ms: float


def make_model(shape: Shape, *, device: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inter,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().to(device)


async def time_native(
    model: LlamaForCausalLM, shape: Shape, *, device: str, deterministic: bool
) -> float:
    module = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    engine = NativeEngine(
        EngineWeights(module, device=device, shared=True),
        InferConfig(slots=shape.sequences, max_length=2048),
        deterministic=deterministic,
        stops=StopRules(),
    )

    prompts = random_prompts(shape.sequences, vocabulary=shape.vocabulary)

    async def generate_all(tokens: int) -> float:
        started = perf_counter()
        completions = await asyncio.gather(
            *(
                engine.generate(
                    Request(
                        SampleId(number // GROUP_SIZE, number % GROUP_SIZE),
                        frozen_array(ids, np.int32),
                        Sampling(max_tokens=tokens),
                        stream=number,
                    )
                )
                for number, ids in enumerate(prompts)
            )
        )
        seconds = perf_counter() - started
        assert [len(c.token_ids) for c in completions] == [tokens] * shape.sequences
        return seconds

    await generate_all(4)
    seconds = await generate_all(shape.tokens)
    await engine.close()
    return seconds


def time_transformers(model: LlamaForCausalLM, shape: Shape, *, device: str) -> float:
    prompts = random_prompts(shape.sequences, vocabulary=shape.vocabulary)
    ids = torch.tensor(prompts, device=device)

    def generate_all(tokens: int) -> float:
        started = perf_counter()
        sequences = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
        ).cpu()
        seconds = perf_counter() - started
        assert sequences.shape == (shape.sequences, PROMPT_TOKENS + tokens)
        return seconds

    generate_all(4)
    return generate_all(shape.tokens)


def measure(name: str, *, device: str) -> list[Speed]:
    shape = SHAPES[name]
    model = make_model(shape, device=device)
    seconds = {
        "native": asyncio.run(time_native(model, shape, device=device, deterministic=False)),
        "transformers": time_transformers(model, shape, device=device),
        "native, deterministic": asyncio.run(
            time_native(model, shape, device=device, deterministic=True)
        ),
    }
    return [
        Speed(
            engine,
            name,
            tokens_per_s=round(shape.sequences * shape.tokens / spent, 1),
            step_ms=round(1000 * spent / shape.tokens, 2),
        )
        for engine, spent in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    speeds = [speed for name in options.shape for speed in measure(name, device=options.device)]
    if options.json:
        facts = {
            "device": options.device,
            "threads": options.threads,
            "load_average": round(os.getloadavg()[0], 2),
            "results": [asdict(speed) for speed in speeds],
        }
        print(json.dumps(facts, indent=2))
        return
    for speed in speeds:
        print(
            f"{speed.shape:14} {speed.engine:24} "
            f"{speed.tokens_per_s:9.1f} tokens/s {speed.step_ms:9.2f} ms a step"
        )


if __name__ == "__main__":
    main()

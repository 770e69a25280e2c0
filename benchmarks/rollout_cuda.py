"""Tokens per second of the native engine on one GPU, and its share of the memory bandwidth.

    python benchmarks/rollout.py --device cuda [--json] [--sizes 256 1024] [--shapes 135M 7B]
                                 [--without vllm]

Prefill, scheduling, the event loop, stop conditions and log-probs are included. SmolLM2-135M has
its own weights, the Qwen2.5 shapes have random ones; all compute in bfloat16. Prompts are 128
random tokens in groups of 8, and every request generates 256 tokens with log-probs (asserted). The
first round of a size warms up (compilation, graphs); the best of three others counts. vLLM
generates the same up to 1.5B, with the settings of rollout_vllm.json.

    ratio_vllm   tokens per second, native over vLLM

    of_memory    what reading all weights and all keys and values once a step would take, at the
                 bandwidth given, over the time that a step took
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import traceback
from time import perf_counter
from typing import Any

import numpy as np
import torch
from qwen_shapes import QWEN_SHAPES
from rollout_vllm import GROUP_SIZE, SMOLLM2, random_prompts, run_vllm
from transformers import AutoModelForCausalLM

from rollick.config.schema import InferConfig, ModelConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.infer.native.gpu.forward import ForwardOptions
from rollick.infer.native.gpu.runner import PagedRunner
from rollick.infer.native.weight_update import EngineWeights
from rollick.models.attention.slot_cache import CACHED
from rollick.models.decoder.fused_linear import fuse_storage
from rollick.models.loading.load import load_model
from rollick.types import Request, SampleId, Sampling, frozen_array

DEVICE = "cuda"
PROMPT_TOKENS = 128
NEW_TOKENS = 256
ROUNDS = 3
MEMORY_BYTES_S = 4.3e12
"""What an H200 reads in a second when nothing else limits it."""

BESIDE_VLLM = ("135M", "0.5B", "1.5B")
SHAPES: dict[str, Any] = {"135M": None, **QWEN_SHAPES}


def load_module(shape: str) -> Any:
    """SmolLM2 itself, or random weights."""
    config = SHAPES[shape]
    if config is None:
        model = ModelConfig(path=SMOLLM2, dtype="bfloat16")
        return load_model(model, device=DEVICE, attention=CACHED)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=CACHED
        ).eval()


def make_prompts(sequences: int, vocabulary: int) -> list[list[int]]:
    return random_prompts(sequences, vocabulary=vocabulary, length=PROMPT_TOKENS)


def make_requests(sequences: int, vocabulary: int, *, number: int) -> list[Request]:
    """The requests of round `number`."""
    return [
        Request(
            SampleId(index // GROUP_SIZE, index % GROUP_SIZE),
            frozen_array(ids, np.int32),
            Sampling(max_tokens=NEW_TOKENS),
            stream=number * sequences + index,
        )
        for index, ids in enumerate(make_prompts(sequences, vocabulary))
    ]


def make_engine(
    module: Any, *, sequences: int, options: ForwardOptions | None = None
) -> NativeEngine:
    infer = InferConfig(slots=sequences, max_length=PROMPT_TOKENS + NEW_TOKENS)
    # Ids that no token has: stop checks run, and the work is the same each time.
    stops = StopRules(tuple(range(module.config.vocab_size, module.config.vocab_size + 4)))
    fuse_storage(module)
    engine = NativeEngine(EngineWeights(module, device=DEVICE, shared=True), infer, stops=stops)
    engine.runner = PagedRunner(module, infer, device=DEVICE, stops=stops, options=options)
    return engine


async def run_native(
    module: Any, *, sequences: int, options: ForwardOptions | None = None
) -> dict[str, Any]:
    """Seconds of each round, without the start."""
    engine = make_engine(module, sequences=sequences, options=options)
    runner: Any = engine.runner
    seconds: list[float] = []
    steps: list[int] = []
    for number in range(ROUNDS + 1):
        requests = make_requests(sequences, module.config.vocab_size, number=number)
        # Drop the prompts that the previous round left in the cache.
        runner.forget_prefixes()
        before = runner.stats.decode_steps
        started = perf_counter()
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        seconds.append(perf_counter() - started)
        steps.append(runner.stats.decode_steps - before)
        assert sum(len(one.token_ids) for one in completions) == sequences * NEW_TOKENS
        assert all(np.isfinite(one.logprobs).all() for one in completions)
        assert all(len(one.logprobs) == NEW_TOKENS for one in completions)
    measured = {
        "tokens_per_s": round(sequences * NEW_TOKENS / min(seconds[1:])),
        "seconds": [round(each, 4) for each in seconds[1:]],
        "start_s": round(seconds[0] - min(seconds[1:]), 2),
        "steps": steps[1:],
        "step_ms": round(1000 * min(seconds[1:]) / NEW_TOKENS, 3),
        "options": str(runner.forward.options),
    }
    await engine.close()
    return measured


def step_bytes(module: Any, *, sequences: int) -> int:
    """Weights and keys and values that a decode step in the middle of the round reads."""
    config = module.config
    weights = sum(parameter.nbytes for parameter in module.parameters())
    if not config.tie_word_embeddings:
        # Of the embedding only the rows of the tokens are read.
        weights -= module.get_input_embeddings().weight.nbytes
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    length = PROMPT_TOKENS + NEW_TOKENS // 2
    return weights + 2 * 2 * config.num_hidden_layers * heads * dim * length * sequences


def free_memory() -> None:
    """Free what the last measurement left."""
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def measure(shape: str, *, sequences: int, bandwidth: float) -> dict[str, Any]:
    module = load_module(shape)
    try:
        measured = asyncio.run(run_native(module, sequences=sequences))
        moved = step_bytes(module, sequences=sequences)
    finally:
        del module
        free_memory()
    ideal_ms = 1000 * moved / bandwidth
    return {
        "shape": shape,
        "sequences": sequences,
        **measured,
        "read_gb": round(moved / 1e9, 2),
        "ideal_ms": round(ideal_ms, 3),
        "of_memory": round(ideal_ms / measured["step_ms"], 3),
    }


def measure_vllm(shape: str, *, sequences: int) -> dict[str, Any]:
    """The same model and prompts."""
    with tempfile.TemporaryDirectory() as folder:
        module = load_module(shape)
        vocabulary = module.config.vocab_size
        if SHAPES[shape] is not None:
            module.save_pretrained(folder)
        del module
        free_memory()
        run = run_vllm(
            make_prompts(sequences, vocabulary),
            tokens=NEW_TOKENS,
            device=DEVICE,
            model=SMOLLM2 if SHAPES[shape] is None else folder,
            dtype="bfloat16",
            rounds=ROUNDS,
        )
    assert run.tokens == sequences * NEW_TOKENS
    return {
        "shape": shape,
        "sequences": sequences,
        "tokens_per_s": run.tokens_per_s,
        "start_s": run.start_s,
        "version": run.version,
    }


def catch_failure(measurement: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Run a measurement; one that fails does not stop the others."""
    try:
        return measurement(*arguments, **options)
    except Exception:
        return {"error": traceback.format_exc()[-3000:], "arguments": [*arguments, options]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", default=None, help="a file for the results")
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--bandwidth", type=float, default=MEMORY_BYTES_S)
    parser.add_argument("--without", nargs="*", choices=("vllm",), default=[])
    options = parser.parse_args()
    entries = [("135M", size) for size in options.sizes]
    entries += [(shape, 256) for shape in options.shapes if (shape, 256) not in entries]
    results: list[dict[str, Any]] = []
    for shape, size in entries:
        measured = catch_failure(measure, shape, sequences=size, bandwidth=options.bandwidth)
        if shape in BESIDE_VLLM and "vllm" not in options.without:
            other = catch_failure(measure_vllm, shape, sequences=size)
            measured["vllm"] = other
            if "error" not in measured and "error" not in other:
                measured["ratio_vllm"] = round(measured["tokens_per_s"] / other["tokens_per_s"], 2)
        results.append(measured)
        shown = {
            key: measured[key] for key in measured if key not in ("steps", "options", "seconds")
        }
        print(shown, file=sys.stderr, flush=True)
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    text = json.dumps({**facts, "runs": results}, indent=1)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(text)
    if options.json:
        print(text)


if __name__ == "__main__":
    main()

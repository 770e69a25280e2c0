"""Draw docs/pictures/rlvr_multidomain_*.png from the recorded metrics in docs/results/."""

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
RUNS = {
    "tiny": (("math", "code", "general"), "A tiny model on two cores"),
    "smollm2": (("math", "code", "instructions"), "SmolLM2-135M-Instruct on one H200"),
}
"""Which runs there are: their domains and what they are of."""

for name, (domains, title) in RUNS.items():
    paths = sorted((HERE / "results").glob(f"rlvr_multidomain_{name}_seed*.jsonl"))
    if not paths:
        continue
    figure = Figure(figsize=(4 * len(domains), 3.6), layout="constrained")
    for axes, domain in zip(figure.subplots(1, len(domains), sharey=True), domains, strict=True):
        for path in paths:
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            key = f"eval/{domain}/pass@1"
            points = [(r["step"], r[key], r[f"{key}_interval"]) for r in rows if key in r]
            steps, values, halves = zip(*points, strict=True)
            label = path.stem.rpartition("_")[2].replace("seed", "seed ")
            axes.errorbar(steps, values, halves, marker="o", capsize=3, label=label)
        axes.set(title=domain, xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("right answers, held out")
    figure.axes[0].legend(loc="upper left")
    figure.suptitle(title)
    figure.savefig(HERE / "pictures" / f"rlvr_multidomain_{name}.png", dpi=110)

"""Draw docs/pictures/GAME_MODEL.png from what benchmarks/games.py wrote, in docs/results/."""

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
GOALS = {"frozen_lake": 0.85, "sokoban": 0.60, "webshop": 0.60, "tools_math": 0.90}
TITLES = {"tiny": "a tiny model on two cores", "smollm2": "SmolLM2-135M-Instruct on one H200"}

for game, goal in GOALS.items():
    for model, title in TITLES.items():
        path = HERE / "results" / f"{game}_{model}.json"
        if not path.is_file():
            continue
        figure = Figure(figsize=(6, 3.8), layout="constrained")
        axes = figure.subplots()
        for seed, run in json.loads(path.read_text("utf-8"))["seeds"].items():
            steps, success, _ = zip(*run["curve"], strict=True)
            axes.plot(steps, success, marker="o", label=f"seed {seed}")
        axes.axhline(goal, color="black", linestyle=":", label="goal")
        axes.set(xlabel="step of RL", ylabel="held-out tasks solved, greedy", ylim=(0, 1))
        axes.set_title(f"{game.replace('_', ' ')}, {title}")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        figure.savefig(HERE / "pictures" / f"{game}_{model}.png", dpi=110)

"""Seconds of the commands that must answer at once, beside those of an empty Python.

    python benchmarks/start_up.py [--json] [--rounds 5]

Each round starts every command once, in a process of its own; the best round counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

RECIPE = """\
model: {path: tiny}
data: {domains: {sums: {source: sums.jsonl, rewards: [exact_match]}}}
"""
SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "vocab_size": 100,
}
COMMANDS = {
    "python": ["-c", "pass"],
    "import rollick": ["-c", "import rollick"],
    "rollick --help": ["-m", "rollick", "--help"],
    "rollick check": ["-m", "rollick", "check", "recipe.yaml"],
}


def seconds(folder: Path, arguments: list[str]) -> float:
    start = perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, check=True)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(RECIPE)
        (folder / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
        (folder / "tiny").mkdir()
        (folder / "tiny" / "config.json").write_text(json.dumps(SIZES))
        rounds = [
            {name: seconds(folder, arguments) for name, arguments in COMMANDS.items()}
            for _ in range(options.rounds)
        ]
    best = {name: round(min(each[name] for each in rounds), 3) for name in COMMANDS}
    if options.json:
        print(json.dumps(best))
    else:
        print("\n".join(f"{name:<16}{value:.3f} s" for name, value in best.items()))


if __name__ == "__main__":
    main()

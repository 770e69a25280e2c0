"""Five short deterministic runs must end with the weights and metrics recorded for them.

A change that is not meant to alter the results of a run must keep these records. After a change
that is meant to, run `python tests/scenarios/test_scenario_recorded_runs.py` once on each kind of
machine in the file, or remove the records of the other machines.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from rollick import RunResult, run_recipe
from rollick.config.load import recipe_from_dict
from rollick.observe.metrics import read_metrics
from rollick.testing.tiny import save_tiny

RECORDS = Path(__file__).with_name("recorded_runs.json")
CLOCKED = ("time/", "speed/", "controller/event_loop_lag", "env/seconds", "memory/")
"""Metrics that depend on the clock or on the machine's memory."""

ENVIRONMENT = '''
from rollick import TextEnv

class Guess(TextEnv):
    """The letter that the seed names, in two tries."""
    def __init__(self):
        self.tries = 0
    def reset(self, seed):
        self.wanted = "abcd"[seed % 4]
        return self.wanted, {"state": self.wanted}
    def step(self, action):
        self.tries += 1
        won = action == self.wanted
        over = won or self.tries == 2
        return "?", float(won), won, over and not won, {"success": won, "state": "again"}
'''
TOYS = "rollick.testing.toys"
LETTERS = {"source": f"{TOYS}:letter_rows", "rewards": [f"{TOYS}:says_letter"]}


def make_recipes(folder: Path) -> dict[str, dict[str, Any]]:
    """The recipe of each run, over models and files that are written to the folder."""
    (folder / "guess.py").write_text(ENVIRONMENT, encoding="utf-8")
    model = {"path": str(save_tiny(folder / "model"))}
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "max_length": 32}
    guesser = {"path": str(save_tiny(folder / "guesser", alphabet="abcdefgh?", **sizes))}
    domains = {"domains": {"letters": LETTERS}, "validation": {"letters": LETTERS}}
    rollout = {"groups_per_step": 4, "group_size": 4}
    sampling = {"max_tokens": 3}
    environment = {"limit": 8, "environment": {"name": "guess.py:Guess", "turn_tokens": 2}}
    pairs = {"source": f"{TOYS}:echo_pairs", "chosen": "answer", "rejected": "wrong"}
    answers = {"source": f"{TOYS}:letter_rows", "completion": "answer"}
    supervised = {"batch_size": 8, "optimizer": {"lr": 3e-3}}
    grpo = {"preset": "grpo", "kl": {"coefficient": 0.01}}
    infer = {"slots": 16, "max_length": 32}
    shared = {"model": model, "data": domains, "sampling": sampling, "rollout": rollout}
    rl_sections = {**shared, "infer": infer}
    return {
        "rlvr": {**rl_sections, "algorithm": grpo},
        "ppo": {**rl_sections, "algorithm": "ppo"},
        "agentic": {
            "pipeline": "agentic",
            "model": guesser,
            "data": {"domains": {"letters": environment}, "validation": {"letters": environment}},
            "sampling": {"max_tokens": 6},
            "rollout": {"groups_per_step": 4, "group_size": 8},
            "infer": infer,
        },
        "sft": {
            "pipeline": "sft",
            "model": model,
            "data": {"domains": {"letters": answers}},
            "train": supervised,
        },
        "dpo": {
            "pipeline": "dpo",
            "model": model,
            "data": {"domains": {"letters": pairs}},
            "train": supervised,
        },
    }


def run(name: str, folder: Path) -> RunResult:
    common = {
        "run": {
            "name": name,
            "folder": str(folder / "runs"),
            "steps": 4,
            "threads": 1,
            "deterministic": True,
        },
        "train": {"optimizer": {"lr": 3e-3}},
        "cluster": {"backend": "inline"},
        "evaluate": {"at_start": False},
        "observe": {"sinks": [], "live": "off"},
    }
    return run_recipe(recipe_from_dict(common | make_recipes(folder)[name], base_dir=folder))


def record(result: RunResult) -> dict[str, Any]:
    """The hash of the final learner's files, and the metrics of every step."""
    learner = sorted((result.folder / "checkpoints").glob("step-*"))[-1] / "learner"
    digest = hashlib.sha256()
    for file in sorted(learner.rglob("*.safetensors")):
        digest.update(file.relative_to(learner).as_posix().encode())
        digest.update(file.read_bytes())
    rows = read_metrics(result.folder / "metrics.jsonl")
    return {
        "weights": digest.hexdigest(),
        "metrics": [{k: v for k, v in r.items() if not k.startswith(CLOCKED)} for r in rows],
    }


def machine() -> str:
    """The torch version and the kind of CPU, which determine the exact bits of a result."""
    version, capability = torch.__version__.split("+")[0], torch.backends.cpu.get_cpu_capability()
    return f"torch {version}, {platform.machine()} {capability}"


@pytest.mark.parametrize("name", ["rlvr", "ppo", "agentic", "sft", "dpo"])
def test_a_run_ends_with_its_recorded_weights_and_metrics(name: str, tmp_path: Path) -> None:
    recorded = json.loads(RECORDS.read_text("utf-8")).get(machine())
    if recorded is None:
        pytest.skip("the runs were recorded with another torch or another kind of CPU")
    assert json.loads(json.dumps(record(run(name, tmp_path)))) == recorded[name]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: record(run(name, Path(folder))) for name in make_recipes(Path(folder))}
    records = json.loads(RECORDS.read_text("utf-8")) | {machine(): runs}
    text = json.dumps(records, indent=1, sort_keys=True)
    RECORDS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

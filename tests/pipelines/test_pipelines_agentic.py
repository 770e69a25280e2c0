"""Runs with environments: training, validation, records, failure counts and resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollick.commands.env import run_model_episodes
from rollick.commands.export import export_run
from rollick.config.load import LoadedRecipe, load_recipe, recipe_from_dict
from rollick.envs.base import make_env
from rollick.envs.frozen_lake import FrozenLake
from rollick.episodes.recorded import describe_episode, rerun_episode
from rollick.errors import ConfigError
from rollick.observe.metric_table import is_documented
from rollick.observe.metrics import read_metrics
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunObjects, RunResult
from rollick.testing.tiny import save_tiny
from rollick.testing.toys import without_rollout

ENVS = '''
import os, time
from rollick import TextEnv

class Guess(TextEnv):
    """Wants the letter that the seed names, in two tries. If it is bad, the first step of all hangs
    and some replies break it, and each time that is written down."""
    def __init__(self, *, log="", bad=False):
        self.log, self.bad, self.tries = log, bad, 0
    def note(self, what):
        if self.log:
            with open(self.log, "a") as file:
                file.write(what + "\\n")
    def is_the_first(self):
        try:
            os.close(os.open(self.log + ".first", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
    def reset(self, seed):
        self.wanted = "abcd"[seed % 4]
        self.note("reset")
        return self.wanted, {"state": self.wanted}
    def step(self, action):
        self.tries += 1
        what = {"e": "failed", "f": "failed", "g": "garbage"}.get(action[:1])
        if self.bad and self.is_the_first():
            what = "timeout"
        if self.bad and what:
            self.note(what)
            if what == "failed":
                raise ValueError("bad luck")
            if what == "garbage":
                return action
            time.sleep(600)
        won = action == self.wanted
        over = won or self.tries == 2
        return "?", float(won), won, over and not won, {"success": won, "state": "again"}
    def solve(self):
        return self.wanted
'''
LETTERS = "abcdefgh?"
RECIPES = Path(__file__).parents[2] / "recipes"
PRODUCTS = Path(__file__).parents[2] / "../shared/data/webshop_products.jsonl.gz"
GAMES = [
    f"{game}{warm}{model}"
    for game in ("frozen_lake", "sokoban", "webshop", "tools_math")
    for warm in ("", "_warm_up")
    for model in ("", "_smollm2")
]


def make_recipe(folder: Path, *, bad: bool = False, pipeline: str = "agentic") -> dict[str, Any]:
    (folder / "mine.py").write_text(ENVS)
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "max_length": 32}
    model = save_tiny(folder / "model", alphabet=LETTERS, **sizes)
    environment: dict[str, Any] = {"name": "mine.py:Guess", "turn_tokens": 2}
    training = {**environment, "options": {"log": str(folder / "log"), "bad": bad}}
    return {
        "pipeline": pipeline,
        "run": {"steps": 3, "folder": str(folder / "runs"), "threads": 1, "stuck_after_s": 60},
        "model": {"path": str(model)},
        "data": {
            "domains": {"letters": {"limit": 8, "environment": training}},
            "validation": {"letters": {"limit": 8, "environment": environment}},
        },
        "sampling": {"max_tokens": 6},
        "rollout": {"groups_per_step": 4, "group_size": 8},
        "train": {"optimizer": {"lr": 0.05}},
        "infer": {"slots": 16, "max_length": 24},
        "cluster": {"backend": "inline"},
        "observe": {"sinks": [], "live": "off", "samples_per_step": 1000},
        "evaluate": {"at_start": True},
    }


def load(recipe: dict[str, Any], folder: Path) -> LoadedRecipe:
    return recipe_from_dict(recipe, base_dir=folder)


def read_rows(result: RunResult, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("agentic")
    recipe = make_recipe(folder)
    recipe["algorithm"] = {"advantage": "gigpo"}
    recipe["run"] |= {"steps": 12, "deterministic": True}
    return run_recipe(load(recipe, folder))


def test_a_policy_learns_what_its_environment_rewards(full_run: RunResult) -> None:
    success = [row["env/success"] for row in read_rows(full_run, "metrics.jsonl") if row["step"]]
    assert success[0] < 0.5
    assert sum(success[-3:]) / 3 > success[0] + 0.2


def test_every_metric_of_an_agentic_run_is_documented(full_run: RunResult) -> None:
    logged = {name for row in read_rows(full_run, "metrics.jsonl") for name in row} - {"step"}
    assert {name for name in logged if not is_documented(name)} == set()
    assert {"env/success", "env/turns", "env/episodes", "eval/pass@1"} <= logged


def test_the_samples_of_a_group_play_one_puzzle_and_are_recorded(full_run: RunResult) -> None:
    rows = read_rows(full_run, "samples.jsonl")
    seeds: dict[str, set[int]] = {}
    for row in rows:
        seeds.setdefault(row["sample"].split(".")[0], set()).add(row["episode"]["seed"])
        assert row["prompt"] == "abcd"[row["episode"]["seed"] % 4]
        assert row["score"] == sum(row["episode"]["rewards"])
        assert len(row["episode"]["replies"]) in (1, 2)
    assert len(seeds) == 48
    assert {len(distinct) for distinct in seeds.values()} == {1}


def test_validation_plays_other_seeds_the_same_ones_each_time(full_run: RunResult) -> None:
    rows = read_rows(full_run, "validation.jsonl")
    training = {row["episode"]["seed"] for row in read_rows(full_run, "samples.jsonl")}
    by_step = {
        step: [row["episode"]["seed"] for row in rows if row["step"] == step] for step in (0, 12)
    }
    assert by_step[0] == by_step[12]
    assert len(set(by_step[0])) == 8
    assert not training & set(by_step[0])


def test_environments_that_raise_hang_or_return_garbage_are_counted_exactly(
    tmp_path: Path,
) -> None:
    recipe = make_recipe(tmp_path, bad=True)
    recipe["rollout"] |= {"max_failed_scores": 1}
    recipe["environments"] = {"step_timeout_s": 5, "processes": 2}
    recipe["rollout"] |= {"drop_no_signal": False}
    recipe["train"] |= {"optimizer": {"lr": 1e-6}}
    result = run_recipe(load(recipe, tmp_path))
    log_counts = Counter((tmp_path / "log").read_text().split())
    metrics = read_metrics(result.folder / "metrics.jsonl")
    failures = {
        name.removeprefix("env/failed/"): int(value)
        for name, value in metrics[-1].items()
        if name.startswith("env/failed/")
    }
    logged_failures = {name: count for name, count in log_counts.items() if name != "reset"}
    assert set(logged_failures) == {"failed", "garbage", "timeout"}
    assert logged_failures["timeout"] == 1
    assert {name: n for name, n in failures.items() if name != "lost"} == logged_failures
    assert metrics[-1]["env/restarts"] == log_counts["timeout"]
    # Episodes that the hang lost restart, and none fails because of it.
    episodes = sum(row.get("env/episodes", 0) for row in metrics)
    assert episodes == 3 * 32
    assert episodes <= log_counts["reset"] <= episodes + metrics[-1]["env/episode_restarts"]
    assert metrics[-1]["env/episode_restarts"] == failures["lost"] > 0
    assert result.step == 3


def test_a_stopped_and_resumed_run_reaches_the_same_weights(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    recipe["run"] |= {"steps": 4, "deterministic": True, "name": "at_once"}
    uninterrupted = run_recipe(load(recipe, tmp_path))
    for steps in (2, 4):
        recipe["run"] |= {"steps": steps, "name": "in_two"}
        resumed = run_recipe(load(recipe, tmp_path), resume=steps == 4)
    names = ("score/mean", "train/loss", "train/grad_norm", "eval/pass@1")
    assert [uninterrupted.metrics[name] for name in names] == [
        resumed.metrics[name] for name in names
    ]


def test_the_solver_can_be_imitated_and_the_result_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, pipeline="sft")
    recipe = without_rollout(recipe)
    recipe["run"]["steps"] = 25
    recipe["train"]["batch_size"] = 16
    recipe["observe"] = {"sinks": [], "live": "off"}
    result = run_recipe(load(recipe, tmp_path))
    assert result.metrics["train/loss"] < 1
    assert result.metrics["eval/pass@1"] > 0.5
    monkeypatch.chdir(tmp_path)
    report = run_model_episodes(str(result.folder), "mine.py:Guess", options={}, episodes=8)
    assert (report.episodes, report.errors) == (8, 0)
    assert 1.0 <= report.steps <= 2.0
    assert report.success == report.reward > 0.5


def test_each_step_can_be_a_segment_of_its_own(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    recipe["data"]["domains"]["letters"]["environment"]["window"] = 1
    recipe["data"]["validation"]["letters"]["environment"]["window"] = 1
    recipe["algorithm"] = {"advantage": "gigpo"}
    recipe["rollout"] |= {"drop_no_signal": False}
    recipe["run"] |= {"steps": 1}
    result = run_recipe(load(recipe, tmp_path))
    turns = Counter(len(row["episode"]["replies"]) for row in read_rows(result, "samples.jsonl"))
    assert turns[1] + turns[2] == 32
    assert turns[2] > 0
    two_turns = [
        row for row in read_rows(result, "samples.jsonl") if len(row["episode"]["replies"]) == 2
    ]
    assert all(row["response"] == "\n".join(row["episode"]["replies"]) for row in two_turns)


def test_a_run_whose_policy_summarises_counts_and_trains_every_summary(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    window = {"window": {"turns": 1, "summary": {"tokens": 3, "request": "?"}}}
    recipe["data"]["domains"]["letters"]["environment"] |= window
    recipe["data"]["validation"]["letters"]["environment"] |= window
    recipe["algorithm"] = {"advantage": "gigpo"}
    recipe["sampling"]["max_tokens"] = 12
    recipe["rollout"] |= {"drop_no_signal": False}
    recipe["run"] |= {"steps": 1}
    result = run_recipe(load(recipe, tmp_path))
    rows = read_rows(result, "samples.jsonl")
    episodes = [row["episode"] for row in rows]
    assert len(rows) == 32
    # An episode of two turns has one summary, after the first turn; a finished one gets none.
    for row, episode in zip(rows, episodes, strict=True):
        assert [before for before, _ in episode["summaries"]] == [1] * (len(episode["replies"]) - 1)
        assert len(episode["rewards"]) == len(episode["replies"])
        assert row["response"] == "\n".join(episode["replies"])
    written = sum(len(episode["summaries"]) for episode in episodes)
    assert written > 0
    assert result.metrics["env/summaries"] == written / 32
    assert result.metrics["train/tokens"] == sum(row["response_tokens"] for row in rows)
    summarised = next(row for row in rows if row["episode"]["summaries"])
    rerun = rerun_episode(summarised["episode"], base=tmp_path)
    lines = describe_episode(summarised, rerun).splitlines()
    assert "~ " + summarised["episode"]["summaries"][0][1].splitlines()[0] in lines


def test_domains_with_and_without_an_environment_are_mixed_by_share(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    recipe["data"]["domains"]["plain"] = {
        "source": "object:rows", "rewards": ["exact_match"], "share": 1.0,
    }  # fmt: skip
    recipe["run"]["steps"] = 1
    recipe["rollout"] |= {"drop_no_signal": False}
    rows = [{"prompt": letter, "answer": letter} for letter in "abcd"]
    objects = RunObjects(prompts={"rows": rows})
    loaded = recipe_from_dict(recipe, base_dir=tmp_path, objects=objects.names)
    result = run_recipe(loaded, objects=objects)
    episodes = Counter("episode" in row for row in read_rows(result, "samples.jsonl"))
    assert episodes == {True: 16, False: 16}


AGENT = """
import json, os, sys, time, urllib.request

def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 2}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

task = json.loads(os.environ["ROLLICK_TASK"])
if task["answer"] == "d":
    sys.exit("no idea")
if task["answer"] == "c":
    time.sleep(60)
said = ask([{"role": "user", "content": task["prompt"]}])
again = ask([{"role": "user", "content": task["prompt"]},
             {"role": "assistant", "content": said}, {"role": "user", "content": "?"}])
ask([{"role": "user", "content": "?"}])
print(again)
"""


def test_an_agent_that_only_knows_a_base_url_is_trained_and_its_failures_are_counted(
    tmp_path: Path,
) -> None:
    recipe = make_recipe(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    domain = {"source": "object:rows", "rewards": ["exact_match"], "agent": "agent.py"}
    recipe["data"] = {"domains": {"letters": domain}}
    recipe["rollout"] = {"groups_per_step": 4, "group_size": 2, "drop_no_signal": False}
    recipe["rollout"] |= {"max_failed_scores": 1}
    recipe["environments"] = {"episode_timeout_s": 6}
    recipe["run"]["steps"] = 1
    del recipe["evaluate"]
    rows = [{"prompt": letter, "answer": letter} for letter in "abcd"]
    objects = RunObjects(prompts={"rows": rows})
    result = run_recipe(
        recipe_from_dict(recipe, base_dir=tmp_path, objects=objects.names), objects=objects
    )
    samples = read_rows(result, "samples.jsonl")
    status = {row["prompt"]: row["status"] for row in samples}
    assert status == {"a": "ok", "b": "ok", "c": "timeout", "d": "failed"}
    assert "no idea" in next(row["detail"] for row in samples if row["prompt"] == "d")
    assert result.metrics["rollout/failed_scores"] == 0.5
    # Two turns in one segment (prompt, reply, question, reply), and one in another.
    assert all(row["response_tokens"] in range(3, 7) for row in samples if row["status"] == "ok")
    assert result.metrics["train/tokens"] > 0


WIDE = {"turns": 2, "carried": 2}
WITH_SUMMARY = {"turns": 2, "summary": {}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pipeline": "rlvr"}, "pipeline rlvr has no key 'environment'"),
        ({"pipeline": "dpo"}, "pipeline dpo has no key 'environment'"),
        ({"data": {"domains": {"a": {"rewards": ["exact_match"]}}}}, "neither a source"),
        ({"data": {"domains": {"a": {"environment": "frozen_lak"}}}}, "frozen_lake"),
        ({"data": {"domains": {"a": {"environment": "mine.py:Gues"}}}}, "Guess"),
        (
            {"data": {"domains": {"a": {"environment": {"name": "sokoban", "columns": ["x"]}}}}},
            "there are no columns",
        ),
        (
            {"data": {"domains": {"a": {"environment": {"name": "sokoban", "window": WIDE}}}}},
            "leave no room in a window of 2",
        ),
        (
            {
                "pipeline": "sft",
                "data": {
                    "domains": {"a": {"environment": {"name": "sokoban", "window": WITH_SUMMARY}}}
                },
            },
            "solvers write no summaries",
        ),
    ],
)
def test_mistakes_of_a_recipe_with_environments_are_reported(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(make_recipe(tmp_path) | change, tmp_path)


def test_agentic_without_an_environment_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    domain = {"source": "rollick.testing.toys:letter_rows", "rewards": ["exact_match"]}
    recipe["data"] = {"domains": {"a": domain}}
    with pytest.raises(ConfigError, match="needs a domain with an environment"):
        load(recipe, tmp_path)


def test_held_out_maps_are_no_training_maps() -> None:
    boards: dict[str, set[str]] = {}
    for split in ("train", "held_out"):
        lakes = [
            make_env(FrozenLake, {"split": split, "rules": False}, name="lake") for _ in "x" * 300
        ]
        boards[split] = {str(lake.reset(seed)[0]) for seed, lake in enumerate(lakes)}
    assert not boards["train"] & boards["held_out"]
    assert min(len(distinct) for distinct in boards.values()) > 100


@pytest.mark.parametrize("name", GAMES)
def test_the_recipes_of_the_games_are_right(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml").recipe
    (training,), (held_out,) = recipe.data.domains.values(), recipe.data.validation.values()
    assert training.environment is not None
    assert held_out.environment is not None
    # Arithmetic questions have no split: the seeds of validation give other questions.
    splits = (None, None) if name.startswith("tools_math") else ("train", "held_out")
    specs = (training.environment, held_out.environment)
    assert tuple(spec.options.get("split") for spec in specs) == splits


@pytest.mark.parametrize("game", [pytest.param("webshop", marks=pytest.mark.slow), "tools_math"])
def test_the_tiny_recipes_of_agents_run_from_warm_up_to_rl(
    game: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(RECIPES)
    import tiny_agents

    options: list[str] = []
    domain = "shop" if game == "webshop" else "arithmetic"
    if game == "webshop":
        if not PRODUCTS.is_file():
            pytest.skip("the shared datasets are not here")
        model = tiny_agents.save_shop_model(tmp_path / "model", str(PRODUCTS), lessons=1)
        for part in ("domains", "validation"):
            key = f"data.{part}.shop.environment.options.products"
            options.append(f"{key}={json.dumps(str(PRODUCTS))}")
    else:
        model = tiny_agents.save_tools_model(tmp_path / "model")
    options += [f"run.folder={json.dumps(str(tmp_path))}", "run.steps=1", "run.threads=1"]
    options += ["cluster.backend=inline", "observe.live=off", "observe.sinks=[]"]
    options += ["evaluate.every=1", f"data.validation.{domain}.limit=2"]
    warm_up = RECIPES / f"{game}_warm_up.yaml"
    start = run_recipe(
        load_recipe(
            warm_up,
            [*options, f"model.path={json.dumps(str(model))}", "train.batch_size=4"],
        )
    )
    assert start.metrics["train/loss"] > 0
    exported = export_run(start.folder, tmp_path / "start")
    small = ["rollout.groups_per_step=2", "rollout.group_size=2", "rollout.drop_no_signal=false"]
    path = f"model.path={json.dumps(str(exported))}"
    result = run_recipe(load_recipe(RECIPES / f"{game}.yaml", [*options, path, *small]))
    assert (result.step, result.metrics["env/episodes"]) == (1, 4)
    assert 0.0 <= result.metrics["eval/pass@1"] <= 1.0

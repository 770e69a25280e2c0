"""Domains with their own settings: sampling, filters and metrics; a judge on the device map."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollick.config.load import LoadedRecipe, recipe_from_dict
from rollick.config.schema import RewardSpec
from rollick.observe.metric_table import is_documented
from rollick.pipelines.domains import group_filter, training_sampling, validation_sampling
from rollick.pipelines.judge import KEY_VARIABLE, JudgeEndpoint
from rollick.pipelines.open_run import open_run
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunResult
from rollick.testing.fakes import group, prompt, sample

Toy = Callable[..., LoadedRecipe]
LETTERS = {
    "source": "rollick.testing.toys:letter_rows",
    "rewards": ["rollick.testing.toys:says_letter"],
}


def make_recipe(first: dict[str, Any], second: dict[str, Any], **sections: Any) -> Any:
    domains = {"first": LETTERS | first, "second": LETTERS | second}
    return recipe_from_dict(
        {"model": {"path": "x"}, "data": {"domains": domains}} | sections
    ).recipe


def test_a_domain_draws_by_its_own_settings_and_takes_the_rest_from_the_recipe() -> None:
    own = {"sampling": {"temperature": 0.5, "max_tokens": 7, "stop": ["."]}}
    recipe = make_recipe(own, {}, sampling={"max_tokens": 20, "stop_ids": [3]})
    sampling_for = training_sampling(recipe)
    first, second = sampling_for(prompt(domain="first")), sampling_for(prompt(domain="second"))
    assert (first.temperature, first.max_tokens, first.stop, first.stop_ids) == (
        0.5,
        7,
        (".",),
        (3,),
    )
    assert (second.temperature, second.max_tokens, second.stop) == (1.0, 20, ())


def test_validation_is_greedy_with_the_token_limit_of_training_unless_configured() -> None:
    domains = {name: LETTERS | {"sampling": {"temperature": 0.5, "max_tokens": 7}} for name in "ab"}
    held_out = {"a": LETTERS, "b": LETTERS | {"sampling": {"temperature": 0.2, "max_tokens": 3}}}
    data = {"domains": domains, "validation": held_out}
    recipe = recipe_from_dict({"model": {"path": "x"}, "data": data}).recipe
    sampling_for = validation_sampling(recipe)
    a, b = sampling_for(prompt(domain="a")), sampling_for(prompt(domain="b"))
    assert (a.temperature, a.max_tokens) == (0.0, 7)
    assert (b.temperature, b.max_tokens) == (0.2, 3)


def test_a_group_is_dropped_by_the_filters_of_its_domain() -> None:
    first = {"filters": {"drop_no_signal": False}}
    second = {"filters": {"min_spread": 0.5, "scores": [0.2, 0.8]}}
    judge = group_filter(make_recipe(first, second))

    def drop_reason(domain: str, *scores: float) -> str | None:
        return judge(group(scores, of=prompt(domain=domain)))

    assert drop_reason("first", 1, 1) is None
    assert drop_reason("second", 1, 1) == "no_signal"
    assert drop_reason("second", 0.4, 0.6) == "no_signal"
    assert drop_reason("second", 0, 1) is None
    assert drop_reason("second", 0, 0, 0, 0, 0, 1) == "too_hard"
    assert drop_reason("second", 1, 1, 1, 1, 1, 0) == "too_easy"


@pytest.fixture(scope="module")
def two_domains(toy: Toy) -> RunResult:
    row_filter = {"answer": ["a", "b"]}
    domains = {
        "short": LETTERS | {"sampling": {"max_tokens": 1}, "where": row_filter},
        "long": LETTERS | {"sampling": {"max_tokens": 6}, "share": 3},
    }
    return run_recipe(
        toy(
            "evaluate.at_end=true",
            "observe.samples_per_step=1000",
            "rollout.drop_no_signal=false",
            data={"domains": domains, "validation": dict.fromkeys(domains, LETTERS)},
        )
    )


def read_rows(run: RunResult, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / name).read_text("utf-8").splitlines()]


def test_samples_of_each_domain_obey_its_limit_and_its_rows_its_filter(
    two_domains: RunResult,
) -> None:
    samples = read_rows(two_domains, "samples.jsonl")
    short = [row for row in samples if row["domain"] == "short"]
    long = [row for row in samples if row["domain"] == "long"]
    assert {row["prompt"] for row in short} <= {"say a", "say b"}
    assert len({row["prompt"] for row in long}) > 2
    assert {len(row["response"]) for row in short} <= {0, 1}
    assert max(len(row["response"]) for row in long) > 1


def test_every_figure_of_a_domain_is_logged_with_its_share(two_domains: RunResult) -> None:
    row = read_rows(two_domains, "metrics.jsonl")[-1]
    assert (row["rollout/domain/short/groups"], row["rollout/domain/long/groups"]) == (1, 3)
    for metric in ("samples", "dropped", "failed_scores", "response_length", "truncated"):
        assert f"rollout/domain/long/{metric}" in row
    for domain in ("short", "long"):
        assert f"score/domain/{domain}" in row
        assert row[f"eval/{domain}/pass@1_interval"] > 0
    assert all(is_documented(name) for name in row if name != "step")


def test_only_rewards_without_an_address_are_given_the_runs_own_judge() -> None:
    judge = JudgeEndpoint("http://127.0.0.1:1/v1", "secret")
    other = RewardSpec(name="judge", options={"url": "http://x/v1", "model": "m"})
    own = judge.with_address(RewardSpec(name="judge", options={"votes": 3}))
    assert judge.with_address(other) is other
    assert own.options == {
        "votes": 3,
        "url": "http://127.0.0.1:1/v1",
        "model": "judge",
        "key_env": KEY_VARIABLE,
    }
    assert judge.secrets == {KEY_VARIABLE: "secret"}


async def test_a_judge_on_the_device_map_scores_and_an_unparsable_verdict_is_a_failed_score(
    toy: Toy, tiny_folder: Path
) -> None:
    options = {"retries": 0, "max_tokens": 4, "votes": 1}
    domain = LETTERS | {"rewards": [{"name": "judge", "options": options}]}
    loaded = toy(
        data={"domains": {"letters": domain}},
        judge={"path": str(tiny_folder)},
        devices={"judge": "cpu"},
    )
    async with open_run(loaded) as run:
        score = await run.scoring.score(sample(of=prompt(domain="letters")))
        metrics = run.scoring.rewards.call_counts.take_metrics()
    assert not score.ok
    assert "unparsable verdict" in score.detail
    assert metrics["reward/total/judge/requests"] == 1
    assert metrics["reward/total/judge/completion_tokens"] == 4

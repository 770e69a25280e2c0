"""Valid recipes for each algorithm rule; bad_recipes.txt has the invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollick.config.load import check_recipe, recipe_from_dict
from rollick.config.schema import rl_recipe
from rollick.pipelines.domains import group_filter
from rollick.testing.fakes import group
from rollick.types import Prompt, Turn

SUMS = {"source": "object:rows", "rewards": ["exact_match"]}
TEACHER = {"path": "big"}
OPD = {"advantage": "opd"}
STALE = {"max_staleness": 1}


def find_problems(**sections: Any) -> list[str]:
    data = sections.pop("data", {"domains": {"sums": SUMS}})
    recipe = {"model": {"path": "tiny"}, "data": data, **sections}
    loaded = recipe_from_dict(recipe, objects={"rows"}, base_dir=Path.cwd())
    return [str(problem) for problem in check_recipe(loaded, objects={"rows"})]


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"kl": {"coefficient": 0.1, "form": "k1", "place": "reward"}}},
        {"algorithm": {"kl": {"coefficient": 0.1, "form": "k2", "max_ratio": 2}}},
        {"algorithm": {"kl": {"coefficient": 0.1, "controller": "adaptive", "target": 0.1}}},
        {"algorithm": {"advantage": "gdpo", "shaping": {"difficulty": [0.1, 0.9]}}},
        {"algorithm": {"shaping": {"length_limit": "max_tokens", "length_weight": 2}}},
        {"algorithm": "ppo", "critic": {"warmup_steps": 5}, "devices": {"critic": "cpu"}},
        {
            "algorithm": {"advantage": "reinforce"},
            "rollout": {"group_size": 1, "drop_no_signal": False},
        },
        {"algorithm": {"kl": {"coefficient": 0.1}}, "devices": {"reference": "cpu"}},
    ],
    ids=str,
)
def test_settings_that_have_an_effect_are_taken(sections: dict[str, Any]) -> None:
    assert find_problems(**sections) == []


@pytest.mark.parametrize(
    ("algorithm", "train"),
    [
        ({"loss": "ppo"}, {}),
        ({"loss": "ppo", "correction": "opsm"}, {}),
        ({"loss": "ppo", "correction": {"name": "decoupled", "old": "interpolated"}}, {}),
        ({"loss": "ppo", "correction": "decoupled"}, {"minibatches": 2}),
        ({"loss": "ppo", "correction": "none"}, {"epochs": 2}),
        ({"loss": "dppo_tv", "correction": "none"}, {}),
    ],
    ids=str,
)
def test_stale_tokens_are_trained_on_where_something_bounds_them(
    algorithm: dict[str, Any], train: dict[str, Any]
) -> None:
    assert find_problems(algorithm=algorithm, train=train, rollout=STALE) == []


def test_without_staleness_the_ratio_to_the_old_policy_needs_no_bound() -> None:
    assert find_problems(algorithm={"loss": "ppo", "correction": "token_tis"}) == []


@pytest.mark.parametrize(
    ("algorithm", "drops"),
    [
        *((name, True) for name in ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "topr", "max_rl")),
        *((name, True) for name in ("cispo", "lite_ppo", "sapo", "dppo")),
        *((name, False) for name in ("ppo", "reinforce++", "raft++", "gigpo")),
        *(({"advantage": name}, False) for name in ("reinforce", "step_return", "gdpo")),
        ({"advantage": "reinforce++_baseline"}, True),
        ({"loss": "raft"}, False),
        ({"advantage": "mine.py:advantage"}, False),
    ],
    ids=str,
)
def test_groups_with_equal_scores_are_dropped_by_default_where_they_have_no_gradient(
    algorithm: Any, drops: bool, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def advantage(groups, options): ...")
    data = {"domains": {"sums": {**SUMS, "algorithm": algorithm}}}
    raw_recipe = {"model": {"path": "tiny"}, "data": data, "devices": {"critic": "cpu"}}
    if algorithm != "ppo":
        del raw_recipe["devices"]
    loaded = recipe_from_dict(raw_recipe, objects={"rows"}, base_dir=tmp_path)
    recipe = rl_recipe(loaded.recipe)
    assert recipe.drops_no_signal("sums") is drops
    of = Prompt("0", "sums", (Turn("user", "2 + 2?"),))
    assert group_filter(recipe)(group([1, 1], of=of)) == ("no_signal" if drops else None)
    assert group_filter(recipe)(group([0, 1], of=of)) is None


def test_a_domain_that_learns_from_a_teacher_alone_needs_no_reward() -> None:
    domains = {"sums": SUMS, "taught": {"source": "object:rows", "algorithm": OPD}}
    rollout = {"drop_no_signal": False}
    assert find_problems(data={"domains": domains}, rollout=rollout, teacher=TEACHER) == []


def test_an_algorithm_that_no_domain_uses_is_not_checked() -> None:
    domain = {**SUMS, "algorithm": {"advantage": "reinforce"}}
    rollout = {"group_size": 1, "drop_no_signal": False}
    assert find_problems(data={"domains": {"sums": domain}}, rollout=rollout) == []


@pytest.mark.parametrize("loss", ["dpo", {"name": "ipo", "beta": 0.5}])
def test_pairs_are_learned_from_by_dpo_and_ipo(loss: Any) -> None:
    pairs = {"source": "object:rows", "chosen": "good", "rejected": "bad"}
    devices = {"reference": "cpu"}
    data = {"domains": {"pairs": pairs}}
    assert find_problems(pipeline="dpo", data=data, algorithm={"loss": loss}, devices=devices) == []
    assert find_problems(pipeline="dpo", data=data) == []


def test_completions_are_distilled_with_any_divergence() -> None:
    data = {"domains": {"sums": {"source": "object:rows", "completion": "answer"}}}
    loss = {"name": "distillation", "divergence": "skewed_reverse", "skew": 0.2}
    sections = {"algorithm": {"loss": loss, "aggregation": "fixed_length"}, "teacher": TEACHER}
    assert find_problems(pipeline="distill", data=data, **sections) == []
    assert find_problems(pipeline="distill", data=data, teacher={**TEACHER, "top_k": 8}) == []

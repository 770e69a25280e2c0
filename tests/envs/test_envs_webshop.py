"""WebShop: search, reward and pages over a shop of three products, and over the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollick.envs.shop.catalogue import Goal, Product, load_catalogue
from rollick.envs.shop.score import best_choice, score_purchase, type_match
from rollick.envs.shop.search import SearchIndex
from rollick.envs.webshop import WebShop
from rollick.episodes.check_env import check_env
from rollick.episodes.in_process import random_policy, run_episodes, solver_policy
from rollick.errors import EnvError

SHARED = Path(__file__).parents[2].parent / "shared/data/webshop_products.jsonl.gz"
BLUE = {
    "asin": "B01", "title": "Soft blue cotton shirt", "query": "shirts",
    "product_category": "Clothing › Men › Shirts", "prices": [10.0, 25.5],
    "description": "A shirt.", "bullets": ["Machine wash "],
    "attributes": ["machine wash", "slim fit"],
    "options": {"size": ["small", "large"], "color": ["blue", "navy", "large"]}, "instructions": [],
}  # fmt: skip
GREY = {
    **BLUE, "asin": "B02", "title": "Grey wool shirt", "prices": [40.0],
    "attributes": ["hand wash"], "bullets": [], "options": {},
}  # fmt: skip
LAMP = {
    "asin": "B03", "title": "Desk lamp", "query": "lamps", "product_category": "Home › Lamps",
    "prices": [15.0], "description": "", "bullets": [], "attributes": ["easy clean"], "options": {},
    "instructions": [{"instruction": "i need a lamp.", "instruction_attributes": ["easy clean"],
                      "instruction_options": []}],
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "products.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (BLUE, GREY, LAMP)))
    return path


def by_asin(file: Path, asin: str) -> Product:
    return load_catalogue(file).by_asin[asin]


def make_shop(file: Path, **options: Any) -> WebShop:
    """A shop whose goal is the blue shirt, whatever the seed."""
    env = WebShop(products=str(file), style="plain", **options)
    env.goal = make_shirt_goal(file)
    return env


def make_shirt_goal(file: Path) -> Goal:
    return Goal(
        by_asin(file, "b01"), ("machine wash",), {"size": "large", "color": "navy"}, 30.0, "a shirt"
    )


def test_bm25_ranks_by_rare_words_and_leaves_out_what_has_none_of_them() -> None:
    index = SearchIndex(
        ["red shirt", "blue shirt", "red red lamp", "a long text about a shirt and more"]
    )
    assert index.search("lamp shirt", limit=9)[0] == 2
    assert index.search("shirt", limit=9) == [0, 1, 3]
    assert index.search("RED", limit=1) == [2]
    assert index.search("nothing", limit=9) == []


def test_the_price_of_a_range_is_its_upper_end(file: Path) -> None:
    assert by_asin(file, "b01").price == 25.5


def test_buying_the_requested_product_has_reward_one(file: Path) -> None:
    goal = make_shirt_goal(file)
    assert best_choice(goal, goal.product) == {"size": "large", "color": "navy"}
    assert score_purchase(goal, goal.product, {"size": "large", "color": "navy"}).reward == 1.0


def test_the_reward_counts_attributes_options_and_price_and_weighs_the_kind(file: Path) -> None:
    goal = make_shirt_goal(file)
    # 1 attribute, 2 options and the price: four parts. One option is missing.
    assert score_purchase(goal, goal.product, {"size": "large"}).reward == 3 / 4
    # The grey shirt is too expensive and washed by hand, but of the same kind.
    grey = score_purchase(goal, by_asin(file, "b02"), {})
    assert (grey.type, grey.attributes, grey.options, grey.price, grey.reward) == (1, 0, 0, 0, 0)
    # The lamp is cheap enough, but shares no word with the title.
    lamp = score_purchase(goal, by_asin(file, "b03"), {})
    assert (lamp.type, lamp.price, lamp.reward) == (0, 1, 0)


@pytest.mark.parametrize(
    ("title", "same_query", "expected"),
    [
        ("one two three four five six seven eight nine ten", True, 1.0),
        ("one other things", True, 1.0),
        ("one other things", False, 0.5),
        ("one two other", False, 0.5),
        ("one two three other", False, 1.0),
        ("other", True, 0.0),
    ],
)
def test_the_product_kind_is_compared_by_title_query_and_category(
    title: str, same_query: bool, expected: float
) -> None:
    def make_product(title: str, query: str) -> Product:
        return Product("x", title, query, frozenset(), 1.0, "", (), (), {})

    words = "one two three four five six seven eight nine ten"
    goal = make_product(words, "q")
    assert type_match(goal, make_product(title, "q" if same_query else "other")) == expected
    long = make_product(f"{words} eleven twelve", "q")
    assert type_match(long, make_product("one", "q")) == 0.1


def test_a_trip_through_all_pages(file: Path) -> None:
    env = make_shop(file, per_page=1)
    text, reward, terminated, truncated, info = env.step("search[shirt]")
    assert text.split("\n")[1:3] == ['Page 1 of 2 for "shirt"', "[back to search] [next >]"]
    assert (reward, terminated, truncated, info["valid"], info["effective"]) == (
        0,
        False,
        False,
        True,
        True,
    )
    first = text.split("\n")[3]
    text = env.step("click[Next >]")[0]
    assert "[< prev]" in text
    assert first not in text
    env.step("click[< prev]")
    env.step("click[back to search]")
    env.step("search[blue]")
    text = env.step("click[b01]")[0]
    assert text.split("\n")[2:] == [
        "Soft blue cotton shirt $25.50",
        "size: [small] [large]",
        "color: [blue] [navy] [color: large]",
        "[description] [features] [buy now]",
    ]
    assert env.step("click[features]")[0].endswith("- Machine wash\n- machine wash\n- slim fit")
    env.step("click[< prev]")
    assert "size (chosen: large)" in env.step("click[large]")[0]
    env.step("click[navy]")
    text, reward, terminated, _, info = env.step("click[buy now]")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    assert info["metrics"] == {"type": 1, "attributes": 1, "options": 1, "price": 1, "reward": 1}


@pytest.mark.parametrize(
    "action", ["click[b01]", "buy", "search[]", "click[buy now]", "", "click["]
)
def test_an_action_that_the_page_lacks_is_invalid(file: Path, action: str) -> None:
    text, reward, _, _, info = make_shop(file, invalid_reward=-0.5).step(action)
    assert text.startswith("That is not possible here.")
    assert (reward, info["valid"], info["effective"]) == (-0.5, False, False)


def test_a_trip_that_takes_too_long_is_truncated(file: Path) -> None:
    env = make_shop(file, max_steps=1)
    assert env.step("search[lamp]")[3]


def test_people_s_goals_can_be_chosen(file: Path) -> None:
    split = "held_out" if by_asin(file, "b03").held_out else "train"
    text, _ = WebShop(products=str(file), goals="human", split=split).reset(0)
    assert "Wanted: i need a lamp, for less than" in text


def test_a_missing_file_and_an_invalid_line_are_reported(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"does not exist.*products=PATH"):
        WebShop(products=str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_text(json.dumps(BLUE) + '\n{"asin": "x"}\n')
    with pytest.raises(EnvError, match=r"bad\.jsonl:2 is not a valid product: KeyError"):
        WebShop(products=str(tmp_path / "bad.jsonl"))


@pytest.fixture
def real() -> dict[str, Any]:
    if not SHARED.exists():
        pytest.skip("the shared datasets are not here")
    return {"products": str(SHARED)}


def test_the_real_shop_passes_its_check(real: dict[str, Any]) -> None:
    assert check_env(WebShop, real) == []


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_thousand_trips_all_succeed(real: dict[str, Any], split: str) -> None:
    report = run_episodes(
        WebShop, range(1000), options={**real, "split": split}, policy=solver_policy
    )
    assert (report.success, report.errors, report.valid) == (1.0, 0, 1.0)


def test_a_thousand_random_trips_raise_nothing_and_repeat(real: dict[str, Any]) -> None:
    first = run_episodes(WebShop, range(1000), options=real, policy=random_policy)
    again = run_episodes(WebShop, range(1000), options=real, policy=random_policy)
    assert first.errors == 0
    assert first.success < 0.2
    assert (first.reward, first.steps) == (again.reward, again.steps)


def test_progress_rewards_the_rise_of_the_purchase_value_and_a_fall_costs_it(file: Path) -> None:
    env = make_shop(file, progress_reward=2.0)
    actions = ["search[shirt]", "click[b01]", "click[navy]", "click[blue]", "click[< prev]"]
    # The score has four parts: one attribute, two options, the price. The shirt without options
    # has two of them; its colour is the third.
    assert [env.step(action)[1] for action in actions] == [0.0, 1.0, 0.5, -0.5, -1.0]


def test_a_product_page_is_the_same_state_after_any_search(file: Path) -> None:
    states = []
    for words in ("shirt", "cotton shirt"):
        env = make_shop(file)
        search_state = env.step(f"search[{words}]")[4]["state"]
        states.append((search_state, env.step("click[b01]")[4]["state"]))
    (first, item), (second, same) = states
    assert first != second
    assert item == same
    assert env.step("click[navy]")[4]["state"] != item


def test_a_careless_shopper_buys_a_product_with_the_required_options(
    real: dict[str, Any],
) -> None:
    options = {**real, "careless": True, "per_page": 3}
    report = run_episodes(WebShop, range(300), options=options, policy=solver_policy)
    assert (report.errors, report.valid) == (0, 1.0)
    assert 0.2 < report.success < 0.4


def test_no_product_is_a_goal_of_both_splits(real: dict[str, Any]) -> None:
    catalogue = load_catalogue(SHARED.resolve())
    train, held = (catalogue.goals["made", split] for split in ("train", "held_out"))
    assert not {p.asin for p in train} & {p.asin for p in held}
    assert len(train) + len(held) == 815
    assert 0.15 < len(held) / 815 < 0.25

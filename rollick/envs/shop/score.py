"""WebShop's reward: how well a purchase meets the goal (arXiv 2207.01206, section 3).

    reward = type * (attributes met + options met + price met) / (attributes + options + 1)

`type` lowers the reward for a product of another type: 0 if the titles share no word, 0.1 if they
share less than a tenth, 0.5 if no more than a fifth and neither the query nor the category agrees.
The paper compares the nouns of the titles; this compares all words except common ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from rollick.envs.shop.catalogue import Goal, Product
from rollick.envs.shop.search import split_words

COMMON_WORDS = frozenset(
    split_words(
        "a an and are as at by for from in is it of on or the this to with your you our all new "
        "pack set size color pcs inch inches oz x"
    )
)


class PurchaseScore(NamedTuple):
    """The parts of a reward, each a share from 0 to 1."""

    type: float
    attributes: float
    options: float
    price: float
    reward: float


def score_purchase(goal: Goal, product: Product, chosen: Mapping[str, str]) -> PurchaseScore:
    attributes = sum(attribute.lower() in product.full_text for attribute in goal.attributes)
    chosen_values = {_normalise(value) for value in chosen.values()}
    options = sum(_normalise(value) in chosen_values for value in goal.options.values())
    is_affordable = product.price <= goal.price_limit
    kind = type_match(goal.product, product)
    count = len(goal.attributes) + len(goal.options) + 1
    return PurchaseScore(
        type=kind,
        attributes=attributes / len(goal.attributes) if goal.attributes else 1.0,
        options=options / len(goal.options) if goal.options else 1.0,
        price=float(is_affordable),
        reward=kind * (attributes + options + is_affordable) / count,
    )


def best_choice(goal: Goal, product: Product) -> dict[str, str]:
    """The product's options that match the goal, by name."""
    goal_values = {_normalise(value) for value in goal.options.values()}
    choice: dict[str, str] = {}
    for name, values in product.options.items():
        by_text = {_normalise(value): value for value in reversed(values)}
        wanted = _normalise(goal.options.get(name, ""))
        if wanted in by_text:
            choice[name] = by_text[wanted]
        elif matches := [value for value in values if _normalise(value) in goal_values]:
            choice[name] = matches[0]
    return choice


def type_match(goal: Product, bought: Product) -> float:
    words = _title_words(goal.title)
    shared = len(words & _title_words(bought.title)) / len(words) if words else 1.0
    same_type = goal.query == bought.query or len(goal.categories & bought.categories) >= 2
    if shared == 0:
        return 0.0
    if shared < 0.1:
        return 0.1
    return 0.5 if shared <= 0.2 and not same_type else 1.0


def _normalise(value: str) -> str:
    return " ".join(value.lower().split())


@lru_cache(maxsize=8192)
def _title_words(title: str) -> frozenset[str]:
    return frozenset(split_words(title)) - COMMON_WORDS

"""The products of a shop, read from JSON lines, and the goals of its shoppers.

    file -- load_catalogue --> Catalogue (products, search index) -- choose_goal(seed) --> Goal

A hash of a product's id assigns it to the training or held-out goals, so no held-out goal product
is a training goal (the shop sells all products in both). Most goals are generated from a product's
attributes, options and price; an option selects the few that people wrote.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from rollick.envs.shop.search import SearchIndex
from rollick.errors import EnvError
from rollick.types import stable_hash

Split = Literal["train", "held_out"]
HELD_OUT = 5
"""One of this many products is held out."""
PRICE_LIMITS = (*range(10, 100, 10), *range(100, 500, 50), *range(500, 5001, 500))
"""Price limits of goals."""
MAX_ATTRIBUTES = 3


class HumanGoal(NamedTuple):
    """A goal that a person wrote for a product."""

    text: str
    attributes: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Product:
    """One product. `price` is the upper end if the shop gives a range."""

    asin: str
    title: str
    query: str
    """The product type, as a search query."""
    categories: frozenset[str]
    price: float
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    human: tuple[HumanGoal, ...] = ()

    @property
    def held_out(self) -> bool:
        return stable_hash("webshop product", self.asin) % HELD_OUT == 0

    @cached_property
    def full_text(self) -> str:
        """All texts of the product, in lower case."""
        return "\n".join((self.title, *self.bullets, self.description, *self.attributes)).lower()


class Goal(NamedTuple):
    """A shopper's goal. `product` meets it, and others may too."""

    product: Product
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    """The required value of each option."""
    price_limit: float
    text: str


@dataclass(frozen=True)
class Catalogue:
    """All products of a file, in its order."""

    products: Sequence[Product]
    index: SearchIndex
    by_asin: Mapping[str, Product]
    goals: Mapping[tuple[str, str], Sequence[Product]]
    """The products of goals, by source (made, human) and split."""

    def search(self, query: str, *, limit: int) -> list[Product]:
        return [self.products[index] for index in self.index.search(query, limit=limit)]


@lru_cache(maxsize=4)
def load_catalogue(path: Path) -> Catalogue:
    """Read a file once per process. Raises EnvError if it is missing or has an invalid line."""
    try:
        products = list(_read_products(path))
    except FileNotFoundError:
        names = "asin, title, query, product_category, prices, description, bullets, attributes"
        fix = f"set products=PATH: JSON lines (.gz or not) with {names}, options, instructions"
        raise EnvError(f"the product file {path} does not exist", fix=fix) from None
    index = SearchIndex([_search_text(product) for product in products])
    by_asin = {product.asin.lower(): product for product in products}
    # Without attributes a goal cannot distinguish similar products.
    made = [product for product in products if product.attributes]
    human = [product for product in products if product.human]
    goals = {
        (source, split): [p for p in candidates if p.held_out == (split == "held_out")]
        for source, candidates in (("made", made), ("human", human))
        for split in ("train", "held_out")
    }
    return Catalogue(products, index, by_asin, goals)


def choose_goal(catalogue: Catalogue, random: Random, source: str, split: Split) -> Goal:
    products = catalogue.goals[source, split]
    if not products:
        raise EnvError(f"the product file has no goals for the split {split!r}")
    product = random.choice(products)
    above = [limit for limit in PRICE_LIMITS if limit > product.price]
    limit = float(random.choice(above[:3]) if above else 1000 * ceil(product.price / 1000 + 0.001))
    price = f"for less than {limit:g} dollars"
    if source == "human":
        human_goal = random.choice(product.human)
        choices = [(name, value) for name, values in product.options.items() for value in values]
        options = {name: value for name, value in choices if value in human_goal.values}
        text = f"{human_goal.text.rstrip('. ')}, {price}"
        return Goal(product, human_goal.attributes, options, limit, text)
    count = min(len(product.attributes), random.randint(1, MAX_ATTRIBUTES))
    attributes = tuple(random.sample(product.attributes, count))
    options = {name: random.choice(values) for name, values in product.options.items()}
    option_text = "".join(f", {name}: {value}" for name, value in options.items())
    text = f"Buy {product.query}: {', '.join(attributes)}{option_text}, {price}"
    return Goal(product, attributes, options, limit, text)


def _search_text(product: Product) -> str:
    values = (value for values in product.options.values() for value in values)
    parts = (product.title, product.query, *product.attributes, *values)
    return " ".join([*parts, *product.bullets, product.description])


def _read_products(path: Path) -> Iterator[Product]:
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _to_product(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise EnvError(f"{path}:{number} is not a valid product: {error!r}") from error


def _to_product(row: Mapping[str, Any]) -> Product:
    return Product(
        asin=row["asin"],
        title=" ".join(row["title"].split()),
        query=row["query"],
        categories=frozenset(part.strip() for part in row["product_category"].split("›")),
        price=float(max(row["prices"])),
        description=row["description"].strip(),
        bullets=tuple(bullet.strip() for bullet in row["bullets"]),
        attributes=tuple(dict.fromkeys(row["attributes"])),
        options={
            name: tuple(dict.fromkeys(value.strip() for value in values))
            for name, values in row["options"].items()
            if values
        },
        human=tuple(_to_human_goal(entry) for entry in row.get("instructions", ())),
    )


def _to_human_goal(entry: Mapping[str, Any]) -> HumanGoal:
    attributes, values = entry["instruction_attributes"], entry["instruction_options"]
    return HumanGoal(entry["instruction"], tuple(attributes), tuple(values))

"""The products of a shop, read from JSON lines, and the goals that shoppers have there.

    file -- load_catalogue --> Catalogue (products, search index) -- choose_goal(seed) --> Goal

A product belongs to the training or to the held-out goals by a hash of its id, so no product that
a policy is tested on was a goal in training (all can be found and bought in both). Most goals are
made from a product's attributes, options and price; the few written by people are a choice.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from rollick.envs.shop.search import Index
from rollick.errors import EnvError
from rollick.types import stable_hash

Split = Literal["train", "held_out"]
HELD_OUT = 5
"""One product of so many is held out."""
CAPS = (*range(10, 100, 10), *range(100, 500, 50), *range(500, 5001, 500))
"""Round prices that a shopper may set as a limit."""
MOST_ATTRIBUTES = 3


class Human(NamedTuple):
    """A goal that a person wrote for a product."""

    text: str
    attributes: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Product:
    """One article. `price` is what is paid: the upper end, where the shop gives a range."""

    asin: str
    title: str
    query: str
    """What kind of thing it is, as people search for it."""
    categories: frozenset[str]
    price: float
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    human: tuple[Human, ...] = ()

    @property
    def held_out(self) -> bool:
        return stable_hash("webshop product", self.asin) % HELD_OUT == 0

    @cached_property
    def offered(self) -> str:
        """All that the shop says of it, in lower case."""
        return "\n".join((self.title, *self.bullets, self.description, *self.attributes)).lower()


class Goal(NamedTuple):
    """What a shopper wants; `product` fulfils it, and others may, too."""

    product: Product
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    """Option -> the value that is wanted."""
    cap: float
    text: str


@dataclass(frozen=True)
class Catalogue:
    """All products of a file, in its order."""

    products: Sequence[Product]
    index: Index
    by_asin: Mapping[str, Product]
    goals: Mapping[tuple[str, str], Sequence[Product]] = field(
        default_factory=dict[tuple[str, str], Sequence[Product]]
    )

    def search(self, query: str, *, limit: int) -> list[Product]:
        return [self.products[place] for place in self.index.search(query, limit=limit)]


@lru_cache(maxsize=4)
def load_catalogue(path: Path) -> Catalogue:
    """Read a file once for each process. EnvError where it is missing or has a bad line."""
    try:
        products = list(_read(path))
    except FileNotFoundError:
        raise EnvError(
            f"the products {path} do not exist",
            fix="give the option products=PATH: JSON lines (.gz or not) with asin, title, query, "
            "product_category, prices, description, bullets, attributes, options, instructions",
        ) from None
    index = Index([_indexed(product) for product in products])
    by_asin = {product.asin.lower(): product for product in products}
    # Without an attribute nothing tells what is wanted from what is merely alike.
    made = [product for product in products if product.attributes]
    human = [product for product in products if product.human]
    goals = {
        (source, split): [p for p in chosen if p.held_out == (split == "held_out")]
        for source, chosen in (("made", made), ("human", human))
        for split in ("train", "held_out")
    }
    return Catalogue(products, index, by_asin, goals)


def choose_goal(catalogue: Catalogue, random: Random, *, split: Split, human: bool = False) -> Goal:
    """A goal of the split; all that is chosen comes from `random`."""
    products = catalogue.goals["human" if human else "made", split]
    if not products:
        raise EnvError(f"no product can be a goal of the split {split!r}")
    product = random.choice(products)
    cap = _choose_cap(random, product.price)
    price = f"for less than {cap:g} dollars"
    if human:
        said = random.choice(product.human)
        options = {
            name: value
            for name, values in product.options.items()
            for value in values
            if value in said.values
        }
        return Goal(product, said.attributes, options, cap, f"{said.text.rstrip('. ')}, {price}")
    many = min(len(product.attributes), random.randint(1, MOST_ATTRIBUTES))
    attributes = tuple(random.sample(product.attributes, many))
    options = {name: random.choice(values) for name, values in product.options.items()}
    wanted = "".join(f", {name}: {value}" for name, value in options.items())
    text = f"Buy {product.query}: {', '.join(attributes)}{wanted}, {price}"
    return Goal(product, attributes, options, cap, text)


def _choose_cap(random: Random, price: float) -> float:
    above = [cap for cap in CAPS if cap > price]
    return float(random.choice(above[:3]) if above else 1000 * ceil(price / 1000 + 0.001))


def _indexed(product: Product) -> str:
    values = (value for values in product.options.values() for value in values)
    kinds = (product.title, product.query, *product.attributes, *values)
    return " ".join([*kinds, *product.bullets, product.description])


def _read(path: Path) -> Iterator[Product]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _product(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise EnvError(f"{path}:{number} is no product: {error!r}") from error


def _product(row: Mapping[str, Any]) -> Product:
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
        human=tuple(
            Human(
                said["instruction"],
                tuple(said["instruction_attributes"]),
                tuple(said["instruction_options"]),
            )
            for said in row.get("instructions", ())
        ),
    )

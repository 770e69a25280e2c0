"""WebShop: find and buy the product of an instruction, in a shop of text pages.

    search page --search[words]--> results --click[id]--> item --click[buy now]--> the end, reward
                                    pages <--- click[back to search], click[next >], ... --->

A new implementation of the benchmark (arXiv 2207.01206) over its product file: pages, actions and
reward are the paper's, the search is BM25.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rollick.envs.base import Reset, Step, TextEnv, seeded_random
from rollick.envs.formats import Format, describe_format, read_reply, write_reply
from rollick.envs.shop.catalogue import Goal, Product, Split, choose_goal, load_catalogue
from rollick.envs.shop.score import PurchaseScore, best_choice, score_purchase
from rollick.errors import EnvError

PRODUCTS = "../shared/data/webshop_products.jsonl.gz"
MAX_RESULTS = 50
"""Maximum products of a search."""
WORD_PROBABILITY = 0.35
"""The probability that the careless solver searches for a word of the instruction."""
BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
PAGES = ("description", "features")
RULES = (
    "You are in a web shop. Find what is asked for, choose its options, and buy it.\n"
    "The actions are search[words], on the search page only, and click[button], for anything in "
    "brackets."
)
_ACTION = re.compile(r"\s*(search|click)\s*\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class ShopPage:
    """The current page: search, a page of results, an item, or a text of an item."""

    kind: Literal["search", "results", "item", "text"] = "search"
    words: str = ""
    results: tuple[Product, ...] = ()
    number: int = 0
    item: Product | None = None
    chosen: Mapping[str, str] = field(default_factory=dict[str, str])
    text: str = ""

    @property
    def key(self) -> str:
        """The state key; on an item it does not include the search."""
        if self.item is None:
            return "|".join([self.kind, self.words, str(self.number)])
        options = ";".join(f"{name}={value}" for name, value in sorted(self.chosen.items()))
        return "|".join([self.kind, self.item.asin, options, self.text])


@dataclass(kw_only=True, eq=False)
class WebShop(TextEnv):
    """One purchase. Actions: `search[words]` on the search page, `click[button]`."""

    products: str = PRODUCTS
    """The product file; a relative path starts at the working directory."""
    split: Split = "train"
    goals: Literal["made", "human"] = "made"
    """Generated from products, or written by people."""
    max_steps: int = 15
    per_page: int = 10
    style: Format = "answer"
    rules: bool = True
    invalid_reward: float = 0.0
    """For a reply without a valid action on the page."""
    progress_reward: float = 0.0
    """A factor on the change of the purchase's value in each step."""
    careless: bool = False
    """The solver searches for some words only and buys any visible product, so that its episodes
    show the format and leave something to learn."""

    def __post_init__(self) -> None:
        if self.split not in get_args(Split) or self.goals not in ("made", "human"):
            text = f"split={self.split!r} with goals={self.goals!r} is not supported"
            raise EnvError(text, fix="split is train or held_out, goals is made or human")
        if min(self.max_steps, self.per_page) < 1:
            limits = f"max_steps={self.max_steps} and per_page={self.per_page}"
            raise EnvError(f"{limits} must be positive")
        self.catalogue = load_catalogue(Path(self.products).expanduser().resolve())
        self.page = ShopPage()
        self.steps = 0
        self.searches = 0
        self.bought: PurchaseScore | None = None

    def reset(self, seed: int) -> Reset:
        self.random = seeded_random("webshop", seed, self.split)
        self.goal = choose_goal(self.catalogue, self.random, self.goals, self.split)
        text = self._render_page()
        if self.rules:
            text = f"{RULES}\n{describe_format(self.style, 'one action')}\n\n{text}"
        return text, {"success": False, "state": self.page.key}

    def step(self, action: str) -> Step:
        self.steps += 1
        before = self.page
        valid = self._apply_action(read_reply(action, self.style) or "")
        info: dict[str, Any] = {"valid": valid, "state": self.page.key}
        if self.bought is not None:
            info |= {"effective": True, "success": self.bought.reward == 1.0}
            info["metrics"] = self.bought._asdict()
            return "You bought it. Thank you.", self.bought.reward, True, False, info
        info |= {"effective": valid and self.page != before, "success": False}
        text = self._render_page()
        if not valid:
            text = f"That is not possible here.\n{text}"
        reward = 0.0 if valid else self.invalid_reward
        if self.progress_reward:
            gain = self._purchase_value(self.page) - self._purchase_value(before)
            reward += self.progress_reward * gain
        return text, reward, False, self.steps >= self.max_steps, info

    def legal_actions(self) -> Sequence[str]:
        if self.page.kind == "search":
            goal = self.goal
            answers = [f"search[{word}]" for word in (goal.product.query, *goal.attributes)]
        else:
            answers = [f"click[{label}]" for label in self._buttons()]
        return [write_reply(answer, self.style) for answer in answers]

    def solve(self) -> str | None:
        return None if self.bought else write_reply(self._next_action(), self.style)

    def _purchase_value(self, page: ShopPage) -> float:
        """The reward of buying the current item; 0 without an item."""
        if page.item is None:
            return 0.0
        return score_purchase(self.goal, page.item, page.chosen).reward

    def _apply_action(self, answer: str) -> bool:
        """Returns whether the action is possible on this page."""
        match = _ACTION.fullmatch(answer)
        if match is None:
            return False
        verb, argument = match[1].lower(), " ".join(match[2].split())
        if verb == "search":
            if self.page.kind != "search" or not argument:
                return False
            results = tuple(self.catalogue.search(argument, limit=MAX_RESULTS))
            self.searches += 1
            self.page = ShopPage("results", words=argument.lower(), results=results)
            return True
        label = argument.lower()
        if label not in self._buttons():
            return False
        self._click(label)
        return True

    def _click(self, label: str) -> None:
        page, item = self.page, self.page.item
        if label == BACK:
            self.page = ShopPage()
        elif label == NEXT:
            self.page = replace(page, number=page.number + 1)
        elif label == PREVIOUS:
            self.page = self._previous_page()
        elif item is None:
            product = self.catalogue.by_asin[label]
            self.page = replace(page, kind="item", item=product, chosen={})
        elif label == BUY:
            self.bought = score_purchase(self.goal, item, page.chosen)
        elif label in PAGES and label not in _option_labels(item):
            self.page = replace(page, kind="text", text=label)
        else:
            name, value = _option_labels(item)[label]
            self.page = replace(page, chosen={**page.chosen, name: value})

    def _previous_page(self) -> ShopPage:
        page = self.page
        if page.kind == "text":
            return replace(page, kind="item", text="")
        if page.kind == "item":
            return replace(page, kind="results", item=None, chosen={})
        return replace(page, number=page.number - 1)

    def _visible_products(self) -> tuple[Product, ...]:
        begin = self.page.number * self.per_page
        return self.page.results[begin : begin + self.per_page]

    def _buttons(self) -> list[str]:
        """The labels of the page's buttons, in lower case."""
        page = self.page
        if page.kind == "search":
            return []
        if page.kind == "text":
            return [BACK, PREVIOUS]
        if page.item is not None:
            return [BACK, PREVIOUS, *_option_labels(page.item), *PAGES, BUY]
        has_next = len(page.results) > (page.number + 1) * self.per_page
        links = [BACK, *([NEXT] if has_next else []), *([PREVIOUS] if page.number else [])]
        return [*links, *(product.asin.lower() for product in self._visible_products())]

    def _render_page(self) -> str:
        page = self.page
        goal = f"Wanted: {self.goal.text}."
        if page.kind == "search":
            return f"{goal}\nThis is the search page."
        if page.item is None:
            return f"{goal}\n{self._render_results()}"
        if page.kind == "text":
            return f"{goal}\n[{BACK}] [{PREVIOUS}]\n{_describe_product(page.item, page.text)}"
        return f"{goal}\n{_render_item(page.item, page.chosen)}"

    def _render_results(self) -> str:
        page = self.page
        pages = -(-len(page.results) // self.per_page)
        labels = [label for label in self._buttons() if label in (BACK, NEXT, PREVIOUS)]
        links = " ".join(f"[{label}]" for label in labels)
        products = self._visible_products()
        lines = [f"[{item.asin.lower()}] {item.title} ${item.price:.2f}" for item in products]
        top = f"Page {page.number + 1} of {pages}" if pages else "Nothing was found"
        return "\n".join([f'{top} for "{page.words}"', links, *lines])

    def _next_action(self) -> str:
        """The solver: searches for the instruction's words, then for the title; opens the first
        result with value 1."""
        page, goal = self.page, self.goal
        if page.kind == "search":
            words = [goal.product.query, *goal.attributes, *goal.options.values()]
            if self.careless:
                extra = [word for word in words[1:] if self.random.random() < WORD_PROBABILITY]
                return f"search[{' '.join([words[0], *extra])}]"
            return f"search[{' '.join(words) if self.searches == 0 else goal.product.title}]"
        if page.kind == "text":
            return f"click[{PREVIOUS}]"
        if page.item is not None:
            return self._next_item_action(page.item)
        if self.careless:
            visible = self._visible_products()
            return f"click[{self.random.choice(visible).asin.lower() if visible else BACK}]"
        target = next((p for p in page.results if _best_value(goal, p) == 1.0), None)
        if target is None:
            return f"click[{BACK}]"
        if target in self._visible_products():
            return f"click[{target.asin.lower()}]"
        ahead = page.results.index(target) >= (page.number + 1) * self.per_page
        return f"click[{NEXT if ahead else PREVIOUS}]"

    def _next_item_action(self, item: Product) -> str:
        if _best_value(self.goal, item) < 1.0 and not self.careless:
            return f"click[{BACK}]"
        options = best_choice(self.goal, item)
        for label, (name, value) in _option_labels(item).items():
            if options.get(name) == value and self.page.chosen.get(name) != value:
                return f"click[{label}]"
        return f"click[{BUY}]"


def _best_value(goal: Goal, product: Product) -> float:
    return score_purchase(goal, product, best_choice(goal, product)).reward


def _option_labels(product: Product) -> dict[str, tuple[str, str]]:
    """The button label of each option: its value, with its name if the value is ambiguous."""
    labels: dict[str, tuple[str, str]] = {}
    for name, values in product.options.items():
        for value in values:
            label = " ".join(value.lower().split())
            if label in labels or label in (BACK, PREVIOUS, BUY, *PAGES):
                label = f"{name}: {label}"
            labels[label] = (name, value)
    return labels


def _render_item(product: Product, chosen: Mapping[str, str]) -> str:
    labels = _option_labels(product)
    lines = [f"[{BACK}] [{PREVIOUS}]", f"{product.title} ${product.price:.2f}"]
    for name in product.options:
        buttons = " ".join(f"[{label}]" for label, (option, _) in labels.items() if option == name)
        choice = f" (chosen: {chosen[name]})" if name in chosen else ""
        lines.append(f"{name}{choice}: {buttons}")
    lines.append(" ".join(f"[{label}]" for label in (*PAGES, BUY)))
    return "\n".join(lines)


def _describe_product(product: Product, page: str) -> str:
    if page == "description":
        return product.description or "There is no description."
    lines = [*product.bullets, *product.attributes]
    return "\n".join(f"- {line}" for line in lines) or "There are no features."

"""WebShop: find and buy what an instruction asks for, in a shop of text pages.

    search page --search[words]--> results --click[id]--> item --click[buy now]--> the end, reward
                                    pages <--- click[back to search], click[next >], ... --->

After the benchmark of that name (arXiv 2207.01206), written anew over its product file: the pages,
actions and reward are the paper's, the search is BM25 (shop/search.py). Owns the pages and what a
click does; products and goals are in shop/catalogue.py, the reward in shop/score.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rollick.envs.base import Reset, Step, TextEnv, random_of
from rollick.envs.formats import Format, ask, read_reply, write_reply
from rollick.envs.shop.catalogue import Goal, Product, Split, choose_goal, load_catalogue
from rollick.envs.shop.score import Match, best_choice, judge
from rollick.errors import EnvError

PRODUCTS = "../shared/data/webshop_products.jsonl.gz"
FOUND = 50
"""Products that a search finds at most."""
CARE = 0.35
"""The chance that a careless shopper searches for a word of the instruction."""
BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
PAGES = ("description", "features")
_ACTION = re.compile(r"\s*(search|click)\s*\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Place:
    """Where the shopper is: the search page, a page of results, an item, or a text of an item."""

    kind: Literal["search", "results", "item", "text"] = "search"
    words: str = ""
    found: tuple[Product, ...] = ()
    page: int = 0
    item: Product | None = None
    chosen: Mapping[str, str] = field(default_factory=dict[str, str])
    text: str = ""

    @property
    def key(self) -> str:
        """What a step is compared by; at an item, it does not matter which search has found it."""
        if self.item is None:
            return "|".join([self.kind, self.words, str(self.page)])
        options = ";".join(f"{name}={value}" for name, value in sorted(self.chosen.items()))
        return "|".join([self.kind, self.item.asin, options, self.text])


class WebShop(TextEnv):
    """One shopping trip. `search[words]` on the search page, `click[what stands in brackets]`."""

    def __init__(
        self,
        *,
        products: str = PRODUCTS,
        split: Split = "train",
        goals: Literal["made", "human"] = "made",
        max_steps: int = 15,
        per_page: int = 10,
        style: Format = "answer",
        rules: bool = True,
        invalid_reward: float = 0.0,
        progress_reward: float = 0.0,
        careless: bool = False,
    ) -> None:
        """`products`: the file; `split`: whose goals; `goals`: made from products or written by
        people; `invalid_reward`: for a reply that is no action or a button that is not there;
        `progress_reward`: as many times as much as the purchase would be worth more than before
        the step, or less. `careless`: the solver searches for some of the words only, opens any
        product that it sees, and buys it with the options that were asked for: it shows how to
        shop, and leaves something to learn."""
        if split not in ("train", "held_out") or goals not in ("made", "human"):
            raise EnvError(
                f"no shop has split={split!r} and goals={goals!r}",
                fix="split is train or held_out, goals is made or human",
            )
        if max_steps < 1 or per_page < 1:
            raise EnvError(f"max_steps={max_steps} and per_page={per_page} must be positive")
        self.catalogue = load_catalogue(Path(products).expanduser().resolve())
        self.split: Split = split
        self.human = goals == "human"
        self.max_steps = max_steps
        self.per_page = per_page
        self.style: Format = style
        self.rules = rules
        self.invalid_reward = invalid_reward
        self.progress_reward = progress_reward
        self.careless = careless
        self.place = Place()
        self.steps = 0
        self.searches = 0
        self.bought: Match | None = None

    def reset(self, seed: int) -> Reset:
        random = random_of("webshop", seed, self.split)
        self.goal = choose_goal(self.catalogue, random, split=self.split, human=self.human)
        self.random = random
        text = self._page()
        if self.rules:
            how = ask(self.style, "one action")
            text = (
                "You are in a web shop. Find what is asked for, choose its options, and buy it.\n"
                "The actions are search[words], on the search page only, and click[button], for "
                f"anything in brackets.\n{how}\n\n{text}"
            )
        return text, {"success": False, "state": self.place.key}

    def step(self, action: str) -> Step:
        self.steps += 1
        before = self.place
        valid = self._act(read_reply(action, self.style).answer or "")
        over = self.bought is not None
        info: dict[str, Any] = {
            "valid": valid,
            "effective": valid and (over or self.place != before),
            "success": self.bought is not None and self.bought.reward == 1.0,
            "state": self.place.key,
        }
        if self.bought is not None:
            info["metrics"] = dict(zip(Match._fields, self.bought, strict=True))
            return "You bought it. Thank you.", self.bought.reward, True, False, info
        text = self._page()
        if not valid:
            text = f"That is not possible here.\n{text}"
        reward = 0.0 if valid else self.invalid_reward
        if self.progress_reward:
            reward += self.progress_reward * (self._worth_now(self.place) - self._worth_now(before))
        return text, reward, False, self.steps >= self.max_steps, info

    def legal_actions(self) -> Sequence[str]:
        if self.place.kind == "search":
            words = (self.goal.product.query, *self.goal.attributes)
            answers = [f"search[{word}]" for word in words]
        else:
            answers = [f"click[{label}]" for label in self._buttons()]
        return [write_reply(answer, self.style) for answer in answers]

    def solve(self) -> str | None:
        return None if self.bought else write_reply(self._next_action(), self.style)

    def _worth_now(self, place: Place) -> float:
        """What buying here and now would pay; nothing where there is nothing to buy."""
        if place.item is None:
            return 0.0
        return judge(self.goal, place.item, place.chosen).reward

    def _act(self, answer: str) -> bool:
        """Do what the answer says; False if it says nothing that can be done here."""
        match = _ACTION.fullmatch(answer)
        if match is None:
            return False
        verb, what = match[1].lower(), " ".join(match[2].split())
        if verb == "search":
            if self.place.kind != "search" or not what:
                return False
            found = tuple(self.catalogue.search(what, limit=FOUND))
            self.searches += 1
            self.place = Place("results", words=what.lower(), found=found)
            return True
        label = what.lower()
        return label in self._buttons() and self._click(label)

    def _click(self, label: str) -> bool:
        place, item = self.place, self.place.item
        if label == BACK:
            self.place = Place()
        elif label == NEXT:
            self.place = replace(place, page=place.page + 1)
        elif label == PREVIOUS:
            self.place = self._previous()
        elif item is None:
            product = self.catalogue.by_asin[label]
            self.place = replace(place, kind="item", item=product, chosen={})
        elif label == BUY:
            self.bought = judge(self.goal, item, place.chosen)
        elif label in PAGES and label not in _option_labels(item):
            self.place = replace(place, kind="text", text=label)
        else:
            name, value = _option_labels(item)[label]
            self.place = replace(place, chosen={**place.chosen, name: value})
        return True

    def _previous(self) -> Place:
        place = self.place
        if place.kind == "text":
            return replace(place, kind="item", text="")
        if place.kind == "item":
            return replace(place, kind="results", item=None, chosen={})
        return replace(place, page=place.page - 1)

    def _shown(self) -> tuple[Product, ...]:
        begin = self.place.page * self.per_page
        return self.place.found[begin : begin + self.per_page]

    def _buttons(self) -> list[str]:
        """What can be clicked, in lower case, as on the page."""
        place = self.place
        if place.kind == "search":
            return []
        if place.kind == "text":
            return [BACK, PREVIOUS]
        if place.item is not None:
            return [BACK, PREVIOUS, *_option_labels(place.item), *PAGES, BUY]
        ahead = len(place.found) > (place.page + 1) * self.per_page
        turns = [*([NEXT] if ahead else []), *([PREVIOUS] if place.page else [])]
        return [BACK, *turns, *(product.asin.lower() for product in self._shown())]

    def _page(self) -> str:
        place = self.place
        head = f"Wanted: {self.goal.text}."
        if place.kind == "search":
            return f"{head}\nThis is the search page."
        if place.kind == "text":
            assert place.item is not None
            return f"{head}\n[{BACK}] [{PREVIOUS}]\n{_text(place.item, place.text)}"
        if place.item is not None:
            return f"{head}\n{_item_page(place.item, place.chosen)}"
        return f"{head}\n{self._results_page()}"

    def _results_page(self) -> str:
        place = self.place
        pages = -(-len(place.found) // self.per_page)
        turns = " ".join(
            f"[{label}]" for label in self._buttons() if label in (BACK, NEXT, PREVIOUS)
        )
        lines = [
            f"[{product.asin.lower()}] {product.title} ${product.price:.2f}"
            for product in self._shown()
        ]
        top = f"Page {place.page + 1} of {pages}" if pages else "Nothing was found"
        return "\n".join([f'{top} for "{place.words}"', turns, *lines])

    def _next_action(self) -> str:
        """The solver: words of the instruction first, then those of the title; of the results the
        first that is worth 1."""
        place, goal = self.place, self.goal
        if place.kind == "search":
            values = goal.options.values()
            words = [goal.product.query, *goal.attributes, *values]
            if self.careless:
                more = [word for word in words[1:] if self.random.random() < CARE]
                return f"search[{' '.join([words[0], *more])}]"
            return f"search[{' '.join(words) if self.searches == 0 else goal.product.title}]"
        if place.kind == "text":
            return f"click[{PREVIOUS}]"
        if place.item is not None:
            return self._finish(place.item)
        if self.careless:
            shown = self._shown()
            return f"click[{self.random.choice(shown).asin.lower() if shown else BACK}]"
        fits = next((p for p in place.found if _worth(goal, p) == 1.0), None)
        if fits is None:
            return f"click[{BACK}]"
        if fits in self._shown():
            return f"click[{fits.asin.lower()}]"
        ahead = place.found.index(fits) >= (place.page + 1) * self.per_page
        return f"click[{NEXT if ahead else PREVIOUS}]"

    def _finish(self, item: Product) -> str:
        if _worth(self.goal, item) < 1.0 and not self.careless:
            return f"click[{BACK}]"
        wanted = best_choice(self.goal, item)
        for label, (name, value) in _option_labels(item).items():
            if wanted.get(name) == value and self.place.chosen.get(name) != value:
                return f"click[{label}]"
        return f"click[{BUY}]"


def _worth(goal: Goal, product: Product) -> float:
    return judge(goal, product, best_choice(goal, product)).reward


def _option_labels(product: Product) -> dict[str, tuple[str, str]]:
    """The button of each option: its value, with its name where the value alone is not clear."""
    labels: dict[str, tuple[str, str]] = {}
    for name, values in product.options.items():
        for value in values:
            label = " ".join(value.lower().split())
            if label in labels or label in (BACK, PREVIOUS, BUY, *PAGES):
                label = f"{name}: {label}"
            labels[label] = (name, value)
    return labels


def _item_page(product: Product, chosen: Mapping[str, str]) -> str:
    labels = _option_labels(product)
    lines = [f"[{BACK}] [{PREVIOUS}]", f"{product.title} ${product.price:.2f}"]
    for name in product.options:
        buttons = " ".join(f"[{label}]" for label, (of, _) in labels.items() if of == name)
        taken = f" (chosen: {chosen[name]})" if name in chosen else ""
        lines.append(f"{name}{taken}: {buttons}")
    lines.append(" ".join(f"[{label}]" for label in (*PAGES, BUY)))
    return "\n".join(lines)


def _text(product: Product, which: str) -> str:
    if which == "description":
        return product.description or "There is no description."
    lines = [*product.bullets, *product.attributes]
    return "\n".join(f"- {line}" for line in lines) or "There are no features."

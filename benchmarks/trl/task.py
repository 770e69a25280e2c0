"""The task of both sides of step_vs_trl.py: prompts and a reward, in plain Python.

The prompts are word problems as GRPO is mostly run on: an instruction, a story, a question, about
a hundred tokens. The reward only has to differ within a group, so that every group is trained on.
"""

from __future__ import annotations

from random import Random

INSTRUCTION = (
    "Solve the problem below. Think step by step, write down every calculation that you make, "
    "and give the result as a single number in the last line, after the word Answer."
)
STORIES = (
    "{name} packs {a} boxes of {thing} every morning and {b} boxes every afternoon. Each box holds "
    "{c} {thing}. On Friday {name} stops at noon. How many {thing} are packed from Monday to "
    "Friday?",
    "A shop buys {a} crates of {thing} for {b} coins each and sells every crate for {c} coins more "
    "than it paid. {name} breaks two of the crates, which cannot be sold. How many coins does the "
    "shop earn or lose in all?",
    "{name} has {a} {thing} and gives away {b} of them each day. Every third day a friend brings "
    "{c} new {thing}. How many {thing} does {name} have after nine days?",
    "A train of {a} wagons carries {b} {thing} in each wagon. At the first stop {c} wagons are "
    "left behind, and {name} takes half of the {thing} out of the last one. How many arrive?",
)
EXAMPLE = (
    "Example {number}: A baker fills {number} trays with 12 rolls each and sells all but 5 of them "
    "for 2 coins a roll. How many coins does the baker get? Step 1: there are 12 rolls on each of "
    "the trays, so I multiply the number of trays by 12. Step 2: 5 rolls are left, so I take 5 "
    "away. Step 3: each roll brings 2 coins, so I multiply by 2. Answer: {answer}"
)
NAMES = ("Amina", "Bruno", "Chloe", "Deniz", "Emeka", "Farah", "Goran", "Hanna")
THINGS = ("apples", "books", "candles", "tiles", "letters", "cups", "pencils", "lamps")


def prompts(count: int, *, examples: int = 0) -> list[str]:
    """The first `count` problems, always the same ones, after some solved examples."""
    draw = Random(7)
    solved = [
        EXAMPLE.format(number=number, answer=2 * (12 * number - 5))
        for number in range(1, examples + 1)
    ]
    before = "\n\n".join([INSTRUCTION, *solved, ""])
    return [
        before
        + STORIES[number % len(STORIES)].format(
            name=draw.choice(NAMES),
            thing=draw.choice(THINGS),
            a=draw.randint(11, 99),
            b=draw.randint(2, 40),
            c=draw.randint(3, 60),
        )
        for number in range(count)
    ]


def rows(count: int, *, examples: int = 0) -> list[dict[str, str]]:
    return [{"prompt": text} for text in prompts(count, examples=examples)]


def variety(completion: str) -> float:
    """The share of distinct words in a text; its letters break ties."""
    words = completion.split()
    return len(set(words)) / max(len(words), 1) + 1e-3 * len(completion)

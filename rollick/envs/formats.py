"""How a policy writes an action, and how it is read from what it wrote.

    plain    Right                                  answer    <answer>Right</answer>
    think    <think>...</think><answer>Right</answer>

Reading is strict about the format and lenient about the words: case, a full stop and spaces do not
matter. Owns text only: what an action does is the environment's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Format = Literal["plain", "answer", "think"]

_ANSWER = re.compile(r"\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
SEPARATOR = "||"
"""Between the actions of one turn, where an environment takes several."""

ASKS: Mapping[Format, str] = {
    "plain": "Reply with {what} and nothing else.",
    "answer": "Reply in the form <answer>{what}</answer>.",
    "think": "Think first, then answer: <think>your thoughts</think><answer>{what}</answer>.",
}


class Written(NamedTuple):
    """The part of a reply that is the action; None where the reply breaks the format."""

    answer: str | None
    thought: str = ""


def read_reply(text: str, style: Format) -> Written:
    """Take a reply apart. In the style `think` the thought may be what a template has begun:
    a reply that starts inside it (`... </think><answer>`) is read, too."""
    if style == "plain":
        return Written(text.strip() or None)
    if style == "think" and "<think>" not in text:
        text = f"<think>{text}"
    match = (_THINK if style == "think" else _ANSWER).fullmatch(text)
    if match is None:
        return Written(None)
    answer = match.groups()[-1].strip()
    return Written(answer or None, match[1].strip() if style == "think" else "")


def write_reply(answer: str, style: Format, *, thought: str = "") -> str:
    """A reply as a policy should write it."""
    if style == "plain":
        return answer
    body = f"<answer>{answer}</answer>"
    return f"<think>{thought}</think>{body}" if style == "think" else body


def ask(style: Format, what: str) -> str:
    """The sentence of the rules that says how to answer."""
    return ASKS[style].format(what=what)


def read_actions(text: str, style: Format, words: Mapping[str, int], *, limit: int) -> list[int]:
    """The actions of a reply, in order; empty if any of them is no action, or they are too many.

    `words`: what each action may be called, in lower case.
    """
    answer = read_reply(text, style).answer
    if answer is None:
        return []
    known = words.get(answer.lower())
    if known is not None:
        return [known]
    parts = [part.strip(" \t\n.").lower() for part in answer.split(SEPARATOR)]
    actions = [words.get(part) for part in parts]
    if len(actions) > limit or None in actions:
        return []
    return [action for action in actions if action is not None]


def write_actions(names: Sequence[str], style: Format) -> str:
    """A reply with these actions, one after another."""
    return write_reply(f" {SEPARATOR} ".join(names), style)

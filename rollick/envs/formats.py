"""Formats of a policy's reply: parsing and writing actions.

    plain    Right                                  answer    <answer>Right</answer>
    think    <think>...</think><answer>Right</answer>

Parsing is strict about the format and ignores case, a full stop and spaces in the words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

Format = Literal["plain", "answer", "think"]

_THINK, _ANSWER, _END = "<think>", "<answer>", "</answer>"
_END_OF_THINKING = re.compile(r"</think>\s*<answer>")
SEPARATOR = "||"
"""Between the actions of one turn, if an environment accepts several."""

FORMAT_INSTRUCTIONS: Mapping[Format, str] = {
    "plain": "Reply with {answer} and nothing else.",
    "answer": "Reply in the form <answer>{answer}</answer>.",
    "think": "Think first, then answer: <think>your thoughts</think><answer>{answer}</answer>.",
}


def read_reply(text: str, style: Format) -> str | None:
    """The answer of a reply; None if it does not match the format. In the style `think` the chat
    template may already contain `<think>`, so a reply without it is valid."""
    if style == "plain":
        return text.strip() or None
    if style == "think" and _THINK not in text:
        text = f"{_THINK}{text}"
    text = text.strip()
    begin, end = _begin_of_answer(text, style), len(text) - len(_END)
    if begin is None or begin > end or not text.endswith(_END):
        return None
    return text[begin:end].strip() or None


def _begin_of_answer(text: str, style: Format) -> int | None:
    if style == "answer":
        return len(_ANSWER) if text.startswith(_ANSWER) else None
    match = _END_OF_THINKING.search(text, len(_THINK)) if text.startswith(_THINK) else None
    return None if match is None else match.end()


def write_reply(answer: str, style: Format) -> str:
    if style == "plain":
        return answer
    body = f"<answer>{answer}</answer>"
    return f"<think></think>{body}" if style == "think" else body


def describe_format(style: Format, answer: str) -> str:
    """The sentence of the prompt that explains the format."""
    return FORMAT_INSTRUCTIONS[style].format(answer=answer)


def read_actions(text: str, style: Format, words: Mapping[str, int], *, limit: int) -> list[int]:
    """The actions of a reply, in order; empty if one is invalid or there are more than `limit`.
    `words` maps lower-case words to actions."""
    parts = (read_reply(text, style) or "").split(SEPARATOR)
    names = [part.strip(" \t\n.").lower() for part in parts]
    actions = [words[name] for name in names if name in words]
    return actions if len(actions) == len(names) <= limit else []

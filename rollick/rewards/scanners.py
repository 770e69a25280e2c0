"""Single-pass scanners of completions: boxes, tags, formulas and fenced blocks.

The policy writes the text, and a text may repeat an opening mark thousands of times. Every function
here takes time in proportion to the text: it visits each mark once and never searches again for the
end of a mark that has none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

BOX_OR_BRACE = re.compile(r"\\(?:boxed|f(?:rame)?box)\s*\{|\\.|[{}]", re.DOTALL)
FORMULA_MARK = re.compile(r"\\[\\$()\[\]]|\$\$|\$|\n")
CLOSING_MARKS = {"$$": "$$", r"\(": r"\)", r"\[": r"\]"}
PLAIN_WORD = re.compile(r"[a-zA-Z]{3,}")
FENCE = re.compile(r"```")
SPACES = re.compile(r"[^\S\n]{2,}")
BLANK_LINES = re.compile(r"\n(?:[^\S\n]?\n){2,}")
MAX_BOXES = 100
"""Boxes that are returned, from the last one: nested boxes share their content."""


class Span(NamedTuple):
    """A marked part of a text: from its opening mark to after its closing one, and the content."""

    start: int
    end: int
    content: str


def find_boxes(text: str) -> list[Span]:
    r"""The complete boxes (`\boxed{...}`, `\fbox{...}`, `\framebox{...}`), by their start. They
    may be nested."""
    boxes: list[tuple[int, int, slice]] = []
    open_braces: list[tuple[int, int] | None] = []
    for match in BOX_OR_BRACE.finditer(text):
        mark = match[0]
        if mark == "{":
            open_braces.append(None)
        elif mark == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                boxes.append((box[0], match.end(), slice(box[1], match.start())))
        elif mark.endswith("{") and len(mark) > 2:
            open_braces.append((match.start(), match.end()))
    boxes.sort(key=itemgetter(0))
    return [Span(start, end, text[content]) for start, end, content in boxes[-MAX_BOXES:]]


def find_tagged(text: str, tag: str) -> list[str]:
    """The contents of all `<tag>...</tag>`. A tag inside a tag of the same name is content."""
    contents: list[str] = []
    begin: int | None = None
    for match in re.finditer(rf"<(/?){re.escape(tag)}>", text, re.IGNORECASE):
        if not match[1]:
            begin = match.end() if begin is None else begin
        elif begin is not None:
            contents.append(text[begin : match.start()])
            begin = None
    return contents


def find_formulas(text: str) -> list[Span]:
    r"""The formulas in `$...$`, `$$...$$`, `\(...\)` and `\[...\]`, in order. A dollar sign before
    an amount of money does not open a formula."""
    formulas: list[Span] = []
    last = {mark: text.rfind(closing) for mark, closing in CLOSING_MARKS.items()}
    mark, begin, after = "", 0, 0
    for match in FORMULA_MARK.finditer(text):
        token = match[0]
        if token == "\n":
            mark = "" if mark == "$" else mark
        elif token == "$" and mark in ("", "$"):
            if mark and _is_formula(
                text[after : match.start()], text[match.end() : match.end() + 1]
            ):
                formulas.append(Span(begin, match.end(), text[after : match.start()]))
                mark = ""
            else:
                mark, begin, after = "$", match.start(), match.end()
        elif mark in CLOSING_MARKS and token == CLOSING_MARKS[mark]:
            formulas.append(Span(begin, match.end(), text[after : match.start()]))
            mark = ""
        elif mark in ("", "$") and last.get(token, -1) > match.start():
            mark, begin, after = token, match.start(), match.end()
    return [span for span in formulas if span.content.strip()]


def matches_outside_formulas(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The matches of a pattern that do not begin inside a formula, such as the dot in `$1.5$`."""
    formulas = deque(find_formulas(text))
    for match in pattern.finditer(text):
        while formulas and formulas[0].end <= match.start():
            formulas.popleft()
        if not (formulas and formulas[0].start < match.start()):
            yield match


def _is_formula(content: str, following: str) -> bool:
    """Whether the text between two dollar signs is a formula and not the text between two prices,
    as in `$30 and now has $27`."""
    has_words = "\\" not in content and PLAIN_WORD.search(content) is not None
    return not following.isdigit() and not has_words


def collapse_spaces(text: str) -> str:
    """One space for each run of spaces, and at most one blank line between two lines. A pattern
    with several `\\s*` in a row is then fast on every text."""
    return BLANK_LINES.sub("\n\n", SPACES.sub(" ", text))


def find_fenced(text: str) -> Iterator[str]:
    """The contents of all pairs of ```, with what follows the opening fence on its line."""
    fences = [match.span() for match in FENCE.finditer(text)]
    for (_, begin), (end, _) in zip(fences[::2], fences[1::2], strict=False):
        yield text[begin:end]

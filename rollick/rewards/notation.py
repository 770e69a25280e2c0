"""How mathematical answers are written: one spelling for each, exact numbers, LaTeX.

    as written -- normalise --> one spelling -- read_number --> Number (exact, with its unit)
                                     +--------- to_latex -----> what a LaTeX grammar reads

Nothing is evaluated: a number is read by a pattern, and every other expression stays text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 200
"""Of a number that is read; a longer one is compared as text."""

SYMBOLS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "—": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "°": "",
        "²": "^2",
        "³": "^3",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "％": "%",
        "`": "",
        "\u00a0": " ",
        "~": " ",
    }
)
SPACING = re.compile(
    r"(?<!\\)\\(?:left|right|displaystyle|quad|qquad|[!;:,> ])(?![a-zA-Z])|\\big[lr]?"
)
TEXT_MACRO = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|rm|bf)\s*\{([^{}]*)\}"
)
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\bdegrees?\b")
WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("{", "}"))

DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<currency>\\?[$€£])?\s*(?P<second>-?)(?:
        (?P<whole>[0-9]+)\s*\\frac\{{(?P<mixed_top>[0-9]+)\}}\{{(?P<mixed_bottom>[0-9]+)\}}
      | (?P<whole_2>[0-9]+)\s+(?P<mixed_top_2>[0-9]+)\s*/\s*(?P<mixed_bottom_2>[0-9]+)
      | \\frac\{{\s*(?P<top>-?{DECIMAL})\s*\}}\{{\s*(?P<bottom>-?{DECIMAL})\s*\}}
      | \(?(?P<top_2>{DECIMAL})\s*/\s*(?P<bottom_2>{DECIMAL})\)?
      | (?P<scaled>{DECIMAL})\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*
        \{{?\s*(?P<power>-?[0-9]{{1,3}})\s*\}}?
      | (?P<decimal>{DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}}))?
    )\s*(?P<percent>\\?%|percent\b)?\s*(?P<unit>.*)""",
    re.VERBOSE | re.DOTALL,
)
UNIT = re.compile(
    r"\(?\s*(?:[a-zA-Z]{2,}\.?|/)(?:[\s/-]+[a-zA-Z]+\.?)*(?:\s*\^\s*\{?[23]\}?)?\s*\)?"
)
_NO_UNIT = (
    "or and to plus minus times over hundred thousand million billion trillion dozen half pi sqrt "
    "sin cos tan cot sec csc log ln exp mod remainder"
)
NO_UNIT = frozenset(_NO_UNIT.split())
"""Words after a number that change it."""

MEASURES = {
    spelling: measure
    for measure, spellings in {
        "dollar": "dollar usd buck",
        "euro": "euro eur",
        "pound": "pound gbp",
        "cent": "cent penny pennies ct",
        "millimetre": "mm millimeter millimetre",
        "centimetre": "cm centimeter centimetre",
        "metre": "meter metre",
        "kilometre": "km kilometer kilometre",
        "inch": "in inch inche",
        "foot": "ft foot feet",
        "yard": "yd yard",
        "mile": "mi mile",
        "gram": "gram",
        "kilogram": "kg kilogram kilo",
        "ounce": "oz ounce",
        "second": "sec second",
        "minute": "min minute",
        "hour": "hr hour",
        "day": "day",
        "week": "week",
        "month": "month",
        "year": "yr year",
        "morning": "am a.m",
        "afternoon": "pm p.m",
        "litre": "liter litre",
        "millilitre": "ml milliliter millilitre",
    }.items()
    for spelling in spellings.split()
}
"""Units that say how large the number is: 5 cm are not 5 m, but 5 apples are 5 fruits."""
_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp sqrt cbrt infty infinity "
    "inf and pmatrix bmatrix vmatrix matrix begin end cup cap circ frac"
)
FUNCTIONS = frozenset(_FUNCTIONS.split())
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
MEMBER = re.compile(r"^[a-zA-Z]\s*\\in\b\s*")
CHOICE = re.compile(r"\(\s*([A-Za-z])\s*\)")
MAGNITUDE = 400
"""Largest power of ten that is written out."""


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number, whether it is in per cent, and its unit ("" for none)."""

    value: Fraction
    percent: bool = False
    unit: str = ""

    def equals(self, other: Number) -> bool:
        """50 % is 50 and is 0.5, as answers go; 5 cm is 5 and is not 5 m."""
        mine, theirs = MEASURES.get(self.unit), MEASURES.get(other.unit)
        if mine and theirs and mine != theirs:
            return False
        if self.percent == other.percent:
            return self.value == other.value
        shares, plain = (self, other) if self.percent else (other, self)
        return plain.value in (shares.value, shares.value / 100)


def normalise(text: str) -> str:
    """One spelling for what is written in several ways; the meaning stays."""
    text = text.translate(SYMBOLS).strip()
    text = re.sub(r"√\s*\(", "sqrt(", text)
    text = re.sub(r"√\s*([0-9]+|[a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r",\\!\s*(?=[0-9]{3})", ",", text)
    text = SPACING.sub(" ", text)
    text = TEXT_MACRO.sub(lambda match: f" {match[1]} ", text)
    text = DEGREES.sub("", text)
    text = _plain_fractions(text)
    text = re.sub(r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = text.replace("\\%", "%").replace("\\$", "$").replace("\\{", "{ ").replace("\\}", " }")
    text = " ".join(text.split())
    text = _unwrap(text)
    chosen = CHOICE.fullmatch(text)
    return chosen[1] if chosen else text


def compact(text: str) -> str:
    """Without spaces, but for those between digits, and with `_8` for `_{8}`."""
    text = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)
    return re.sub(r"_\{([0-9a-zA-Z]+)\}", r"_\1", text)


def read_number(text: str) -> Number | None:
    """The number that the text is, perhaps with a unit; None if it is anything else."""
    if len(text) > MAX_DIGITS:
        return None
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    unit = match["unit"].strip()
    if unit and not _is_unit(unit):
        return None
    value = _value(match)
    if value is None:
        return None
    if "-" in (match["sign"], match["second"]):
        value = -value
    return Number(value, bool(match["percent"]), _unit_name(unit, match["currency"] or ""))


def without_unit(text: str) -> str:
    """An expression without a measure at its end: `8 \\pi cm` is `8 \\pi`."""
    match = re.search(r"\s+([a-zA-Z.]{2,})(?:\s*\^\s*\{?[23]\}?)?$", text)
    known = match is not None and _unit_name(match[1], "") in MEASURES
    return text[: match.start()] if match is not None and known else text


def is_prose(text: str) -> bool:
    """Whether it is words: their letters are not unknowns, and `east` is not `seat`."""
    words = {word.lower() for word in WORD.findall(text)}
    return bool(words - FUNCTIONS) or text.lower() == "no"


def to_latex(text: str) -> str:
    """An expression as LaTeX, whether it was written so or as in a program."""
    text = MEMBER.sub("", text)
    is_plain = "\\" not in text and "{" not in text
    text = re.sub(r"\s+(?:and|or)\s+", ", ", text)
    text = text.replace("**", "^").replace("<=", r"\le ").replace(">=", r"\ge ")
    text = text.replace("+-", r"\pm ").replace("+/-", r"\pm ")
    text = re.sub(r"(?<=[)\]])\s*U\s*(?=[(\[])", r" \\cup ", text)
    text = re.sub(r"(?<![\\a-zA-Z])(?:infinity|infty|inf|oo)(?![a-zA-Z])", r"\\infty ", text)
    text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text)
    text = re.sub(
        r"(?<![\\a-zA-Z])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln)(?![a-zA-Z])",
        r"\\\1 ",
        text,
    )
    text = _braced(text, "sqrt", r"\sqrt")
    text = _braced(text, "^", "^")
    if is_plain:
        text = re.sub(r"\^\s*(-?[0-9]+)", r"^{\1}", text)
    return text.replace("*", r" \cdot ")


def _plain_fractions(text: str) -> str:
    r"""`\dfrac34`, `\frac 3{4}` and the like as `\frac{3}{4}`."""
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}", text)
    return re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{", r"\\frac{\1}{", text)


def _unwrap(text: str) -> str:
    """Without signs around the whole, and without the sentence's last one."""
    for _ in range(len(WRAPPERS)):
        text = text.rstrip(" .,;:").strip()
        for begin, end in WRAPPERS:
            inner = text[len(begin) : -len(end)]
            is_whole = text.startswith(begin) and text.endswith(end) and begin not in inner
            if (
                is_whole
                and len(text) > len(begin) + len(end)
                and not ("," in inner and begin == "{")
            ):
                text = inner.strip()
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    whole = part["whole"] or part["whole_2"]
    if whole:
        bottom = int(part["mixed_bottom"] or part["mixed_bottom_2"])
        top = int(part["mixed_top"] or part["mixed_top_2"])
        return int(whole) + Fraction(top, bottom) if bottom else None
    top = part["top"] or part["top_2"]
    if top:
        bottom = _decimal(part["bottom"] or part["bottom_2"])
        return _decimal(top) / bottom if bottom else None
    power = int(part["power"] or part["exponent"] or 0)
    if abs(power) > MAGNITUDE:
        return None
    return _decimal(part["scaled"] or part["decimal"]) * Fraction(10) ** power


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def _is_unit(text: str) -> bool:
    words = set(re.findall(r"[a-z.]+", text.lower()))
    return UNIT.fullmatch(text) is not None and words.isdisjoint(NO_UNIT)


def _unit_name(text: str, currency: str) -> str:
    if currency:
        return {"$": "dollar", "€": "euro", "£": "pound"}[currency[-1]]
    first = text.lower().strip(" ().").split()[:1]
    word = first[0].rstrip(".") if first else ""
    return word[:-1] if word.endswith("s") and word[:-1] in MEASURES else word


def _braced(text: str, name: str, macro: str) -> str:
    """`name(...)` as `macro{...}`, where the parentheses belong together."""
    parts: list[str] = []
    pattern = re.compile(rf"(?<!\\){re.escape(name)}\s*\(")
    while match := pattern.search(text):
        end = _closing(text, match.end())
        if end is None:
            break
        parts.append(text[: match.start()] + macro + "{")
        text = text[match.end() : end] + "}" + text[end + 1 :]
    return "".join(parts) + text


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None

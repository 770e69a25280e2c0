"""Notations of mathematical answers: one normal form, exact numbers, LaTeX.

    text -- normalise --> normal form -- read_number --> Number (exact, with its unit)
                               +--------- to_latex -----> LaTeX for math-verify

Nothing is evaluated: numbers are parsed by a pattern, all other expressions stay text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 200
"""Maximum characters that are parsed as a number; longer texts are compared as text."""

SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("−–—", "-"),
        **dict.fromkeys("·⋅", r"\cdot "),
        **dict.fromkeys("\u00a0~", " "),
        **dict.fromkeys("°`", ""),
        **{"¢": " cents"},
        **{"×": r"\times ", "÷": "/", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "％": "%"},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "π": r"\pi ", "∞": r"\infty "},
        **{"≈": r"\approx ", "≃": r"\approx ", "≠": r"\ne "},
        **{"²": "^2", "³": "^3", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"},
        **{"¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
    }
)
_SPACES = "left|right|displaystyle|quad|qquad|[!;:,> ]"
SPACING = re.compile(rf"(?<!\\)\\(?:{_SPACES})(?![a-zA-Z])|\\big[lr]?")
TEXT_MACRO = re.compile(
    r"\\(?:text(?:bf|it|rm)?|mbox|underline|emph|boldsymbol|math(?:rm|bf|it)|rm|bf)\s*\{([^{}]*)\}"
)
DIGIT_GROUP = re.compile(
    r"(?<=[0-9])(?:,?\\[,:;!>]|\{,\}|[\u2009\u202f\u00a0])\s*(?=[0-9]{3}(?![0-9]))"
)
"""Separators of three-digit groups in LaTeX or print: `2\\,173` is 2173."""
PICTOGRAPH = re.compile("[\u2600-\u27bf\u2b50\ufe0f\U0001f000-\U0001faff]+")
"""Emoji and check marks."""
CONCLUSION = re.compile(r"^\\(?:therefore|implies|Rightarrow|rightarrow|to)(?![a-zA-Z])\s*")
APPROXIMATELY = re.compile(r"^([a-zA-Z]\s*)?\\(?:approx|simeq|doteq)(?![a-zA-Z])\s*")
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\bdegrees?\b")
WRAPPERS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("**", "**"),
    ("{", "}"),
    ('"', '"'),
)
DECIMAL_BASE = re.compile(r"(?<=[0-9])_(?:10|\{10\})$")

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
SHORT_UNIT = re.compile(r"[mgslhL](?:\s*/\s*[a-zA-Z]+)?(?:\s*\^\s*\{?[23]\}?)?")
"""A unit of one letter; after a space it is not a variable."""
_NOT_UNITS = (
    "or and to plus minus times over half pi sqrt sin cos tan cot sec csc log ln exp mod remainder "
    "hundred thousand million billion trillion dozen is are was isn not wrong incorrect impossible"
)
NOT_UNITS = frozenset(_NOT_UNITS.split())
"""Words after a number that are not units, because they change its value."""

SCALES = {
    **{"dozen": 12, "hundred": 100, "thousand": 10**3},
    **{"million": 10**6, "billion": 10**9, "trillion": 10**12},
}
SCALE = re.compile(rf"({'|'.join(SCALES)})s?\b\s*", re.IGNORECASE)

_MEASURES = (
    "dollar usd buck, euro eur, pound gbp, cent penny pennies ct, mm millimeter millimetre, "
    "cm centimeter centimetre, meter metre m, km kilometer kilometre, in inch inche, "
    "ft foot feet, yd yard, mi mile, gram g, mg milligram, kg kilogram kilo, oz ounce, lb lbs, "
    "sec second s, min minute, hr hour h, day, week, month, yr year, am a.m, pm p.m, "
    "liter litre l, ml milliliter millilitre"
)
MEASURES = {
    spelling: spellings.split()[0]
    for spellings in _MEASURES.split(",")
    for spelling in spellings.split()
}
"""One spelling per unit of measure. 5 cm is not 5 m; other words are ignored: 5 apples equal 5."""
RATES = {"mph": "mi/hr", "kph": "km/hr", "kmh": "km/hr"}
POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cubed": "^3"}
UNIT_PART = re.compile(r"[a-zA-Z]+(?:\.[a-zA-Z]\b)?|/|\^\s*\{?\s*[23]")
_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp sqrt cbrt infty infinity "
    "inf and pmatrix bmatrix vmatrix matrix begin end cup cap circ frac"
)
FUNCTIONS = frozenset(_FUNCTIONS.split())
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
MEMBER = re.compile(r"^[a-zA-Z]\s*\\in\b\s*")
CHOICE = re.compile(r"\(\s*([A-Za-z])\s*\)")
LABEL = re.compile(r"^(?:\*\*)?(?:\(\s*[A-Ea-e]\s*\)|[A-E][.)])\s*(?:\*\*)?\s*(?=[-$]?[0-9])")
"""The letter of a choice before its value: `(C) 39`."""
MAX_POWER = 400
"""Largest power of ten that is computed."""
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
WORD_VALUES = {
    **{word: value for value, word in enumerate(_ONES.split())},
    **{word: 10 * value for value, word in enumerate(_TENS.split(), start=2)},
}
WORD_SCALES = ("hundred", "thousand")
_WORD = "|".join((*sorted(WORD_VALUES, key=len, reverse=True), *WORD_SCALES))
NUMBER_PHRASE = re.compile(
    rf"\b(?:{_WORD})(?:(?:[\s-]+|\s+and\s+)(?:{_WORD})){{0,8}}\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number, whether it is a percentage, and its unit ("" for none)."""

    value: Fraction
    percent: bool = False
    unit: str = ""

    def equals(self, other: Number) -> bool:
        """50 % equals 50 and 0.5; 5 cm equals 5 but not 5 m."""
        if not is_same_unit(self.unit, other.unit):
            return False
        if self.percent == other.percent:
            return self.value == other.value
        percentage, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percentage.value, percentage.value / 100)


def normalise(text: str) -> str:
    """The normal form, which equivalent spellings share."""
    text = PICTOGRAPH.sub("", DIGIT_GROUP.sub("", text)).translate(SYMBOLS).strip()
    text = re.sub(r"√\s*\(", "sqrt(", text)
    text = re.sub(r"√\s*([0-9]+|[a-zA-Z])", r"\\sqrt{\1}", text)
    text = SPACING.sub(" ", text)
    text = TEXT_MACRO.sub(lambda match: f" {match[1]} ", text)
    text = DEGREES.sub("", text)
    text = _brace_fractions(text)
    text = re.sub(r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = text.replace("\\%", "%").replace("\\$", "$").replace("\\{", "{ ").replace("\\}", " }")
    text = _unwrap(" ".join(text.split()))
    text = CONCLUSION.sub("", text)
    text = DECIMAL_BASE.sub("", text)
    text = APPROXIMATELY.sub(lambda match: f"{match[1]}=" if match[1] else "", text)
    choice = CHOICE.fullmatch(text)
    return choice[1] if choice else LABEL.sub("", text)


def compact(text: str) -> str:
    """Remove spaces, except between digits. Write `_{8}` as `_8` and `^{8}` as `^8`."""
    text = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)
    text = re.sub(r"\^\{([0-9a-zA-Z])\}(?![0-9a-zA-Z])", r"^\1", text)
    return re.sub(r"_\{([0-9a-zA-Z]+)\}", r"_\1", text)


def read_number(text: str) -> Number | None:
    """Parse a number with an optional unit; None if the text is not one."""
    match = NUMBER.fullmatch(text.strip()) if len(text) <= MAX_DIGITS else None
    if match is None:
        return None
    unit, value = match["unit"].strip(), _read_value(match)
    if value is None:
        return None
    scale = SCALE.match(unit)
    if scale:
        value, unit = value * SCALES[scale[1].lower()], unit[scale.end() :]
    is_separate = match.start("unit") > 0 and text.strip()[match.start("unit") - 1].isspace()
    if unit and (match["decimal"] or "").endswith("."):  # a new sentence: `27. So it is wrong`
        return None
    if unit and not _is_unit(unit) and not (is_separate and SHORT_UNIT.fullmatch(unit)):
        return None
    if "-" in (match["sign"], match["second"]):
        value = -value
    return Number(value, bool(match["percent"]), unit_name(unit, match["currency"] or ""))


def words_to_digits(text: str) -> str:
    """Write the numbers of a text in digits: `twenty-three cookies` as `23 cookies`. `one` alone
    stays: it is mostly a pronoun. A scale alone (`5 thousand`) stays, too."""
    return NUMBER_PHRASE.sub(_phrase_to_digits, text)


def _phrase_to_digits(match: re.Match[str]) -> str:
    words = re.findall(r"[a-z]+", match[0].lower())
    if words[0] in WORD_SCALES or words == ["one"]:
        return match[0]
    total, part = 0, 0
    for word in words:
        if word == "thousand":
            total, part = total + part * 1000, 0
        elif word == "hundred":
            part *= 100
        elif word != "and":
            part += WORD_VALUES[word]
    return str(total + part)


def split_unit(text: str) -> tuple[str, str]:
    """An expression and the unit at its end, "" for none: `8 \\pi cm` is `8 \\pi` and `cm`."""
    match = re.search(r"\s+([a-zA-Z.]{2,}(?:\s*\^\s*\{?[23]\}?)?)$", text)
    unit = unit_name(match[1]) if match else ""
    return (text[: match.start()], unit) if match and unit else (text, "")


def is_prose(text: str) -> bool:
    """Whether the text is words, whose letters are not variables: `east` is not `seat`."""
    words = {word.lower() for word in WORD.findall(text)}
    return bool(words - FUNCTIONS) or text.lower() == "no"


def to_latex(text: str) -> str:
    """Convert an expression in LaTeX or program notation to LaTeX."""
    text = MEMBER.sub("", text)
    is_plain = "\\" not in text and "{" not in text
    text = re.sub(r"\s+(?:and|or)\s+", ", ", text)
    text = text.replace("**", "^").replace("<=", r"\le ").replace(">=", r"\ge ")
    text = text.replace("+-", r"\pm ").replace("+/-", r"\pm ")
    text = re.sub(r"(?<=[)\]])\s*U\s*(?=[(\[])", r" \\cup ", text)
    text = re.sub(r"(?<![\\a-zA-Z])(?:infinity|infty|inf|oo)(?![a-zA-Z])", r"\\infty ", text)
    text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text)
    functions = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln"
    text = re.sub(rf"(?<![\\a-zA-Z])({functions})(?![a-zA-Z])", r"\\\1 ", text)
    text = _replace_call(text, "sqrt", r"\sqrt")
    text = _replace_call(text, "^", "^")
    if is_plain:
        text = re.sub(r"\^\s*(-?[0-9]+(?:\.[0-9]+)?)", r"^{\1}", text)
    return text.replace("*", r" \cdot ")


def _brace_fractions(text: str) -> str:
    r"""Write `\dfrac34`, `\frac 3{4}` and similar forms as `\frac{3}{4}`."""
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}", text)
    return re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{", r"\\frac{\1}{", text)


def _unwrap(text: str) -> str:
    """Remove delimiters around the text and punctuation at its end."""
    for _ in range(len(WRAPPERS)):
        text = text.rstrip(" .,;:").strip()
        for begin, end in WRAPPERS:
            inner = text[len(begin) : -len(end)]
            encloses = text.startswith(begin) and text.endswith(end) and begin not in inner
            is_set = begin == "{" and "," in inner
            if encloses and not is_set and len(text) > len(begin) + len(end):
                text = inner.strip()
    return text


def _read_value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    whole = part["whole"] or part["whole_2"]
    if whole:
        bottom = int(part["mixed_bottom"] or part["mixed_bottom_2"])
        top = int(part["mixed_top"] or part["mixed_top_2"])
        return int(whole) + Fraction(top, bottom) if bottom else None
    top = part["top"] or part["top_2"]
    if top:
        bottom = _parse_decimal(part["bottom"] or part["bottom_2"])
        return _parse_decimal(top) / bottom if bottom else None
    power = int(part["power"] or part["exponent"] or 0)
    if abs(power) > MAX_POWER:
        return None
    return _parse_decimal(part["scaled"] or part["decimal"]) * Fraction(10) ** power


def _parse_decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def _is_unit(text: str) -> bool:
    words: list[str] = re.findall(r"[a-z.]+", text.lower().replace("left over", "leftover"))
    is_difference = words[1:2] == ["than"]  # `27 less than the total` is not 27
    changes_value = is_difference or words[:1] in (["squared"], ["cubed"], ["factorial"])
    return UNIT.fullmatch(text) is not None and not changes_value and NOT_UNITS.isdisjoint(words)


def unit_name(text: str, currency: str = "") -> str:
    """One name for all spellings of a unit of measure: `km/hr`, `meter^2`; "" for other words."""
    if currency:
        return {"$": "dollar", "€": "euro", "£": "pound"}[currency[-1]]
    name, power = "", ""
    parts: list[str] = UNIT_PART.findall(text)
    for index, part in enumerate(parts):
        word = part.lower()
        if part[0] == "^":
            name += part[0] + part[-1]
        elif word in ("/", "per"):
            name += "/" if name else ""
        elif word in POWERS:
            name, power = (name + POWERS[word], power) if name else ("", POWERS[word])
        else:
            measure = RATES.get(word) or MEASURES.get(word) or MEASURES.get(word.removesuffix("s"))
            is_preposition = word == "in" and index + 1 < len(parts)
            if measure is None or is_preposition or (name and not name.endswith("/")):
                break
            name, power = name + measure + power, ""
    return name.rstrip("/")


def is_same_unit(unit: str, other: str) -> bool:
    """Whether two unit names may mean the same unit. "" (no unit) matches every unit, and a missing
    denominator matches any: dollars match dollars per hour."""
    if not unit or not other:
        return True
    unit, other = (name.replace("lb", "pound") for name in (unit, other))  # money or weight
    (top, _, bottom), (other_top, _, other_bottom) = unit.partition("/"), other.partition("/")
    return top == other_top and (bottom == other_bottom or not bottom or not other_bottom)


def _replace_call(text: str, name: str, macro: str) -> str:
    """Replace `name(...)` with balanced parentheses by `macro{...}`."""
    parts: list[str] = []
    pattern = re.compile(rf"(?<!\\){re.escape(name)}\s*\(")
    while match := pattern.search(text):
        end = _find_closing(text, match.end())
        if end is None:
            break
        parts.append(text[: match.start()] + macro + "{")
        text = text[match.end() : end] + "}" + text[end + 1 :]
    return "".join(parts) + text


def _find_closing(text: str, start: int) -> int | None:
    depth = 1
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None

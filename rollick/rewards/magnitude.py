"""Limits the cost of comparing an expression, before sympy evaluates it.

    LaTeX -- is_shallow --> math-verify's parser, which builds powers and factorials without
    evaluating them --> expression -- is_affordable --> compared, or a wrong answer

`10^{10^{8}}`, `(10^9)!` and `(x+1)^{100000}` are short to write and take hours and gigabytes to
evaluate. A number here is bounded by its digits, a polynomial by its terms and its degree.
"""

from __future__ import annotations

import ast
import re
from math import comb, log10, prod
from typing import Any, NamedTuple, cast

import sympy
from sympy.concrete.expr_with_limits import ExprWithLimits

MAX_CHARACTERS = 300
"""Maximum characters of a parsed expression; a longer one is compared as text only."""
MAX_DEPTH = 20
"""Maximum nesting of braces."""
MAX_BRACKETS = 8
"""Maximum nesting of round and square brackets. The parser tries every combination of interval,
tuple and product."""
MAX_MEMBERS = 50
"""Maximum members of a list, a tuple or a union of intervals."""
MAX_DIGITS = 5000
"""Maximum digits of an evaluated number."""
MAX_TERMS = 150
"""Maximum terms of an expanded power."""
MAX_PRODUCT_TERMS = 300
"""Maximum terms of an expanded product, before like terms are combined."""
MAX_DEGREE = 500
MAX_ARGUMENT = 10_000
"""Maximum argument of a factorial or a binomial coefficient, and maximum length of a sum."""

SLOW_TO_PARSE = (
    (re.compile(r"\\(?:i*int|oint|lim|partial)"), 0),
    (re.compile(r"\\(?:sum|prod)"), 1),
    (re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp|lg|det)"), 4),
    (re.compile(r"\||\\(?:left|right)?[lr]?(?:[vV]ert|floor|ceil)"), 4),
    (re.compile(r":"), 1),
    (re.compile(r";"), 5),
    (re.compile(r"!"), 4),
    (re.compile(r"[-+]\s*(?=[-+])"), 4),
    (re.compile(r"\b(?:and|or)\b"), 8),
    (re.compile(r"/[^/,;&+-]{0,20}(?=/)"), 2),
    (re.compile(r"[\^_]"), 12),
    (re.compile(r"[\"#@?]"), 0),
    (re.compile(r"[\^_][^\s+*/={},-]{0,10}(?=[\^_])"), 4),
)
"""Signs and how many of each an answer may have, if the expected one does not have more: the parser
tries every way to nest them."""
EVALUATED_BY_PARSER = re.compile(r"binom|choose|gcd|lcm")
LARGE_ARGUMENT = re.compile(r"[0-9]{5}|\^|!")
NOT_EVALUATED = (sympy.Integral, sympy.Limit, sympy.Derivative)
"""An unevaluated integral, limit or derivative is not an answer."""
GROWING = (sympy.factorial, sympy.gamma, sympy.binomial, sympy.subfactorial, sympy.factorial2)
EXPONENTIAL = (sympy.exp, sympy.sinh, sympy.cosh)
NUMERAL = re.compile(r"[-+]?[0-9._]+(?:[eE][-+]?([0-9]+))?[jJ]?")
GROWING_NAMES = frozenset({"factorial", "exp", "sinh", "cosh"})
POWER_NAMES = frozenset({"Pow", "root"})


class Unaffordable(ValueError):
    """The expression is too large to evaluate."""


class Size(NamedTuple):
    """Upper bounds: the digits of the numbers, and the terms and the degree of the polynomial."""

    digits: float = 0.0
    terms: int = 1
    degree: float = 0.0


def is_shallow(latex: str, expected: str) -> bool:
    """Whether the parser can read the text quickly: it is short, its braces are balanced, its
    brackets are not nested deeply, and the functions that the parser evaluates have small
    arguments."""
    members = latex.count(",") + 4 * latex.count(r"\cup")
    if len(latex) > MAX_CHARACTERS or members > MAX_MEMBERS:
        return False
    braces = brackets = 0
    for letter in latex:
        braces += (letter == "{") - (letter == "}")
        brackets += (letter in "([") - (letter in ")]")
        if braces > MAX_DEPTH or brackets > MAX_BRACKETS:
            return False
    for sign, allowed in SLOW_TO_PARSE:
        count = len(sign.findall(latex))
        if count > allowed and count > len(sign.findall(expected)):
            return False
    if braces:
        return False
    return not (EVALUATED_BY_PARSER.search(latex) and LARGE_ARGUMENT.search(latex))


def is_affordable(expression: Any) -> bool:
    """Whether sympy can evaluate and expand the parsed expression in a fraction of a second."""
    try:
        _measure(expression)
    except (Unaffordable, OverflowError):
        return False
    return True


def _measure(node: Any) -> Size:
    if isinstance(node, NOT_EVALUATED):
        raise Unaffordable
    if isinstance(node, sympy.MatrixBase):
        return _largest_size([_measure(entry) for entry in cast("Any", node).flat()])
    if not isinstance(node, sympy.Basic):
        return Size()
    if isinstance(node, sympy.Number):
        return Size(_count_digits(node))
    if isinstance(node, sympy.Symbol):
        return Size(degree=1)
    sizes = [_measure(part) for part in cast("Any", node).args]
    if isinstance(node, sympy.Pow):
        size = _power_size(*sizes)
    elif isinstance(node, ExprWithLimits):
        body, *limits = sizes
        count = _largest_value(max((each.digits for each in limits), default=0.0), MAX_ARGUMENT)
        size = Size(body.digits * count, 1, body.degree)
    elif isinstance(node, GROWING):
        argument = _largest_value(max(each.digits for each in sizes), MAX_ARGUMENT)
        size = Size(argument * log10(argument + 2))
    elif isinstance(node, EXPONENTIAL):
        size = Size(_largest_value(sizes[0].digits, MAX_DIGITS))
    elif isinstance(node, sympy.Add):
        digits = max(each.digits for each in sizes) + log10(len(sizes))
        size = Size(digits, sum(each.terms for each in sizes), max(each.degree for each in sizes))
    elif isinstance(node, sympy.Mul):
        terms = prod(each.terms for each in sizes)
        size = Size(sum(each.digits for each in sizes), terms, sum(each.degree for each in sizes))
    else:
        size = _largest_size(sizes)._replace(terms=1)
    return _check_size(size)


def _check_size(size: Size) -> Size:
    too_large = size.digits > MAX_DIGITS or size.terms > MAX_PRODUCT_TERMS
    if too_large or size.degree > MAX_DEGREE:
        raise Unaffordable
    return size


def _power_size(base: Size, exponent: Size) -> Size:
    times = _largest_value(exponent.digits, max(MAX_DEGREE, MAX_DIGITS))
    terms = 1
    if base.terms > 1 and exponent.degree == 0:
        terms = comb(base.terms - 1 + int(times), base.terms - 1)
        if terms > MAX_TERMS:
            raise Unaffordable
    return Size(base.digits * times, terms, base.degree * times if not exponent.degree else 1)


def _largest_value(digits: float, limit: int) -> float:
    """The largest value with this number of digits; raises if it is above the limit."""
    if digits > log10(limit) + 1e-9:
        raise Unaffordable
    return 10**digits


def _count_digits(number: Any) -> float:
    """An upper bound d: the value is at most 10**d, and so are numerator and denominator."""
    if isinstance(number, sympy.Rational):
        return max(_log10(int(number.p)), _log10(int(number.q)))
    if isinstance(number, sympy.Float):
        magnitude = abs(number)
        return float(abs(sympy.log(magnitude, 10).n(5))) if magnitude else 0.0
    return 0.0


def _count_text_digits(text: str) -> float:
    """Of a number as text, such as 1e400; 0 for a name."""
    match = NUMERAL.fullmatch(text)
    if match is None:
        return 0.0
    exponent = match[1] or "0"
    return len(text) + (float(exponent) if len(exponent) < 6 else float(MAX_DIGITS))


def _log10(value: int) -> float:
    return abs(value).bit_length() * log10(2) if abs(value) > 2**53 else log10(max(abs(value), 1))


def _largest_size(sizes: list[Size]) -> Size:
    return Size(
        max((each.digits for each in sizes), default=0.0),
        max((each.terms for each in sizes), default=1),
        max((each.degree for each in sizes), default=0.0),
    )


def check_code_size(node: ast.expr) -> float:
    """As `is_affordable`, for an expression in Python that is evaluated as it is read: returns the
    digits of its value, or raises Unaffordable."""
    match node:
        case ast.Constant(value=int() | float() as value):
            digits = _count_digits(
                sympy.Float(value) if isinstance(value, float) else sympy.Integer(value)
            )
        case ast.Constant(value=str() as text):
            digits = _count_text_digits(text)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            digits = check_code_size(left) * _largest_value(check_code_size(right), MAX_DIGITS)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            digits = check_code_size(left) + check_code_size(right)
        case ast.BinOp(left=left, right=right):
            digits = max(check_code_size(left), check_code_size(right)) + 1
        case ast.UnaryOp(operand=operand):
            digits = check_code_size(operand)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            sizes = [check_code_size(argument) for argument in arguments]
            digits = max(sizes, default=0.0)
            if name in GROWING_NAMES:
                digits = _largest_value(digits, MAX_ARGUMENT) * max(digits, 1.0)
            elif name in POWER_NAMES and len(sizes) == 2:
                digits = sizes[0] * _largest_value(sizes[1], MAX_DIGITS)
            elif name == "Mul":
                digits = sum(sizes)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            digits = max((check_code_size(part) for part in parts), default=0.0)
        case _:
            digits = 0.0
    return _check_size(Size(digits)).digits

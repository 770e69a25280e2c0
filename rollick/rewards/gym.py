"""reasoning-gym's own scorers, for rows of the source reasoning_gym:TASK (data/gym.py).

    completion --> its answer --> the task's scorer, disarmed --> 0.0 to 1.0

Some of its scorers hand the answer to `eval`, or to sympy's parser, which evaluates. An answer is
the policy's text, so both are replaced in this process before the first call: `eval` by a reader of
literals, the parser's last step by one that looks at every node first. A test searches the
installed package for evaluation that is not known here.
"""

from __future__ import annotations

import ast
import importlib
from fractions import Fraction
from functools import cache, lru_cache
from math import isclose
from typing import Any

from rollick.data.gym import make_row, open_task
from rollick.errors import MissingExtra
from rollick.rewards.answers import TAGGED, after_thinking, find_answer

READS_LITERALS = (
    "reasoning_gym.algorithmic.binary_matrix",
    "reasoning_gym.algorithmic.spiral_matrix",
    "reasoning_gym.algorithmic.string_insertion",
    "reasoning_gym.games.n_queens",
)
"""Modules whose scorers call `eval` on an answer, for the sake of lists."""

COMPARED = frozenset({"coin_flip", "game_of_life_halting"})
"""Tasks whose scorers take wrong answers for right (version 0.1.25): to one `bool("False")` is
true, to the other `0` is all of 0.25 that it says. Their answers are compared here."""

_NAMES = (
    "Symbol Integer Float Rational Add Mul Pow Abs sqrt cbrt root exp log ln sin cos tan cot sec "
    "csc asin acos atan acot sinh cosh tanh asinh acosh atanh factorial sign Min Max pi E I oo "
    "True False erf Si Ci li"
)
ALLOWED = frozenset(_NAMES.split())
"""Names that an expression may call or mention, besides the unknowns that a scorer gives."""

MAX_ANSWER = 20_000
"""Characters; what is longer is no answer."""

NODES = (
    *(ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Mod, ast.FloorDiv, ast.USub, ast.UAdd),
    *(ast.keyword, ast.Tuple, ast.List),
)


def reasoning_gym(
    completion: str, task: str, entry: str | None, settings: str, index: int
) -> float:
    """What the task's scorer says of the answer: 1.0 for a right one, some tasks also in between.

    The answer is what stands in <answer> tags, in a box or behind "the answer is"; else all of it.
    """
    disarm()
    answer = find_gym_answer(completion)
    if not answer or len(answer) > MAX_ANSWER:
        return 0.0
    puzzle, scorer = _puzzle(task, entry, settings, index), open_task(task, settings)
    if task in COMPARED:
        return float(_is_reference(answer, str(puzzle["answer"])))
    try:
        return float(scorer.score_answer(answer, puzzle))
    except Exception:
        # Many scorers raise over an answer of the wrong form, which is a wrong answer; one that
        # raises over its own reference as well is broken, and that is no score at all.
        if puzzle["answer"] is not None:
            scorer.score_answer(puzzle["answer"], puzzle)
        return 0.0


def _is_reference(answer: str, wanted: str) -> bool:
    """The same number, to a thousandth, or the same words."""
    try:
        return isclose(Fraction(answer), Fraction(wanted), abs_tol=1e-3)
    except (ValueError, ZeroDivisionError, OverflowError):
        return answer.strip().casefold() == wanted.strip().casefold()


def find_gym_answer(completion: str) -> str | None:
    """The answer, with its line breaks where it is tagged or not marked at all; None if none."""
    said = after_thinking(completion)
    if said is None or not said.strip():
        return None
    tagged = TAGGED.findall(said)
    if tagged:
        return tagged[-1].strip()
    found = find_answer(said, plain=False)
    if found is None or said.rpartition(found.text)[2].strip(" .*$}\n"):
        return said.strip()  # what was found is not the end of it, such as a grid's first line
    return found.text


@lru_cache(maxsize=4096)
def _puzzle(task: str, entry: str | None, settings: str, index: int) -> dict[str, Any]:
    if entry is not None:
        return ast.literal_eval(entry)
    make_row(task, settings, index)  # sets the global random numbers as they were
    return open_task(task, settings)[index]


@cache
def disarm() -> None:
    """Take `eval` from the scorers of this process."""
    try:
        parser = importlib.import_module("sympy.parsing.sympy_parser")
        modules = [importlib.import_module(name) for name in READS_LITERALS]
    except ImportError as error:
        raise MissingExtra.of("reasoning-gym", "rewards") from error
    for module in modules:
        vars(module)["eval"] = ast.literal_eval
    evaluate: Any = vars(parser)["eval_expr"]

    def checked(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
        refuse_code(code, known=frozenset(local_dict))
        return evaluate(code, local_dict, global_dict)

    vars(parser)["eval_expr"] = checked


def refuse_code(code: str, *, known: frozenset[str]) -> None:
    """ValueError for anything but arithmetic on numbers, unknowns and functions of mathematics."""
    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        if not isinstance(node, NODES):
            raise ValueError(f"an answer with {type(node).__name__} is not evaluated")
        if isinstance(node, ast.Name) and node.id not in ALLOWED | known:
            raise ValueError(f"an answer that names {node.id} is not evaluated")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise ValueError("an answer that calls what it computed is not evaluated")

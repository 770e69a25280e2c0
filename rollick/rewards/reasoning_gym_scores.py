"""The reward `reasoning_gym`: reasoning-gym's own scorers, for rows of reasoning_gym:TASK.

    completion --> its answer --> the task's scorer, without `eval` --> 0.0 to 1.0

Some of its scorers pass the answer, which the policy wrote, to `eval` or to sympy's parser, which
evaluates. Both are replaced in this process before the first call: `eval` by a parser of literals,
the last step of sympy's parser by one that checks every node first. A test searches the installed
package for other evaluation of code.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from rollick.data.reasoning_gym_source import make_row, open_task
from rollick.errors import MissingExtra
from rollick.rewards.answers import after_thinking, extract_answer
from rollick.rewards.call_limits import EXPENSIVE, CallLimitExceeded, limit_call
from rollick.rewards.magnitude import check_code_size
from rollick.rewards.notation import read_number
from rollick.rewards.scanners import find_tagged

EVALUATING_MODULES = (
    "reasoning_gym.algorithmic.binary_matrix",
    "reasoning_gym.algorithmic.spiral_matrix",
    "reasoning_gym.algorithmic.string_insertion",
    "reasoning_gym.games.n_queens",
)
"""Modules whose scorers call `eval` to parse lists in an answer."""

COMPARED_TASKS = frozenset({"coin_flip", "game_of_life_halting"})
"""Tasks whose scorers accept wrong answers (version 0.1.25): one reads `bool("False")` as true, the
other reads 0.25 as `0`. Their answers are compared here."""

_NAMES = (
    "Symbol Integer Float Rational Add Mul Pow Abs sqrt cbrt root exp log ln sin cos tan cot sec "
    "csc asin acos atan acot sinh cosh tanh asinh acosh atanh factorial sign Min Max pi E I oo "
    "True False erf Si Ci li"
)
ALLOWED_NAMES = frozenset(_NAMES.split())
"""Names that an expression may use, besides the unknowns of the scorer."""

TAKES_TEXT = frozenset({"Symbol", "Integer", "Float", "Rational"})
"""Functions whose arguments may be text."""

CPU_S = 0.8
"""CPU seconds that a task's scorer may take for an answer; one that takes more is wrong."""
MAX_EXPRESSION = 4000
"""Characters of an expression that sympy parses."""
MAX_ANSWER = 4000
"""Maximum characters of a correct answer, or four times its reference if that is more."""
MAX_ANSWERS = {"propositional_logic": 200}
"""MAX_ANSWER of tasks whose scorers are slow."""

ALLOWED_NODES = (
    *(ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Mod, ast.FloorDiv, ast.USub, ast.UAdd),
    *(ast.keyword, ast.Tuple, ast.List),
)


def reasoning_gym(
    completion: str, task: str, entry: str | None, settings: str, index: int
) -> float:
    """The score of the task's scorer: 1.0 for a correct answer; some tasks give partial scores. The
    answer is in <answer> tags, in a box or after "the answer is"; else the full completion."""
    replace_eval()
    answer = None
    with suppress(*EXPENSIVE), limit_call(CPU_S):
        answer = extract_gym_answer(completion)
    if not answer:
        return 0.0
    puzzle, scorer = _load_puzzle(task, entry, settings, index), open_task(task, settings)
    max_length = MAX_ANSWERS.get(task, MAX_ANSWER)
    if len(answer) > max(max_length, 4 * len(str(puzzle["answer"]))):
        return 0.0
    if task in COMPARED_TASKS:
        return float(_equals_reference(answer, str(puzzle["answer"])))
    _warm_up(task, settings, scorer, puzzle)
    try:
        with limit_call(CPU_S):
            return float(scorer.score_answer(answer, puzzle))
    except CallLimitExceeded:
        return 0.0
    except Exception:
        # Many scorers raise for an answer of the wrong form, which is a wrong answer. One that also
        # raises for its own reference is broken, and the reward fails.
        if puzzle["answer"] is not None:
            scorer.score_answer(puzzle["answer"], puzzle)
        return 0.0


def _equals_reference(answer: str, reference: str) -> bool:
    """Whether both are the same number within 0.001, or the same words."""
    number, expected = read_number(answer), read_number(reference)
    if number is not None and expected is not None:
        return abs(number.value - expected.value) <= Fraction(1, 1000)
    return answer.strip().casefold() == reference.strip().casefold()


def extract_gym_answer(completion: str) -> str | None:
    """The answer, with line breaks if it is tagged or unmarked; None without an answer."""
    response = after_thinking(completion)
    if response is None or not response.strip():
        return None
    if tagged := find_tagged(response, "answer"):
        return tagged[-1].strip()
    answer = extract_answer(response, plain=False)
    if answer is None or response.rpartition(answer.text)[2].strip(" .*$}\n"):
        return response.strip()  # more text follows, such as the other lines of a grid
    return answer.text


def _warm_up(task: str, settings: str, scorer: Any, puzzle: Mapping[str, Any]) -> None:
    """Score the reference of a task's first row without a time limit: this loads what the scorer
    needs, so that the limit covers only the answer."""
    if (task, settings) not in _warm_tasks and puzzle["answer"] is not None:
        _warm_tasks.add((task, settings))
        with suppress(Exception):
            scorer.score_answer(puzzle["answer"], puzzle)


_warm_tasks: set[tuple[str, str]] = set()


@lru_cache(maxsize=4096)
def _load_puzzle(task: str, entry: str | None, settings: str, index: int) -> dict[str, Any]:
    if entry is not None:
        return ast.literal_eval(entry)
    make_row(task, settings, index)  # restores the state of the global random generator
    return open_task(task, settings)[index]


@cache
def replace_eval() -> None:
    try:
        parser = importlib.import_module("sympy.parsing.sympy_parser")
        modules = [importlib.import_module(name) for name in EVALUATING_MODULES]
    except ImportError as error:
        raise MissingExtra.of("reasoning-gym", "rewards") from error
    for module in modules:
        vars(module)["eval"] = ast.literal_eval
    evaluate: Any = vars(parser)["eval_expr"]
    tokenize: Any = vars(parser)["stringify_expr"]

    def tokenize_limited(text: str, *arguments: Any) -> Any:
        if len(text) > MAX_EXPRESSION:
            raise ValueError(f"an expression of {len(text)} characters is not evaluated")
        return tokenize(text, *arguments)

    def evaluate_checked(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
        check_expression(code, known=frozenset(local_dict))
        return evaluate(code, local_dict, global_dict)

    vars(parser)["stringify_expr"] = tokenize_limited
    vars(parser)["eval_expr"] = evaluate_checked


def check_expression(code: str, *, known: frozenset[str]) -> None:
    """Raises ValueError unless the code is arithmetic on numbers, unknowns and mathematical
    functions, and its numbers stay small."""
    tree = ast.parse(code.strip(), mode="eval")
    _check_text_arguments(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED_NODES):
            raise ValueError(f"an answer with {type(node).__name__} is not evaluated")
        if isinstance(node, ast.Name) and node.id not in ALLOWED_NAMES | known:
            raise ValueError(f"an answer that names {node.id} is not evaluated")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise ValueError("an answer that calls a computed value is not evaluated")
    check_code_size(tree.body)


def _check_text_arguments(tree: ast.AST) -> None:
    """Raises ValueError if text is used except as an argument of TAKES_TEXT: `'a' * 10**9`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    text_calls = [call for call in calls if getattr(call.func, "id", "") in TAKES_TEXT]
    allowed_ids = {id(argument) for call in text_calls for argument in call.args}
    for node in ast.walk(tree):
        is_number = isinstance(node, ast.Constant) and isinstance(node.value, int | float | complex)
        if isinstance(node, ast.Constant) and not is_number and id(node) not in allowed_ids:
            raise ValueError(f"an answer with {type(node.value).__name__} is not evaluated")

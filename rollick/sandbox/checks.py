"""Checks code with assert statements, or a script by its input and output.

    candidate and tests -> Program(s) -> Sandbox.run -> Result: passed tests, isolation

A candidate that crashes, hangs or exceeds its memory has failed its tests. If the sandbox refused
or failed, the result is not conclusive and must not count as a failed candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from rollick.sandbox.base import Limits, Program, Result, Sandbox, Status, TestOutcome
from rollick.sandbox.tested_names import plan_asserts

DEFAULT_LIMITS = Limits()
RELATIVE_ERROR = 1e-6


@dataclass(frozen=True, slots=True)
class ScriptCase:
    stdin: str
    expected: str


async def check_asserts(
    sandbox: Sandbox,
    code: str,
    *,
    asserts: Sequence[str],
    setup: str = "",
    reference: str = "",
    entries: Sequence[str] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> Result:
    """Each text of `asserts` is one test, run after `setup`.

    The names that the candidate must define are found by parsing the tests and the `reference`
    solution, or given as `entries`. If the tests create objects of the reference's classes, their
    arguments are not plain data: tests and candidate share a box, with isolation `shared`.
    """
    try:
        tests = plan_asserts(asserts, setup=setup, reference=reference, entries=entries)
    except (SyntaxError, ValueError) as error:
        return Result.not_run(f"the tests cannot be parsed: {error}")
    return await sandbox.run(Program(code, limits=limits, tests=tests))


async def check_scripts(
    sandbox: Sandbox, code: str, *, cases: Sequence[ScriptCase], limits: Limits = DEFAULT_LIMITS
) -> Result:
    """Run the script on each input in a new box; the output is compared in this process.

    All cases share `limits.wall_s`: they run one after another, each with the time that is left. A
    slow script could otherwise multiply its time limit by the number of its cases.
    """
    if not cases:
        return Result.not_run("there are no cases")
    results: list[Result] = []
    seconds = 0.0
    for case in cases:
        case_limits = replace(limits, wall_s=limits.wall_s - seconds)
        if case_limits.wall_s <= 0:
            break
        result = await sandbox.run(Program(code, stdin=case.stdin, limits=case_limits))
        if not result.status.is_conclusive:
            return result
        results.append(result)
        seconds += result.seconds
    outcomes = [compare_output(case, result) for case, result in zip(cases, results, strict=False)]
    skipped = TestOutcome(False, f"not reached: {Status.TIMEOUT}")
    outcomes += [skipped] * (len(cases) - len(results))
    worst = next((result for result in results if result.status is not Status.OK), results[0])
    status = Status.TIMEOUT if len(results) < len(cases) else worst.status
    return replace(worst, status=status, outcomes=tuple(outcomes), seconds=seconds)


def compare_output(case: ScriptCase, result: Result) -> TestOutcome:
    if result.status is not Status.OK:
        last_line = result.stderr.strip().rpartition("\n")[2]
        return TestOutcome(False, f"{result.status}: {last_line}".rstrip(": "))
    if is_same_output(result.stdout, case.expected):
        return TestOutcome(True)
    return TestOutcome(False, f"printed {result.stdout[:200]!r}, not {case.expected[:200]!r}")


def is_same_output(printed: str, expected: str) -> bool:
    """Compare lines word by word, ignoring white space between words and at the end. Numbers with a
    decimal point may differ by RELATIVE_ERROR (absolute below 1)."""
    lines = [line.split() for line in printed.rstrip().splitlines()]
    expected_lines = [line.split() for line in expected.rstrip().splitlines()]
    return len(lines) == len(expected_lines) and all(
        len(words) == len(expected_words) and all(map(_is_same_word, words, expected_words))
        for words, expected_words in zip(lines, expected_lines, strict=True)
    )


def _is_same_word(word: str, expected: str) -> bool:
    if word == expected or "." not in expected:
        return word == expected
    try:
        number, expected_number = float(word), float(expected)
    except ValueError:
        return False
    if not (isfinite(number) and isfinite(expected_number)):
        return False  # beyond the range of a float, only equal texts are equal
    return abs(number - expected_number) <= RELATIVE_ERROR * max(1.0, abs(expected_number))

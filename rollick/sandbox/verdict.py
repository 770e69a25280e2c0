"""Verdicts on code: function tests, assert lists, pytest files, cases of input and output.

    candidate and tests -> Program(s) -> Sandbox.run -> Verdict: passed of total, and how isolated

A candidate that crashes, hangs or eats memory has failed its tests: that is a verdict. A sandbox
that refused or broke is none (`judged` is False), and must never be counted as a failed candidate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollick.sandbox.base import (
    Call,
    Isolation,
    Limits,
    Program,
    Result,
    Sandbox,
    Status,
    TestOutcome,
    Tests,
)
from rollick.sandbox.entries import find_names

DEFAULT_LIMITS = Limits()
RELATIVE_ERROR = 1e-6


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said of a candidate."""

    outcomes: tuple[TestOutcome, ...]
    status: Status
    isolation: Isolation
    seconds: float = 0.0
    detail: str = ""

    @property
    def judged(self) -> bool:
        return self.status.judged

    @property
    def passed(self) -> int:
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def total(self) -> int:
        return len(self.outcomes)

    @property
    def share(self) -> float:
        return self.passed / self.total if self.total else 0.0

    @property
    def all_passed(self) -> bool:
        return self.judged and self.total > 0 and self.passed == self.total


@dataclass(frozen=True, slots=True)
class Case:
    """A script's input and what it must print."""

    stdin: str
    expected: str


async def check_function(
    sandbox: Sandbox, code: str, *, calls: Sequence[Call], limits: Limits = DEFAULT_LIMITS
) -> Verdict:
    """Each call must give what it expects: equal, and of the same type (1 and 1.0 are equal)."""
    tests = Tests(cases=tuple(calls))
    return verdict_of(await sandbox.run(Program(code, limits=limits, tests=tests)))


async def check_asserts(
    sandbox: Sandbox,
    code: str,
    *,
    asserts: Sequence[str],
    setup: str = "",
    reference: str = "",
    entries: Sequence[str] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> Verdict:
    """Each text of `asserts` is one test, run after `setup`.

    Which names the candidate defines is read off the tests, better with a `reference` solution, or
    given as `entries`. Where the tests make objects of the reference's classes, their arguments
    are not data: such rows run in one box, and the verdict says `shared`.
    """
    try:
        tests = plan_asserts(asserts, setup=setup, reference=reference, entries=entries)
    except (SyntaxError, ValueError) as error:
        detail = f"the tests cannot be parsed: {error}"
        return Verdict((), Status.INFRASTRUCTURE, Isolation.NONE, detail=detail)
    return verdict_of(await sandbox.run(Program(code, limits=limits, tests=tests)))


def plan_asserts(
    asserts: Sequence[str], *, setup: str = "", reference: str = "", entries: Sequence[str] = ()
) -> Tests:
    """Where each name of the tests lives. Pure."""
    names = find_names(asserts, setup=setup, reference=reference)
    shared = bool(names.classes)
    return Tests(
        cases=tuple(asserts),
        setup=f"{names.imports}\n{setup}" if names.imports and not shared else setup,
        entries=tuple(dict.fromkeys([*names.entries, *entries])),
        shared=shared,
    )


async def check_pytest(
    sandbox: Sandbox,
    code: str,
    *,
    file: str,
    module: str = "solution",
    limits: Limits = DEFAULT_LIMITS,
) -> Verdict:
    """The pytest file imports the candidate as `module`; each of its tests counts."""
    tests = Tests(cases=(file,), module=module)
    return verdict_of(await sandbox.run(Program(code, limits=limits, tests=tests)))


async def check_cases(
    sandbox: Sandbox, code: str, *, cases: Sequence[Case], limits: Limits = DEFAULT_LIMITS
) -> Verdict:
    """Run the script on each input, in a box of its own; what it prints is compared out here."""
    programs = [Program(code, stdin=case.stdin, limits=limits) for case in cases]
    results = await asyncio.gather(*(sandbox.run(program) for program in programs))
    broken = next((result for result in results if not result.status.judged), None)
    if broken is not None:
        return verdict_of(broken)
    outcomes = [judge_case(case, result) for case, result in zip(cases, results, strict=True)]
    worst = next((result for result in results if result.status is not Status.OK), results[0])
    verdict = verdict_of(worst)
    seconds = sum(result.seconds for result in results)
    return replace(verdict, outcomes=tuple(outcomes), seconds=seconds)


def judge_case(case: Case, result: Result) -> TestOutcome:
    if result.status is not Status.OK:
        last = result.stderr.strip().rpartition("\n")[2]
        return TestOutcome(False, f"{result.status}: {last}".rstrip(": "))
    if same_output(result.stdout, case.expected):
        return TestOutcome(True)
    return TestOutcome(False, f"printed {result.stdout[:200]!r}, not {case.expected[:200]!r}")


def same_output(printed: str, expected: str) -> bool:
    """Line by line and word by word; white space between words and at the ends is free, and
    numbers with a decimal point may differ by 1e-6 of their size."""
    lines = [line.split() for line in printed.rstrip().splitlines()]
    wanted = [line.split() for line in expected.rstrip().splitlines()]
    return len(lines) == len(wanted) and all(
        len(line) == len(want) and all(map(_same_word, line, want))
        for line, want in zip(lines, wanted, strict=True)
    )


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if "." not in wanted:
        return False
    try:
        number, other = float(word), float(wanted)
    except ValueError:
        return False
    return abs(number - other) <= RELATIVE_ERROR * max(1.0, abs(other))


def verdict_of(result: Result) -> Verdict:
    return Verdict(result.outcomes, result.status, result.isolation, result.seconds, result.detail)

"""Outcomes of tests: a candidate cannot hide a failure, forge a pass or have itself masked."""

from __future__ import annotations

from typing import Any

import pytest

from rollick.sandbox import wire
from rollick.sandbox.base import Isolation, Limits, Program, Result, Status, TestOutcome, Tests
from rollick.sandbox.checks import check_asserts
from rollick.sandbox.local import LocalSandbox
from rollick.sandbox.outcomes import MAX_TESTS, ReportEnd, ReportError, TestReports

NONCE = b"n" * 16
PASSED, FAILED = TestOutcome(True), TestOutcome(False, "wrong")


def make_frame(kind: str, number: int = 0, passed: Any = False, message: str = "") -> bytes:
    body = wire.encode([NONCE, kind, number, passed, message])
    return len(body).to_bytes(4, "little") + body


def test_reports_are_read_however_they_are_cut() -> None:
    sent = make_frame("count", 2) + make_frame("outcome", 1, True) + make_frame("ended")
    for size in (1, 7, 1000):
        reports = TestReports(NONCE)
        for begin in range(0, len(sent), size):
            reports.feed(sent[begin : begin + size])
        assert (reports.count, reports.end) == (2, ReportEnd.ENDED)
        assert reports.outcomes == {1: PASSED}


def test_an_outcome_that_did_not_arrive_is_a_failure() -> None:
    reports = TestReports(NONCE)
    reports.feed(make_frame("count", 3) + make_frame("outcome", 0, True))
    outcomes = reports.complete(reports.count, "not reached: output_limit")
    assert [outcome.passed for outcome in outcomes] == [True, False, False]
    assert outcomes[2].message == "not reached: output_limit"


def test_nothing_passes_completely_without_the_final_word() -> None:
    reports = TestReports(NONCE, 2)
    reports.feed(make_frame("outcome", 0, True) + make_frame("outcome", 1, True))
    assert [outcome.passed for outcome in reports.complete(2, "killed")] == [True, False]
    reports.feed(make_frame("ended"))
    assert [outcome.passed for outcome in reports.complete(2, "")] == [True, True]


@pytest.mark.parametrize("status", [Status.OUTPUT_LIMIT, Status.TIMEOUT, Status.KILLED])
def test_tests_that_did_not_run_to_their_end_have_not_all_passed(status: Status) -> None:
    assert Result(Status.OK, Isolation.FULL, outcomes=(PASSED,)).all_passed
    assert not Result(status, Isolation.FULL, outcomes=(PASSED,)).all_passed


@pytest.mark.parametrize(
    "sent",
    [
        (1 << 30).to_bytes(4, "little"),
        b"\x01\x00\x00\x00?",
        make_frame("outcome", 2, True),
        make_frame("outcome", -1, True),
        make_frame("outcome", 10**9, True),
        make_frame("outcome", 0, True) * 2,
        make_frame("outcome", 0, 1),
        make_frame("count", 5),
        make_frame("cheer"),
        make_frame("invalid"),
        make_frame("outcome", 0, True).replace(NONCE, b"x" * 16),
    ],
)
def test_a_report_outside_its_bounds_is_rejected(sent: bytes) -> None:
    reports = TestReports(NONCE, 2, from_candidate=True)
    with pytest.raises(ValueError, match=r".+"):
        reports.feed(sent)
    assert len(reports.outcomes) <= 1


def test_a_pytest_file_announces_a_bounded_number_of_tests() -> None:
    with pytest.raises(ReportError, match="announces"):
        TestReports(NONCE).feed(make_frame("count", MAX_TESTS + 1))


SHARED = """
import os, sys

def control():
    frame = sys._getframe()
    while "reporter" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["reporter"]

def answer():
    ATTACK
"""


@pytest.mark.parametrize(
    "attack",
    [
        "os.write(control().control, b'\\xff' * 4)\n    while True: os.write(control().control, "
        "bytes(1 << 16))",
        "control().send('outcome', 2_000_000, True)",
        "[control().send('outcome', 0, True) for _ in range(2)]",
        "control().send('invalid')",
    ],
    ids=["oversized length", "huge number", "many outcomes", "forged invalid"],
)
async def test_a_candidate_that_holds_the_control_socket_ends_only_its_box(
    sandbox: LocalSandbox, attack: str
) -> None:
    code = SHARED.replace("ATTACK", attack)
    tests = Tests(("answer()",), entries=("answer",), shared=True)
    result = await sandbox.run(Program(code, limits=Limits(wall_s=3.0), tests=tests))
    assert result.status is Status.KILLED
    assert len(result.outcomes) == 1
    assert not result.all_passed


ENDED_EARLY = (
    "assert all(map(f, [1, 2]))",
    "assert all(map(lambda x: f(x) == 7, [1, 2]))",
    "assert list(zip([1], map(f, [1]))) == []",
    "assert not list(filter(f, [1]))",
    "assert list(iter(lambda: f(1), 0)) == []",
    "assert [x for x in map(f, [1]) if not x] == []",
)


@pytest.mark.parametrize("exception", ["StopIteration", "StopAsyncIteration", "Stop"])
async def test_an_exception_that_ends_an_iteration_fails_the_test(
    sandbox: LocalSandbox, exception: str
) -> None:
    code = f"class Stop(StopIteration): ...\ndef f(x):\n    raise {exception}\n"
    verdict = await check_asserts(sandbox, code, asserts=ENDED_EARLY, entries=["f"])
    assert verdict.status is Status.OK
    assert [outcome.passed for outcome in verdict.outcomes] == [False] * len(ENDED_EARLY)


@pytest.mark.parametrize(
    ("code", "setup"),
    [
        ("f = 5", "value = f(1)"),
        ("LIMIT = 'many'", "values = range(LIMIT)"),
        ("1 / 0", "values = range(LIMIT)"),
        ("1 / 0", "value = f(1)"),
        ("", "values = [x for x in LIMIT]"),
        ("LIMIT = None", "assert LIMIT > 3"),
        ("class LIMIT: ...", "total = 1 + LIMIT"),
        ("LIMIT = [[]] * 300_000", "assert LIMIT > 3"),
    ],
)
async def test_a_candidate_on_which_the_setup_fails_scores_zero_and_is_not_masked(
    sandbox: LocalSandbox, code: str, setup: str
) -> None:
    tests = Tests(("assert True",), setup, entries=("f", "LIMIT"))
    result = await sandbox.run(Program(code, tests=tests))
    assert result.status is Status.OK, result
    assert [outcome.passed for outcome in result.outcomes] == [False]


@pytest.mark.parametrize("code", ["def f(x):\n    return x\nLIMIT = 3", "1 / 0", "f = LIMIT = 5"])
async def test_a_setup_that_fails_with_every_candidate_is_not_conclusive(
    sandbox: LocalSandbox, code: str
) -> None:
    tests = Tests(("assert f(1)",), "import nothing_at_all", entries=("f", "LIMIT"))
    result = await sandbox.run(Program(code, tests=tests))
    assert result.status is Status.INFRASTRUCTURE
    assert "nothing_at_all" in result.detail


PARAMETRIZED = """
import pytest
from solution import f, VALUES
EXTRA
@pytest.mark.parametrize("value", VALUES)
def test_f(value):
    assert f(value) == value
"""


@pytest.mark.parametrize(
    ("code", "extra", "status"),
    [
        ("VALUES = [1, 2]\ndef f(x):\n    return x", "", Status.OK),
        ("VALUES = 5\ndef f(x):\n    return x", "", Status.OK),
        ("raise ValueError", "", Status.OK),
        ("VALUES = [1]\ndef f(x):\n    raise ValueError", "START = f(1)", Status.OK),
        ("VALUES = [1]\nf = 3", "START = f(1)", Status.OK),
        ("raise ValueError", "import nothing_at_all", Status.INFRASTRUCTURE),
    ],
    ids=["right", "constant", "load", "exception at import", "constant at import", "broken file"],
)
async def test_a_candidate_cannot_choose_that_a_pytest_file_is_masked(
    sandbox: LocalSandbox, code: str, extra: str, status: Status
) -> None:
    tests = Tests((PARAMETRIZED.replace("EXTRA", extra),), module="solution")
    result = await sandbox.run(Program(code, limits=Limits(wall_s=60), tests=tests))
    assert result.status is status, result
    assert result.all_passed == (code.startswith("VALUES = [1, 2]"))

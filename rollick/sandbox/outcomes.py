"""Reads the frames in which a test box reports its outcomes.

    frame: [nonce, kind, number, passed, message]

    count     how many tests a pytest file has; the first frame of such a file
    outcome   of test `number`, once for each test
    ended     the last frame: all tests were run; without it nothing has passed completely
    invalid   the last frame: the tests cannot run with any candidate
    share     the last frame: tests and candidate must share one box

With isolation `shared` the candidate runs in the test box and can write frames. So everything is
bounded: the size of a frame, the number of tests, and one outcome for each test. A frame outside of
these bounds raises ReportError, and the caller ends the box.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollick.sandbox import wire
from rollick.sandbox.base import TestOutcome

MAX_FRAME = 1 << 12
"""Bytes; a test box cuts its messages to 500 characters."""
MAX_TESTS = 10_000
"""Tests of a pytest file."""


class ReportError(ValueError):
    """A frame that a test box never sends."""


class ReportEnd(StrEnum):
    """The last frame of a test box."""

    ENDED = "ended"
    INVALID = "invalid"
    SHARE = "share"


TRUSTED_ENDS = (ReportEnd.INVALID, ReportEnd.SHARE)
"""Valid only from a test box without the candidate, which could otherwise hide its failure."""


@dataclass(slots=True, eq=False)
class TestReports:
    """The outcomes that a test box has reported so far."""

    __test__ = False

    nonce: bytes
    count: int = 0
    """Number of tests; 0 if the box announces it."""
    from_candidate: bool = False
    """The candidate runs in the test box and can write frames."""
    outcomes: dict[int, TestOutcome] = field(default_factory=dict[int, TestOutcome])
    end: ReportEnd | None = None
    message: str = ""
    _unread: bytearray = field(default_factory=bytearray)

    def feed(self, chunk: bytes) -> None:
        """Read all complete frames. Frames after the last one are ignored."""
        self._unread += chunk
        while self.end is None and len(self._unread) >= wire.COUNT_BYTES:
            size = int.from_bytes(self._unread[: wire.COUNT_BYTES], "little")
            if size > MAX_FRAME:
                raise ReportError(f"a frame has {size} bytes; {MAX_FRAME} are allowed")
            frame_end = wire.COUNT_BYTES + size
            if len(self._unread) < frame_end:
                return
            self._read(wire.decode(bytes(self._unread[wire.COUNT_BYTES : frame_end])))
            del self._unread[:frame_end]

    def _read(self, frame: Any) -> None:
        try:
            nonce, kind, number, passed, message = frame
        except (TypeError, ValueError):
            raise ReportError("a frame does not have five fields") from None
        types = (type(nonce), type(kind), type(number), type(passed), type(message))
        if types != (bytes, str, int, bool, str) or nonce != self.nonce:
            raise ReportError("a frame has wrong field types or a wrong nonce")
        if kind == "count":
            if self.count or not 0 < number <= MAX_TESTS:
                raise ReportError(f"a test box announces from 1 to {MAX_TESTS} tests, once")
            self.count = number
        elif kind == "outcome":
            if not 0 <= number < self.count or number in self.outcomes:
                raise ReportError("an outcome belongs to no test, or to one that has an outcome")
            self.outcomes[number] = TestOutcome(passed, message)
        elif kind == ReportEnd.ENDED or (kind in TRUSTED_ENDS and not self.from_candidate):
            self.end, self.message = ReportEnd(kind), message
        else:
            raise ReportError(f"a frame has the unknown kind {kind[:20]!r}")

    def complete(self, count: int, reason: str) -> tuple[TestOutcome, ...]:
        """An outcome for each of `count` tests. A test without one has failed. If all passed but no
        last frame arrived, the last test has failed."""
        missing = TestOutcome(False, self.message or reason)
        outcomes = [self.outcomes.get(number, missing) for number in range(count)]
        if self.end is None and all(outcome.passed for outcome in outcomes):
            outcomes[-1:] = [missing]
        return tuple(outcomes)

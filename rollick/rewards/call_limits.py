"""Limits of CPU time and memory for code that checks an answer of the policy.

    with limit_call(cpu_s=1.0):
        ...  # raises CallLimitExceeded or MemoryError; the reward then scores the answer 0

An answer that is too expensive to check is wrong. It is not a failure of the reward: failed samples
are masked, which would be an advantage over a wrong answer. The limit is on CPU time, not
wall-clock time, so that a busy machine does not change scores.

Beyond the limit, an exception is raised. Code in C, such as a multiplication of huge integers, does
not notice it. A reward process therefore also sets a timer that kills it (SIGPROF) shortly after;
the pool then scores the sample 0.
"""

from __future__ import annotations

import gc
import resource
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

MEMORY_BYTES = 1 << 30
"""Memory that a limited call may add."""
KILL_AFTER_S = 0.5
"""CPU seconds after the limit until a reward process is killed."""
REPEAT_S = 0.05
"""CPU seconds until the exception is raised again, if the first did not end the call."""
WEAKREF_MODULES = ("weakref", "_weakrefset")
"""Their callbacks drop every exception."""
KILL_SIGNAL = signal.SIGPROF
STATM = Path("/proc/self/statm")

_kill_after_limit = False


class CallLimitExceeded(BaseException):
    """The call took more CPU time than allowed. A BaseException, so that a library's `except
    Exception` does not catch it."""


EXPENSIVE = (CallLimitExceeded, MemoryError, RecursionError)
"""The exceptions of a call that is too expensive."""


def kill_after_limit() -> None:
    """Kill this process if a limited call does not end; called by reward processes."""
    global _kill_after_limit
    _kill_after_limit = True


@contextmanager
def limit_call(cpu_s: float) -> Generator[None, None, None]:
    """Limit the CPU time and the memory of a block. Only the main thread can be limited; in other
    threads the block runs without limits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    data_limit = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGVTALRM, _raise_exceeded)
    try:
        _set_memory_limit(data_limit)
        if _kill_after_limit:
            signal.setitimer(signal.ITIMER_PROF, cpu_s + KILL_AFTER_S)
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s, REPEAT_S)
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_DATA, data_limit)
            signal.signal(signal.SIGVTALRM, handler)


def _raise_exceeded(number: int, frame: FrameType | None) -> None:
    if frame is not None and _drops_exceptions(frame):
        return  # the timer fires again
    raise CallLimitExceeded("the call exceeded its CPU time")


def _drops_exceptions(frame: FrameType) -> bool:
    """Whether Python would only print an exception that is raised here."""
    is_gc = any(getattr(callback, "__code__", None) is frame.f_code for callback in gc.callbacks)
    return is_gc or frame.f_globals.get("__name__") in WEAKREF_MODULES


def _set_memory_limit(current: tuple[int, int]) -> None:
    with suppress(OSError, ValueError):  # another system, or a lower limit is already set
        used = int(STATM.read_text().split()[5]) * resource.getpagesize()
        allowed = used + MEMORY_BYTES
        limits = [each for each in (allowed, *current) if each != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), current[1]))

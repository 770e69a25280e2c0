"""Interrupts Python code that runs too long, in the thread that runs it.

For untrusted code that may not terminate, such as a chat template or the interpolations of a
recipe. C code (one long regex match, one huge multiplication) is interrupted only after it returns.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator
from contextlib import contextmanager

REPEAT_S = 0.5
"""Python drops an exception that arrives in a finalizer or a callback of the garbage collector, so
it is raised again after this time."""


class _Interrupted(BaseException):
    """Not an Exception: the interrupted code must not catch it."""


@contextmanager
def interrupt_after(seconds: float) -> Generator[None]:
    """Raise TimeoutError from the block if it takes longer."""
    interrupter = _Interrupter(threading.get_ident(), seconds)
    interrupter.start()
    try:
        try:
            yield
        finally:
            interrupter.stop()
    except _Interrupted:
        raise TimeoutError(f"interrupted after {seconds:g} s") from None


class _Interrupter(threading.Thread):
    """Raises `_Interrupted` in a thread, after `seconds` and then until it is stopped."""

    def __init__(self, target: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self.target, self.seconds = target, seconds
        self.stopped, self.lock = threading.Event(), threading.Lock()

    def run(self) -> None:
        wait_s = self.seconds
        while not self.stopped.wait(wait_s):
            with self.lock:
                if not self.stopped.is_set():
                    _raise_in(self.target, _Interrupted)
            wait_s = REPEAT_S

    def stop(self) -> None:
        """Called by the interrupted thread."""
        try:
            self._disarm()
        except _Interrupted:  # Sent just before the block ended.
            self._disarm()

    def _disarm(self) -> None:
        with self.lock:
            self.stopped.set()
            _raise_in(self.target, None)  # clears an exception that the thread has not raised yet


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    value = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)

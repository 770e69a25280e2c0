"""Starter: the one thread from which the boxes of a sandbox are started.

The kernel ends a box together with the thread that started it (a parent-death signal is sent at the
end of a thread, not of a process). Programs come from any thread, and a server's ends with its
request: a box that was started ahead there would be taken from under the next program.

    any thread -- start() --> queue --> the thread: Box.start --> the box, or what it raised
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread

from rollick.errors import SandboxError
from rollick.sandbox.box import Box
from rollick.sandbox.host import Host


@dataclass(frozen=True, slots=True)
class Order:
    """A box that is wanted."""

    host: Host
    disk_mb: int
    packages: bool
    answer: Future[Box] = field(default_factory=Future[Box])


@dataclass(slots=True, eq=False)
class Starter:
    """The thread begins with the first box, and is not there any more after a fork."""

    _lock: Lock = field(default_factory=Lock)
    """Over the other fields: of two first calls one begins the thread, and no order comes after
    the last word to it, where nobody would answer."""
    _closed: bool = False
    _thread: Thread | None = None
    _orders: SimpleQueue[Order | None] = field(default_factory=SimpleQueue[Order | None])

    def start(self, host: Host, *, disk_mb: int, packages: bool = False) -> Box:
        """Waits for the start of bubblewrap, a millisecond, and raises what Box.start raises."""
        order = Order(host, disk_mb, packages)
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed", fix="run programs inside its `with`")
            if self._thread is None or not self._thread.is_alive():
                self._orders = SimpleQueue()
                self._thread = Thread(
                    target=_serve, args=(self._orders,), name="starts boxes", daemon=True
                )
                self._thread.start()
            self._orders.put(order)
        return order.answer.result()

    def close(self) -> None:
        """Ends the thread, and so any box of it that still is there."""
        with self._lock:
            self._closed = True
            if self._thread is not None:
                self._orders.put(None)
                self._thread.join()
                self._thread = None


def _serve(orders: SimpleQueue[Order | None]) -> None:
    while (order := orders.get()) is not None:
        try:
            box = Box.start(order.host, disk_mb=order.disk_mb, packages=order.packages)
        except BaseException as error:  # whoever asked waits for an answer, whatever it is
            order.answer.set_exception(error)
        else:
            order.answer.set_result(box)

"""A small program that kills the boxes of a sandbox when the process that started them dies.

    rollick --"+ GROUP" / "- GROUP" lines--> guard      end of input: SIGKILL to every group listed

Boxes have a parent-death signal too, but it does not cover everything. A program can clear it, by
an exec in a second thread. And a bubblewrap that dies while it starts leaves a child that waits
forever. Process groups cover both. A box has two: that of bubblewrap, listed from its start on, and
that of its init process, listed before a program runs. The filter lets no program leave it.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakSet

END_TIMEOUT_S = 10.0
PROGRAM = """
trap '' HUP INT TERM
boxes=' '
while read -r sign box; do
  case $sign in
    +) boxes="$boxes$box " ;;
    -) case $boxes in *" $box "*) boxes="${boxes%% $box *} ${boxes#* $box }" ;; esac ;;
  esac
done
for box in $boxes; do kill -9 "-$box"; done
"""


@dataclass(slots=True, eq=False, weakref_slot=True)
class BoxGuard:
    """The process of a guard, in a separate session."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls) -> BoxGuard:
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        guard = cls(
            subprocess.Popen(
                ["/bin/sh", "-c", PROGRAM],
                bufsize=0,
                stdin=pipe,
                stdout=null,
                stderr=null,
                cwd="/",
                start_new_session=True,
            )
        )
        _GUARDS.add(guard)
        return guard

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def add(self, group: int) -> None:
        self._write(f"+ {group}\n")

    def remove(self, group: int) -> None:
        self._write(f"- {group}\n")

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        # BrokenPipeError: the guard was killed. ValueError: it was closed.
        with suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(line.encode())

    def close(self) -> None:
        """End the guard, which kills the groups that are still listed."""
        _GUARDS.discard(self)
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
            return
        self.process.kill()
        self.process.wait()


_GUARDS: WeakSet[BoxGuard] = WeakSet()


def _close_copies() -> None:
    """In a forked process: close its copies of the pipes, which would hide the parent's death."""
    for guard in list(_GUARDS):
        assert guard.process.stdin is not None
        guard.process.stdin.close()
        guard.process.returncode = 0  # not a child of this process
    _GUARDS.clear()


os.register_at_fork(after_in_child=_close_copies)

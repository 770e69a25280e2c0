"""The program that ends child processes when the process that started them is gone.

    parent --"+PGID" / "-PGID" lines--> guard          end of input: kill every group still listed

A child that runs user code can be busy for ever (a regular expression that explodes holds the
interpreter lock, so no thread of that process can act) and can have processes of its own. The
kernel ends the guard's input when the parent dies, however it dies. Run by path, with the standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def main(lines: Iterable[str]) -> None:
    groups: set[int] = set()
    for line in lines:
        sign, group = line[0], int(line[1:])
        if sign == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.stdin)

"""The .jsonl files of a run. A killed process or a full disk may leave an incomplete line.

A RowFile survives a full disk: rows wait in memory until there is room. A write that fails half-way
continues at the same byte, so no row is cut or written twice.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

LOG = logging.getLogger("rollick")

MAX_WAITING_BYTES = 64 << 20


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file. Skips incomplete lines."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(json.JSONDecodeError):
                yield json.loads(line)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row immediately; logs a warning if the disk cannot be written."""
    try:
        with path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            is_cut = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
            file.write(b"\n" * is_cut + json.dumps(row).encode() + b"\n")
    except OSError as error:
        LOG.warning("%s cannot be written: %s", path, error.strerror)


class RowFile:
    """Appends rows. Opened for each write, because a resumed run replaces the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost_rows = 0
        """Rows dropped because both the disk and the buffer in memory were full."""
        self._waiting = bytearray()
        self._failing = False

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows. If the disk cannot be written, logs this once and does not raise."""
        for row in rows:
            if len(self._waiting) > MAX_WAITING_BYTES:
                self.num_lost_rows += 1
            else:
                self._waiting += json.dumps(row).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            self._write()
        except OSError as error:
            if not self._failing:
                message = "%s cannot be written: %s; the run continues, rows are kept in memory"
                LOG.error(message, self.path, error.strerror)
            self._failing = True
            return
        if self._failing:
            self._failing = False
            LOG.warning("%s can be written again; %d rows were lost", self.path, self.num_lost_rows)

    def close(self) -> None:
        self.flush()
        if self._waiting:
            LOG.error("%s: the last %d bytes were lost", self.path, len(self._waiting))

    def _write(self) -> None:
        if not self._waiting:
            return
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            while self._waiting:
                del self._waiting[: os.write(descriptor, self._waiting)]
        finally:
            os.close(descriptor)

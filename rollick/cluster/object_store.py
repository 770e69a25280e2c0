"""Reserves space for the file in which Ray keeps messages.

Ray creates it in /dev/shm, or in /tmp if that is small; the kernel allocates its pages when they
are first written. If other files have filled the file system by then, the kernel kills Ray
(SIGBUS), and Ray ends the controller with exit code 1 and without a message. So space for the usual
messages is reserved when a run starts, and more before a large message is sent.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollick.children.process_tree import find_descendants, read_name
from rollick.errors import ClusterUnavailable

RAYLET, FILE = "raylet", "plasma"
"""The process that creates the file, and how the file's name begins."""
SHARED_MEMORY = "/dev/shm"
RESERVED_BYTES = 64 << 20
COPIES = 4
"""Messages of one size that may be in the file: to and from workers, some not yet removed."""
LOW_BYTES = 64 << 20
"""Less free space than this is a reason to warn."""


@dataclass(slots=True)
class ObjectStore:
    path: str
    """Link in /proc, because Ray has unlinked the file. Empty if this process did not start Ray."""
    folder: str
    reserved: int = 0
    """Number of allocated bytes at the beginning of the file, which Ray fills first."""

    @classmethod
    def open(cls) -> ObjectStore:
        """Find the file of the Ray that this process started, and reserve RESERVED_BYTES of it."""
        store = _find_object_store()
        store.reserve(RESERVED_BYTES)
        return store

    def reserve(self, size: int) -> bool:
        """Allocate the first `size` bytes of the file, if it is in memory: on a disk that cannot
        allocate, the C library writes to the file instead. False if there is no space for them."""
        if self.folder != SHARED_MEMORY:
            return True
        with suppress(FileNotFoundError, PermissionError):  # No file, or Ray has ended.
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                size = min(size, os.fstat(descriptor).st_size)
                os.posix_fallocate(descriptor, 0, size)
                self.reserved = size
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    return False
            finally:
                os.close(descriptor)
        return True

    def describe_shortage(self) -> str:
        """Why the file may not be able to grow; empty if it can."""
        try:
            file_stats, disk = os.stat(self.path), os.statvfs(self.path)
        except OSError:
            return ""
        free = disk.f_bavail * disk.f_frsize
        if free >= min(LOW_BYTES, file_stats.st_size - 512 * file_stats.st_blocks):
            return ""
        return (
            f"{self.folder} has {free / 1e6:.0f} MB free; Ray keeps messages to workers there, and "
            f"{self.reserved / 1e6:.0f} MB are reserved for them"
        )

    def check_room(self, args: Sequence[Any]) -> None:
        """Reserve space for large arguments of a call. Raises ClusterUnavailable on failure."""
        needed = COPIES * sum(getattr(argument, "nbytes", 0) for argument in args)
        if needed > self.reserved and not self.reserve(needed):
            raise ClusterUnavailable(
                f"{self.folder} has no room for {needed / 1e6:.0f} MB, which Ray needs to send a "
                f"batch to a worker ({self.reserved / 1e6:.0f} MB are reserved)",
                fix=f"free space in {self.folder}, then resume the run with --resume",
            )


def _find_object_store() -> ObjectStore:
    for process in find_descendants():
        if read_name(process.pid) != RAYLET:
            continue
        with suppress(OSError):
            links = Path(f"/proc/{process.pid}/fd").iterdir()
            for link in sorted(links, key=lambda link: int(link.name)):
                target = Path(os.readlink(link))
                if target.name.startswith(FILE):
                    return ObjectStore(str(link), str(target.parent))
    return ObjectStore("", "")

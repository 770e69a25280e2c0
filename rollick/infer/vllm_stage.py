"""Where new weights wait for vLLM's workers: one file that all of them map.

In shared memory if it has room, else in the folder for temporary files. The file's folder carries
the process id of the engine and is locked while it is in use. What a killed process left behind is
swept when the next engine starts: its process is gone, and so is its lock. (The lock too, because
containers may share the folder and not the process ids.)

    staged_file(size) -> a path in a locked folder -> removed      sweep_leftovers() -> at the start
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from rollick.errors import WeightError

PREFIX = "rollick-vllm-"
ROOM = 1 << 20
"""Bytes that must be free besides the weights: the file's header, and what others write."""

FreeBytes = Callable[[Path], int]


def staging_folders() -> tuple[Path, ...]:
    """Where a file may be staged, the best first."""
    shared = Path("/dev/shm")
    usable = (shared,) if os.access(shared, os.W_OK) else ()
    return (*usable, Path(tempfile.gettempdir()))


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def choose_folder(
    size: int, folders: Sequence[Path] | None = None, *, free: FreeBytes = free_bytes
) -> Path:
    """The first folder with room for `size` bytes."""
    folders = staging_folders() if folders is None else folders
    found = {folder: free(folder) for folder in folders}
    for folder, room in found.items():
        if room >= size + ROOM:
            return folder
    told = ", ".join(f"{folder} has {room / 1e9:.2f} GB" for folder, room in found.items())
    raise WeightError(
        f"there is no room to stage {size / 1e9:.2f} GB of weights: {told}",
        fix="free some (in a container: a larger /dev/shm), or set TMPDIR to a larger disk",
    )


@contextmanager
def staged_file(size: int) -> Generator[str]:
    """A path for a file of `size` bytes; it and its folder are gone after the block."""
    with staging():
        parent = choose_folder(size)
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        lock = os.open(folder, os.O_RDONLY)
    try:
        with staging():
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield str(folder / "weights.safetensors")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def staging() -> Generator[None]:
    """Around work with the file: a disk that fails does not end the engine, which still serves the
    version it has."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightError(
            f"the weights could not be staged for vLLM: {type(error).__name__}: {error}",
            fix="look at the space and the rights of /dev/shm and of the temporary folder (TMPDIR)",
        ) from error


def sweep_leftovers(folders: Sequence[Path] | None = None) -> list[Path]:
    """Remove what engines of processes that are gone have left; gives what was removed."""
    swept: list[Path] = []
    for parent in staging_folders() if folders is None else folders:
        for folder in _owned_by_the_dead(parent):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                swept.append(folder)
    return swept


def _owned_by_the_dead(parent: Path) -> Iterator[Path]:
    for folder in sorted(parent.glob(f"{PREFIX}*-*")):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not _lives(int(owner)) and _is_unlocked(folder):
            yield folder


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _is_unlocked(folder: Path) -> bool:
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True
    return False

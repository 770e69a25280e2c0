"""The file through which vLLM's workers receive new weights: all of them map it.

Its folder, in shared memory if it fits, is named after the engine's process id and locked while it
is in use. When an engine starts, it removes the folders of processes that have ended and hold no
lock. (The lock is needed because containers can share the parent folder but not the process ids.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rollick.children.process_tree import process_exists
from rollick.errors import WeightError

PREFIX = "rollick-vllm-"
MARGIN_BYTES = 1 << 20
"""Free space required besides the weights: for the file's header and other writers."""


def staging_folders() -> tuple[Path, ...]:
    """Where a file may be staged, in order of preference."""
    shared = Path("/dev/shm")
    usable = (shared,) if os.access(shared, os.W_OK) else ()
    return (*usable, Path(tempfile.gettempdir()))


def choose_folder(size: int) -> Path:
    """The first folder with room for `size` bytes."""
    free_space = {folder: shutil.disk_usage(folder).free for folder in staging_folders()}
    for folder, free in free_space.items():
        if free >= size + MARGIN_BYTES:
            return folder
    listed = ", ".join(f"{folder} has {free / 1e9:.2f} GB" for folder, free in free_space.items())
    fix = "free some space (in a container: a larger /dev/shm), or set TMPDIR to a larger disk"
    raise WeightError(f"no folder has room for {size / 1e9:.2f} GB of weights: {listed}", fix=fix)


@contextmanager
def stage_file(size: int) -> Generator[str]:
    """Yields the path for a file of `size` bytes; removes the file and its folder at the end."""
    with translate_disk_errors():
        parent = choose_folder(size)
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        lock = os.open(folder, os.O_RDONLY)
    try:
        with translate_disk_errors():
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield str(folder / "weights.safetensors")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def translate_disk_errors() -> Generator[None]:
    """Raise disk errors as WeightError: the engine still serves its current version."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightError(
            f"cannot stage the weights for vLLM: {type(error).__name__}: {error}",
            fix="check free space and permissions of /dev/shm and the temporary folder (TMPDIR)",
        ) from error


def remove_leftovers() -> None:
    """Remove the folders of engines whose processes have ended."""
    for folder in [path for parent in staging_folders() for path in parent.glob(f"{PREFIX}*-*")]:
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not process_exists(int(pid)) and _is_unlocked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_unlocked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True

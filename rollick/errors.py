"""The exceptions of the library. Each message states what happened, the values, and what to do.

A bad sample is data: it is recorded and counted. A bad configuration or a dead worker raises.
`exit_code` tells a supervisor what to do when the error ends a command.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Generator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import ClassVar, Self

EXIT_MISTAKE = 2
"""Something must be changed first; a retry fails in the same way."""
EXIT_RETRY = 69
"""EX_UNAVAILABLE: a worker, the cluster or a server (judge, sandbox, environment) is lost, or open
files, memory or disk are exhausted; the same command with --resume may succeed."""
EXIT_INTERRUPTED = 75
"""EX_TEMPFAIL: a signal stopped the command. A run saves first; --resume continues it."""

MAX_OPEN_FILES = 65_536
"""The limit of open files that a run sets. A higher one slows programs that close all possible
descriptors when they start a child process."""

UNAVAILABLE_FIX = (
    "check the server and the network to it, then resume the run with --resume; a run with "
    "--restarts resumes automatically"
)


class RollickError(Exception):
    """Base class of all errors that a user can act on. `fix` is one sentence of advice."""

    exit_code: ClassVar[int] = EXIT_MISTAKE

    def __init__(self, message: str, *, fix: str = "") -> None:
        self.message = message
        self.fix = fix
        super().__init__(f"{message}. {fix}" if fix else message)

    def copy(self) -> Self:
        """A copy for each waiting task: raising one instance several times would mix tracebacks."""
        return copy(self)

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(type(self), fix=self.fix), (self.message,), self.__dict__)


class ConfigError(RollickError):
    """A recipe is invalid. The message lists every problem with its file and line."""


@contextmanager
def writing_to(path: object) -> Generator[None]:
    """Raise a RollickError instead of an OSError if the block cannot write to `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space, then try again"
            raise DiskError(f"{path} cannot be written: {error.strerror}", fix=fix) from error
        message = f"{path} cannot be written: {error.strerror or error}"
        raise ConfigError(message, fix="choose a path that you may write to") from error


class DataError(RollickError):
    """A dataset cannot be read or has no usable row."""


class ModelError(RollickError):
    """A model or tokenizer cannot be loaded, or does not match the recipe."""


class PlacementError(RollickError):
    """No device is free for a worker. The message states what it needs and what is free."""


class ClusterUnavailable(PlacementError):
    """The cluster does not answer, or has no room at present."""

    exit_code = EXIT_RETRY


class WorkerError(RollickError):
    """A call to a worker failed."""


class WorkerLost(WorkerError):
    """A worker process died or does not answer. `failed_at`: when it ended or last responded, in
    seconds since the epoch; None if that is unknown."""

    exit_code = EXIT_RETRY

    def __init__(self, message: str, *, fix: str = "", failed_at: float | None = None) -> None:
        super().__init__(message, fix=fix)
        self.failed_at = failed_at


class WorkerHung(WorkerLost):
    """A worker process did not answer before its deadline, or makes no progress."""


class WorkerOutOfMemory(WorkerError):
    """A call to a worker could not allocate memory."""

    exit_code = EXIT_RETRY


class WorkerOutOfFiles(WorkerError):
    """A call to a worker could not open more files or sockets."""

    exit_code = EXIT_RETRY


class NodeLost(WorkerLost):
    """The machine of a worker is off, hangs, or cannot be reached."""


class WeightError(RollickError):
    """Published weights failed verification. The receiver keeps its current version."""


class CheckpointError(RollickError):
    """A checkpoint is missing, damaged, or from another run."""


class DiskError(CheckpointError):
    """A file of the run cannot be written, for example on a full disk. Older checkpoints stay."""

    exit_code = EXIT_RETRY


class OpenFilesExhausted(RollickError):
    """The process may not open more files or sockets."""

    exit_code = EXIT_RETRY


class RewardError(RollickError):
    """A reward function cannot be found or called. A low score is not an error."""


class ServiceUnavailable(RollickError):
    """A server that scores samples or runs environments does not answer."""

    exit_code = EXIT_RETRY


class SandboxError(RollickError):
    """A sandbox is unavailable or did not start. A program that fails inside it is not an error."""


class EnvError(RollickError):
    """An environment cannot be found, created or called. A failed episode is not an error."""


class EngineError(RollickError):
    """An engine got a request it does not support, or failed while generating."""


class EngineLost(EngineError):
    """An engine is gone together with its running requests. Other engines can take these over."""

    exit_code = EXIT_RETRY


class EngineCorrupt(EngineLost):
    """The weights of an engine changed without an update, for example by a memory error."""


class StuckError(RollickError):
    """No progress before a deadline. The message states what waits for what."""

    exit_code = EXIT_RETRY


class NoSignalError(StuckError):
    """No group of a step can be trained on, because the scores within each group are equal."""

    exit_code = EXIT_MISTAKE


class StoppedBySignal(RollickError):
    """A signal stopped a command that has nothing to save."""

    exit_code = EXIT_INTERRUPTED


class MissingExtra(RollickError):
    """A required optional dependency is not installed."""

    @classmethod
    def of(cls, package: str, extra: str) -> MissingExtra:
        fix = f"install it with: pip install 'rollick[{extra}]'"
        return cls(f"{package} is not installed", fix=fix)


def open_files_exhausted(error: BaseException) -> OpenFilesExhausted | None:
    """An error with advice if `error` means that no more files can be opened; otherwise None. Reads
    the message, because torch and safetensors raise their own types."""
    if os.strerror(errno.ENFILE) in str(error):
        message, fix = "this machine has no more open files", "raise fs.file-max (sysctl)"
        return OpenFilesExhausted(f"{message}: {error}", fix=fix)
    if os.strerror(errno.EMFILE) not in str(error):
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = f"no more files can be opened: the limit of this process is {soft} (hard: {hard})"
    fix = f"raise it with `ulimit -n {MAX_OPEN_FILES}`, or use fewer environments and rewards"
    return OpenFilesExhausted(f"{message}: {error}", fix=fix)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: in Python, in torch on the CPU, or on a GPU."""
    names = {base.__name__ for base in type(error).__mro__}
    is_torch_on_cpu = "can't allocate memory" in str(error)
    return is_torch_on_cpu or not names.isdisjoint({"MemoryError", "OutOfMemoryError"})

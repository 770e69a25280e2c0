"""A host: one process on one device, and the roles that run in it.

Does not know how calls arrive: group.py calls it directly, pool.py from inside a Ray actor.

    Call -> Host.call -> coroutine method: on the host's loop
                         plain method:     in the role's own thread, one at a time
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollick.cluster.devices import HostSpec, RoleRank
from rollick.errors import (
    OpenFilesExhausted,
    RollickError,
    WorkerError,
    WorkerOutOfFiles,
    WorkerOutOfMemory,
    is_out_of_memory,
    open_files_exhausted,
)
from rollick.types import RoleName

BUILD_ORDER: tuple[RoleName, ...] = (
    "policy",
    "reference",
    "critic",
    "reward_model",
    "teacher",
    "judge",
    "generators",
)
"""Generators come last: they may share the parameters of a model that is already built."""

CLOSE_TIMEOUT_S = 5.0
"""How long a role may take to close; then the next role is closed."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How to build a role: `target` names a function, called as fn(context, rank, *args)."""

    role: RoleName
    target: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class HostContext:
    """What a role may know of its host. `roles` contains the roles built before it."""

    spec: HostSpec
    roles: Mapping[RoleName, Any]
    device: str
    """The device as torch names it inside this process."""
    threads: int
    """CPU threads that this process should use; 0 leaves it to torch."""


class Call(NamedTuple):
    role: RoleName
    method: str


@dataclass(frozen=True, slots=True)
class _RunningRole:
    """A role on this host, and the thread that runs its plain methods."""

    role_rank: RoleRank
    role: Any
    thread: ThreadPoolExecutor


class Host:
    """The roles of one process. All methods are called from one event loop."""

    def __init__(self, spec: HostSpec, *, device: str, threads: int) -> None:
        self.spec = spec
        self._device = device
        self._threads = threads
        self._running_roles: dict[RoleName, _RunningRole] = {}

    async def build(self, roles: Sequence[RoleSpec]) -> None:
        """Build the host's roles. If one fails, the roles built before it are closed."""
        specs = {spec.role: spec for spec in roles}
        try:
            for name in BUILD_ORDER:
                if name in self.spec.roles:
                    await self._build_role(specs[name])
        except BaseException:
            # A failed close must not hide the error of the build.
            with suppress(RollickError):
                await self.close()
            raise

    async def _build_role(self, spec: RoleSpec) -> None:
        role_rank = RoleRank(spec.role, self.spec.roles[spec.role])
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"{spec.role}-{role_rank.rank}")
        built: dict[RoleName, Any] = {name: each.role for name, each in self._running_roles.items()}
        context = HostContext(self.spec, built, self._device, self._threads)
        module, _, function = spec.target.partition(":")
        try:
            with self._wrap_errors(role_rank, spec.target):
                target = getattr(importlib.import_module(module), function)
                instance = await _run(thread, target, context, role_rank.rank, *spec.args)
        except RollickError:
            thread.shutdown(wait=False)
            raise
        self._running_roles[spec.role] = _RunningRole(role_rank, instance, thread)

    async def call(self, call: Call, args: tuple[Any, ...]) -> Any:
        """Run the method and return its result. Plain methods of one role run one after another;
        coroutines of a role, and different roles, overlap."""
        running = self._running_roles.get(call.role)
        if running is None:
            raise WorkerError(f"{self.spec} has no {call.role}", fix="add it to the device map")
        method = getattr(running.role, call.method, None)
        if not callable(method):
            problem = f"{type(running.role).__name__} has no method {call.method!r}"
            raise WorkerError(f"{running.role_rank} on {self.spec}: {problem}")
        with self._wrap_errors(running.role_rank, call.method):
            return await _run(running.thread, method, *args)

    async def close(self) -> None:
        """Close all roles, last built first, then raise the first error."""
        errors: list[RollickError] = []
        while self._running_roles:
            _, running = self._running_roles.popitem()
            try:
                await self._close_role(running)
            except RollickError as error:
                errors.append(error)
            finally:
                running.thread.shutdown(wait=False, cancel_futures=True)
        if errors:
            raise errors[0]

    async def _close_role(self, running: _RunningRole) -> None:
        close = getattr(running.role, "close", None)
        if close is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                with self._wrap_errors(running.role_rank, "close"):
                    await _run(running.thread, close)
        except TimeoutError:
            name = f"{running.role_rank} on {self.spec}"
            raise WorkerError(f"{name} did not close within {CLOSE_TIMEOUT_S:g} s") from None

    @contextmanager
    def _wrap_errors(self, role_rank: RoleRank, method: str) -> Generator[None]:
        """RollickErrors pass unchanged, but OpenFilesExhausted becomes WorkerOutOfFiles. All other
        errors become a WorkerError with the traceback as text, because the exception itself may not
        be picklable."""
        try:
            yield
        except OpenFilesExhausted as error:
            message = f"{role_rank} on {self.spec} failed in {method!r}: {error.message}"
            raise WorkerOutOfFiles(message, fix=error.fix) from error
        except RollickError:
            raise
        except Exception as error:
            trace = "".join(traceback.format_exception(error)).rstrip()
            cause = f"raised {type(error).__name__} in {method!r}: {error}"
            message = f"{role_rank} on {self.spec} {cause}\nTraceback of the worker:\n{trace}"
            if is_out_of_memory(error):
                fix = "free memory of its device, or make its batches smaller"
                raise WorkerOutOfMemory(message, fix=fix) from error
            if exhausted := open_files_exhausted(error):
                raise WorkerOutOfFiles(message, fix=exhausted.fix) from error
            raise WorkerError(message) from error


async def _run(thread: ThreadPoolExecutor, function: Callable[..., Any], *args: Any) -> Any:
    """Await a coroutine function here; run anything else in the thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    return await asyncio.get_running_loop().run_in_executor(thread, function, *args)

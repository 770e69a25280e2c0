"""The HTTP side of the gateway: routes, bodies, events, and clients that go away.

client -> deadline of sends -> Guard (Host, token) -> route -> read (asked.py)
       -> Gateway.answer -> shapes.py

POST /v1/chat/completions   POST /v1/completions   GET /v1/models[/NAME]   GET /health
POST /sessions              GET, DELETE /sessions/ID    the same /v1 under /sessions/ID/v1
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollick.errors import RollickError
from rollick.serve.asked import Ask, Refused, read_chat, read_completion, read_json
from rollick.serve.gateway import Answer, Gateway, Piece, Session
from rollick.serve.guard import Guard, Hosts
from rollick.serve.shapes import Shape, failure, model, models, plain_failure
from rollick.types import IntArray

BODY_DEADLINE_S = 60.0
"""A client that takes longer to send its request is refused."""
SEND_DEADLINE_S = 60.0
"""A client that takes nothing of its answer for this long is gone: the work for it ends."""

Read = Callable[[Mapping[str, Any]], Ask]


@dataclass(frozen=True, slots=True)
class Admission:
    """Who may ask, and how much at once."""

    token: str
    hosts: Hosts
    max_body_bytes: int = 4 << 20


def make_app(gateway: Gateway, admission: Admission) -> ASGIApp:
    """The ASGI application: all that the server does."""
    routes = _Routes(gateway, admission.max_body_bytes)

    def token_of_session(id: str) -> str | None:
        session = gateway.sessions.get(id)
        return None if session is None else session.token

    app = Starlette(
        routes=routes.table(),
        exception_handlers={
            RollickError: _on_error,
            HTTPException: _on_http,
            ClientDisconnect: _on_gone,
            Exception: _on_bug,
        },
    )
    # Around all of it and not a middleware inside: what a bug is answered with goes through it too.
    guard = Guard(
        app, hosts=admission.hosts, token=admission.token, token_of_session=token_of_session
    )
    return _Deadline(guard)


class _Deadline:
    """Ends what is sent to a client that does not read it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_DEADLINE_S):
                    await send(message)
            except TimeoutError as error:
                raise ClientDisconnect from error

        with suppress(ClientDisconnect):
            await self._app(scope, receive, send_in_time)


class _Routes:
    """The endpoints. Those under a session's path are the same functions."""

    def __init__(self, gateway: Gateway, max_body_bytes: int) -> None:
        self._gateway = gateway
        self._max_body_bytes = max_body_bytes

    def table(self) -> list[Route | Mount]:
        v1 = [
            Route("/chat/completions", self.chat, methods=["POST"]),
            Route("/completions", self.completion, methods=["POST"]),
            Route("/models", self.models),
            Route("/models/{name:path}", self.model),
        ]
        return [
            Route("/health", self.health),
            Mount("/v1", routes=v1),
            Route("/sessions", self.open_session, methods=["POST"]),
            Route("/sessions/{session}", self.show_session, methods=["GET"]),
            Route("/sessions/{session}", self.close_session, methods=["DELETE"]),
            Mount("/sessions/{session}/v1", routes=v1),
        ]

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse(models(self._gateway.model, self._gateway.created))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._gateway.model:
            raise Refused(f"there is no model {name!r}", status=404, code="model_not_found")
        return JSONResponse(model(name, self._gateway.created))

    async def open_session(self, request: Request) -> Response:
        session = self._gateway.open_own_session()
        base = str(request.base_url).rstrip("/")
        body = {"id": session.id, "base_url": base + session.path, "token": session.token}
        return JSONResponse(body, 201)

    async def show_session(self, request: Request) -> Response:
        session = self._session(request)
        assert session is not None
        return JSONResponse({"segments": [part.to_json() for part in session.segments]})

    async def close_session(self, request: Request) -> Response:
        segments = self._gateway.close_session(request.path_params["session"])
        return JSONResponse({"segments": [part.to_json() for part in segments]})

    async def chat(self, request: Request) -> _Reply:
        return await self._reply(request, read_chat)

    async def completion(self, request: Request) -> _Reply:
        return await self._reply(request, read_completion)

    async def _reply(self, request: Request, read: Read) -> _Reply:
        session = self._session(request)
        ask = read(read_json(await self._body(request)))
        return _Reply(self._gateway, ask, session)

    def _session(self, request: Request) -> Session | None:
        id = request.path_params.get("session")
        return None if id is None else self._gateway.session(id)

    async def _body(self, request: Request) -> bytes:
        """All of the body, if it is not too large and comes in time."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_body_bytes:
                        raise Refused(
                            f"the body has more than {self._max_body_bytes} bytes",
                            fix="send less at once",
                            status=413,
                        )
        except TimeoutError as error:
            raise Refused("the body did not come in time", status=408) from error
        return bytes(body)


class _Reply:
    """An answer on its way: an ASGI response that ends its work when the client goes away."""

    def __init__(self, gateway: Gateway, ask: Ask, session: Session | None) -> None:
        self._gateway = gateway
        self._ask = ask
        self._session = session
        self._shape = Shape(ask, ask.model or gateway.model, gateway.codec.decode)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._ask.stream:
            # Who does not read is as good as gone. Other errors have an answer of their own.
            with suppress(ClientDisconnect):
                await _unless_gone(receive, self._send_events(send))
            return
        answer = await _unless_gone(receive, self._answer(_ignore))
        if answer is not None:
            with suppress(ClientDisconnect):
                await JSONResponse(self._shape.whole(answer))(scope, receive, send)

    async def _answer(self, emit: Any) -> Answer:
        return await self._gateway.answer(self._ask, emit, session=self._session)

    async def _send_events(self, send: Send) -> None:
        events = _Events(send)
        begun: set[int] = set()

        async def emit(piece: Piece, prompts: Sequence[IntArray]) -> None:
            first = piece.index not in begun
            begun.add(piece.index)
            await events.send(self._shape.chunk(piece, prompts, first=first))

        try:
            await events.send(self._shape.last(await self._answer(emit)))
        except RollickError as error:
            if not events.begun:
                raise
            await events.send(failure(error)[1])
        await events.end()


class _Events:
    """Server-sent events. The status goes out with the first one, so that an error before it can
    still have a status of its own."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send

    async def send(self, event: Mapping[str, Any] | None) -> None:
        if event is not None:
            await self._data(json.dumps(event))

    async def end(self) -> None:
        await self._data("[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _data(self, text: str) -> None:
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = f"data: {text}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The work's result; None if the client went away first, which cancels the work."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ignore(piece: Piece, prompts: Sequence[IntArray]) -> None:
    """Whoever does not stream waits for the whole answer."""


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RollickError)
    status, body = failure(error)
    return JSONResponse(body, status)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(
        plain_failure(error.status_code, message), error.status_code, headers=error.headers
    )


async def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)


async def _on_bug(request: Request, error: Exception) -> Response:
    return JSONResponse(plain_failure(500, "the server failed"), 500)

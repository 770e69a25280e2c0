"""The HTTP layer of the gateway: routes, request bodies, server-sent events, disconnects.

client -> send deadline -> AccessControl (Host, token) -> route -> requests.py
       -> Gateway.respond -> responses.py

POST /v1/chat/completions   POST /v1/completions   GET /v1/models[/NAME]   GET /health
POST /sessions              GET, DELETE /sessions/ID    the same /v1 under /sessions/ID/v1
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollick.errors import RollickError
from rollick.serve.access_control import AccessControl, AllowedHosts
from rollick.serve.choices import ChoiceChunk, Emit
from rollick.serve.gateway import AgentSession, Gateway
from rollick.serve.recorder import Segment
from rollick.serve.request_fields import BadRequest, model_not_found_error, read_json
from rollick.serve.requests import ApiRequest, read_chat, read_completion
from rollick.serve.responses import ResponseBuilder, describe_model, error_body, error_response

BODY_DEADLINE_S = 60.0
"""Time for a client to send its request body."""
SEND_DEADLINE_S = 60.0
"""A client that reads nothing for this long counts as disconnected."""
MAX_BODY_BYTES = 4 << 20

ReadRequest = Callable[[Mapping[str, Any]], ApiRequest]


def make_app(gateway: Gateway, token: str, hosts: AllowedHosts) -> ASGIApp:
    errors = (RollickError, HTTPException, ClientDisconnect, Exception)
    routes = _Routes(gateway).build()
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, _on_error))
    # Outside of Starlette, so that its responses to unexpected errors also pass through these.
    return _with_send_deadline(AccessControl(app, hosts, token, gateway.sessions))


def _with_send_deadline(app: ASGIApp) -> ASGIApp:
    """ASGI middleware: disconnects a client that does not read its response."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_deadline(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_DEADLINE_S):
                    await send(message)
            except TimeoutError as error:
                raise ClientDisconnect from error

        with suppress(ClientDisconnect):
            await app(scope, receive, send_with_deadline)

    return run


@dataclass(frozen=True, slots=True)
class _Routes:
    """The endpoints. /v1 and /sessions/ID/v1 share their handlers."""

    _gateway: Gateway

    def build(self) -> list[Route | Mount]:
        v1 = [
            Route("/chat/completions", partial(self.complete, read_chat), methods=["POST"]),
            Route("/completions", partial(self.complete, read_completion), methods=["POST"]),
            Route("/models", self.list_models),
            Route("/models/{name:path}", self.show_model),
        ]
        return [
            Route("/health", self.check_health),
            Mount("/v1", routes=v1),
            Route("/sessions", self.open_session, methods=["POST"]),
            Route("/sessions/{session}", self.show_session, methods=["GET"]),
            Route("/sessions/{session}", self.close_session, methods=["DELETE"]),
            Mount("/sessions/{session}/v1", routes=v1),
        ]

    async def check_health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def list_models(self, request: Request) -> Response:
        self._find_session(request)  # raises if there is none
        data = [describe_model(self._gateway.model, self._gateway.created)]
        return JSONResponse({"object": "list", "data": data})

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._gateway.model:
            raise model_not_found_error(name)
        return JSONResponse(describe_model(name, self._gateway.created))

    async def open_session(self, request: Request) -> Response:
        session = self._gateway.open_http_session()
        base = str(request.base_url).rstrip("/")
        body = {"id": session.id, "base_url": base + session.path, "token": session.token}
        return JSONResponse(body, 201)

    async def show_session(self, request: Request) -> Response:
        session = self._gateway.get_session(request.path_params["session"])
        return _segments_response(session.segments)

    async def close_session(self, request: Request) -> Response:
        return _segments_response(self._gateway.close_session(request.path_params["session"]))

    async def complete(self, read: ReadRequest, request: Request) -> _CompletionResponse:
        session = self._find_session(request)
        api_request = read(read_json(await _read_body(request)))
        model = api_request.model or self._gateway.model
        builder = ResponseBuilder(api_request, model, self._gateway.codec.decode)
        return _CompletionResponse(self._gateway, api_request, session, builder)

    def _find_session(self, request: Request) -> AgentSession | None:
        id = request.path_params.get("session")
        return None if id is None else self._gateway.get_session(id)


async def _read_body(request: Request) -> bytes:
    """The full body. Raises BadRequest if it is too large or arrives too slowly."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    text = f"the body has more than {MAX_BODY_BYTES} bytes"
                    raise BadRequest(text, fix="send a smaller body", status=413)
    except TimeoutError as error:
        raise BadRequest("the body did not arrive in time", status=408) from error
    return bytes(body)


def _segments_response(segments: Sequence[Segment]) -> Response:
    return JSONResponse({"segments": [segment.to_json() for segment in segments]})


@dataclass(frozen=True, slots=True)
class _CompletionResponse:
    """An ASGI response that cancels its work when the client disconnects."""

    _gateway: Gateway
    _request: ApiRequest
    _session: AgentSession | None
    _builder: ResponseBuilder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._request.stream:
            # Nobody reads a response after a disconnect; other errors propagate.
            with suppress(ClientDisconnect):
                await _run_while_connected(receive, self._send_events(send))
            return
        choices = await _run_while_connected(receive, self._respond(_discard_chunk))
        if choices is not None:
            with suppress(ClientDisconnect):
                await JSONResponse(self._builder.build_response(choices))(scope, receive, send)

    async def _respond(self, emit: Emit) -> Sequence[ChoiceChunk]:
        return await self._gateway.respond(self._request, emit, session=self._session)

    async def _send_events(self, send: Send) -> None:
        events = _EventStream(send)
        started: set[int] = set()

        async def emit(chunk: ChoiceChunk) -> None:
            is_first = chunk.index not in started
            started.add(chunk.index)
            await events.send(self._builder.build_chunk(chunk, is_first=is_first))

        try:
            await events.send(self._builder.build_usage_chunk(await self._respond(emit)))
        except RollickError as error:
            if not events.has_started:
                raise
            await events.send(error_response(error)[1])
        await events.end()


@dataclass(slots=True)
class _EventStream:
    """Server-sent events. Sends the HTTP status with the first event, so that an error before it
    can set another status."""

    _send: Send
    has_started: bool = False

    async def send(self, event: Mapping[str, Any] | None) -> None:
        if event is not None:
            await self._send_data(json.dumps(event))

    async def end(self) -> None:
        await self._send_data("[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_data(self, text: str) -> None:
        if not self.has_started:
            self.has_started = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = f"data: {text}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def _run_while_connected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of the work; None if the client disconnects first, which cancels the work."""
    work_task = asyncio.create_task(work)
    disconnect = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({work_task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return await work_task if work_task.done() else None
    finally:
        work_task.cancel()
        disconnect.cancel()
        await asyncio.gather(work_task, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _discard_chunk(chunk: ChoiceChunk) -> None:
    """An `Emit` that ignores chunks: without streaming, only the full response is sent."""


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)
    if isinstance(error, HTTPException):
        body = error_body(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
        return JSONResponse(body, error.status_code, headers=error.headers)
    status, body = error_response(error)
    return JSONResponse(body, status)

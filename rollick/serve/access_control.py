"""Checks the Host header and the token of every request, before anything else.

A web page can make its own host name resolve to this machine (DNS rebinding) and then reach ports
on the loopback interface. Such a request has that name in its Host header, so unknown names are
rejected. IP addresses cannot be rebound.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollick.serve.gateway import AgentSession
from rollick.serve.request_fields import BadRequest
from rollick.serve.responses import error_response

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
"""On every response: a browser must not render it as a page."""

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no token; the response only says that the server is up."""

_SESSION = re.compile(r"/sessions/([\w-]+)/v1/")


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The Host headers that the server accepts; ports are ignored."""

    names: frozenset[str]
    any_address: bool
    """Whether any IP address is accepted, or only loopback addresses."""

    @classmethod
    def of(cls, bound: str, allowed: Iterable[str] = ()) -> AllowedHosts:
        names = {"localhost", bound.lower(), *(name.lower() for name in allowed)}
        address = _parse_ip_address(bound)
        is_loopback = bound.lower() == "localhost" if address is None else address.is_loopback
        return cls(frozenset(names), any_address=not is_loopback)

    def allows(self, header: str) -> bool:
        name = _strip_port(header.strip().lower())
        address = _parse_ip_address(name)
        is_allowed_address = address is not None and (self.any_address or address.is_loopback)
        return name in self.names or is_allowed_address


@dataclass(frozen=True, slots=True)
class AccessControl:
    """ASGI middleware: rejects requests with an unknown Host or without the token."""

    app: ASGIApp
    hosts: AllowedHosts
    token: str
    sessions: Mapping[str, AgentSession]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        error = self._check(Headers(scope=scope), scope["path"])
        if error is None:
            await self.app(scope, receive, send_with_headers)
        else:
            status, body = error_response(error)
            challenge = {"www-authenticate": "Bearer"} if status == 401 else None
            await JSONResponse(body, status, headers=challenge)(scope, receive, send_with_headers)

    def _check(self, headers: Headers, path: str) -> BadRequest | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.hosts.allows(hosts[0]):
            text, code = "this Host is not allowed", "host_not_allowed"
            fix = "use the address that was printed, or start with --allow-host NAME"
            return BadRequest(text, fix=fix, status=403, code=code)
        match = _SESSION.match(path)
        session = None if match is None else self.sessions.get(match[1])
        tokens = [self.token] if session is None else [self.token, session.token]
        if path in OPEN_PATHS or _has_token(headers, tokens):
            return None
        text, code = "the token is missing or wrong", "invalid_api_key"
        fix = "send it as the API key (Authorization: Bearer TOKEN)"
        return BadRequest(text, fix=fix, status=401, code=code)


def _has_token(headers: Headers, tokens: Sequence[str]) -> bool:
    """Whether the request has one of the tokens. Compares with all in constant time, so that timing
    reveals nothing about them."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    matches = [
        hmac.compare_digest(_digest(credentials.strip()), _digest(token)) for token in tokens
    ]
    return scheme.lower() == "bearer" and any(matches)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _strip_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _parse_ip_address(name: str) -> IPv4Address | IPv6Address | None:
    with suppress(ValueError):
        return ip_address(name)
    return None

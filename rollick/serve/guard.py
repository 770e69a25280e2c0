"""Who may ask: the Host header and the token of every request. In front of everything else.

A page in a browser can make a name of its own point to this machine (DNS rebinding) and then talk
to ports that only listen on the loopback. Such a request carries that name in its Host header, so
names that the server does not know are refused. Addresses cannot be rebound.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollick.serve.asked import Refused
from rollick.serve.shapes import failure

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
"""On every answer: nothing here is a page, whatever the model has written."""

OPEN_PATHS = frozenset({"/health"})
"""What needs no token; it says that the server lives, and nothing more."""

_SESSION = re.compile(r"/sessions/([\w-]+)/v1/")


@dataclass(frozen=True, slots=True)
class Hosts:
    """The names under which the server may be asked."""

    names: frozenset[str]
    any_address: bool
    """Whether a Host that is an IP address will do, or only one of the loopback."""

    @classmethod
    def of(cls, bound: str, allowed: Iterable[str] = ()) -> Hosts:
        names = {"localhost", bound.lower(), *(name.lower() for name in allowed)}
        return cls(frozenset(names), any_address=not _is_loopback(bound))

    def allow(self, header: str) -> bool:
        """Whether a Host header names us; the port does not matter."""
        name = _without_port(header.strip().lower())
        if name in self.names:
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return self.any_address or address.is_loopback


class Guard:
    """Refuses requests with a foreign Host or without the token."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Hosts,
        token: str,
        token_of_session: Callable[[str], str | None],
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._token = token
        self._token_of_session = token_of_session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        refusal = self._refusal(Headers(scope=scope), scope["path"])
        if refusal is None:
            await self._app(scope, receive, send_guarded)
        else:
            status, body = failure(refusal)
            challenge = {"www-authenticate": "Bearer"} if status == 401 else None
            await JSONResponse(body, status, headers=challenge)(scope, receive, send_guarded)

    def _refusal(self, headers: Headers, path: str) -> Refused | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._hosts.allow(hosts[0]):
            return Refused(
                "this Host is not served here",
                fix="use the address that was printed, or start with --allow-host NAME",
                status=403,
                code="host_not_allowed",
            )
        if path in OPEN_PATHS or _knows(headers, self._tokens(path)):
            return None
        return Refused(
            "the token is missing or wrong",
            fix="send it as the API key (Authorization: Bearer TOKEN)",
            status=401,
            code="invalid_api_key",
        )

    def _tokens(self, path: str) -> Sequence[str]:
        inside = _SESSION.match(path)
        own = None if inside is None else self._token_of_session(inside[1])
        return (self._token,) if own is None else (self._token, own)


def _knows(headers: Headers, tokens: Sequence[str]) -> bool:
    """Compared as digests in constant time, all of them: the time tells nothing of a token."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    found = [hmac.compare_digest(_digest(given.strip()), _digest(token)) for token in tokens]
    return scheme.lower() == "bearer" and any(found)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"

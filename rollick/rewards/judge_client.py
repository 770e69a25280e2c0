"""One chat completion from an OpenAI-compatible endpoint, tried again where that makes sense.

    ask --> POST /chat/completions --> Reply (text, tokens)
             ^  busy, broken or silent: again after a random wait, a little longer each time
             +-- refused (a wrong key, a wrong name): at once an error

Knows nothing of verdicts: whoever reads the reply may call it junk, and then it is asked again.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from rollick.errors import MissingExtra

try:
    import httpx
except ImportError as error:
    raise MissingExtra.of("httpx", "rewards") from error

T = TypeVar("T")

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Status codes that may be another one the next time."""
MAX_REPLY = 1 << 20
"""Bytes of a reply that are read."""
FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 8.0


class Passing(Exception):
    """A failure that may pass: worth another try. `wait_s`: what the server asked for."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        super().__init__(reason)


class Refused(Exception):
    """A failure that will come again, such as a wrong key."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a model is served, and how it is asked."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    max_tokens: int = 512
    temperature: float = 0.0
    request_s: float = 10.0
    retries: int = 3
    json_mode: bool = False


@dataclass(slots=True)
class Usage:
    """What asking took, failures included."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


async def ask(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    messages: Callable[[], tuple[Sequence[Mapping[str, str]], Callable[[str], T]]],
    *,
    usage: Usage,
) -> T:
    """The reply as `messages` has it read; raises Passing after the last try, or Refused.

    messages: gives what is sent and what reads the reply, anew for every try. A reader raises
    Passing for a reply that is not worth anything.
    """
    for attempt in range(endpoint.retries + 1):
        sent, read = messages()
        try:
            usage.requests += 1
            return read(await _post(client, endpoint, sent, usage=usage))
        except Passing as failure:
            if attempt == endpoint.retries:
                raise
            usage.retries += 1
            # Full jitter: those who failed together must not come back together.
            longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt)
            await asyncio.sleep(max(failure.wait_s, random.uniform(0, longest)))
    raise AssertionError("the last try returns or raises")


async def _post(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    messages: Sequence[Mapping[str, str]],
    *,
    usage: Usage,
) -> str:
    body: dict[str, Any] = {
        "model": endpoint.model,
        "messages": list(messages),
        "temperature": endpoint.temperature,
        "max_tokens": endpoint.max_tokens,
    }
    if endpoint.json_mode:
        body["response_format"] = {"type": "json_object"}
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    url = endpoint.url.rstrip("/") + "/chat/completions"
    try:
        async with (
            asyncio.timeout(endpoint.request_s),
            client.stream("POST", url, json=body, headers=headers) as response,
        ):
            content = await _read(response)
    except TimeoutError:
        raise Passing(f"no answer within {endpoint.request_s:g} s") from None
    except httpx.TransportError as error:
        raise Passing(f"{type(error).__name__}: {error}") from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise Refused(f"{endpoint.url} is no address: {error}") from error
    _check_status(response, content)
    return _text_of(content, usage)


async def _read(response: httpx.Response) -> bytes:
    content = b""
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_REPLY:
            raise Passing(f"the reply is longer than {MAX_REPLY} bytes")
    return content


def _check_status(response: httpx.Response, content: bytes) -> None:
    code = response.status_code
    if code == 200:
        return
    said = content[:200].decode(errors="replace")
    if code in PASSING:
        raise Passing(f"status {code}: {said}", _asked_wait(response.headers.get("retry-after")))
    raise Refused(f"status {code}: {said}")


def _asked_wait(header: str | None) -> float:
    try:
        return min(max(float(header or 0), 0.0), LONGEST_WAIT_S)
    except ValueError:  # a date; our own wait will do
        return 0.0


def _text_of(content: bytes, usage: Usage) -> str:
    try:
        reply: Any = json.loads(content)
        counted = cast("Mapping[str, Any]", reply.get("usage") or {})
        usage.prompt_tokens += int(counted.get("prompt_tokens") or 0)
        usage.completion_tokens += int(counted.get("completion_tokens") or 0)
        text: Any = reply["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise Passing(f"not a chat completion: {content[:80]!r}") from error
    if not isinstance(text, str):
        raise Passing(f"a reply without text: {text!r:.80}")
    return text

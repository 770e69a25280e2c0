"""Adapter for OpenEnv: environments on a server, called over a WebSocket.

    reply --format--> a field of the action, a JSON object, or a tool call --> server
    server --> one field of the observation as text, or all of it as JSON

The server's schema defines an action. If it has one required field, the reply is its value. If
actions are tool calls (MCP), the policy gets the server's tools. Each episode has its own
connection and environment; the server limits their number.

A server that cannot be reached, or a lost connection, raises ServiceUnavailable: the episode starts
again when the server responds.

Written for openenv 0.10. Start the server separately.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from math import inf
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import urlopen

from rollick.envs.adapters.uninstalled import import_optional, mapping_option
from rollick.envs.base import Reset, Step, TextEnv
from rollick.envs.formats import Format, describe_format, read_reply
from rollick.envs.tools.calls import (
    STYLES,
    BadCall,
    CallStyle,
    describe_tools,
    first_parameters,
    read_calls,
)
from rollick.envs.tools.kit import function_schema
from rollick.errors import UNAVAILABLE_FIX, EnvError, ServiceUnavailable
from rollick.types import Turn, stable_hash

TOOL_ACTIONS = frozenset({"Action", "CallToolAction", "ListToolsAction"})
"""Titles of action schemas that are tool calls."""
INVALID_ACTION = "VALIDATION_ERROR"
"""The server's error code for an action that does not match its schema."""
UNAVAILABLE_STATUSES = (502, 503, 504)
"""HTTP statuses of a proxy whose server does not answer."""
CONNECT_S = 5.0
"""Time limit to connect, and for the server's schema."""
MARGIN_S = 2.0
"""Time that is left of a call's limit after the server was found not to answer."""
RETRY_S = 2.0
"""Pause before a server that could not be reached is tried again. Otherwise each episode of the
process would wait for CONNECT_S, one after another."""
Action = Mapping[str, Any]
_outages: dict[str, tuple[float, str]] = {}
"""Time and reason of the last failure to reach each server."""


class RemoteEnv(TextEnv):
    """One episode on the server at `url`."""

    def __init__(
        self,
        *,
        url: str,
        field: str = "",
        show: str = "",
        reset: str | Mapping[str, Any] = "",
        style: Format = "plain",
        calls: CallStyle = "hermes",
        role: str = "tool",
        max_steps: int = 200,
        timeout_s: float = 50.0,
    ) -> None:
        """`field`: the action's field that holds the reply; default: its only required field.
        `show`: the observation's field that the policy reads; default: all of it. `reset`:
        further arguments of the server's reset, as a mapping or as JSON. `calls` and `role`: if
        the server has tools, the style of calls and the role of their results. `timeout_s`: time
        limit of an answer; at most CONNECT_S + MARGIN_S less than environments.step_timeout_s."""
        if calls not in STYLES or max_steps < 1:
            fix = f"use calls {', '.join(STYLES)}, and a positive max_steps"
            raise EnvError(f"invalid options: calls={calls!r}, max_steps={max_steps}", fix=fix)
        self.url = url.rstrip("/")
        self.show = show
        self.arguments = mapping_option("reset", reset)
        self.style: Format = style
        self.calls: CallStyle = calls
        self.role = role
        self.max_steps = max_steps
        self.timeout_s = timeout_s
        self.steps = 0
        self.client: Any = None
        self.is_lost = False
        """Whether the server does not answer, or the connection to it ended."""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.schema: Mapping[str, Any] = {}
        self.field = field

    def reset(self, seed: int) -> Reset:
        _check_outage(self.url)
        self.schema = action_schema(self.url)
        required: Sequence[str] = self.schema.get("required", ())
        if len(required) == 1:
            self.field = self.field or required[0]
        openenv = import_optional("openenv", "openenv>=0.10", older="mcp and pillow")
        limits = {"connect_timeout_s": CONNECT_S, "message_timeout_s": self.answer_timeout_s}
        self.client = openenv.GenericEnvClient(base_url=self.url, **limits).sync()
        number = stable_hash("openenv", seed) % 2**31
        try:
            self.client.connect()
        except OSError as error:
            self.is_lost = True
            raise _record_outage(self.url, error) from error
        try:
            with self._report_lost_server():
                result = self.client.reset(seed=number, **self.arguments)
                if self.schema.get("title") in TOOL_ACTIONS:
                    listed = self.client.step({"type": "list_tools"}).observation["tools"]
                    self.tools = [_tool_schema(tool) for tool in listed]
        except RuntimeError as error:
            raise EnvError(f"the server at {self.url} failed to reset: {error}") from error
        text = self._text(result.observation)
        if self.tools:
            system = Turn("system", describe_tools(self.tools, self.calls))
            return (system, Turn("user", text)), {}
        return f"{text}\n{describe_format(self.style, self._action_hint())}", {}

    def step(self, action: str) -> Step:
        self.steps += 1
        out_of_steps = self.steps >= self.max_steps
        parsed = self._parse_action(action)
        if isinstance(parsed, str):
            return (
                self._observation(parsed),
                0.0,
                False,
                out_of_steps,
                {"valid": False, "effective": False},
            )
        try:
            with self._report_lost_server():
                result = self.client.step(parsed)
        except RuntimeError as error:
            if INVALID_ACTION not in str(error):
                raise
            error_text = self._observation(f"That is no action: {error}")
            return error_text, 0.0, False, out_of_steps, {"valid": False, "effective": False}
        done, reward = bool(result.done), float(result.reward or 0.0)
        observation = self._observation(self._text(result.observation))
        return observation, reward, done, out_of_steps and not done, {"valid": True}

    def close(self) -> None:
        if self.client is None:
            return
        if self.is_lost:  # The client would wait for the server.
            threading.Thread(target=self.client.close, daemon=True).start()
        else:
            self.client.close()

    @property
    def answer_timeout_s(self) -> float:
        """Leaves time to find out whether the server still answers others."""
        return min(self.timeout_s, max(1.0, self.step_timeout_s - CONNECT_S - MARGIN_S))

    @contextmanager
    def _report_lost_server(self) -> Generator[None]:
        """Raise ServiceUnavailable for a lost connection or a server that answers nobody, and
        EnvError if it only does not answer this episode."""
        closed: Any = import_module("websockets.exceptions").ConnectionClosed
        try:
            yield
        except TimeoutError as error:
            self.is_lost = True
            _check_outage(self.url)
            _request_schema(self.url)
            limit = f"within {self.answer_timeout_s:g} s"
            raise EnvError(f"the server at {self.url} did not answer {limit}") from error
        except (OSError, closed) as error:
            self.is_lost = True
            message = f"the connection to the server at {self.url} was lost: {error}"
            raise ServiceUnavailable(message, fix=UNAVAILABLE_FIX) from error

    def _parse_action(self, action: str) -> Action | str:
        """The action of the reply, or an error text for the policy."""
        if self.tools:
            return self._parse_call(action)
        answer = read_reply(action, self.style)
        if answer is None:
            return f"That is no action. {describe_format(self.style, self._action_hint())}"
        if self.field:
            field_schema = self.schema.get("properties", {}).get(self.field, {})
            return {self.field: _parse_value(answer, field_schema)}
        try:
            parsed = json.loads(answer)
        except (ValueError, RecursionError) as error:
            return f"That is no action: it is not JSON ({error})."
        if not isinstance(parsed, dict):
            return "That is no action: no object."
        return cast("Action", parsed)

    def _parse_call(self, action: str) -> Action | str:
        calls = read_calls(action, self.calls, first_parameters(self.tools))
        if isinstance(calls, BadCall):
            return f"error: {calls.reason}"
        if len(calls) != 1:
            return "error: call one tool at a time" if calls else "error: call a tool"
        [call] = calls
        return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}

    def _action_hint(self) -> str:
        properties: Mapping[str, Any] = self.schema.get("properties", {})
        if self.field:
            return str(properties.get(self.field, {}).get("description") or self.field)
        types = {k: v.get("type", "...") for k, v in properties.items() if k != "metadata"}
        return f"a JSON object like {json.dumps(types)}"

    def _observation(self, text: str) -> str | tuple[Turn, ...]:
        return (Turn(self.role, text),) if self.tools else text

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.show:
            if self.show not in observation:
                fields = ", ".join(observation)
                raise EnvError(f"the observation has no {self.show!r}", fix=f"show one of {fields}")
            return str(observation[self.show])
        fields = {key: value for key, value in observation.items() if key != "metadata"}
        return json.dumps(fields, ensure_ascii=False)


@lru_cache(64)
def action_schema(url: str) -> Mapping[str, Any]:
    """The server's action schema, requested once per process."""
    return _request_schema(url)


def _request_schema(url: str) -> Mapping[str, Any]:
    """Raises ServiceUnavailable if the server cannot be reached."""
    address = f"http{url.removeprefix('http').removeprefix('ws')}/schema"
    try:
        with urlopen(address, timeout=CONNECT_S) as response:
            schemas: dict[str, Any] = json.load(response)
    except (OSError, ValueError) as error:
        is_reachable = isinstance(error, HTTPError) and error.code not in UNAVAILABLE_STATUSES
        if isinstance(error, OSError) and not is_reachable:
            raise _record_outage(url, error) from error
        fix = "start it (`openenv serve`, uvicorn or docker), and set url to its address"
        raise EnvError(f"no OpenEnv server responds at {url}: {error}", fix=fix) from error
    return cast("Mapping[str, Any]", schemas["action"])


def _check_outage(url: str) -> None:
    """Raises if the server could not be reached a moment ago."""
    since, reason = _outages.get(url, (-inf, ""))
    if time.monotonic() < since + RETRY_S:
        raise ServiceUnavailable(reason, fix=UNAVAILABLE_FIX)


def _record_outage(url: str, error: OSError) -> ServiceUnavailable:
    """Remember that the server cannot be reached; returns the error to raise."""
    reason = f"the server at {url} cannot be reached: {error}"
    _outages[url] = time.monotonic(), reason
    return ServiceUnavailable(reason, fix=UNAVAILABLE_FIX)


def _parse_value(answer: str, schema: Mapping[str, Any]) -> Any:
    """The text converted to the field's type; unchanged if that fails."""
    if schema.get("type") in ("integer", "number", "boolean", "array", "object"):
        with suppress(ValueError, RecursionError):
            return json.loads(answer)
    return answer


def _tool_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    description, parameters = tool.get("description", ""), tool.get("input_schema", {})
    return function_schema(tool["name"], description, parameters)

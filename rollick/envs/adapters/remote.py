"""Environments of OpenEnv: servers that are asked over a WebSocket, played as TextEnvs.

    reply --format--> the action's field, a JSON object, or a call of one of its tools --> server
    server --> the observation's text, or all of it as JSON

A server says in its schema what an action is; where it has a single field the reply goes there. A
server whose actions are calls of tools (MCP) offers them to the policy. Each episode has a
connection, and so an environment, of its own; how many there may be at once is the server's say.

Written for openenv 0.10. Where the server runs, and how it is started, is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast
from urllib.request import urlopen

from rollick.envs.adapters.apart import import_apart
from rollick.envs.adapters.options import mapping_option
from rollick.envs.base import Reset, Step, TextEnv
from rollick.envs.formats import Format, ask, read_reply
from rollick.envs.tools.calls import (
    STYLES,
    BadCall,
    CallStyle,
    describe_tools,
    first_parameters,
    read_calls,
)
from rollick.errors import EnvError
from rollick.types import Turn, stable_hash

OF_TOOLS = frozenset({"Action", "CallToolAction", "ListToolsAction"})
"""Names of actions that are calls of tools."""
REFUSED = "VALIDATION_ERROR"
"""What a server says of an action that does not fit its schema."""
SCHEMA_S = 10.0
Action = Mapping[str, Any]


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
        timeout_s: float = 60.0,
    ) -> None:
        """`field`: of the action, which the reply is; none: the one that it must have. `show`: of
        the observation, which the policy reads; none: all of it. `reset`: further arguments of the
        server's reset, as a mapping or as JSON. `calls` and `role`: where the server has tools, how
        they are called, and the role of what they say."""
        if calls not in STYLES or max_steps < 1:
            raise EnvError(
                f"calls={calls!r} and max_steps={max_steps} make no environment",
                fix=f"calls is one of {', '.join(STYLES)}, max_steps positive",
            )
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
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.schema: Mapping[str, Any] = {}
        self.field = field

    def reset(self, seed: int) -> Reset:
        self.schema = action_schema(self.url)
        self.field = self.field or _only_field(self.schema)
        make: Any = _openenv().GenericEnvClient
        self.client = make(base_url=self.url, message_timeout_s=self.timeout_s).sync()
        number = stable_hash("openenv", seed) % 2**31
        try:
            result = self.client.connect().reset(seed=number, **self.arguments)
            if self.schema.get("title") in OF_TOOLS:
                listed = self.client.step({"type": "list_tools"}).observation["tools"]
                self.tools = [_as_schema(tool) for tool in listed]
        except (OSError, RuntimeError) as error:
            raise EnvError(f"the server at {self.url} did not begin: {error}") from error
        seen = self._text(result.observation)
        if self.tools:
            return (
                Turn("system", describe_tools(self.tools, self.calls)), Turn("user", seen),
            ), {}  # fmt: skip
        return f"{seen}\n{ask(self.style, self._wanted())}", {}

    def step(self, action: str) -> Step:
        self.steps += 1
        late = self.steps >= self.max_steps
        meant = self._read(action)
        if isinstance(meant, str):
            return self._seen(meant), 0.0, False, late, {"valid": False, "effective": False}
        try:
            result = self.client.step(meant)
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise
            seen = self._seen(f"That is no action: {error}")
            return seen, 0.0, False, late, {"valid": False, "effective": False}
        done = bool(result.done)
        text = self._text(result.observation)
        reward = float(result.reward or 0.0)
        return self._seen(text), reward, done, late and not done, {"valid": True}

    def close(self) -> None:
        if self.client is not None:
            self.client.close()

    def _read(self, action: str) -> Action | str:
        """What the reply means as an action; or why it means none."""
        if self.tools:
            return self._read_call(action)
        answer = read_reply(action, self.style).answer
        if answer is None:
            return f"That is no action. {ask(self.style, self._wanted())}"
        if self.field:
            of_field = self.schema.get("properties", {}).get(self.field, {})
            return {self.field: _typed(answer, of_field)}
        try:
            said = json.loads(answer)
        except (ValueError, RecursionError) as error:
            return f"That is no action: it is not JSON ({error})."
        return cast("Action", said) if isinstance(said, dict) else "That is no action: no object."

    def _read_call(self, action: str) -> Action | str:
        calls = read_calls(action, self.calls, tools=first_parameters(self.tools))
        if isinstance(calls, BadCall):
            return f"error: {calls.reason}"
        if len(calls) != 1:
            return "error: call one tool at a time" if calls else "error: call a tool"
        [call] = calls
        return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}

    def _wanted(self) -> str:
        properties: Mapping[str, Any] = self.schema.get("properties", {})
        if self.field:
            return str(properties.get(self.field, {}).get("description") or self.field)
        shown = {key: of.get("type", "...") for key, of in properties.items() if key != "metadata"}
        return f"a JSON object like {json.dumps(shown)}"

    def _seen(self, text: str) -> str | tuple[Turn, ...]:
        return (Turn(self.role, text),) if self.tools else text

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.show:
            if self.show not in observation:
                known = ", ".join(observation)
                raise EnvError(f"the observation has no {self.show!r}", fix=f"show one of {known}")
            return str(observation[self.show])
        shown = {key: value for key, value in observation.items() if key != "metadata"}
        return json.dumps(shown, ensure_ascii=False)


@lru_cache(64)
def action_schema(url: str) -> Mapping[str, Any]:
    """What the server takes for an action. Asked once in a process."""
    address = f"http{url.removeprefix('http').removeprefix('ws')}/schema"
    try:
        with urlopen(address, timeout=SCHEMA_S) as answer:
            said: dict[str, Any] = json.load(answer)
    except (OSError, ValueError) as error:
        raise EnvError(
            f"no server of OpenEnv answers at {url}: {error}",
            fix="start it (`openenv serve`, uvicorn or docker), and give its address as url",
        ) from error
    return cast("Mapping[str, Any]", said["action"])


def _openenv() -> Any:
    return import_apart(
        "openenv", named="OpenEnv", requirement="openenv>=0.10", older="mcp and pillow"
    )


def _only_field(schema: Mapping[str, Any]) -> str:
    """The field that an action must have, if there is one only."""
    required: Sequence[str] = schema.get("required", ())
    return required[0] if len(required) == 1 else ""


def _typed(answer: str, schema: Mapping[str, Any]) -> Any:
    """The text as the field's type has it; what does not fit is left to the server to refuse."""
    if schema.get("type") in ("integer", "number", "boolean", "array", "object"):
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            return answer
    return answer


def _as_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}

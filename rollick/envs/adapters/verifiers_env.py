"""Adapter for environments of `verifiers`, with their tasksets, seats, tools and rewards.

The observation is the new part of the environment's request to its model. The policy's reply
becomes the model's response, with tool calls parsed from the text. Environments that rewrite
earlier messages are not supported. The reward of the policy's trace comes at the end of the
episode. See verifiers_host.py for how the environment runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollick.envs.adapters.uninstalled import mapping_option
from rollick.envs.adapters.verifiers_host import (
    EpisodeEnd,
    Message,
    PolicyConversation,
    PolicyRequest,
    shared_host,
)
from rollick.envs.base import Reset, Step, TextEnv
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


@dataclass(kw_only=True, eq=False)
class VerifiersEnv(TextEnv):
    """One task of a taskset, by its id or the name of its module."""

    taskset: str
    env: str = ""
    """An environment other than the taskset's own."""
    config: str | Mapping[str, Any] = ""
    """The environment's config, as a mapping or as JSON."""
    seat: str = ""
    """The policy's seat, if there are several."""
    tasks: int = 1000
    """The seed chooses among this many tasks."""
    style: CallStyle = "hermes"
    role: str = "tool"
    """The role of messages with tool results."""
    max_steps: int = 50
    success_at: float = 1.0
    """The minimum reward of a solved task."""

    def __post_init__(self) -> None:
        if self.style not in STYLES or min(self.tasks, self.max_steps) < 1:
            limits = f"tasks={self.tasks}, max_steps={self.max_steps}"
            fix = f"use style {', '.join(STYLES)}, and positive numbers"
            raise EnvError(f"invalid options: style={self.style!r}, {limits}", fix=fix)
        config = mapping_option("config", self.config)
        self.env_config: dict[str, Any] = {**config, **({"id": self.env} if self.env else {})}
        self.env_config["taskset"] = {**config.get("taskset", {}), "id": self.taskset}
        self.steps = 0
        self.conversation: PolicyConversation | None = None
        self.last_request = PolicyRequest((), ())

    def reset(self, seed: int) -> Reset:
        host = shared_host()
        try:
            environment = host.open(self.env_config, self.seat, self.tasks, self.max_steps)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise EnvError(f"verifiers cannot create {self.env_config}: {error}") from error
        task = environment.tasks[stable_hash("verifiers", seed) % len(environment.tasks)]
        self.conversation = host.start_episode(environment, task)
        event = self.conversation.next_event()
        if isinstance(event, EpisodeEnd):
            _finished_episode(event)
            raise EnvError("the episode ended before the first request to the policy")
        self.last_request = event
        turns = [self._turn(message) for message in event.messages]
        if event.tools:
            turns.insert(0, Turn("system", describe_tools(event.tools, self.style)))
        return tuple(turns), {"success": False}

    def step(self, action: str) -> Step:
        assert self.conversation is not None, "call reset() first"
        self.steps += 1
        message, valid = self._message(action)
        self.conversation.reply(message)
        event = self.conversation.next_event()
        if isinstance(event, EpisodeEnd):
            return self._end(event, valid=valid)
        new_messages = _new_messages(self.last_request.messages, event.messages)
        self.last_request = event
        turns = tuple(self._turn(message) for message in new_messages)
        return turns or "", 0.0, False, False, {"valid": valid}

    def close(self) -> None:
        if self.conversation is not None:
            self.conversation.cancel()

    def _message(self, action: str) -> tuple[Message, bool]:
        """The reply as a model's message, and whether its tool calls are valid."""
        first = first_parameters(self.last_request.tools)
        calls = read_calls(action, self.style, first) if first else []
        if isinstance(calls, BadCall) or not calls:
            return {"role": "assistant", "content": action}, not isinstance(calls, BadCall)
        tool_calls: list[dict[str, Any]] = []
        for number, call in enumerate(calls):
            function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
            id = f"call_{self.steps}_{number}"
            tool_calls.append({"id": id, "type": "function", "function": function})
        are_known = all(call.name in first for call in calls)
        return {"role": "assistant", "content": action, "tool_calls": tool_calls}, are_known

    def _turn(self, message: Message) -> Turn:
        role = self.role if message["role"] == "tool" else str(message["role"])
        return Turn(role, _text(message))

    def _end(self, event: EpisodeEnd, *, valid: bool) -> Step:
        assert self.conversation is not None
        episode = _finished_episode(event)
        traces = [trace for trace in episode.traces if trace.agent.name == self.conversation.seat]
        if len(traces) != 1:
            raise EnvError(f"expected one trace of the policy in the episode, got {len(traces)}")
        [trace] = traces
        reward, truncated = float(trace.reward), bool(trace.is_truncated)
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        info = {"valid": valid, "success": reward >= self.success_at, "metrics": metrics}
        return "", reward, not truncated, truncated, info


def _finished_episode(event: EpisodeEnd) -> Any:
    """The finished episode. Raises EnvError if it failed."""
    if event.error is not None:
        raise EnvError(f"verifiers: {event.error!r}") from event.error
    if event.episode.ok:
        return event.episode
    errors = [*event.episode.errors, *(e for trace in event.episode.traces for e in trace.errors)]
    reasons = "; ".join(f"{error.type}: {error.message}" for error in errors) or "unknown reason"
    raise EnvError(f"the episode of verifiers failed: {reasons}")


def _new_messages(before: Sequence[Message], now: Sequence[Message]) -> Sequence[Message]:
    """The messages since the policy's last one."""
    seen, kept = ([(m["role"], _text(m)) for m in part] for part in (before, now[: len(before)]))
    if seen != kept or len(now) <= len(before) or now[len(before)]["role"] != "assistant":
        fix = "run it as an agent behind the gateway: docs/environments.md"
        raise EnvError("the environment changed earlier messages, which is not supported", fix=fix)
    return now[len(before) + 1 :]


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text":
            kind = part.get("type")
            raise EnvError(f"a message has a part of type {kind!r}; only text is supported")
    return "\n".join(part["text"] for part in content)

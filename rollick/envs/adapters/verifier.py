"""Environments of `verifiers`, played as TextEnvs: tasksets, seats, tools and rewards of theirs.

What the environment would send to a model is the observation; what the policy writes goes back as
the model's answer, with its tool calls read from the text. All that is new since the policy spoke
is shown; an environment that rewrites what was said before cannot be played like this. It pays when
the episode is over: the sum of the rewards of the policy's trace. How it runs: verifier_host.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollick.envs.adapters.options import mapping_option
from rollick.envs.adapters.verifier_host import Asked, Ended, Message, Talk, the_host
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


class VerifiersEnv(TextEnv):
    """One task of a taskset, by its id or the name of its module."""

    def __init__(
        self,
        *,
        taskset: str,
        env: str = "",
        config: str | Mapping[str, Any] = "",
        seat: str = "",
        tasks: int = 1000,
        style: CallStyle = "hermes",
        role: str = "tool",
        max_steps: int = 50,
        success_at: float = 1.0,
    ) -> None:
        """`env`: an environment other than the taskset's own; `config`: the environment's, as a
        mapping or as JSON; `seat`: the policy's, where there are several; `tasks`: the seed chooses
        among so many; `style`: how tools are called; `role`: of the messages with what tools say;
        `success_at`: a task is solved that pays as much."""
        if style not in STYLES or min(tasks, max_steps) < 1:
            raise EnvError(
                f"style={style!r}, tasks={tasks} and max_steps={max_steps} make no environment",
                fix=f"style is one of {', '.join(STYLES)}, the others positive",
            )
        self.config = _config(config, taskset=taskset, env=env)
        self.seat = seat
        self.tasks = tasks
        self.style: CallStyle = style
        self.role = role
        self.max_steps = max_steps
        self.success_at = success_at
        self.steps = 0
        self.talk: Talk | None = None
        self.asked = Asked((), ())

    def reset(self, seed: int) -> Reset:
        host = the_host()
        try:
            opened = host.open(
                self.config, seat=self.seat, tasks=self.tasks, max_turns=self.max_steps
            )
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise EnvError(f"verifiers cannot make {self.config}: {error}") from error
        task = opened.tasks[stable_hash("verifiers", seed) % len(opened.tasks)]
        self.talk = host.play(opened, task)
        event = self.talk.next_event()
        if isinstance(event, Ended):
            _episode_of(event)
            raise EnvError("the episode was over before the policy could speak")
        self.asked = event
        turns = [self._turn(message) for message in event.messages]
        if event.tools:
            turns.insert(0, Turn("system", describe_tools(event.tools, self.style)))
        return tuple(turns), {"success": False}

    def step(self, action: str) -> Step:
        assert self.talk is not None, "reset comes first"
        self.steps += 1
        message, valid = self._message(action)
        self.talk.reply(message)
        event = self.talk.next_event()
        if isinstance(event, Ended):
            return self._end(event, valid=valid)
        news = _news(self.asked.messages, event.messages)
        self.asked = event
        turns = tuple(self._turn(message) for message in news)
        return turns or "", 0.0, False, False, {"valid": valid}

    def close(self) -> None:
        if self.talk is not None:
            self.talk.cancel()

    def _message(self, action: str) -> tuple[Message, bool]:
        """The reply as a model's message, and whether its calls could be read."""
        first = first_parameters(self.asked.tools)
        calls = read_calls(action, self.style, tools=first) if first else []
        if isinstance(calls, BadCall) or not calls:
            return {"role": "assistant", "content": action}, not isinstance(calls, BadCall)
        made = [
            {
                "id": f"call_{self.steps}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for number, call in enumerate(calls)
        ]
        known = all(call.name in first for call in calls)
        return {"role": "assistant", "content": action, "tool_calls": made}, known

    def _turn(self, message: Message) -> Turn:
        role = self.role if message["role"] == "tool" else str(message["role"])
        return Turn(role, _text(message))

    def _end(self, event: Ended, *, valid: bool) -> Step:
        assert self.talk is not None
        episode = _episode_of(event)
        traces = [trace for trace in episode.traces if trace.agent.name == self.talk.seat]
        if len(traces) != 1:
            raise EnvError(f"the policy has {len(traces)} traces in the episode, and must have one")
        [trace] = traces
        reward = float(trace.reward)
        cut = bool(trace.is_truncated)
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        info = {"valid": valid, "success": reward >= self.success_at, "metrics": metrics}
        return "", reward, not cut, cut, info


def _config(config: str | Mapping[str, Any], *, taskset: str, env: str) -> dict[str, Any]:
    known = mapping_option("config", config)
    of_taskset: dict[str, Any] = {**known.get("taskset", {}), "id": taskset}
    return {**known, "taskset": of_taskset} | ({"id": env} if env else {})


def _episode_of(event: Ended) -> Any:
    """The finished episode. EnvError where it failed."""
    if event.error is not None:
        raise EnvError(f"verifiers: {event.error!r}") from event.error
    if event.episode.ok:
        return event.episode
    errors = [*event.episode.errors, *(e for trace in event.episode.traces for e in trace.errors)]
    said = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it did not say why"
    raise EnvError(f"the episode of verifiers failed: {said}")


def _news(before: Sequence[Message], now: Sequence[Message]) -> Sequence[Message]:
    """What was said since the policy's last message."""
    same = all(
        (old["role"], _text(old)) == (new["role"], _text(new))
        for old, new in zip(before, now, strict=False)
    )
    if not same or len(now) <= len(before) or now[len(before)]["role"] != "assistant":
        raise EnvError(
            "the environment changed what had been said before",
            fix="run it as an agent behind the gateway: docs/environments.md",
        )
    return now[len(before) + 1 :]


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for part in content:
        if part.get("type") != "text":
            raise EnvError(f"a message has a part of the kind {part.get('type')!r}, not text")
        parts.append(part["text"])
    return "\n".join(parts)

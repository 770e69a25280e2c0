"""ToolEnv: a question that the policy may answer with tools.

    question -> reply with calls -> results of the tools -> ... -> reply without a call: the answer

Question and answer are options, from the columns of a dataset row. Without a question, the seed
generates an arithmetic one. The reward is 1 if the last number of the answer is correct. Without a
known answer the reward is 0, and the domain's reward functions score the text. The policy sees an
error for a call that cannot be parsed or an unknown tool; such a step is not valid.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollick.envs.base import Reset, Step, TextEnv, seeded_random
from rollick.envs.tools.calls import (
    STYLES,
    BadCall,
    CallStyle,
    ToolCall,
    describe_tools,
    first_parameters,
    read_calls,
    write_call,
)
from rollick.envs.tools.kit import Tool, calculate, calculator, python, search
from rollick.envs.tools.mcp import mcp_server
from rollick.errors import EnvError
from rollick.types import Turn

MAX_RESULT_CHARS = 2000
"""Maximum characters of the tool results of a step."""
HOW_TO_ANSWER = "Its result comes back to you. When you know the answer, write it without a call."


@dataclass(kw_only=True, eq=False)
class ToolEnv(TextEnv):
    """One question that may be answered with tools."""

    question: str = ""
    answer: str = ""
    """Its last number is the correct one."""
    tools: str = "calculator"
    """Comma-separated names out of calculator, search and python."""
    style: CallStyle = "hermes"
    corpus: str = ""
    """The file for the tool search."""
    mcp: str = ""
    """The command of an MCP server with further tools."""
    max_steps: int = 6
    role: str = "tool"
    """The role of messages with tool results; some templates do not support `tool`."""
    rules: bool = True
    program_s: float = 5.0
    """Time limit of the tool python, for all programs of a reply together."""
    allow_unsafe: bool = False
    """Run programs of the tool python even without isolation."""

    def __post_init__(self) -> None:
        if self.style not in STYLES or self.max_steps < 1:
            text = f"invalid options: style={self.style!r}, max_steps={self.max_steps}"
            raise EnvError(text, fix=f"use style {', '.join(STYLES)}, and a positive max_steps")
        self.expected = last_number(self.answer)
        self.expression = ""
        self.steps = 0
        tools = [self._make_tool(name.strip()) for name in self.tools.split(",") if name.strip()]
        if self.mcp:
            tools += mcp_server(self.mcp).tools()
        self.tool_by_name = {tool.name: tool for tool in tools}
        self.schemas = [tool.schema() for tool in tools]

    def reset(self, seed: int) -> Reset:
        if not self.question:
            random = seeded_random("tools", seed)
            first, second = random.randrange(100, 1000), random.randrange(100, 1000)
            self.expression = f"{first} {random.choice('+-*')} {second}"
            self.question = f"What is {self.expression}?"
            self.expected = last_number(calculate(self.expression))
        question = Turn("user", self.question)
        if not self.rules:
            return (question,), {}
        text = f"{describe_tools(self.schemas, self.style)}\n{HOW_TO_ANSWER}"
        return (Turn("system", text), question), {}

    def step(self, action: str) -> Step:
        self.steps += 1
        calls = read_calls(action, self.style, first_parameters(self.schemas))
        if not calls and not isinstance(calls, BadCall):
            info: dict[str, Any] = {"valid": True, "metrics": {"calls": self.steps - 1}}
            if self.expected is None:
                return "", 0.0, True, False, info
            success = last_number(action) == self.expected
            return "", float(success), True, False, info | {"success": success}
        results, valid = self._run_calls(calls)
        truncated = self.steps >= self.max_steps
        return (Turn(self.role, results),), 0.0, False, truncated, {"valid": valid}

    def solve(self) -> str | None:
        if not self.expression or "calculator" not in self.tool_by_name:
            return None
        if self.steps:
            return f"The answer is {calculate(self.expression)}."
        return write_call(ToolCall("calculator", {"expression": self.expression}), self.style)

    def _run_calls(self, calls: list[ToolCall] | BadCall) -> tuple[str, bool]:
        if isinstance(calls, BadCall):
            return f"error: {calls.reason}", False
        for tool in self.tool_by_name.values():
            tool.start_reply()
        results: list[str] = []
        for call in calls:
            tool = self.tool_by_name.get(call.name)
            unknown = f"error: there is no tool {call.name}"
            results.append(unknown if tool is None else tool.run(call.arguments))
        valid = all(call.name in self.tool_by_name for call in calls)
        return "\n".join(results)[:MAX_RESULT_CHARS], valid

    def _make_tool(self, name: str) -> Tool:
        if name == "calculator":
            return calculator()
        if name == "python":
            return python(timeout_s=self.program_s, allow_unsafe=self.allow_unsafe)
        if name == "search" and self.corpus:
            return search(Path(self.corpus).expanduser().resolve())
        if name == "search":
            raise EnvError("the tool search needs a corpus", fix="set corpus=FILE")
        fix = "use calculator, search, python, or mcp=COMMAND for the tools of a server"
        raise EnvError(f"there is no tool {name!r}", fix=fix)


def last_number(text: str) -> float | None:
    """The last number of a text, ignoring commas."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None

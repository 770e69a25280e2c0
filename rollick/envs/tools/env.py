"""ToolEnv: a question that may be answered with the help of tools.

    question -> reply with calls -> what the tools say -> ... -> reply without a call: the answer

Question and answer are options, from the columns of a row; without a question the seed makes one of
arithmetic. An answer whose last number is the right one pays 1; where the right one is not known
the rewards of the domain look at what was written. A call that cannot be read or a tool that does
not exist is told to the policy, and counts as not valid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rollick.envs.base import Reset, Step, TextEnv, random_of
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
from rollick.envs.tools.kit import Tool, calculate, calculator, search
from rollick.envs.tools.mcp import mcp_server
from rollick.envs.tools.python import python
from rollick.errors import EnvError
from rollick.types import Turn

MOST_TEXT = 2000
"""Characters of a tool's answer that the policy gets to see."""


class ToolEnv(TextEnv):
    """One question. `tools`: names with commas between them, of calculator, search and python."""

    def __init__(
        self,
        *,
        question: str = "",
        answer: str = "",
        tools: str = "calculator",
        style: CallStyle = "hermes",
        corpus: str = "",
        mcp: str = "",
        max_steps: int = 6,
        role: str = "tool",
        rules: bool = True,
        program_s: float = 5.0,
        allow_unsafe: bool = False,
    ) -> None:
        """`answer`: a text whose last number is right; `corpus`: the file that search looks into;
        `mcp`: the command of a server whose tools are offered, too; `role`: of the messages with
        what tools say (some templates know no `tool`); `program_s`: for a program of the tool
        python, which runs where there is no isolation only if `allow_unsafe` says so."""
        if style not in STYLES or max_steps < 1:
            raise EnvError(
                f"no tools are called with style={style!r}, max_steps={max_steps}",
                fix=f"style is one of {', '.join(STYLES)}, max_steps positive",
            )
        self.question = question
        self.right = last_number(answer)
        self.expression = ""
        self.style: CallStyle = style
        self.max_steps = max_steps
        self.role = role
        self.rules = rules
        self.steps = 0
        boxed = partial(python, timeout_s=program_s, allow_unsafe=allow_unsafe)
        makers = {"calculator": calculator, "search": partial(_search, corpus), "python": boxed}
        offered = [_tool(name.strip(), makers) for name in tools.split(",") if name.strip()]
        if mcp:
            offered += mcp_server(mcp).tools()
        self.tools = {tool.name: tool for tool in offered}
        self.schemas = [tool.schema() for tool in offered]

    def reset(self, seed: int) -> Reset:
        if not self.question:
            random = random_of("tools", seed)
            first, second = random.randrange(100, 1000), random.randrange(100, 1000)
            self.expression = f"{first} {random.choice('+-*')} {second}"
            self.question = f"What is {self.expression}?"
            self.right = last_number(calculate(self.expression))
        asked = Turn("user", self.question)
        return ((Turn("system", self._rules()), asked) if self.rules else (asked,)), {}

    def step(self, action: str) -> Step:
        self.steps += 1
        calls = read_calls(action, self.style, tools=first_parameters(self.schemas))
        if not calls and not isinstance(calls, BadCall):
            info: dict[str, Any] = {"valid": True, "metrics": {"calls": self.steps - 1}}
            if self.right is None:
                return "", 0.0, True, False, info
            success = last_number(action) == self.right
            return "", float(success), True, False, info | {"success": success}
        said, valid = self._answer(calls)
        truncated = self.steps >= self.max_steps
        return (Turn(self.role, said),), 0.0, False, truncated, {"valid": valid}

    def solve(self) -> str | None:
        if not self.expression or "calculator" not in self.tools:
            return None
        if self.steps:
            return f"The answer is {calculate(self.expression)}."
        return write_call(ToolCall("calculator", {"expression": self.expression}), self.style)

    def _answer(self, calls: list[ToolCall] | BadCall) -> tuple[str, bool]:
        if isinstance(calls, BadCall):
            return f"error: {calls.reason}", False
        said: list[str] = []
        valid = True
        for call in calls:
            tool = self.tools.get(call.name)
            if tool is None:
                valid = False
                said.append(f"error: there is no tool {call.name}")
            else:
                said.append(tool.run(call.arguments))
        return "\n".join(said)[:MOST_TEXT], valid

    def _rules(self) -> str:
        return (
            f"{describe_tools(self.schemas, self.style)}\n"
            "Its result comes back to you. When you know the answer, write it without a call."
        )


def last_number(text: str) -> float | None:
    """The last number of a text; commas inside it do not matter."""
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found[-1]) if found else None


def _tool(name: str, makers: Mapping[str, Callable[[], Tool]]) -> Tool:
    if name not in makers:
        raise EnvError(
            f"there is no tool {name!r}",
            fix=f"use {', '.join(makers)}, or mcp=COMMAND for a server's",
        )
    return makers[name]()


def _search(corpus: str) -> Tool:
    if not corpus:
        raise EnvError("the tool search has nothing to search", fix="give corpus=FILE")
    return search(Path(corpus).expanduser().resolve())

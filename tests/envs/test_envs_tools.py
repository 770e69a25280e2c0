"""Tools: calls in the formats of common chat templates, tool results, MCP servers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollick.envs.tools.calls import STYLES, BadCall, CallStyle, ToolCall, read_calls, write_call
from rollick.envs.tools.env import ToolEnv
from rollick.envs.tools.kit import calculate, python, search
from rollick.envs.tools.mcp import McpServer
from rollick.episodes.check_env import check_env
from rollick.episodes.in_process import run_episodes, solver_policy
from rollick.errors import EnvError

TOOLS = {"search": "query", "calculator": "expression"}
SERVER = """
import json, sys
for line in sys.stdin:
    ask = json.loads(line)
    if "id" not in ask:
        continue
    print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}))
    method, said = ask["method"], ask.get("params", {})
    result = {}
    if method == "tools/list":
        schema = {"type": "object", "properties": {"text": {"description": "a text"}}}
        result = {"tools": [{"name": "shout", "description": "louder", "inputSchema": schema}]}
    if method == "tools/call":
        text = said["arguments"].get("text", "")
        result = {"content": [{"type": "text", "text": text.upper()}], "isError": not text}
    if method == "no/such":
        print(json.dumps({"id": ask["id"], "error": {"message": "never heard of it"}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": ask["id"], "result": result}), flush=True)
"""


@pytest.mark.parametrize("style", STYLES)
def test_a_call_is_read_as_it_is_written(style: CallStyle) -> None:
    call = ToolCall("search", {"query": "thin ice"})
    assert read_calls(write_call(call, style), style, TOOLS) == [call]
    assert read_calls("The answer is 4.", style, TOOLS) == []


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "Let me see. <tool_call>{name: search}</tool_call>"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("llama", '{"name": "search", "parameters": 3}'),
        ("mistral", "[1]"),
    ],
)
def test_an_invalid_tool_call_is_explained(style: CallStyle, text: str) -> None:
    assert isinstance(read_calls(text, style, TOOLS), BadCall)


@pytest.mark.parametrize("style", STYLES)
def test_a_long_reply_without_an_end_of_a_call_is_read_in_one_pass(style: CallStyle) -> None:
    """A step that times out is masked, so a slow parser would let a policy choose to be masked."""
    for part in ("<search>", "<tool_call>", "[TOOL_CALLS] [", '{"name": ', "<search></calculator>"):
        begun = time.process_time()
        calls = read_calls(part * (300_000 // len(part)), style, TOOLS)
        assert isinstance(calls, BadCall) or not calls
        assert time.process_time() - begun < 1.0


def test_tags_of_other_tools_inside_a_call_are_text() -> None:
    text = "<search> <calculator>1</search><search> <calculator>2</calculator>"
    expected = [
        ToolCall("search", {TOOLS["search"]: "<calculator>1"}),
        ToolCall("calculator", {TOOLS["calculator"]: "2"}),
    ]
    assert read_calls(text, "tag", TOOLS) == expected


def test_several_calls_come_in_order() -> None:
    text = "".join(write_call(ToolCall("calculator", {"expression": e}), "hermes") for e in "12")
    calls = read_calls(text, "hermes", TOOLS)
    assert isinstance(calls, list)
    assert [call.arguments["expression"] for call in calls] == ["1", "2"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 * (4 + 5) / 2", "13.5"),
        ("2^10", "1024"),
        ("1,000 - 1", "999"),
        ("-7 // 2", "-4"),
        ("1 / 0", "error: division by zero"),
        ("9 ** 9 ** 9", "error: the power is too large"),
        ("__import__('os')", "error: only numbers and + - * / // % ** can be used"),
        ("(-8) ** 0.5", "error: the result is not a real number"),
        ("2 +", "error: invalid syntax"),
    ],
)
def test_the_calculator_computes_and_runs_nothing_else(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_search_finds_texts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("ice is cold\nfire is hot\nsnow is cold and white\n")
    assert search(path, results=1).run({"query": "white snow"}) == "- snow is cold and white"
    assert search(path).run({"query": "sand"}) == "nothing was found"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(sum(range(5)))", "10"),
        ("x = 1", "(it printed nothing)"),
        ("print(1)\n1 / 0", "1\nerror: ZeroDivisionError: division by zero"),
        ("while True: pass", "error: timeout"),
    ],
)
def test_a_program_runs_in_a_box_and_its_print_comes_back(code: str, output: str) -> None:
    tool = python(timeout_s=1.0, allow_unsafe=True)
    assert tool.run({"code": code}) == output


def test_python_is_a_tool_of_the_environment() -> None:
    env = ToolEnv(question="q", answer="12", tools="python", style="tag", allow_unsafe=True)
    used, answered = play_replies(env, "<python>print(3 * 4)</python>", "12")
    assert (used[0][0].content, answered[1]) == ("12", 1.0)


def test_all_programs_of_a_reply_share_one_time_limit() -> None:
    env = ToolEnv(question="q", tools="python", style="tag", program_s=1.0, allow_unsafe=True)
    slow = "<python>import time; time.sleep(100)</python>"
    begun = time.monotonic()
    first, second = play_replies(env, slow * 4, "<python>print(7)</python>")
    assert time.monotonic() - begun < 3.5
    assert first[0][0].content.count("error: timeout") == 4
    assert second[0][0].content == "7"


def play_replies(env: ToolEnv, *replies: str) -> list[Any]:
    env.reset(0)
    return [env.step(reply) for reply in replies]


def test_a_question_is_answered_with_a_tool() -> None:
    call = write_call(ToolCall("calculator", {"expression": "12 * 12"}), "hermes")
    env = ToolEnv(question="What is 12 * 12?", answer="#### 144")
    used, answered = play_replies(env, f"I compute. {call}", "It is 144.")
    assert (used[0][0].role, used[0][0].content, used[2]) == ("tool", "144", False)
    assert answered[1:4] == (1.0, True, False)


def test_an_answer_without_a_reference_gets_no_reward_by_itself() -> None:
    (answered,) = play_replies(ToolEnv(question="Who are you?"), "Nobody, 7 times.")
    assert (answered[1], answered[2], "success" in answered[4]) == (0.0, True, False)


def test_a_call_of_an_unknown_tool_is_explained_and_not_valid() -> None:
    (step,) = play_replies(ToolEnv(max_steps=1), '<tool_call>{"name": "fly"}</tool_call>')
    assert step[0][0].content == "error: there is no tool fly"
    assert (step[3], step[4]["valid"]) == (True, False)


def test_the_environment_of_tools_passes_its_check() -> None:
    assert check_env(ToolEnv, {}, name="tools") == []
    seeds = range(200)
    report = run_episodes(
        ToolEnv, seeds, options={"style": "tag"}, policy=solver_policy, name="tools"
    )
    assert (report.success, report.errors, report.steps) == (1.0, 0, 2.0)


def test_tools_of_a_server_are_offered_and_called(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    server = McpServer(f"{sys.executable} {tmp_path / 'server.py'}")
    (tool,) = server.tools()
    assert (tool.name, tool.parameters) == ("shout", {"text": "a text"})
    assert tool.run({"text": "ice"}) == "ICE"
    assert tool.run({}) == "error: "
    with pytest.raises(EnvError, match="never heard of it"):
        server.request("no/such", {})
    server.close()
    with pytest.raises(EnvError, match="cannot start the MCP server"):
        McpServer("/no/such/program")


def test_tools_that_are_not_there_are_refused() -> None:
    with pytest.raises(EnvError, match="there is no tool 'abacus'"):
        ToolEnv(tools="abacus")
    with pytest.raises(EnvError, match="needs a corpus"):
        ToolEnv(tools="search")

"""Runs environments of `verifiers` in a thread with an event loop, one per process.

    VerifiersEnv.reset -> start_episode -> Env.run_episode .... in the loop, with other episodes
                                            | sends requests to its model over HTTP
    VerifiersEnv.step  <- PolicyRequest <------- endpoint here, which holds the request until
                       -> answer ------> the policy has replied

A seat is one of the agents of an environment. A harness in this process (PolicyHarness) runs the
policy's seat, because the standard ones start a program for every episode. The session id in a
request identifies its episode.

Written for verifiers 0.4, which defines environments by tasksets and seats.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from queue import SimpleQueue
from threading import Lock, Thread
from types import ModuleType
from typing import Any, TypeVar

from rollick.envs.adapters.uninstalled import import_optional
from rollick.errors import EnvError

HARNESS = "rollick_policy_harness"
"""The name by which verifiers finds PolicyHarness; it imports harnesses by name."""
SESSION = "X-Session-ID"
HOST_LOCK = Lock()
"""Serialises the creation of the host."""
OPEN_TIMEOUT_S = 300.0
"""Time limit for loading an environment and its tasks."""

Message = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A request of the environment for the model's next message."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """The episode ended, with a result (`episode`) or an error."""

    episode: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class PolicyConversation:
    """One running episode: its events, and the pending reply of the policy."""

    loop: asyncio.AbstractEventLoop
    seat: str
    """The policy's seat; requests of other seats go to their own models."""
    events: SimpleQueue[PolicyRequest | EpisodeEnd] = field(default_factory=SimpleQueue)
    pending_reply: asyncio.Future[Message] | None = None
    run: Future[None] | None = None

    def next_event(self) -> PolicyRequest | EpisodeEnd:
        """Waits for the environment; the pool's deadline limits each step."""
        return self.events.get()

    def reply(self, message: Message) -> None:
        def deliver() -> None:
            if self.pending_reply is not None and not self.pending_reply.done():
                self.pending_reply.set_result(message)

        self.loop.call_soon_threadsafe(deliver)

    def cancel(self) -> None:
        if self.run is not None:
            self.run.cancel()

    async def request_reply(self, messages: Sequence[Message], tools: Sequence[Message]) -> Message:
        if self.pending_reply is not None and not self.pending_reply.done():
            raise RuntimeError("two concurrent requests of one episode")
        self.pending_reply = self.loop.create_future()
        self.events.put(PolicyRequest(messages, tools))
        return await self.pending_reply


@dataclass(frozen=True, slots=True)
class OpenEnvironment:
    """A running verifiers environment, and its tasks."""

    env: Any
    seat: str
    """The policy's seat."""
    tasks: tuple[Any, ...]


class VerifiersHost:
    """The event loop and its environments. Closed by `close` or at process exit."""

    def __init__(self) -> None:
        self.vf = import_optional("verifiers.v1", "verifiers>=0.4", older="openai and mcp")
        self.loop = asyncio.new_event_loop()
        self.conversations: dict[str, PolicyConversation] = {}
        self.running: set[asyncio.Task[Any]] = set()
        self.opened: dict[str, OpenEnvironment] = {}
        self.opening = Lock()
        self.stack = AsyncExitStack()
        sys.modules[HARNESS] = _harness_module(self.vf)
        self.thread = Thread(target=self.loop.run_forever, name="verifiers", daemon=True)
        self.thread.start()
        self.context: Any = self._run(self._listen())

    def open(
        self, config: Mapping[str, Any], seat: str, tasks: int, max_turns: int
    ) -> OpenEnvironment:
        """The environment of this config with its first `tasks` tasks, created once."""
        key = json.dumps([config, seat, tasks, max_turns], sort_keys=True)
        with self.opening:
            if key not in self.opened:
                policy_seat = _choose_seat(self.vf, config, seat)
                full_config = _with_policy_seat(config, policy_seat, max_turns=max_turns)
                self.opened[key] = self._run(self._open(full_config, policy_seat, tasks=tasks))
            return self.opened[key]

    def start_episode(self, environment: OpenEnvironment, task: Any) -> PolicyConversation:
        conversation = PolicyConversation(self.loop, environment.seat)
        episode = self._run_episode(environment.env, task, conversation)
        conversation.run = asyncio.run_coroutine_threadsafe(episode, self.loop)
        return conversation

    def close(self) -> None:
        """Cancel running episodes, close the server, and stop the thread."""
        self._run(self._shut_down())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(OPEN_TIMEOUT_S)

    async def _shut_down(self) -> None:
        running = tuple(self.running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.stack.aclose()

    async def _listen(self) -> Any:
        web: Any = import_module("aiohttp.web")
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self.stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        [(address, port)] = runner.addresses
        url = f"http://{address}:{port}/v1"
        client = self.vf.EvalClientConfig(base_url=url, api_key_var="ROLLICK_NO_KEY")
        return self.vf.ModelContext(model="policy", client=client)

    async def _complete(self, request: Any) -> Any:
        """Serve a chat completion request with the policy's reply."""
        web: Any = import_module("aiohttp.web")
        conversation = self.conversations.get(request.headers.get(SESSION, ""))
        if conversation is None:
            text = "the policy does not serve this seat: set a client for it in the config"
            return web.json_response({"error": {"message": text}}, status=404)
        body = await request.json()
        try:
            message = await conversation.request_reply(body["messages"], body.get("tools") or ())
        except RuntimeError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason}
        head = {"id": "chatcmpl-policy", "object": "chat.completion", "created": 0}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        choices = [choice | {"message": dict(message)}]
        return web.json_response(head | {"model": "policy", "choices": choices, "usage": usage})

    async def _open(self, config: Mapping[str, Any], seat: str, *, tasks: int) -> OpenEnvironment:
        env = self.vf.load_environment(self.vf.resolve_env_config(config))
        await self.stack.enter_async_context(env.serving())
        task_list = tuple(await asyncio.to_thread(lambda: list(env.taskset.take(tasks))))
        if not task_list:
            raise EnvError(f"the taskset {config['taskset']['id']} of verifiers has no tasks")
        return OpenEnvironment(env, seat, task_list)

    async def _run_episode(self, env: Any, task: Any, conversation: PolicyConversation) -> None:
        current_task = asyncio.current_task()
        assert current_task is not None
        self.running.add(current_task)

        def register(trace: Any) -> None:
            if trace.agent.name == conversation.seat:
                self.conversations[trace.id] = conversation

        try:
            episode = await env.run_episode(task, self.context, on_trace=register)
            conversation.events.put(EpisodeEnd(episode))
        except Exception as error:  # User code may raise anything.
            conversation.events.put(EpisodeEnd(error=error))
        finally:
            self.running.discard(current_task)
            for trace_id in [id for id, c in self.conversations.items() if c is conversation]:
                del self.conversations[trace_id]
            # Otherwise the pending request would wait forever.
            if conversation.pending_reply is not None and not conversation.pending_reply.done():
                conversation.pending_reply.set_exception(RuntimeError("the episode is over"))


def shared_host() -> VerifiersHost:
    """The host of this process."""
    with HOST_LOCK:
        return create_host()


create_host = cache(VerifiersHost)
"""Use `shared_host`, which holds the lock."""


def _choose_seat(vf: Any, config: Mapping[str, Any], seat: str) -> str:
    """The policy's seat: `seat`, or the only one."""
    kind = vf.env_config_type(config["taskset"]["id"], config.get("id", ""))
    defaults = {name: spec.default for name, spec in kind.model_fields.items()}
    seats = [name for name, value in defaults.items() if isinstance(value, vf.AgentConfig)]
    if not seat and len(seats) != 1:
        raise EnvError(
            f"cannot choose the policy's seat from the seats {', '.join(seats)}",
            fix="choose the policy's with seat=NAME; set a client for the others in the config",
        )
    if seat and seat not in seats:
        raise EnvError(f"there is no seat {seat!r}", fix=f"use {' or '.join(seats)}")
    return seat or seats[0]


def _with_policy_seat(config: Mapping[str, Any], seat: str, *, max_turns: int) -> dict[str, Any]:
    """The config with PolicyHarness in the policy's seat. After `max_turns` the environment scores
    the unfinished episode."""
    harness = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    return {**config, seat: {**config.get(seat, {}), **harness, "max_turns": max_turns}}


def _harness_module(vf: Any) -> ModuleType:
    """A module in the form that verifiers imports: `__all__` names the harness class."""
    to_wire: Any = import_module("verifiers.v1.dialects.chat").message_to_wire

    class PolicyHarness(vf.Harness):
        """Calls the model and its tools, until a reply has no tool call."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str,
            mcp_urls: Mapping[str, str], data: Any,
        ) -> Any:  # fmt: skip
            system, prompt = self.resolve_prompt(data)
            messages: list[Message] = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [to_wire(message) for message in prompt or ()]
            url = f"{endpoint}/chat/completions"
            error = await _converse(url, messages, ctx.model, secret, mcp_urls)
            # The environment also ends an episode (a limit, a rule) with an error.
            return vf.ProgramResult(exit_code=int(bool(error)), stdout="", stderr=error)

    module = ModuleType(HARNESS)
    module.__dict__.update(PolicyHarness=PolicyHarness, __all__=["PolicyHarness"])
    return module


async def _converse(
    url: str, messages: list[Message], model: str, secret: str, tool_urls: Mapping[str, str]
) -> str:
    """Run until a reply has no tool call. Returns the endpoint's error text, or an empty string."""
    httpx: Any = import_module("httpx")
    mcp: Any = import_module("verifiers.v1.harnesses.utils.mcp")
    config = {"mcpServers": {name: {"url": address} for name, address in tool_urls.items()}}
    async with AsyncExitStack() as stack:
        headers = {"Authorization": f"Bearer {secret}"}
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, headers=headers))
        tools, routes, servers = await mcp.connect_mcp(config, stack)
        body = {"model": model, "messages": messages} | ({"tools": tools} if tools else {})
        while True:
            response = await client.post(url, json=body)
            if response.status_code != 200:
                return response.text or f"status {response.status_code}"
            message = response.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return ""
            for call in message["tool_calls"]:
                result = await _call_tool(mcp, servers, routes, call)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def _call_tool(mcp: Any, servers: Any, routes: Any, call: Mapping[str, Any]) -> Any:
    """The result of a tool call; an error text for the policy if the tool is unknown."""
    name = call["function"]["name"]
    if name not in routes:
        return f"error: there is no tool {name}"
    return await mcp.call_mcp(servers, routes, name, json.loads(call["function"]["arguments"]))

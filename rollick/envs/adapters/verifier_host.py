"""Where environments of `verifiers` run: a thread with an event loop, one in a process.

    VerifiersEnv.reset -> play(task) -> Env.run_episode ....... in the loop, beside other episodes
                                            | asks its model over HTTP, as it always does
    VerifiersEnv.step  <- Asked <------- endpoint here, which holds the request until
                       -> answer ------> the policy has replied

Such an environment drives its model itself; a TextEnv is driven. So each request waits here until
the policy has answered, and the environment never learns who it talks to. What plays the seat is a
harness that runs in this process (PolicyHarness): the stock ones start a program of their own for
every episode. Which request belongs to which episode is in the session id that verifiers sends.

Written for verifiers 0.4, whose environments are tasksets and seats.
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

from rollick.envs.adapters.apart import import_apart
from rollick.errors import EnvError

HARNESS = "rollick_policy_harness"
"""The name by which verifiers finds PolicyHarness; it imports harnesses by name."""
SESSION = "X-Session-ID"
MAKING = Lock()
"""Environments of several threads ask for the host at once."""
OPENING_S = 300.0
"""For loading an environment and its tasks."""

Message = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """The environment wants the model to speak."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Ended:
    """The episode is over, well (`episode`) or not."""

    episode: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Talk:
    """One episode under way: what it asked last, and the way back to it."""

    loop: asyncio.AbstractEventLoop
    seat: str
    """The policy's; the others' requests do not come here."""
    events: SimpleQueue[Asked | Ended] = field(default_factory=SimpleQueue[Asked | Ended])
    answer: asyncio.Future[Message] | None = None
    run: Future[None] | None = None

    def next_event(self) -> Asked | Ended:
        """Waits for the environment; whoever plays it has a deadline for every step."""
        return self.events.get()

    def reply(self, message: Message) -> None:
        def deliver() -> None:
            if self.answer is not None and not self.answer.done():
                self.answer.set_result(message)

        self.loop.call_soon_threadsafe(deliver)

    def cancel(self) -> None:
        if self.run is not None:
            self.run.cancel()

    async def ask(self, messages: Sequence[Message], tools: Sequence[Message]) -> Message:
        if self.answer is not None and not self.answer.done():
            raise RuntimeError("two conversations at once")
        self.answer = self.loop.create_future()
        self.events.put(Asked(messages, tools))
        return await self.answer


@dataclass(frozen=True, slots=True)
class OpenEnvironment:
    """An environment of verifiers that serves, and the tasks to choose from."""

    env: Any
    seat: str
    """The policy's."""
    tasks: tuple[Any, ...]


class Host:
    """The loop and what lives in it. Closed by the end of the process, or by `close`."""

    def __init__(self) -> None:
        self.vf: Any = _verifiers()
        self.loop = asyncio.new_event_loop()
        self.talks: dict[str, Talk] = {}
        self.running: set[asyncio.Task[Any]] = set()
        self.opened: dict[str, OpenEnvironment] = {}
        self.opening = Lock()
        self.stack = AsyncExitStack()
        sys.modules[HARNESS] = _harness_module(self.vf)
        self.thread = Thread(target=self.loop.run_forever, name="verifiers", daemon=True)
        self.thread.start()
        self.context: Any = self._do(self._listen())

    def open(
        self, config: Mapping[str, Any], *, seat: str, tasks: int, max_turns: int
    ) -> OpenEnvironment:
        """The environment of this config, made once; its first `tasks` tasks."""
        key = json.dumps([config, seat, tasks, max_turns], sort_keys=True)
        with self.opening:
            if key not in self.opened:
                mine = _seat_of(self.vf, config, seat)
                seated = _seated(config, mine, max_turns=max_turns)
                self.opened[key] = self._do(self._open(seated, mine, tasks=tasks))
            return self.opened[key]

    def play(self, opened: OpenEnvironment, task: Any) -> Talk:
        """Start an episode."""
        talk = Talk(self.loop, opened.seat)
        talk.run = asyncio.run_coroutine_threadsafe(self._play(opened, task, talk), self.loop)
        return talk

    def close(self) -> None:
        """End what runs, give back ports, and stop the thread."""
        self._do(self._shut_down())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(OPENING_S)

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
        """The model that the environment believes to talk to."""
        web: Any = import_module("aiohttp.web")
        talk = self.talks.get(request.headers.get(SESSION, ""))
        if talk is None:
            said = "the policy does not play this seat: give it a client of its own in the config"
            return web.json_response({"error": {"message": said}}, status=404)
        body = await request.json()
        try:
            message = await talk.ask(body["messages"], body.get("tools") or ())
        except RuntimeError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        calls = bool(message.get("tool_calls"))
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return web.json_response(
            {
                "id": "chatcmpl-policy",
                "object": "chat.completion",
                "created": 0,
                "model": "policy",
                "choices": [choice | {"message": dict(message)}],
                "usage": usage,
            }
        )

    async def _open(self, config: Mapping[str, Any], seat: str, *, tasks: int) -> OpenEnvironment:
        env = self.vf.load_environment(self.vf.resolve_env_config(config))
        await self.stack.enter_async_context(env.serving())
        chosen = tuple(await asyncio.to_thread(lambda: list(env.taskset.take(tasks))))
        if not chosen:
            raise EnvError(f"the taskset {config['taskset']['id']} of verifiers has no tasks")
        return OpenEnvironment(env, seat, chosen)

    async def _play(self, opened: OpenEnvironment, task: Any, talk: Talk) -> None:
        known: list[str] = []
        task_of_loop = asyncio.current_task()
        assert task_of_loop is not None
        self.running.add(task_of_loop)

        def begun(trace: Any) -> None:
            if trace.agent.name == talk.seat:
                known.append(trace.id)
                self.talks[trace.id] = talk

        try:
            episode = await opened.env.run_episode(task, self.context, on_trace=begun)
            talk.events.put(Ended(episode))
        except Exception as error:  # a process boundary: the environment is somebody else's
            talk.events.put(Ended(error=error))
        finally:
            self.running.discard(task_of_loop)
            for name in known:
                self.talks.pop(name, None)
            # Who asked is gone, but its request would wait for ever.
            if talk.answer is not None and not talk.answer.done():
                talk.answer.set_exception(RuntimeError("the episode is over"))


def the_host() -> Host:
    """That of this process."""
    with MAKING:
        return made_host()


@cache
def made_host() -> Host:
    """For `the_host`, which lets only one thread make it."""
    return Host()


def _verifiers() -> Any:
    return import_apart(
        "verifiers.v1", named="verifiers", requirement="verifiers>=0.4", older="openai and mcp"
    )


def _seat_of(vf: Any, config: Mapping[str, Any], seat: str) -> str:
    """The policy's seat: the one that was named, or the only one."""
    kind = vf.env_config_type(config["taskset"]["id"], config.get("id", ""))
    defaults = {name: spec.default for name, spec in kind.model_fields.items()}
    seats = [name for name, value in defaults.items() if isinstance(value, vf.AgentConfig)]
    if not seat and len(seats) != 1:
        raise EnvError(
            f"the environment has the seats {', '.join(seats)}",
            fix="say which is the policy's with seat=NAME; give the others a client in the config",
        )
    if seat and seat not in seats:
        raise EnvError(f"there is no seat {seat!r}", fix=f"use {' or '.join(seats)}")
    return seat or seats[0]


def _seated(config: Mapping[str, Any], seat: str, *, max_turns: int) -> dict[str, Any]:
    """The config with the policy in its seat, for so many turns: then the environment scores what
    there is."""
    place = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": max_turns}
    return {**config, seat: {**config.get(seat, {}), **place}}


def _harness_module(vf: Any) -> ModuleType:
    """A module as verifiers looks for it: a harness class that `__all__` names."""
    to_wire: Any = import_module("verifiers.v1.dialects.chat").message_to_wire

    class PolicyHarness(vf.Harness):
        """The plain loop: ask the model, call the tools that it wants, until it wants none."""

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
            said = await _converse(
                f"{endpoint}/chat/completions",
                messages,
                model=ctx.model,
                secret=secret,
                tool_urls=mcp_urls,
            )
            # A stop of the environment's own (a limit, a rule) comes as an error, too.
            return vf.ProgramResult(exit_code=int(bool(said)), stdout="", stderr=said)

    module = ModuleType(HARNESS)
    module.__dict__.update(PolicyHarness=PolicyHarness, __all__=["PolicyHarness"])
    return module


async def _converse(
    url: str,
    messages: list[Message],
    *,
    model: str,
    secret: str,
    tool_urls: Mapping[str, str],
) -> str:
    """Until the model wants no tool any more. What the endpoint says if it refuses a request."""
    httpx: Any = import_module("httpx")
    mcp: Any = import_module("verifiers.v1.harnesses.utils.mcp")
    config = {"mcpServers": {name: {"url": address} for name, address in tool_urls.items()}}
    async with AsyncExitStack() as stack:
        headers = {"Authorization": f"Bearer {secret}"}
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, headers=headers))
        tools, places, servers = await mcp.connect_mcp(config, stack)
        body = {"model": model, "messages": messages} | ({"tools": tools} if tools else {})
        while True:
            answer = await client.post(url, json=body)
            if answer.status_code != 200:
                return answer.text or f"status {answer.status_code}"
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return ""
            for call in message["tool_calls"]:
                said = await _call_tool(mcp, servers, places, call)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})


async def _call_tool(mcp: Any, servers: Any, places: Any, call: Mapping[str, Any]) -> Any:
    """What a tool says; a call that cannot be made is told to the policy."""
    name = call["function"]["name"]
    if name not in places:
        return f"error: there is no tool {name}"
    return await mcp.call_mcp(servers, places, name, json.loads(call["function"]["arguments"]))

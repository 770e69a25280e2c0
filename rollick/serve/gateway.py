"""Gateway: turns a checked request into a response. Independent of HTTP.

    ApiRequest -> prompts -> Request for each choice -> generate_choice -> choices
                    \\-- session: SessionRecorder.plan ... add

Holds request ids, the limit of concurrent requests, and the sessions. A request of a session goes
to the EngineAccess that the session was opened with, so that an agent under training is part of the
rollout like any other sample. Other requests go to the gateway's `access`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from typing import TypeVar

from rollick.data.chat import ChatCodec
from rollick.episodes.base import EngineAccess
from rollick.serve.choices import ChoiceChunk, Emit, gather_choices, generate_choice
from rollick.serve.recorder import Segment, SegmentPlan, SessionRecorder, encode_raw
from rollick.serve.request_fields import UNSUPPORTED, BadRequest, model_not_found_error, reject
from rollick.serve.requests import ApiRequest, ChatPrompt, RawPrompt
from rollick.serve.tool_calls import ToolCallParser, ToolFormat
from rollick.types import IntArray, Request, SampleId, Sampling, stable_hash

Encoded = TypeVar("Encoded")

LONG_TEXT = 2048
"""Characters; a longer text is encoded in a thread, so that it does not block other requests."""
MAX_SESSIONS = 4096
MAX_SESSION_TOKENS = 1 << 20
"""A session with more tokens rejects requests, which stops an agent that repeats itself."""


@dataclass(slots=True, eq=False)
class AgentSession:
    """The recorded requests of one agent. The agent's base URL is `path` on the server; `token`
    gives access to this session only."""

    uid: SampleId
    access: EngineAccess
    recorder: SessionRecorder
    sampling: Sampling | None
    seed: int
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    request_count: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    current: asyncio.Task[ChoiceChunk] | None = None
    closed: bool = False

    @property
    def path(self) -> str:
        return f"/sessions/{self.id}/v1"

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.recorder.segments


@dataclass(eq=False)
class Gateway:
    """Responds to requests and holds sessions. Call all methods from one event loop."""

    codec: ChatCodec
    _: KW_ONLY
    model: str
    max_length: int
    access: EngineAccess | None = None
    """If None, only sessions are served."""
    supports_top_p: bool = True
    """Whether the engine supports top_p and top_k."""
    max_requests: int = 1024
    created: int = field(default_factory=lambda: int(time.time()))
    sessions: dict[str, AgentSession] = field(default_factory=dict[str, AgentSession])
    running: int = 0
    _group_numbers: Iterator[int] = field(default_factory=count)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model calls tools; None if it cannot, or in a format that is not parsed."""
        return ToolFormat.of(self.codec)

    def open_session(
        self, uid: SampleId, access: EngineAccess, sampling: Sampling | None = None, seed: int = 0
    ) -> AgentSession:
        """Open a session that records an agent's requests under the sample's id.

        `sampling` overrides the agent's sampling parameters and limits its max_tokens, so that a
        policy is trained with its recipe's settings; the agent's stop strings are added. The random
        seed of a request is derived from `seed`, the uid and the index of the request.
        """
        if len(self.sessions) >= MAX_SESSIONS:
            raise BadRequest(f"{MAX_SESSIONS} sessions are open", fix="close some", status=429)
        recorder = SessionRecorder(self.codec, self.tool_format)
        session = AgentSession(uid, access, recorder, sampling, seed)
        self.sessions[session.id] = session
        return session

    def open_http_session(self) -> AgentSession:
        """Open a session on the gateway's engine, for an HTTP client."""
        uid = SampleId(next(self._group_numbers), 0)
        return self.open_session(uid, self._require_access(), seed=secrets.randbits(32))

    def close_session(self, id: str) -> tuple[Segment, ...]:
        """Close a session and return its segments. The running request is cancelled and not
        recorded; waiting and later requests are rejected."""
        session = self.sessions.pop(self.get_session(id).id)
        session.closed = True
        if session.current is not None:
            session.current.cancel()
        return session.segments

    def get_session(self, id: str) -> AgentSession:
        if id not in self.sessions:
            fix = "open one with POST /sessions"
            raise BadRequest("there is no such session", fix=fix, status=404)
        return self.sessions[id]

    async def respond(
        self, request: ApiRequest, emit: Emit, *, session: AgentSession | None = None
    ) -> Sequence[ChoiceChunk]:
        """Generate the choices, ordered by prompt. Runs all concurrently and emits chunks as they
        arrive. Cancelling aborts them."""
        self._check(request, session)
        num_choices = request.prompt_count * request.choices_per_prompt
        if self.running + num_choices > self.max_requests:
            text = f"{self.running} requests are running; the limit is {self.max_requests}"
            code = "rate_limit_exceeded"
            raise BadRequest(text, fix="try again later", status=429, code=code)
        self.running += num_choices
        try:
            if session is not None:
                return [await self._respond_in_session(request, emit, session)]
            return await self._respond_without_session(request, emit)
        finally:
            self.running -= num_choices

    def _check(self, request: ApiRequest, session: AgentSession | None) -> None:
        # In a session any model name is accepted: an agent may have one built in.
        if session is None and request.model not in (None, self.model):
            raise model_not_found_error(request.model, fix=f"request {self.model!r}")
        self._check_length(request)
        vocabulary_size = self.codec.vocabulary_size
        if request.top_k > vocabulary_size:
            problem = f"is {request.top_k}, but the vocabulary has {vocabulary_size} tokens"
            reject("top_k", problem, fix="send fewer, or 0 for all")
        if not isinstance(request.prompt, ChatPrompt):
            self._check_ids(request.prompt)
        elif request.prompt.tools and self.tool_format is None:
            fix = "describe them in a message, or leave tools out"
            problem = "are not supported by the chat template of this model"
            if self.codec.reads_tools:
                problem = "are called by this model in a format that is not parsed"
            reject("tools", problem, fix=fix, code=UNSUPPORTED)
        if (request.top_p < 1 or request.top_k > 0) and not self.supports_top_p:
            param = "top_p" if request.top_p < 1 else "top_k"
            reject(param, "is not supported by this engine", fix="leave it out", code=UNSUPPORTED)

    async def _respond_without_session(self, request: ApiRequest, emit: Emit) -> list[ChoiceChunk]:
        access = self._require_access()
        prompts = await self._run_encoding(request, lambda: self._encode(request))
        samplings = [request.sampling(self._available_tokens(prompt)) for prompt in prompts]
        seed = secrets.randbits(62) if request.seed is None else request.seed

        async def generate(prompt: int, group: int, choice: int) -> ChoiceChunk:
            uid, stream = SampleId(group, choice), stable_hash("serve", seed, prompt, choice)
            engine_request = Request(uid, prompts[prompt], samplings[prompt], stream, group=group)
            index = prompt * request.choices_per_prompt + choice
            parser = self._make_parser(request)
            return await generate_choice(
                access, engine_request, self.codec, emit, index=index, parser=parser
            )

        groups = [next(self._group_numbers) for _ in prompts]
        return await gather_choices(
            generate(prompt, group, choice)
            for prompt, group in enumerate(groups)
            for choice in range(request.choices_per_prompt)
        )

    async def _respond_in_session(
        self, request: ApiRequest, emit: Emit, session: AgentSession
    ) -> ChoiceChunk:
        """One request at a time: a sample has one slot in the rollout."""
        if request.choices_per_prompt > 1 or request.prompt_count > 1:
            counts = f"{request.choices_per_prompt} for {request.prompt_count}"
            text = f"a session records one choice for one prompt, not {counts}"
            fix = "send one request after another"
            param = "n" if request.choices_per_prompt > 1 else "prompt"
            raise BadRequest(text, fix=fix, param=param, code=UNSUPPORTED)
        async with session.lock:
            if session.closed:
                raise _session_closed()
            task = asyncio.create_task(self._run_in_session(request, emit, session))
            session.current = task
            try:
                return await task
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if not session.closed or (caller is not None and caller.cancelling()):
                    raise
                raise _session_closed() from None
            finally:
                session.current = None
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run_in_session(
        self, request: ApiRequest, emit: Emit, session: AgentSession
    ) -> ChoiceChunk:
        if session.recorder.tokens > MAX_SESSION_TOKENS:
            text = f"the session holds {session.recorder.tokens} tokens"
            raise BadRequest(text, fix="close it and open another one", status=429)
        plan = await self._run_encoding(request, lambda: self._plan_segment(session, request))
        key = ("request", session.request_count)
        session.request_count += 1
        if request.seed is not None and session.sampling is None:
            key = ("seed", request.seed)
        uid, stream = session.uid, stable_hash("session", session.seed, *session.uid, *key)
        engine_request = Request(uid, plan.token_ids, plan.sampling, stream, group=uid.group)
        parser = self._make_parser(request)
        choice = await generate_choice(
            session.access, engine_request, self.codec, emit, parser=parser
        )
        if session.closed:
            raise _session_closed()
        session.recorder.add(plan, choice)
        return choice

    def _plan_segment(self, session: AgentSession, request: ApiRequest) -> SegmentPlan:
        sampling = request.sampling(self.max_length)
        override = session.sampling
        if override is not None:
            limit = min(override.max_tokens, sampling.max_tokens)
            stop = (*override.stop, *request.stop)
            sampling = replace(override, max_tokens=limit, stop=stop)
        prompt = request.prompt if isinstance(request.prompt, ChatPrompt) else request.prompt[0]
        plan = session.recorder.plan(prompt, sampling)
        limit = min(sampling.max_tokens, self._available_tokens(plan.token_ids))
        return replace(plan, sampling=replace(sampling, max_tokens=limit))

    async def _run_encoding(self, request: ApiRequest, encode: Callable[[], Encoded]) -> Encoded:
        if _count_characters(request) <= LONG_TEXT:
            return encode()
        return await asyncio.to_thread(encode)

    def _encode(self, request: ApiRequest) -> list[IntArray]:
        if isinstance(request.prompt, ChatPrompt):
            messages = request.prompt.messages
            if self.tool_format is not None:
                messages = self.tool_format.write_calls(messages)
            return [self.codec.encode_messages(messages, tools=request.prompt.tools)]
        return [encode_raw(self.codec, prompt) for prompt in request.prompt]

    def _make_parser(self, request: ApiRequest) -> ToolCallParser | None:
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt) or not prompt.tools or self.tool_format is None:
            return None
        return self.tool_format.make_parser(prompt)

    def _check_length(self, request: ApiRequest) -> None:
        """Reject a text that cannot fit, before it is encoded."""
        max_chars = self.max_length * self.codec.max_token_length
        longest = max(_text_lengths(request), default=0)
        if longest > max_chars:
            limit = f"prompt and completion together may have {self.max_length} tokens"
            problem = f"has {longest} characters; {limit}, which are at most {max_chars} characters"
            param = "messages" if request.is_chat else "prompt"
            reject(param, problem, fix="send a shorter prompt", code="context_length_exceeded")

    def _check_ids(self, prompts: Sequence[RawPrompt]) -> None:
        """Reject ids without an embedding: they would fail all requests of their batch."""
        size = self.codec.vocabulary_size
        for token in chain.from_iterable(prompts):
            if isinstance(token, int) and not 0 <= token < size:
                reject("prompt", f"has the token id {token}", fix=f"send ids from 0 to {size - 1}")

    def _available_tokens(self, prompt: IntArray) -> int:
        if not len(prompt) or len(prompt) >= self.max_length:
            limit = f"prompt and completion together may have {self.max_length}"
            fix, code = "send a shorter prompt", "context_length_exceeded"
            if not len(prompt):
                fix, code = "send a prompt", "empty_prompt"
            text = f"the prompt has {len(prompt)} tokens; {limit}"
            raise BadRequest(text, fix=fix, param="messages", code=code)
        return self.max_length - len(prompt)

    def _require_access(self) -> EngineAccess:
        if self.access is None:
            text = "this server serves sessions only"
            raise BadRequest(text, fix="use a session's base URL", status=404)
        return self.access


def _text_lengths(request: ApiRequest) -> list[int]:
    """Number of characters of each text prompt, or of all messages of a chat."""
    if isinstance(request.prompt, ChatPrompt):
        return [sum(len(message["content"]) for message in request.prompt.messages)]
    return [len(prompt) for prompt in request.prompt if isinstance(prompt, str)]


def _count_characters(request: ApiRequest) -> int:
    """Approximate number of characters to encode, including tools and tool calls."""
    characters = sum(_text_lengths(request))
    if isinstance(request.prompt, ChatPrompt):
        calls = [m["tool_calls"] for m in request.prompt.messages if "tool_calls" in m]
        if calls or request.prompt.tools:
            characters += len(json.dumps([calls, request.prompt.tools]))
    return characters


def _session_closed() -> BadRequest:
    return BadRequest("the session was closed", fix="open another one", status=410)

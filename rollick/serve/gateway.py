"""Gateway: from a checked request to an answer, whatever draws the tokens. Knows no HTTP.

Owns the ids of requests, how many run at once, the sessions, and how tokens become the text that
a client sees. A request without a session goes to the gateway's own Access; one of a session to
the Access that the session was opened with, so that an agent under training takes its turns in
the rollout like any other sample.

    Ask -> prompts -> Request x choices -> Delta, Delta, ... -> Piece (to `emit`) -> Answer
                         \\-- session: SessionRecorder.plan ... add
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

import numpy as np

from rollick.data.chat import ChatCodec
from rollick.infer.engine import Delta
from rollick.infer.stream import deltas
from rollick.rollout.episode import Access
from rollick.serve.asked import Ask, Conversation, RawPrompt, Refused
from rollick.serve.recorder import Plan, Segment, SessionRecorder
from rollick.serve.text import TextStream
from rollick.types import (
    Completion,
    FloatArray,
    IntArray,
    Request,
    SampleId,
    Sampling,
    StopReason,
    frozen_array,
    stable_hash,
)

Encoded = TypeVar("Encoded")

LONG_TEXT = 2048
"""Characters that are encoded at once; a longer text is encoded in a thread, so that others are
answered meanwhile."""
MAX_SESSIONS = 4096
MAX_SESSION_TOKENS = 1 << 20
"""A session that holds more is refused further requests: an agent in a loop ends somewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What a client is sent of one choice. The last piece, and only it, has a `stop`."""

    index: int
    prompt: int
    """Which of the answer's prompts it belongs to."""
    text: str
    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    stop: StopReason | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """All choices of a request, each as one piece; `prompts` are the ids they go on from."""

    choices: tuple[Piece, ...]
    prompts: tuple[IntArray, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


Emit = Callable[[Piece, Sequence[IntArray]], Awaitable[None]]
"""Sends a piece to the client, with the ids of the prompts; waits while the client is slow."""


@dataclass(slots=True, eq=False)
class Session:
    """One agent's recorded work. `path` under the server's address is the agent's base URL, and
    `token` opens nothing but this session."""

    id: str
    token: str
    uid: SampleId
    access: Access
    recorder: SessionRecorder
    sampling: Sampling | None
    seed: int
    requests: int = 0
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    under_way: asyncio.Task[Answer] | None = None
    closed: bool = False

    @property
    def path(self) -> str:
        return f"/sessions/{self.id}/v1"

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.recorder.segments


class Gateway:
    """Answers requests and keeps sessions. All methods are called from one event loop."""

    def __init__(
        self,
        codec: ChatCodec,
        *,
        model: str,
        max_length: int,
        access: Access | None = None,
        cuts_support: bool = True,
        max_requests: int = 1024,
    ) -> None:
        """`access` None answers sessions only. `cuts_support`: whether top_p and top_k work."""
        self.codec = codec
        self.model = model
        self.access = access
        self.created = int(time.time())
        self.sessions: dict[str, Session] = {}
        self.running = 0
        self._max_length = max_length
        self._cuts_support = cuts_support
        self._max_requests = max_requests
        self._numbers = count()

    def open_session(
        self, uid: SampleId, access: Access, *, sampling: Sampling | None = None, seed: int = 0
    ) -> Session:
        """Record what an agent asks from now on, under the sample's id.

        `sampling`, where given, is how tokens are drawn whatever the agent asks for, and the most
        tokens of an answer: a policy is trained on what its recipe says. The agent's stop strings
        come on top. Random numbers follow from `seed`, the uid and the number of the request.
        """
        if len(self.sessions) >= MAX_SESSIONS:
            raise Refused(f"{len(self.sessions)} sessions are open", fix="close some", status=429)
        session = Session(
            id=secrets.token_urlsafe(16),
            token=secrets.token_urlsafe(24),
            uid=uid,
            access=access,
            recorder=SessionRecorder(self.codec),
            sampling=sampling,
            seed=seed,
        )
        self.sessions[session.id] = session
        return session

    def open_own_session(self) -> Session:
        """A session on the gateway's own engine, for clients over HTTP."""
        return self.open_session(
            SampleId(next(self._numbers), 0), self._own_access(), seed=secrets.randbits(32)
        )

    def close_session(self, id: str) -> tuple[Segment, ...]:
        """Its segments. It stops: the request under way is cancelled and not recorded, those that
        wait for it and later ones are refused."""
        session = self.sessions.pop(self.session(id).id)
        session.closed = True
        if session.under_way is not None:
            session.under_way.cancel()
        return session.segments

    def session(self, id: str) -> Session:
        found = self.sessions.get(id)
        if found is None:
            raise Refused(
                "there is no such session", fix="open one with POST /sessions", status=404
            )
        return found

    async def answer(self, ask: Ask, emit: Emit, *, session: Session | None = None) -> Answer:
        """Runs all choices at once; pieces are emitted as they come. Cancelling aborts."""
        self._check(ask, session)
        prompts = 1 if isinstance(ask.content, Conversation) else len(ask.content)
        wanted = prompts * ask.choices
        if self.running + wanted > self._max_requests:
            raise Refused(
                f"{self.running} requests are under way, of at most {self._max_requests}",
                fix="try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        self.running += wanted
        try:
            if session is not None:
                return await self._answer_session(ask, emit, session=session)
            return await self._answer_plain(ask, emit)
        finally:
            self.running -= wanted

    def _check(self, ask: Ask, session: Session | None) -> None:
        # An agent may have the name of another model built in: in a session any name will do.
        if session is None and ask.model not in (None, self.model):
            raise Refused(
                f"there is no model {ask.model!r}",
                fix=f"ask for {self.model!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        self._check_letters(ask)
        if ask.top_k > self.codec.vocabulary_size:
            raise Refused(
                f"top_k is {ask.top_k}, and there are {self.codec.vocabulary_size} tokens",
                fix="send fewer, or 0 for all",
                param="top_k",
            )
        if not isinstance(ask.content, Conversation):
            self._check_ids(ask.content)
        elif ask.content.tools and not self.codec.reads_tools:
            raise Refused(
                "the chat template of this model does not know tools",
                fix="describe them in a message, or leave tools out",
                param="tools",
                code="unsupported_parameter",
            )
        if (ask.top_p < 1 or ask.top_k > 0) and not self._cuts_support:
            raise Refused(
                "this engine draws from all tokens: it has neither top_p nor top_k",
                fix="leave them out",
                param="top_p" if ask.top_p < 1 else "top_k",
                code="unsupported_parameter",
            )

    async def _answer_plain(self, ask: Ask, emit: Emit) -> Answer:
        access = self._own_access()
        prompts = await self._encode(ask)
        samplings = [ask.sampling(self._room(prompt)) for prompt in prompts]
        seed = secrets.randbits(62) if ask.seed is None else ask.seed

        async def choose(prompt: int, group: int, choice: int) -> Piece:
            request = Request(
                SampleId(group, choice),
                prompts[prompt],
                samplings[prompt],
                stable_hash("serve", seed, prompt, choice),
                group=group,
            )
            index = prompt * ask.choices + choice
            speaker = _Speaker(self.codec, index=index, prompt=prompt, stops=ask.stop)
            return await speaker.draw(access, request, lambda piece: emit(piece, prompts))

        groups = [next(self._numbers) for _ in prompts]
        choices = await _all(
            choose(prompt, group, choice)
            for prompt, group in enumerate(groups)
            for choice in range(ask.choices)
        )
        return Answer(tuple(choices), tuple(prompts))

    async def _answer_session(self, ask: Ask, emit: Emit, *, session: Session) -> Answer:
        """One request after another: a sample has one place in the rollout at a time."""
        content = _only_prompt(ask)
        async with session.busy:
            if session.closed:
                raise _closed()
            drawing = asyncio.create_task(self._draw_session(ask, content, emit, session=session))
            session.under_way = drawing
            try:
                return await drawing
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if not session.closed or (caller is not None and caller.cancelling()):
                    raise
                raise _closed() from None
            finally:
                session.under_way = None
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)

    async def _draw_session(
        self, ask: Ask, content: Conversation | RawPrompt, emit: Emit, *, session: Session
    ) -> Answer:
        if session.recorder.tokens > MAX_SESSION_TOKENS:
            raise Refused(
                f"the session holds {session.recorder.tokens} tokens",
                fix="close it and open another one",
                status=429,
            )
        plan = await self._without_delay(ask, lambda: self._plan(session, content, ask))
        number, session.requests = session.requests, session.requests + 1
        key = ("request", number)
        if ask.seed is not None and session.sampling is None:
            key = ("seed", ask.seed)
        request = Request(
            session.uid,
            plan.token_ids,
            plan.sampling,
            stable_hash("session", session.seed, *session.uid, *key),
            group=session.uid.group,
        )
        speaker = _Speaker(self.codec, index=0, prompt=0, stops=plan.sampling.stop)
        prompts = [plan.token_ids]
        piece = await speaker.draw(session.access, request, lambda piece: emit(piece, prompts))
        if session.closed:
            raise _closed()
        session.recorder.add(plan, speaker.completion(request), shown=piece.text)
        return Answer((piece,), (plan.token_ids,))

    def _plan(self, session: Session, content: Conversation | RawPrompt, ask: Ask) -> Plan:
        asked = ask.sampling(self._max_length)
        ruled = session.sampling
        if ruled is not None:
            asked = replace(
                ruled,
                max_tokens=min(ruled.max_tokens, asked.max_tokens),
                stop=(*ruled.stop, *ask.stop),
            )
        plan = session.recorder.plan(content, asked)
        room = self._room(plan.token_ids)
        return replace(plan, sampling=replace(asked, max_tokens=min(asked.max_tokens, room)))

    async def _encode(self, ask: Ask) -> list[IntArray]:
        return await self._without_delay(ask, lambda: self._encode_now(ask))

    async def _without_delay(self, ask: Ask, encode: Callable[[], Encoded]) -> Encoded:
        """Short texts here, long ones in a thread: the loop that all requests share goes on."""
        if _letters(ask) <= LONG_TEXT:
            return encode()
        return await asyncio.to_thread(encode)

    def _encode_now(self, ask: Ask) -> list[IntArray]:
        if isinstance(ask.content, Conversation):
            return [self.codec.encode_messages(ask.content.messages, tools=ask.content.tools)]
        return [
            self.codec.encode_text(prompt)
            if isinstance(prompt, str)
            else frozen_array(prompt, np.int32)
            for prompt in ask.content
        ]

    def _check_letters(self, ask: Ask) -> None:
        """A text that cannot fit is refused before anybody takes the time to encode it."""
        most = self._max_length * self.codec.longest_token
        longest = max(_letters_of_texts(ask), default=0)
        if longest > most:
            raise Refused(
                f"the prompt has {longest} characters; prompt and answer together may have "
                f"{self._max_length} tokens, which are at most {most} characters",
                fix="send a shorter prompt",
                param="messages" if ask.chat else "prompt",
                code="context_length_exceeded",
            )

    def _check_ids(self, prompts: Sequence[RawPrompt]) -> None:
        """An id that the model has no embedding for would end all requests of its batch."""
        size = self.codec.vocabulary_size
        for prompt in prompts:
            wrong = [token for token in prompt if isinstance(token, int) and not 0 <= token < size]
            if wrong:
                raise Refused(
                    f"prompt has the token id {wrong[0]}",
                    fix=f"send ids from 0 to {size - 1}",
                    param="prompt",
                )

    def _room(self, prompt: IntArray) -> int:
        """Tokens that fit behind the prompt."""
        if not len(prompt) or len(prompt) >= self._max_length:
            raise Refused(
                f"the prompt has {len(prompt)} tokens, and prompt and answer together may have "
                f"{self._max_length}",
                fix="send a shorter prompt" if len(prompt) else "send a prompt",
                param="messages",
                code="context_length_exceeded" if len(prompt) else "empty_prompt",
            )
        return self._max_length - len(prompt)

    def _own_access(self) -> Access:
        if self.access is None:
            raise Refused(
                "this server answers sessions only", fix="use a session's base URL", status=404
            )
        return self.access


class _Speaker:
    """One choice: turns deltas into pieces and keeps all that was drawn."""

    def __init__(self, codec: ChatCodec, *, index: int, prompt: int, stops: Sequence[str]) -> None:
        self._text = TextStream(codec.decode, stops=stops)
        self._index = index
        self._prompt = prompt
        self._ids: list[IntArray] = []
        self._logprobs: list[FloatArray] = []
        self._versions: list[IntArray] = []
        self._stop = StopReason.ABORTED

    async def draw(
        self, access: Access, request: Request, emit: Callable[[Piece], Awaitable[None]]
    ) -> Piece:
        """Waits for the whole choice and gives it as one piece."""
        texts: list[str] = []
        async with aclosing(deltas(access, request)) as stream:
            async for delta in stream:
                text = self._text.push(delta.token_ids.tolist())
                if delta.stop is StopReason.ABORTED:
                    raise Refused("the server stops", fix="try again later", status=503)
                if delta.stop is not None:
                    self._stop = delta.stop
                    text += self._text.finish()
                texts.append(text)
                self._ids.append(delta.token_ids)
                self._logprobs.append(delta.logprobs)
                self._versions.append(delta.versions)
                await emit(self._piece(text, delta))
        return self._piece("".join(texts), self.completion(request))

    def completion(self, request: Request) -> Completion:
        return Completion(
            request.uid,
            frozen_array(np.concatenate(self._ids), np.int32),
            frozen_array(np.concatenate(self._logprobs), np.float32),
            frozen_array(np.concatenate(self._versions), np.int32),
            self._stop,
        )

    def _piece(self, text: str, drawn: Delta | Completion) -> Piece:
        return Piece(
            self._index,
            self._prompt,
            text,
            drawn.token_ids,
            drawn.logprobs,
            drawn.versions,
            drawn.stop,
        )


async def _all(works: Iterable[Coroutine[Any, Any, Piece]]) -> list[Piece]:
    """Waits for all; the first failure cancels the others and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _letters_of_texts(ask: Ask) -> list[int]:
    """The characters of each prompt that is a text. Of a conversation: what its messages say."""
    if isinstance(ask.content, Conversation):
        return [sum(len(message["content"]) for message in ask.content.messages)]
    return [len(prompt) for prompt in ask.content if isinstance(prompt, str)]


def _letters(ask: Ask) -> int:
    """About how many characters are to be encoded, with all that a template may write."""
    letters = sum(_letters_of_texts(ask))
    if isinstance(ask.content, Conversation):
        calls = [m["tool_calls"] for m in ask.content.messages if "tool_calls" in m]
        if calls or ask.content.tools:
            letters += len(json.dumps([calls, ask.content.tools]))
    return letters


def _closed() -> Refused:
    return Refused("the session was closed", fix="open another one", status=410)


def _only_prompt(ask: Ask) -> Conversation | RawPrompt:
    """What a session can record: one answer to one prompt."""
    prompts = 1 if isinstance(ask.content, Conversation) else len(ask.content)
    if ask.choices > 1 or prompts > 1:
        raise Refused(
            f"a session records one answer to one prompt, not {ask.choices} to {prompts}",
            fix="ask one after another",
            param="n" if ask.choices > 1 else "prompt",
            code="unsupported_parameter",
        )
    return ask.content if isinstance(ask.content, Conversation) else ask.content[0]

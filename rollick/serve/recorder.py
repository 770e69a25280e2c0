"""SessionRecorder: token-exact segments from the requests of an agent that only knows text. Pure.

An agent sends its whole conversation with every request. The recorder finds the part of it that
the session already has, and puts only what is new behind the ids that are there: what the model
drew stays as it was drawn, and is never tokenised again.

    request -> plan -> ids for the engine -> (engine) -> add -> ... -> segments

Where a conversation goes on from the end of a segment, the segment grows. Where the agent goes
back to an earlier answer, or draws in another way, a new segment starts with the ids up to there.
Where it has rewritten its history, a new segment starts from text. A drawn token has its log-prob,
its version and its loss mask in exactly one segment: in others it is context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollick.data.chat import ChatCodec
from rollick.errors import DataError
from rollick.serve.asked import Conversation, RawPrompt
from rollick.types import (
    NOT_SAMPLED,
    BoolArray,
    Completion,
    FloatArray,
    IntArray,
    Prompt,
    Sample,
    SampleId,
    Sampling,
    StopReason,
    frozen_array,
)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A sequence of tokens that an agent and the model made together; arrays of one length."""

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    loss_mask: BoolArray
    sampling: Sampling
    stop: StopReason
    text: str
    turns: int

    def sample(self, uid: SampleId, prompt: Prompt) -> Sample:
        """As an attempt at the prompt: what an Episode returns."""
        return Sample(
            uid=uid,
            prompt=prompt,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            loss_mask=self.loss_mask,
            temperature=self.sampling.temperature,
            stop=self.stop,
            text=self.text,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "token_ids": self.token_ids.tolist(),
            "logprobs": self.logprobs.tolist(),
            "versions": self.versions.tolist(),
            "loss_mask": self.loss_mask.tolist(),
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "stop": self.stop.value,
            "text": self.text,
            "turns": self.turns,
        }


@dataclass(frozen=True, slots=True)
class _Past:
    """What has been said: messages by key, or one running text; None where it is the other."""

    messages: tuple[str, ...] | None
    tools: str = ""
    text: str | None = None


@dataclass(frozen=True, slots=True)
class _Cut:
    """A place behind a drawn answer: the messages and the tokens before it."""

    messages: int
    tokens: int


@dataclass(slots=True, eq=False)
class _Line:
    """A segment that can still grow."""

    segment: Segment
    past: _Past
    cuts: list[_Cut]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to send to the engine for a request, and where its answer will be put."""

    token_ids: IntArray
    sampling: Sampling
    past: _Past
    line: int | None
    """The segment that grows; None starts one."""
    cuts: tuple[_Cut, ...] = ()
    """Those of the segment that a new one shares its beginning with."""


class SessionRecorder:
    """The segments of one session. Requests come one at a time: plan, generate, add."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._lines: list[_Line] = []

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order in which they began."""
        return tuple(line.segment for line in self._lines)

    @property
    def tokens(self) -> int:
        return sum(len(line.segment.token_ids) for line in self._lines)

    def plan(self, content: Conversation | RawPrompt, sampling: Sampling) -> Plan:
        """The ids to go on from; changes nothing. DataError: the template refuses the messages."""
        if isinstance(content, Conversation):
            return self._plan_chat(content, sampling)
        return self._plan_raw(content, sampling)

    def add(self, plan: Plan, completion: Completion, *, shown: str) -> None:
        """Put the answer where the plan says. `shown` is its text as the agent got it."""
        line = None if plan.line is None else self._lines[plan.line]
        segment = _grown(
            line.segment if line is not None else None, plan, completion=completion, shown=shown
        )
        past = self._past_after(plan.past, completion, shown=shown)
        cut = _Cut(len(past.messages or ()), len(segment.token_ids))
        if line is None:
            self._lines.append(_Line(segment, past, [*plan.cuts, cut]))
        else:
            line.segment, line.past = segment, past
            line.cuts.append(cut)

    def _past_after(self, past: _Past, completion: Completion, *, shown: str) -> _Past:
        if past.messages is not None:
            answer = _key({"role": "assistant", "content": shown})
            return _Past((*past.messages, answer), past.tools)
        if past.text is None:
            return past
        # With the stop string, if any: the ids have it, so a text that goes on must have it too.
        return _Past(None, text=past.text + self._codec.decode(completion.token_ids))

    def _plan_chat(self, content: Conversation, sampling: Sampling) -> Plan:
        tools = json.dumps(content.tools, sort_keys=True)
        past = _Past(tuple(_key(message) for message in content.messages), tools)
        found = self._longest(past)
        if found is not None:
            number, cut = found
            line = self._lines[number]
            try:
                token_ids = self._codec.append_messages(
                    line.segment.token_ids[: cut.tokens],
                    content.messages[cut.messages :],
                    tools=content.tools,
                )
            except DataError:  # a template that cannot go on here may still write the whole
                pass
            else:
                return self._plan_behind(number, cut, token_ids, past=past, sampling=sampling)
        token_ids = self._codec.encode_messages(content.messages, tools=content.tools)
        return Plan(token_ids, sampling, past, None)

    def _longest(self, past: _Past) -> tuple[int, _Cut] | None:
        """The cut with the most messages that the conversation begins with; ends come first."""
        assert past.messages is not None
        best: tuple[tuple[int, bool], int, _Cut] | None = None
        for number, line in enumerate(self._lines):
            if line.past.messages is None or line.past.tools != past.tools:
                continue
            for cut in line.cuts:
                if line.past.messages[: cut.messages] != past.messages[: cut.messages]:
                    break
                rank = (cut.messages, cut is line.cuts[-1])
                if best is None or rank >= best[0]:
                    best = (rank, number, cut)
        return None if best is None else best[1:]

    def _plan_raw(self, prompt: RawPrompt, sampling: Sampling) -> Plan:
        for number, token_ids in reversed(list(self._continued(prompt))):
            past = _Past(None, text=prompt if isinstance(prompt, str) else None)
            cut = self._lines[number].cuts[-1]
            return self._plan_behind(number, cut, token_ids, past=past, sampling=sampling)
        if isinstance(prompt, str):
            return Plan(self._codec.encode_text(prompt), sampling, _Past(None, text=prompt), None)
        return Plan(frozen_array(prompt, np.int32), sampling, _Past(None), None)

    def _continued(self, prompt: RawPrompt) -> Iterator[tuple[int, IntArray]]:
        """Segments that the prompt begins with, and the ids of the whole prompt."""
        for number, line in enumerate(self._lines):
            ids = line.segment.token_ids
            if isinstance(prompt, str):
                text = line.past.text
                if text is not None and prompt.startswith(text):
                    yield number, self._codec.append_text(ids, prompt[len(text) :])
            elif line.past.messages is None and prompt[: len(ids)] == tuple(ids.tolist()):
                yield number, frozen_array(prompt, np.int32)

    def _plan_behind(
        self, number: int, cut: _Cut, token_ids: IntArray, *, past: _Past, sampling: Sampling
    ) -> Plan:
        line = self._lines[number]
        same = _how(sampling) == _how(line.segment.sampling)
        if same and cut is line.cuts[-1]:
            return Plan(token_ids, sampling, past, number)
        shared = tuple(line.cuts[: line.cuts.index(cut) + 1])
        return Plan(token_ids, sampling, past, None, shared)


def _grown(before: Segment | None, plan: Plan, *, completion: Completion, shown: str) -> Segment:
    """What was there, the plan's new ids as context, and the drawn tokens."""
    start = 0 if before is None else len(before.token_ids)
    context, drawn = len(plan.token_ids) - start, len(completion.token_ids)
    logprobs = [np.zeros(context), completion.logprobs]
    versions = [np.full(context, NOT_SAMPLED), completion.versions]
    masks = [np.zeros(context, np.bool_), np.ones(drawn, np.bool_)]
    if before is not None:
        logprobs.insert(0, before.logprobs)
        versions.insert(0, before.versions)
        masks.insert(0, before.loss_mask)
    return Segment(
        token_ids=frozen_array(np.concatenate([plan.token_ids, completion.token_ids]), np.int32),
        logprobs=frozen_array(np.concatenate(logprobs), np.float32),
        versions=frozen_array(np.concatenate(versions), np.int32),
        loss_mask=frozen_array(np.concatenate(masks), np.bool_),
        sampling=plan.sampling,
        stop=completion.stop,
        text=shown if before is None else f"{before.text}\n{shown}",
        turns=1 if before is None else before.turns + 1,
    )


def _how(sampling: Sampling) -> tuple[float, float, int]:
    """What decides a drawn token's log-prob; a sample has one of each."""
    return sampling.temperature, sampling.top_p, sampling.top_k


def _key(message: Mapping[str, Any]) -> str:
    """Equal for messages that say the same.

    Agents often strip an answer before they send it back: that is not a rewrite.
    """
    known = {
        name: message[name] for name in ("name", "tool_call_id", "tool_calls") if name in message
    }
    content: str = message["content"]
    role: str = message["role"]
    known["content"] = content.strip() if role == "assistant" else content
    return json.dumps([role, known], sort_keys=True)

"""SessionRecorder: token-exact segments from an agent's text requests.

An agent sends its full conversation with every request. The recorder finds the messages that the
session already has and appends only the new ones to the existing ids: sampled tokens are never
tokenised again.

    request -> plan -> ids for the engine -> (engine) -> add -> ... -> segments

If a conversation continues at the end of a segment, the segment grows. If the agent returns to an
earlier response, or samples with other parameters, a new segment starts with the ids before it.
If the agent has rewritten its history, the conversation is tokenised as a new segment. A sampled
token has its log-prob, version and loss mask in exactly one segment; in others it is context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollick.data.chat import ChatCodec
from rollick.errors import DataError
from rollick.serve.choices import ChoiceChunk
from rollick.serve.requests import ChatPrompt, RawPrompt
from rollick.serve.tool_calls import ToolFormat, call_keys
from rollick.types import (
    NOT_SAMPLED,
    BoolArray,
    FloatArray,
    IntArray,
    Sampling,
    StopReason,
    frozen_array,
)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A token sequence of an agent and the model; all arrays have the same length."""

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    loss_mask: BoolArray
    sampling: Sampling
    stop: StopReason
    text: str
    turns: int

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
class _History:
    """The prompt and response so far: message keys, or text; both None for token-id prompts."""

    messages: tuple[str, ...] | None
    tools: str = ""
    text: str | None = None


@dataclass(frozen=True, slots=True)
class _BranchPoint:
    """A position after a sampled response, as the number of messages and tokens before it."""

    messages: int
    tokens: int


@dataclass(slots=True, eq=False)
class _OpenSegment:
    segment: Segment
    history: _History
    branch_points: list[_BranchPoint]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPlan:
    """The token ids to send to the engine, and the segment that will get the response."""

    token_ids: IntArray
    sampling: Sampling
    history: _History
    segment: int | None = None
    """Index of the segment that grows; None starts a new one."""
    branch_points: tuple[_BranchPoint, ...] = ()
    """Branch points of the shared beginning, for a new segment."""


@dataclass(slots=True, eq=False)
class SessionRecorder:
    """The segments of one session. Requests are sequential: plan, generate, add."""

    _codec: ChatCodec
    _tool_format: ToolFormat | None = None
    _open: list[_OpenSegment] = field(default_factory=list[_OpenSegment])

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(entry.segment for entry in self._open)

    @property
    def tokens(self) -> int:
        return sum(len(entry.segment.token_ids) for entry in self._open)

    def plan(self, prompt: ChatPrompt | RawPrompt, sampling: Sampling) -> SegmentPlan:
        """Plan a request; does not change the recorder. Raises DataError if the template fails."""
        if isinstance(prompt, ChatPrompt):
            return self._plan_chat(prompt, sampling)
        return self._plan_raw(prompt, sampling)

    def add(self, plan: SegmentPlan, choice: ChoiceChunk) -> None:
        """Add the full choice that the agent received to the planned segment."""
        entry = None if plan.segment is None else self._open[plan.segment]
        segment = _extend_segment(None if entry is None else entry.segment, plan, choice)
        history = self._history_after(plan.history, choice)
        point = _BranchPoint(len(history.messages or ()), len(segment.token_ids))
        if entry is None:
            self._open.append(_OpenSegment(segment, history, [*plan.branch_points, point]))
        else:
            entry.segment, entry.history = segment, history
            entry.branch_points.append(point)

    def _history_after(self, history: _History, choice: ChoiceChunk) -> _History:
        if history.messages is not None:
            response: dict[str, Any] = {"role": "assistant", "content": choice.content}
            if choice.calls:
                response["tool_calls"] = [call.to_json(as_text=False) for call in choice.calls]
            return _History((*history.messages, _message_key(response)), history.tools)
        if history.text is None:
            return history
        # Decoded ids include the stop string; a text that continues this one must include it too.
        return _History(None, text=history.text + self._codec.decode(choice.token_ids))

    def _plan_chat(self, prompt: ChatPrompt, sampling: Sampling) -> SegmentPlan:
        tools = json.dumps(prompt.tools, sort_keys=True)
        history = _History(tuple(_message_key(message) for message in prompt.messages), tools)
        messages = prompt.messages
        if self._tool_format is not None:
            messages = self._tool_format.write_calls(messages)
        match = self._find_longest_match(history)
        if match is not None:
            number, point = match
            known = self._open[number].segment.token_ids[: point.tokens]
            new = messages[point.messages :]
            # If the template cannot append here, encode the full conversation.
            with suppress(DataError):
                token_ids = self._codec.append_messages(known, new, tools=prompt.tools)
                plan = SegmentPlan(token_ids, sampling, history)
                return self._continue_or_branch(plan, number, point)
        token_ids = self._codec.encode_messages(messages, tools=prompt.tools)
        return SegmentPlan(token_ids, sampling, history)

    def _find_longest_match(self, history: _History) -> tuple[int, _BranchPoint] | None:
        """The branch point with the most shared messages; on a tie, one at the end of a segment."""
        assert history.messages is not None
        best: tuple[tuple[int, bool], int, _BranchPoint] | None = None
        for number, entry in enumerate(self._open):
            if entry.history.messages is None or entry.history.tools != history.tools:
                continue
            for point in entry.branch_points:
                if entry.history.messages[: point.messages] != history.messages[: point.messages]:
                    break
                rank = (point.messages, point is entry.branch_points[-1])
                if best is None or rank >= best[0]:
                    best = (rank, number, point)
        return None if best is None else best[1:]

    def _plan_raw(self, prompt: RawPrompt, sampling: Sampling) -> SegmentPlan:
        history = _History(None, text=prompt if isinstance(prompt, str) else None)
        for number, entry in reversed(list(enumerate(self._open))):
            ids, text, token_ids = entry.segment.token_ids, entry.history.text, None
            if isinstance(prompt, str):
                if text is not None and prompt.startswith(text):
                    token_ids = self._codec.append_text(ids, prompt[len(text) :])
            elif entry.history.messages is None and prompt[: len(ids)] == tuple(ids.tolist()):
                token_ids = frozen_array(prompt, np.int32)
            if token_ids is not None:
                plan = SegmentPlan(token_ids, sampling, history)
                return self._continue_or_branch(plan, number, entry.branch_points[-1])
        return SegmentPlan(encode_raw(self._codec, prompt), sampling, history)

    def _continue_or_branch(
        self, plan: SegmentPlan, number: int, point: _BranchPoint
    ) -> SegmentPlan:
        """Continue the segment at its end if possible, else branch off at the point."""
        entry = self._open[number]
        same_sampling = _sampling_key(plan.sampling) == _sampling_key(entry.segment.sampling)
        if same_sampling and point is entry.branch_points[-1]:
            return replace(plan, segment=number)
        shared = tuple(entry.branch_points[: entry.branch_points.index(point) + 1])
        return replace(plan, branch_points=shared)


def _extend_segment(before: Segment | None, plan: SegmentPlan, choice: ChoiceChunk) -> Segment:
    """Append the plan's new ids as context, then the sampled tokens."""
    previous = [] if before is None else [before]
    num_context = len(plan.token_ids) - sum(len(segment.token_ids) for segment in previous)
    logprobs = [*(s.logprobs for s in previous), np.zeros(num_context), choice.logprobs]
    versions = [*(s.versions for s in previous), np.full(num_context, NOT_SAMPLED), choice.versions]
    sampled = np.repeat([False, True], [num_context, len(choice.token_ids)])
    masks = [*(s.loss_mask for s in previous), sampled]
    return Segment(
        token_ids=frozen_array(np.concatenate([plan.token_ids, choice.token_ids]), np.int32),
        logprobs=frozen_array(np.concatenate(logprobs), np.float32),
        versions=frozen_array(np.concatenate(versions), np.int32),
        loss_mask=frozen_array(np.concatenate(masks), np.bool_),
        sampling=plan.sampling,
        stop=choice.stop or StopReason.ABORTED,
        text=choice.text if before is None else f"{before.text}\n{choice.text}",
        turns=1 if before is None else before.turns + 1,
    )


def encode_raw(codec: ChatCodec, prompt: RawPrompt) -> IntArray:
    return codec.encode_text(prompt) if isinstance(prompt, str) else frozen_array(prompt, np.int32)


def _sampling_key(sampling: Sampling) -> tuple[float, float, int]:
    """The parameters that determine log-probs; they must be the same within a segment."""
    return sampling.temperature, sampling.top_p, sampling.top_k


def _message_key(message: Mapping[str, Any]) -> str:
    """A comparison key. Ignores outer white space of responses, which agents often strip."""
    names = ("name", "tool_call_id")
    fields: dict[str, Any] = {name: message[name] for name in names if name in message}
    fields["tool_calls"] = call_keys(message.get("tool_calls", ()))
    content: str = message["content"]
    role: str = message["role"]
    fields["content"] = content.strip() if role == "assistant" else content
    return json.dumps([role, fields], sort_keys=True)

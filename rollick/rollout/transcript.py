"""The sequence of a conversation while it grows, and what is known of each of its tokens.

    opening | reply observation reply ...            a segment, while its turns are in sight
    opening | observation reply ...                  the next one, where the window slides
    opening | summary observation reply ...          or where the policy has summed it up

Token ids are appended and never tokenised again: what is trained on is what was drawn. Where only
so many turns are in sight, the next ones are put into a new segment of the sample, behind the
opening, the policy's summary if it is asked for one, and what is carried over. Knows nothing of
engines and environments; those are playing.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rollick.config.schema import SummarySpec
from rollick.rollout.episode import ChatCodec
from rollick.types import (
    NOT_SAMPLED,
    BoolArray,
    Completion,
    FloatArray,
    IntArray,
    Prompt,
    Sample,
    SampleId,
    StopReason,
    Turn,
    frozen_array,
)


class PlayingCodec(ChatCodec, Protocol):
    """A codec of conversations that grow. The real one is rollick.data.chat."""

    def append_turns(self, token_ids: Any, turns: Sequence[Turn], /) -> IntArray: ...

    def append_text(self, token_ids: Any, text: str, /) -> IntArray: ...

    def encode_answer(self, text: str, /) -> IntArray: ...


@dataclass(frozen=True, slots=True)
class Task:
    """What a prompt stands for in an environment."""

    environment: str
    options: Mapping[str, Any]
    seed: int
    turn_tokens: int = 0
    """New tokens of one turn at the most; 0: what is left of the sample's."""
    window: int = 0
    """Turns in sight; 0: all."""
    carried: int = 0
    """Turns that a new segment begins with."""
    summary: SummarySpec | None = None
    """What the policy writes for the next segment when the window is full; None: nothing."""


@dataclass(slots=True)
class Transcript:
    """The sequence of a conversation while it grows: ids, and what is known of each."""

    codec: PlayingCodec
    task: Task
    opening: tuple[Turn, ...]
    token_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    prompt_length: int = 0
    drawn: int = 0
    breaks: list[int] = field(default_factory=list[int])
    past: list[tuple[str, tuple[Turn, ...]]] = field(
        default_factory=list[tuple[str, tuple[Turn, ...]]]
    )
    """Each turn: the reply, and what was observed then."""
    in_sight: int = 0
    """Turns of the segment."""
    logprobs: list[FloatArray] = field(default_factory=list[FloatArray])
    versions: list[IntArray] = field(default_factory=list[IntArray])
    masks: list[BoolArray] = field(default_factory=list[BoolArray])
    kept: list[BoolArray] = field(default_factory=list[BoolArray])

    @classmethod
    def of(cls, opening: Sequence[Turn], codec: PlayingCodec, task: Task) -> Transcript:
        transcript = cls(codec, task, tuple(opening))
        transcript._show(transcript.opening)
        transcript.prompt_length = len(transcript.token_ids)
        return transcript

    @property
    def segment(self) -> IntArray:
        """The ids that the policy has before it."""
        return self.token_ids[self.breaks[-1] :] if self.breaks else self.token_ids

    @property
    def wants_summary(self) -> bool:
        """Whether what the policy draws next is the summary that it was asked for."""
        return self.task.summary is not None and self.in_sight == self.task.window

    def draw(self, completion: Completion, *, trained: bool = True) -> None:
        """The policy has spoken."""
        count = len(completion.token_ids)
        self.token_ids = np.concatenate([self.token_ids, completion.token_ids], dtype=np.int32)
        self.drawn += count
        self.logprobs.append(completion.logprobs)
        self.versions.append(completion.versions)
        self.masks.append(np.full(count, trained, np.bool_))
        kept = completion.kept_cache
        self.kept.append(np.zeros(count, np.bool_) if kept is None else kept)

    def observe(self, reply: str, turns: Sequence[Turn]) -> None:
        """The environment has answered: the ids so far stay, those of its turns come behind. Where
        the window is full they begin a new segment, at once or behind the summary (`sum_up`)."""
        self.past.append((reply, tuple(turns)))
        self.in_sight += 1
        if self.in_sight != self.task.window:
            self._put_behind(turns)
        elif self.task.summary is None:
            self._show_again((*self.opening, *self._newest()))
        else:
            self._put_behind([Turn("user", self.task.summary.request)])

    def sum_up(self, completion: Completion) -> None:
        """The policy has summed up what was in sight; a new segment goes on from there, with the
        summary as it was drawn."""
        assert self.task.summary is not None, "nobody asked for a summary"
        self.draw(completion, trained=self.task.summary.trained)
        newest = self._newest()
        self._show_again(self.opening)
        self._given(completion.token_ids)
        self._put_behind(newest)

    def sample(
        self, uid: SampleId, prompt: Prompt, *, temperature: float, stop: StopReason, text: str
    ) -> Sample:
        kept = np.concatenate(self.kept)
        return Sample(
            uid=uid,
            prompt=prompt,
            token_ids=frozen_array(self.token_ids, np.int32),
            logprobs=frozen_array(np.concatenate(self.logprobs), np.float32),
            versions=frozen_array(np.concatenate(self.versions), np.int32),
            loss_mask=frozen_array(np.concatenate(self.masks), np.bool_),
            temperature=temperature,
            stop=stop,
            text=text,
            kept_cache=frozen_array(kept, np.bool_) if kept.any() else None,
            breaks=tuple(self.breaks),
        )

    def _newest(self) -> list[Turn]:
        """What a new segment takes over: what is carried, and what was observed last."""
        (_, seen), *carried = self.past[-1 - self.task.carried :]
        turns = list(seen)
        for reply, observed in carried:
            turns += [Turn("assistant", reply), *observed]
        return turns

    def _show_again(self, turns: Sequence[Turn]) -> None:
        """Begin a new segment with these."""
        self.in_sight = self.task.carried
        self.breaks.append(len(self.token_ids))
        self._show(turns)

    def _put_behind(self, turns: Sequence[Turn]) -> None:
        before = len(self.segment)
        after = self.codec.append_turns(self.segment, turns)
        if len(after) == before:
            # Two turns of the policy with nothing between them would count as one.
            after = self.codec.append_text(self.segment, "\n")
        self._given(after[before:])

    def _show(self, turns: Sequence[Turn]) -> None:
        self._given(self.codec.encode_prompt(turns))

    def _given(self, token_ids: IntArray) -> None:
        """Tokens that no policy drew."""
        count = len(token_ids)
        self.token_ids = np.concatenate([self.token_ids, token_ids], dtype=np.int32)
        self.logprobs.append(np.zeros(count, np.float32))
        self.versions.append(np.full(count, NOT_SAMPLED, np.int32))
        self.masks.append(np.zeros(count, np.bool_))
        self.kept.append(np.zeros(count, np.bool_))

"""The token sequence of a conversation, extended turn by turn, with log-probs and loss mask.

    opening | reply observation reply ...            one segment while all turns fit the window
    opening | observation reply ...                  next segment after the window slides
    opening | summary observation reply ...          or after the policy wrote a summary

Training sees the sampled ids: within a segment, ids are appended and never tokenised again. When
the window of visible turns is full, a new segment starts with the opening, the policy's summary (if
the task has one) and the carried turns; carried replies are tokenised again and not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollick.config.schema import SummarySpec
from rollick.episodes.base import ConversationCodec
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


@dataclass(frozen=True, slots=True)
class EnvTask:
    """A prompt's task: environment, options, seed, and limits on turns and tokens."""

    environment: str
    options: Mapping[str, Any]
    seed: int
    turn_tokens: int = 0
    """Maximum new tokens of one turn; 0: the rest of the sample's budget."""
    window: int = 0
    """Maximum visible turns; 0: all."""
    carried: int = 0
    """Turns copied to the start of a new segment."""
    summary: SummarySpec | None = None
    """The summary that the policy writes when the window is full; None: no summary."""


@dataclass(slots=True)
class Transcript:
    """The token sequence of an episode in progress."""

    codec: ConversationCodec
    task: EnvTask
    opening: tuple[Turn, ...]
    token_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    prompt_length: int = 0
    sampled_tokens: int = 0
    segment_starts: list[int] = field(default_factory=list[int])
    history: list[tuple[str, tuple[Turn, ...]]] = field(default_factory=list)
    """For each turn, the reply and the observation that followed."""
    visible_turns: int = 0
    """Number of turns in the current segment, carried turns included."""
    logprobs: list[FloatArray] = field(default_factory=list[FloatArray])
    versions: list[IntArray] = field(default_factory=list[IntArray])
    masks: list[BoolArray] = field(default_factory=list[BoolArray])
    kept_cache: list[BoolArray] = field(default_factory=list[BoolArray])

    @classmethod
    def start(cls, opening: Sequence[Turn], codec: ConversationCodec, task: EnvTask) -> Transcript:
        transcript = cls(codec, task, tuple(opening))
        transcript.append(codec.encode_prompt(transcript.opening))
        transcript.prompt_length = len(transcript.token_ids)
        return transcript

    @property
    def segment(self) -> IntArray:
        """The ids of the current segment: the policy's context."""
        return self.token_ids[self.segment_starts[-1] :] if self.segment_starts else self.token_ids

    @property
    def awaits_summary(self) -> bool:
        """Whether the next generation is the requested summary."""
        return self.task.summary is not None and self.visible_turns == self.task.window

    def add_reply(self, completion: Completion, *, trained: bool = True) -> None:
        """Append the tokens that the policy sampled."""
        self.sampled_tokens += len(completion.token_ids)
        self.append(completion.token_ids, completion, trained=trained)

    def append(
        self, token_ids: IntArray, sampled: Completion | None = None, *, trained: bool = False
    ) -> None:
        """Append tokens. Tokens that were not sampled get log-prob 0 and version NOT_SAMPLED."""
        count = len(token_ids)
        kept = None if sampled is None else sampled.kept_cache
        self.token_ids = np.concatenate([self.token_ids, token_ids], dtype=np.int32)
        self.logprobs.append(np.zeros(count, np.float32) if sampled is None else sampled.logprobs)
        no_versions = np.full(count, NOT_SAMPLED, np.int32)
        self.versions.append(no_versions if sampled is None else sampled.versions)
        self.masks.append(np.full(count, trained, np.bool_))
        self.kept_cache.append(np.zeros(count, np.bool_) if kept is None else kept)

    def add_observation(self, reply: str, turns: Sequence[Turn]) -> None:
        """Append the environment's turns. If the window is full, start a new segment with them;
        with a summary, append only its request, and `add_summary` starts the segment."""
        self.history.append((reply, tuple(turns)))
        self.visible_turns += 1
        if self.visible_turns != self.task.window:
            self._append_turns(turns)
        elif self.task.summary is None:
            self._start_segment((*self.opening, *self._carried_turns()))
        else:
            self._append_turns([Turn("user", self.task.summary.request)])

    def add_summary(self, completion: Completion) -> None:
        """Append the policy's summary and start a new segment with a copy of its sampled ids."""
        assert self.task.summary is not None, "the task has no summary"
        self.add_reply(completion, trained=self.task.summary.trained)
        carried = self._carried_turns()
        self._start_segment(self.opening)
        self.append(completion.token_ids)
        self._append_turns(carried)

    def to_sample(
        self, uid: SampleId, prompt: Prompt, *, temperature: float, stop: StopReason, text: str
    ) -> Sample:
        kept = np.concatenate(self.kept_cache)
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
            segment_starts=tuple(self.segment_starts),
        )

    def _carried_turns(self) -> list[Turn]:
        """The last `task.carried` turns, preceded by the observation before them."""
        (_, observation), *carried = self.history[-1 - self.task.carried :]
        turns = list(observation)
        for reply, observed in carried:
            turns += [Turn("assistant", reply), *observed]
        return turns

    def _start_segment(self, turns: Sequence[Turn]) -> None:
        self.visible_turns = self.task.carried
        self.segment_starts.append(len(self.token_ids))
        self.append(self.codec.encode_prompt(turns))

    def _append_turns(self, turns: Sequence[Turn]) -> None:
        before = len(self.segment)
        after = self.codec.append_turns(self.segment, turns)
        if len(after) == before:
            # Without a separator, two adjacent replies would be counted as one turn.
            after = self.codec.append_text(self.segment, "\n")
        self.append(after[before:])

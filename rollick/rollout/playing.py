"""A sample's life in an environment: observation, reply, observation, ... -> one Sample.

    task -> reset -> ids of the first observation
              |        +-> generate -> step -> ids of the next observation put behind ----+
              |        ^                                                                  |
              |        +------------------------------------------------------------------+
              +-> Sample: all turns in one sequence; only what the policy drew is trained on

Token ids are appended and never tokenised again: what is trained on is what was drawn. Where only
so many turns are in sight, the next ones are put into a new segment of the sample, behind the
opening and what is carried over. Between two turns the sample holds no engine. An environment that
fails ends the sample with a status and not with a score; tokens that ran out end it with what it
has earned so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rollick.envs.base import Moment
from rollick.envs.child import EnvStatus, Reply
from rollick.envs.pool import EnvPool
from rollick.errors import EnvError
from rollick.rollout.episode import Access, ChatCodec, SamplingOf, stream_of
from rollick.types import (
    NOT_SAMPLED,
    BoolArray,
    Completion,
    FloatArray,
    IntArray,
    Played,
    Prompt,
    Request,
    Sample,
    SampleId,
    Sampling,
    Score,
    ScoreStatus,
    StopReason,
    Turn,
    frozen_array,
    stable_hash,
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


TaskOf = Callable[[Prompt], Task]


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

    def draw(self, completion: Completion) -> None:
        """The policy has spoken."""
        count = len(completion.token_ids)
        self.token_ids = np.concatenate([self.token_ids, completion.token_ids], dtype=np.int32)
        self.drawn += count
        self.logprobs.append(completion.logprobs)
        self.versions.append(completion.versions)
        self.masks.append(np.ones(count, np.bool_))
        kept = completion.kept_cache
        self.kept.append(np.zeros(count, np.bool_) if kept is None else kept)

    def observe(self, reply: str, turns: Sequence[Turn]) -> None:
        """The environment has answered: the ids so far stay, those of its turns come behind, or
        begin a new segment where the window is full."""
        self.past.append((reply, tuple(turns)))
        self.in_sight += 1
        if self.in_sight == self.task.window:
            self._slide()
            return
        before = len(self.segment)
        after = self.codec.append_turns(self.segment, turns)
        if len(after) == before:
            # Two turns of the policy with nothing between them would count as one.
            after = self.codec.append_text(self.segment, "\n")
        self._given(after[before:])

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

    def _slide(self) -> None:
        """A new segment: the opening, what is carried, and what was observed last."""
        self.in_sight = self.task.carried
        (_, seen), *carried = self.past[-1 - self.task.carried :]
        turns = [*self.opening, *seen]
        for reply, observed in carried:
            turns += [Turn("assistant", reply), *observed]
        self.breaks.append(len(self.token_ids))
        self._show(turns)

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


@dataclass(slots=True)
class _Game:
    """What has happened in an episode so far."""

    task: Task
    sampling: Sampling
    states: list[str] = field(default_factory=list[str])
    """Before each turn."""
    replies: list[str] = field(default_factory=list[str])
    moments: list[Moment] = field(default_factory=list[Moment])
    """After each turn."""
    failure: Reply | None = None

    def played(self) -> Played:
        infos = [moment.info for moment in self.moments]
        last = self.moments[-1] if self.moments else None
        earned = sum(moment.reward for moment in self.moments)
        said = last.info.get("success", last.terminated and earned > 0) if last else False
        return Played(
            environment=self.task.environment,
            options=self.task.options,
            seed=self.task.seed,
            replies=tuple(self.replies),
            score=self.score(),
            success=bool(said) and self.failure is None,
            valid=tuple(bool(info["valid"]) for info in infos if "valid" in info),
            effective=tuple(bool(info["effective"]) for info in infos if "effective" in info),
        )

    def score(self) -> Score:
        """What the turns earned; a failed environment is a status."""
        failure = self.failure
        if failure is not None:
            late = failure.status is EnvStatus.TIMEOUT
            status = ScoreStatus.TIMEOUT if late else ScoreStatus.FAILED
            detail = f"environment {self.task.environment} {failure.status}: {failure.detail}"
            return Score.failed(detail, status=status)
        turns = tuple(moment.reward for moment in self.moments)
        # A turn whose reply nobody took (the tokens ran out) is a turn of the sample all the same.
        turns += (0.0,) * (len(self.replies) - len(turns))
        return Score(sum(turns), parts={"environment": sum(turns)}, turns=turns)


@dataclass(frozen=True, slots=True)
class Player:
    """Plays the tasks of prompts. `room`: tokens that an engine's cache has for a sequence."""

    codec: PlayingCodec
    pool: EnvPool
    task_of: TaskOf
    sampling: SamplingOf
    room: int
    seed: int
    purpose: str = "train"

    async def play(self, uid: SampleId, prompt: Prompt, access: Access) -> Sample:
        """Consumes generations and steps, one after another; waits for nobody else."""
        task = self.task_of(prompt)
        game, where = _Game(task, self.sampling(prompt)), f"environment {task.environment}"
        with access.doing(where):
            session = await self.pool.reset(task.environment, task.options, task.seed)
        async with session:
            moment = session.opening.moment
            if moment is None:
                game.failure = session.opening
                transcript = Transcript.of(prompt.turns, self.codec, task)
                return self._end(uid, prompt, transcript, game, StopReason.STOP)
            seen = replace(prompt, turns=opening_turns(prompt, moment))
            transcript = Transcript.of(seen.turns, self.codec, task)
            while True:
                request = self._request(uid, transcript, game)
                if request is None:
                    return self._end(uid, seen, transcript, game, StopReason.LENGTH)
                game.states.append(str(moment.info.get("state", "")))
                completion = await access.generate(request)
                transcript.draw(completion)
                game.replies.append(self.codec.decode(completion.token_ids))
                with access.doing(where):
                    reply = await session.step(game.replies[-1])
                if reply.moment is None:
                    game.failure = reply
                    return self._end(uid, seen, transcript, game, StopReason.STOP)
                moment = reply.moment
                game.moments.append(moment)
                if moment.over:
                    return self._end(uid, seen, transcript, game, StopReason.STOP)
                transcript.observe(game.replies[-1], turns_of(moment))

    def _request(self, uid: SampleId, transcript: Transcript, game: _Game) -> Request | None:
        """The next generation; None if there is no room for one more token."""
        left = min(game.sampling.max_tokens - transcript.drawn, self.room - len(transcript.segment))
        if left < 1:
            return None
        turn, limit = len(game.replies), game.task.turn_tokens or left
        stream = stream_of(self.seed, self.purpose, uid)
        return Request(
            uid,
            frozen_array(transcript.segment, np.int32),
            replace(game.sampling, max_tokens=min(left, limit)),
            # Token numbers begin anew in each turn, and so must the random numbers.
            stream if turn == 0 else stable_hash(stream, "turn", turn),
            # The members of a group begin alike; later nobody shares a prefix with the others.
            group=uid.group if turn == 0 else None,
            session=str(uid),
        )

    def _end(
        self, uid: SampleId, prompt: Prompt, transcript: Transcript, game: _Game, stop: StopReason
    ) -> Sample:
        sample = transcript.sample(
            uid,
            prompt,
            temperature=game.sampling.temperature,
            stop=stop,
            text="\n".join(game.replies)
            if transcript.breaks
            else self.codec.decode(transcript.token_ids[transcript.prompt_length :]),
        )
        return replace(sample, states=tuple(game.states), played=game.played())


def opening_turns(prompt: Prompt, moment: Moment) -> tuple[Turn, ...]:
    """What the policy reads first: the system message of the prompt, if any, and the opening."""
    system = tuple(turn for turn in prompt.turns[:1] if turn.role == "system")
    return (*system, *turns_of(moment))


def turns_of(moment: Moment) -> tuple[Turn, ...]:
    """An observation as messages."""
    seen = moment.observation
    return (Turn("user", seen),) if isinstance(seen, str) else seen


async def show_example(
    prompt: Prompt, *, codec: PlayingCodec, pool: EnvPool, task_of: TaskOf
) -> list[tuple[IntArray, BoolArray]]:
    """What the environment's solver does, as ids and what of them to imitate: the very tokens that
    a policy would have seen and drawn, segment by segment."""
    task = task_of(prompt)
    reply = await pool.show(task.environment, task.options, task.seed)
    if reply.moment is None:
        raise EnvError(
            f"the solver of {task.environment} could not play {prompt.uid} "
            f"({reply.status}): {reply.detail}",
            fix="try it with `rollick env test --policy solver`",
        )
    transcript: Transcript | None = None
    heard: list[Turn] = []
    said = ""
    for turn in opening_turns(prompt, reply.moment):
        if turn.role != "assistant":
            heard.append(turn)
            continue
        if transcript is None:
            transcript = Transcript.of(heard, codec, task)
        else:
            transcript.observe(said, heard)
        heard, said = [], turn.content
        transcript.draw(_as_drawn(codec.encode_answer(turn.content)))
    assert transcript is not None, "a solver's episode has a reply"
    shown = transcript.sample(
        SampleId(0, 0), prompt, temperature=1.0, stop=StopReason.STOP, text=""
    )
    return [(shown.token_ids[span], shown.loss_mask[span]) for span in shown.segments]


def _as_drawn(token_ids: IntArray) -> Completion:
    count = len(token_ids)
    return Completion(
        SampleId(0, 0),
        token_ids,
        np.zeros(count, np.float32),
        np.full(count, NOT_SAMPLED, np.int32),
        StopReason.STOP,
    )

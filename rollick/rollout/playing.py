"""A sample's life in an environment: observation, reply, observation, ... -> one Sample.

    task -> reset -> ids of the first observation
              |        +-> generate -> step -> ids of the next observation put behind ----+
              |        ^                                                                  |
              |        +------------------------------------------------------------------+
              +-> Sample: all turns in one sequence; only what the policy drew is trained on

The ids are kept by transcript.py. Where the turns in sight are summed up, the policy is asked for
that between two steps: a turn of its own, which earns nothing. Between two turns the sample holds
no engine. An environment that fails ends the sample with a status and not with a score; tokens that
ran out end it with what it has earned so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from rollick.envs.base import Moment
from rollick.envs.child import EnvStatus, Reply
from rollick.envs.pool import EnvPool
from rollick.errors import EnvError
from rollick.rollout.episode import Access, SamplingOf, stream_of
from rollick.rollout.transcript import PlayingCodec, Task, Transcript
from rollick.types import (
    NOT_SAMPLED,
    BoolArray,
    Completion,
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

TaskOf = Callable[[Prompt], Task]


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
    summaries: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Turns before each, and what it says."""
    failure: Reply | None = None

    def reply(self, text: str, state: str) -> None:
        """The policy took a turn in this state."""
        self.states.append(state)
        self.replies.append(text)

    def sum_up(self, text: str, state: str) -> None:
        """The policy summed up its turns so far; only what is trained on is a turn of its own."""
        self.summaries.append((len(self.replies), text))
        if self._summaries_count:
            # A summary is compared with summaries, not with what else is done in that state.
            self.states.append(f"summary of {state}")

    @property
    def _summaries_count(self) -> bool:
        return self.task.summary is not None and self.task.summary.trained

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
            summaries=tuple(self.summaries),
        )

    def score(self) -> Score:
        """What the turns earned; a failed environment is a status."""
        failure = self.failure
        if failure is not None:
            late = failure.status is EnvStatus.TIMEOUT
            status = ScoreStatus.TIMEOUT if late else ScoreStatus.FAILED
            detail = f"environment {self.task.environment} {failure.status}: {failure.detail}"
            return Score.failed(detail, status=status)
        turns = [moment.reward for moment in self.moments]
        # A turn whose reply nobody took (the tokens ran out) is a turn of the sample all the same.
        turns += [0.0] * (len(self.replies) - len(turns))
        if self._summaries_count:
            for number, (before, _) in enumerate(self.summaries):
                turns.insert(before + number, 0.0)
        return Score(sum(turns), parts={"environment": sum(turns)}, turns=tuple(turns))


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
                completion = await access.generate(request)
                text = self.codec.decode(completion.token_ids)
                state = str(moment.info.get("state", ""))
                if transcript.wants_summary:
                    transcript.sum_up(completion)
                    game.sum_up(text, state)
                    continue
                transcript.draw(completion)
                game.reply(text, state)
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
        turn, limit, what = len(game.replies), game.task.turn_tokens or left, "turn"
        if game.task.summary is not None and transcript.wants_summary:
            limit, what = game.task.summary.tokens, "summary"
        stream = stream_of(self.seed, self.purpose, uid)
        return Request(
            uid,
            frozen_array(transcript.segment, np.int32),
            replace(game.sampling, max_tokens=min(left, limit)),
            # Token numbers begin anew in each turn, and so must the random numbers.
            stream if turn == 0 else stable_hash(stream, what, turn),
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

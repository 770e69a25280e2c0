"""The episode of a sample in an environment: observation, reply, observation, ... -> one Sample.

    task -> reset -> ids of the first observation
              |        +-> generate -> step -> append ids of the next observation --+
              |        ^                                                            |
              |        +------------------------------------------------------------+
              +-> Sample: all turns in one sequence; only the sampled tokens are trained on

If the task has summaries, the policy writes one between two steps: a turn with reward 0. Between
two turns the sample holds no engine. An environment that fails ends the sample with a failed score;
a sample that runs out of tokens keeps the rewards so far.

An episode whose process was lost is restarted from its first observation, and so is one whose
server does not respond, until it does or the step's time limit passes. Environments and sampling
are seeded, so the same policy version gives the same sample.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from rollick.envs.base import EnvResponse, is_solved
from rollick.envs.child import EnvCallResult, EnvStatus
from rollick.envs.pool import EnvPool
from rollick.episodes.base import ConversationCodec, EngineAccess, SamplingFor, random_stream
from rollick.episodes.transcript import EnvTask, Transcript
from rollick.errors import EnvError
from rollick.types import (
    BoolArray,
    EpisodeRecord,
    IntArray,
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

LOG = logging.getLogger("rollick")
TaskFor = Callable[[Prompt], EnvTask]

MAX_EPISODE_ATTEMPTS = 3
"""An episode whose process or connection was lost this often fails: it may be the cause."""
RESTARTED = (EnvStatus.LOST, EnvStatus.UNAVAILABLE)
OUTAGE_PAUSE_S = 2.0
"""Mean time between two attempts to reach a server."""
FAILED_STATUS = {
    EnvStatus.TIMEOUT: ScoreStatus.TIMEOUT,
    EnvStatus.UNAVAILABLE: ScoreStatus.UNAVAILABLE,
}


@dataclass(slots=True)
class _EpisodeState:
    task: EnvTask
    sampling: Sampling
    states: list[str] = field(default_factory=list[str])
    """The environment's state key before each turn."""
    replies: list[str] = field(default_factory=list[str])
    responses: list[EnvResponse] = field(default_factory=list[EnvResponse])
    """The environment's response to each reply."""
    summaries: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Number of turns before each summary, and its text."""
    failure: EnvCallResult | None = None

    def add_summary(self, text: str, state: str) -> None:
        """A summary is a turn of the sample only if it is trained on."""
        self.summaries.append((len(self.replies), text))
        if self._summaries_are_turns:
            # Credit assignment compares turns of equal states: summaries only with summaries.
            self.states.append(f"summary of {state}")

    @property
    def _summaries_are_turns(self) -> bool:
        return self.task.summary is not None and self.task.summary.trained

    def record(self) -> EpisodeRecord:
        infos = [response.info for response in self.responses]
        return EpisodeRecord(
            environment=self.task.environment,
            options=self.task.options,
            seed=self.task.seed,
            replies=tuple(self.replies),
            score=self.score(),
            success=self.failure is None and is_solved(self.responses),
            valid=tuple(bool(info["valid"]) for info in infos if "valid" in info),
            effective=tuple(bool(info["effective"]) for info in infos if "effective" in info),
            summaries=tuple(self.summaries),
        )

    def score(self) -> Score:
        """The rewards of the turns; a failed environment gives a failed score."""
        failure = self.failure
        if failure is not None:
            status = FAILED_STATUS.get(failure.status, ScoreStatus.FAILED)
            detail = f"environment {self.task.environment} {failure.status}: {failure.detail}"
            return Score.failed(detail, status=status)
        rewards = [response.reward for response in self.responses]
        # The last reply has no response if the tokens ran out; it is a turn of the sample.
        rewards += [0.0] * (len(self.replies) - len(rewards))
        if self._summaries_are_turns:
            for number, (before, _) in enumerate(self.summaries):
                rewards.insert(before + number, 0.0)
        total = sum(rewards)
        return Score(total, parts={"environment": total}, turn_rewards=tuple(rewards))


@dataclass(frozen=True, slots=True)
class EnvEpisodeRunner:
    """Runs the environment tasks of prompts. `max_length`: the longest sequence of an engine."""

    codec: ConversationCodec
    pool: EnvPool
    task_for: TaskFor
    sampling: SamplingFor
    max_length: int
    seed: int
    purpose: str = "train"

    async def run(self, uid: SampleId, prompt: Prompt, access: EngineAccess) -> Sample:
        """Consumes generations and steps, one after another; also waits for a server to return."""
        now, lost_attempts = asyncio.get_running_loop().time, 0
        outage_began: float | None = None
        while True:
            sample, state = await self._attempt(uid, prompt, access)
            failure = state.failure
            if failure is None or failure.status not in RESTARTED:
                return sample
            if failure.status is EnvStatus.LOST or state.replies:
                lost_attempts, outage_began = lost_attempts + 1, None
            outage_began = now() if outage_began is None else outage_began
            waited_s = now() - outage_began
            if lost_attempts == MAX_EPISODE_ATTEMPTS or waited_s > self.pool.limits.step_s:
                return sample
            self.pool.stats.episode_restarts += 1
            if failure.status is EnvStatus.UNAVAILABLE:
                await self._pause(failure, access)

    async def _pause(self, failure: EnvCallResult, access: EngineAccess) -> None:
        LOG.warning(
            "%s; its episodes start again when it answers, and fail after %g s",
            *(failure.detail, self.pool.limits.step_s),
        )
        with access.activity("waiting for a server", limit_s=2 * OUTAGE_PAUSE_S):
            # Jitter: episodes that failed together must not retry together.
            await asyncio.sleep(OUTAGE_PAUSE_S * random.uniform(0.5, 1.5))

    async def _attempt(
        self, uid: SampleId, prompt: Prompt, access: EngineAccess
    ) -> tuple[Sample, _EpisodeState]:
        task = self.task_for(prompt)
        state = _EpisodeState(task, self.sampling(prompt))
        activity, stop = f"environment {task.environment}", StopReason.STOP
        limit_s = self.pool.limits.step_s
        with access.activity(activity, limit_s=limit_s):
            session = await self.pool.reset(task.environment, task.options, task.seed)
        with closing(session):
            response = session.opening.response
            if response is None:
                state.failure = session.opening
            else:
                prompt = replace(prompt, turns=opening_turns(prompt, response))
            transcript = Transcript.start(prompt.turns, self.codec, task)
            while response is not None and not response.done:
                request = self._next_request(uid, transcript, state)
                if request is None:
                    stop = StopReason.LENGTH
                    break
                completion = await access.generate(request)
                text = self.codec.decode(completion.token_ids)
                state_key = str(response.info.get("state", ""))
                if transcript.awaits_summary:
                    transcript.add_summary(completion)
                    state.add_summary(text, state_key)
                    continue
                transcript.add_reply(completion)
                state.states.append(state_key)
                state.replies.append(text)
                with access.activity(activity, limit_s=limit_s):
                    result = await session.step(text)
                response = result.response
                if response is None:
                    state.failure = result
                    break
                state.responses.append(response)
                if not response.done:
                    transcript.add_observation(text, response.turns)
        text = "\n".join(state.replies)
        if not transcript.segment_starts:
            text = self.codec.decode(transcript.token_ids[transcript.prompt_length :])
        temperature = state.sampling.temperature
        sample = transcript.to_sample(uid, prompt, temperature=temperature, stop=stop, text=text)
        sample = replace(sample, states=tuple(state.states), episode=state.record())
        return sample, state

    def _next_request(
        self, uid: SampleId, transcript: Transcript, state: _EpisodeState
    ) -> Request | None:
        """The next generation; None if not even one more token fits."""
        num_left = state.sampling.max_tokens - transcript.sampled_tokens
        num_left = min(num_left, self.max_length - len(transcript.segment))
        if num_left < 1:
            return None
        turn, limit, kind = len(state.replies), state.task.turn_tokens or num_left, "turn"
        if state.task.summary is not None and transcript.awaits_summary:
            limit, kind = state.task.summary.tokens, "summary"
        stream = random_stream(self.seed, self.purpose, uid)
        return Request(
            uid,
            frozen_array(transcript.segment, np.int32),
            replace(state.sampling, max_tokens=min(num_left, limit)),
            # Token numbers restart in each turn, so each turn needs a random stream of its own.
            stream if turn == 0 else stable_hash(stream, kind, turn),
            # The members of a group share only the prompt of the first turn.
            group=uid.group if turn == 0 else None,
            session=str(uid),
        )


def opening_turns(prompt: Prompt, response: EnvResponse) -> tuple[Turn, ...]:
    """The first context: the prompt's system message, if any, and the first observation."""
    system = tuple(turn for turn in prompt.turns[:1] if turn.role == "system")
    return (*system, *response.turns)


async def encode_solver_episode(
    prompt: Prompt, *, codec: ConversationCodec, pool: EnvPool, task_for: TaskFor
) -> list[tuple[IntArray, BoolArray]]:
    """The solver's episode as (token ids, loss mask) for each segment: the tokens that a policy
    with the same replies would have seen and sampled."""
    task = task_for(prompt)
    result = await pool.solve(task.environment, task.options, task.seed)
    if result.response is None:
        problem = f"could not solve {prompt.uid} ({result.status}): {result.detail}"
        fix = "try it with `rollick env test --policy solver`"
        raise EnvError(f"the solver of {task.environment} {problem}", fix=fix)
    transcript: Transcript | None = None
    observed: list[Turn] = []
    reply = ""
    for turn in opening_turns(prompt, result.response):
        if turn.role != "assistant":
            observed.append(turn)
            continue
        if transcript is None:
            transcript = Transcript.start(observed, codec, task)
        else:
            transcript.add_observation(reply, observed)
        observed, reply = [], turn.content
        transcript.append(codec.encode_answer(turn.content), trained=True)
    assert transcript is not None, "a solver's episode has a reply"
    uid, stop = SampleId(0, 0), StopReason.STOP
    sample = transcript.to_sample(uid, prompt, temperature=1.0, stop=stop, text="")
    return [(sample.token_ids[span], sample.loss_mask[span]) for span in sample.segments]

"""LLM as a judge: a model behind any OpenAI-compatible endpoint grades a completion.

    samples -- judge_frame --> messages -- judge_client --> replies -- votes --> Score

A batch of samples is asked for at once, each with its votes. A sample that gets no verdict (a
server that fails, stalls, rambles or refuses) is a failed Score with the reason; it is masked and
counted, and never becomes a number. Tokens, requests and cost are figures of the Score.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollick.rewards.answers import after_thinking
from rollick.rewards.base import declare
from rollick.rewards.judge_client import Endpoint, Passing, Refused, Usage, ask, httpx
from rollick.rewards.judge_frame import Junk, Verdict, frame, read_verdict
from rollick.types import Score, ScoreStatus

VOTING_TEMPERATURE = 0.7
"""Of several votes, where the recipe does not say: equal ones would be one vote."""


@dataclass(frozen=True, slots=True)
class Bench:
    """How a verdict is come by."""

    endpoint: Endpoint
    rubric: str
    votes: int
    scale: int
    timeout_s: float
    input_price: float
    output_price: float


async def judge(
    prompt: Sequence[str],
    completion: Sequence[str],
    row: Sequence[Mapping[str, Any]],
    url: str,
    model: str,
    rubric: str = "correctness",
    reference: str = "answer",
    votes: int = 1,
    scale: int = 10,
    temperature: float | None = None,
    max_tokens: int = 512,
    key_env: str = "",
    timeout_s: float = 25.0,
    request_s: float = 10.0,
    retries: int = 3,
    concurrency: int = 16,
    json_mode: bool = False,
    input_price: float = 0.0,
    output_price: float = 0.0,
) -> list[Score]:
    """The mean of the votes, from 0 to 1. These many parameters are the recipe's options.

    url: up to and with /v1. rubric: correctness, quality, faithfulness, harmlessness, or your own
    words. reference: the column with a right answer, where rows have one. key_env: the environment
    variable with the API key. timeout_s: for a batch with all its votes and tries (keep it below
    rollout.reward_timeout_s); request_s: for one request. prices: of a million tokens.
    """
    if votes < 1 or scale < 1:
        raise ValueError(f"votes={votes} and scale={scale} must be at least 1")
    drawn = VOTING_TEMPERATURE if votes > 1 else 0.0
    endpoint = Endpoint(
        url,
        model,
        _key(key_env),
        max_tokens=max_tokens,
        temperature=drawn if temperature is None else temperature,
        request_s=request_s,
        retries=retries,
        json_mode=json_mode,
    )
    bench = Bench(endpoint, rubric, votes, scale, timeout_s, input_price, output_price)
    room = asyncio.Semaphore(concurrency)
    deadline = asyncio.get_running_loop().time() + timeout_s
    asked = zip(prompt, completion, row, strict=True)
    async with httpx.AsyncClient(timeout=None) as client, asyncio.TaskGroup() as tasks:
        judged = [
            tasks.create_task(
                _judge_one(
                    client,
                    bench,
                    texts=(task, said, _reference(of, reference)),
                    room=room,
                    deadline=deadline,
                )
            )
            for task, said, of in asked
        ]
    return [task.result() for task in judged]


declare(judge, batch=16, cache=True)


def _key(variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise ValueError(f"the environment has no {variable} with the judge's API key")
    return key


def _reference(row: Mapping[str, Any], column: str) -> str | None:
    value = row.get(column)
    return None if value is None else str(value)


async def _judge_one(
    client: httpx.AsyncClient,
    bench: Bench,
    *,
    texts: tuple[str, str, str | None],
    room: asyncio.Semaphore,
    deadline: float,
) -> Score:
    """All votes on one sample. Waits for room and for the endpoint, until the deadline."""
    task, said, wanted = texts
    response = after_thinking(said)
    if response is None or not response.strip():
        return Score(0.0, detail="there is nothing to judge but thoughts")

    def messages() -> tuple[Sequence[Mapping[str, str]], Callable[[str], Verdict]]:
        asked = frame(task, response, rubric=bench.rubric, scale=bench.scale, reference=wanted)

        def read(reply: str) -> Verdict:
            try:
                return read_verdict(reply, asked)
            except Junk as junk:
                raise Passing(f"junk: {junk}") from junk

        return asked.messages, read

    usage = Usage()

    async def vote() -> Verdict | str:
        try:
            async with asyncio.timeout_at(deadline), room:
                return await ask(client, bench.endpoint, messages, usage=usage)
        except (Passing, Refused) as failure:
            return str(failure)
        except TimeoutError:
            return f"no verdict within {bench.timeout_s:g} s"

    cast_votes = await asyncio.gather(*(vote() for _ in range(bench.votes)))
    score = count_votes(cast_votes)
    return replace(score, figures=_figures(bench, usage) | dict(score.figures))


def count_votes(votes: Sequence[Verdict | str]) -> Score:
    """The mean of the votes that were cast; failed unless more than half of them were.

    The figure `spread` is the largest difference between two votes.
    """
    verdicts = [vote for vote in votes if isinstance(vote, Verdict)]
    failures = [vote for vote in votes if isinstance(vote, str)]
    if 2 * len(verdicts) <= len(votes):
        late = all(failure.startswith("no ") for failure in failures)
        status = ScoreStatus.TIMEOUT if late else ScoreStatus.FAILED
        said = f"{len(failures)} of {len(votes)} votes failed: {failures[0]}"
        return replace(Score.failed(said, status=status), figures={"junk": float(len(failures))})
    values = [verdict.score for verdict in verdicts]
    spread = max(values) - min(values)
    figures = {"spread": spread, "junk": float(len(failures))}
    return Score(sum(values) / len(values), detail=verdicts[0].reason, figures=figures)


def _figures(bench: Bench, usage: Usage) -> dict[str, float]:
    cost = usage.prompt_tokens * bench.input_price + usage.completion_tokens * bench.output_price
    return {
        "requests": float(usage.requests),
        "retries": float(usage.retries),
        "prompt_tokens": float(usage.prompt_tokens),
        "completion_tokens": float(usage.completion_tokens),
        "cost": cost / 1e6,
    }

"""LLM as a judge: a model behind any OpenAI-compatible endpoint grades completions.

    samples -- judge_prompt --> messages --> POST /chat/completions --> replies -- votes --> Score
                                   ^  timeout, transient error or unparsable verdict:
                                   +-- retry with exponential backoff and full jitter

The requests of a batch, one for each vote, run concurrently. If half of a sample's votes or more
get no verdict (timeout, rejected request, unparsable reply), its Score is failed, with the reason.
While the server does not answer, requests are repeated until the deadline of the batch, so that a
short outage costs no score.
Tokens, requests and cost are metrics of the Score.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

from rollick.errors import MissingExtra
from rollick.rewards import judge_prompt
from rollick.rewards.answers import after_thinking
from rollick.rewards.base import declare
from rollick.rewards.judge_prompt import JudgePrompt, UnparsableVerdict
from rollick.types import Row, Score, ScoreStatus

try:
    import httpx
except ImportError as error:
    raise MissingExtra.of("httpx", "rewards") from error

VOTING_TEMPERATURE = 0.7
"""Default temperature with several votes: at 0 all votes would be the same."""
TRANSIENT_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Status codes to retry."""
UNAVAILABLE_STATUS = frozenset({502, 503, 504})
"""Status codes of a proxy whose server does not answer, or of a server that starts or stops."""
CONNECT_S = 5.0
"""Time limit to connect, within that of a request."""
MAX_REPLY_BYTES = 1 << 20
FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 8.0
MakePrompt = Callable[[], JudgePrompt]


class TransientError(Exception):
    """A failure that is worth a retry. `wait_s`: the server's Retry-After."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        super().__init__(reason)


class NoResponse(TransientError):
    """The server cannot be reached or does not answer."""


class PermanentError(Exception):
    """A failure that a retry cannot fix, such as a wrong API key."""


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """The options of the reward `judge` in a recipe."""

    url: str
    """Base URL of the server, including /v1."""
    model: str
    rubric: str = "correctness"
    """correctness, quality, faithfulness, harmlessness, or a text of your own."""
    reference: str = "answer"
    """Column with a correct answer, if rows have one."""
    votes: int = 1
    scale: int = 10
    """The highest grade."""
    temperature: float | None = None
    """None: 0 with one vote, 0.7 with several."""
    max_tokens: int = 512
    key_env: str = ""
    """Environment variable with the API key."""
    timeout_s: float = 25.0
    """Time limit of a batch, with all votes and retries; keep it below rewards.timeout_s."""
    request_s: float = 10.0
    """Time limit of one request."""
    retries: int = 3
    """After failed responses; a server that does not answer is tried until the time limit."""
    concurrency: int = 16
    """Maximum requests in flight."""
    json_mode: bool = False
    input_price: float = 0.0
    """Price of a million prompt tokens."""
    output_price: float = 0.0
    """Price of a million completion tokens."""

    def __post_init__(self) -> None:
        if self.votes < 1 or self.scale < 1:
            raise ValueError(f"votes={self.votes} and scale={self.scale} must be at least 1")

    @property
    def key(self) -> str:
        """The API key; empty without `key_env`. Raises ValueError if that variable is unset, or
        has a character that no HTTP header may contain."""
        key = os.environ.get(self.key_env, "").strip()
        if self.key_env and not key:
            raise ValueError(f"the environment has no {self.key_env} with the judge's API key")
        if not (key.isascii() and key.isprintable()):
            raise ValueError(
                f"the API key in {self.key_env} has a line break or a special character"
            )
        return key

    def headers(self) -> dict[str, str]:
        """HTTP headers with the API key."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def redact(self, content: bytes) -> bytes:
        """The content without the API key: parts of replies and errors are written to the run's
        folder."""
        return content.replace(self.key.encode(), b"[API key]") if self.key else content

    def request_body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        temperature = self.temperature
        if temperature is None:
            temperature = VOTING_TEMPERATURE if self.votes > 1 else 0.0
        body = {"model": self.model, "messages": list(messages), "temperature": temperature}
        json_mode = {"response_format": {"type": "json_object"}} if self.json_mode else {}
        return {**body, "max_tokens": self.max_tokens, **json_mode}


@dataclass(frozen=True, slots=True)
class FailedVote:
    """Why a vote has no verdict."""

    reason: str
    status: ScoreStatus = ScoreStatus.FAILED


@dataclass(slots=True)
class JudgeUsage:
    """Requests and tokens so far, including failed requests."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


async def judge(
    prompt: Sequence[str], completion: Sequence[str], row: Sequence[Row], **options: Any
) -> list[Score]:
    """The mean of the votes, from 0 to 1. The options are the fields of JudgeSettings."""
    settings = JudgeSettings(**options)
    slots = asyncio.Semaphore(settings.concurrency)
    deadline = asyncio.get_running_loop().time() + settings.timeout_s
    timeout = httpx.Timeout(None, connect=min(CONNECT_S, settings.request_s))
    http = httpx.AsyncClient(timeout=timeout, headers=settings.headers())
    async with http as client, asyncio.TaskGroup() as group:
        batch = _BatchJudge(settings, client, slots, deadline)
        texts = zip(prompt, completion, row, strict=True)
        tasks = [group.create_task(batch.judge_sample(*each)) for each in texts]
    return [task.result() for task in tasks]


declare(judge, batch=16, cache=True, options=JudgeSettings)


@dataclass(slots=True)
class _BatchJudge:
    """Judges the samples of one batch."""

    settings: JudgeSettings
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    deadline: float
    has_response: bool = False
    """The server has answered a request of the batch."""

    async def judge_sample(self, task: str, completion: str, row: Row) -> Score:
        """Collect the votes on a sample. Each waits for a slot and a reply, until the deadline."""
        settings = self.settings
        response = after_thinking(completion)
        if response is None or not response.strip():
            return Score(0.0, detail="the completion has no text after its thinking")
        answer = row.get(settings.reference)
        reference = None if answer is None else str(answer)
        make_prompt = partial(judge_prompt.build_prompt, task, response, reference=reference)
        make_prompt = partial(make_prompt, rubric=settings.rubric, scale=settings.scale)
        usage = JudgeUsage()
        votes = [self._vote(make_prompt, usage) for _ in range(settings.votes)]
        score = count_votes(await asyncio.gather(*votes))
        return replace(score, metrics=_usage_metrics(settings, usage) | dict(score.metrics))

    async def _vote(self, make_prompt: MakePrompt, usage: JudgeUsage) -> Score | FailedVote:
        """A verdict, or why there is none."""
        failures: list[TransientError] = []
        has_slot = False
        try:
            async with asyncio.timeout_at(self.deadline), self.slots:
                has_slot = True
                return await self._request_verdict(make_prompt, usage, failures)
        except (TransientError, PermanentError) as failure:
            return FailedVote(str(failure))
        except TimeoutError:
            reason = f"no verdict of {self.settings.url} within {self.settings.timeout_s:g} s"
            reason = "; ".join([reason, *map(str, failures[-1:])])
            if not all(isinstance(each, NoResponse) for each in failures):
                return FailedVote(reason)
            # A vote that only waited behind slow replies says nothing about the server.
            is_late = self.has_response and not has_slot
            return FailedVote(reason, ScoreStatus.TIMEOUT if is_late else ScoreStatus.UNAVAILABLE)

    async def _request_verdict(
        self, make_prompt: MakePrompt, usage: JudgeUsage, failures: list[TransientError]
    ) -> Score:
        """Appends to `failures`. Raises the last of them when the retries are used up, or
        PermanentError."""
        responses = 0
        while True:
            prompt = make_prompt()
            try:
                usage.requests += 1
                reply = await self._post(prompt.messages, usage)
                return judge_prompt.read_verdict(reply, prompt)
            except UnparsableVerdict as error:
                failures.append(TransientError(f"unparsable verdict: {error}"))
            except TransientError as error:
                failures.append(error)
            responses += not isinstance(failures[-1], NoResponse)
            if responses > self.settings.retries:
                raise failures[-1]
            usage.retries += 1
            # Full jitter: requests that failed together must not retry together.
            longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (len(failures) - 1))
            await asyncio.sleep(max(failures[-1].wait_s, random.uniform(0, longest)))

    async def _post(self, messages: Sequence[Mapping[str, str]], usage: JudgeUsage) -> str:
        settings = self.settings
        body, url = settings.request_body(messages), settings.url.rstrip("/") + "/chat/completions"
        request = self.client.stream("POST", url, json=body)
        try:
            async with asyncio.timeout(settings.request_s), request as response:
                self.has_response |= response.status_code not in UNAVAILABLE_STATUS
                content = settings.redact(await _read_body(response))
        except TimeoutError:
            raise NoResponse(f"no response within {settings.request_s:g} s") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise PermanentError(f"{settings.url} is not a valid URL: {error}") from error
        except httpx.LocalProtocolError:  # its text may contain the API key
            raise PermanentError("httpx cannot send the request: a header is invalid") from None
        except httpx.DecodingError as error:
            raise TransientError(f"the reply cannot be decompressed: {error}") from error
        except httpx.TransportError as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise NoResponse(settings.redact(reason.encode()).decode()) from None
        _check_status(response, content)
        return _read_reply(content, usage)


async def _read_body(response: httpx.Response) -> bytes:
    content = b""
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_REPLY_BYTES:
            raise TransientError(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
    return content


def _check_status(response: httpx.Response, content: bytes) -> None:
    code = response.status_code
    reason = f"status {code}: {content[:200].decode(errors='replace')}"
    if code in TRANSIENT_STATUS:
        kind = NoResponse if code in UNAVAILABLE_STATUS else TransientError
        raise kind(reason, _retry_after(response.headers.get("retry-after")))
    if code != 200:
        raise PermanentError(reason)


def _retry_after(header: str | None) -> float:
    try:
        return min(max(float(header or 0), 0.0), LONGEST_WAIT_S)
    except ValueError:  # a date; use our own wait
        return 0.0


def _read_reply(content: bytes, usage: JudgeUsage) -> str:
    """The text of a chat completion; adds its tokens to `usage`."""
    try:
        reply: Any = json.loads(content)
        tokens = cast("Mapping[str, Any]", reply.get("usage") or {})
        usage.prompt_tokens += int(tokens.get("prompt_tokens") or 0)
        usage.completion_tokens += int(tokens.get("completion_tokens") or 0)
        text: Any = reply["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise TransientError(f"not a chat completion: {content[:80]!r}") from error
    if not isinstance(text, str):
        raise TransientError(f"the reply has no text: {text!r:.80}")
    return text


def count_votes(votes: Sequence[Score | FailedVote]) -> Score:
    """The mean of the verdicts; a failed Score unless more than half of the votes have one. The
    metric `spread` is the highest minus the lowest verdict."""
    verdicts = [vote for vote in votes if isinstance(vote, Score)]
    failures = [vote for vote in votes if isinstance(vote, FailedVote)]
    if 2 * len(verdicts) <= len(votes):
        statuses = {failure.status for failure in failures}
        status = statuses.pop() if len(statuses) == 1 else ScoreStatus.FAILED
        detail = f"{len(failures)} of {len(votes)} votes failed: {failures[0].reason}"
        failed = Score.failed(detail, status=status)
        return replace(failed, metrics={"failed_votes": float(len(failures))})
    values = [verdict.value for verdict in verdicts]
    spread = max(values) - min(values)
    metrics = {"spread": spread, "failed_votes": float(len(failures))}
    return Score(sum(values) / len(values), detail=verdicts[0].detail, metrics=metrics)


def _usage_metrics(settings: JudgeSettings, usage: JudgeUsage) -> dict[str, float]:
    input_cost = usage.prompt_tokens * settings.input_price
    output_cost = usage.completion_tokens * settings.output_price
    counts = {name: float(count) for name, count in asdict(usage).items()}
    return {**counts, "cost": (input_cost + output_cost) / 1e6}

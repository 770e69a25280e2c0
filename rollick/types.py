"""The nouns of rollick: what flows from a prompt to a gradient.

Everything here is frozen, holds numpy arrays that cannot be written, and knows nothing of torch
or ray, so it can cross any process boundary by value.

    Prompt -> Request -> Completion -> Sample -> ScoredSample -> Group -> (data/) Batch
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.floating[Any]]
BoolArray = npt.NDArray[np.bool_]

PolicyVersion = NewType("PolicyVersion", int)
"""Counts publishes: version 0 is the policy that a run starts with."""

Fingerprint = NewType("Fingerprint", str)
"""Hex digest of a set of weights; two parties that hold the same bytes compute the same one."""

NOT_SAMPLED = -1
"""The version of a token that no policy drew (prompt, observation, tool output)."""

Row = Mapping[str, Any]


def stable_hash(*parts: str | int) -> int:
    """A 63-bit hash that is the same in every process and every run (unlike `hash`)."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 1


def frozen_array(values: npt.ArrayLike, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A read-only array of `dtype`; the input is copied unless it is already just that."""
    array = np.asarray(values, dtype=dtype)
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


class SampleId(NamedTuple):
    """Names one attempt: the group (counted over the run) and the place inside the group.

    Ids order samples, name their random streams, and survive a kill and a resume.
    """

    group: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]

    def __str__(self) -> str:
        return f"g{self.group}.{self.index}"


class StopReason(StrEnum):
    """Why an engine stopped drawing tokens."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The token limit: the sample is truncated."""
    ABORTED = "aborted"
    """Somebody asked for it; the tokens drawn so far are kept."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation. In a plain-text prompt the role is "text"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a sample is an attempt at. `uid` is stable over runs: domain and row."""

    uid: str
    domain: str
    turns: tuple[Turn, ...]
    row: Row = field(default_factory=dict[str, Any])

    @property
    def text(self) -> str:
        return "\n".join(turn.content for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy.

    The bias is added to the logits, and stop ids are ruled out until `min_tokens` are drawn; then
    comes the temperature; then the cuts: the k likeliest, of these the smallest set with mass p, of
    these the ones with at least `min_p` times the probability of the likeliest.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    min_tokens: int = 0
    """No stop id or stop string ends the sample before this many tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); -inf rules a token out."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the sample, besides those that the engine was made with."""

    @property
    def cuts_support(self) -> bool:
        """Whether the tokens are not drawn from softmax(logits / temperature) as it is, so that
        log-probs must be renormalised."""
        return (
            self.top_p < 1.0
            or self.top_k > 0
            or self.min_p > 0.0
            or self.min_tokens > 0
            or bool(self.logit_bias)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One generation asked of an engine.

    `stream` keys the counter-based random numbers: token number t of a sample depends on
    (stream, t) and the model alone, never on the neighbours in the batch.
    `continue_from` carries the tokens that an earlier, aborted generation drew.
    `session` names a conversation: the engine keeps its cache for the next turn while it has room.
    """

    uid: SampleId
    token_ids: IntArray
    sampling: Sampling
    stream: int
    group: int | None = None
    continue_from: Completion | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What an engine drew: ids, log-prob and policy version of every token, and why it stopped."""

    uid: SampleId
    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    stop: StopReason
    seconds: float = 0.0
    """From its arrival at the engine to its end, those of `queued_s` and `prefill_s` included."""
    queued_s: float = 0.0
    """Until it had a place there."""
    prefill_s: float = 0.0
    """From then until its first token."""
    kept_cache: BoolArray | None = None
    """Which tokens were drawn over a cache that an older version had computed, all or part of it;
    None: none."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot that an engine pushes with its results; never asked for.

    What an engine does not know stays 0: without `kv_capacity` nobody can say how full it is.
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    generated_tokens: int = 0
    busy_seconds: float = 0.0
    version: int = 0
    kv_tokens: int = 0
    """Tokens that the cache holds for requests under way."""
    kv_capacity: int = 0
    preempted: int = 0
    """Requests thrown out of the cache for lack of room, counted since the engine started."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One measured step of an engine: its sequences, the tokens in their cache, the prefilled ones,
    its time."""

    batch: int
    kv_tokens: int
    prefill_tokens: int
    seconds: float
    at: float = 0.0
    """The wall clock's second at which it began; 0: not known."""
    longest: int = 0
    """Tokens of its longest sequence; 0: not known."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One attempt at a prompt, token by token. All arrays have the length of the sequence.

    `logprobs` is the behaviour log-prob mu of each drawn token (0 elsewhere), `versions` the
    policy version that drew it (NOT_SAMPLED elsewhere), `loss_mask` what may be trained on.
    """

    uid: SampleId
    prompt: Prompt
    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    loss_mask: BoolArray
    temperature: float
    stop: StopReason
    text: str
    states: tuple[str, ...] = ()
    """A key of the state before each turn, where somebody gave one: equal keys, equal states."""
    kept_cache: BoolArray | None = None
    """Tokens drawn over a cache that an older version had computed (rollout.at_publish: keep);
    None: none. Their log-prob is the one that they were drawn with, of no single version."""
    played: Played | None = None
    """The episode, where there was an environment. For records: it is not in a checkpoint, which
    has the sample's score."""
    breaks: tuple[int, ...] = ()
    """Where a new segment starts: its tokens were drawn without those before it, because what the
    policy sees of the past was rewritten. A model reads each segment as a sequence of its own."""

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def segments(self) -> list[slice]:
        """Of most samples one, the whole."""
        ends = [*self.breaks, self.length]
        return [slice(start, end) for start, end in zip([0, *self.breaks], ends, strict=True)]

    @property
    def response_length(self) -> int:
        return int(np.count_nonzero(self.versions != NOT_SAMPLED))

    @property
    def kept_cache_tokens(self) -> int:
        return 0 if self.kept_cache is None else int(np.count_nonzero(self.kept_cache))

    @property
    def truncated(self) -> bool:
        return self.stop is StopReason.LENGTH

    @property
    def oldest_version(self) -> int:
        drawn = self.versions[self.versions != NOT_SAMPLED]
        return int(drawn.min()) if len(drawn) else 0


class ScoreStatus(StrEnum):
    """Whether a score is a judgement. Failures of infrastructure are never the number 0."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Score:
    """What the rewards said of a sample. `value` means something only when status is OK.

    `turns` is the part of the value that each turn earned, where somebody knows; what the value
    has beyond their sum belongs to the last turn.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    status: ScoreStatus = ScoreStatus.OK
    detail: str = ""
    seconds: float = 0.0
    turns: tuple[float, ...] = ()
    version: str = ""
    """Of the reward that said so; of several, name@version each."""
    isolation: str = ""
    """What kept the reward from everything else: a process of its own (`process`), a sandbox."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """What is counted and never trained on: tokens, cost, how far votes are apart."""

    @property
    def ok(self) -> bool:
        return self.status is ScoreStatus.OK

    @classmethod
    def failed(cls, detail: str, *, status: ScoreStatus = ScoreStatus.FAILED) -> Score:
        return cls(value=float("nan"), status=status, detail=detail)


@dataclass(frozen=True, slots=True)
class Played:
    """The episode of a sample in an environment: which one, what the policy wrote in each turn, and
    what that was worth. A failure of the environment is a status of the score.

    Environment, options, seed and replies are all that it takes to play the episode again.
    """

    environment: str
    options: Mapping[str, Any]
    seed: int
    replies: tuple[str, ...]
    score: Score
    success: bool = False
    valid: tuple[bool, ...] = ()
    """Of each turn whose environment says so: whether the reply could be read."""
    effective: tuple[bool, ...] = ()
    """Of each turn whose environment says so: whether it changed anything."""
    summaries: tuple[tuple[int, str], ...] = ()
    """What the policy wrote about turns that went out of its sight: turns before, and text."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """What each reply earned: the turns of the score without those of trained summaries."""
        turns = list(self.score.turns)
        if len(turns) > len(self.replies):
            for before, _ in self.summaries:
                del turns[before]
        return tuple(turns)


@dataclass(frozen=True, slots=True, eq=False)
class Annotations:
    """What models say of each token of a sample before its advantage; None: nobody was asked.

    old, reference and teacher are log-probs of the sample's tokens; values[t] is the critic's
    value before token t is drawn, last_value the one after the last token. penalty is what each
    token takes from the score (a KL in the reward); the score's value already is without it.
    """

    old: FloatArray | None = None
    reference: FloatArray | None = None
    teacher: FloatArray | None = None
    values: FloatArray | None = None
    last_value: float = 0.0
    penalty: FloatArray | None = None


NOTHING_SAID = Annotations()


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSample:
    """A sample with its score: the only kind that can reach collate."""

    sample: Sample
    score: Score
    annotations: Annotations = NOTHING_SAID


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The scored samples of one prompt, ordered by id. `started` is the version it began at."""

    uid: int
    prompt: Prompt
    members: tuple[ScoredSample, ...]
    started: PolicyVersion

    @property
    def scores(self) -> tuple[float, ...]:
        return tuple(member.score.value for member in self.members)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(member.sample for member in self.members)


RewardFn = Callable[..., Any]
"""A user's reward: arguments by name from the sample and its row; a float, a bool or a Score."""

RoleName = Literal[
    "policy", "generators", "reference", "critic", "reward_model", "judge", "teacher"
]
ROLES: Sequence[RoleName] = (
    "policy",
    "generators",
    "reference",
    "critic",
    "reward_model",
    "judge",
    "teacher",
)

"""The data types that the whole library shares, from a prompt to a group of scored samples.

    Prompt -> Request -> Completion -> Sample -> ScoredSample -> Group -> Batch (data/batch.py)

Every type is frozen and holds read-only numpy arrays. Nothing here imports torch or Ray, so the
types can be sent to any process by value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NewType, get_args

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.floating[Any]]
BoolArray = npt.NDArray[np.bool_]

PolicyVersion = NewType("PolicyVersion", int)
"""Version of the policy's weights: 0 at the start of a run, plus 1 for each publish."""

Fingerprint = NewType("Fingerprint", str)
"""Hex digest of a set of weights or of a vocabulary. Equal contents have equal fingerprints."""

NOT_SAMPLED = -1
"""The version of tokens that no policy sampled: prompt, observation, tool output."""

Row = Mapping[str, Any]
"""The columns of one dataset row, by name."""


def stable_hash(*parts: str | int) -> int:
    """A 63-bit hash that, unlike `hash`, is the same in every process and every run."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 1


def frozen_array(values: npt.ArrayLike, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A read-only array of `dtype`. Copies the input unless it is already one."""
    array = np.asarray(values, dtype=dtype)
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


class SampleId(NamedTuple):
    """Number of the sample's group in the run, and index in the group. Ids order samples and seed
    their random streams; a resumed run uses the same ids."""

    group: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]

    def __str__(self) -> str:
        return f"g{self.group}.{self.index}"


class StopReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    """The model emitted an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The token limit was reached: the sample is truncated."""
    ABORTED = "aborted"
    """The request was aborted. The completion holds the tokens sampled so far."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation. The role of a plain-text prompt is "text"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task for the policy. `uid` is "domain/row", the same in every run."""

    uid: str
    domain: str
    turns: tuple[Turn, ...]
    row: Row = field(default_factory=dict[str, Any])

    @property
    def text(self) -> str:
        return "\n".join(turn.content for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request. They are applied in this order: logit_bias, min_tokens,
    temperature (0: greedy), top_k, top_p, min_p."""

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    """Sample from the k most likely tokens; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end the sample."""
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the most likely one."""
    min_tokens: int = 0
    """No stop id or stop string ends the sample before this many tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and value added to its logit; -inf forbids a token."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the sample, in addition to those of the engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request to an engine to generate one completion."""

    uid: SampleId
    token_ids: IntArray
    sampling: Sampling
    stream: int
    """Key of a counter-based random generator: token t depends only on the model and (stream, t),
    never on the other requests of the batch."""
    group: int | None = None
    """Requests of a group have the same prompt. Only the simulated engine reads this."""
    continue_from: Completion | None = None
    """The tokens of an earlier, aborted generation to continue."""
    session: str | None = None
    """Identifies a conversation: the engine may keep its KV cache for the next turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The generated tokens with their log-probs and policy versions, and the stop reason."""

    uid: SampleId
    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    stop: StopReason
    seconds: float = 0.0
    """From arrival at the engine to the last token; includes `queued_s` and `prefill_s`."""
    queued_s: float = 0.0
    """From arrival until the request had a slot."""
    prefill_s: float = 0.0
    """From the start in a slot to the first token."""
    kept_cache: BoolArray | None = None
    """Marks tokens sampled on a KV cache that an older version computed at least partly."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine, sent along with its results. Values that it does not measure
    are 0."""

    running: int = 0
    waiting: int = 0
    slots: int = 0
    generated_tokens: int = 0
    busy_seconds: float = 0.0
    version: int = 0
    kv_tokens: int = 0
    """Tokens in the KV cache that belong to running requests."""
    kv_capacity: int = 0
    """Tokens that fit into the KV cache."""
    preempted: int = 0
    """Requests evicted from a full KV cache since the engine started."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The duration of one engine step with `batch` sequences, whose cache holds `kv_tokens`."""

    batch: int
    kv_tokens: int
    prefill_tokens: int
    seconds: float
    at: float = 0.0
    """Start of the step as a Unix timestamp; 0: unknown."""
    longest: int = 0
    """Tokens of the longest sequence; 0: unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response to a prompt, prompt tokens included. All arrays have one entry per token."""

    uid: SampleId
    prompt: Prompt
    token_ids: IntArray
    logprobs: FloatArray
    """Under the behaviour policy mu that sampled the token; 0 for other tokens."""
    versions: IntArray
    """The policy version that sampled each token; NOT_SAMPLED for other tokens."""
    loss_mask: BoolArray
    """The tokens that may be trained on."""
    temperature: float
    stop: StopReason
    text: str
    states: tuple[str, ...] = ()
    """Key of the environment's state before each turn, if known. Equal keys mean equal states."""
    kept_cache: BoolArray | None = None
    """Marks tokens sampled on a KV cache of an older policy version (rollout.at_publish: keep).
    Their log-probs belong to no single version."""
    episode: EpisodeRecord | None = None
    """Set for samples of an environment. Not saved in checkpoints, which hold the score."""
    segment_starts: tuple[int, ...] = ()
    """Token indices of further segments. The policy sampled each segment without seeing those
    before it, so a model reads every segment as a separate sequence."""

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def segments(self) -> list[slice]:
        """Token ranges of the segments. Most samples have one segment."""
        return [slice(*ends) for ends in pairwise([0, *self.segment_starts, self.length])]

    @property
    def response_length(self) -> int:
        """Number of sampled tokens."""
        return int(np.count_nonzero(self.versions != NOT_SAMPLED))

    @property
    def kept_cache_tokens(self) -> int:
        return 0 if self.kept_cache is None else int(np.count_nonzero(self.kept_cache))

    @property
    def truncated(self) -> bool:
        return self.stop is StopReason.LENGTH


class ScoreStatus(StrEnum):
    """Whether the reward produced a score. A reward that fails never counts as a score of 0."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """A judge, sandbox or environment server did not answer."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a sample. `value` is meaningful only if `status` is OK."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """The components of the value by name: one per reward, and those a reward reports itself."""
    status: ScoreStatus = ScoreStatus.OK
    detail: str = ""
    seconds: float = 0.0
    turn_rewards: tuple[float, ...] = ()
    """Reward of each turn, if known. The rest of `value` belongs to the last turn."""
    version: str = ""
    """Version of the reward; for several rewards, a name@version list."""
    isolation: str = ""
    """How the reward ran: in a separate process ("process"), or in a sandbox."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Values to log that do not enter the score, such as tokens, cost or spread of votes."""

    @property
    def ok(self) -> bool:
        return self.status is ScoreStatus.OK

    @classmethod
    def failed(cls, detail: str, *, status: ScoreStatus = ScoreStatus.FAILED) -> Score:
        return cls(value=float("nan"), status=status, detail=detail)


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """The episode of a sample in an environment. A failure of the environment is a status of the
    score. Environment, options, seed and replies are enough to run the episode again."""

    environment: str
    options: Mapping[str, Any]
    seed: int
    replies: tuple[str, ...]
    score: Score
    success: bool = False
    valid: tuple[bool, ...] = ()
    """Whether each reply could be parsed; only turns whose environment reports it."""
    effective: tuple[bool, ...] = ()
    """Whether each reply changed the state; only turns whose environment reports it."""
    summaries: tuple[tuple[int, str], ...] = ()
    """Summaries of turns that left the context: (number of replies before it, text)."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward of each reply: the score's turns without those of trained summaries."""
        turns = list(self.score.turn_rewards)
        if len(turns) > len(self.replies):
            for before, _ in self.summaries:
                del turns[before]
        return tuple(turns)


@dataclass(frozen=True, slots=True, eq=False)
class Annotations:
    """Model outputs for each token of a sample, as inputs of its advantage. None: not computed.
    old, reference, teacher: log-probs of the sample's tokens under these policies."""

    old: FloatArray | None = None
    reference: FloatArray | None = None
    teacher: FloatArray | None = None
    values: FloatArray | None = None
    """values[t] is the critic's value before token t; `last_value` the one after the last."""
    last_value: float = 0.0
    penalty: FloatArray | None = None
    """KL penalty in the reward; `Score.value` already has it subtracted."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSample:
    """A sample with its score. Only scored samples can enter a batch."""

    sample: Sample
    score: Score
    annotations: Annotations = Annotations()


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The scored samples of one prompt, ordered by id."""

    uid: int
    prompt: Prompt
    members: tuple[ScoredSample, ...]
    start_version: PolicyVersion
    """The policy version when the group started."""

    @property
    def scores(self) -> tuple[float, ...]:
        return tuple(member.score.value for member in self.members)

    @property
    def valid_scores(self) -> list[float]:
        """The scores of the samples that could be scored."""
        return [member.score.value for member in self.members if member.score.ok]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(member.sample for member in self.members)


RewardFn = Callable[..., Any]
"""A user's reward. Takes values of the sample and its row by name; returns float, bool or Score."""

RoleName = Literal[
    "policy", "generators", "reference", "critic", "reward_model", "judge", "teacher"
]
ROLES: Sequence[RoleName] = get_args(RoleName)
SHARDABLE_ROLES: Sequence[RoleName] = ("policy", "critic", "reference", "teacher", "reward_model")
"""Roles whose model may be divided over several devices."""

"""A sample in an environment: one growing sequence, observations masked, failures as statuses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeCodec, FakeEngine

from rollick.algorithms.turns import step_return
from rollick.config.schema import SummarySpec
from rollick.config.schema.advantages import StepReturnAdvantage
from rollick.data.chat import ChatCodec
from rollick.envs.pool import EnvLimits, EnvPool
from rollick.episodes.base import SingleEngineAccess, random_stream
from rollick.episodes.counts import EpisodeCounts
from rollick.episodes.environment import (
    EnvEpisodeRunner,
    encode_solver_episode,
)
from rollick.episodes.transcript import EnvTask, Transcript
from rollick.errors import EnvError
from rollick.testing.fakes import prompt
from rollick.testing.tiny import tiny_tokenizer
from rollick.types import (
    NOT_SAMPLED,
    Completion,
    EpisodeRecord,
    Group,
    PolicyVersion,
    Sample,
    SampleId,
    Sampling,
    Score,
    ScoredSample,
    ScoreStatus,
    StopReason,
    Turn,
)

UID = SampleId(3, 1)
ENVS = '''
import time
from rollick import TextEnv

class Echo(TextEnv):
    """Echoes each action with a reward of 0.25; the action `!` ends the episode."""
    def reset(self, seed):
        self.turns = 0
        return f"<{seed}>", {"state": "start"}
    def step(self, action):
        self.turns += 1
        if action == "#":
            raise ValueError("no good")
        if action == "~":
            time.sleep(60)
        if action == "?":
            return "only text"
        over = action == "!"
        info = {"state": f"after {action}", "valid": action != "x", "success": over}
        return "" if action == "_" else f"({action})", 0.25 + over, over, False, info
    def solve(self):
        return "ab!"[self.turns]

class Broken(Echo):
    def reset(self, seed):
        raise RuntimeError("no start")

class Speechless(Echo):
    def solve(self):
        return None
'''


@asynccontextmanager
async def open_pool(folder: Path) -> AsyncGenerator[EnvPool]:
    (folder / "mine.py").write_text(ENVS)
    names = {name: f"mine.py:{name}" for name in ("Echo", "Broken", "Speechless")}
    async with EnvPool.open(
        names, processes=1, base=folder, output=folder / "log", limits=EnvLimits(step_s=1)
    ) as pool:
        yield pool


async def run_sample(
    folder: Path,
    replies: str,
    *,
    environment: str = "Echo",
    turn_tokens: int = 1,
    window: int = 0,
    carried: int = 0,
    **limits: Any,
) -> tuple[Sample, FakeEngine]:
    """The sample of a policy that replies with one of these letters in each turn."""
    task = EnvTask(environment, {}, 7, turn_tokens, window, carried)
    async with open_pool(folder) as pool:
        return await run_task(pool, replies, task, **limits)


async def run_task(
    pool: EnvPool, replies: str, task: EnvTask, *, max_tokens: int = 50, max_length: int = 100
) -> tuple[Sample, FakeEngine]:
    engine = FakeEngine(reply=lambda request: replies[len(engine.requests) - 1 :], version=4)
    runner = EnvEpisodeRunner(
        codec=FakeCodec(),
        pool=pool,
        task_for=lambda _: task,
        sampling=lambda _: Sampling(temperature=0.7, max_tokens=max_tokens),
        max_length=max_length,
        seed=1,
    )
    return await runner.run(UID, prompt("task 7"), SingleEngineAccess(engine)), engine


def decode_ids(ids: Any) -> str:
    return FakeCodec().decode(ids)


async def test_turns_are_appended_and_only_drawn_tokens_are_trained_on(
    tmp_path: Path,
) -> None:
    sample, engine = await run_sample(tmp_path, "ab!")
    assert decode_ids(sample.token_ids) == "<7>a(a)b(b)!"
    assert decode_ids(sample.token_ids[sample.loss_mask]) == "ab!"
    assert sample.versions[sample.loss_mask].tolist() == [4, 4, 4]
    assert set(sample.versions[~sample.loss_mask].tolist()) == {NOT_SAMPLED}
    assert sample.logprobs.tolist() == [-1.0 * drawn for drawn in sample.loss_mask]
    assert sample.text == "a(a)b(b)!"
    assert sample.prompt.text == "<7>"
    # Each request starts with all ids of the previous request and the tokens drawn for it.
    requested = [request.token_ids for request in engine.requests]
    for before, after in pairwise(requested):
        assert np.array_equal(after[: len(before)], before)
    assert [decode_ids(ids) for ids in requested] == ["<7>", "<7>a(a)", "<7>a(a)b(b)"]


async def test_a_sample_holds_states_rewards_and_what_is_needed_to_run_it_again(
    tmp_path: Path,
) -> None:
    sample, _ = await run_sample(tmp_path, "x!")
    assert sample.states == ("start", "after x")
    assert sample.episode == EpisodeRecord(
        environment="Echo",
        options={},
        seed=7,
        replies=("x", "!"),
        score=Score(1.5, parts={"environment": 1.5}, turn_rewards=(0.25, 1.25)),
        success=True,
        valid=(False, True),
    )


async def test_each_turn_has_its_own_random_stream_and_shares_one_session(
    tmp_path: Path,
) -> None:
    _, engine = await run_sample(tmp_path, "ab!")
    streams = [request.stream for request in engine.requests]
    assert streams[0] == random_stream(1, "train", UID)
    assert len(set(streams)) == 3
    assert [request.session for request in engine.requests] == ["g3.1"] * 3
    assert [request.group for request in engine.requests] == [3, None, None]


async def test_an_empty_observation_still_separates_two_turns(tmp_path: Path) -> None:
    sample, _ = await run_sample(tmp_path, "_!")
    assert decode_ids(sample.token_ids) == "<7>_\n!"
    assert sample.loss_mask.tolist() == [False] * 3 + [True, False, True]


@pytest.mark.parametrize(
    ("replies", "status", "detail"),
    [
        ("a#", ScoreStatus.FAILED, "failed: ValueError: no good"),
        ("a?", ScoreStatus.FAILED, "garbage: step()"),
        ("a~", ScoreStatus.TIMEOUT, "timeout: no answer within 1 s"),
    ],
)
async def test_a_failing_environment_gives_a_failed_score(
    tmp_path: Path, replies: str, status: ScoreStatus, detail: str
) -> None:
    sample, _ = await run_sample(tmp_path, replies)
    assert sample.episode is not None
    score = sample.episode.score
    assert (score.status, np.isnan(score.value), sample.episode.success) == (status, True, False)
    assert f"environment Echo {detail}" in score.detail


async def test_a_failing_reset_costs_no_generation(tmp_path: Path) -> None:
    sample, engine = await run_sample(tmp_path, "a", environment="Broken")
    assert engine.requests == []
    assert not sample.loss_mask.any()
    assert sample.episode is not None
    assert "no start" in sample.episode.score.detail


@pytest.mark.parametrize(
    ("limit", "text"), [({"max_tokens": 2}, "<7>a(a)b(b)"), ({"max_length": 8}, "")]
)
async def test_a_sample_out_of_tokens_is_truncated_and_keeps_its_rewards(
    tmp_path: Path, limit: dict[str, int], text: str
) -> None:
    sample, _ = await run_sample(tmp_path, "ab!", **limit)
    assert sample.truncated
    assert decode_ids(sample.token_ids) == (text or "<7>a(a)b(b)")
    assert sample.episode is not None
    assert sample.episode.score.turn_rewards == (0.25, 0.25)
    assert len(sample.states) == 2


async def test_a_solver_episode_has_the_tokens_that_a_policy_would_have_drawn(
    tmp_path: Path,
) -> None:
    sample, _ = await run_sample(tmp_path, "ab!")
    async with open_pool(tmp_path) as pool:
        [(ids, mask)] = await encode_solver_episode(
            prompt("task 7"),
            codec=FakeCodec(),
            pool=pool,
            task_for=lambda _: EnvTask("Echo", {}, 7),
        )
        with pytest.raises(EnvError, match="its solver returns no reply"):
            await encode_solver_episode(
                prompt("task 7"),
                codec=FakeCodec(),
                pool=pool,
                task_for=lambda _: EnvTask("Speechless", {}, 7),
            )
    assert np.array_equal(ids, sample.token_ids)
    assert np.array_equal(mask, sample.loss_mask)


@pytest.mark.parametrize(
    ("window", "carried", "segments"),
    [
        (1, 0, ["<7>a", "<7>(a)b", "<7>(b)c", "<7>(c)!"]),
        (2, 0, ["<7>a(a)b", "<7>(b)c(c)!"]),
        (2, 1, ["<7>a(a)b", "<7>(a)b(b)c", "<7>(b)c(c)!"]),
        (3, 1, ["<7>a(a)b(b)c", "<7>(b)c(c)!"]),
        (4, 3, ["<7>a(a)b(b)c(c)!"]),
    ],
)
async def test_a_full_window_starts_a_new_segment(
    tmp_path: Path, window: int, carried: int, segments: list[str]
) -> None:
    sample, engine = await run_sample(tmp_path, "abc!", window=window, carried=carried)
    assert [decode_ids(sample.token_ids[span]) for span in sample.segments] == segments
    # Each drawn token is trained on once; carried turns are context only.
    assert decode_ids(sample.token_ids[sample.loss_mask]) == "abc!"
    assert [
        decode_ids(sample.token_ids[span][sample.loss_mask[span]])[-1] for span in sample.segments
    ] == [text[-1] for text in segments]
    for request, reply in zip(engine.requests, "abc!", strict=True):
        assert any(text.startswith(decode_ids(request.token_ids) + reply) for text in segments)
    assert sample.text == ("a\nb\nc\n!" if len(segments) > 1 else "a(a)b(b)c(c)!")
    assert sample.episode is not None
    assert sample.episode.score.turn_rewards == (0.25, 0.25, 0.25, 1.25)


async def test_the_maximum_length_applies_to_each_segment(tmp_path: Path) -> None:
    sample, _ = await run_sample(tmp_path, "abc!", window=1, max_length=7)
    assert not sample.truncated
    assert len(sample.token_ids) > 7


async def test_a_solver_episode_has_the_segments_that_a_policy_would_see(tmp_path: Path) -> None:
    sample, _ = await run_sample(tmp_path, "ab!", window=2, carried=1)
    async with open_pool(tmp_path) as pool:
        examples = await encode_solver_episode(
            prompt("task 7"),
            codec=FakeCodec(),
            pool=pool,
            task_for=lambda _: EnvTask("Echo", {}, 7, window=2, carried=1),
        )
    assert [decode_ids(ids) for ids, _ in examples] == ["<7>a(a)b", "<7>(a)b(b)!"]
    for (ids, mask), span in zip(examples, sample.segments, strict=True):
        assert np.array_equal(ids, sample.token_ids[span])
        assert np.array_equal(mask, sample.loss_mask[span])


def summary_task(window: int, carried: int = 0, *, trained: bool = True) -> EnvTask:
    summary = SummarySpec(tokens=1, request="=", trained=trained)
    return EnvTask("Echo", {}, 7, turn_tokens=1, window=window, carried=carried, summary=summary)


async def test_the_policy_summarises_turns_that_leave_the_window(
    tmp_path: Path,
) -> None:
    # A turn is a letter and its echo; capitals are summaries, requested with "=".
    cases = [
        (1, 0, "aAbB!", ["<7>a=A", "<7>A(a)b=B", "<7>B(b)!"]),
        (2, 0, "abAcdB!", ["<7>a(a)b=A", "<7>A(b)c(c)d=B", "<7>B(d)!"]),
        (2, 1, "abAcB!", ["<7>a(a)b=A", "<7>A(a)b(b)c=B", "<7>B(b)c(c)!"]),
        (3, 0, "ab!", ["<7>a(a)b(b)!"]),
        (3, 0, "abcA_!", ["<7>a(a)b(b)c=A", "<7>A(c)_\n!"]),
    ]
    async with open_pool(tmp_path) as pool:
        for window, carried, drawn, segments in cases:
            sample, engine = await run_task(pool, drawn, summary_task(window, carried))
            assert [decode_ids(sample.token_ids[span]) for span in sample.segments] == segments
            assert decode_ids(sample.token_ids[sample.loss_mask]) == drawn
            assert (sample.versions != NOT_SAMPLED).tolist() == sample.loss_mask.tolist()
            # Each drawn letter follows the ids of its request in exactly one segment.
            for request, letter in zip(engine.requests, drawn, strict=True):
                text = decode_ids(request.token_ids) + letter
                assert sum(segment.startswith(text) for segment in segments) == 1
            assert len({request.stream for request in engine.requests}) == len(drawn)
            assert {request.sampling.max_tokens for request in engine.requests} == {1}


async def test_a_trained_summary_is_a_turn_with_reward_0(tmp_path: Path) -> None:
    async with open_pool(tmp_path) as pool:
        sample, _ = await run_task(pool, "abAc!", summary_task(2))
        untrained, _ = await run_task(pool, "abAc!", summary_task(2, trained=False))
    assert sample.episode is not None
    assert sample.episode.replies == ("a", "b", "c", "!")
    assert sample.episode.summaries == ((2, "A"),)
    assert sample.episode.score.turn_rewards == (0.25, 0.25, 0.0, 0.25, 1.25)
    assert sample.episode.rewards == (0.25, 0.25, 0.25, 1.25)
    assert sample.states == ("start", "after a", "summary of after b", "after b", "after c")
    assert sample.text == "a\nb\nc\n!"
    scored = ScoredSample(sample, sample.episode.score)
    group = Group(3, sample.prompt, (scored,), PolicyVersion(4))
    [[returns]] = step_return([group], StepReturnAdvantage(gamma=0.5, whiten=False))
    assert np.asarray(returns)[sample.loss_mask].tolist() == [
        0.484375, 0.46875, 0.4375, 0.875, 1.25,
    ]  # fmt: skip
    # An untrained summary has the same tokens, but it is not a turn for credit assignment.
    assert np.array_equal(untrained.token_ids, sample.token_ids)
    assert np.array_equal(untrained.versions, sample.versions)
    assert np.array_equal(untrained.logprobs, sample.logprobs)
    assert decode_ids(untrained.token_ids[untrained.loss_mask]) == "abc!"
    assert untrained.response_length == sample.response_length == 5
    assert untrained.episode is not None
    rewards = sample.episode.rewards
    assert untrained.episode.score.turn_rewards == untrained.episode.rewards == rewards
    assert untrained.episode.summaries == sample.episode.summaries
    assert untrained.states == ("start", "after a", "after b", "after c")


async def test_a_sample_without_tokens_for_a_summary_is_truncated(tmp_path: Path) -> None:
    async with open_pool(tmp_path) as pool:
        short, engine = await run_task(pool, "abAc!", summary_task(2), max_tokens=2)
        # The request for a summary ends at the ninth token and leaves no space for a reply.
        full, _ = await run_task(pool, "abAc!", summary_task(2), max_length=9)
        just_enough, _ = await run_task(pool, "abAc!", summary_task(2), max_length=12)
    assert len(engine.requests) == 2
    for sample in (short, full):
        assert sample.truncated
        assert decode_ids(sample.token_ids) == "<7>a(a)b="
        assert sample.episode is not None
        assert sample.episode.score.turn_rewards == (0.25, 0.25)
        assert sample.episode.summaries == ()
    assert not just_enough.truncated


def test_a_new_segment_contains_the_drawn_ids_of_the_summary() -> None:
    codec = ChatCodec(tiny_tokenizer())
    summary = SummarySpec(request="sum up")
    task = EnvTask("Echo", {}, 7, window=1, summary=summary)
    transcript = Transcript.start([Turn("user", "go")], codec, task)
    end = codec.end_id
    assert end is not None
    transcript.add_reply(_make_completion([*codec.encode_text("hi")[1:], end]))
    transcript.add_observation("hi", [Turn("user", "there")])
    assert transcript.awaits_summary
    # The tokenizer does not encode their text to these ids: they hold an unknown character.
    drawn = [9, 3, 8, end]
    transcript.add_summary(_make_completion(drawn))
    assert not transcript.awaits_summary
    sample = transcript.to_sample(
        UID, prompt("task 7"), temperature=1.0, stop=StopReason.STOP, text=""
    )
    first, second = (sample.token_ids[span].tolist() for span in sample.segments)
    prompt_ids = [*codec.encode_prompt([Turn("user", "go")])]
    assert first == [
        *prompt_ids, *codec.encode_text("hi")[1:], end, *codec.encode_text("sum up|")[1:], *drawn,
    ]  # fmt: skip
    assert second == [*prompt_ids, *drawn, *codec.encode_text("there|")[1:]]
    assert sample.loss_mask.tolist() == [
        *[False] * 4, *[True] * 3, *[False] * 7, *[True] * 4, *[False] * len(second),
    ]  # fmt: skip


def _make_completion(token_ids: list[int]) -> Completion:
    count = len(token_ids)
    logprobs, versions = np.full(count, -1.0, np.float32), np.full(count, 4, np.int32)
    return Completion(UID, np.array(token_ids, np.int32), logprobs, versions, StopReason.STOP)


def test_metrics_count_episodes_once_and_leave_failed_ones_out_of_success() -> None:
    won = EpisodeRecord(
        "lake", {}, 1, ("a", "b"), Score(1.0), True, (True, False), (True, True), ((1, "x"),)
    )
    lost = EpisodeRecord("lake", {}, 1, ("a",), Score(0.0), False, (True,))
    broken = EpisodeRecord("lake", {}, 1, (), Score.failed("no"))
    counts = EpisodeCounts()
    assert counts.metrics() == {}
    for episode in (won, lost, broken):
        counts.add(episode)
    assert counts.metrics() == pytest.approx(
        {"env/episodes": 3, "env/success": 0.5, "env/turns": 1, "env/summaries": 1 / 3,
         "env/valid": 2 / 3, "env/effective": 1}
    )  # fmt: skip

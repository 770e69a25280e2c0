"""A sample in an environment: one growing sequence, observations masked, failures as statuses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollick.algorithms.turns import step_return
from rollick.config.advantages import StepReturnAdvantage
from rollick.config.schema import SummarySpec
from rollick.data.chat import ChatCodec
from rollick.envs.pool import EnvLimits, EnvPool
from rollick.errors import EnvError
from rollick.rollout.episode import OneEngine, stream_of
from rollick.rollout.playing import Player, show_example
from rollick.rollout.plays import PlayTally
from rollick.rollout.transcript import Task, Transcript
from rollick.testing.fakes import FakeCodec, FakeEngine, prompt
from rollick.testing.tiny import tiny_tokenizer
from rollick.types import (
    NOT_SAMPLED,
    Completion,
    Group,
    Played,
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
    """Says back what it heard, and pays a quarter for it; ends with the reply `!`."""
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


async def played(
    folder: Path,
    replies: str,
    *,
    environment: str = "Echo",
    turn_tokens: int = 1,
    window: int = 0,
    carried: int = 0,
    **limits: Any,
) -> tuple[Sample, FakeEngine]:
    """The sample of a policy that says these letters, one a turn."""
    task = Task(environment, {}, 7, turn_tokens, window, carried)
    async with open_pool(folder) as pool:
        return await played_in(pool, replies, task, **limits)


async def played_in(
    pool: EnvPool, replies: str, task: Task, *, max_tokens: int = 50, room: int = 100
) -> tuple[Sample, FakeEngine]:
    engine = FakeEngine(reply=lambda request: replies[len(engine.requests) - 1 :], version=4)
    player = Player(
        codec=FakeCodec(),
        pool=pool,
        task_of=lambda _: task,
        sampling=lambda _: Sampling(temperature=0.7, max_tokens=max_tokens),
        room=room,
        seed=1,
    )
    return await player.play(UID, prompt("task 7"), OneEngine(engine)), engine


def text_of(ids: Any) -> str:
    return FakeCodec().decode(ids)


async def test_turns_are_put_behind_each_other_and_only_what_was_drawn_is_trained_on(
    tmp_path: Path,
) -> None:
    made, engine = await played(tmp_path, "ab!")
    assert text_of(made.token_ids) == "<7>a(a)b(b)!"
    assert text_of(made.token_ids[made.loss_mask]) == "ab!"
    assert made.versions[made.loss_mask].tolist() == [4, 4, 4]
    assert set(made.versions[~made.loss_mask].tolist()) == {NOT_SAMPLED}
    assert made.logprobs.tolist() == [-1.0 * drawn for drawn in made.loss_mask]
    assert made.text == "a(a)b(b)!"
    assert made.prompt.text == "<7>"
    # What a turn asks for begins with all ids of the turn before, and what was drawn behind them.
    asked = [request.token_ids for request in engine.requests]
    for before, after in pairwise(asked):
        assert np.array_equal(after[: len(before)], before)
    assert [text_of(ids) for ids in asked] == ["<7>", "<7>a(a)", "<7>a(a)b(b)"]


async def test_a_sample_knows_states_rewards_and_what_it_takes_to_play_it_again(
    tmp_path: Path,
) -> None:
    made, _ = await played(tmp_path, "x!")
    assert made.states == ("start", "after x")
    assert made.played == Played(
        environment="Echo",
        options={},
        seed=7,
        replies=("x", "!"),
        score=Score(1.5, parts={"environment": 1.5}, turns=(0.25, 1.25)),
        success=True,
        valid=(False, True),
    )


async def test_each_turn_has_random_numbers_of_its_own_and_one_session(tmp_path: Path) -> None:
    _, engine = await played(tmp_path, "ab!")
    streams = [request.stream for request in engine.requests]
    assert streams[0] == stream_of(1, "train", UID)
    assert len(set(streams)) == 3
    assert [request.session for request in engine.requests] == ["g3.1"] * 3
    assert [request.group for request in engine.requests] == [3, None, None]


async def test_an_observation_without_text_still_parts_two_turns(tmp_path: Path) -> None:
    made, _ = await played(tmp_path, "_!")
    assert text_of(made.token_ids) == "<7>_\n!"
    assert made.loss_mask.tolist() == [False] * 3 + [True, False, True]


@pytest.mark.parametrize(
    ("replies", "status", "detail"),
    [
        ("a#", ScoreStatus.FAILED, "failed: ValueError: no good"),
        ("a?", ScoreStatus.FAILED, "garbage: step()"),
        ("a~", ScoreStatus.TIMEOUT, "timeout: no answer within 1 s"),
    ],
)
async def test_an_environment_that_fails_is_a_status_and_no_score(
    tmp_path: Path, replies: str, status: ScoreStatus, detail: str
) -> None:
    made, _ = await played(tmp_path, replies)
    assert made.played is not None
    score = made.played.score
    assert (score.status, np.isnan(score.value), made.played.success) == (status, True, False)
    assert f"environment Echo {detail}" in score.detail


async def test_an_environment_that_does_not_even_begin_costs_no_generation(tmp_path: Path) -> None:
    made, engine = await played(tmp_path, "a", environment="Broken")
    assert engine.requests == []
    assert not made.loss_mask.any()
    assert made.played is not None
    assert "no start" in made.played.score.detail


@pytest.mark.parametrize(("limit", "text"), [({"max_tokens": 2}, "<7>a(a)b(b)"), ({"room": 8}, "")])
async def test_a_sample_without_room_for_another_token_is_truncated_and_keeps_what_it_earned(
    tmp_path: Path, limit: dict[str, int], text: str
) -> None:
    made, _ = await played(tmp_path, "ab!", **limit)
    assert made.truncated
    assert text_of(made.token_ids) == (text or "<7>a(a)b(b)")
    assert made.played is not None
    assert made.played.score.turns == (0.25, 0.25)
    assert len(made.states) == 2


async def test_what_the_solver_does_is_the_sequence_that_a_policy_would_have_drawn(
    tmp_path: Path,
) -> None:
    made, _ = await played(tmp_path, "ab!")
    async with open_pool(tmp_path) as pool:
        [(ids, mask)] = await show_example(
            prompt("task 7"), codec=FakeCodec(), pool=pool, task_of=lambda _: Task("Echo", {}, 7)
        )
        with pytest.raises(EnvError, match="its solver knows no reply"):
            await show_example(
                prompt("task 7"),
                codec=FakeCodec(),
                pool=pool,
                task_of=lambda _: Task("Speechless", {}, 7),
            )
    assert np.array_equal(ids, made.token_ids)
    assert np.array_equal(mask, made.loss_mask)


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
async def test_turns_that_slide_out_of_sight_start_a_new_segment(
    tmp_path: Path, window: int, carried: int, segments: list[str]
) -> None:
    made, engine = await played(tmp_path, "abc!", window=window, carried=carried)
    assert [text_of(made.token_ids[span]) for span in made.segments] == segments
    # What was drawn is trained on once; what is carried over is only read.
    assert text_of(made.token_ids[made.loss_mask]) == "abc!"
    assert [text_of(made.token_ids[span][made.loss_mask[span]])[-1] for span in made.segments] == [
        text[-1] for text in segments
    ]
    for request, reply in zip(engine.requests, "abc!", strict=True):
        assert any(text.startswith(text_of(request.token_ids) + reply) for text in segments)
    assert made.text == ("a\nb\nc\n!" if len(segments) > 1 else "a(a)b(b)c(c)!")
    assert made.played is not None
    assert made.played.score.turns == (0.25, 0.25, 0.25, 1.25)


async def test_room_is_that_of_a_segment(tmp_path: Path) -> None:
    made, _ = await played(tmp_path, "abc!", window=1, room=7)
    assert not made.truncated
    assert len(made.token_ids) > 7


async def test_a_solver_is_shown_in_the_segments_that_a_policy_would_see(tmp_path: Path) -> None:
    made, _ = await played(tmp_path, "ab!", window=2, carried=1)
    async with open_pool(tmp_path) as pool:
        shown = await show_example(
            prompt("task 7"),
            codec=FakeCodec(),
            pool=pool,
            task_of=lambda _: Task("Echo", {}, 7, window=2, carried=1),
        )
    assert [text_of(ids) for ids, _ in shown] == ["<7>a(a)b", "<7>(a)b(b)!"]
    for (ids, mask), span in zip(shown, made.segments, strict=True):
        assert np.array_equal(ids, made.token_ids[span])
        assert np.array_equal(mask, made.loss_mask[span])


def summing_up(window: int, carried: int = 0, *, trained: bool = True) -> Task:
    summary = SummarySpec(tokens=1, request="=", trained=trained)
    return Task("Echo", {}, 7, turn_tokens=1, window=window, carried=carried, summary=summary)


async def test_turns_that_go_out_of_sight_are_summed_up_by_the_policy_itself(
    tmp_path: Path,
) -> None:
    # A turn is a letter and its echo; capitals are summaries, which are asked for with "=".
    cases = [
        (1, 0, "aAbB!", ["<7>a=A", "<7>A(a)b=B", "<7>B(b)!"]),
        (2, 0, "abAcdB!", ["<7>a(a)b=A", "<7>A(b)c(c)d=B", "<7>B(d)!"]),
        (2, 1, "abAcB!", ["<7>a(a)b=A", "<7>A(a)b(b)c=B", "<7>B(b)c(c)!"]),
        (3, 0, "ab!", ["<7>a(a)b(b)!"]),
        (3, 0, "abcA_!", ["<7>a(a)b(b)c=A", "<7>A(c)_\n!"]),
    ]
    async with open_pool(tmp_path) as pool:
        for window, carried, drawn, segments in cases:
            made, engine = await played_in(pool, drawn, summing_up(window, carried))
            assert [text_of(made.token_ids[span]) for span in made.segments] == segments
            assert text_of(made.token_ids[made.loss_mask]) == drawn
            assert (made.versions != NOT_SAMPLED).tolist() == made.loss_mask.tolist()
            # Whatever the policy drew came right behind the ids that it was asked with.
            for request, letter in zip(engine.requests, drawn, strict=True):
                asked = text_of(request.token_ids) + letter
                assert sum(segment.startswith(asked) for segment in segments) == 1
            assert len({request.stream for request in engine.requests}) == len(drawn)
            assert {request.sampling.max_tokens for request in engine.requests} == {1}


async def test_a_summary_that_is_trained_on_is_a_turn_that_earns_nothing(tmp_path: Path) -> None:
    async with open_pool(tmp_path) as pool:
        made, _ = await played_in(pool, "abAc!", summing_up(2))
        unread, _ = await played_in(pool, "abAc!", summing_up(2, trained=False))
    assert made.played is not None
    assert made.played.replies == ("a", "b", "c", "!")
    assert made.played.summaries == ((2, "A"),)
    assert made.played.score.turns == (0.25, 0.25, 0.0, 0.25, 1.25)
    assert made.played.rewards == (0.25, 0.25, 0.25, 1.25)
    assert made.states == ("start", "after a", "summary of after b", "after b", "after c")
    assert made.text == "a\nb\nc\n!"
    scored = ScoredSample(made, made.played.score)
    group = Group(3, made.prompt, (scored,), PolicyVersion(4))
    [[returns]] = step_return([group], StepReturnAdvantage(gamma=0.5, whiten=False))
    assert np.asarray(returns)[made.loss_mask].tolist() == [
        0.484375, 0.46875, 0.4375, 0.875, 1.25,
    ]  # fmt: skip
    # Only read: the same tokens, drawn by the policy all the same, but no turn of the credit.
    assert np.array_equal(unread.token_ids, made.token_ids)
    assert np.array_equal(unread.versions, made.versions)
    assert np.array_equal(unread.logprobs, made.logprobs)
    assert text_of(unread.token_ids[unread.loss_mask]) == "abc!"
    assert unread.response_length == made.response_length == 5
    assert unread.played is not None
    assert unread.played.score.turns == unread.played.rewards == made.played.rewards
    assert unread.played.summaries == made.played.summaries
    assert unread.states == ("start", "after a", "after b", "after c")


async def test_without_tokens_for_a_summary_the_sample_is_truncated(tmp_path: Path) -> None:
    async with open_pool(tmp_path) as pool:
        made, engine = await played_in(pool, "abAc!", summing_up(2), max_tokens=2)
        # The request to sum up ends at the ninth token, so there is no room behind it.
        full, _ = await played_in(pool, "abAc!", summing_up(2), room=9)
        just_enough, _ = await played_in(pool, "abAc!", summing_up(2), room=12)
    assert len(engine.requests) == 2
    for sample in (made, full):
        assert sample.truncated
        assert text_of(sample.token_ids) == "<7>a(a)b="
        assert sample.played is not None
        assert sample.played.score.turns == (0.25, 0.25)
        assert sample.played.summaries == ()
    assert not just_enough.truncated


def test_a_summary_is_read_with_the_very_ids_that_were_drawn() -> None:
    codec = ChatCodec(tiny_tokenizer())
    summary = SummarySpec(request="sum up")
    task = Task("Echo", {}, 7, window=1, summary=summary)
    transcript = Transcript.of([Turn("user", "go")], codec, task)
    end = codec.end_id
    assert end is not None
    transcript.draw(_drawn([*codec.encode_text("hi")[1:], end]))
    transcript.observe("hi", [Turn("user", "there")])
    assert transcript.wants_summary
    # No tokenizer would make these ids of the summary's text: an unknown character is in it.
    drawn = [9, 3, 8, end]
    transcript.sum_up(_drawn(drawn))
    assert not transcript.wants_summary
    made = transcript.sample(UID, prompt("task 7"), temperature=1.0, stop=StopReason.STOP, text="")
    first, second = (made.token_ids[span].tolist() for span in made.segments)
    asked = [*codec.encode_prompt([Turn("user", "go")])]
    assert first == [
        *asked, *codec.encode_text("hi")[1:], end, *codec.encode_text("sum up|")[1:], *drawn,
    ]  # fmt: skip
    assert second == [*asked, *drawn, *codec.encode_text("there|")[1:]]
    assert made.loss_mask.tolist() == [
        *[False] * 4, *[True] * 3, *[False] * 7, *[True] * 4, *[False] * len(second),
    ]  # fmt: skip


def _drawn(token_ids: list[int]) -> Completion:
    count = len(token_ids)
    logprobs, versions = np.full(count, -1.0, np.float32), np.full(count, 4, np.int32)
    return Completion(UID, np.array(token_ids, np.int32), logprobs, versions, StopReason.STOP)


def test_the_tally_counts_episodes_once_and_leaves_failed_ones_out_of_success() -> None:
    tally = PlayTally()
    won = Played(
        "lake", {}, 1, ("a", "b"), Score(1.0), True, (True, False), (True, True), ((1, "x"),)
    )
    lost = Played("lake", {}, 1, ("a",), Score(0.0), False, (True,))
    broken = Played("lake", {}, 1, (), Score.failed("no"))
    for episode in (won, lost, broken):
        tally.add(episode)
    assert tally.take() == pytest.approx(
        {"env/episodes": 3, "env/success": 0.5, "env/turns": 1, "env/summaries": 1 / 3,
         "env/valid": 2 / 3, "env/effective": 1}
    )  # fmt: skip
    assert tally.take() == {}

"""A sample in an environment: one growing sequence, observations masked, failures as statuses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollick.envs.pool import EnvLimits, EnvPool
from rollick.errors import EnvError
from rollick.rollout.episode import OneEngine, stream_of
from rollick.rollout.playing import Player, Task, show_example
from rollick.rollout.plays import PlayTally
from rollick.testing.fakes import FakeCodec, FakeEngine, prompt
from rollick.types import NOT_SAMPLED, Played, Sample, SampleId, Sampling, Score, ScoreStatus

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
    engine = FakeEngine(reply=lambda request: replies[len(engine.requests) - 1 :], version=4)
    sampling = Sampling(temperature=0.7, max_tokens=limits.get("max_tokens", 50))
    async with open_pool(folder) as pool:
        player = Player(
            codec=FakeCodec(),
            pool=pool,
            task_of=lambda prompt: Task(environment, {}, 7, turn_tokens, window, carried),
            sampling=lambda _: sampling,
            room=limits.get("room", 100),
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


def test_the_tally_counts_episodes_once_and_leaves_failed_ones_out_of_success() -> None:
    tally = PlayTally()
    won = Played("lake", {}, 1, ("a", "b"), Score(1.0), True, (True, False), (True, True))
    lost = Played("lake", {}, 1, ("a",), Score(0.0), False, (True,))
    broken = Played("lake", {}, 1, (), Score.failed("no"))
    for episode in (won, lost, broken):
        tally.add(episode)
    assert tally.take() == pytest.approx(
        {"env/episodes": 3, "env/success": 0.5, "env/turns": 1, "env/valid": 2 / 3,
         "env/effective": 1}
    )  # fmt: skip
    assert tally.take() == {}

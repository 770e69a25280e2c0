"""Batches, cache, budgets, versions and counts of the reward pool, with real child processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollick.config.schema import RewardSpec
from rollick.errors import RewardError
from rollick.rewards.base import Declaration, call_batch, declaration_of, declare
from rollick.rewards.call_counts import RewardCallCounts
from rollick.rewards.pool import RewardPool, ScoreCache, content_key
from rollick.testing.fakes import prompt, sample
from rollick.types import Sample, Score, ScoreStatus, StopReason

REWARDS = '''
import os, time
from rollick.rewards.base import declare
from rollick.types import Score

def together(completion, answer, scale=1.0):
    """Tells how many came at once."""
    if "raise" in completion:
        raise ValueError("no good")
    if "hang" in completion:
        time.sleep(600)
    if "exit" in completion:
        os._exit(3)
    return [Score(scale * (text == wanted), metrics={"size": len(completion)})
            for text, wanted in zip(completion, answer)]

declare(together, batch=8)

def counted(completion, folder):
    with open(os.path.join(folder, "calls"), "a") as file:
        file.write("x")
    return len(completion)

declare(counted, cache=True, version="7")

def plain(completion):
    if completion == "raise":
        raise ValueError("no good")
    if completion == "hang":
        time.sleep(600)
    return 1.0
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def make_sample(text: str, **row: Any) -> Sample:
    return sample(text, of=prompt(**row))


def open_pool(folder: Path, *names: str, timeout_s: float = 60.0, processes: int = 1) -> Any:
    rewards = {name: f"mine.py:{name}" for name in names}
    return RewardPool.open(rewards, processes=processes, timeout_s=timeout_s, base=folder)


async def score_all(pool: RewardPool, specs: list[RewardSpec], *texts: str) -> list[Score]:
    scores = [pool.score(make_sample(text, answer="a"), specs) for text in texts]
    return await asyncio.gather(*scores)


async def test_a_batch_reward_gets_all_waiting_samples(folder: Path):
    spec = [RewardSpec(name="together", options={"scale": 2.0})]
    async with open_pool(folder, "together") as pool:
        scores = await score_all(pool, spec, *"abcabcabcabc")
        sizes = [score.metrics["together/size"] for score in scores]
    assert [score.value for score in scores] == [2.0, 0.0, 0.0] * 4
    assert max(sizes) == 8
    assert scores[0].parts == {"together": 2.0}


async def test_if_a_batch_raises_only_the_causing_sample_fails(folder: Path):
    async with open_pool(folder, "together") as pool:
        scores = await score_all(pool, [RewardSpec(name="together")], "a", "raise", "b", "a")
    assert [score.ok for score in scores] == [True, False, True, True]
    assert "no good" in scores[1].detail


@pytest.mark.parametrize(
    ("deed", "status"), [("hang", ScoreStatus.TIMEOUT), ("exit", ScoreStatus.FAILED)]
)
async def test_if_a_batch_kills_its_process_only_the_causing_sample_fails(
    folder: Path, deed: str, status: ScoreStatus
):
    async with open_pool(folder, "together", timeout_s=1.0) as pool:
        scores = await score_all(pool, [RewardSpec(name="together")], "a", deed, "b", "a")
        assert [score.ok for score in scores] == [True, False, True, True]
        assert scores[1].status is status
        assert pool.call_counts.take_metrics()["reward/failed/together"] == 1


async def test_a_batch_reward_and_a_plain_reward_of_one_sample_are_summed(folder: Path):
    specs = [RewardSpec(name="together"), RewardSpec(name="plain", weight=0.5)]
    async with open_pool(folder, "together", "plain") as pool:
        scores = await score_all(pool, specs, "a", "b")
    assert [score.value for score in scores] == [1.5, 0.5]
    assert scores[0].parts == {"together": 1.0, "plain": 1.0}


async def test_every_score_has_its_version_and_isolation(folder: Path):
    async with open_pool(folder, "counted", "plain") as pool:
        specs = [RewardSpec(name="counted", options={"folder": str(folder)})]
        score = await pool.score(make_sample("ab"), specs)
        plain_score = await pool.score(make_sample("ab"), [RewardSpec(name="plain")])
    assert (score.version, score.isolation) == ("counted@7", "process")
    assert plain_score.version.startswith("plain@")
    assert len(plain_score.version) == len("plain@") + 8


async def test_equal_samples_are_scored_once_if_the_reward_allows_it(folder: Path):
    spec = RewardSpec(name="counted", options={"folder": str(folder)})
    calls = folder / "calls"
    async with open_pool(folder, "counted") as pool:
        first = await pool.score(make_sample("ab", answer=1), [spec])
        cached_score = await pool.score(make_sample("ab", answer=1), [spec])
        assert (first.value, cached_score.value, calls.read_text()) == (2.0, 2.0, "x")
        assert cached_score.seconds == 0.0
        await pool.score(make_sample("ab", answer=2), [spec])
        await pool.score(make_sample("abc", answer=1), [spec])
        assert calls.read_text() == "xxx"
        await pool.score(make_sample("ab", answer=1), [spec.model_copy(update={"cache": False})])
        assert calls.read_text() == "xxxx"
        metrics = pool.call_counts.take_metrics()
    assert (metrics["reward/calls/counted"], metrics["reward/cached/counted"]) == (4, 1)
    assert pool.stats.calls == 5


async def test_a_recipe_can_enable_the_cache_of_a_reward_that_does_not_declare_it(folder: Path):
    async with open_pool(folder, "plain") as pool:
        spec = [RewardSpec(name="plain", cache=True)]
        await pool.score(make_sample("a"), spec)
        await pool.score(make_sample("a"), spec)
        assert pool.call_counts.take_metrics()["reward/cached/plain"] == 1


async def test_a_reward_over_its_error_budget_stops_the_run(folder: Path):
    spec = [RewardSpec(name="plain", error_budget=0.5)]
    async with open_pool(folder, "plain") as pool:
        for n in range(19):
            await pool.score(make_sample("raise" if n % 2 else "fine"), spec)
        await pool.score(make_sample("raise"), spec)
        with pytest.raises(RewardError, match=r"11 of the last 21 calls.*no good"):
            await pool.score(make_sample("raise"), spec)


async def test_counts_are_exact_when_some_raise_and_some_hang(folder: Path):
    texts = ["raise" if n % 10 < 3 else "fine" for n in range(40)]
    texts[5] = texts[25] = "hang"  # 5% of the calls
    async with open_pool(folder, "plain", timeout_s=0.5, processes=2) as pool:
        scores = await score_all(pool, [RewardSpec(name="plain")], *texts)
        metrics = pool.call_counts.take_metrics()
    assert [score.ok for score in scores] == [text == "fine" for text in texts]
    assert metrics["reward/calls/plain"] == 40
    assert metrics["reward/failed/plain"] == texts.count("raise") + 2
    assert (pool.stats.failures, pool.stats.timeouts) == (texts.count("raise") + 2, 2)


def test_a_batch_reward_gets_lists_except_for_its_options():
    arguments: dict[str, Any] = {}

    def reward(completion: Any, answer: Any, note: Any = "none", scale: float = 1.0) -> list[float]:
        arguments.update(completion=completion, answer=answer, note=note, scale=scale)
        return [scale, 0]

    samples = [make_sample("a", answer=1, note="x"), make_sample("b", answer=2)]
    scores = call_batch(reward, samples, {"scale": 3.0})
    assert [score.value for score in scores] == [3.0, 0.0]
    assert arguments == {
        "completion": ["a", "b"],
        "answer": [1, 2],
        "note": ["x", "none"],
        "scale": 3.0,
    }


@pytest.mark.parametrize("answer", [1.0, [1.0], "ab", {"a": 1, "b": 2}, None])
def test_a_batch_reward_that_does_not_return_a_list_of_its_size_fails(answer: Any):
    scores = call_batch(lambda completion: answer, [make_sample("a"), make_sample("b")])
    ok = answer == [1.0]  # each sample is retried alone, and its result is a list of one
    assert [score.ok for score in scores] == [ok, ok]


def test_a_declaration_has_the_version_of_the_source():
    def one(completion: str) -> float:
        return 1.0

    assert (
        declaration_of(one).version
        == declaration_of(test_a_batch_reward_gets_lists_except_for_its_options).version
    )
    declare(one, batch=4, cache=True, version="2")
    assert declaration_of(one) == Declaration(4, True, "2")


def test_a_reward_that_takes_the_sample_is_never_cached():
    def one(sample: Sample) -> float:
        return 1.0

    assert not declaration_of(declare(one, cache=True)).cache


def test_a_cache_key_covers_all_that_a_reward_can_see():
    spec = RewardSpec(name="plain")
    base = make_sample("a", answer=1)
    same = content_key(sample("a", uid=(9, 9), of=prompt(answer=1), version=4), spec, version="1")
    assert content_key(base, spec, version="1") == same
    others = [
        content_key(make_sample("b", answer=1), spec, version="1"),
        content_key(make_sample("a", answer=2), spec, version="1"),
        content_key(make_sample("a", answer="1"), spec, version="1"),
        content_key(base, spec, version="2"),
        content_key(base, spec.model_copy(update={"options": {"k": 1}}), version="1"),
        content_key(base, spec.model_copy(update={"name": "other"}), version="1"),
        content_key(sample("a", of=prompt("x", answer=1)), spec, version="1"),
        content_key(sample("a", of=prompt(answer=1), stop=StopReason.LENGTH), spec, version="1"),
    ]
    assert len({same, *others}) == 9
    assert content_key(make_sample("a", answer=object()), spec, version="1") is None


def test_the_cache_is_bounded_and_evicts_the_least_recently_used():
    cache = ScoreCache(limit=2)
    for key in (b"1", b"2"):
        cache.put(key, Score(1.0, metrics={"cost": 1.0}, seconds=2.0))
    assert cache.get(b"1") == Score(1.0)
    cache.put(b"3", Score(3.0))
    cache.put(b"4", Score.failed("not kept"))
    assert [cache.get(key) is not None for key in (b"1", b"2", b"3", b"4")] == [
        True,
        False,
        True,
        False,
    ]


def test_means_cover_the_step_and_totals_the_run():
    counts = RewardCallCounts()
    counts.count("judge", Score(1.0, metrics={"cost": 2.0}, seconds=1.0))
    assert counts.take_metrics()["reward/total/judge/cost"] == 2.0
    counts.count("judge", Score(1.0, metrics={"cost": 4.0}))
    metrics = counts.take_metrics()
    assert (metrics["reward/mean/judge/cost"], metrics["reward/total/judge/cost"]) == (4.0, 6.0)
    assert counts.take_metrics() == {}

"""A rollout whose prompt stream adapts to its scored groups: timing must not change the prompts."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from fakes import FakeCodec, FakeEngine

from rollick.config.schema import RlDataConfig, RlvrDomain, RolloutConfig
from rollick.data.prompts import PromptStream
from rollick.episodes.single_turn import single_turn
from rollick.rollout.deps import RolloutDeps, SavedRollout
from rollick.rollout.scheduler import Rollout
from rollick.types import Group, PolicyVersion, Request, Sample, Sampling, Score, stable_hash

SELECTION = {"near_half_window": 8, "retire": {"pass_rate": 0.9, "min_tries": 4}}


def open_stream() -> PromptStream:
    domain = RlvrDomain(source="object:toy")
    data = RlDataConfig[RlvrDomain].model_validate(
        {"domains": {"toy": domain}, "selection": SELECTION}
    )
    rows = [{"prompt": f"{n}?", "rate": n % 4 / 4} for n in range(12)]
    return PromptStream.open(data, seed=5, base=None, objects={"toy": rows})


async def score_by_rate(sample: Sample) -> Score:
    """1 with the probability of the prompt's rate, else 0; depends only on the sample's id."""
    return Score(float(stable_hash(*sample.uid) % 1000 / 1000 < sample.prompt.row["rate"]))


def drop_equal_scores(group: Group) -> str | None:
    return None if len(set(group.scores)) > 1 else "no_signal"


async def run_rollout(
    stream: PromptStream,
    *,
    steps: int,
    seconds: Callable[[Request], float],
    on_scored: Callable[[Group], None] | None = None,
    saved: dict[str, Any] | None = None,
    linger_s: float = 0.0,
) -> tuple[list[list[tuple[int, str]]], dict[str, Any]]:
    """The (group, prompt) of each batch, and the state `linger_s` seconds into the next step."""
    engines = [FakeEngine(seconds=seconds, slots=3) for _ in range(2)]
    state = saved or {"version": 0}
    for engine in engines:
        await engine.commit_shared(PolicyVersion(state["version"]))
    batches: list[list[tuple[int, str]]] = []
    deps = RolloutDeps(
        config=RolloutConfig(groups_per_step=4, group_size=4),
        next_prompt=stream.next,
        episode=single_turn(FakeCodec(), Sampling(max_tokens=4), seed=1),
        score=score_by_rate,
        stuck_after_s=20,
        drop_reason=drop_equal_scores,
        on_group_scored=on_scored or stream.record_group,
    )
    resumed = SavedRollout(state.get("rollout"), state.get("groups", ()))
    async with Rollout.open(deps, engines, version=state["version"], saved=resumed) as rollout:
        for _ in range(steps):
            groups = await rollout.take()
            stream.update_selection()
            batches.append([(group.uid, group.prompt.uid) for group in groups])
            version = PolicyVersion(rollout.version + 1)
            for engine in engines:
                await engine.commit_shared(version)
            rollout.trained(groups, version)
            rollout.published(version)
        await asyncio.sleep(linger_s)
        snapshot = {
            "rollout": rollout.state(),
            "prompts": stream.state(),
            "version": rollout.version,
        }
        return batches, json.loads(json.dumps(snapshot)) | {"groups": rollout.untrained()}


def make_random_latency(seed: int) -> Callable[[Request], float]:
    draw = random.Random(seed)
    return lambda request: draw.random() * 0.003


async def test_every_group_is_reported_once_whether_kept_or_dropped():
    stream, reported = open_stream(), list[Group]()
    batches, _ = await run_rollout(
        stream, steps=4, seconds=lambda request: 0.0, on_scored=reported.append
    )
    kept = [uid for batch in batches for uid, _ in batch]
    groups_of_steps = sorted(
        (group for group in reported if group.uid <= kept[-1]), key=lambda g: g.uid
    )
    assert [group.uid for group in groups_of_steps] == list(range(kept[-1] + 1))
    assert [group.uid for group in groups_of_steps if drop_equal_scores(group) is None] == kept
    assert len(kept) < len(groups_of_steps), "none was dropped, so this shows nothing of it"


@pytest.mark.parametrize("seed", range(3))
async def test_the_prompts_do_not_depend_on_which_group_was_scored_first(seed: int):
    plain, _ = await run_rollout(open_stream(), steps=12, seconds=lambda request: 0.0)
    shuffled, _ = await run_rollout(open_stream(), steps=12, seconds=make_random_latency(seed))
    assert shuffled == plain


@pytest.mark.parametrize("linger_s", [0.0, 0.003, 0.006])
async def test_a_resumed_rollout_continues_with_the_same_prompts(linger_s: float):
    full, _ = await run_rollout(open_stream(), steps=8, seconds=make_random_latency(1))
    first, saved = await run_rollout(
        open_stream(), steps=3, seconds=make_random_latency(2), linger_s=linger_s
    )
    stream = open_stream()
    stream.restore(saved["prompts"])
    second, _ = await run_rollout(stream, steps=5, seconds=make_random_latency(3), saved=saved)
    assert first + second == full

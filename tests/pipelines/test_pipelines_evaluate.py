"""The metrics of an evaluation, checked by hand and by brute force."""

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import FakeCodec, FakeEngine

from rollick.commands import evaluate
from rollick.commands.evaluate import evaluate_model
from rollick.config.load import LoadedRecipe
from rollick.errors import ConfigError, EngineLost, RollickError
from rollick.pipelines.episodes import Episodes
from rollick.pipelines.evaluate import evaluate_prompts, pass_at_k, summarise, wilson
from rollick.pipelines.run import wait_for
from rollick.testing.batches import recipe_of
from rollick.testing.fakes import group, prompt
from rollick.types import Score


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("passed", range(6))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passed: int, k: int) -> None:
    outcomes = [n < passed for n in range(5)]
    subsets = list(combinations(outcomes, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(5, passed, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_2_of_4_samples_with_one_pass_is_a_half() -> None:
    assert pass_at_k(4, 1, 2) == 0.5


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@4 needs at least 4 samples, there are 3"):
        pass_at_k(3, 1, 4)


@pytest.mark.parametrize(
    ("passed", "count", "low", "high"),
    [
        (5, 10, 0.2366, 0.7634),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_the_interval_is_wilsons(passed: int, count: int, low: float, high: float) -> None:
    estimate = wilson(passed / count, count)
    assert estimate.value == passed / count
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)


def test_without_samples_the_interval_is_zero_to_one() -> None:
    estimate = wilson(float("nan"), 0)
    assert isnan(estimate.value)
    assert (estimate.low, estimate.high) == (0.0, 1.0)


SUMS, WORDS = prompt(uid="sums/0", domain="sums"), prompt(uid="words/0", domain="words")
GROUPS = [
    group([1, 0, None, 0], of=SUMS, uid=0, texts=["2", "3", "44", "5"]),
    group([1, 1, 1, 1], of=SUMS, uid=1),
    group([0.5, 0, 0, 0], of=WORDS, uid=2),
]


def test_samples_that_could_not_be_scored_are_left_out_and_counted() -> None:
    sums = summarise(GROUPS, pass_k=(1, 2, 4), threshold=0.999).domains["sums"]
    assert (sums.prompts, sums.samples, sums.failed) == (2, 8, 1)
    assert sums.score == pytest.approx(5 / 7)
    assert sums.response_length == pytest.approx(9 / 8)
    # One pass in three scored samples: pass@1 = 1/3, pass@2 = 1 - 1/3; too few for pass@4.
    assert sums.pass_at[1].value == pytest.approx((1 / 3 + 1) / 2)
    assert sums.pass_at[2].value == pytest.approx((2 / 3 + 1) / 2)
    assert sums.pass_at[4].value == 1.0


def test_a_score_below_the_threshold_is_no_pass() -> None:
    report = summarise(GROUPS, pass_k=(1,), threshold=0.5)
    assert report.domains["words"].pass_at[1].value == 0.25
    assert summarise(GROUPS, pass_k=(1,), threshold=0.51).domains["words"].pass_at[1].value == 0


def test_the_overall_score_is_a_mean_over_prompts() -> None:
    overall = summarise(GROUPS, pass_k=(1,), threshold=0.999).overall
    assert (overall.prompts, overall.samples, overall.failed) == (3, 12, 1)
    assert overall.pass_at[1].value == pytest.approx((1 / 3 + 1 + 0) / 3)


def test_metrics_have_half_the_width_of_the_interval() -> None:
    report = summarise(GROUPS, pass_k=(1,), threshold=0.999)
    metrics = report.metrics()
    estimate = report.overall.pass_at[1]
    assert metrics["eval/pass@1"] == estimate.value
    assert metrics["eval/pass@1_interval"] == pytest.approx((estimate.high - estimate.low) / 2)
    assert {"eval/sums/pass@1", "eval/words/score", "eval/truncated"} <= set(metrics)


def test_metrics_keep_the_interval_of_every_k() -> None:
    report = summarise(GROUPS, pass_k=(1, 2), threshold=0.999)
    figures = report.figures()
    assert list(figures) == ["sums", "words", "all"]
    for k in (1, 2):
        estimate = report.overall.pass_at[k]
        interval = [figures["all"][name] for name in (f"pass@{k}", f"low@{k}", f"high@{k}")]
        assert interval == [estimate.value, estimate.low, estimate.high]


def test_unscored_samples_have_no_score_instead_of_zero() -> None:
    report = summarise([group([None, None], of=SUMS)], pass_k=(1,), threshold=0.999)
    assert isnan(report.overall.score)
    assert isnan(report.metrics()["eval/pass@1"])
    assert report.overall.failed == 2


def test_the_report_is_plain_json() -> None:
    failed = group([None], of=prompt(uid="odd/0", domain="odd"), uid=9)
    report = summarise([*GROUPS, failed], pass_k=(1,), threshold=0.999)
    parsed = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert parsed["domains"]["odd"]["score"] is None
    assert parsed["domains"]["sums"]["failed"] == 1
    assert parsed["overall"]["pass_at"]["1"]["value"] == pytest.approx((1 / 3 + 1 + 0) / 3)


def test_pass_at_1_is_reported_even_if_only_other_k_are_configured() -> None:
    report = summarise(GROUPS, pass_k=(2,), threshold=0.999)
    assert list(report.overall.pass_at) == [1, 2]
    assert "eval/pass@1" in report.metrics()


def test_a_recipe_that_never_generates_cannot_evaluate(toy: Callable[..., LoadedRecipe]) -> None:
    domain = {"source": "rollick.testing.toys:letter_rows", "completion": "answer"}
    loaded = toy(pipeline="sft", data={"domains": {"letters": domain}})
    with pytest.raises(ConfigError, match=r"generates only to validate.*data\.validation"):
        wait_for(evaluate_model(loaded, checkpoint=None))


def test_a_signal_stops_an_evaluation(
    toy: Callable[..., LoadedRecipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(run: object, prompts: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(60)

    monkeypatch.setattr(evaluate, "evaluate_prompts", hang)
    with pytest.raises(RollickError, match="a signal stopped the evaluation"):
        wait_for(evaluate_model(toy(), checkpoint=None))


class FakeGenerators:
    """Engines, of which some may be lost; the engines `gained` join in `wait_for_engine`."""

    def __init__(self, *engines: FakeEngine, gained: tuple[FakeEngine, ...] = ()) -> None:
        self.engines, self.gained = list(engines), gained

    @property
    def alive(self) -> list[FakeEngine]:
        return [engine for engine in self.engines if not engine.lost]

    async def wait_for_engine(self, timeout_s: float) -> bool:
        if not self.alive:
            self.engines.extend(self.gained)
        return bool(self.alive)


def make_run(generators: FakeGenerators) -> Any:
    """An open run with these engines; every sample has the score 1."""
    recipe = recipe_of(Path("m"))

    async def score(sample: Any) -> Score:
        return Score(1.0)

    return SimpleNamespace(
        recipe=recipe,
        roles=SimpleNamespace(generators=generators),
        state=SimpleNamespace(weights_lock=asyncio.Lock()),
        episodes=Episodes(cast("Any", FakeCodec()), None, None, max_length=64, seed=0),
        scoring=SimpleNamespace(score_held_out=score, held_out=recipe.data.domains, rewards=None),
        telemetry=SimpleNamespace(view=SimpleNamespace(count_samples=lambda *counts: None)),
        status=SimpleNamespace(follow=lambda rollout, rewards: nullcontext()),
    )


async def test_a_validation_waits_until_a_restarted_engine_has_the_weights() -> None:
    restarted, other = FakeEngine(), FakeEngine(version=3)
    run = make_run(FakeGenerators(restarted))
    async with run.state.weights_lock:
        validation = asyncio.create_task(evaluate_prompts(run, [prompt(domain="none")]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not restarted.requests
        restarted.lose()  # Its publish failed, and another engine replaced it.
        run.roles.generators.engines.append(other)
    assert [group.start_version for group in (await validation).groups] == [3]


async def test_a_validation_that_starts_without_an_engine_waits_for_one() -> None:
    run = make_run(FakeGenerators(gained=(FakeEngine(),)))
    assert len((await evaluate_prompts(run, [prompt(domain="none")])).groups) == 1


async def test_a_validation_without_engines_is_an_error_that_a_retry_may_solve() -> None:
    with pytest.raises(EngineLost, match="all engines are lost"):
        await evaluate_prompts(make_run(FakeGenerators()), [prompt(domain="none")])

"""Failed scores that stop a run, and its exit code: EXIT_RETRY if a server was unavailable,
EXIT_MISTAKE if a reward is broken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollick.config.schema import RewardSpec, RolloutConfig
from rollick.errors import EXIT_MISTAKE, EXIT_RETRY, RewardError, RollickError, ServiceUnavailable
from rollick.rewards.call_counts import RewardCallCounts
from rollick.rollout.limits import check_step
from rollick.rollout.stats import StepWindow
from rollick.testing.fakes import sample
from rollick.types import Score, ScoredSample, ScoreStatus

CONFIG = RolloutConfig(groups_per_step=2, group_size=5, max_failed_scores=0.2)
GOOD, BROKEN = Score(1.0), Score.failed("a bug")
UNREACHABLE = Score.failed("no judge", status=ScoreStatus.UNAVAILABLE)


def check_scores(scores: Sequence[Score]) -> None:
    window = StepWindow()
    for score in scores:
        window.add(ScoredSample(sample("4"), score), generate_s=1.0, reward_s=1.0)
    check_step(window, CONFIG, 3, has_batch=True, exhausted=False)


def test_a_step_may_have_a_few_samples_without_a_score() -> None:
    check_scores([GOOD] * 8 + [UNREACHABLE, BROKEN])


@pytest.mark.parametrize(
    ("failures", "error", "code"),
    [
        ([UNREACHABLE] * 3, ServiceUnavailable, EXIT_RETRY),
        ([BROKEN] * 2 + [UNREACHABLE] * 3, ServiceUnavailable, EXIT_RETRY),
        ([BROKEN] * 3 + [UNREACHABLE] * 3, RewardError, EXIT_MISTAKE),
        ([BROKEN] * 3, RewardError, EXIT_MISTAKE),
    ],
)
def test_the_exit_code_says_whether_a_lost_server_is_to_blame(
    failures: list[Score], error: type[RollickError], code: int
) -> None:
    scores = [*failures, *[GOOD] * (10 - len(failures))]
    with pytest.raises(error, match=f"{len(failures)} of 10 samples of step 3") as caught:
        check_scores(scores)
    assert caught.value.exit_code == code
    assert ("no judge" in str(caught.value)) == (code == EXIT_RETRY)


@pytest.mark.parametrize(
    ("failure", "error"), [(UNREACHABLE, ServiceUnavailable), (BROKEN, RewardError)]
)
def test_an_error_budget_that_a_lost_server_exceeds_is_worth_a_retry(
    failure: Score, error: type[RollickError]
) -> None:
    counts, spec = RewardCallCounts(), RewardSpec(name="judge", error_budget=0.1)
    for score in [GOOD] * 17 + [failure] * 2:
        counts.count("judge", score)
    counts.check_error_budget(spec)
    counts.count("judge", failure)
    with pytest.raises(error, match="3 of the last 20 calls of the reward 'judge' failed"):
        counts.check_error_budget(spec)

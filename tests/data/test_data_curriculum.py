"""Selection of prompts by the scores of their groups."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.config.schema import RetireConfig, RlDataConfig, RlvrDomain
from rollick.data.curriculum import GroupOutcome, PromptBelief, is_retired, nearest_half
from rollick.data.prompts import PromptStream
from rollick.testing.fakes import group
from rollick.types import Prompt, stable_hash

NEAR_HALF = {"near_half_window": 64}
RETIRE = {"retire": {"pass_rate": 0.9, "min_tries": 4}}


def open_stream(
    rows: int | dict[str, int],
    *,
    shares: dict[str, float] | None = None,
    seed: int = 0,
    shuffle: bool = True,
    **selection: Any,
) -> PromptStream:
    """A stream over `rows` numbered prompts, with these settings of data.selection."""
    sizes = rows if isinstance(rows, dict) else {"toy": rows}
    sources = {name: [f"prompt {n}" for n in range(size)] for name, size in sizes.items()}
    domains = {
        name: RlvrDomain(source=f"object:{name}", share=(shares or {}).get(name, 1.0))
        for name in sizes
    }
    data = RlDataConfig[RlvrDomain].model_validate(
        {"domains": domains, "shuffle": shuffle, "selection": selection}
    )
    return PromptStream.open(data, seed=seed, base=None, objects=sources)


def draw_uids(stream: PromptStream, count: int) -> list[str]:
    return [stream.next().uid for _ in range(count)]


def find_prompt(stream: PromptStream, uid: str) -> Prompt:
    return next(prompt for prompt in stream.all() if prompt.uid == uid)


def record_scores(stream: PromptStream, scores: dict[str, Sequence[float | None]]) -> None:
    """Record one step that scored these prompts."""
    for number, (uid, values) in enumerate(scores.items()):
        stream.record_group(group(values, uid=number, of=find_prompt(stream, uid)))
    stream.update_selection()


def run_step(
    stream: PromptStream, groups: int, *, rates: dict[str, float], first: int
) -> list[str]:
    """Draw and score groups of four samples that pass at their prompt's rate; return the uids."""
    prompts = [stream.next() for _ in range(groups)]
    for number, prompt in enumerate(prompts, start=first):
        draws = [stable_hash(number, index) % 1000 / 1000 for index in range(4)]
        scores = [float(draw < rates[prompt.uid]) for draw in draws]
        stream.record_group(group(scores, uid=number, of=prompt))
    stream.update_selection()
    return [prompt.uid for prompt in prompts]


def test_outcomes_count_scored_samples_and_no_failed_reward():
    outcome = GroupOutcome.of(group([1, 0.5, None, 0, 1], uid=7), pass_score=0.999)
    assert outcome == GroupOutcome(group=7, prompt="toy/0", domain="toy", passes=2, fails=2)


def test_a_belief_counts_passes_and_fails():
    belief = PromptBelief().add_samples(2, 2)
    assert belief == PromptBelief(passes=2, fails=2)
    assert belief.pass_rate == 0.5
    assert PromptBelief().pass_rate == 0


def test_older_outcomes_decay_only_when_new_ones_arrive():
    old = PromptBelief(passes=8, fails=4)
    assert old.add_samples(1, 1, decay=0.5) == PromptBelief(5, 3)
    assert old.add_samples(0, 0, decay=0.5) == old


@pytest.mark.parametrize(
    ("passes", "fails", "retired"),
    [(9, 1, True), (8, 0, True), (7, 0, False), (8, 1, False), (0, 0, False), (0, 99, False)],
)
def test_a_prompt_retires_at_nine_passes_in_ten_over_enough_samples(
    passes: float, fails: float, retired: bool
):
    assert is_retired(PromptBelief(passes, fails), RetireConfig(pass_rate=0.9)) is retired


def test_both_bounds_of_retirement_can_be_set():
    limits = RetireConfig(pass_rate=0.5, min_tries=2)
    assert is_retired(PromptBelief(1, 1), limits)
    assert not is_retired(PromptBelief(1, 0), limits)


def test_the_belief_nearest_to_a_half_is_chosen():
    beliefs = [PromptBelief(900, 10), PromptBelief(500, 500), PromptBelief(5, 900)]
    assert nearest_half(beliefs, np.random.default_rng(0)) == 1


def test_the_chance_among_many_is_in_proportion_to_the_density_at_a_half():
    """Beta(2, 2) has the density 6 p (1 - p), which is 3/2 at 1/2; Beta(1, 1) has 1."""
    beliefs = [PromptBelief(1, 1), PromptBelief()] * 20
    generator = np.random.default_rng(0)
    choices = [nearest_half(beliefs, generator) for _ in range(4000)]
    tried_count = sum(choice % 2 == 0 for choice in choices)
    assert tried_count / (4000 - tried_count) == pytest.approx(1.5, rel=0.1)


def test_without_a_selection_scores_do_not_change_the_order_of_prompts():
    rows, shares = {"a": 13, "b": 5}, {"a": 2.0}
    stream = open_stream(rows, shares=shares, seed=3)
    uids = draw_uids(stream, 12)
    assert " ".join(uids) == "a/8 b/2 a/10 a/6 b/3 a/4 a/12 b/0 a/2 a/0 b/4 a/9"
    record_scores(stream, {f"a/{n}": [1] * 20 for n in range(13)} | {"b/0": [0, 1]})
    uids += draw_uids(stream, 188)
    digest = hashlib.blake2b(" ".join(uids).encode(), digest_size=8).hexdigest()
    assert digest == "155387d7384f7626"
    assert stream.metrics()["data/retired"] == 0


def test_a_solved_prompt_is_passed_over_from_the_next_step_on():
    stream = open_stream(4, shuffle=False, **RETIRE)
    solved = find_prompt(stream, "toy/1")
    stream.record_group(group([1, 1, 1, 1], of=solved))
    assert draw_uids(stream, 4) == ["toy/0", "toy/1", "toy/2", "toy/3"]
    stream.update_selection()
    assert draw_uids(stream, 6) == ["toy/0", "toy/2", "toy/3"] * 2


def test_retirement_needs_the_rate_and_the_tries_and_sums_over_groups():
    stream = open_stream(3, shuffle=False, **RETIRE)
    record_scores(stream, {"toy/0": [1, 1, 1], "toy/1": [1, 1, 1, 0], "toy/2": [1, 1, None, None]})
    assert stream.metrics()["data/retired"] == 0
    record_scores(stream, {"toy/0": [1], "toy/2": [0.998]})
    assert stream.metrics()["data/retired"] == 1
    assert draw_uids(stream, 4) == ["toy/1", "toy/2"] * 2


def test_the_score_that_passes_can_be_set():
    stream = open_stream(2, pass_score=0.5, **RETIRE)
    record_scores(stream, {"toy/0": [0.5] * 4, "toy/1": [0.4] * 4})
    assert set(draw_uids(stream, 10)) == {"toy/1"}


def test_decay_of_older_samples_lets_a_prompt_retire_sooner():
    """4 fails and 12 passes are a rate of 3/4; with a decay of 0.5 they count as 0.5 and 7."""
    for decay, retired in ((1.0, 0), (0.5, 1)):
        stream = open_stream(2, decay=decay, **RETIRE)
        for scores in ([0] * 4, [1] * 4, [1] * 4, [1] * 4):
            record_scores(stream, {"toy/0": scores})
        assert stream.metrics()["data/retired"] == retired


def test_a_late_group_that_fails_returns_its_prompt():
    stream = open_stream(2, **RETIRE)
    record_scores(stream, {"toy/0": [1] * 4})
    assert stream.metrics()["data/retired"] == 1
    record_scores(stream, {"toy/0": [0] * 4})
    assert stream.metrics()["data/retired"] == 0


def test_a_domain_whose_prompts_all_retired_starts_over_and_reports_it(
    caplog: pytest.LogCaptureFixture,
):
    stream = open_stream({"easy": 2, "hard": 2}, shuffle=False, **RETIRE)
    with caplog.at_level(logging.WARNING, logger="rollick"):
        record_scores(stream, {"easy/0": [1] * 4, "easy/1": [1] * 4, "hard/0": [1] * 4})
    assert "all 2 prompts of domain 'easy' are retired (pass rate >= 0.9)" in caplog.text
    assert "Add harder prompts, lower the domain's share" in caplog.text
    metric_values = stream.metrics()
    assert (metric_values["data/retired"], metric_values["data/revived"]) == (1, 1)
    assert draw_uids(stream, 6) == ["easy/0", "hard/1", "easy/1", "hard/1", "easy/0", "hard/1"]
    record_scores(stream, {"easy/0": [1] * 4})
    assert draw_uids(stream, 4) == ["easy/1", "hard/1"] * 2


def test_shares_hold_when_most_of_a_domain_has_retired():
    stream = open_stream({"a": 8, "b": 8}, shares={"a": 3}, **RETIRE)
    record_scores(stream, {f"a/{n}": [1] * 4 for n in range(7)})
    uids = draw_uids(stream, 80)
    assert Counter(uid[0] for uid in uids) == {"a": 60, "b": 20}
    assert {uid for uid in uids if uid.startswith("a")} == {"a/7"}


def test_a_prompt_of_pass_rate_one_half_is_preferred_to_those_of_none_and_all():
    stream = open_stream(9, **NEAR_HALF)
    scores = {0: [0] * 32, 1: [0, 1] * 16, 2: [1] * 32}
    record_scores(stream, {f"toy/{n}": scores[n % 3] for n in range(9)})
    assert sorted(draw_uids(stream, 3)) == ["toy/1", "toy/4", "toy/7"]


def test_a_step_has_no_prompt_twice_while_there_are_others_and_then_the_order_decides():
    stream = open_stream(4, **NEAR_HALF)
    record_scores(stream, {"toy/0": [0, 1] * 16})
    uids = draw_uids(stream, 12)
    assert sorted(uids[:4]) == ["toy/0", "toy/1", "toy/2", "toy/3"]
    assert sorted(uids[4:8]) == sorted(uids[8:]) == sorted(uids[:4])


def test_an_untried_prompt_is_sometimes_chosen_over_one_near_a_half():
    first_uids: Counter[str] = Counter()
    for seed in range(60):
        stream = open_stream(2, seed=seed, **NEAR_HALF)
        record_scores(stream, {"toy/0": [0, 1] * 8})
        first_uids[stream.next().uid] += 1
    assert 5 < first_uids["toy/1"] < first_uids["toy/0"]


@pytest.mark.parametrize(("window", "reached"), [(2, {"toy/0", "toy/1"}), (8, {"toy/7"})])
def test_the_choice_is_among_the_next_prompts_of_the_order(window: int, reached: set[str]):
    first_uids: set[str] = set()
    for seed in range(20):
        stream = open_stream(8, seed=seed, shuffle=False, near_half_window=window)
        record_scores(stream, {f"toy/{n}": [0] * 64 for n in range(7)} | {"toy/7": [0, 1] * 32})
        first_uids.add(stream.next().uid)
    assert first_uids == reached


def test_over_many_steps_most_groups_go_to_prompts_near_a_half_and_none_is_left_out():
    stream = open_stream(30, near_half_window=16)
    rate_by_uid = {f"toy/{n}": (0.0, 0.5, 1.0)[n % 3] for n in range(30)}
    uids = [uid for n in range(75) for uid in run_step(stream, 4, rates=rate_by_uid, first=4 * n)]
    by_rate = Counter(rate_by_uid[uid] for uid in uids)
    assert by_rate[0.5] > 2 * max(by_rate[0.0], by_rate[1.0])
    assert set(uids) == set(rate_by_uid)


def test_retired_prompts_are_no_candidates():
    stream = open_stream(6, **NEAR_HALF, retire={"pass_rate": 0.5, "min_tries": 4})
    record_scores(stream, {f"toy/{n}": [0, 1] * 8 for n in range(5)})
    assert draw_uids(stream, 3) == ["toy/5"] * 3


def test_a_group_without_scores_releases_its_prompt():
    stream = open_stream(2, **NEAR_HALF)
    first, second = stream.next(), stream.next()
    stream.record_group(group([None, None], uid=0, of=first))
    stream.update_selection()
    assert stream.next().uid == first.uid
    assert stream.next().uid in (first.uid, second.uid)
    assert "data/pass_rate" not in stream.metrics()


def test_shares_hold_near_one_half():
    stream = open_stream({"a": 5, "b": 7}, shares={"a": 3}, **NEAR_HALF)
    record_scores(stream, {"b/0": [0, 1] * 20, "a/0": [1] * 20})
    assert Counter(uid[0] for uid in draw_uids(stream, 80)) == {"a": 60, "b": 20}


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(5)))
def test_the_order_in_which_groups_are_scored_does_not_matter(order: list[int]):
    scores: list[list[float]] = [[1, 1, 1], [0, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0]]

    def record_in_order(numbers: Sequence[int]) -> dict[str, Any]:
        stream = open_stream(2, decay=0.7, **NEAR_HALF)
        of = [find_prompt(stream, f"toy/{number % 2}") for number in range(5)]
        for number in numbers:
            stream.record_group(group(scores[number], uid=number, of=of[number]))
        stream.update_selection()
        return stream.state()

    assert json.dumps(record_in_order(order), sort_keys=True) == json.dumps(
        record_in_order(range(5)), sort_keys=True
    )


def test_the_pass_rate_is_the_mean_over_the_prompts_that_were_tried():
    stream = open_stream(9)
    assert stream.metrics() == {"data/quarantined": 0, "data/retired": 0, "data/revived": 0}
    record_scores(stream, {"toy/0": [1, 1, 1, 0], "toy/1": [0, 0], "toy/2": [None]})
    assert stream.metrics()["data/pass_rate"] == 0.375


@settings(max_examples=20, deadline=None)
@given(
    steps=st.integers(0, 6),
    more=st.integers(0, 5),
    scored=st.integers(0, 5),
    window=st.sampled_from([0, 3]),
)
def test_a_restored_stream_continues_equally_between_steps_and_within_one(
    steps: int, more: int, scored: int, window: int
):
    """After complete steps, `more` prompts are drawn, of which the first `scored` have scores."""
    sizes, rates = {"a": 6, "b": 4}, {f"{d}/{n}": n / 5 for d in "ab" for n in range(6)}

    def open_new_stream() -> PromptStream:
        return open_stream(sizes, near_half_window=window, **RETIRE)

    full = open_new_stream()
    for number in range(steps):
        run_step(full, 4, rates=rates, first=4 * number)
    for number in range(more):
        prompt = full.next()
        if number < scored:
            full.record_group(group([1, 1, 1, 1], uid=100 + number, of=prompt))
    resumed = open_new_stream()
    run_step(resumed, 4, rates=rates, first=0)
    resumed.restore(json.loads(json.dumps(full.state())))
    assert resumed.state() == full.state()
    for number in range(50, 60):
        full_uids, resumed_uids = (
            run_step(s, 4, rates=rates, first=4 * number) for s in (full, resumed)
        )
        assert full_uids == resumed_uids
        assert full.metrics() == resumed.metrics()


def test_only_prompts_that_were_tried_are_in_the_state():
    stream = open_stream(1000, **NEAR_HALF)
    record_scores(stream, {"toy/7": [0, 1], "toy/8": [None]})
    state = stream.state()["curriculum"]
    assert state["beliefs"] == {"toy": {"toy/7": [1, 1]}}
    assert state["in_flight"] == {}


def test_a_run_that_is_resumed_with_another_retire_rate_uses_the_new_one():
    stream = open_stream(3)
    record_scores(stream, {"toy/0": [1] * 4})
    stricter = open_stream(3, **RETIRE)
    stricter.restore(stream.state())
    assert stricter.metrics()["data/retired"] == 1
    assert "toy/0" not in draw_uids(stricter, 6)

"""The ledger: budgets, the must-take rule, refills and what survives a kill."""

import json
from datetime import date

import pytest

from rollick.errors import CheckpointError
from rollick.rollout.ledger import GroupState, Ledger, LedgerError, SampleState, Wait
from rollick.testing.fakes import prompt
from rollick.types import PolicyVersion, SampleId


def start(ledger: Ledger, count: int = 1, *, version: int = 0) -> list[int]:
    return [ledger.start_group(prompt(), PolicyVersion(version)) for _ in range(count)]


def fill(ledger: Ledger, *, version: int = 0) -> list[int]:
    """Start groups for as long as the ledger allows."""
    uids: list[int] = []
    while ledger.may_start():
        uids += start(ledger, version=version)
    return uids


def run(ledger: Ledger, uid: int) -> None:
    """All samples of a group from waiting to done; the group is still open."""
    for index in range(ledger.group_size):
        sample = SampleId(uid, index)
        ledger.sample_started(sample)
        ledger.sample_finished(sample)
        ledger.sample_scored(sample)


def complete(ledger: Ledger, *uids: int) -> None:
    for uid in uids:
        run(ledger, uid)
        ledger.complete(uid)


def take(ledger: Ledger, version: int, count: int | None = None) -> list[int] | None:
    return ledger.take(PolicyVersion(version), count)


def train(ledger: Ledger, uids: list[int], version: int) -> None:
    ledger.trained(uids, PolicyVersion(version))
    ledger.published(PolicyVersion(version))


def waits(ledger: Ledger, version: int) -> list[int]:
    return [wait.uid.group for wait in ledger.waits_for(PolicyVersion(version))]


@pytest.mark.parametrize(
    ("groups", "staleness", "places"),
    [(4, 0, 4), (4, 1, 8), (4, 0.5, 6), (3, 0.5, 5), (4, 2, 12), (1, 0, 1), (10, 0.1, 11)],
)
def test_as_many_groups_are_in_flight_as_the_budget_says(groups, staleness, places):
    ledger = Ledger(groups, 2, staleness)
    assert fill(ledger) == list(range(places))
    with pytest.raises(LedgerError, match="no place"):
        start(ledger)


def test_a_complete_group_keeps_its_place_until_it_is_trained_and_published():
    ledger = Ledger(2, 1)
    complete(ledger, *fill(ledger))
    assert not ledger.may_start()
    assert take(ledger, 0) == [0, 1]
    assert not ledger.may_start()
    ledger.trained([0, 1], PolicyVersion(1))
    assert not ledger.may_start()
    assert ledger.held_until == 1
    ledger.published(PolicyVersion(1))
    assert fill(ledger, version=1) == [2, 3]


def test_a_skipped_step_opens_its_places_at_once():
    ledger = Ledger(2, 1)
    complete(ledger, *fill(ledger))
    ledger.trained(take(ledger, 0) or [], PolicyVersion(0))
    assert fill(ledger) == [2, 3]


def test_without_staleness_the_batch_waits_for_every_group():
    ledger = Ledger(3, 1)
    fill(ledger)
    complete(ledger, 2, 0)
    assert take(ledger, 0) is None
    assert waits(ledger, 0) == [1]
    complete(ledger, 1)
    assert take(ledger, 0) == [0, 1, 2]


def test_with_staleness_one_the_batch_is_what_is_complete_and_leftovers_must_come_next():
    ledger = Ledger(2, 1, 1)
    fill(ledger)
    complete(ledger, 3, 1)
    assert take(ledger, 0) == [1, 3]
    train(ledger, [1, 3], 1)
    assert fill(ledger, version=1) == [4, 5]
    complete(ledger, 4, 5, 0)
    assert take(ledger, 1) is None
    assert waits(ledger, 1) == [2]
    complete(ledger, 2)
    assert take(ledger, 1) == [0, 2]


def test_with_staleness_one_half_the_rule_is_that_of_one():
    ledger = Ledger(2, 1, 0.5)
    fill(ledger)
    complete(ledger, 1, 2)
    train(ledger, take(ledger, 0) or [], 1)
    assert fill(ledger, version=1) == [3, 4]
    complete(ledger, 3, 4)
    assert take(ledger, 1) is None
    assert waits(ledger, 1) == [0]
    complete(ledger, 0)
    assert take(ledger, 1) == [0, 3]


def test_with_staleness_two_a_batch_leaves_no_more_old_groups_than_the_next_can_hold():
    ledger = Ledger(2, 1, 2)
    fill(ledger)
    complete(ledger, 0, 1)
    train(ledger, take(ledger, 0) or [], 1)
    assert fill(ledger, version=1) == [6, 7]
    complete(ledger, 6, 7)
    # Were 6 and 7 taken now, version 2 would have to take 2, 3, 4 and 5: twice its size.
    assert take(ledger, 1) is None
    assert waits(ledger, 1) == [2, 3, 4, 5]
    complete(ledger, 5)
    assert take(ledger, 1) is None
    complete(ledger, 3)
    train(ledger, take(ledger, 1) or [], 2)
    complete(ledger, 4, 2)
    assert take(ledger, 2) == [2, 4]


def test_a_smaller_batch_can_be_asked_for_but_takes_what_it_must():
    ledger = Ledger(4, 1, 1)
    fill(ledger)
    complete(ledger, 0, 1, 2, 3)
    assert take(ledger, 0, 1) == [0, 1, 2, 3]


def test_a_dropped_group_gives_its_place_back_one_for_one():
    ledger = Ledger(3, 2)
    fill(ledger)
    for dropped in (1, 0):
        run(ledger, dropped)
        ledger.drop(dropped, "no_signal")
    assert fill(ledger) == [3, 4]
    assert ledger.counts().dropped_by_reason == {"no_signal": 2}
    complete(ledger, 4, 2, 3)
    assert take(ledger, 0) == [2, 3, 4]


def test_drops_beyond_the_allowance_are_not_refilled_and_the_batch_is_smaller():
    ledger = Ledger(3, 1, drops_allowed=1)
    fill(ledger)
    for dropped in (0, 1):
        ledger.drop(dropped, "no_signal")
    assert fill(ledger) == [3]
    complete(ledger, 2)
    assert take(ledger, 0) is None
    complete(ledger, 3)
    assert take(ledger, 0) == [2, 3]
    assert not ledger.may_start(), "the empty place is not for this step"
    train(ledger, [2, 3], 1)
    assert fill(ledger, version=1) == [4, 5, 6]


def test_a_ledger_is_exhausted_when_all_groups_were_dropped_and_none_is_refilled():
    ledger = Ledger(2, 1, drops_allowed=1)
    for _ in range(3):
        fill(ledger)
        assert not ledger.exhausted
        ledger.drop(ledger.live()[0].uid, "no_signal")
    assert ledger.exhausted


def test_the_samples_that_a_batch_waits_for_are_named_with_their_state():
    ledger = Ledger(1, 3)
    fill(ledger)
    for index in (0, 1):
        ledger.sample_started(SampleId(0, index))
    ledger.sample_finished(SampleId(0, 1))
    assert ledger.waits_for(PolicyVersion(0)) == [
        Wait(SampleId(0, 0), SampleState.RUNNING),
        Wait(SampleId(0, 1), SampleState.SCORING),
        Wait(SampleId(0, 2), SampleState.WAITING),
    ]


def test_counts_tell_where_every_sample_is():
    ledger = Ledger(4, 2, drops_allowed=0)
    fill(ledger)
    ledger.sample_started(SampleId(0, 1))
    complete(ledger, 1)
    ledger.drop(2, "no_signal")
    counts = ledger.counts()
    assert counts.groups.submitted == 4
    assert (counts.groups.waiting, counts.groups.running, counts.groups.dropped) == (1, 2, 1)
    # Group 0: one runs and one waits; group 1: two wait for training; group 3: two wait.
    assert (counts.samples.running, counts.samples.waiting, counts.samples.dropped) == (1, 5, 2)
    ledger.check()


def test_check_finds_a_group_that_got_lost():
    ledger = Ledger(2, 1)
    fill(ledger)
    ledger._live.popitem()
    with pytest.raises(LedgerError, match="conservation"):
        ledger.check()


@pytest.mark.parametrize(
    "illegal",
    [
        lambda ledger: ledger.sample_finished(SampleId(0, 0)),
        lambda ledger: ledger.sample_scored(SampleId(0, 0)),
        lambda ledger: ledger.sample_started(SampleId(9, 0)),
        lambda ledger: ledger.complete(0),
        lambda ledger: ledger.complete(1),
        lambda ledger: ledger.trained([1], PolicyVersion(1)),
        lambda ledger: ledger.drop(9, "no_signal"),
        lambda ledger: ledger.take(PolicyVersion(0), 3),
        lambda ledger: ledger.published(PolicyVersion(-1)),
        lambda ledger: ledger.restore(ledger.state()),
    ],
)
def test_an_illegal_transition_is_an_error_and_changes_nothing(illegal):
    ledger = Ledger(2, 1)
    fill(ledger)
    complete(ledger, 1)
    before = ledger.state()
    with pytest.raises(LedgerError):
        illegal(ledger)
    assert ledger.state() == before


def test_a_batch_must_be_trained_before_the_next_is_taken_and_cannot_be_dropped():
    ledger = Ledger(1, 1)
    complete(ledger, *fill(ledger))
    assert take(ledger, 0) == [0]
    with pytest.raises(LedgerError, match="trained first"):
        take(ledger, 0)
    with pytest.raises(LedgerError, match="in a batch"):
        ledger.drop(0, "no_signal")


def test_a_restored_ledger_returns_samples_in_flight_to_waiting_and_keeps_what_is_done():
    ledger = Ledger(4, 2, drops_allowed=3)
    fill(ledger)
    complete(ledger, 1)
    ledger.drop(2, "no_signal")
    ledger.sample_started(SampleId(0, 0))
    ledger.sample_started(SampleId(0, 1))
    ledger.sample_finished(SampleId(0, 1))
    ledger.sample_scored(SampleId(0, 1))
    restored = Ledger(4, 2, drops_allowed=3)
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert [group.uid for group in restored.live()] == [0, 1, 3]
    assert restored.group(0).samples == [SampleState.WAITING, SampleState.DONE]
    assert restored.group(1).state is GroupState.COMPLETE
    assert restored.group(3).prompt == prompt()
    assert restored.drops_in_step == 1
    assert start(restored) == [4]
    restored.check()


def test_a_batch_that_was_taken_and_not_trained_is_complete_again_after_a_restore():
    ledger = Ledger(2, 1)
    complete(ledger, *fill(ledger))
    take(ledger, 0)
    restored = Ledger(2, 1)
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert take(restored, 0) == [0, 1]


def test_a_row_with_values_that_json_does_not_know_can_be_saved():
    ledger = Ledger(1, 1)
    ledger.start_group(prompt(day=date(2024, 5, 1), answer=3), PolicyVersion(0))
    restored = Ledger(1, 1)
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert restored.group(0).prompt.row == {"day": "2024-05-01", "answer": 3}


def test_a_restore_with_another_group_size_is_refused_with_advice():
    ledger = Ledger(1, 2)
    fill(ledger)
    with pytest.raises(CheckpointError, match="group_size is 3") as refused:
        Ledger(1, 3).restore(ledger.state())
    assert "rollout.group_size=2" in refused.value.fix


def test_ids_can_count_down_so_that_evaluation_never_meets_training():
    ledger = Ledger(3, 1, count_down=True)
    assert fill(ledger) == [-1, -2, -3]
    complete(ledger, -3, -1, -2)
    assert take(ledger, 0) == [-1, -2, -3]

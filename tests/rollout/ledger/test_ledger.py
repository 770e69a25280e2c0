"""The ledger: budgets, the must-take rule, refills and what survives a kill."""

import json
from datetime import date

import pytest
from ledger_audit import check_ledger, ledger_counts

from rollick.errors import CheckpointError
from rollick.rollout.ledger.events import (
    BatchTrained,
    GroupCompleted,
    GroupDeferred,
    GroupDropped,
    GroupRestarted,
    GroupStarted,
    SampleDone,
)
from rollick.rollout.ledger.group_record import (
    GroupState,
    LedgerError,
    RemovedGroups,
    SampleState,
    TakenBatch,
)
from rollick.rollout.ledger.ledger import Ledger
from rollick.rollout.ledger.staleness import StalenessPolicy, StalenessRule
from rollick.testing.fakes import prompt
from rollick.types import PolicyVersion, SampleId


def make_ledger(groups, size, staleness=0, *, rule="must_take", surplus=0, **options):
    policy = StalenessPolicy(groups, staleness, StalenessRule(rule), surplus)
    return Ledger(policy, size, **options)


def make_taken_batch(uids, dropped=(), unfinished=(), deferred=()):
    return TakenBatch(uids, RemovedGroups(dropped, unfinished, deferred))


def start_groups(ledger: Ledger, count: int = 1, *, version: int = 0) -> list[int]:
    return [ledger.start_group(prompt(), PolicyVersion(version)) for _ in range(count)]


def fill_slots(ledger: Ledger, *, version: int = 0) -> list[int]:
    """Start groups for as long as the ledger allows."""
    uids: list[int] = []
    while ledger.may_start():
        uids += start_groups(ledger, version=version)
    return uids


def finish_samples(ledger: Ledger, uid: int) -> None:
    """Move all samples of a group from WAITING to DONE; the group stays open."""
    for index in range(ledger.group_size):
        sample = SampleId(uid, index)
        ledger.sample_started(sample)
        ledger.sample_finished(sample)
        ledger.sample_scored(sample)


def complete(ledger: Ledger, *uids: int) -> None:
    for uid in uids:
        finish_samples(ledger, uid)
        ledger.complete(uid)


def take(ledger: Ledger, version: int, count: int | None = None) -> list[int] | None:
    taken = ledger.take(PolicyVersion(version), count)
    return None if taken is None else list(taken.uids)


def train(ledger: Ledger, uids: list[int], version: int) -> None:
    ledger.trained(uids, PolicyVersion(version))
    ledger.published(PolicyVersion(version))


def list_awaited_groups(ledger: Ledger, version: int) -> list[int]:
    return [uid.group for uid in ledger.awaited_samples(PolicyVersion(version))]


@pytest.mark.parametrize(
    ("groups", "staleness", "places"),
    [(4, 0, 4), (4, 1, 8), (4, 0.5, 6), (3, 0.5, 5), (4, 2, 12), (1, 0, 1), (10, 0.1, 11)],
)
def test_as_many_groups_are_in_flight_as_the_budget_allows(groups, staleness, places):
    ledger = make_ledger(groups, 2, staleness)
    assert fill_slots(ledger) == list(range(places))
    with pytest.raises(LedgerError, match="no slot"):
        start_groups(ledger)


def test_a_complete_group_keeps_its_slot_until_it_is_trained_and_published():
    ledger = make_ledger(2, 1)
    complete(ledger, *fill_slots(ledger))
    assert not ledger.may_start()
    assert take(ledger, 0) == [0, 1]
    assert not ledger.may_start()
    ledger.trained([0, 1], PolicyVersion(1))
    assert not ledger.may_start()
    assert ledger.held_until == 1
    ledger.published(PolicyVersion(1))
    assert fill_slots(ledger, version=1) == [2, 3]


def test_a_skipped_step_frees_its_slots_immediately():
    ledger = make_ledger(2, 1)
    complete(ledger, *fill_slots(ledger))
    ledger.trained(take(ledger, 0) or [], PolicyVersion(0))
    assert fill_slots(ledger) == [2, 3]


def test_without_staleness_the_batch_waits_for_every_group():
    ledger = make_ledger(3, 1)
    fill_slots(ledger)
    complete(ledger, 2, 0)
    assert take(ledger, 0) is None
    assert list_awaited_groups(ledger, 0) == [1]
    complete(ledger, 1)
    assert take(ledger, 0) == [0, 1, 2]


def test_with_staleness_one_the_batch_is_what_is_complete_and_leftovers_must_come_next():
    ledger = make_ledger(2, 1, 1)
    fill_slots(ledger)
    complete(ledger, 3, 1)
    assert take(ledger, 0) == [1, 3]
    train(ledger, [1, 3], 1)
    assert fill_slots(ledger, version=1) == [4, 5]
    complete(ledger, 4, 5, 0)
    assert take(ledger, 1) is None
    assert list_awaited_groups(ledger, 1) == [2]
    complete(ledger, 2)
    assert take(ledger, 1) == [0, 2]


def test_with_staleness_one_half_the_rule_is_that_of_one():
    ledger = make_ledger(2, 1, 0.5)
    fill_slots(ledger)
    complete(ledger, 1, 2)
    train(ledger, take(ledger, 0) or [], 1)
    assert fill_slots(ledger, version=1) == [3, 4]
    complete(ledger, 3, 4)
    assert take(ledger, 1) is None
    assert list_awaited_groups(ledger, 1) == [0]
    complete(ledger, 0)
    assert take(ledger, 1) == [0, 3]


def test_with_staleness_two_a_batch_leaves_no_more_old_groups_than_the_next_can_hold():
    ledger = make_ledger(2, 1, 2)
    fill_slots(ledger)
    complete(ledger, 0, 1)
    train(ledger, take(ledger, 0) or [], 1)
    assert fill_slots(ledger, version=1) == [6, 7]
    complete(ledger, 6, 7)
    # If 6 and 7 were taken now, version 2 would have to take 2, 3, 4 and 5: twice its size.
    assert take(ledger, 1) is None
    assert list_awaited_groups(ledger, 1) == [2, 3, 4, 5]
    complete(ledger, 5)
    assert take(ledger, 1) is None
    complete(ledger, 3)
    train(ledger, take(ledger, 1) or [], 2)
    complete(ledger, 4, 2)
    assert take(ledger, 2) == [2, 4]


def test_a_smaller_batch_can_be_requested_but_takes_what_it_must():
    ledger = make_ledger(4, 1, 1)
    fill_slots(ledger)
    complete(ledger, 0, 1, 2, 3)
    assert take(ledger, 0, 1) == [0, 1, 2, 3]


def test_a_dropped_group_is_replaced_one_for_one():
    ledger = make_ledger(3, 2)
    fill_slots(ledger)
    for dropped in (1, 0):
        finish_samples(ledger, dropped)
        ledger.drop(dropped, "no_signal")
    assert fill_slots(ledger) == [3, 4]
    assert ledger_counts(ledger).dropped_by_reason == {"no_signal": 2}
    complete(ledger, 4, 2, 3)
    assert take(ledger, 0) == [2, 3, 4]


def test_drops_beyond_the_allowance_are_not_refilled_and_the_batch_is_smaller():
    ledger = make_ledger(3, 1, drops_allowed=1)
    fill_slots(ledger)
    for dropped in (0, 1):
        ledger.drop(dropped, "no_signal")
    assert fill_slots(ledger) == [3]
    complete(ledger, 2)
    assert take(ledger, 0) is None
    complete(ledger, 3)
    assert take(ledger, 0) == [2, 3]
    assert not ledger.may_start(), "the empty place is not for this step"
    train(ledger, [2, 3], 1)
    assert fill_slots(ledger, version=1) == [4, 5, 6]


def test_a_ledger_is_exhausted_when_all_groups_were_dropped_and_none_is_refilled():
    ledger = make_ledger(2, 1, drops_allowed=1)
    for _ in range(3):
        fill_slots(ledger)
        assert not ledger.exhausted
        ledger.drop(ledger.active_groups()[0].uid, "no_signal")
    assert ledger.exhausted


def test_the_samples_that_a_batch_waits_for_are_named_with_their_state():
    ledger = make_ledger(1, 3)
    fill_slots(ledger)
    for index in (0, 1):
        ledger.sample_started(SampleId(0, index))
    ledger.sample_finished(SampleId(0, 1))
    awaited = ledger.awaited_samples(PolicyVersion(0))
    assert {uid: ledger.group(uid.group).samples[uid.index] for uid in awaited} == {
        SampleId(0, 0): SampleState.RUNNING,
        SampleId(0, 1): SampleState.SCORING,
        SampleId(0, 2): SampleState.WAITING,
    }


def test_counts_cover_the_state_of_every_sample():
    ledger = make_ledger(4, 2, drops_allowed=0)
    fill_slots(ledger)
    ledger.sample_started(SampleId(0, 1))
    complete(ledger, 1)
    ledger.drop(2, "no_signal")
    counts = ledger_counts(ledger)
    assert counts.groups.submitted == 4
    assert (counts.groups.waiting, counts.groups.running, counts.groups.dropped) == (1, 2, 1)
    # Group 0: one runs and one waits; group 1: two wait for training; group 3: two wait.
    assert (counts.samples.running, counts.samples.waiting, counts.samples.dropped) == (1, 5, 2)
    check_ledger(ledger)


def test_an_audit_finds_a_lost_group():
    ledger = make_ledger(2, 1)
    fill_slots(ledger)
    ledger._table.active.popitem()
    with pytest.raises(LedgerError, match="conservation"):
        check_ledger(ledger)


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
    ledger = make_ledger(2, 1)
    fill_slots(ledger)
    complete(ledger, 1)
    before = ledger.state()
    with pytest.raises(LedgerError):
        illegal(ledger)
    assert ledger.state() == before


def test_a_batch_must_be_trained_before_the_next_is_taken_and_cannot_be_dropped():
    ledger = make_ledger(1, 1)
    complete(ledger, *fill_slots(ledger))
    assert take(ledger, 0) == [0]
    with pytest.raises(LedgerError, match="trained first"):
        take(ledger, 0)
    with pytest.raises(LedgerError, match="in a batch"):
        ledger.drop(0, "no_signal")


def test_a_restored_ledger_returns_samples_in_flight_to_waiting_and_keeps_what_is_done():
    ledger = make_ledger(4, 2, drops_allowed=3)
    fill_slots(ledger)
    complete(ledger, 1)
    ledger.drop(2, "no_signal")
    ledger.sample_started(SampleId(0, 0))
    ledger.sample_started(SampleId(0, 1))
    ledger.sample_finished(SampleId(0, 1))
    ledger.sample_scored(SampleId(0, 1))
    restored = make_ledger(4, 2, drops_allowed=3)
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert [group.uid for group in restored.active_groups()] == [0, 1, 3]
    assert restored.group(0).samples == [SampleState.WAITING, SampleState.DONE]
    assert restored.group(1).state is GroupState.COMPLETE
    assert restored.group(3).prompt == prompt()
    assert restored.state()["drops_in_step"] == 1
    assert start_groups(restored) == [4]
    check_ledger(restored)


def test_a_batch_that_was_taken_and_not_trained_is_complete_again_after_a_restore():
    ledger = make_ledger(2, 1)
    complete(ledger, *fill_slots(ledger))
    take(ledger, 0)
    restored = make_ledger(2, 1)
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert take(restored, 0) == [0, 1]


def test_a_row_with_values_that_json_does_not_know_can_be_saved():
    ledger = make_ledger(1, 1)
    ledger.start_group(prompt(day=date(2024, 5, 1), answer=3), PolicyVersion(0))
    restored = make_ledger(1, 1)
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert restored.group(0).prompt.row == {"day": "2024-05-01", "answer": 3}


def test_a_restore_with_another_group_size_is_refused_with_advice():
    ledger = make_ledger(1, 2)
    fill_slots(ledger)
    with pytest.raises(CheckpointError, match="group_size is 3") as refused:
        make_ledger(1, 3).restore(ledger.state())
    assert "rollout.group_size=2" in refused.value.fix


def test_ids_can_count_down_so_that_evaluation_never_meets_training():
    ledger = make_ledger(3, 1, count_down=True)
    assert fill_slots(ledger) == [-1, -2, -3]
    complete(ledger, -3, -1, -2)
    assert take(ledger, 0) == [-1, -2, -3]


def test_a_lost_sample_waits_again_under_the_same_id():
    ledger = make_ledger(1, 2)
    fill_slots(ledger)
    lost = SampleId(0, 1)
    ledger.sample_started(lost)
    ledger.sample_lost(lost)
    assert ledger.group(0).samples == [SampleState.WAITING, SampleState.WAITING]
    assert ledger_counts(ledger).samples.running == 0
    complete(ledger, 0)
    with pytest.raises(LedgerError, match="cannot become waiting"):
        ledger.sample_lost(lost)


def test_a_group_with_spares_is_complete_with_the_first_members_and_cancels_the_others():
    ledger = make_ledger(1, 2, spares=2)
    fill_slots(ledger)
    ledger.sample_started(SampleId(0, 3))
    for index, enough in ((2, False), (0, True)):
        ledger.sample_started(SampleId(0, index))
        ledger.sample_finished(SampleId(0, index))
        assert ledger.sample_scored(SampleId(0, index)) == enough
    assert ledger.complete(0) == (SampleId(0, 1), SampleId(0, 3))
    assert ledger.group(0).samples == [
        SampleState.DONE,
        SampleState.CANCELLED,
        SampleState.DONE,
        SampleState.CANCELLED,
    ]
    assert SampleId(0, 3) not in ledger.group(0).unfinished()
    counts = ledger_counts(ledger)
    assert counts.dropped_samples == {"surplus": 2}
    assert (counts.groups.dropped, counts.samples.dropped, counts.samples.waiting) == (0, 2, 2)
    train(ledger, take(ledger, 0) or [], 1)
    assert ledger_counts(ledger).samples.trained == 2
    check_ledger(ledger)


def test_a_complete_group_takes_no_further_sample():
    ledger = make_ledger(1, 1, spares=1)
    fill_slots(ledger)
    finish_samples(ledger, 0)
    ledger.sample_started(SampleId(0, 1))
    ledger.sample_finished(SampleId(0, 1))
    with pytest.raises(LedgerError, match="enough samples without"):
        ledger.sample_scored(SampleId(0, 1))


def test_a_dropped_group_names_the_samples_to_abort_and_counts_each_sample_once():
    ledger = make_ledger(1, 1, spares=2)
    fill_slots(ledger)
    finish_samples(ledger, 0)
    assert ledger.drop(0, "no_signal") == (SampleId(0, 1), SampleId(0, 2))
    assert fill_slots(ledger) == [1]
    finish_samples(ledger, 1)
    ledger.complete(1)
    assert ledger.drop(1, "no_signal") == ()
    assert ledger_counts(ledger).dropped_samples == {"no_signal": 4, "surplus": 2}
    assert ledger_counts(ledger).dropped_by_reason == {"no_signal": 2}


def test_drop_stale_never_waits_and_drops_groups_that_a_new_version_makes_too_old():
    ledger = make_ledger(2, 1, 1, rule="drop_stale")
    fill_slots(ledger)
    ledger.sample_started(SampleId(0, 0))
    complete(ledger, 1, 2)
    train(ledger, take(ledger, 0) or [], 1)
    assert fill_slots(ledger, version=1) == [4, 5]
    complete(ledger, 3, 4, 5)
    assert take(ledger, 1) == [3, 4], "must_take would wait for group 0"
    ledger.trained([3, 4], PolicyVersion(2))
    removed = ledger.published(PolicyVersion(2))
    assert removed.dropped == ((0, "stale"),)
    assert removed.unfinished == (SampleId(0, 0),)
    assert fill_slots(ledger, version=2) == [6, 7, 8], "two were trained and one is refilled"
    assert ledger.state()["drops_in_step"] == 0, "the allowance is for groups without signal"


def test_drop_stale_never_takes_a_complete_group_that_is_too_old():
    ledger = make_ledger(1, 1, rule=StalenessRule.DROP_STALE)
    fill_slots(ledger)
    complete(ledger, 0)
    assert take(ledger, 1) is None
    assert list_awaited_groups(ledger, 1) == []
    assert ledger.published(PolicyVersion(1)).dropped == ((0, "stale"),)


def test_mask_stale_tokens_takes_old_groups_whenever_they_are_complete():
    ledger = make_ledger(1, 1, 1, rule="mask_stale_tokens")
    assert fill_slots(ledger) == [0, 1]
    for version, uid in ((0, 1), (1, 2), (2, 3)):
        complete(ledger, uid)
        train(ledger, take(ledger, version) or [], version + 1)
        fill_slots(ledger, version=version + 1)
    complete(ledger, 4, 0)
    assert take(ledger, 3) == [0]
    assert ledger.policy.oldest_allowed(PolicyVersion(3)) == 2


def test_first_finished_takes_what_completes_first_and_drops_the_rest():
    ledger = make_ledger(2, 1, rule="first_finished", surplus=2)
    assert fill_slots(ledger) == [0, 1, 2, 3]
    ledger.sample_started(SampleId(0, 0))
    complete(ledger, 3, 1, 2)
    assert ledger.take(PolicyVersion(0)) == make_taken_batch(
        (1, 3), dropped=((0, "surplus"), (2, "surplus")), unfinished=(SampleId(0, 0),)
    )
    assert not ledger.may_start(), "a group of version 0 would be too old for the next batch"
    train(ledger, [1, 3], 1)
    assert fill_slots(ledger, version=1) == [4, 5, 6, 7]


def test_first_finished_with_staleness_drops_only_what_is_too_old_for_the_next_batch():
    ledger = make_ledger(1, 1, 1, rule="first_finished", surplus=1)
    assert fill_slots(ledger) == [0, 1, 2]
    complete(ledger, 2, 0)
    assert ledger.take(PolicyVersion(0)) == make_taken_batch((2,))
    train(ledger, [2], 1)
    assert fill_slots(ledger, version=1) == [3]
    assert ledger.take(PolicyVersion(1)) == make_taken_batch(
        (0,), ((1, "surplus"),), (SampleId(1, 0),)
    )
    assert fill_slots(ledger, version=1) == [4], "its place is free at once"


def test_late_groups_are_deferred_and_start_again_as_a_long_round_of_their_own():
    ledger = make_ledger(2, 1, rule="long_rounds", surplus=1)
    assert fill_slots(ledger) == [0, 1, 2]
    complete(ledger, 2, 0)
    late = SampleId(1, 0)
    assert ledger.take(PolicyVersion(0)) == make_taken_batch(
        (0, 2), unfinished=(late,), deferred=(1,)
    )
    train(ledger, [0, 2], 1)
    assert ledger.restart_deferred(PolicyVersion(1)) == (), "one group is no round"
    assert fill_slots(ledger, version=1) == [3, 4, 5]
    complete(ledger, 4, 5)
    assert ledger.take(PolicyVersion(1)).removed.deferred == (3,)
    assert ledger.in_long_round
    train(ledger, [4, 5], 2)
    assert not ledger.may_start(), "no new prompt before the parked groups are placed"
    assert ledger.restart_deferred(PolicyVersion(2)) == (1, 3)
    assert not ledger.may_start(), "a long round has no surplus"
    complete(ledger, 1)
    assert take(ledger, 2, 1) is None, "even a smaller batch waits for all of the round"
    assert list(ledger.awaited_samples(PolicyVersion(2), 1)) == [SampleId(3, 0)]
    complete(ledger, 3)
    assert ledger.take(PolicyVersion(2)) == make_taken_batch((1, 3))
    train(ledger, [1, 3], 3)
    assert fill_slots(ledger, version=3) == [6, 7, 8]
    assert ledger_counts(ledger).groups.trained == 6
    check_ledger(ledger)


def test_with_staleness_a_long_round_runs_beside_other_groups_and_is_due_at_its_deadline():
    ledger = make_ledger(1, 1, 1, rule="long_rounds", surplus=1)
    assert fill_slots(ledger) == [0, 1, 2]
    complete(ledger, 0)
    train(ledger, take(ledger, 0) or [], 1)
    assert fill_slots(ledger, version=1) == [3]
    complete(ledger, 3, 1)
    assert ledger.take(PolicyVersion(1)) == make_taken_batch((1,), (), (SampleId(2, 0),), (2,)), (
        "group 1 is taken before group 3, which can be in the next batch too"
    )
    assert not ledger.may_start()
    assert ledger.restart_deferred(PolicyVersion(1)) == (2,)
    train(ledger, [1], 2)
    assert not ledger.may_start(), "2 and 3 are in flight, and a long round has no surplus"
    assert take(ledger, 2) is None, "group 3 is complete, but group 2 must be in this batch"
    assert list(ledger.awaited_samples(PolicyVersion(2))) == [SampleId(2, 0)]
    complete(ledger, 2)
    assert ledger.take(PolicyVersion(2)) == make_taken_batch((2,), deferred=(3,))
    check_ledger(ledger)


def test_a_complete_group_without_room_is_deferred_and_marked_as_reported():
    ledger = make_ledger(1, 1, spares=1, rule="long_rounds", surplus=1)
    fill_slots(ledger)
    complete(ledger, 1, 0)
    assert ledger.take(PolicyVersion(0)) == make_taken_batch((0,), deferred=(1,))
    train(ledger, [0], 1)
    assert ledger.restart_deferred(PolicyVersion(1)) == (1,)
    group = ledger.group(1)
    assert group.was_reported, "its prompt was judged when it was complete"
    assert group.unfinished() == (SampleId(1, 0),), "its spare was dropped for good"
    complete(ledger, 1)
    assert take(ledger, 1) == [1]
    assert ledger_counts(ledger).samples.dropped == 2
    check_ledger(ledger)


def test_a_group_of_a_long_round_that_is_dropped_is_refilled_with_a_new_prompt():
    ledger = make_ledger(2, 1, rule="long_rounds", surplus=2)
    fill_slots(ledger)
    complete(ledger, 0, 1)
    train(ledger, take(ledger, 0) or [], 1)
    assert ledger.restart_deferred(PolicyVersion(1)) == (2, 3)
    ledger.drop(2, "no_signal")
    assert fill_slots(ledger, version=1) == [4]
    complete(ledger, 3, 4)
    assert take(ledger, 1) == [3, 4]


def test_a_restored_ledger_continues_a_running_long_round():
    ledger = make_ledger(2, 1, 1, rule="long_rounds")
    for version in (0, 1):
        fill_slots(ledger, version=version)
        newest = [group.uid for group in ledger.active_groups()][-2:]
        complete(ledger, *newest)
        train(ledger, take(ledger, version) or [], version + 1)
    assert ledger.restart_deferred(PolicyVersion(2), is_ready=lambda uid: uid == 0) == (0,)
    restored = make_ledger(2, 1, 1, rule="long_rounds")
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert restored.in_long_round
    assert restored.group(0).was_deferred
    assert not restored.may_start()
    assert restored.restart_deferred(PolicyVersion(2)) == (1,)
    other = make_ledger(2, 1, 1)
    other.restore(json.loads(json.dumps(ledger.state())))
    assert other.restart_deferred(PolicyVersion(2)) == (1,), "another rule starts it like any group"


def test_a_deferred_group_waits_until_it_is_ready_and_so_do_those_behind_it():
    ledger = make_ledger(2, 1)
    fill_slots(ledger)
    ledger.defer(1)
    ledger.defer(0)
    assert ledger.restart_deferred(PolicyVersion(0), is_ready=lambda uid: uid != 1) == ()
    assert ledger.restart_deferred(PolicyVersion(0), is_ready=lambda uid: uid != 0) == (1,)


def test_only_rules_with_late_groups_know_a_surplus():
    with pytest.raises(LedgerError, match="no surplus"):
        make_ledger(1, 1, surplus=1)


def test_a_slot_that_was_empty_when_a_batch_was_taken_stays_empty_until_the_next_version():
    ledger = make_ledger(2, 1, 1)
    complete(ledger, *start_groups(ledger, 1))
    assert take(ledger, 0, 1) == [0]
    assert start_groups(ledger, 2) == [1, 2]
    assert not ledger.may_start(), "three groups of version 0 are too many for the batch of 1"
    train(ledger, [0], 1)
    assert fill_slots(ledger, version=1) == [3, 4]


def test_a_deferred_group_frees_its_slot_and_starts_again_under_the_same_id():
    ledger = make_ledger(2, 2)
    fill_slots(ledger)
    finish_samples(ledger, 0)
    ledger.sample_started(SampleId(1, 1))
    assert ledger.defer(1) == (SampleId(1, 0), SampleId(1, 1))
    assert ledger.defer(0) == ()
    assert fill_slots(ledger) == [2, 3]
    counts = ledger_counts(ledger)
    assert (counts.groups.waiting, counts.groups.running) == (2, 2)
    assert (counts.samples.waiting, counts.samples.running) == (8, 0)
    assert ledger.restart_deferred(PolicyVersion(0)) == (), "there is no place"
    complete(ledger, 2, 3)
    train(ledger, take(ledger, 0) or [], 1)
    assert ledger.restart_deferred(PolicyVersion(1), is_ready=lambda uid: uid == 1) == (1,)
    assert ledger.restart_deferred(PolicyVersion(1)) == (0,)
    assert ledger.deadline(0) == 1
    assert ledger.group(0).samples == [SampleState.WAITING] * 2, "its old samples are too old"
    complete(ledger, 0, 1)
    assert take(ledger, 1) == [0, 1]
    check_ledger(ledger)


def test_a_group_that_is_deferred_or_in_a_batch_cannot_be_deferred():
    ledger = make_ledger(1, 1, 1)
    fill_slots(ledger)
    complete(ledger, 0)
    ledger.defer(1)
    take(ledger, 0)
    for uid, state in ((0, "is taken"), (1, "is deferred")):
        with pytest.raises(LedgerError, match=state):
            ledger.defer(uid)
    assert ledger.group(1).state is GroupState.DEFERRED
    with pytest.raises(LedgerError, match="is deferred"):
        ledger.deadline(1)


def test_a_deferred_group_may_use_a_slot_that_is_not_refilled():
    ledger = make_ledger(2, 1, drops_allowed=0)
    fill_slots(ledger)
    ledger.defer(0)
    assert fill_slots(ledger) == [2]
    ledger.drop(1, "no_signal")
    ledger.drop(2, "no_signal")
    assert not ledger.may_start()
    assert not ledger.exhausted, "group 0 can still come"
    assert ledger.restart_deferred(PolicyVersion(0)) == (0,)


def test_a_deadline_is_the_last_version_whose_batch_can_hold_the_group():
    ledger = make_ledger(1, 1, 1.5)
    start_groups(ledger, version=3)
    assert ledger.deadline(0) == 5


def test_a_restored_ledger_has_spares_deferred_groups_and_the_order_of_completion():
    ledger = make_ledger(2, 1, 1, spares=1, rule="first_finished")
    fill_slots(ledger)
    complete(ledger, 3, 0, 1)
    ledger.defer(2)
    restored = make_ledger(2, 1, 1, spares=1, rule="first_finished")
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert ledger_counts(restored) == ledger_counts(ledger)
    assert restored.group(3).samples == [SampleState.DONE, SampleState.CANCELLED]
    assert [group.uid for group in restored.deferred_groups()] == [2]
    assert take(restored, 0) == [0, 3], "the first two to complete"


def test_after_a_restore_the_groups_of_the_log_start_again_with_the_same_prompts():
    before = make_ledger(3, 1)
    start_groups(before, 1)
    state = before.state()
    ledger = make_ledger(3, 1)
    ledger.restore(state, started=[(0, "toy/0"), (1, "toy/7"), (2, "toy/4")])
    assert ledger.next_prompt_uid == "toy/7"
    with pytest.raises(LedgerError, match="before the crash it was prompt toy/7"):
        start_groups(ledger)
    for uid, name in ((1, "toy/7"), (2, "toy/4")):
        assert ledger.start_group(prompt(uid=name), PolicyVersion(0)) == uid
    assert ledger.next_prompt_uid is None


def test_a_log_that_does_not_continue_the_checkpoint_is_refused():
    with pytest.raises(CheckpointError, match="group 1 instead of group 0"):
        make_ledger(2, 1).restore(make_ledger(2, 1).state(), started=[(1, "toy/1")])


def test_the_ledger_reports_every_transition_that_a_log_keeps():
    reported = []
    ledger = make_ledger(1, 1, record=reported.append)
    fill_slots(ledger)
    ledger.defer(0)
    ledger.restart_deferred(PolicyVersion(0))
    ledger.drop(0, "no_signal")
    fill_slots(ledger)
    complete(ledger, 1)
    train(ledger, take(ledger, 0) or [], 1)
    assert reported == [
        GroupStarted(0, "toy/0", "toy", 0, 1),
        GroupDeferred(0),
        GroupRestarted(0, 0),
        GroupDropped(0, "no_signal"),
        GroupStarted(1, "toy/0", "toy", 0, 1),
        SampleDone(1, 0),
        GroupCompleted(1),
        BatchTrained((1,), 1),
    ]


def test_a_fruitless_query_does_not_scan_every_group(monkeypatch):
    ledger = make_ledger(50, 1, 1)
    fill_slots(ledger)
    complete(ledger, *range(40, 90))
    train(ledger, take(ledger, 0) or [], 1)
    fill_slots(ledger, version=1)
    complete(ledger, *range(100, 150))

    class Unreadable(dict):
        def values(self):
            raise AssertionError("all groups were read")

    monkeypatch.setattr(ledger._table, "active", Unreadable(ledger._table.active))
    assert take(ledger, 1) is None


def test_the_next_batch_is_the_one_that_is_taken():
    ledger = make_ledger(2, 1, staleness=1)
    uids = fill_slots(ledger)
    assert ledger.next_batch(PolicyVersion(0)) == ()
    for uid in uids:
        complete(ledger, uid)
    expected = ledger.next_batch(PolicyVersion(0))
    assert ledger.next_batch(PolicyVersion(0)) == expected, "looking changes nothing"
    taken = ledger.take(PolicyVersion(0))
    assert taken is not None
    assert taken.uids == expected


def test_dropped_groups_in_flight_are_replaced_and_a_batch_is_left_alone():
    ledger = make_ledger(1, 1, staleness=2, drops_allowed=0)
    first, second, third = fill_slots(ledger)
    complete(ledger, first)
    assert ledger.take(PolicyVersion(0)) is not None
    removed = ledger.drop_groups([third, second, first, 99], "damaged_engine")
    assert removed.dropped == ((second, "damaged_engine"), (third, "damaged_engine"))
    assert {uid.group for uid in removed.unfinished} == {second, third}
    assert len(fill_slots(ledger)) == 2, "these drops do not count against the limit"
    assert ledger_counts(ledger).dropped_by_reason == {"damaged_engine": 2}
    check_ledger(ledger)

"""The router: choices of engines, invariants of reservations, limits that adapt to the cache."""

from itertools import count
from math import inf
from time import process_time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollick.rollout.router import GROWTH, Router, RouterError
from rollick.types import EngineLoad, SampleId

FOUR_SLOTS = EngineLoad(slots=4)


def make_router(*loads, **options):
    router = Router(**options)
    for number, load in enumerate(loads):
        router.add(number, load)
    return router


def push_load(router, engine, load):
    """Update the load of an engine without the end of a request."""
    state = router._engines.get(engine)
    if state is not None:
        router._update_load(state, load)
        router._rank(state)


def send(router, group, index=0, session=None, tokens=10):
    return router.choose(SampleId(group, index), session=session, tokens=tokens)


def test_a_request_goes_to_the_least_loaded_engine_and_of_equals_to_the_first():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS, FOUR_SLOTS)
    assert [send(router, group) for group in range(5)] == [0, 1, 2, 0, 1]


def test_load_is_counted_in_expected_tokens_not_in_requests():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS)
    assert [send(router, 0, tokens=100), send(router, 1, tokens=30)] == [0, 1]
    assert [send(router, group, tokens=30) for group in range(2, 6)] == [1, 1, 1, 0]


def test_a_full_cache_counts_by_its_capacity():
    small, large = EngineLoad(slots=8, kv_capacity=100), EngineLoad(slots=8, kv_capacity=400)
    router = make_router(small, large)
    assert [send(router, group) for group in range(6)] == [0, 1, 1, 1, 1, 0]


def test_a_request_without_expected_tokens_still_counts_as_load():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS)
    assert [send(router, group, tokens=0) for group in range(4)] == [0, 1, 0, 1]


def test_the_cached_tokens_of_a_snapshot_count_as_load():
    router = make_router(EngineLoad(slots=8, kv_capacity=100), EngineLoad(slots=8, kv_capacity=100))
    push_load(router, 0, EngineLoad(slots=8, kv_capacity=100, kv_tokens=25))
    assert [send(router, group) for group in range(5)] == [1, 1, 1, 0, 0]


def test_a_release_with_a_snapshot_is_a_release_and_then_the_snapshot():
    load = EngineLoad(slots=8, kv_capacity=100)
    after = EngineLoad(slots=8, kv_capacity=100, kv_tokens=35)
    two_calls, one_call = make_router(load, load), make_router(load, load)
    for router in (two_calls, one_call):
        assert [send(router, 0), send(router, 1)] == [0, 1]
    two_calls.release(SampleId(0, 0), tokens=10)
    push_load(two_calls, 0, after)
    one_call.release(SampleId(0, 0), tokens=10, load=after)
    chosen = [[send(router, group) for group in range(2, 8)] for router in (two_calls, one_call)]
    assert chosen[0] == chosen[1] == [1, 1, 1, 0, 0, 0]


def test_requests_that_ended_after_a_snapshot_are_not_counted_in_it():
    full = EngineLoad(slots=8, kv_capacity=100, kv_tokens=50)
    router = make_router(EngineLoad(slots=8, kv_capacity=100), EngineLoad(slots=8, kv_capacity=100))
    assert [send(router, 0), send(router, 1, tokens=20)] == [0, 1]
    push_load(router, 0, full)
    router.release(SampleId(0, 0), tokens=45)
    assert send(router, 2) == 0


def test_requests_of_other_clients_count_with_the_mean_length():
    busy = EngineLoad(running=3, waiting=1, slots=8)
    router = make_router(busy, EngineLoad(slots=8))
    assert [send(router, group) for group in range(6)] == [1, 1, 1, 1, 0, 1]


def test_our_own_requests_in_a_snapshot_are_not_counted_twice():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS)
    assert [send(router, 0), send(router, 1, tokens=15)] == [0, 1]
    push_load(router, 0, EngineLoad(running=1, slots=4))
    assert send(router, 2, tokens=1) == 0


def test_a_free_slot_is_preferred_to_a_short_queue():
    two, eight = EngineLoad(slots=2, kv_capacity=10_000), EngineLoad(slots=8, kv_capacity=100)
    router = make_router(two, eight, mean_tokens=10)
    assert [send(router, group) for group in range(6)] == [0, 1, 0, 1, 1, 1]


def test_an_engine_queues_at_most_as_many_requests_as_it_has_slots():
    router = make_router(FOUR_SLOTS)
    assert [send(router, group) for group in range(9)] == [0] * 8 + [None]
    assert not router.has_room
    router.release(SampleId(3, 0), tokens=5)
    assert router.has_room
    assert send(router, 9) == 0


@pytest.mark.parametrize(("queue", "sent"), [(0.0, 4), (0.5, 6), (1.0, 8), (2.0, 12)])
def test_the_queue_of_an_engine_is_a_multiple_of_its_slots(queue, sent):
    router = make_router(FOUR_SLOTS, engine_queue=queue)
    assert sum(send(router, group) is not None for group in range(20)) == sent


def test_a_stale_snapshot_never_makes_an_engine_full():
    router = make_router(EngineLoad(running=4, waiting=100, slots=4))
    assert send(router, 0) == 0


def test_an_engine_of_unknown_size_has_no_limit():
    router = make_router(EngineLoad(), EngineLoad())
    assert router.limit(0) == inf
    assert [send(router, group) for group in range(100)] == [0, 1] * 50


def test_without_engines_there_is_no_room():
    router = Router()
    assert not router.has_room
    assert send(router, 0) is None
    assert SampleId(0, 0) not in router._engine_of


def test_a_group_stays_on_its_engine_unless_that_is_much_fuller_than_another():
    router = make_router(EngineLoad(slots=8), EngineLoad(slots=8), margin=0.25)
    assert [send(router, 0, index) for index in range(5)] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("margin", "placed"), [(0.0, [0, 1, 0, 1, 0]), (0.5, [0, 0, 0, 1, 0]), (9.0, [0, 0, 0, 0, 1])]
)
def test_the_margin_defines_how_much_fuller_and_a_free_slot_is_preferred_to_the_groups_engine(
    margin, placed
):
    router = make_router(FOUR_SLOTS, FOUR_SLOTS, margin=margin)
    assert [send(router, 0, index) for index in range(5)] == placed


def test_a_group_queues_at_its_engine_when_no_slot_is_free():
    router = make_router(EngineLoad(slots=1), EngineLoad(slots=1))
    assert [send(router, 0), send(router, 1)] == [0, 1]
    assert send(router, 1, 1) == 1


def test_a_group_keeps_its_engine_when_one_member_moved():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS, margin=0.0)
    assert [send(router, 0, 0), send(router, 0, 1)] == [0, 1]
    router.release(SampleId(0, 0), tokens=1)
    router.release(SampleId(0, 1), tokens=1)
    assert send(router, 0, 2) == 0


def test_a_finished_group_has_no_preferred_engine():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS, margin=9.0)
    send(router, 0)
    router.end_group(0)
    assert send(router, 0, 1) == 1


def test_a_session_returns_to_its_cache_even_if_other_engines_are_idle():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS)
    assert send(router, 0, session="a") == 0
    router.release(SampleId(0, 0), tokens=10)
    assert [send(router, 1, tokens=90), send(router, 2)] == [0, 1]
    assert send(router, 0, session="a") == 0


def test_a_session_moves_when_its_engine_is_full_and_sticks_to_the_next():
    router = make_router(EngineLoad(slots=1), EngineLoad(slots=1), engine_queue=0.0)
    assert send(router, 0, session="a") == 0
    router.release(SampleId(0, 0), tokens=1)
    assert [send(router, 1), send(router, 0, session="a")] == [0, 1]
    router.release(SampleId(1, 0), tokens=1)
    router.release(SampleId(0, 0), tokens=1)
    assert send(router, 0, session="a") == 1


def test_a_session_that_ended_sticks_to_nothing():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS)
    assert [send(router, 0), send(router, 1, session="a")] == [0, 1]
    router.end_session("a")
    assert send(router, 2, session="a") == 0


def test_only_so_many_sessions_and_groups_are_remembered():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS, remembered=1, margin=9.0)
    assert [send(router, 0, session="a"), send(router, 1, session="b")] == [0, 1]
    for group in (0, 1):
        router.release(SampleId(group, 0), tokens=1)
    assert send(router, 1, 1, session="b") == 1
    assert send(router, 2, tokens=1) == 0
    assert send(router, 3, tokens=50) == 0
    assert send(router, 0, 1, session="a") == 1


def test_the_session_used_longest_ago_is_forgotten_first():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS, FOUR_SLOTS, remembered=2)
    for group, session in enumerate("ab"):
        send(router, group, session=session)
    router.release(SampleId(0, 0), tokens=1)
    send(router, 0, session="a", tokens=50)
    assert send(router, 2, session="c") == 2
    assert send(router, 3, session="a") == 0
    assert send(router, 4, tokens=20) == 1
    assert send(router, 5, session="b") == 2


def test_a_removed_engine_names_what_it_held_and_is_never_chosen():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS)
    for group in range(4):
        send(router, group, session=str(group))
    assert router.remove(0) == {SampleId(0, 0), SampleId(2, 0)}
    assert SampleId(0, 0) not in router._engine_of
    assert [send(router, group, session=str(group)) for group in (0, 2)] == [1, 1]
    assert router.in_flight(0) == 0
    assert router.limit(0) == 0


def test_an_engine_may_be_lost_twice_and_a_late_report_is_ignored():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS)
    send(router, 0)
    router.remove(0)
    assert router.remove(0) == frozenset()
    push_load(router, 0, EngineLoad(slots=64))
    router.release(SampleId(0, 0), tokens=3)
    assert [send(router, group) for group in (1, 2)] == [1, 1]


def test_a_restarted_engine_has_none_of_its_earlier_caches():
    router = make_router(FOUR_SLOTS, FOUR_SLOTS)
    assert send(router, 0, session="a") == 0
    router.remove(0)
    assert send(router, 1, tokens=1) == 1
    router.add(0, FOUR_SLOTS)
    assert send(router, 2, tokens=20) == 0
    assert send(router, 0, session="a") == 1


def test_an_engine_that_joins_is_filled_first():
    router = make_router(FOUR_SLOTS)
    for group in range(3):
        send(router, group)
    router.add(7, FOUR_SLOTS)
    assert [send(router, group) for group in range(3, 6)] == [7, 7, 7]


def test_impossible_calls_are_refused():
    router = make_router(FOUR_SLOTS)
    send(router, 0)
    with pytest.raises(RouterError, match=r"g0\.0 is on engine 0 already"):
        send(router, 0)
    with pytest.raises(RouterError, match="engine 0 was added already"):
        router.add(0, FOUR_SLOTS)


def cache(tokens, *, slots=8, capacity=100, preempted=0):
    return EngineLoad(slots=slots, kv_tokens=tokens, kv_capacity=capacity, preempted=preempted)


@pytest.mark.parametrize(
    ("load", "mean_tokens", "limit"),
    [
        (EngineLoad(slots=8), 10, 8),
        (cache(0), 10, 8),
        (cache(0), 0, 8),
        (cache(0), 30, 3),
        (cache(0), 1000, 1),
        (cache(0, slots=0), 30, 3),
        (cache(0, slots=0), 0, inf),
    ],
)
def test_a_limit_starts_at_the_slots_or_at_what_the_cache_holds(load, mean_tokens, limit):
    assert make_router(load, mean_tokens=mean_tokens).limit(0) == limit


@pytest.mark.parametrize(
    ("news", "limit"),
    [
        (cache(0), 8),
        (cache(95), 8),
        (cache(96), 6),
        (cache(0, preempted=4), 8),
        (cache(0, preempted=5), 6),
        (cache(0, slots=4), 4),
        (EngineLoad(slots=5), 5),
    ],
)
def test_a_limit_shrinks_by_a_quarter_when_the_cache_is_nearly_full(news, limit):
    router = make_router(cache(0, preempted=4), mean_tokens=10)
    push_load(router, 0, news)
    assert router.limit(0) == limit


def test_a_limit_shrinks_no_lower_than_one():
    router = make_router(cache(0))
    for preempted in range(1, 20):
        push_load(router, 0, cache(0, preempted=preempted))
    assert router.limit(0) == 1
    assert send(router, 0) == 0
    assert send(router, 1) is None


def test_a_snapshot_that_comes_twice_shrinks_a_limit_once():
    router = make_router(cache(0), mean_tokens=1)
    send(router, 0)
    for _ in range(3):
        push_load(router, 0, cache(99))
    assert router.limit(0) == 6
    router.release(SampleId(0, 0), tokens=1)
    push_load(router, 0, cache(99))
    assert router.limit(0) == 4


def test_a_limit_shrinks_again_only_when_the_last_one_is_kept():
    router = make_router(cache(0), mean_tokens=1)
    for group in range(16):
        send(router, group)
    for group in range(10):
        push_load(router, 0, cache(99, preempted=group))
        assert router.limit(0) == 6
        router.release(SampleId(group, 0), tokens=1)
    push_load(router, 0, cache(99, preempted=100))
    assert router.limit(0) == 4


def test_below_its_slots_an_engine_is_sent_the_limit_and_no_queue():
    router = make_router(cache(0), mean_tokens=1)
    push_load(router, 0, cache(96))
    assert [send(router, group) for group in range(7)] == [0] * 6 + [None]


def test_a_limit_grows_with_each_completion_while_the_cache_has_room_up_to_the_slots():
    router = make_router(cache(0), mean_tokens=1)
    push_load(router, 0, cache(96))
    per_step, limits = int(1 / GROWTH), []
    for step in range(4):
        for number in range(per_step):
            for index in range(6):
                send(router, step, index + 10 * number)
            router.release(SampleId(step, 10 * number), tokens=1)
            push_load(router, 0, cache(50))
            for index in range(1, 6):
                router.release(SampleId(step, index + 10 * number), tokens=0)
            push_load(router, 0, cache(90))
        limits.append(router.limit(0))
    assert limits == [7, 8, 8, 8]


@pytest.mark.parametrize(("tokens", "held"), [(90, 6), (50, 4)])
def test_an_unused_limit_or_one_of_a_full_cache_does_not_grow(tokens, held):
    router = make_router(cache(0), mean_tokens=1)
    push_load(router, 0, cache(96))
    # The first step uses the full limit, but fills the cache to 90 of 100 tokens.
    for step, (num_requests, cached_tokens) in enumerate([(6, 90)] + 20 * [(held, tokens)]):
        for index in range(num_requests):
            send(router, step, index)
        for index in range(num_requests):
            router.release(SampleId(step, index), tokens=1)
        push_load(router, 0, cache(cached_tokens))
    assert router.limit(0) == 6


def test_the_limit_follows_the_mean_length_until_the_cache_has_pressed():
    router = make_router(cache(0, slots=0, capacity=1000))
    assert send(router, 0, tokens=100) == 0
    assert router.limit(0) == 10
    send(router, 1, tokens=200)
    assert router.limit(0) == 6, "1000 tokens by a mean of 150"
    push_load(router, 0, cache(1000, slots=0, capacity=1000))
    assert router.limit(0) == 5
    for group in range(2, 5):
        send(router, group, tokens=900)
    assert router.limit(0) == 5, "the cache knows better than the mean"


def test_one_giant_hardly_moves_the_mean_length():
    router = make_router(cache(0, slots=0, capacity=10_000), mean_tokens=100)
    send(router, 0, tokens=1_000_000)
    assert router.limit(0) == 100


class ToyCache:
    """An engine that decodes one token per step and sequence, and preempts the youngest sequence
    when its cache is full. A preempted sequence keeps its tokens and resumes when they fit."""

    def __init__(self, capacity, slots):
        self.capacity, self.slots = capacity, slots
        self.running: dict[SampleId, int] = {}
        self.waiting: dict[SampleId, int] = {}
        self.preempted = 0

    def step(self, length):
        for uid in list(self.waiting):
            need = self.waiting[uid] + 1 + len(self.running)
            if len(self.running) == self.slots or self.used + need > self.capacity:
                break
            self.running[uid] = self.waiting.pop(uid)
        self.running = {uid: tokens + 1 for uid, tokens in self.running.items()}
        while self.used > self.capacity:
            uid, tokens = self.running.popitem()
            self.waiting = {uid: tokens, **self.waiting}
            self.preempted += 1
        ended = [uid for uid, tokens in self.running.items() if tokens == length(uid)]
        for uid in ended:
            del self.running[uid]
        return ended

    @property
    def used(self):
        return sum(self.running.values())

    def load(self):
        return EngineLoad(
            running=len(self.running),
            waiting=len(self.waiting),
            slots=self.slots,
            kv_tokens=self.used,
            kv_capacity=self.capacity,
            preempted=self.preempted,
        )


def run_toy_engine(engine, router, *, steps, length):
    """Keep an engine as full as the router allows. Returns the mean limit, the completions per step
    and the preemptions per completion of the second half."""
    groups, limits, ended, preempted = count(), [], 0, 0
    router.add(0, engine.load())
    for step in range(steps):
        while router.has_room:
            uid = SampleId(next(groups), 0)
            router.choose(uid, session=None, tokens=40)
            engine.waiting[uid] = 0
        done = engine.step(length)
        for uid in done:
            router.release(uid, tokens=length(uid))
        if done:
            push_load(router, 0, engine.load())
        if step == steps // 2:
            limits, ended, preempted = [], 0, engine.preempted
        limits.append(router.limit(0))
        ended += len(done)
    return sum(limits) / len(limits), ended / len(limits), (engine.preempted - preempted) / ended


def length_from_20_to_60(uid):
    return 20 + uid.group * 7 % 41


@pytest.mark.parametrize("mean_tokens", [5, 40, 400])
def test_in_a_toy_cache_the_limit_finds_what_the_cache_holds(mean_tokens):
    # A running sequence holds 22 tokens on average (half its length, the long ones more often):
    # 500 tokens hold 23 of them, and 23 / 40 end in a step.
    router = Router(mean_tokens=mean_tokens)
    limit, rate, preemption_rate = run_toy_engine(
        ToyCache(500, slots=64), router, steps=4000, length=length_from_20_to_60
    )
    assert 15 <= limit <= 23
    assert rate >= 0.75 * 23 / 40
    assert preemption_rate <= 0.1


def test_in_a_toy_cache_with_room_for_all_the_limit_is_the_slots():
    router = Router(mean_tokens=1000)
    limit, rate, preemption_rate = run_toy_engine(
        ToyCache(5000, slots=16), router, steps=2000, length=length_from_20_to_60
    )
    assert (limit, preemption_rate) == (16, 0)
    assert rate >= 0.95 * 16 / 40


@settings(derandomize=True, deadline=None, max_examples=100)
@given(slots=st.lists(st.integers(1, 40), min_size=1, max_size=6), share=st.floats(0, 1))
def test_engines_of_different_size_are_filled_to_one_level(slots, share):
    router = make_router(*(EngineLoad(slots=size) for size in slots))
    sent = round(share * sum(slots))
    for group in range(sent):
        send(router, group)
    counts = [router.in_flight(number) for number in range(len(slots))]
    assert sum(counts) == sent
    level = min(held / size for held, size in zip(counts, slots, strict=True))
    for held, size in zip(counts, slots, strict=True):
        assert size * level <= held + 1e-9 <= size * level + 1 + 2e-9
        assert held <= size * sent / sum(slots) + 1, "never one more than its share"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(50, 200)), min_size=1, max_size=5),
    events=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=80),
)
def test_the_choice_is_that_of_a_search_over_all_engines(sizes, events):
    router = make_router(
        *(EngineLoad(slots=slots, kv_capacity=capacity) for slots, capacity in sizes),
        mean_tokens=1,
        margin=-1,
    )
    held = [{} for _ in sizes]
    for group, (is_release, tokens) in enumerate(events):
        held_requests = [(number, uid) for number, uids in enumerate(held) for uid in uids]
        if is_release and held_requests:
            number, uid = held_requests[tokens % len(held_requests)]
            del held[number][uid]
            router.release(uid, tokens=0)
            continue
        ranked = [
            (len(uids) >= slots, sum(uids.values()) / capacity, number)
            for number, (uids, (slots, capacity)) in enumerate(zip(held, sizes, strict=True))
            if len(uids) < 2 * slots
        ]
        expected = min(ranked)[2] if ranked else None
        assert router.has_room == bool(ranked)
        assert send(router, group, tokens=tokens) == expected
        if expected is not None:
            held[expected][SampleId(group, 0)] = tokens


LOADS = st.builds(
    EngineLoad,
    running=st.integers(0, 9),
    waiting=st.integers(0, 3),
    slots=st.integers(1, 5),
    kv_tokens=st.integers(0, 110),
    kv_capacity=st.sampled_from([0, 100, 100]),
    preempted=st.integers(0, 3),
)


class RouterMachine(RuleBasedStateMachine):
    """Requests, snapshots and engines come and go in any order. Two routers get the same events."""

    @initialize(queue=st.sampled_from([0.0, 0.5, 1.0]), mean=st.sampled_from([0.0, 20.0]))
    def begin(self, queue, mean):
        self.routers = [
            Router(engine_queue=queue, mean_tokens=mean, remembered=3) for _ in range(2)
        ]
        self.router = self.routers[0]
        self.queue = queue
        self.slots: dict[int, int] = {}
        self.engine_by_sample: dict[SampleId, int] = {}

    def call_both(self, method, *args, **options):
        first, second = (getattr(router, method)(*args, **options) for router in self.routers)
        assert first == second
        return first

    @precondition(lambda self: len(self.slots) < 4)
    @rule(engine=st.integers(0, 5), load=LOADS)
    def add(self, engine, load):
        if engine not in self.slots:
            self.call_both("add", engine, load)
            self.slots[engine] = load.slots

    @rule(engine=st.integers(0, 5))
    def remove(self, engine):
        lost = {uid for uid, number in self.engine_by_sample.items() if number == engine}
        assert self.call_both("remove", engine) == lost
        self.slots.pop(engine, None)
        self.engine_by_sample = {
            uid: current for uid, current in self.engine_by_sample.items() if current != engine
        }

    @rule(engine=st.integers(0, 5), load=LOADS)
    def push_load(self, engine, load):
        for router in self.routers:
            push_load(router, engine, load)
        if engine in self.slots:
            self.slots[engine] = load.slots

    @rule(
        group=st.integers(0, 5),
        index=st.integers(0, 2),
        session=st.sampled_from([None, "a", "b"]),
        tokens=st.integers(0, 60),
    )
    def choose(self, group, index, session, tokens):
        uid = SampleId(group, index)
        if uid in self.engine_by_sample:
            return
        had_room = self.router.has_room
        engine = self.call_both("choose", uid, session=session, tokens=tokens)
        assert (engine is not None) == had_room
        if engine is not None:
            assert engine in self.slots
            self.engine_by_sample[uid] = engine
            assert self.router.in_flight(engine) <= self.slots[engine] * (1 + self.queue)

    @rule(group=st.integers(0, 5), index=st.integers(0, 2), drawn=st.integers(0, 60))
    def release(self, group, index, drawn):
        self.call_both("release", SampleId(group, index), tokens=drawn)
        self.engine_by_sample.pop(SampleId(group, index), None)

    @invariant()
    def what_is_in_flight_is_what_was_chosen_and_not_released(self):
        held = list(self.engine_by_sample.values())
        for engine in range(6):
            assert self.router.in_flight(engine) == held.count(engine)
        assert all(
            self.router._engine_of[uid].number == engine
            for uid, engine in self.engine_by_sample.items()
        )

    @invariant()
    def a_limit_is_between_one_and_the_slots(self):
        for engine, slots in self.slots.items():
            assert 1 <= self.router.limit(engine) <= slots

    @invariant()
    def there_is_room_where_an_engine_has_nothing_to_do(self):
        if any(not self.router.in_flight(engine) for engine in self.slots):
            assert self.router.has_room


RouterMachine.TestCase.settings = settings(
    derandomize=True,
    deadline=None,
    max_examples=100,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
test_reservations_are_conserved_in_any_order_of_events = RouterMachine.TestCase


def test_memory_of_a_choice_does_not_grow_with_the_number_of_choices():
    router = make_router(*(EngineLoad(slots=2) for _ in range(4)))
    for group in range(6):
        send(router, group)
    for group in range(6, 3000):
        router.release(SampleId(group - 6, 0), tokens=10)
        router.end_group(group - 6)
        send(router, group)
    assert len(router._heap) + len(router._engine_of_group) < 100


@pytest.mark.slow
def test_a_choice_among_a_thousand_engines_takes_microseconds():
    router = make_router(*(EngineLoad(slots=32, kv_capacity=65_536) for _ in range(1024)))
    for group in range(40_000):
        send(router, group, tokens=100 + group * 37 % 1400)
    begun = process_time()
    for group in range(40_000, 140_000):
        router.release(SampleId(group - 40_000, 0), tokens=100)
        assert send(router, group, tokens=100 + group * 37 % 1400) is not None
    microseconds = (process_time() - begun) * 10
    print(f"{microseconds:.1f} microseconds for a release and a choice")
    assert microseconds < 100

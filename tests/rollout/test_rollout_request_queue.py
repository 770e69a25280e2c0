"""The request queue: the order of requests, and a comparison with a sorted list."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.rollout.request_queue import RequestNeeds, RequestQueue
from rollick.types import SampleId


def drain(queue):
    """Pop all requests; returns their groups in order."""
    popped = []
    while (first := queue.pop()) is not None:
        popped.append(first[0].group)
    return popped


def put(queue, group, *, deadline=0, tokens=1.0, order="oldest", started=False):
    queue.push(SampleId(group, 0), RequestNeeds(deadline, tokens), order=order, started=started)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"deadline": 3}, {"deadline": 4}),
        ({"deadline": 3}, {"deadline": 4, "started": True}),
        ({"deadline": 3, "started": True}, {"deadline": 3}),
        ({"started": True, "tokens": 1, "order": "longest"}, {"tokens": 9, "order": "longest"}),
        ({"tokens": 9, "order": "longest"}, {"tokens": 8, "order": "longest"}),
        ({"deadline": 1, "tokens": 8, "order": "longest"}, {"deadline": 2, "tokens": 9}),
    ],
)
def test_requests_are_ordered_by_deadline_then_started_then_longest(first, second):
    # `second` has the smaller id, so only the rule can put `first` before it.
    queue = RequestQueue()
    put(queue, 1, **second)
    put(queue, 2, **first)
    assert drain(queue) == [2, 1]


def test_among_equals_the_smaller_id_goes_first_in_any_order_of_arrival():
    queue = RequestQueue()
    for uid in (SampleId(2, 0), SampleId(1, 1), SampleId(1, 0)):
        queue.push(uid, RequestNeeds(0, 5.0), order="longest")
    popped = [queue.pop() for _ in range(3)]
    assert [uid for uid, _ in popped] == [SampleId(1, 0), SampleId(1, 1), SampleId(2, 0)]


def test_oldest_first_ignores_the_length():
    queue = RequestQueue()
    put(queue, 1, tokens=1)
    put(queue, 2, tokens=9)
    assert drain(queue) == [1, 2]


def test_an_empty_queue_gives_none():
    queue = RequestQueue()
    assert queue.pop() is None
    assert len(queue) == 0


def test_each_request_gets_its_own_result():
    queue = RequestQueue()
    for index, session in enumerate(("a", None, "c")):
        queue.push(SampleId(1, index), RequestNeeds(0, 10.0 + index, session))
    assert [queue.pop() for _ in range(3)] == [
        (SampleId(1, 0), RequestNeeds(0, 10.0, "a")),
        (SampleId(1, 1), RequestNeeds(0, 11.0)),
        (SampleId(1, 2), RequestNeeds(0, 12.0, "c")),
    ]


def test_a_removed_request_is_not_returned_and_may_be_pushed_again():
    queue = RequestQueue()
    put(queue, 1)
    put(queue, 2)
    assert queue.remove(SampleId(1, 0))
    assert not queue.remove(SampleId(1, 0))
    assert len(queue) == 1
    put(queue, 1, deadline=9)
    assert drain(queue) == [2, 1]


def test_a_request_that_is_pushed_again_is_replaced():
    queue = RequestQueue()
    put(queue, 1, deadline=1)
    put(queue, 2, deadline=2)
    put(queue, 1, deadline=3)
    assert len(queue) == 2
    assert drain(queue) == [2, 1]


def test_removed_requests_do_not_pile_up():
    queue = RequestQueue()
    put(queue, 0, deadline=-1)
    for group in range(1, 2000):
        put(queue, group)
        put(queue, group, deadline=1)
        queue.remove(SampleId(group, 0))
    assert len(queue._heap) < 100
    for group in range(1, 2000):
        put(queue, group)
    for group in range(1, 2000):
        queue.remove(SampleId(group, 0))
    assert len(queue._heap) < 100
    assert drain(queue) == [0]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "pop", "pop", "remove"]),
        st.builds(SampleId, st.integers(0, 7), st.integers(0, 2)),
        st.integers(0, 2),
        st.sampled_from([1.0, 2.0, 3.0]),
        st.sampled_from(["oldest", "longest"]),
        st.booleans(),
    ),
    max_size=120,
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(events=EVENTS)
def test_in_any_order_of_events_the_queue_is_a_sorted_list(events):
    queue, sorted_list = RequestQueue(), {}
    for event, uid, deadline, tokens, order, started in events:
        if event == "push":
            needs = RequestNeeds(deadline, tokens)
            queue.push(uid, needs, order=order, started=started)
            length = -tokens if order == "longest" else 0
            sorted_list[uid] = (deadline, not started, length, uid, needs)
        elif event == "remove":
            assert queue.remove(uid) == (sorted_list.pop(uid, None) is not None)
        else:
            expected = min(sorted_list.values(), key=lambda entry: entry[:4], default=None)
            assert queue.pop() == (None if expected is None else expected[3:])
            if expected is not None:
                del sorted_list[expected[3]]
        assert len(queue) == len(sorted_list)

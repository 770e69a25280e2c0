"""The router, as a table."""

import pytest

from rollick.rollout.router import capacity, choose_engine
from rollick.types import EngineLoad

FOUR = EngineLoad(slots=4)


@pytest.mark.parametrize(
    ("in_flight", "home", "chosen"),
    [
        ([0, 0], None, 0),
        ([1, 0], None, 1),
        ([2, 2], None, 0),
        ([3, 0], 0, 0),
        ([4, 3], 0, 1),
        ([4, 4], 1, 1),
        ([5, 4], None, 1),
        ([8, 7], 0, 1),
        ([8, 8], 0, None),
    ],
)
def test_a_sample_goes_home_while_there_is_room_and_else_to_the_least_load(in_flight, home, chosen):
    assert choose_engine([FOUR, FOUR], in_flight, home=home) == chosen


def test_requests_of_others_count_as_load():
    busy = EngineLoad(running=3, waiting=1, slots=8)
    assert choose_engine([busy, EngineLoad(slots=8)], [0, 3]) == 1


def test_a_stale_snapshot_never_makes_an_engine_full():
    stale = EngineLoad(running=4, waiting=100, slots=4)
    assert choose_engine([stale], [0]) == 0


def test_an_engine_that_has_not_told_its_slots_has_no_limit():
    assert capacity(EngineLoad()) == float("inf")
    assert choose_engine([EngineLoad(), EngineLoad()], [1000, 999]) == 1


def test_a_group_goes_together_unless_its_engine_is_full():
    in_flight, home, placed = [0, 0], None, []
    for _ in range(6):
        engine = choose_engine([FOUR, FOUR], in_flight, home=home)
        assert engine is not None
        home = engine if home is None else home
        in_flight[engine] += 1
        placed.append(engine)
    assert placed == [0, 0, 0, 0, 1, 1]

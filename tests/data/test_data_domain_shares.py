"""Domain shares among the groups that are trained on."""

from collections import Counter
from pathlib import Path

import pytest

from rollick.config.schema import RlDataConfig, RlvrDomain
from rollick.data.curriculum import LOWEST_RATE, TrainedShares
from rollick.data.prompts import PromptStream
from rollick.testing.fakes import group


def test_a_domain_of_which_half_is_dropped_is_drawn_twice_as_often() -> None:
    shares = TrainedShares({"a": 1.0, "b": 3.0})
    assert shares.weights == {"a": 1.0, "b": 3.0}
    for _ in range(50):
        for number in range(4):
            shares.record("a", kept=number % 2 == 0)
            shares.record("b", kept=True)
        shares.update()
    assert shares.weights == pytest.approx({"a": 2.0, "b": 3.0}, rel=1e-6)


def test_a_domain_that_is_always_dropped_is_drawn_five_times_as_often_and_no_more() -> None:
    shares = TrainedShares({"a": 1.0})
    for _ in range(100):
        shares.record("a", kept=False)
        shares.update()
    assert shares.weights == {"a": 1 / LOWEST_RATE}


def test_nothing_changes_before_learn_and_a_resumed_selection_continues_equally() -> None:
    first = TrainedShares({"a": 1.0, "b": 1.0})
    first.record("a", kept=False)
    assert first.weights == {"a": 1.0, "b": 1.0}
    second = TrainedShares({"a": 1.0, "b": 1.0})
    second.restore(first.state())
    for shares in (first, second):
        shares.update()
        assert shares.weights == pytest.approx({"a": 1 / 0.7, "b": 1.0})


def count_draws(stream: PromptStream, count: int) -> Counter[str]:
    return Counter(stream.next().domain for _ in range(count))


def test_the_stream_draws_by_trained_groups_only_if_configured(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}"} for number in range(50)]
    domain = {"source": "object:rows"}
    for shares_of, expected in (("trained", {"a": 75, "b": 25}), ("drawn", {"a": 50, "b": 50})):
        data = RlDataConfig[RlvrDomain].model_validate(
            {"shares_of": shares_of, "domains": {"a": domain, "b": domain}}
        )
        stream = PromptStream.open(data, seed=0, base=tmp_path, objects={"rows": rows})
        by_domain = {prompt.domain: prompt for prompt in stream.all()}
        for _ in range(40):
            for number in range(3):
                stream.record_group(group([0, 1], of=by_domain["a"]), kept=number == 0)
                stream.record_group(group([0, 1], of=by_domain["b"]), kept=True)
            stream.update_selection()
        assert count_draws(stream, 100) == expected
        resumed = PromptStream.open(data, seed=0, base=tmp_path, objects={"rows": rows})
        resumed.restore(stream.state())
        assert [resumed.next().uid for _ in range(9)] == [stream.next().uid for _ in range(9)]

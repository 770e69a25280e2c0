"""How `make test` divides the suite between its worker processes (see conftest.py)."""

from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    return request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


def test_the_files_that_are_kept_together_or_divided_are_there(conftest: Any) -> None:
    named = [file for files in (*conftest.TOGETHER.values(), conftest.APART) for file in files]
    assert [file for file in named if not (TESTS / file).is_file()] == []
    assert len(set(named)) == len(named)


def test_a_file_that_is_divided_has_no_fixture_that_its_tests_share(conftest: Any) -> None:
    shared = ('scope="module"', 'scope="session"', 'loop_scope="')
    for file in conftest.APART:
        text = (TESTS / file).read_text("utf-8")
        assert not any(word in text for word in shared), file


def test_the_dear_ones_come_first_then_whole_files_then_single_tests(conftest: Any) -> None:
    units = [
        conftest.unit_of(f"tests/{name}")
        for name in (
            "infer/test_infer_vllm.py::test_a",
            "contracts/test_contract_engine.py::test_b",
            "data/test_data_chat.py::test_c[1]",
            "data/test_data_chat.py::test_d",
            "rollout/test_rollout_histories.py::test_e",
            "rollout/test_rollout_histories.py::test_f",
        )
    ]
    assert [turn for turn, _ in units] == [0, 0, 1, 1, 2, 2]
    assert [len({name for _, name in units[n : n + 2]}) for n in (0, 2, 4)] == [1, 1, 2]

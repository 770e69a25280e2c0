"""How `make test` divides the suite between its worker processes (see conftest.py)."""

from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    return request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


def test_the_named_files_exist(conftest: Any) -> None:
    named = [
        file
        for files in (*conftest.FILES_OF_ONE_WORKER.values(), conftest.FILES_SPLIT_BY_TEST)
        for file in files
    ]
    assert [file for file in named if not (TESTS / file).is_file()] == []
    assert len(set(named)) == len(named)


def test_a_file_split_by_test_has_no_shared_fixture(conftest: Any) -> None:
    shared = ('scope="module"', 'scope="session"', 'loop_scope="')
    for file in conftest.FILES_SPLIT_BY_TEST:
        text = (TESTS / file).read_text("utf-8")
        assert not any(word in text for word in shared), file


def test_expensive_files_run_first_then_files_then_single_tests(conftest: Any) -> None:
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
    assert [order for order, _ in units] == [0, 0, 1, 1, 2, 2]
    assert [len({name for _, name in units[n : n + 2]}) for n in (0, 2, 4)] == [1, 1, 2]

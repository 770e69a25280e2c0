"""reasoning-gym: every task's reference answer scores 1, and no answer is ever executed."""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rollick.config.names import NAMES
from rollick.config.schema import Domain, RewardSpec
from rollick.data.sources import read_rows
from rollick.errors import DataError
from rollick.rewards.pool import RewardPool
from rollick.testing.fakes import prompt, sample

pytest.importorskip("reasoning_gym", reason="the extra rewards is not installed")

from rollick.data.reasoning_gym_source import gym_rows, make_row, read_gym_source
from rollick.rewards.reasoning_gym_scores import (
    COMPARED_TASKS,
    EVALUATING_MODULES,
    check_expression,
    extract_gym_answer,
    reasoning_gym,
)

GYM_TASKS = tuple(NAMES["gym_tasks"])
SETTINGS = json.dumps({"seed": 3, "size": 2})
WITHOUT_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks with many correct answers; their rows have no reference answer."""
EVALUATES_ITS_OWN = {
    "algorithmic/number_sorting.py",
    "arithmetic/basic_arithmetic.py",
    "arithmetic/bitwise_arithmetic.py",
    "arithmetic/gsm_symbolic/generators_00_49.py",
    "arithmetic/gsm_symbolic/generators_50_99.py",
    "code/codeio.py",
}
"""Files that evaluate only code that the package itself generated."""


def score(row: dict[str, Any], completion: str) -> float:
    names = ("task", "entry", "settings", "index")
    return reasoning_gym(completion, **{name: row[name] for name in names})


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """A row of every task, after a round trip through JSON."""
    return {task: json.loads(json.dumps(make_row(task, SETTINGS, 1))) for task in GYM_TASKS}


def test_the_table_has_every_task_of_the_installed_version():
    from reasoning_gym.factory import DATASETS

    assert set(GYM_TASKS) == set(DATASETS) - {"composite"}
    assert len(GYM_TASKS) >= 100


@pytest.mark.parametrize("task", sorted(set(GYM_TASKS) - WITHOUT_REFERENCE))
def test_the_reference_answer_scores_one_and_a_random_answer_does_not(
    rows: dict[str, dict[str, Any]], task: str
):
    row = rows[task]
    assert score(row, f"<think>hm</think><answer>{row['answer']}</answer>") == 1.0
    assert score(row, "<answer>I have no idea</answer>") < 1.0
    assert score(row, "<think>for ever") < 1.0


@pytest.mark.parametrize("task", sorted(WITHOUT_REFERENCE))
def test_a_task_without_a_reference_scores_nonsense_low_and_its_example_high(
    rows: dict[str, dict[str, Any]], task: str
):
    row = rows[task]
    assert row["answer"] is None
    assert score(row, "<answer>I have no idea</answer>") < 0.5
    metadata = ast.literal_eval(row["entry"])["metadata"]
    example = metadata.get("example_correct_answer") or metadata.get("example_answer")
    if example is not None:
        assert score(row, f"<answer>{example}</answer>") == 1.0
    if "possible_answer" in metadata:
        assert score(row, f"<answer>{json.dumps(metadata['possible_answer'])}</answer>") == 1.0


@pytest.mark.parametrize("task", sorted(COMPARED_TASKS))
def test_tasks_with_faulty_scorers_are_compared_with_the_reference(
    rows: dict[str, dict[str, Any]], task: str
):
    wrong = "True" if rows[task]["answer"] == "False" else "False"
    assert score(rows[task], f"<answer>{wrong}</answer>") == 0.0
    assert score(rows[task], "<answer>0.77</answer>") == 0.0


PAYLOADS = [
    "__import__('os').system('touch {file}')",
    "[__import__('os').system('touch {file}')]",
    "[open('{file}', 'w')]",
    "().__class__.__mro__[1].__subclasses__()",
    "(lambda: open('{file}', 'w'))()",
    "[x for x in [open('{file}', 'w')]]",
    'exec(\'open("{file}", "w")\')',
    'eval(\'open("{file}", "w")\')',
    'sympify(\'open("{file}", "w")\')',
    'lambdify(x, \'open("{file}", "w")\')(1)',
]


def test_no_answer_is_executed_by_any_task(rows: dict[str, dict[str, Any]], tmp_path: Path):
    file = tmp_path / "escaped"
    for task, row in rows.items():
        for payload in PAYLOADS:
            answer = payload.replace("{file}", str(file))
            assert score(row, f"<answer>{answer}</answer>") < 1.0, (task, payload)
            assert not file.exists(), (task, payload)


@pytest.mark.slow
def test_the_package_has_no_unknown_file_that_evaluates():
    import reasoning_gym as package

    root = Path(package.__file__).parent
    actual: set[str] = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "eval",
                "exec",
                "compile",
                "os.system",
                "subprocess.run",
                "pickle.loads",
            ):
                actual.add(str(path.relative_to(root)))
    literals = {
        name.removeprefix("reasoning_gym.").replace(".", "/") + ".py" for name in EVALUATING_MODULES
    }
    assert actual == literals | EVALUATES_ITS_OWN


@pytest.mark.parametrize("code", ["Integer (2 )*Symbol ('x' )", "sqrt (Integer (2 ))", "-x **2"])
def test_arithmetic_may_be_evaluated(code: str):
    check_expression(code, known=frozenset("x"))


@pytest.mark.parametrize("code", ["a.b", "open ('x')", "(lambda :1 )()", "[i for i in x]", "x [0]"])
def test_other_expressions_may_not_be_evaluated(code: str):
    with pytest.raises(ValueError, match="not evaluated"):
        check_expression(code, known=frozenset("x"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "'a' *Integer (10 )**Integer (9 )",
        "Integer (9 )**Integer (9 )**Integer (9 )",
        "factorial (Integer (10 )**Integer (9 ))",
        "Float ('1e999999999' )",
    ],
)
def test_code_that_would_fill_the_memory_or_never_end_is_not_evaluated(code: str):
    with pytest.raises(ValueError):  # noqa: PT011
        check_expression(code, known=frozenset("x"))


@pytest.mark.parametrize(
    "task", ["coin_flip", "countdown", "simple_equations", "polynomial_equations"]
)
@pytest.mark.parametrize(
    "answer",
    ["'a'*10**9", "9**9**9", "(10^9)!", "1e999999999", "(x+1)**100000", "[" * 9000 + "]" * 9000],
)
@pytest.mark.timeout(60)
def test_an_expensive_answer_scores_low_within_a_second(
    rows: dict[str, dict[str, Any]], task: str, answer: str
):
    score(rows[task], "<answer>1</answer>")
    started_at = time.process_time()
    assert score(rows[task], f"<answer>{answer}</answer>") < 0.1
    assert time.process_time() - started_at < 1.0


def test_a_source_gives_the_same_rows_in_every_process():
    spec = "ransom_note?size=3&seed=5"  # its generator depends on the order of sets
    first, second = list(gym_rows(spec)), list(gym_rows(spec))
    assert first == second
    assert len({row["prompt"] for row in first}) == 3


async def test_rows_of_a_source_are_scored_in_the_pool(tmp_path: Path):
    config = Domain(source="reasoning_gym:chain_sum?min_terms=2&max_terms=3", limit=4)
    actual = [raw.value for raw in read_rows(config, base=tmp_path, objects={})]
    assert len(actual) == 4
    async with RewardPool.open(
        {"reasoning_gym": "reasoning_gym"}, processes=1, timeout_s=60
    ) as pool:
        spec = [RewardSpec(name="reasoning_gym")]
        for row in actual:
            task_prompt = prompt(row["prompt"], **row)
            right = await pool.score(
                sample(f"The answer is {row['answer']}.", of=task_prompt), spec
            )
            wrong = await pool.score(sample("The answer is 123456.", of=task_prompt), spec)
            assert right.value == 1.0 > wrong.value


def test_a_wrong_task_or_setting_is_named():
    with pytest.raises(DataError, match="chain_sum"):
        read_gym_source("chain_sums")
    with pytest.raises(DataError, match="its settings are"):
        list(gym_rows("chain_sum?terms=7"))


def test_an_answer_is_tagged_or_boxed_or_the_full_text():
    assert extract_gym_answer("<think>x</think><answer>\n1 2\n3 4\n</answer>") == "1 2\n3 4"
    assert extract_gym_answer("1 2\n3 4") == "1 2\n3 4"
    assert extract_gym_answer("The answer is 7.") == "7"
    assert extract_gym_answer("Answer:\n1 2\n3 4") == "Answer:\n1 2\n3 4"
    assert extract_gym_answer("<think>never ends") is None


def test_the_generator_of_puzzles_gets_no_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CANARY_KEY", "secret")
    assert "CANARY_KEY" in os.environ
    [row] = gym_rows("chain_sum?size=1")
    assert "secret" not in json.dumps(row)

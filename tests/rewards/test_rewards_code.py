"""The reward `code`: programs from completions run in real boxes and get a score."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollick.config.rules.run import PROGRAM_SECONDS, SEQUENTIAL_PROGRAMS
from rollick.config.schema import RewardSpec
from rollick.envs.tools.env import ToolEnv
from rollick.rewards import code as code_module
from rollick.rewards.base import declaration_of
from rollick.rewards.code import CodeSettings, complete_program, extract_code, score_code
from rollick.rewards.pool import RewardPool
from rollick.sandbox.base import Isolation
from rollick.sandbox.host import SandboxHost
from rollick.sandbox.local import LocalSandbox
from rollick.testing.fakes import prompt, sample

MBPP_ROW = {
    "text": "Write a function that adds.",
    "code": "def add(a, b):\n    return a + b",
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"],
}
HUMANEVAL_ROW = {
    "prompt": """import math

def double(x):
    return 2 * x

def quad(x):
    '''Four times x.'''
""",
    "test": """def check(candidate):
    assert candidate(2) == 8
    assert quad(1) == double(2)
""",
    "entry_point": "quad",
}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("def f(): ...", "def f(): ..."),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nand\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nprints\n```text\n1\n```", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think>```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1", "x = 1"),
        ("", ""),
    ],
)
def test_the_program_of_a_completion_is_extracted(completion: str, expected: str) -> None:
    assert extract_code(completion) == expected


def test_the_block_that_defines_the_entry_is_taken() -> None:
    text = "```python\ndef f(): ...\n```\nUse it:\n```python\nprint(f())\n```"
    assert extract_code(text, entry="f") == "def f(): ...\n"


def test_a_continuation_follows_its_prompt_and_a_full_function_its_helpers() -> None:
    prompt = HUMANEVAL_ROW["prompt"]
    assert complete_program("    return 4 * x", prompt, "quad") == prompt + "    return 4 * x"
    full = complete_program("def quad(x):\n    return double(double(x))", prompt, "quad")
    assert full.count("def quad") == 1
    assert "def double" in full


async def test_a_correct_program_scores_one_and_reports_its_isolation() -> None:
    score = await score_code("```python\ndef add(a, b):\n    return a + b\n```", MBPP_ROW)
    assert (score.value, score.ok) == (1.0, True)
    assert score.parts == {"passed_share": 1.0, "all_passed": 1.0}
    assert score.isolation in ("full", "user")


async def test_a_program_that_passes_half_scores_zero_unless_partial_is_set() -> None:
    wrong = "```python\ndef add(a, b):\n    return 4\n```"
    assert (await score_code(wrong, MBPP_ROW)).value == 0.0
    score = await score_code(wrong, MBPP_ROW, CodeSettings(partial=True))
    assert (score.value, score.parts) == (0.5, {"passed_share": 0.5, "all_passed": 0.0})


@pytest.mark.parametrize(
    "completion", ["I do not know.", "", "```python\nimport os; os._exit(0)\n```"]
)
async def test_a_completion_without_a_program_scores_zero(completion: str) -> None:
    score = await score_code(completion, MBPP_ROW)
    assert (score.ok, score.value) == (True, 0.0)


async def test_a_program_that_hangs_scores_zero() -> None:
    score = await score_code(
        "```python\nwhile True: pass\n```", MBPP_ROW, CodeSettings(timeout_s=0.5)
    )
    assert (score.ok, score.value) == (True, 0.0)
    assert "timeout" in score.detail


async def test_programs_that_hang_score_zero_in_the_time_that_a_recipe_must_give() -> None:
    defaults = {"timeout_s": CodeSettings().timeout_s, "program_s": ToolEnv.program_s}
    assert defaults == PROGRAM_SECONDS
    tests = {"test_list": MBPP_ROW["test_list"]}
    batch = declaration_of(code_module.code).batch
    assert batch == SEQUENTIAL_PROGRAMS * LocalSandbox().concurrency
    spec = RewardSpec(name="code", options={"timeout_s": 0.4})
    async with RewardPool.open(
        {"code": "code"}, processes=1, timeout_s=SEQUENTIAL_PROGRAMS * 0.4 + 3
    ) as pool:
        code = "```python\ndef add(a, b):\n  while True: pass\n# {}\n```"
        completions = [code.format(number) for number in range(batch)]
        scores = await asyncio.gather(
            *(pool.score(sample(text, of=prompt(**tests)), [spec]) for text in completions)
        )
        assert [(score.ok, score.value) for score in scores] == [(True, 0.0)] * batch
        assert pool.stats.restarts == 0


@pytest.mark.parametrize(
    "answer", ["    return 4 * x\n", "```python\ndef quad(x):\n    return 4 * x\n```"]
)
async def test_rows_of_humaneval_are_scored(answer: str) -> None:
    assert (await score_code(answer, HUMANEVAL_ROW)).value == 1.0


async def test_helpers_of_the_prompt_are_not_taken_from_the_candidate() -> None:
    cheat = (
        "```python\ndef double(x):\n    return 3\ndef quad(x):\n    return 8 if x == 2 else 3\n```"
    )
    assert (await score_code(cheat, HUMANEVAL_ROW)).value == 0.0


@pytest.mark.parametrize(
    ("row", "program"),
    [
        ({"cases": [{"input": "2 3", "output": "5"}]}, "print(sum(map(int, input().split())))"),
        ({"calls": [{"entry": "f", "args": [2], "expected": 4}]}, "def f(x):\n    return x * x"),
        (
            {"test_file": "from solution import f\ndef test_f():\n    assert f(2) == 4\n"},
            "def f(x):\n    return x * x",
        ),
    ],
)
async def test_other_kinds_of_tests_are_scored(row: dict[str, Any], program: str) -> None:
    score = await score_code(f"```python\n{program}\n```", row, CodeSettings(timeout_s=60.0))
    assert score.value == 1.0, score


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"test_list": ["assert add(1"]},
        {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "import nothing_like_it"},
    ],
)
async def test_rows_without_valid_tests_give_a_failed_score(
    row: dict[str, Any],
) -> None:
    score = await score_code("```python\ndef add(a, b):\n    return a + b\n```", row)
    assert not score.ok


async def test_a_machine_without_isolation_gives_a_failed_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox = LocalSandbox(host=SandboxHost(Isolation.NONE, "no namespaces"))
    monkeypatch.setattr(code_module, "open_sandbox", lambda url, allow_unsafe: sandbox)
    score = await score_code("```python\ndef add(a, b):\n    return a + b\n```", MBPP_ROW)
    assert not score.ok
    assert "no namespaces" in score.detail


OBJECT_TESTS = """
import pytest
import solution
from solution import LIMIT, Empty, Solution, Stack, Vector, make


def test_a_method():
    assert Solution().two_sum([2, 7, 11], 9) == [0, 1]


def test_state_and_operators():
    stack = Stack()
    stack.push(1)
    stack.push(2)
    assert (len(stack), stack.pop(), list(stack), stack[0]) == (2, 2, [1], 1)
    assert 1 in stack
    assert 5 not in stack
    stack.items = [4]
    assert stack.items == [4]
    assert not Stack()
    assert isinstance(stack, Stack)
    assert not isinstance(stack, Vector)


def test_exceptions():
    with pytest.raises(Empty, match="is empty"):
        Stack().pop()
    with pytest.raises(ValueError):
        solution.Vector("x", 1)


def test_values_that_are_objects():
    assert Vector(1, 2) + Vector(2, 3) == Vector(3, 5)
    assert Vector(1, 2) != Vector(3, 5)
    assert Vector(1, 2) < Vector(2, 2)
    assert str(Vector(1, 2)) == "V(1, 2)"
    assert Vector.zero().x == 0
    assert [each.x for each in make(3).both()] == [3, 4]
    assert solution.x_of(make(LIMIT)) == 7
"""
OBJECTS = """
LIMIT = 7
class Empty(Exception): pass
class Solution:
    def two_sum(self, numbers, target):
        return next([i, j] for j in range(len(numbers)) for i in range(j)
                    if numbers[i] + numbers[j] == target)
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise Empty("it is empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]
class Vector:
    def __init__(self, x, y): self.x, self.y = int(x), y
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __lt__(self, other): return self.x < other.x
    def __str__(self): return f"V({self.x}, {self.y})"
    @classmethod
    def zero(cls): return cls(0, 0)
    def both(self): return [self, Vector(self.x + 1, 0)]
def make(x): return Vector(x, 0)
def x_of(vector): return vector.x
"""


@pytest.mark.parametrize(
    ("change", "passed"),
    [(("", ""), 4), (("[i, j]", "[j, i]"), 3), (("append(item)", "insert(0, item)"), 3)],
)
async def test_a_pytest_file_may_build_objects(change: tuple[str, str], passed: int) -> None:
    program = OBJECTS.replace(*change) if change[0] else OBJECTS
    settings = CodeSettings(timeout_s=60.0, partial=True)
    score = await score_code(f"```python\n{program}\n```", {"test_file": OBJECT_TESTS}, settings)
    assert score.value == passed / 4, score
    assert score.isolation != Isolation.SHARED


FORGERY = """
class Anything:
    def __init__(self, *args): pass
    def always(self, other): return True
    __eq__ = __contains__ = __lt__ = __gt__ = __le__ = __ge__ = always
    def __sub__(self, other): return 0
    __rsub__ = __sub__
def f(x): return Anything()
class g(Anything): pass
class Solution:
    def solve(self, x): return Anything()
"""


async def test_an_object_that_equals_everything_passes_no_test_for_a_value() -> None:
    checks = [
        *("f(2) == 4", "4 == f(2)", "4 in f(2)", "f(2) < 5", "abs(f(2) - 4) < 1", "f(2) in [4]"),
        *("abs(4 - f(2)) < 1", "f(2) == pytest.approx(4)", "pytest.approx(4) == f(2)", "g(2) == 4"),
        *("4 in g(2)", "Solution().solve(2) == 4", "4 in Solution().solve(2)", "f(2) == f(3)"),
    ]
    tests = [f"def test_{n}():\n    assert {check}\n" for n, check in enumerate(checks)]
    row = {"test_file": "import pytest\nfrom solution import Solution, f, g\n" + "\n".join(tests)}
    settings = CodeSettings(timeout_s=60.0, partial=True)
    score = await score_code(f"```python\n{FORGERY}\n```", row, settings)
    assert (score.value, score.detail[:14]) == (0.0, "0 of 14 tests,")


@pytest.mark.parametrize(
    ("test_file", "shared"),
    [
        (
            "from solution import *\ndef test():\n    assert {Node(1), Node(1)} == {Node(1)}\n",
            False,
        ),
        (
            "from solution import Node\nclass Leaf(Node): ...\n"
            "def test():\n    assert Leaf(2).value == 2\n",
            True,
        ),
    ],
    ids=["proxies", "one box"],
)
async def test_a_right_program_scores_one_with_the_isolation_that_its_tests_allow(
    test_file: str, shared: bool
) -> None:
    program = (
        "class Node:\n    def __init__(self, value): self.value = value\n"
        "    def __eq__(self, other): return self.value == other.value\n"
        "    def __hash__(self): return hash(self.value)\n"
    )
    row, settings = {"test_file": test_file}, CodeSettings(timeout_s=60.0)
    score = await score_code(f"```python\n{program}\n```", row, settings)
    assert score.value == 1.0, score
    assert (score.isolation == Isolation.SHARED) == shared
    wrong = program.replace("= value\n", "= value + 1\n").replace("hash(self.value)", "id(self)")
    score = await score_code(f"```python\n{wrong}\n```", row, settings)
    assert (score.ok, score.value) == (True, 0.0)


async def test_a_program_inside_thinking_that_does_not_end_is_not_run() -> None:
    program = "```python\ndef add(a, b):\n    return a + b\n```"
    assert (await score_code(f"<think>maybe\n{program}", MBPP_ROW)).value == 0.0
    assert (await score_code(f"<think>hm</think>\n{program}", MBPP_ROW)).value == 1.0


LEETCODE_PROGRAM = """```python
from __future__ import annotations
class Solution:
    def most(self, words: List[str]) -> Optional[str]:
        counts = Counter(words)
        return max(counts, key=lambda word: (counts[word], -pow(2, 3, 5)), default=None)
```"""


@pytest.mark.parametrize(
    "row",
    [
        {"test_file": "from solution import Solution\ndef test_it():\n"
         "    assert Solution().most(['a', 'b', 'b']) == 'b'\n"},
        {"entry_point": "Solution().most", "prompt": "Find the most common word.",
         "test": "def check(candidate):\n    assert candidate(words=['a', 'b', 'b']) == 'b'\n"
         "    assert inf > len(candidate(['a']))\n"},
    ],
)  # fmt: skip
async def test_a_leetcode_prelude_gives_the_names_that_programs_there_use(
    row: dict[str, Any],
) -> None:
    options: Any = {"timeout_s": 60.0}
    with_prelude = await score_code(
        LEETCODE_PROGRAM, row, CodeSettings(**options, prelude="leetcode")
    )
    assert with_prelude.value == 1.0, with_prelude
    assert with_prelude.isolation != Isolation.SHARED
    assert (await score_code(LEETCODE_PROGRAM, row, CodeSettings(**options))).value == 0.0


async def test_a_leetcode_row_may_pass_linked_lists() -> None:
    row = {
        "entry_point": "Solution().total",
        "prompt": "def linked(values):\n    node = None\n    for value in reversed(values):\n"
        "        node = ListNode(value, node)\n    return node\n",
        "test": "def check(candidate):\n    assert candidate(head=linked([1, 2, 3])) == 6\n",
    }
    program = """```python
class Solution:
    def total(self, head: Optional[ListNode]) -> int:
        return head.val + self.total(head.next) if head else START
```"""
    settings = CodeSettings(timeout_s=60.0, prelude="leetcode")
    right = await score_code(program.replace("START", "0"), row, settings)
    assert right.value == 1.0, right
    assert (await score_code(program.replace("START", "1"), row, settings)).value == 0.0


async def test_a_prelude_may_be_code_of_your_own() -> None:
    program = "```python\ndef add(a, b):\n    return plus(a, b)\n```"
    settings = CodeSettings(prelude="from operator import add as plus")
    assert (await score_code(program, MBPP_ROW, settings)).value == 1.0

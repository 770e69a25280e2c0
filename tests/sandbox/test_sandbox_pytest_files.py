"""Pytest files: forms that work with the candidate in another box, and forms that share one."""

from __future__ import annotations

import pytest

from rollick.sandbox.base import Isolation, Limits, Program, Result, Status, Tests
from rollick.sandbox.local import LocalSandbox
from rollick.sandbox.pytest_files import StarNames, find_star_names, shared_box_reason

LIMITS = Limits(wall_s=60)
PROGRAM = """
import asyncio, contextlib, datetime, enum, json
from collections import Counter, OrderedDict, namedtuple

class Empty(Exception): ...
class VeryEmpty(Empty):
    def __init__(self, message, code):
        super().__init__(message)
        self.code = code
class Base:
    def area(self): return 1
class Sub(Base): ...
class Box(Base):
    total = 0
    def __init__(self, value): self.value, self.is_open = value, False
    def __enter__(self):
        self.is_open = True
        return self
    def __exit__(self, *details): self.is_open = False
    def __eq__(self, other): return isinstance(other, Box) and self.value == other.value
    def __hash__(self): return hash(self.value)
    def __lt__(self, other): return self.value < other.value
    def __add__(self, other): return Box(self.value + getattr(other, "value", other))
    def __rmul__(self, factor): return Box(self.value * factor)
    def __repr__(self): return f"Box({self.value})"
    def grow(self): return Box(self.value + 1)
    def fail(self): raise VeryEmpty("nothing is here", 7)
class Suppressing:
    def __enter__(self): return self
    def __exit__(self, *details): return True
    def fail(self): raise ValueError
    def value(self): return 5
class Color(enum.Enum):
    RED = 1
    BLUE = 2
class Cache(OrderedDict):
    def put(self, key, value): self[key] = value
class Stack(list):
    def push(self, item):
        self.append(item)
        return self
Point = namedtuple("Point", "x y")

def add(a, b): return a + b
def apply(function, *values): return [function(value) for value in values]
def make(value): return Box(value)
def boxes(): return {Box(1), Box(2)}
def best(boxes): return max(boxes, key=lambda box: box.value)
def count():
    value = 0
    while True:
        yield value
        value += 1
def curry(function):
    def take(*args):
        enough = len(args) >= function.__code__.co_argcount
        return function(*args) if enough else lambda *more: take(*args, *more)
    return take
def memoize(function):
    known = {}
    def wrapper(n):
        if n not in known:
            known[n] = function(n)
        return known[n]
    return wrapper
def retry(function, times, on=Exception):
    for left in reversed(range(times)):
        try:
            return function()
        except on:
            if not left:
                raise
async def later(value):
    await asyncio.sleep(0)
    return value + 1
async def twice(function): return await function() + await function()
@contextlib.contextmanager
def opened(value): yield value
def rotate(numbers, k): numbers[:] = numbers[-k:] + numbers[:-k]
def order(boxes): boxes.sort()
def tomorrow(day): return day + datetime.timedelta(days=1)
def frequencies(text): return Counter(text)
def read(text): return json.loads(text)
"""
FORMS = """
import asyncio, copy, datetime, json
from collections import Counter
from itertools import islice
from math import *
import pytest
from solution import *


def test_names_of_a_star_import(add_it=None):
    assert add(1, 2) == 3
    assert sqrt(4) == 2
    assert sum([1, 2]) == 3

def test_context_managers():
    with Box(3) as box:
        assert box.is_open
        assert box.value == 3
    assert not box.is_open
    with opened(4) as value:
        assert value == 4
    with Suppressing():
        raise ValueError("suppressed")
    with Suppressing():
        1 / 0

def test_sets_and_keys():
    assert len({Box(1), Box(1), Box(2)}) == 2
    assert Box(1) in {Box(1)}
    assert {Box(1): 5}[Box(1)] == 5
    assert boxes() == {Box(1), Box(2)}

def test_classes():
    assert issubclass(Sub, Base)
    assert not issubclass(Base, Sub)
    assert issubclass(VeryEmpty, Empty)
    assert type(Box(1)) is Box
    assert type(make(1)) is Box
    assert type(Sub()) is not Base
    assert isinstance(Sub(), Base)
    assert Box(1).__class__.__name__ == "Box"
    Box.total = 4
    assert Box.total == 4

def test_callbacks():
    seen = []
    assert apply(lambda value: value + 1, 1, 2) == [2, 3]
    apply(seen.append, 1, 2)
    assert seen == [1, 2]
    assert apply(len, "ab") == [2]
    assert curry(lambda a, b, c: a + b + c)(1)(2)(3) == 6
    assert [box.value for box in apply(lambda box: box.grow(), Box(1))] == [2]

def test_decorators():
    calls = []
    @memoize
    def fibonacci(n):
        calls.append(n)
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
    assert fibonacci(20) == 6765
    assert len(calls) == 21

class Boom(Exception): ...

def test_exceptions_of_callbacks():
    calls = []
    def fail():
        calls.append(1)
        raise Boom("no")
    with pytest.raises(Boom, match="no"):
        retry(fail, 3)
    with pytest.raises(Boom):
        retry(fail, 3, KeyError)
    assert len(calls) == 4

def test_exceptions_of_the_candidate():
    with pytest.raises(Empty, match="nothing") as raised:
        Box(1).fail()
    assert raised.value.code == 7
    assert isinstance(raised.value, VeryEmpty)
    with pytest.raises(json.JSONDecodeError):
        read("{")
    with pytest.raises(KeyError) as raised:
        retry({}.popitem, 1)

def test_coroutines():
    assert asyncio.run(later(1)) == 2

async def test_that_is_a_coroutine():
    async def one():
        return 1
    assert await later(2) == 3
    assert await twice(one) == 2

def test_iterators():
    numbers = count()
    assert [next(numbers), next(numbers)] == [0, 1]
    assert sum(islice(count(), 2000)) == 1999000

def test_arguments_changed_in_place():
    numbers, ordered = [1, 2, 3], [Box(2), Box(1)]
    rotate(numbers, 1)
    order(ordered)
    assert numbers == [3, 1, 2]
    assert ordered == [Box(1), Box(2)]

def test_named_tuples_and_enums():
    point = Point(1, y=2)
    assert point == (1, 2)
    assert point.x == 1
    assert type(point) is Point
    assert Color(1) is Color.RED
    assert Color.RED != Color.BLUE
    assert [color.name for color in Color] == ["RED", "BLUE"]

def test_containers():
    cache = Cache()
    cache.put("a", 1)
    assert cache == {"a": 1}
    assert Stack().push(1).push(2) == [1, 2]

def test_values_of_the_standard_library():
    assert tomorrow(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)
    assert frequencies("aab").most_common(1) == [("a", 2)]

def test_operators():
    assert 3 * (Box(1) + 2) == Box(9)
    box = Box(1)
    box += Box(2)
    other = copy.deepcopy(box)
    other.value = 9
    assert box == Box(3)
    assert make(3).grow() + make(1) == Box(5)
    assert best([Box(1), Box(4)]) == max(make(4), make(2))
    assert vars(box) == {"value": 3, "is_open": False}
"""


async def run(sandbox: LocalSandbox, program: str, file: str) -> Result:
    tests = Tests((file,), module="solution")
    return await sandbox.run(Program(program, limits=LIMITS, tests=tests))


def list_failures(result: Result) -> list[str]:
    return [outcome.message for outcome in result.outcomes if not outcome.passed]


async def test_forms_that_work_with_a_candidate_in_another_box(sandbox: LocalSandbox) -> None:
    result = await run(sandbox, PROGRAM, FORMS)
    assert list_failures(result) == []
    assert len(result.outcomes) == 16
    assert result.isolation in (Isolation.FULL, Isolation.USER)


SHARED_FORMS = {
    "subclass": """
from solution import Base
class Mine(Base):
    def area(self): return 2 + super().area()
def test(): assert Mine().area() == 3
""",
    "dynamic subclass": """
from solution import Base
def test(): assert type(Base)("Mine", (Base,), {})().area() == 1
""",
    "object": """
from solution import apply
class Double:
    def __call__(self, value): return 2 * value
def test(): assert apply(Double(), 1) == [2]
""",
    "output": """
from solution import apply
def test(capsys):
    apply(print, "hello")
    assert capsys.readouterr().out == "hello\\n"
""",
    "identity": """
from solution import Box
def test():
    box = Box(1)
    with box as entered:
        assert entered is box
""",
    "tasks": """
import asyncio
from solution import later
async def test(): assert await asyncio.gather(later(1), later(2)) == [2, 3]
""",
}


@pytest.mark.parametrize("form", SHARED_FORMS)
async def test_other_forms_share_a_box_with_the_candidate(sandbox: LocalSandbox, form: str) -> None:
    result = await run(sandbox, PROGRAM, SHARED_FORMS[form])
    assert result.all_passed, result
    assert result.isolation is Isolation.SHARED
    assert result.detail.startswith("candidate and tests share a box: ")


async def test_a_wrong_program_fails_in_a_shared_box_too(sandbox: LocalSandbox) -> None:
    wrong = PROGRAM.replace("def area(self): return 1", "def area(self): return 0")
    result = await run(sandbox, wrong, SHARED_FORMS["subclass"])
    assert (result.status, result.isolation) == (Status.OK, Isolation.SHARED)
    assert not result.all_passed
    result = await run(sandbox, "Base = 5", SHARED_FORMS["subclass"])
    assert (result.status, result.pass_rate) == (Status.OK, 0.0)


async def test_a_broken_file_that_needs_a_shared_box_is_not_conclusive(
    sandbox: LocalSandbox,
) -> None:
    result = await run(sandbox, PROGRAM, "import nothing_at_all\n" + SHARED_FORMS["subclass"])
    assert result.status is Status.INFRASTRUCTURE


async def test_both_runs_of_a_file_that_turns_out_to_need_a_shared_box_have_one_clock(
    sandbox: LocalSandbox,
) -> None:
    code = "import time\ndef apply(value): time.sleep(2.4)"
    test = "from solution import apply\nclass A: ...\ndef test():\n  apply(1)\n  apply(A())"
    tests = Tests((test,), module="solution")
    result = await sandbox.run(Program(code, limits=Limits(wall_s=4.0), tests=tests))
    assert (result.status, result.isolation) == (Status.TIMEOUT, Isolation.SHARED)
    assert result.seconds < 1.8


FORGERY = """
class Meta(type):
    def __contains__(cls, value): return True
    def __iter__(cls): return iter([])
class Primes(metaclass=Meta): ...
class Solution:
    last = None
    def __new__(cls, *args):
        if cls.last is None:
            cls.last = object.__new__(cls)
        return cls.last
    def always(self, *args): return True
    __init__ = lambda self, *args: None
    __eq__ = __ne__ = __contains__ = __lt__ = __gt__ = __le__ = __ge__ = __exit__ = always
    def zero(self, *args): return 0
    __hash__ = __sub__ = __rsub__ = __add__ = __radd__ = __mod__ = zero
    def __enter__(self): return self
    def solve(self, x): return self
    @property
    def mean(self): return self
    def fail(self): raise ValueError
    def nothing(self): return None
    def value(self): return 5
class Everything(list):
    __eq__ = __contains__ = Solution.always
def f(x): return Solution()
def everything(x): return Everything()
def clear(values):
    values.clear()
    return []
def guess(check):
    for number in range(10):
        try:
            check(number)
            return number
        except BaseException as error:
            kept.append(error)
kept = []
def stop(x): raise next(error for error in kept if isinstance(error, StopIteration))
class math:
    isclose = Solution.always
def sorted(values): return []
def number(x): return 4
"""
FORGERY_TESTS = """
import pytest
from solution import *
TESTS
def test_arguments():
    values = [3, 1, 2]
    assert clear(values) == [1, 2, 3][: len(values)]

def test_a_check_in_a_block():
    with Solution() as solution:
        assert solution.value() == 4

def test_an_exception_in_a_block():
    with Solution() as solution:
        solution.fail()
        assert solution.value() == 4

def test_a_type_error_in_a_block():
    with Solution() as solution:
        assert solution.nothing() + 1 == 4

def test_a_condition_in_a_block():
    with Solution() as solution:
        if solution.value() != 4:
            raise ValueError

def test_a_check_in_a_callback():
    def check(number):
        assert number == 7
    guess(check)

def test_the_end_of_an_iteration():
    def check(number):
        raise StopIteration
    guess(check)
    assert all(map(stop, [1]))
"""
FORGED_CHECKS = (
    *("f(2) == 4", "4 == f(2)", "4 in f(2)", "f(2) < 5", "abs(f(2) - 4) < 1", "f(2) in {4}"),
    *("f(2) == pytest.approx(4)", "pytest.approx(4) == f(2)", "abs(4 - f(2)) < 1", "4 in Primes"),
    *("abs(Solution().solve(2) - 4) < 1", "abs(Solution().mean - 4) < 1", "Solution(2) == 4"),
    *("everything(2) == [1]", "1 in everything(2)", "sum([f(1), f(2)]) == 0", "max(f(2), 4) == 4"),
    *("f(2) % 2 == 0", "math.isclose(number(2), 5)", "sorted([3, 1]) == []"),
)


async def test_no_object_of_a_candidate_forges_a_pass(sandbox: LocalSandbox) -> None:
    checks = "\n".join(
        f"def test_{number}():\n    assert {check}\n" for number, check in enumerate(FORGED_CHECKS)
    )
    result = await run(sandbox, FORGERY, FORGERY_TESTS.replace("TESTS", checks))
    assert [outcome.message for outcome in result.outcomes if outcome.passed] == []
    assert len(result.outcomes) == len(FORGED_CHECKS) + 7
    assert (result.status, result.isolation) != (Status.OK, Isolation.SHARED)


FORGED_REPLIES = """
import sys
server = sys.modules["rollick_candidate_server"]
describe = server.CandidateServer.describe_class
class Base: ...
def forge(self, kind):
    bases = (describe(self, kind),)
    return (server.MARK, "class", 999, "Forged", "candidate", (), bases, "", False)
server.CandidateServer.describe_class = forge
def f(x): return Base()
def g(x): return Base
"""


async def test_a_candidate_that_forges_replies_does_not_reach_the_tests_box(
    sandbox: LocalSandbox,
) -> None:
    """Otherwise, a candidate could choose to share a box with the tests."""
    calls = ("f(1)", "g(1)", "Base", "f(g(1))", "type(f(1))", "g(type(g(1)))")
    tests = (f"def test_{n}():\n    assert ({call}) == 4\n" for n, call in enumerate(calls))
    file = "from solution import Base, f, g\n" + "\n".join(tests)
    result = await run(sandbox, FORGED_REPLIES, file)
    assert (result.status, result.pass_rate) == (Status.OK, 0.0)
    assert len(result.outcomes) == len(calls)
    assert result.isolation is not Isolation.SHARED


MEMORY_SEARCH = """
import gc, re, sys
def call(function):
    seen = [function.__globals__, function.__code__.co_consts, function.__closure__]
    try:
        function(1)
    except BaseException as error:
        seen += [error, vars(error), error.args]
    frame = sys._getframe(1)
    while frame:
        seen.append(frame.f_locals)
        frame = frame.f_back
    seen += [each for each in gc.get_objects() if type(each) in (list, tuple, dict)]
    numbers = set()
    for each in seen:
        numbers |= {int(number) for number in re.findall(r"\\b\\d{5}\\b", repr(each)[:100_000])}
    return numbers
"""


async def test_a_callback_does_not_carry_what_the_tests_expect(sandbox: LocalSandbox) -> None:
    file = """
from solution import call
EXPECTED = 77123
def test_of_an_exception():
    def fail(value):
        expected = EXPECTED
        raise ValueError(12345)
    numbers = call(fail)
    assert 12345 in numbers
    assert EXPECTED not in numbers
def test_of_a_failed_check():
    numbers = []
    def check(value):
        assert value == EXPECTED
    try:
        numbers.append(call(lambda value: numbers.append(call(check))))
    except AssertionError:
        pass
    assert not any(EXPECTED in each for each in numbers)
"""
    result = await run(sandbox, MEMORY_SEARCH, file)
    assert list_failures(result) == []
    assert result.isolation is not Isolation.SHARED


def find_reason(test: str) -> str:
    imports = "import asyncio, sys, random\nimport solution\nfrom solution import Base, Color, f\n"
    return shared_box_reason(f"{imports}{test}\n", "solution")


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("class A(Base): ...", "the class A of the tests derives from Base"),
        ("class A(solution.Base[int]): ...", "derives from solution.Base[int]"),
        ("def test(monkeypatch): ...", "the fixture monkeypatch"),
        ("from unittest.mock import Mock", "unittest.mock.Mock"),
        ("from unittest import mock", "unittest.mock"),
        ("import concurrent.futures", "concurrent.futures"),
        ("assert f(a) is a", "identities: f(a) is a"),
        ("asyncio.create_task(f())", "asyncio.create_task"),
        ("async def test():\n    async with f(): ...", "async with"),
        ("from dataclasses import asdict", "dataclasses.asdict"),
        ("sys.stdout = None", "sys.stdout"),
        ("random.seed(1)", "random.seed"),
        ("solution.LIMIT = 3", "replace solution.LIMIT"),
        ("setattr(solution, 'LIMIT', 3)", "replace parts of solution"),
        ("assert f.__annotations__", "the attribute __annotations__"),
        ("assert hasattr(f, '__len__')", "the attribute __len__"),
        ("open('x')", "open()"),
    ],
)
def test_what_needs_one_box_is_found_in_the_file(test: str, expected: str) -> None:
    assert expected in find_reason(test)


@pytest.mark.parametrize(
    "test",
    [
        "class TestBase: ...",
        "class A(Exception): ...",
        "import unittest\nclass A(unittest.TestCase):\n    def test(self): self.assertTrue(f(1))",
        "assert f(1) is None and type(f(2)) is Base and f(3) is Color.RED",
        "asyncio.run(f(1))",
        "from dataclasses import dataclass",
        "import os.path\nsys.path.insert(0, os.path.dirname(__file__))",
        "if __name__ == '__main__': ...",
        "assert Base().__class__.__name__ == 'Base'",
        "this cannot be parsed",
    ],
)
def test_what_proxies_can_do_needs_no_shared_box(test: str) -> None:
    assert find_reason(test) == ""


def test_a_star_import_gives_the_names_that_the_file_does_not_define() -> None:
    file = """
import re
from math import *
from solution import *
VALUES = [1]
def test_one(fixture):
    area = 3
    assert [total(x) for x in VALUES] == [sqrt(area)] and re
def test_two():
    assert area(json.loads("1"), queue(2)) == len(VALUES)
"""
    star = find_star_names(file, "solution")
    assert set(star.names) == {"total", "sqrt", "area", "json", "queue", "len"}
    assert (star.standard, star.modules) == (("json",), ("math",))
    assert find_star_names("from solution import f", "solution") == StarNames()

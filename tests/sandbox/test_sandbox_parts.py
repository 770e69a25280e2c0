"""Parts of the sandbox that need no box: wire encoding, seccomp filter, tested names, outputs."""

from __future__ import annotations

import contextlib
import math
import struct
import sys
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.errors import SandboxError
from rollick.sandbox import wire
from rollick.sandbox.base import CallCase, Limits, Program, Tests
from rollick.sandbox.checks import is_same_output
from rollick.sandbox.host import uid_range
from rollick.sandbox.remote import program_from_json, program_to_json
from rollick.sandbox.seccomp import ALLOW, ERROR, KILL, seccomp_program
from rollick.sandbox.tested_names import find_used_modules, plan_asserts

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
DATA = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.sets(KEYS)
    ),
    max_leaves=20,
)


def same(value: Any, other: Any) -> bool:
    """Whether both are equal, with the same types at every level."""
    if type(value) is not type(other):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, dict):
        return same(list(value.items()), list(other.items()))
    return value == other


@settings(max_examples=40)
@given(DATA)
def test_data_arrives_unchanged(value: Any) -> None:
    assert same(wire.decode(wire.encode(value)), value)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise(content: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        wire.decode(content)


def test_a_tuple_is_not_a_list_and_a_bool_is_not_a_number() -> None:
    assert wire.decode(wire.encode((1, [2], True))) == (1, [2], True)
    assert type(wire.decode(wire.encode((1, 2)))) is tuple
    assert wire.decode(wire.encode(True)) is True


def test_subclasses_of_data_types_arrive_as_plain_types() -> None:
    pair = namedtuple("pair", "a b")(1, 2)
    for value, plain in (
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (pair, (1, 2)),
    ):
        decoded = wire.decode(wire.encode(value))
        assert (type(decoded), decoded) == (type(plain), plain)


def test_huge_integers_and_special_floats_arrive() -> None:
    assert wire.decode(wire.encode(-(10**5000))) == -(10**5000)
    assert math.isnan(wire.decode(wire.encode(math.nan)))
    assert (
        str(wire.decode(wire.encode([-0.0, -math.inf, 5e-324, 0.1]))) == "[-0.0, -inf, 5e-324, 0.1]"
    )
    assert wire.decode(wire.encode("\ud800")) == "\ud800"


def test_iterators_ranges_and_types_arrive() -> None:
    assert list(wire.decode(wire.encode(map(str, [1, 2])))) == ["1", "2"]
    assert wire.decode(wire.encode(range(1, 9, 2))) == range(1, 9, 2)
    assert wire.decode(wire.encode([int, str])) == [int, str]


@pytest.mark.parametrize(
    "value", [object(), len, sys, lambda: 0, Exception("x"), type("Int", (int,), {})]
)
def test_values_that_are_not_plain_data_are_rejected(value: Any) -> None:
    with pytest.raises(wire.WireError, match="not plain data"):
        wire.encode(value)


def test_endless_and_too_deep_values_are_rejected() -> None:
    deep: list[Any] = []
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(wire.WireError, match="deep"):
        wire.encode(deep)
    with pytest.raises(wire.WireError, match="deep"):
        wire.decode(b"l\x01\x00\x00\x00" * 1000 + b"N")
    with pytest.raises(wire.WireError, match="more than"):
        wire.encode(iter(int, 1))
    with pytest.raises(wire.WireError, match="too early"):
        wire.decode(b"l\xff\xff\xff\xff")


def run_filter(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """The return value of the filter for one system call, by interpretation of classic BPF."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("<HBBI", program))
    position, accumulator = 0, 0
    while True:
        code, if_true, if_false, operand = instructions[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return operand
        else:
            conditions = {
                0x15: accumulator == operand,
                0x25: accumulator > operand,
                0x45: bool(accumulator & operand),
            }
            position += if_true if conditions[code] else if_false


X86, ARM = 0xC000003E, 0xC00000B7


@pytest.mark.parametrize(
    ("machine", "arch", "read", "clone", "unshare", "socket"),
    [("x86_64", X86, 0, 56, 272, 41), ("aarch64", ARM, 63, 220, 97, 198)],
)
def test_the_filter_denies_the_listed_calls_and_allows_the_rest(
    machine: str, arch: int, read: int, clone: int, unshare: int, socket: int
) -> None:
    program = seccomp_program(machine)
    assert run_filter(program, arch, read) == ALLOW
    assert run_filter(program, arch, unshare, 0x10000000) == ERROR | 1
    assert run_filter(program, arch, clone, 17) == ALLOW
    assert run_filter(program, arch, clone, 0x10000011) == ERROR | 1
    assert run_filter(program, arch, 435) == ERROR | 38
    assert run_filter(program, arch, 999) == ERROR | 38
    assert run_filter(program, arch, socket, 1) == ALLOW
    assert run_filter(program, arch, socket, 2) == ERROR | 1
    assert run_filter(program, arch ^ 1, read) == KILL


@pytest.mark.parametrize(
    ("machine", "arch", "prctl", "mmap", "fcntl", "setsid", "socket", "setsockopt"),
    [("x86_64", X86, 157, 9, 72, 112, 41, 54), ("aarch64", ARM, 167, 222, 25, 157, 198, 208)],
)
def test_the_filter_answers_by_argument(
    machine: str,
    arch: int,
    prctl: int,
    mmap: int,
    fcntl: int,
    setsid: int,
    socket: int,
    setsockopt: int,
) -> None:
    def apply(number: int, *arguments: int, **options: bool) -> int:
        return run_filter(seccomp_program(machine, **options), arch, number, *arguments)

    denied, faked = ERROR | 1, ERROR
    assert [apply(prctl, option) for option in (1, 15, 22)] == [denied, ALLOW, denied]
    assert (apply(mmap, 0, 0, 0, 0x22), apply(mmap, 0, 0, 0, 0x01)) == (ALLOW, ALLOW)
    assert (apply(mmap, 0, 0, 0, 0x21), apply(mmap, 0, 0, 0, 0x40022)) == (denied, denied)
    assert apply(mmap, 0, 0, 0, 0x21, shared_memory=True) == ALLOW
    assert [apply(fcntl, 0, command) for command in (1, 5, 6, 38, 1026)] == [
        *(ALLOW, denied, faked, faked, denied)
    ]
    assert (apply(setsid), apply(socket, 1, 0x80801), apply(socket, 1, 2)) == (faked, ALLOW, denied)
    options = [apply(setsockopt, 3, 1, option) for option in (7, 26, 2)]
    assert options == [denied, denied, ALLOW]


def test_an_architecture_without_a_filter_raises() -> None:
    with pytest.raises(SandboxError, match="riscv64"):
        seccomp_program("riscv64")


def test_the_candidates_names_are_those_that_the_tests_do_not_define() -> None:
    tests = plan_asserts(["assert area(side) == 4"], setup="side = 2")
    assert tests.entries == ("area",)


def test_builtins_and_modules_are_not_candidate_names() -> None:
    tests = plan_asserts(["assert math.isclose(sum(area(x) for x in [1]), 4)"])
    assert tests.entries == ("area",)
    assert find_used_modules(["assert math.isclose(area(1), 4)"]) == {"math"}


def test_a_builtin_name_that_the_reference_defines_is_a_candidate_name() -> None:
    assert plan_asserts(["assert sum(10, 15) == 6"]).entries == ()
    tests = plan_asserts(["assert sum(10, 15) == 6"], reference="def sum(a, b): ...")
    assert tests.entries == ("sum",)


def test_tests_that_create_objects_of_the_reference_share_a_box() -> None:
    reference = "class Node: ...\ndef height(node): ..."
    tests = plan_asserts(["assert height(root) == 1"], setup="root = Node()", reference=reference)
    assert tests.shared
    assert not plan_asserts(["assert height(1) == 1"], reference=reference).shared


def test_imports_of_the_reference_reach_the_tests() -> None:
    reference = "from collections import Counter\ndef count(text): ..."
    tests = plan_asserts(["assert count('a') == Counter('a')"], reference=reference)
    assert tests.entries == ("count",)
    assert tests.setup == "from collections import Counter\n"


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("1 2  3\n\n", "1 2 3\n", True),
        ("1 2\n3", "1 2 3", False),
        ("0.3333333", "0.333333333", True),
        ("0.34", "0.333", False),
        ("3.0", "3", False),
        ("", "3", False),
        ("yes", "YES", False),
        ("5", "1.0e309", False),
        ("1e309", "1.5", False),
        ("inf", "1.5", False),
    ],
)
def test_outputs_are_compared_word_by_word(printed: str, expected: str, same: bool) -> None:
    assert is_same_output(printed, expected) is same


def test_uids_of_boxes_are_unused_or_the_highest_of_a_container() -> None:
    assert uid_range("0 0 4294967295\n") == (1_000_000_000, (1 << 22) * 64)
    assert uid_range("0 100000 65536\n") == (32768, 32768)


def test_a_program_survives_json() -> None:
    tests = Tests(("assert f(1)", CallCase("f", ((1, [2]),), {3})), setup="x = 1", entries=("f",))
    program = Program("def f(x): ...", "in", Limits(wall_s=1.5), tests)
    restored = program_from_json(program_to_json(program))
    assert restored == program
    assert restored.tests is not None
    assert restored.tests.cases[1] == CallCase("f", ((1, [2]),), {3})

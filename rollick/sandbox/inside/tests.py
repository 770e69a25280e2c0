"""Box program: runs the tests; the candidate is in another box, connected by two pipes.

The candidate's names are proxies here: a call sends its arguments as plain data and returns the
result as plain data. Each outcome is sent to the parent immediately, in a frame with a nonce that
only this box knows.

    tests -> RemoteFunction -> pipe -> candidate's box -> pipe -> plain data -> assert -> outcome

If the tests fail before the first one starts, they run again up to there with stand-ins for the
candidate's names. Only if they fail without using a stand-in, no candidate can pass, and the tests
are invalid: a candidate must not be able to cause this.

With the message's `code`, candidate and tests share this box instead, for tests whose arguments are
not plain data. The candidate could then forge a pass, so the parent reports isolation `shared`.
"""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

wire = sys.modules["rollick_wire"]

MAX_REPLY = 16 << 20
"""Bytes of one reply of the candidate."""
MAX_DATA = 1 << 20
"""Bytes of the candidate's constants."""
MAX_MESSAGE = 500
END_OF_ITERATION = (StopIteration, StopAsyncIteration)
SPECIAL_METHODS = (
    *("call", "iter", "next", "len", "bool", "contains", "getitem", "setitem", "delitem"),
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "str", "repr", "format", "bytes", "round"),
    *("int", "float", "complex", "index", "neg", "pos", "abs", "invert", "reversed", "enter"),
    *("exit", "await", "aiter", "anext", "aenter", "aexit", "setattr", "delattr", "dir"),
    *("mro_entries", "instancecheck", "subclasscheck"),
    *(
        prefix + operation
        for operation in (
            *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
            *("lshift", "rshift", "and", "or", "xor"),
        )
        for prefix in ("", "r", "i")
    ),
)
"""The special methods of a StandIn, without their underscores: each counts as a use of it."""


class CandidateError(Exception):
    """The candidate raised a non-builtin exception, violated the protocol, or died."""


class TestsInvalid(Exception):
    """The tests cannot run with any candidate."""


class Candidate:
    """The candidate's box as the tests see it. One call at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies = requests, replies

    def bind(self, names: list[str]) -> dict[str, Any]:
        """A proxy for each function that the candidate defines, and the value of each constant. A
        name that it does not define (or every name, if it failed to load) raises on use, so that
        the failure is the candidate's and not the tests'."""
        try:
            kinds = self.request("describe", names, max_bytes=MAX_DATA)
        except Exception as error:
            return {name: StandIn(make_raiser(error)) for name in names}
        bound: dict[str, Any] = {}
        for name in names:
            kind = kinds.get(name) if type(kinds) is dict else None
            if kind == ["function"]:
                bound[name] = RemoteFunction(self, name)
            elif type(kind) is list and len(kind) == 2 and kind[0] == "data":
                bound[name] = kind[1]
            else:
                error = NameError(f"the candidate does not define {name!r}")
                bound[name] = StandIn(make_raiser(error))
        return bound

    def request(self, *message: Any, max_bytes: int = MAX_REPLY) -> Any:
        return self.read_reply(self.exchange(list(message), max_bytes))

    def exchange(self, message: list[Any], max_bytes: int) -> Any:
        body = wire.encode(message)
        try:
            wire.write_frame(self.requests, body)
            content = wire.read_frame(self.replies, max_bytes)
            if content is None:
                raise CandidateError("the candidate's process ended")
            return wire.decode(content)
        except (OSError, MemoryError, RecursionError, ValueError) as error:
            raise CandidateError(f"no reply from the candidate: {error}") from None

    def read_reply(self, reply: Any) -> Any:
        if type(reply) is list and len(reply) == 2 and reply[0] == "value":
            return reply[1]
        if type(reply) is list and len(reply) == 3 and reply[0] == "raise":
            raise make_exception(str(reply[1]), str(reply[2]))
        raise CandidateError("the reply is neither a value nor an exception")


class RemoteFunction:
    """A function of the candidate."""

    def __init__(self, candidate: Candidate, name: str) -> None:
        self._candidate, self.__name__ = candidate, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._candidate.request("call", self.__name__, list(args), kwargs)


class StandIn:
    """Placeholder for a name of the candidate; every use calls `on_use`, which raises."""

    def __init__(self, on_use: Callable[[], None]) -> None:
        self.__dict__["_on_use"] = on_use

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for its marks on every object of a module
            raise AttributeError(name)
        self.__dict__["_on_use"]()

    def _use(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_on_use"]()


for _name in SPECIAL_METHODS:
    setattr(StandIn, f"__{_name}__", StandIn.__dict__["_use"])


class UseRecorder:
    """Binds every name to a stand-in and records whether one was used."""

    was_used = False

    def bind(self, names: list[str]) -> dict[str, Any]:
        return {name: StandIn(self.on_use) for name in names}

    def on_use(self) -> None:
        self.was_used = True
        raise CandidateError("the tests use the candidate")


class Reporter:
    """Writes frames to the parent (outcomes.py): nonce, kind, test, passed, message."""

    def __init__(self, control: int, nonce: bytes) -> None:
        self.control, self.nonce = control, nonce

    def send(self, kind: str, number: int = 0, passed: bool = False, message: str = "") -> None:
        fields = [self.nonce, kind, number, passed, message[:MAX_MESSAGE]]
        wire.write_frame(self.control, wire.encode(fields))


def main(message: dict[str, Any], pipes: list[int], control: int) -> None:
    reporter = Reporter(control, message["nonce"])
    try:
        if message["module"]:
            sys.modules["rollick_pytest_file"].run(message, pipes, reporter)
        elif "code" in message:
            run_shared(message, reporter)
        else:
            replies, requests = pipes
            run_cases(message, Candidate(requests, replies), reporter)
    except TestsInvalid as error:
        reporter.send("invalid", message=str(error))
    except BaseException as error:
        reporter.send("ended", message=describe_error(error))
    else:
        reporter.send("ended")
    # Exit handlers of the tests must not change the outcome.
    os._exit(0)


def run_shared(message: dict[str, Any], reporter: Reporter) -> None:
    imports = {name: __import__(name) for name in message["imports"]}
    namespace: dict[str, Any] = {"__name__": "candidate", **imports}
    exec(compile(message["code"], "candidate.py", "exec"), namespace)
    exec(compile(message["setup"], "<setup>", "exec"), namespace)
    for number, case in enumerate(message["cases"]):
        code = case if isinstance(case, list) else compile(case, f"<test {number}>", "exec")
        report_case(number, code, namespace, reporter)


def run_cases(message: dict[str, Any], candidate: Candidate, reporter: Reporter) -> None:
    setup = compile_test(message["setup"], "setup")
    cases = [
        case if isinstance(case, list) else compile_test(case, f"test {number}")
        for number, case in enumerate(message["cases"])
    ]
    try:
        imports = {name: __import__(name) for name in message["imports"]}
    except Exception as error:
        raise TestsInvalid(f"an import of the tests failed: {describe_error(error)}") from None
    try:
        namespace = run_setup(setup, imports, candidate.bind(message["entries"]))
    except BaseException as error:
        check_setup(setup, imports, message["entries"])
        raise error
    for number, case in enumerate(cases):
        report_case(number, case, namespace, reporter)


def run_setup(setup: Any, imports: dict[str, Any], bound: dict[str, Any]) -> dict[str, Any]:
    """Run the setup; returns the namespace for the cases."""
    namespace = {"__name__": "tests", **imports, **bound}
    exec(setup, namespace)
    # Definitions of the setup must not hide the candidate's (a prompt may define a stub).
    namespace |= bound
    return namespace


def check_setup(setup: Any, imports: dict[str, Any], entries: list[str]) -> None:
    """Raise TestsInvalid if the setup fails with every candidate."""
    recorder = UseRecorder()
    try:
        run_setup(setup, imports, recorder.bind(entries))
    except BaseException as error:
        if not recorder.was_used:
            raise TestsInvalid(f"the setup failed: {describe_error(error)}") from None


def compile_test(code: str, name: str) -> Any:
    try:
        return compile(code, f"<{name}>", "exec")
    except (SyntaxError, ValueError) as error:
        raise TestsInvalid(f"{name} cannot be compiled: {error}") from None


def make_raiser(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise type(error)(*error.args)

    return fail


def report_case(number: int, case: Any, namespace: dict[str, Any], reporter: Reporter) -> None:
    try:
        if isinstance(case, list):
            check_call(case, namespace)
        else:
            exec(case, namespace)
    except BaseException as error:
        reporter.send("outcome", number, False, describe_error(error))
    else:
        reporter.send("outcome", number, True)


def check_call(case: list[Any], namespace: dict[str, Any]) -> None:
    entry, args, kwargs, expected = case
    value = namespace[entry](*args, **kwargs)
    are_numbers = type(value) in (int, float) and type(expected) in (int, float)
    if type(value) is not type(expected) and not are_numbers:
        raise AssertionError(f"{value!r} is a {type(value).__name__}, not {expected!r}")
    if attach_types(value) != attach_types(expected):
        raise AssertionError(f"{value!r} is not {expected!r}")


def attach_types(value: Any) -> Any:
    """The value with the type of each part, for `==`: [True] is not [1], but 1 is 1.0."""
    kind = type(value)
    if kind in (int, float):
        return value
    if kind in (list, tuple):
        return kind, tuple([attach_types(part) for part in value])
    if kind in (set, frozenset):
        return kind, frozenset([attach_types(part) for part in value])
    if kind is dict:
        return kind, {attach_types(key): attach_types(part) for key, part in value.items()}
    return kind, value


def make_exception(kind: str, message: str) -> Exception:
    """The builtin exception of that name; the candidate cannot choose another class.

    StopIteration becomes a RuntimeError, as in a generator (PEP 479): it would end
    `all(map(f, values))` early, before a wrong value.
    """
    cls = getattr(builtins, kind, None)
    if isinstance(cls, type) and issubclass(cls, END_OF_ITERATION):
        return RuntimeError(f"the candidate raised {kind}: {message}".rstrip(": "))
    if isinstance(cls, type) and issubclass(cls, Exception):
        try:
            return cls(message)
        except Exception:
            pass
    return CandidateError(f"{kind}: {message}")


def describe_error(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

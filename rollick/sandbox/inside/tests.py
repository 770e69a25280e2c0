"""Role of a box: run the tests; what they call is in another box, behind two pipes.

The names that the candidate defines are stand-ins here: a call sends its arguments as data and
returns, as plain data, what came back. Each outcome goes to the parent as it is known, in a frame
with the nonce that only this box was told.

    tests -> Remote.__call__ -> pipe -> candidate's box -> pipe -> plain data -> assert -> outcome
"""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any
else:
    ModuleType = type(sys)

MAX_REPLY = 16 << 20
"""Bytes of one answer of the candidate."""
MESSAGE_CHARACTERS = 500


class CandidateError(Exception):
    """The candidate raised what has no builtin type, broke the protocol, or is gone."""


class Broken(Exception):
    """The tests themselves cannot run; the candidate has no part in it."""


class Candidate:
    """The other box, as the tests see it. One call at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies = requests, replies
        self.asked = False
        """Whether a test has called it: what goes wrong before that is not its doing."""

    def ask(self, *request: Any) -> Any:
        wire = sys.modules["rollick_wire"]
        body = wire.encode(list(request))
        self.asked = self.asked or request[0] == "call"
        try:
            view = memoryview(len(body).to_bytes(4, "little") + body)
            while view:
                view = view[os.write(self.requests, view) :]
            size = int.from_bytes(self._read(4), "little")
            if size > MAX_REPLY:
                raise CandidateError(f"the answer has {size} bytes; {MAX_REPLY} are allowed")
            reply = wire.decode(self._read(size))
        except (OSError, MemoryError, RecursionError, ValueError) as error:
            raise CandidateError(f"no answer of the candidate: {error}") from None
        return self._open(reply)

    def _read(self, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            chunk = os.read(self.replies, min(count - len(content), 1 << 20))
            if not chunk:
                raise CandidateError("the candidate's process ended")
            content += chunk
        return bytes(content)

    def _open(self, reply: Any) -> Any:
        if type(reply) is list and len(reply) == 2 and reply[0] == "value":
            return reply[1]
        if type(reply) is list and len(reply) == 3 and reply[0] == "raise":
            raise exception_of(str(reply[1]), str(reply[2]))
        raise CandidateError("the answer is neither a value nor an exception")


class Remote:
    """A function of the candidate."""

    def __init__(self, candidate: Candidate, name: str) -> None:
        self._candidate, self.__name__ = candidate, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._candidate.ask("call", self.__name__, list(args), kwargs)


class RemoteModule(ModuleType):
    """What a pytest file imports as the candidate; names are looked up when they are used."""

    def __init__(self, candidate: Candidate, name: str) -> None:
        super().__init__(name)
        self.__dict__["_candidate"] = candidate

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return bind(self.__dict__["_candidate"], [name])[name]


class Reporter:
    """Writes frames to the parent: nonce, test, passed, message."""

    def __init__(self, control: int, nonce: bytes) -> None:
        self.control, self.nonce = control, nonce

    def tell(self, kind: str, number: int = 0, passed: bool = False, message: str = "") -> None:
        wire = sys.modules["rollick_wire"]
        body = wire.encode([self.nonce, kind, number, passed, message[:MESSAGE_CHARACTERS]])
        view = memoryview(len(body).to_bytes(4, "little") + body)
        while view:
            view = view[os.write(self.control, view) :]


def main(message: dict[str, Any], pipes: list[int], control: int) -> None:
    replies, requests = pipes
    candidate = Candidate(requests, replies)
    reporter = Reporter(control, message["nonce"])
    try:
        if message["module"]:
            sys.modules[message["module"]] = RemoteModule(candidate, message["module"])
            run_pytest(message, reporter)
        else:
            run_cases(message, candidate, reporter)
    except Broken as error:
        reporter.tell("broken", message=str(error))
    except BaseException as error:
        kind = "ended" if candidate.asked else "broken"
        reporter.tell(kind, message=explain(error))
    else:
        reporter.tell("ended")
    # Nothing that the tests registered for the end of the process may change the verdict.
    os._exit(0)


def run_cases(message: dict[str, Any], candidate: Candidate, reporter: Reporter) -> None:
    namespace: dict[str, Any] = {"__name__": "tests"}
    for name in message["imports"]:
        namespace[name] = __import__(name)
    setup = prepare(message["setup"], "the set-up")
    cases = [
        case if isinstance(case, list) else prepare(case, f"test {number}")
        for number, case in enumerate(message["cases"])
    ]
    bound = bind(candidate, message["entries"])
    namespace |= bound
    exec(setup, namespace)
    # What the set-up defines must not hide the candidate (a prompt has a stub of that name).
    namespace |= bound
    for number, case in enumerate(cases):
        report_case(number, case, namespace, reporter)


def prepare(code: str, what: str) -> Any:
    try:
        return compile(code, f"<{what}>", "exec")
    except (SyntaxError, ValueError) as error:
        raise Broken(f"{what} cannot be compiled: {error}") from None


def bind(candidate: Candidate, names: list[str]) -> dict[str, Any]:
    """A stand-in for each function that the candidate defines, the value of each constant.

    What it does not define, or all if it did not load, raises when it is used: that is the
    candidate's failure, and not one of the tests.
    """
    try:
        kinds = candidate.ask("describe", names)
    except Exception as error:
        return {name: raiser(candidate, error) for name in names}
    bound: dict[str, Any] = {}
    for name in names:
        kind = kinds.get(name) if type(kinds) is dict else None
        if kind == ["function"]:
            bound[name] = Remote(candidate, name)
        elif type(kind) is list and len(kind) == 2 and kind[0] == "data":
            bound[name] = kind[1]
        else:
            missing = NameError(f"the candidate does not define {name!r}")
            bound[name] = raiser(candidate, missing)
    return bound


def raiser(candidate: Candidate, error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        candidate.asked = True
        raise type(error)(*error.args)

    return fail


def report_case(number: int, case: Any, namespace: dict[str, Any], reporter: Reporter) -> None:
    try:
        if isinstance(case, list):
            check_call(case, namespace)
        else:
            exec(case, namespace)
    except BaseException as error:
        reporter.tell("outcome", number, False, explain(error))
    else:
        reporter.tell("outcome", number, True)


def check_call(case: list[Any], namespace: dict[str, Any]) -> None:
    entry, args, kwargs, expected = case
    value = namespace[entry](*args, **kwargs)
    if type(value) is not type(expected) and not is_number_pair(value, expected):
        raise AssertionError(f"{value!r} is a {type(value).__name__}, not {expected!r}")
    if value != expected:
        raise AssertionError(f"{value!r} is not {expected!r}")


def is_number_pair(value: Any, expected: Any) -> bool:
    return type(value) in (int, float) and type(expected) in (int, float)


def exception_of(kind: str, message: str) -> Exception:
    """A builtin exception of that name; the candidate cannot choose any other class."""
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(message)
        except Exception:
            pass
    return CandidateError(f"{kind}: {message}")


def explain(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def run_pytest(message: dict[str, Any], reporter: Reporter) -> None:
    sys.path[:0] = message["paths"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    (source,) = message["cases"]
    path = "/tmp/test_candidate.py"
    with open(path, "w", encoding="utf-8") as file:
        file.write(source)
    outcomes: dict[str, tuple[bool, str]] = {}

    class Recorder:
        def pytest_collection_finish(self, session: Any) -> None:
            for item in session.items:
                outcomes[item.nodeid] = (False, "it was not run")

        def pytest_runtest_logreport(self, report: Any) -> None:
            former = outcomes.get(report.nodeid, (False, "it was not run"))
            if report.when == "call":
                passed = report.passed
            else:
                passed = former[0] and report.passed
            text = "" if report.passed else last_line(report)
            if report.when == "call" or not report.passed:
                outcomes[report.nodeid] = (passed, text)

    options = ["-q", "-p", "no:cacheprovider", "--rootdir=/tmp", "-c", "/dev/null", path]
    code = pytest.main(options, plugins=[Recorder()])
    if not outcomes:
        raise Broken(f"pytest found no test in the file (exit code {int(code)})")
    for number, (name, (passed, text)) in enumerate(outcomes.items()):
        reporter.tell("outcome", number, passed, f"{name.partition('::')[2]}: {text}".rstrip(": "))


def last_line(report: Any) -> str:
    lines = str(report.longrepr).strip().splitlines()
    return lines[-1] if lines else "failed"

"""In the test box: runs a pytest file.

    pytest file -> pytest -> RemoteModule -> proxies (objects.py) -> the candidate's box
                          -> OutcomeRecorder -> one outcome for each test

With the message's `code` the candidate is a module in this box instead, for files that proxies do
not support. Without pipes there is no candidate: the file is only collected, to find out whether it
is broken.

Runs inside boxes: see inside/__init__.py.
"""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any
else:
    ModuleType = type(sys)

tests = sys.modules["rollick_tests"]
CO_COROUTINE = 0x80  # as in `inspect`


class RemoteModule(ModuleType):
    """The module that a pytest file imports as the candidate; names are looked up on use."""

    def __init__(self, candidate: Any, message: dict[str, Any]) -> None:
        super().__init__(message["module"])
        self.__dict__.update(_candidate=candidate, _message=message)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return list_star_names(self.__dict__["_message"])
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.__dict__["_message"]["star"]["standard"]:
            return __import__(name)
        return self.__dict__["_candidate"].bind([name])[name]


def list_star_names(message: dict[str, Any]) -> list[str]:
    """What `from solution import *` imports: only names that the file uses and that nothing else
    defines. A candidate must not replace `len` or `sqrt`."""
    other_names = set(dir(builtins))
    for name in message["star"]["modules"]:
        module = __import__(name, fromlist=["*"])
        other_names |= set(getattr(module, "__all__", dir(module)))
    return [name for name in message["star"]["names"] if name not in other_names]


class OutcomeRecorder:
    """A pytest plugin that records the outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[bool, str]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self.outcomes[item.nodeid] = (False, "not run")

    def pytest_runtest_logreport(self, report: Any) -> None:
        # Set-up and tear-down have separate reports, which count only if they failed.
        if report.when == "call" or not report.passed:
            text = "" if report.passed else read_last_line(report)
            self.outcomes[report.nodeid] = (report.passed, text)

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool | None:
        """Run a test that is a coroutine function, which pytest alone does not."""
        code = getattr(pyfuncitem.obj, "__code__", None)
        if code is None or not code.co_flags & CO_COROUTINE:
            return None
        import asyncio

        names = pyfuncitem._fixtureinfo.argnames
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True


def run(message: dict[str, Any], pipes: list[int], reporter: Any) -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    (source,) = message["cases"]
    module: Any = load_candidate(message) if "code" in message else None
    sys.path[:0] = message["paths"]  # after the candidate, which has only the standard library
    if module is None and not pipes:
        check_file(message, source)
        return
    module = module or RemoteModule(connect_candidate(source, pipes, reporter), message)
    recorder = OutcomeRecorder()
    call_pytest(module, "candidate", source, recorder)
    if not recorder.outcomes:
        if "code" not in message:
            check_file(message, source)
        raise tests.CandidateError("pytest found no test in the file with this candidate")
    reporter.send("count", len(recorder.outcomes))
    for number, (name, (passed, text)) in enumerate(recorder.outcomes.items()):
        reporter.send("outcome", number, passed, f"{name.partition('::')[2]}: {text}".rstrip(": "))


def connect_candidate(source: str, pipes: list[int], reporter: Any) -> Any:
    replies, requests = pipes

    def share_box(reason: str) -> None:
        reporter.send("share", message=reason)
        os._exit(0)

    proxy = sys.modules["rollick_candidate_proxy"]
    return proxy.CandidateProxy(requests, replies, share_box, source)


def load_candidate(message: dict[str, Any]) -> Any:
    """Import the candidate from a file, so that the tests can reload it or read its source."""
    name = message["module"]
    path = f"/tmp/{name.replace('.', '/')}.py"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(message["code"])
    sys.path.insert(0, "/tmp")
    return __import__(name, fromlist=["*"])


def check_file(message: dict[str, Any], source: str) -> None:
    """Raise TestsInvalid if the file has no tests, whatever the candidate is."""
    recorder = tests.UseRecorder()
    code = call_pytest(RemoteModule(recorder, message), "probe", source, None, "--collect-only")
    if code and not recorder.was_used:
        raise tests.TestsInvalid(f"pytest found no test in the file (exit code {code})")


def call_pytest(module: Any, name: str, source: str, plugin: Any, *options: str) -> int:
    import pytest

    sys.modules[module.__name__] = module
    path = f"/tmp/test_{name}.py"
    with open(path, "w", encoding="utf-8") as file:
        file.write(source)
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir=/tmp", "-c", "/dev/null", path]
    return int(pytest.main([*arguments, *options], plugins=[plugin] if plugin else []))


def read_last_line(report: Any) -> str:
    lines = str(report.longrepr).strip().splitlines()
    return lines[-1] if lines else "failed"

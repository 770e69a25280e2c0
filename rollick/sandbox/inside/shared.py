"""Role of a box: candidate and tests in one process, for tests whose arguments are not data.

The box holds as well as any, but the candidate could forge a pass: it shares the interpreter with
the tests and with this harness. So every result of this role says `shared`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main(message: dict[str, Any], pipes: list[int], control: int) -> None:
    tests = sys.modules["rollick_tests"]
    reporter = tests.Reporter(control, message["nonce"])
    namespace: dict[str, Any] = {"__name__": "candidate"}
    try:
        for name in message["imports"]:
            namespace[name] = __import__(name)
        exec(compile(message["code"], "candidate.py", "exec"), namespace)
        exec(compile(message["setup"], "<the set-up>", "exec"), namespace)
        for number, case in enumerate(message["cases"]):
            code = case if isinstance(case, list) else compile(case, f"<test {number}>", "exec")
            tests.report_case(number, code, namespace, reporter)
    except BaseException as error:
        reporter.tell("ended", message=tests.explain(error))
    else:
        reporter.tell("ended")
    os._exit(0)

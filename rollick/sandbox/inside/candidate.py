"""Box program: loads the candidate and executes calls; the tests are in another box.

    requests: ["describe", names] | ["call", name, args, kwargs]
    replies:  ["value", value] | ["raise", type of the exception, message]

For pytest files candidate_server.py serves the requests: their values may be objects.

The candidate can take over this process and forge replies. It gains nothing: its functions may
return any value anyway.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

wire = sys.modules["rollick_wire"]

MAX_MESSAGE = 500
MAX_REQUEST = 1 << 32


def main(message: dict[str, Any], pipes: list[int], control: int) -> None:
    requests, replies = pipes
    module = type(sys)("candidate")
    sys.modules["candidate"] = module
    failure: BaseException | None = None
    try:
        exec(compile(message["code"], "candidate.py", "exec"), module.__dict__)
    except BaseException as error:
        failure = error
    if message["module"]:
        server = sys.modules["rollick_candidate_server"]
        server.CandidateServer(module.__dict__, requests, replies).serve(failure)
        return
    failure_reply = failure and describe_error(failure)
    while (request := wire.read_frame(requests, MAX_REQUEST)) is not None:
        wire.write_frame(replies, encode_reply(failure_reply or execute(request, module.__dict__)))


def execute(request: bytes, namespace: dict[str, Any]) -> list[Any]:
    try:
        kind, *arguments = wire.decode(request)
        if kind == "describe":
            return ["value", {name: describe_name(name, namespace) for name in arguments[0]}]
        name, args, kwargs = arguments
        return ["value", namespace[name](*args, **kwargs)]
    except BaseException as error:
        return describe_error(error)


def encode_reply(reply: list[Any]) -> bytes:
    """Encode the reply; if its value is not plain data, encode a TypeError instead."""
    try:
        return wire.encode(reply)
    except BaseException as error:
        return wire.encode(["raise", "TypeError", f"the returned value is not plain data: {error}"])


def describe_name(name: str, namespace: dict[str, Any]) -> list[Any]:
    if name not in namespace:
        return ["absent"]
    value = namespace[name]
    return ["function"] if callable(value) else ["data", value]


def describe_error(error: BaseException) -> list[Any]:
    kind = type(error).__name__
    builtin, text = get_name_and_text(error)
    message = text if builtin == kind else f"{kind}: {text}"
    return ["raise", builtin, message[:MAX_MESSAGE]]


def get_name_and_text(error: BaseException) -> tuple[str, str]:
    """The name of the builtin class of an exception, and its text."""
    builtin = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    try:
        return builtin.__name__, str(error)
    except BaseException:
        return builtin.__name__, "(an exception that cannot be printed)"

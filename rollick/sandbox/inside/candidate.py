"""Role of a box: hold the candidate and answer calls; it never sees a test.

    requests: ["describe", names] | ["call", name, args, kwargs]
    replies:  ["value", value] | ["raise", type of the exception, message]

Whoever controls this process can answer what it likes: that is all a candidate can do anyway.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MESSAGE_CHARACTERS = 500


def main(message: dict[str, Any], pipes: list[int], control: int) -> None:
    requests, replies = pipes
    module = type(sys)("candidate")
    sys.modules["candidate"] = module
    failure: list[Any] | None = None
    try:
        exec(compile(message["code"], "candidate.py", "exec"), module.__dict__)
    except BaseException as error:
        failure = describe(error)
    while (request := read_frame(requests)) is not None:
        answer = failure or reply(request, module.__dict__)
        write_frame(replies, answer)


def reply(request: bytes, namespace: dict[str, Any]) -> list[Any]:
    try:
        what, *rest = sys.modules["rollick_wire"].decode(request)
        if what == "describe":
            return ["value", {name: kind_of(name, namespace) for name in rest[0]}]
        name, args, kwargs = rest
        return ["value", namespace[name](*args, **kwargs)]
    except BaseException as error:
        return describe(error)


def kind_of(name: str, namespace: dict[str, Any]) -> list[Any]:
    if name not in namespace:
        return ["absent"]
    value = namespace[name]
    return ["function"] if callable(value) else ["data", value]


def describe(error: BaseException) -> list[Any]:
    try:
        text = str(error)
    except BaseException:
        text = "(an exception that cannot be printed)"
    kind = next(
        (base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"), ""
    )
    named = text if kind == type(error).__name__ else f"{type(error).__name__}: {text}"
    return ["raise", kind, named[:MESSAGE_CHARACTERS]]


def write_frame(descriptor: int, value: Any) -> None:
    """The value, or if it is not data, an exception that says so."""
    wire = sys.modules["rollick_wire"]
    try:
        body = wire.encode(value)
    except BaseException as error:
        body = wire.encode(["raise", "TypeError", f"returned what is not data: {error}"])
    view = memoryview(len(body).to_bytes(4, "little") + body)
    while view:
        view = view[os.write(descriptor, view) :]


def read_frame(descriptor: int) -> bytes | None:
    header = read_exactly(descriptor, 4)
    return None if header is None else read_exactly(descriptor, int.from_bytes(header, "little"))


def read_exactly(descriptor: int, count: int) -> bytes | None:
    content = bytearray()
    while len(content) < count:
        chunk = os.read(descriptor, count - len(content))
        if not chunk:
            return None
        content += chunk
    return bytes(content)

"""The candidate's side of the calls between the test box and the candidate's box (pytest files).

    request ["use", operation, args, kwargs] -> unpack -> operation -> pack -> reply

A value that is not plain data is sent as a tuple that begins with MARK, an object as its number
(candidate_proxy.py has the other side). A function of the tests arrives as a callback: the reply
"callback" requests a call of it, and the requests "returned" and "raised" answer. No code of the
tests arrives here, only what their functions return.

Runs inside boxes: see inside/__init__.py.
"""

from __future__ import annotations

import _operator
import builtins
import os
import sys
from _collections_abc import Iterator
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

wire, values = sys.modules["rollick_wire"], sys.modules["rollick_values"]
candidate = sys.modules["rollick_candidate"]

MARK = values.MARK
PLAIN = (bool, int, float, complex, str, bytes, bytearray, range)
OPERATORS = (
    "neg pos abs invert index lt le gt ge eq contains getitem setitem delitem add sub mul truediv "
    "floordiv mod pow matmul and_ or_ xor lshift rshift iadd isub imul itruediv ifloordiv imod "
    "ipow imatmul iand ior ixor ilshift irshift"
)
CONTAINERS = (list, tuple, dict, set, frozenset)
CANDIDATE = "candidate"
"""The module of the classes that the candidate defines."""
MISSING = object()
"""Default of the optional parameters of a callback: the argument was not passed."""


def _call_exit(manager: Any, error: BaseException | None) -> Any:
    details = (None, None, None) if error is None else (type(error), error, error.__traceback__)
    return bool(type(manager).__exit__(manager, *details))


def _take_items(iterator: Any, count: int) -> list[Any]:
    """[up to `count` items, whether the iterator has ended]."""
    items: list[Any] = []
    for _ in range(count):
        try:
            items.append(next(iterator))
        except StopIteration:
            return [items, True]
    return [items, False]


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name.rstrip("_"): getattr(_operator, name) for name in OPERATORS.split()},
    **{"getattr": getattr, "setattr": setattr, "delattr": delattr, "len": len, "bool": bool},
    **{"iter": iter, "reversed": reversed, "str": str, "repr": repr, "hash": hash, "int": int},
    **{"float": float, "round": round, "format": format, "bytes": bytes, "exit": _call_exit},
    **{"divmod": divmod, "complex": complex, "call": _operator.call, "take": _take_items},
    "content": lambda value: content_of(value),  # pyright: ignore
    "copy": lambda value: __import__("copy").copy(value),  # pyright: ignore
    "deepcopy": lambda value: __import__("copy").deepcopy(value),  # pyright: ignore
    "enter": lambda manager: type(manager).__enter__(manager),  # pyright: ignore
    "has_instance": lambda kind, value: isinstance(value, kind),  # pyright: ignore
    "is_subclass": lambda base, kind: issubclass(kind, base),  # pyright: ignore
}


class CandidateServer:
    """Holds the candidate's objects that the tests know, and the callbacks into the tests."""

    def __init__(self, namespace: dict[str, Any], requests: int, replies: int) -> None:
        self.namespace, self.requests, self.replies = namespace, requests, replies
        self.objects: list[Any] = []
        self.object_numbers: dict[int, int] = {}
        """By `id`. An object has one number, so the tests can compare identities."""
        self.callbacks: dict[int, Any] = {}
        self.callback_numbers: dict[int, int] = {}
        self.lock = RLock()
        self.loop: Any = None

    def serve(self, failure: BaseException | None) -> None:
        """Answer requests until the test box ends, each with `failure` if the candidate has one."""
        failure_reply = failure and ["raise", *self.describe_error(failure)]
        while (request := wire.read_frame(self.requests, candidate.MAX_REQUEST)) is not None:
            self.send_reply(failure_reply or self.execute(wire.decode(request)))

    def send_reply(self, reply: list[Any]) -> None:
        try:
            body = wire.encode(reply)
        except BaseException as error:
            text = f"the returned value is not plain data: {error}"
            body = wire.encode(["raise", "TypeError", text, None, -1, (text,), -1])
        wire.write_frame(self.replies, body)

    def execute(self, request: Any) -> list[Any]:
        try:
            _, operation, packed, packed_kwargs = request
            args, kwargs = self.unpack(packed), self.unpack(packed_kwargs)
            if operation == "lookup":
                (name,) = args
                is_defined = name in self.namespace
                return ["value", [True, self.pack(self.namespace[name])] if is_defined else [False]]
            if operation == "run":
                return ["value", self.pack(self.run(*args))]
            value = OPERATIONS[operation](*args, **kwargs)
            if operation == "call" and value is None:
                return ["value", None, self.find_changes(packed, args)]
            return ["value", self.pack(value)]
        except BaseException as error:
            return ["raise", *self.describe_error(error)]

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine to its end. All share one event loop: locks and queues belong to it."""
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
        return self.loop.run_until_complete(coroutine)

    def find_changes(self, packed: list[Any], args: list[Any]) -> list[Any]:
        """[position, new content] of each list, dict or set that a call changed in place."""
        changed: list[Any] = []
        for position, (before, argument) in enumerate(zip(packed, args, strict=True)):
            if type(argument) in (list, dict, set):
                after = self.pack(argument)
                if after != self.pack(self.unpack(before)):
                    changed.append([position, after])
        return changed

    def pack(self, value: Any) -> Any:
        """Keep plain data; replace every other value by a tuple that begins with MARK."""
        kind = type(value)
        if value is None or kind in PLAIN:
            return value
        if kind in (list, tuple, set, frozenset):
            return kind([self.pack(item) for item in value])
        if kind is dict:
            return {self.pack(key): self.pack(item) for key, item in value.items()}
        if isinstance(value, type):
            return self.describe_class(value)
        if isinstance(value, BaseException):
            return (MARK, "error", *self.describe_error(value))
        if (parts := values.split_value(value)) is not None:
            return (MARK, "value", parts[0], self.pack(parts[1]))
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            items = tuple([self.pack(item) for item in value])
            return (MARK, "named", self.describe_class(kind), items)
        if isinstance(value, PLAIN):
            return value
        return self.pack_object(value, kind)

    def pack_object(self, value: Any, kind: type[Any]) -> Any:
        if id(value) in self.callback_numbers:
            return (MARK, "callback", self.callback_numbers[id(value)])
        if kind.__module__ == CANDIDATE:
            return (MARK, "object", self.number_of(value), self.describe_class(kind))
        if content_kind(kind) is not None:
            return self.pack(content_of(value))
        if isinstance(value, Iterator):
            return (MARK, "iterator", self.number_of(value))
        if kind.__module__ == "builtins" and kind.__name__ == "coroutine":
            return (MARK, "coroutine", self.number_of(value))
        return (MARK, "object", self.number_of(value), None)

    def number_of(self, value: Any) -> int:
        if id(value) not in self.object_numbers:
            self.objects.append(value)
            self.object_numbers[id(value)] = len(self.objects) - 1
        return self.object_numbers[id(value)]

    def describe_class(self, kind: type[Any]) -> Any:
        """(MARK, "class", number, name, module, fields of a named tuple, bases of an exception,
        type of the content, whether it is an Enum)."""
        if kind.__module__ == "builtins":
            if wire.TYPES.get(kind.__name__) is kind or issubclass(kind, BaseException):
                return (MARK, "import", "builtins", kind.__name__)
            return (MARK, "object", self.number_of(kind), None)
        fields = getattr(kind, "_fields", ()) if issubclass(kind, tuple) else ()
        is_exception = issubclass(kind, BaseException)
        bases = [
            base for base in kind.__bases__ if is_exception and issubclass(base, BaseException)
        ]
        described_bases = tuple([self.describe_class(base) for base in bases])
        content = content_kind(kind)
        names = (kind.__name__, kind.__module__)
        return (
            *(MARK, "class", self.number_of(kind), *names, tuple(fields), described_bases),
            content.__name__ if content else "",
            hasattr(kind, "__members__"),
        )

    def describe_error(self, error: BaseException) -> list[Any]:
        """[builtin class, text, class, number, arguments, index of the tests' exception or -1]; the
        class is None if it is the builtin one."""
        kind = type(error)
        builtin, text = candidate.get_name_and_text(error)
        described_class = None if kind.__module__ == "builtins" else self.describe_class(kind)
        try:
            arguments = tuple([self.pack(argument) for argument in error.args])
            wire.encode(arguments)
        except BaseException:
            arguments = (text,)
        error_index = vars(error).get("_rollick_error_index", -1)
        return [
            builtin,
            text[: candidate.MAX_MESSAGE],
            described_class,
            self.number_of(error),
            arguments,
            error_index,
        ]

    def unpack(self, value: Any) -> Any:
        kind = type(value)
        if kind is tuple and len(value) > 1 and value[0] == MARK:
            return self.unpack_marked(*value[1:])
        if kind in (list, tuple, set, frozenset):
            return kind([self.unpack(item) for item in value])
        if kind is dict:
            return {self.unpack(key): self.unpack(item) for key, item in value.items()}
        return iter([self.unpack(item) for item in value]) if isinstance(value, Iterator) else value

    def unpack_marked(self, kind: str, *parts: Any) -> Any:
        if kind == "object":
            return self.objects[parts[0]]
        if kind == "callback":
            return self.make_callback(*parts)
        if kind == "import":
            return _operator.attrgetter(parts[1])(__import__(parts[0], fromlist=["*"]))
        if kind == "named":
            return tuple.__new__(self.objects[parts[0]], self.unpack(parts[1]))
        if kind == "error":
            builtin, name, arguments, error_index = parts
            return make_error(builtin, name, self.unpack(arguments), error_index)
        return values.join_value(parts[0], self.unpack(parts[1]))

    def make_callback(
        self, number: int, name: str, parameters: list[Any] | None, is_async: bool
    ) -> Any:
        """A function with the parameters of the tests' function of this number, which it calls."""
        if number in self.callbacks:
            return self.callbacks[number]
        required = [parameter for parameter, has_default in parameters or () if not has_default]
        optional = [parameter for parameter, has_default in parameters or () if has_default]
        signature = ", ".join([*required, *(f"{parameter}=MISSING" for parameter in optional)])
        args = f"[{', '.join(required)}]"
        kwargs = f"{{{', '.join(f'{parameter!r}: {parameter}' for parameter in optional)}}}"
        if parameters is None:
            signature, args, kwargs = "*args, **kwargs", "list(args)", "kwargs"
        scope = {"MISSING": MISSING, "call_tests": self.call_tests}
        source = f"def callback({signature}):\n return call_tests({number}, {args}, {kwargs})\n"
        exec(f"async {source}" if is_async else source, scope)
        callback: Any = scope["callback"]
        callback.__name__ = callback.__qualname__ = name
        self.callbacks[number] = callback
        self.callback_numbers[id(callback)] = number
        return callback

    def call_tests(self, number: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Request a call from the test box. Until it answers, serve its other requests."""
        passed = {name: value for name, value in kwargs.items() if value is not MISSING}
        body = wire.encode(["callback", number, self.pack(args), self.pack(passed)])
        with self.lock:
            wire.write_frame(self.replies, body)
            while True:
                request = wire.read_frame(self.requests, candidate.MAX_REQUEST)
                if request is None:
                    os._exit(0)
                message = wire.decode(request)
                if message[0] == "returned":
                    return self.unpack(message[1])
                if message[0] == "raised":
                    raise self.unpack(message[1])
                self.send_reply(self.execute(message))


def make_error(builtin: str, name: str, arguments: tuple[Any, ...], index: int) -> BaseException:
    """An exception that the tests have raised or built, with the class name that it has there."""
    kind: Any = getattr(builtins, builtin)
    if name != builtin:
        kind = type(name, (kind,), {})
    error: Any
    try:
        error = kind(*arguments)
    except Exception:
        error = RuntimeError(*arguments)
    error._rollick_error_index = index
    return error


def content_kind(kind: type[Any]) -> type[Any] | None:
    """The container type that a class derives from."""
    return next((base for base in CONTAINERS if issubclass(kind, base)), None)


def content_of(value: Any) -> Any:
    """The content of an object whose class derives from a container type; calls no override."""
    base: Any = content_kind(type(value))
    return dict(dict.items(value)) if base is dict else base(base.__iter__(value))

"""The test side of the calls between the test box and the candidate's box (pytest files).

    use(operation, args) -> pack -> request -> the candidate's box -> reply -> unpack

A value that is not plain data is sent as a tuple that begins with MARK (candidate_server.py has the
other side): an object as its number and a description of its class. A function of the tests that is
passed to the candidate stays here, and is called here when the candidate requests it.

Other values cannot be sent. Then `share_box` ends this run, and the tests run again in one box with
the candidate. Only values of the tests may cause this, never a reply of the candidate.

Runs inside boxes: see inside/__init__.py.
"""

from __future__ import annotations

import sys
from _collections_abc import Iterator, dict_items, dict_keys, dict_values
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

wire, values = sys.modules["rollick_wire"], sys.modules["rollick_values"]
tests, objects = sys.modules["rollick_tests"], sys.modules["rollick_objects"]

MARK = values.MARK
PLAIN = (bool, int, float, complex, str, bytes, bytearray, range)
CONTAINERS = (list, tuple, set, frozenset)
VIEWS = (dict_items, dict_keys, dict_values)
CALLABLE_MODULES = ("builtins", "functools", "operator")
"""Modules whose callables are sent as plain functions. Other callables may have state."""
TEST_MODULE = "test_candidate"
CO_VARARGS, CO_VARKEYWORDS, CO_COROUTINE = 0x04, 0x08, 0x80  # as in `inspect`


class CandidateProxy(tests.Candidate):
    """The candidate's box as a pytest file sees it."""

    def __init__(
        self, requests: int, replies: int, share_box: Callable[[str], Any], source: str = ""
    ) -> None:
        super().__init__(requests, replies)
        self.share_box = share_box
        self.source = source
        self.classes: dict[int, type[Any]] = {}
        self.named_classes: set[int] = set()
        """Classes that the tests use by a capitalized name, so they expect instances of them."""
        self.proxies: dict[tuple[int, bool], Any] = {}
        self.highest_number = -1
        """The highest number of an object so far."""
        self.functions: list[Any] = []
        """Functions of the tests that the candidate may call."""
        self.function_numbers: dict[int, int] = {}
        """The numbers of these functions, by `id`."""
        self.coroutines: dict[int, tuple[Any, int]] = {}
        """Coroutines that run the candidate's, with the numbers of these, by `id`."""
        self.errors: list[BaseException] = []
        self.changed: list[Any] = []
        """[position, new content] of each argument that the last call changed in place."""

    def bind(self, names: list[str]) -> dict[str, Any]:
        return {name: self.look_up(name) for name in names}

    def look_up(self, name: str) -> Any:
        """The candidate's value of this name, or a StandIn that raises on use if there is none."""
        try:
            reply = self.use("lookup", name)
        except Exception as error:
            return tests.StandIn(tests.make_raiser(error))
        if type(reply) is list and len(reply) == 2:
            return self.record_class(name, reply[1])
        error = NameError(f"the candidate does not define {name!r}")
        return tests.StandIn(tests.make_raiser(error))

    def record_class(self, name: str, value: Any) -> Any:
        """Record a class that the tests use by name. A lowercase name is treated as a function,
        whose result may be plain data."""
        if type(value) is not objects.RemoteMeta:
            return value
        number = value.rollick_class
        if not name[:1].isupper():
            return self.proxy(number, objects.RemoteObject)
        self.named_classes.add(number)
        return value

    def use(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self.unpack(self.request("use", operation, self.pack(list(args)), self.pack(kwargs)))

    def build(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a class. The result counts as built by the tests unless it existed before."""
        highest = self.highest_number
        value = self.use("call", cls, *args, **kwargs)
        is_instantiated = cls.rollick_instantiates and cls.rollick_class in self.named_classes
        if is_instantiated and isinstance(value, objects.RemoteObject):
            number = value.rollick_number
            if number > highest or (number, True) in self.proxies:
                return self.proxy(number, type(value), built=True)
        return value

    def proxy(self, number: int, cls: type[Any], *, built: bool = False) -> Any:
        """The proxy of an object: always the same one, so that `is` works."""
        self.highest_number = max(self.highest_number, number)
        if (number, built) not in self.proxies:
            proxy: Any = object.__new__(cls)
            proxy.__init__(self, number, built)
            self.proxies[number, built] = proxy
        return self.proxies[number, built]

    def request(self, *message: Any, max_bytes: int = tests.MAX_REPLY) -> Any:
        """Send a request, and run the candidate's callbacks until the reply arrives."""
        failed_assertion: BaseException | None = None
        reply = self.exchange(list(message), max_bytes)
        while type(reply) is list and len(reply) == 4 and reply[0] == "callback":
            answer, error = self.run_callback(*reply[1:])
            failed_assertion = failed_assertion or error
            reply = self.exchange(answer, max_bytes)
        if failed_assertion is not None:
            raise failed_assertion
        return self.read_reply(reply)

    def run_callback(
        self, number: Any, args: Any, kwargs: Any
    ) -> tuple[list[Any], BaseException | None]:
        """(answer, failed assertion). A failed assertion fails the test, even if the candidate
        catches the exception."""
        try:
            function = self.functions[number]
            value = function(*self.unpack(args), **self.unpack(kwargs))
            if hasattr(value, "cr_await") and id(value) not in self.coroutines:
                value = run_coroutine(value)
            return ["returned", self.pack(value)], None
        except BaseException as error:
            failed_assertion = error if objects.is_failed_assertion(error) else None
            return ["raised", self.pack(error)], failed_assertion

    def read_reply(self, reply: Any) -> Any:
        if type(reply) is list and len(reply) == 2 and reply[0] == "value":
            return reply[1]
        if type(reply) is list and len(reply) == 3 and reply[:2] == ["value", None]:
            self.changed = reply[2]
            return None
        if type(reply) is list and len(reply) == 7 and reply[0] == "raise":
            raise self.make_error(*reply[1:])
        raise tests.CandidateError("the reply is neither a value nor an exception")

    def make_error(
        self, builtin: Any, text: Any, packed_class: Any, number: Any, args: Any, error_index: Any
    ) -> BaseException:
        """The exception of a reply. If the tests raised it in a callback, returns the original."""
        if type(error_index) is int and 0 <= error_index < len(self.errors):
            error = self.errors[error_index]
            if isinstance(error, tests.END_OF_ITERATION):
                return tests.make_exception(type(error).__name__, str(text))
            return error
        kind: Any = self.unpack(packed_class) if packed_class is not None else None
        arguments = self.unpack(args)
        if isinstance(kind, type) and issubclass(kind, Exception):
            error = kind.__new__(kind, *arguments)
            error.args = arguments
        else:
            error = make_builtin_error(str(builtin), str(text), arguments)
        error.__dict__.update(_rollick_text=str(text), _rollick_error=(self, number))
        return error

    def apply_changes(self, args: tuple[Any, ...]) -> None:
        """Apply the candidate's in-place changes to the arguments. Only a call that returns None
        may have them: `f(values) == sorted(values)` must not pass because `values` changed."""
        changed, self.changed = self.changed, []
        for position, content in changed:
            if type(position) is not int or not 1 <= position <= len(args):
                raise tests.CandidateError("an argument that was not passed has changed")
            before, after = args[position - 1], self.unpack(content)
            if type(before) is not type(after) or type(after) not in (list, dict, set):
                raise tests.CandidateError("an argument has changed its type")
            if type(after) is list:
                # Keep existing proxies: they may count as built by the tests.
                proxies = [item for item in before if isinstance(item, objects.RemoteObject)]
                by_number: dict[int | None, Any] = {item.rollick_number: item for item in proxies}
                before[:] = [by_number.get(objects.number_of(item), item) for item in after]
            else:
                before.clear()
                before.update(after)

    def unpack(self, value: Any) -> Any:
        kind = type(value)
        if kind is tuple and len(value) > 1 and value[0] == MARK:
            try:
                return self.unpack_marked(*value[1:])
            except tests.CandidateError:
                raise
            except Exception as error:
                raise tests.CandidateError(f"an invalid reply: {error}") from None
        if kind in CONTAINERS:
            return kind([self.unpack(item) for item in value])
        if kind is dict:
            return {self.unpack(key): self.unpack(item) for key, item in value.items()}
        return value

    def unpack_marked(self, kind: str, *parts: Any) -> Any:
        if kind == "object":
            number, packed_class = parts
            cls = objects.RemoteObject if packed_class is None else self.unpack(packed_class)
            return self.proxy(number, cls)
        if kind == "class":
            number = parts[0]
            if number not in self.classes:
                self.highest_number = max(self.highest_number, number)
                self.classes[number] = self.make_class(*parts)
            return self.classes[number]
        if kind == "import" and parts[0] == "builtins":
            return safe_builtin(parts[1])
        if kind == "iterator":
            return self.proxy(parts[0], objects.RemoteIterator)
        if kind == "coroutine":
            coroutine = self.run_remote(self.proxy(parts[0], objects.RemoteObject))
            self.coroutines[id(coroutine)] = (coroutine, parts[0])
            return coroutine
        if kind == "callback":
            return self.functions[parts[0]]
        if kind == "error":
            return self.make_error(*parts)
        if kind == "named":
            return tuple.__new__(self.unpack(parts[0]), self.unpack(parts[1]))
        return values.join_value(parts[0], self.unpack(parts[1]))

    async def run_remote(self, coroutine: Any) -> Any:
        return self.use("run", coroutine)

    def make_class(
        self,
        number: int,
        name: str,
        module: str,
        fields: Any,
        bases: Any,
        content: str,
        is_enum: bool,
    ) -> type[Any]:
        """The local class of one of the candidate's classes."""
        body: dict[str, Any] = {"__test__": False, "rollick_class": number}
        if bases:
            local_bases = tuple(dict.fromkeys(self.unpack(base) for base in bases))
            if not all(issubclass(base, Exception) for base in local_bases):
                raise tests.CandidateError("an exception class has a base that is not an exception")
            if (standard := find_standard_exception(module, name)) is not None:
                return standard
            return type(name, local_bases, body | objects.ERROR_METHODS)
        body |= {"__slots__": (), "rollick_owner": self, "rollick_content": content}
        body["rollick_instantiates"] = not is_enum
        base: Any = objects.RemoteObject
        if fields:
            base = __import__("collections").namedtuple(name, fields)
            body["__getattr__"] = objects.get_tuple_attribute
        return type.__new__(objects.RemoteMeta, name, (base,), body)

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in PLAIN:
            return value
        if (number := objects.number_of(value)) is not None:
            return (MARK, "object", number)
        if kind is tests.StandIn:
            return value()  # raises: the candidate does not define it
        if kind in CONTAINERS:
            return kind([self.pack(item) for item in value])
        if kind is dict:
            return {self.pack(key): self.pack(item) for key, item in value.items()}
        if isinstance(value, VIEWS):
            return [self.pack(item) for item in value]
        if type(kind) is objects.RemoteMeta:
            return (MARK, "named", kind.rollick_class, tuple([self.pack(item) for item in value]))
        if (parts := values.split_value(value)) is not None:
            return (MARK, "value", parts[0], self.pack(parts[1]))
        if id(value) in self.coroutines:
            return (MARK, "object", self.coroutines[id(value)][1])
        return self.pack_other(value, kind)

    def pack_other(self, value: Any, kind: type[Any]) -> Any:
        if isinstance(value, BaseException):
            return self.pack_error(value)
        if (name := find_importable_name(value)) is not None:
            return (MARK, "import", *name)
        if isinstance(value, type):
            if value.__module__ == TEST_MODULE:
                return self.share_box(f"the tests pass the class {value.__name__} to the candidate")
            raise TypeError(f"the class {value.__name__} cannot be passed to the candidate")
        if kind.__module__ in CALLABLE_MODULES and callable(value):
            return self.pack_function(value)
        if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
            if isinstance(value, Iterator) and kind.__module__ != "_io":
                items = list(islice(value, wire.MAX_ITEMS + 1))
                if len(items) <= wire.MAX_ITEMS:
                    return iter([self.pack(item) for item in items])
                reason = f"the tests pass an iterator of more than {wire.MAX_ITEMS} items"
                return self.share_box(f"{reason} to the candidate")
            if isinstance(value, PLAIN):
                return value
            for base in (dict, *CONTAINERS):
                if isinstance(value, base):
                    return self.pack(base(value))
        return self.share_box(f"the tests pass a {kind.__name__} to the candidate")

    def pack_error(self, error: BaseException) -> Any:
        """An exception of the tests, by the name of its builtin class. The message of a failed
        assertion is not sent, because it may contain the expected value."""
        self.errors.append(error)
        number = len(self.errors) - 1
        if objects.is_failed_assertion(error):
            return (MARK, "error", "AssertionError", "AssertionError", (), number)
        builtin = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
        is_plain = all(arg is None or type(arg) in PLAIN for arg in error.args)
        arguments = error.args if is_plain else (str(error),)
        return (MARK, "error", builtin.__name__, type(error).__name__, arguments, number)

    def pack_function(self, function: Any) -> Any:
        if id(function) not in self.function_numbers:
            self.functions.append(function)
            self.function_numbers[id(function)] = len(self.functions) - 1
        code = getattr(function, "__code__", None)
        name = str(getattr(function, "__name__", "callback"))
        is_async = code is not None and bool(code.co_flags & CO_COROUTINE)
        number = self.function_numbers[id(function)]
        return (MARK, "callback", number, name, describe_parameters(function), is_async)


def run_coroutine(coroutine: Any) -> Any:
    """Run a coroutine of the tests, possibly while their event loop waits for the candidate."""
    import asyncio

    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(coroutine)
    finally:
        asyncio._set_running_loop(outer)


def safe_builtin(name: str) -> type[Any]:
    """A plain data type or a builtin exception; StopIteration becomes RuntimeError."""
    if name in wire.TYPES:
        return wire.TYPES[name]
    return type(tests.make_exception(name, ""))


def make_builtin_error(name: str, text: str, arguments: Any) -> BaseException:
    """A builtin exception with its arguments, or with its text if it does not take them."""
    fallback = tests.make_exception(name, text)
    if type(fallback).__name__ != name:
        return fallback
    try:
        return type(fallback)(*arguments)
    except Exception:
        return fallback


def find_standard_exception(module: str, name: str) -> type[Any] | None:
    """An exception of the standard library, if the tests have imported its module."""
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    cls = getattr(sys.modules.get(module), name, None)
    if not (isinstance(cls, type) and issubclass(cls, Exception)):
        return None
    return None if issubclass(cls, tests.END_OF_ITERATION) else cls


def find_importable_name(value: Any) -> tuple[str, str] | None:
    """(module, name) of a function or class of the standard library."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)):
        return None
    imported: Any = sys.modules.get(module)
    for part in name.split("."):
        imported = getattr(imported, part, None)
    is_standard = module.partition(".")[0] in sys.stdlib_module_names
    return (module, name) if is_standard and imported is value else None


def describe_parameters(function: Any) -> list[Any] | None:
    """(name, whether it has a default) of each parameter. None if they are unknown, or if it is a
    method or has *args, **kwargs, positional-only or keyword-only parameters."""
    code = getattr(function, "__code__", None)
    variadic = CO_VARARGS | CO_VARKEYWORDS
    if code is None or code.co_flags & variadic or hasattr(function, "__self__"):
        return None
    if code.co_posonlyargcount or code.co_kwonlyargcount:
        return None
    names = code.co_varnames[: code.co_argcount]
    first_default = len(names) - len(function.__defaults__ or ())
    return [(name, position >= first_default) for position, name in enumerate(names)]

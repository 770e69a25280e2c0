"""Reads the fields of a JSON body and checks their types and ranges.

    bytes -> read_json -> RequestFields.read ... -> reject_unread

Parameters that no reader used are accepted only if they cannot change the response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from typing import Any, NoReturn, TypeVar, cast

from rollick.errors import RollickError

T = TypeVar("T")
Default = TypeVar("Default")

TYPE_NAMES: Mapping[type, str] = {
    bool: "true or false", int: "an integer", float: "a number",
    str: "a string", list: "a list", dict: "an object",
}  # fmt: skip
"""The types of JSON values, as error messages name them."""
MAX_DEPTH = 64
"""Nesting of objects and lists; much deeper nesting would overflow the stack."""

MAX_CONTAINERS = 50_000
"""Objects and lists of a body; reading many more would block the other requests."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Also matches an unclosed string: a search for its end from each later quote is quadratic."""

IGNORED_PARAMETERS = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)
"""Parameters that do not change the response of this server."""

NEUTRAL_VALUES: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "echo": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    **dict.fromkeys(("frequency_penalty", "min_p", "presence_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("audio", "function_call", "functions", "prediction"), ()),
    **dict.fromkeys(("reasoning_effort", "verbosity", "web_search_options"), ()),
}
"""Unsupported parameters, with the values that have no effect."""
UNSUPPORTED = "unsupported_parameter"
"""The error code of a parameter or value that this server does not support."""


class BadRequest(RollickError):
    """A rejected request: an error response in OpenAI's format."""

    def __init__(
        self, message: str, *, fix: str = "", status: int = 400, param: str = "", code: str = ""
    ) -> None:
        super().__init__(message, fix=fix)
        self.status, self.param, self.code = status, param, code


def read_json(body: bytes) -> Mapping[str, Any]:
    """The body as an object; rejects NaN and Infinity."""
    structure = _STRING.sub(b"", body)
    containers = structure.count(b"[") + structure.count(b"{")
    if containers > MAX_CONTAINERS:
        text = f"the body is not parsed: it has {containers} objects and lists"
        raise BadRequest(text, fix=f"send at most {MAX_CONTAINERS}")
    try:
        value = json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", fix="send a JSON object") from error
    if not isinstance(value, dict):
        raise BadRequest("the body is not a JSON object", fix="send a JSON object")
    check_depth(value, "the body")
    return cast(dict[str, Any], value)


class RequestFields:
    """A body that is read field by field; null means absent."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._unread = {name: value for name, value in body.items() if value is not None}

    def pop(self, name: str) -> Any:
        return self._unread.pop(name, None)

    def read(self, name: str, kind: type[T], default: Default) -> T | Default:
        value = self.pop(name)
        return default if value is None else read_value(value, kind, name)

    def read_number(
        self, name: str, kind: type[T], default: Default, *, low: float, high: float = inf
    ) -> T | Default:
        """Read a number from `low` to `high`."""
        value = self.read(name, kind, default)
        if value is not None and not low <= cast("float", value) <= high:
            limit = f"at least {low:g}" if high == inf else f"{low:g} to {high:g}"
            reject(name, f"is {show_value(value)}", fix=f"send {limit}")
        return value

    def reject_unread(self) -> None:
        """Reject unread parameters, unless they have no effect."""
        for name, value in self._unread.items():
            if name in IGNORED_PARAMETERS or value in NEUTRAL_VALUES.get(name, ()):
                continue
            problem, code = "is not a parameter", "unknown_parameter"
            if name in NEUTRAL_VALUES:
                problem = f"is {show_value(value)}, which is not supported"
                code = UNSUPPORTED
            reject(name, problem, fix="leave it out", code=code)


def reject(param: str, problem: str, *, fix: str, code: str = "") -> NoReturn:
    raise BadRequest(f"{param} {problem}", fix=fix, param=param, code=code)


def model_not_found_error(name: str | None, *, fix: str = "") -> BadRequest:
    text, code = f"there is no model {name!r}", "model_not_found"
    return BadRequest(text, fix=fix, status=404, param="model", code=code)


def read_value(value: Any, kind: type[T], param: str) -> T:
    """The value, if it is of this kind; an integer is also a number."""
    allowed: Any = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
        expected = TYPE_NAMES[kind]
        reject(param, f"is {show_value(value)}, not {expected}", fix=f"send {expected}")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            reject(param, f"has half of a surrogate pair at {error.start}", fix="send text")
    return value


def check_depth(value: Any, param: str) -> None:
    """Checks level by level, as recursion would need the depth that is rejected."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        containers: list[Any] = [part for part in level if isinstance(part, dict | list)]
        if not containers:
            return
        nested = (part.values() if isinstance(part, dict) else part for part in containers)
        level = list(chain.from_iterable(nested))
    raise nesting_error(param)


def nesting_error(param: str) -> BadRequest:
    text = f"{param} is nested more than {MAX_DEPTH} levels deep"
    return BadRequest(text, fix="send less nesting")


def show_value(value: Any) -> str:
    """The value, shortened for an error message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")

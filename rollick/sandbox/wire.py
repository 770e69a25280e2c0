"""Serialization between boxes: plain data only, so decoding cannot run code.

None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset and range keep their
type, and these type objects can be encoded too. A subclass (Counter, namedtuple) is decoded as
its plain type, an iterator as an iterator over its values. Other types raise WireError. The
decoder builds only these types, so no `__eq__`, `__hash__` or `__reduce__` of the sender runs on
the receiving side.

    value -> tag, then a length or count and the content -> value

This module runs in the parent and inside boxes, so it imports only what the interpreter has
already loaded (see inside/__init__.py).
"""

from __future__ import annotations

import os
from _collections_abc import Iterator
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_DEPTH = 200
MAX_ITEMS = 200_000
"""Maximum length of an iterator, so that an endless one cannot exhaust the memory."""
COUNT_BYTES = 4

CONSTANTS: dict[bytes, Any] = {b"N": None, b"T": True, b"F": False}
SEQUENCES: dict[type[Any], bytes] = {list: b"l", tuple: b"t", set: b"S", frozenset: b"z"}
BUILDERS: dict[bytes, Callable[[list[Any]], Any]] = {
    **{tag: kind for kind, tag in SEQUENCES.items()},
    b"g": iter,
}
TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range)
}

SIZED: dict[bytes, Callable[[bytes], Any]] = {
    b"i": lambda content: int.from_bytes(content, "little", signed=True),
    b"f": lambda content: float.fromhex(content.decode("ascii")),
    b"s": lambda content: content.decode("utf-8", "surrogatepass"),
    b"y": lambda content: TYPES[content.decode()],
    b"b": bytes,
}
"""How the content of each tag with a length is decoded."""


class WireError(ValueError):
    """A value that is not plain data, or bytes that are not an encoding."""


def encode(value: Any) -> bytes:
    """Raises WireError if the value, or a value inside it, is not plain data."""
    chunks: list[bytes] = []
    _encode(value, chunks, 0)
    return b"".join(chunks)


def decode(content: bytes) -> Any:
    """Raises WireError unless the bytes are exactly one encoded value."""
    try:
        value, end = _decode(content, 0, 0)
    except (LookupError, TypeError, OverflowError, ValueError) as error:
        raise WireError(f"the bytes are not an encoded value: {error}") from None
    if end != len(content):
        raise WireError(f"{len(content) - end} bytes follow the value")
    return value


def write_frame(descriptor: int, body: bytes) -> None:
    view = memoryview(len(body).to_bytes(COUNT_BYTES, "little") + body)
    while view:
        view = view[os.write(descriptor, view) :]


def read_frame(descriptor: int, max_bytes: int) -> bytes | None:
    """The body of the next frame; None at end of file. Raises WireError if it is too large."""
    header = _read_exactly(descriptor, COUNT_BYTES)
    if header is None:
        return None
    size = int.from_bytes(header, "little")
    if size > max_bytes:
        raise WireError(f"a frame has {size} bytes; {max_bytes} are allowed")
    return _read_exactly(descriptor, size)


def _read_exactly(descriptor: int, count: int) -> bytes | None:
    content = bytearray()
    while len(content) < count:
        chunk = os.read(descriptor, min(count - len(content), 1 << 20))
        if not chunk:
            return None
        content += chunk
    return bytes(content)


def _encode(value: Any, chunks: list[bytes], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise WireError(f"a value is nested more than {MAX_DEPTH} deep")
    if value is None or value is True or value is False:
        chunks.append({None: b"N", True: b"T", False: b"F"}[value])
    elif isinstance(value, str):
        _encode_sized(b"s", str.encode(value, "utf-8", "surrogatepass"), chunks)
    elif isinstance(value, int):
        size = int.bit_length(value) // 8 + 1
        _encode_sized(b"i", int.to_bytes(value, size, "little", signed=True), chunks)
    elif isinstance(value, float):
        _encode_sized(b"f", float.hex(value).encode(), chunks)
    elif isinstance(value, complex):
        chunks.append(b"c")
        for number in (value.real, value.imag):
            _encode(number, chunks, depth + 1)
    elif isinstance(value, bytes | bytearray):
        _encode_sized(b"b", bytes(value), chunks)
    elif isinstance(value, range):
        chunks.append(b"r")
        for number in (value.start, value.stop, value.step):
            _encode(number, chunks, depth + 1)
    elif isinstance(value, type) and TYPES.get(value.__name__) is value:
        _encode_sized(b"y", value.__name__.encode(), chunks)
    elif isinstance(value, dict):
        pairs: list[tuple[Any, Any]] = list(dict.items(value))
        chunks += (b"d", _count(pairs))
        for key, item in pairs:
            _encode(key, chunks, depth + 1)
            _encode(item, chunks, depth + 1)
    else:
        _encode_many(value, chunks, depth)


def _encode_many(value: Any, chunks: list[bytes], depth: int) -> None:
    kind = next((kind for kind in SEQUENCES if isinstance(value, kind)), None)
    if kind is not None:
        tag, items = SEQUENCES[kind], list(kind.__iter__(value))
    else:
        if not isinstance(value, Iterator):
            plain = "plain data (numbers, text, lists, tuples, dicts, sets)"
            raise WireError(f"a {type(value).__name__} is not {plain}")
        tag, items = b"g", list(islice(value, MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS:
            raise WireError(f"an iterator gives more than {MAX_ITEMS} values")
    chunks += (tag, _count(items))
    for item in items:
        _encode(item, chunks, depth + 1)


def _encode_sized(tag: bytes, content: bytes, chunks: list[bytes]) -> None:
    chunks += (tag, _count(content), content)


def _count(items: bytes | list[Any]) -> bytes:
    try:
        return len(items).to_bytes(COUNT_BYTES, "little")
    except OverflowError:
        raise WireError(f"a value has {len(items)} parts or bytes: too many") from None


def _decode(content: bytes, offset: int, depth: int) -> tuple[Any, int]:
    """(the value at `offset`, the offset after it)."""
    if depth > MAX_DEPTH:
        raise WireError(f"a value is nested more than {MAX_DEPTH} deep")
    tag = content[offset : offset + 1]
    offset += 1
    if tag in CONSTANTS:
        return CONSTANTS[tag], offset
    if tag in (b"c", b"r"):
        kind, part, count = (complex, float, 2) if tag == b"c" else (range, int, 3)
        numbers, offset = _decode_items(content, offset, count, depth)
        if not all(type(number) is part for number in numbers):
            raise WireError(f"a {kind.__name__} with a part that is not {part.__name__}")
        return kind(*numbers), offset
    size = int.from_bytes(content[offset : offset + COUNT_BYTES], "little")
    offset += COUNT_BYTES
    end = offset + size if tag in SIZED else offset
    if end > len(content):
        raise WireError("the bytes end too early")
    if tag in SIZED:
        return SIZED[tag](content[offset:end]), end
    if tag == b"d":
        items, offset = _decode_items(content, offset, 2 * size, depth)
        return dict(zip(items[::2], items[1::2], strict=True)), offset
    if tag not in BUILDERS:
        raise WireError(f"unknown tag {tag!r}")
    items, offset = _decode_items(content, offset, size, depth)
    return BUILDERS[tag](items), offset


def _decode_items(content: bytes, offset: int, count: int, depth: int) -> tuple[list[Any], int]:
    if count > len(content) - offset:
        raise WireError("the bytes end too early")
    items: list[Any] = []
    for _ in range(count):
        item, offset = _decode(content, offset, depth + 1)
        items.append(item)
    return items, offset

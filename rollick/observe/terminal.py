"""Prints untrusted text on a terminal: model output cannot move the cursor, set the title or hide
what follows. Control characters are shown as symbols (␛ for escape)."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment

KEPT = "\n\t"
_C0 = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in KEPT}
_INVISIBLE = (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""C1 controls, and marks that change the direction of the text after them."""
_SYMBOLS = {**_C0, 0x7F: "\u2421", **dict.fromkeys(_INVISIBLE, "\ufffd")}


def escape_controls(text: str) -> str:
    return text.translate(_SYMBOLS)


class SafeConsole(Console):
    """Writes its own control sequences (colours, the live view) and no others."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        safe = (
            segment if segment.control else Segment(escape_controls(segment.text), segment.style)
            for segment in buffer
        )
        return super()._render_buffer(safe)


class SafeFormatter(logging.Formatter):
    """Log messages may quote model output, such as the error of a reward that could not read it."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))

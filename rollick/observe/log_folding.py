"""Folds repeated warnings and errors of a run: the first ones are shown, the others counted.

record -> kind (its line of code, its text without numbers) -> shown, or counted
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

LOG = logging.getLogger("rollick")

MAX_SHOWN = 3
"""Messages of one kind that are shown; then the 10th, the 100th, and so on."""
KINDS_PER_LINE = 10
"""Kinds of one line of code that are shown: its text may contain a different name each time."""
NUMBER = re.compile(r"\d[\d.,:]*(e[+-]?\d+)?")

CodeLine = tuple[str, int]
MessageKind = tuple[CodeLine, str]


class RepeatFilter(logging.Filter):
    """Drops repeated records of level WARNING and above. `hidden` counts the dropped ones."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Counter[CodeLine] = Counter()
        self.latest: dict[CodeLine, str] = {}
        self._seen: Counter[MessageKind] = Counter()
        self._kinds: Counter[CodeLine] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        line, text = (record.pathname, record.lineno), record.getMessage()
        kind = (line, NUMBER.sub("#", text))
        self._seen[kind] += 1
        self._kinds[line] += self._seen[kind] == 1
        if self._kinds[line] <= KINDS_PER_LINE and self._show(record, text, self._seen[kind]):
            return True
        self.hidden[line] += 1
        self.latest[line] = text.partition("\n")[0]
        return False

    def _show(self, record: logging.LogRecord, text: str, count: int) -> bool:
        """Whether the `count`-th message of a kind is shown. May append a note about the count."""
        if count < MAX_SHOWN:
            return True
        if count == MAX_SHOWN:
            record.msg, record.args = f"{text} (further messages like this are counted)", ()
            return True
        if is_power_of_ten := count == 10 ** (len(str(count)) - 1):
            record.msg, record.args = f"{text} ({count} messages like this so far)", ()
        return is_power_of_ten


@contextmanager
def fold_repeats() -> Generator[None]:
    """Fold the repeated warnings of the block, and log at its end how many were not shown."""
    repeats = RepeatFilter()
    LOG.addFilter(repeats)
    try:
        yield
    finally:
        LOG.removeFilter(repeats)
        for line, count in repeats.hidden.items():
            LOG.warning("%d messages were not shown, the last: %s", count, repeats.latest[line])

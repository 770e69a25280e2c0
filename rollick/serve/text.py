"""Token ids to text while they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are not a whole character (yet)."""
MAX_BROKEN = 64
"""That many in a row are not the beginning of anything. More than one can be: some tokenizers
write a run of byte tokens as broken, all of it, until its last character is whole."""


class TextStream:
    """The text of one answer. All that `push` and `finish` give, put together, is the answer.

    A token is decoded with the ones before it, because what it writes can depend on them (a
    leading space, the rest of a character). Text that may be the beginning of a stop string is
    held back until that is known.
    """

    def __init__(self, decode: Decode, *, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._context = 0
        """The first token that the next ones are decoded with."""
        self._read = 0
        """Tokens whose text is shown, whole."""
        self._shown = 0
        """Letters of the tokens from `_context` on that were released."""
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is sure after these tokens too; none once a stop string was found."""
        if not token_ids:
            return ""
        self._ids.extend(token_ids)
        now = self._decode(self._ids[self._context :])
        sure = now.rstrip(BROKEN)
        if len(now) - max(len(sure), self._shown) >= MAX_BROKEN:
            sure = now
        new = sure[self._shown :]
        if sure == now:
            self._context, self._read = self._read, len(self._ids)
            self._shown = len(self._decode(self._ids[self._context :]))
        else:
            self._shown = max(self._shown, len(sure))
        return self._release(new)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        now = self._decode(self._ids[self._context :])
        text = self._release(now[self._shown :])
        self._shown = len(now)
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Letters at the end of the text that the stop string begins with."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)

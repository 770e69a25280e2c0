"""Answers in the shapes of OpenAI's endpoints. Pure: a piece or an answer in, JSON out.

The extension: a request with `return_token_ids` gets `token_ids`, `token_logprobs` and
`token_versions` (the policy version that drew each token) in every choice, and `prompt_token_ids`
(beside the choices of a chat, in each choice of a completion).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollick.errors import DataError, EngineError, EngineLost, RollickError
from rollick.serve.asked import Ask, Refused
from rollick.serve.gateway import Answer, Piece
from rollick.types import IntArray

Json = dict[str, Any]
DecodeOne = Callable[[Sequence[int]], str]


def new_id() -> str:
    return secrets.token_hex(12)


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """How the answer to one request looks."""

    ask: Ask
    model: str
    decode: DecodeOne
    id: str = field(default_factory=new_id)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer) -> Json:
        """The answer of a request that does not stream."""
        if self.ask.chat:
            body = self._head("chat.completion")
            if self.ask.token_ids:
                body["prompt_token_ids"] = answer.prompts[0].tolist()
        else:
            body = self._head("text_completion")
        body["choices"] = [self._choice(piece, answer.prompts) for piece in answer.choices]
        body["usage"] = usage(answer)
        return body

    def chunk(self, piece: Piece, prompts: Sequence[IntArray], *, first: bool) -> Json | None:
        """One event of a stream; None where a piece has nothing to tell yet."""
        if not (piece.text or piece.stop or first or self.ask.logprobs or self.ask.token_ids):
            return None
        if not self.ask.chat:
            return {**self._head("text_completion"), "choices": [self._choice(piece, prompts)]}
        delta = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
        choice = {"index": piece.index, "delta": delta, **self._facts(piece)}
        body = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if first and self.ask.token_ids:
            body["prompt_token_ids"] = prompts[0].tolist()
        return body

    def last(self, answer: Answer) -> Json | None:
        """The event with the usage, where the client asked for it."""
        if not self.ask.stream_usage:
            return None
        kind = "chat.completion.chunk" if self.ask.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage(answer)}

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl" if self.ask.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, piece: Piece, prompts: Sequence[IntArray]) -> Json:
        if self.ask.chat:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            return {"index": piece.index, "message": message, **self._facts(piece)}
        choice = {"index": piece.index, "text": piece.text, **self._facts(piece)}
        if self.ask.token_ids:
            choice["prompt_token_ids"] = prompts[piece.prompt].tolist()
        return choice

    def _facts(self, piece: Piece) -> Json:
        """What a choice has besides its text."""
        facts: Json = {
            "logprobs": self._logprobs(piece) if self.ask.logprobs else None,
            "finish_reason": None if piece.stop is None else piece.stop.value,
        }
        if self.ask.token_ids:
            facts["token_ids"] = piece.token_ids.tolist()
            facts["token_logprobs"] = piece.logprobs.tolist()
            facts["token_versions"] = piece.versions.tolist()
        return facts

    def _logprobs(self, piece: Piece) -> Json:
        texts = [self.decode([token]) for token in piece.token_ids.tolist()]
        values: list[float] = piece.logprobs.tolist()
        if not self.ask.chat:
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None}
        rows = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, values, strict=True)
        ]
        return {"content": rows, "refusal": None}


def usage(answer: Answer) -> Json:
    """Every drawn token counts, the one that ended the answer too; a prompt counts once."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def models(name: str, created: int) -> Json:
    return {"object": "list", "data": [model(name, created)]}


def model(name: str, created: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "rollick"}


def failure(error: RollickError) -> tuple[int, Json]:
    """The status and the body of an error; what is ours and unexpected says no more than that."""
    if isinstance(error, Refused):
        return error.status, _error(str(error), error.status, param=error.param, code=error.code)
    if isinstance(error, DataError):
        return 400, _error(str(error), 400, param="messages")
    status = 503 if isinstance(error, EngineLost) else 500
    shown = str(error) if isinstance(error, EngineError) else "the server failed"
    return status, _error(shown, status)


def plain_failure(status: int, message: str) -> Json:
    return _error(message, status)


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def _error(message: str, status: int, *, param: str | None = None, code: str | None = None) -> Json:
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

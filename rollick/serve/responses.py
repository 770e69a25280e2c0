"""Response bodies in OpenAI's format.

Extension: a request with `return_token_ids` gets `token_ids`, `token_logprobs` and `token_versions`
(the policy version that sampled each token) in every choice, and `prompt_token_ids` (next to the
choices of a chat, in each choice of a completion).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollick.errors import DataError, EngineError, EngineLost
from rollick.infer.engine import Decode
from rollick.serve.choices import ChoiceChunk
from rollick.serve.request_fields import BadRequest
from rollick.serve.requests import ApiRequest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class ResponseBuilder:
    request: ApiRequest
    model: str
    decode: Decode
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def build_response(self, choices: Sequence[ChoiceChunk]) -> Json:
        choices_json = [self._build_choice(choice) for choice in choices]
        body = self._build_body("chat.completion", choices_json)
        if self.request.is_chat and self.request.return_token_ids:
            body["prompt_token_ids"] = choices[0].prompt_ids.tolist()
        return body | {"usage": self._build_usage(choices)}

    def build_chunk(self, chunk: ChoiceChunk, *, is_first: bool) -> Json | None:
        """One event of a stream; None if the chunk has no content."""
        needs_tokens = self.request.return_logprobs or self.request.return_token_ids
        if not (chunk.content or chunk.calls or chunk.stop or is_first or needs_tokens):
            return None
        choice = self._build_choice(chunk)
        if self.request.is_chat:
            del choice["message"]
            choice["delta"] = _build_delta(chunk, is_first=is_first)
        body = self._build_body("chat.completion.chunk", [choice])
        if is_first and self.request.is_chat and self.request.return_token_ids:
            body["prompt_token_ids"] = chunk.prompt_ids.tolist()
        return body

    def build_usage_chunk(self, choices: Sequence[ChoiceChunk]) -> Json | None:
        """The last event, with the usage, if the client requested it."""
        if not self.request.stream_usage:
            return None
        body = self._build_body("chat.completion.chunk", [])
        return body | {"usage": self._build_usage(choices)}

    def _build_body(self, kind: str, choices: list[Json]) -> Json:
        """`kind`: the `object` of a chat's body; a completion has only one."""
        prefix = "chatcmpl" if self.request.is_chat else "cmpl"
        kind = kind if self.request.is_chat else "text_completion"
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created}
        return {**head, "model": self.model, "choices": choices}

    def _build_choice(self, chunk: ChoiceChunk) -> Json:
        choice: Json = {"index": chunk.index}
        if self.request.is_chat:
            choice["message"] = _build_message(chunk)
        else:
            choice["text"] = chunk.text
        choice["logprobs"] = self._build_logprobs(chunk) if self.request.return_logprobs else None
        choice["finish_reason"] = chunk.finish_reason
        if self.request.return_token_ids:
            choice["token_ids"] = chunk.token_ids.tolist()
            choice["token_logprobs"] = chunk.logprobs.tolist()
            choice["token_versions"] = chunk.versions.tolist()
            if not self.request.is_chat:
                choice["prompt_token_ids"] = chunk.prompt_ids.tolist()
        return choice

    def _build_logprobs(self, chunk: ChoiceChunk) -> Json:
        texts = [self.decode([token]) for token in chunk.token_ids.tolist()]
        values: list[float] = chunk.logprobs.tolist()
        if not self.request.is_chat:
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None}
        rows = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, values, strict=True)
        ]
        return {"content": rows, "refusal": None}

    def _build_usage(self, choices: Sequence[ChoiceChunk]) -> Json:
        """Every sampled token counts, including the stop token; each prompt counts once."""
        prompt = sum(len(first.prompt_ids) for first in choices[:: self.request.choices_per_prompt])
        sampled = sum(len(choice.token_ids) for choice in choices)
        total = prompt + sampled
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": total}


def _build_message(choice: ChoiceChunk) -> Json:
    message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [call.to_json() for call in choice.calls]
    return message


def _build_delta(chunk: ChoiceChunk, *, is_first: bool) -> Json:
    delta: Json = {"role": "assistant"} if is_first else {}
    if chunk.content or not chunk.calls:
        delta["content"] = chunk.content
    if chunk.calls:
        delta["tool_calls"] = [{"index": call.index, **call.to_json()} for call in chunk.calls]
    return delta


def describe_model(name: str, created: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "rollick"}


def error_response(error: Exception) -> tuple[int, Json]:
    """The status and body of an error; unexpected errors reveal no details."""
    if isinstance(error, BadRequest):
        return error.status, error_body(str(error), error.status, error.param, error.code)
    if isinstance(error, DataError):
        return 400, error_body(str(error), 400, "messages")
    status = 503 if isinstance(error, EngineLost) else 500
    message = str(error) if isinstance(error, EngineError) else "the server failed"
    return status, error_body(message, status)


ERROR_TYPES = {401: "authentication", 403: "permission", 404: "not_found", 429: "rate_limit"}


def error_body(message: str, status: int, param: str = "", code: str = "") -> Json:
    kind = ERROR_TYPES.get(status, "server" if status >= 500 else "invalid_request")
    fields = {"message": message, "type": f"{kind}_error"}
    return {"error": {**fields, "param": param or None, "code": code or None}}

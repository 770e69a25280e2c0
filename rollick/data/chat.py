"""ChatCodec: encodes conversations with a chat template, and decodes token ids.

Existing ids are never tokenised again: the tokens of a sample are those the engine sampled, and a
conversation grows by appending ids (`append_turns`).

Only the template writes control tokens. A control token spelled out in a message's content
(`a<eos>b`) is tokenised as text:

    contents -- cut inside each control token --> template --> pieces -- tokenizer --> ids
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from rollick.errors import DataError, ModelError
from rollick.interrupt import interrupt_after
from rollick.types import BoolArray, Fingerprint, IntArray, Turn, frozen_array

Tokenizer = Any
"""A transformers tokenizer. Untyped, because this package does not import transformers."""

Messages = Sequence[Mapping[str, Any]]
"""Messages for a chat template: role, content, and other keys that the template reads."""

MARK = "rollick0mark"
"""Placeholder text, to find where (or whether) a template writes it."""
CUT = f"rollick0cut{secrets.token_hex(8)}"
"""Marks where a text is cut before it is tokenised. Random, so that no content has it."""
RENDER_LIMIT_S = 10.0
"""Time for a chat template to write one conversation; templates can contain endless loops."""


class ChatCodec:
    """Encodes and decodes with one tokenizer and one template.

    `chat` uses the tokenizer's template. `plain` concatenates the contents of all turns after the
    begin-of-sequence token, if the tokenizer has one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Literal["chat", "plain"] = "chat",
        *,
        end_of_turn_ids: Sequence[int] = (),
    ) -> None:
        """`end_of_turn_ids`: eos_token_id of the model's generation config, if any."""
        if template == "chat" and not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template",
                fix="set model.template=plain, or use a tokenizer with a template",
            )
        self._tokenizer = tokenizer
        self._template = template
        self._end_of_turn_ids = tuple(int(token) for token in end_of_turn_ids)

    def encode_prompt(self, turns: Sequence[Turn]) -> IntArray:
        """[T] ids of the conversation, up to the start of the assistant's answer."""
        return self.encode_messages(_to_messages(turns))

    def encode_messages(self, messages: Messages, *, tools: Messages = ()) -> IntArray:
        """Like encode_prompt, for messages with further keys, and with tools."""
        if self._template == "plain":
            return self.encode_text(self._cut_tokens(_join_contents(messages)))
        messages, tools = self._cut_tokens(list(messages)), self._cut_tokens(list(tools))
        return self._tokenize(self._render(messages, add_generation_prompt=True, tools=tools))

    def encode_text(self, text: str) -> IntArray:
        """[T] ids of a text to continue, after the begin-of-sequence token if there is one. Control
        tokens keep their meaning: the text may be a conversation that a client has rendered
        itself."""
        bos = self._tokenizer.bos_token_id
        return _concatenate([] if bos is None else [bos], self._tokenize(text))

    def append_turns(self, token_ids: npt.ArrayLike, turns: Sequence[Turn]) -> IntArray:
        """[T] `token_ids`, the end of the assistant's turn, `turns`, and the start of an answer.

        Appends the text that the template writes after a placeholder answer. Ids that already end
        with the template's end-of-turn token do not get a second one.
        """
        return self.append_messages(token_ids, _to_messages(turns))

    def append_messages(
        self, token_ids: npt.ArrayLike, messages: Messages, *, tools: Messages = ()
    ) -> IntArray:
        """Like append_turns, for messages with further keys, and with tools."""
        if self._template == "plain":
            return self.append_text(token_ids, self._cut_tokens(_join_contents(messages)))
        messages, tools = self._cut_tokens(list(messages)), self._cut_tokens(list(tools))
        added = self._tokenize(
            self._text_after_answer(messages, add_generation_prompt=True, tools=tools)
        )
        # Only a special token closes a turn: an ordinary one may be the last of an answer.
        last = np.asarray(token_ids)[-1:].tolist()
        is_closed = bool(last) and last == added[:1].tolist() and last[0] in self._special_ids
        return _concatenate(token_ids, added[1:] if is_closed else added)

    def append_text(self, token_ids: npt.ArrayLike, text: str) -> IntArray:
        return _concatenate(token_ids, self._tokenize(text))

    def encode_example(
        self, turns: Sequence[Turn], completion: str, *, trusted: bool = True
    ) -> tuple[IntArray, BoolArray]:
        """[T] ids of prompt, completion and end of turn; [T] mask, True on the last two. Control
        tokens in a completion keep their meaning (`[TOOL_CALLS]` in an example to imitate) if it is
        `trusted`. Text that a policy wrote for another model to read is not."""
        text = completion if trusted else self._cut_tokens(completion)
        prompt, answer = self.encode_prompt(turns), self.encode_answer(text)
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        return _concatenate(prompt, answer), frozen_array(mask, np.bool_)

    def encode_answer(self, text: str) -> IntArray:
        """[T] ids of an assistant's answer, with the end of its turn."""
        return _concatenate(self._tokenize(text), [] if self.end_id is None else [self.end_id])

    def decode(self, token_ids: npt.ArrayLike) -> str:
        """The text without special tokens. Spaces are not cleaned up."""
        ids = np.asarray(token_ids, dtype=np.int64).tolist()
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return self._tokenizer.decode(ids, **options)

    @cached_property
    def end_id(self) -> int | None:
        """The id that ends an answer: the template's closing special token, else eos."""
        if self._template == "chat":
            closing = self._tokenize(self._text_after_answer((), add_generation_prompt=False))
            if len(closing) and int(closing[0]) in self._special_ids:
                return int(closing[0])
        return self._tokenizer.eos_token_id

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end generation: eos, the template's end of turn, those in the model's config."""
        ends = (self._tokenizer.eos_token_id, self.end_id, *self._end_of_turn_ids)
        return frozenset(int(token) for token in ends if token is not None)

    @cached_property
    def vocabulary_size(self) -> int:
        return len(self._tokenizer)

    @cached_property
    def max_token_length(self) -> int:
        """Length of the longest vocabulary entry: an upper bound on the characters of a token."""
        return max(len(token) for token in self._tokenizer.get_vocab())

    @cached_property
    def reads_tools(self) -> bool:
        return bool(self.tools_text)

    @cached_property
    def tools_text(self) -> str:
        """What the template writes for a request with a tool; empty if it does not read tools."""
        if self._template == "plain":
            return ""
        function = {"name": "f", "description": MARK, "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        user = [{"role": "user", "content": "x"}]
        try:
            with_tool = self._render(user, add_generation_prompt=True, tools=tools)
        except DataError:
            return ""
        return with_tool if with_tool != self._render(user, add_generation_prompt=True) else ""

    @cached_property
    def answer_prefix(self) -> str:
        """What the template writes after a user's message, up to the start of the answer."""
        if self._template == "plain":
            return ""
        user = _to_messages([Turn("user", MARK)])
        return self._render(user, add_generation_prompt=True).rpartition(MARK)[2]

    def render_answer(self, message: Mapping[str, Any]) -> str | None:
        """The text of an assistant's message, as the template writes it and `decode` returns it.
        None if the template rejects it."""
        conversation = [*_to_messages([Turn("user", MARK)]), message]
        with suppress(DataError):
            text = self._render(conversation, add_generation_prompt=False).partition(MARK)[2]
            return self.decode(self._tokenize(text.removeprefix(self.answer_prefix)))
        return None

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Hash of the vocabulary: equal for tokenizers with equal token ids."""
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        digest = hashlib.blake2b(json.dumps(vocabulary).encode(), digest_size=16)
        return Fingerprint(digest.hexdigest())

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_vocab().values()
        return frozenset((*self._tokenizer.all_special_ids, *added))

    @cached_property
    def _control_tokens(self) -> re.Pattern[str] | None:
        """Matches the first character of a token that only the template may write: special tokens,
        ends of a turn, and what the template writes around a message (some tokenizers do not
        declare those as special)."""
        tokenizer = self._tokenizer
        ids = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        with suppress(DataError):  # a template that rejects this conversation
            if self._template == "chat":
                user = self._render(_to_messages([Turn("user", MARK)]), add_generation_prompt=False)
                ids |= set(self._tokenize(user).tolist())
        with suppress(DataError, ModelError):  # one that leaves out answers
            ids |= self.stop_ids
        texts = {text for text, id in tokenizer.get_added_vocab().items() if id in ids}
        texts |= set(tokenizer.all_special_tokens)
        longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        choices = "|".join(map(re.escape, longest_first))
        return re.compile(rf"(?={choices})(.)", re.DOTALL) if longest_first else None

    def _cut_tokens(self, value: Any) -> Any:
        """A copy of the value in which control tokens inside strings are cut in two."""
        if isinstance(value, str):
            pattern = self._control_tokens
            return value if pattern is None else pattern.sub(rf"\1{CUT}", value)
        if isinstance(value, Mapping):
            pairs = cast("Mapping[str, Any]", value).items()
            return {self._cut_tokens(key): self._cut_tokens(part) for key, part in pairs}
        if isinstance(value, list | tuple):
            return [self._cut_tokens(part) for part in cast("Sequence[Any]", value)]
        return value

    def _text_after_answer(
        self, messages: Messages, *, add_generation_prompt: bool, tools: Messages = ()
    ) -> str:
        conversation = (*_to_messages([Turn("user", "x"), Turn("assistant", MARK)]), *messages)
        text = self._render(conversation, add_generation_prompt=add_generation_prompt, tools=tools)
        _, mark, after = text.partition(MARK)
        if not mark:
            raise ModelError(
                "the chat template leaves out an assistant's answer",
                fix="use another template, or model.template=plain",
            )
        return after

    def _render(
        self, messages: Messages, *, add_generation_prompt: bool, tools: Messages = ()
    ) -> str:
        from jinja2 import TemplateError

        # No empty list: some templates only check whether tools are defined.
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            with interrupt_after(RENDER_LIMIT_S):
                return self._tokenizer.apply_chat_template(
                    list(messages),
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **options,
                )
        except (TimeoutError, RecursionError, MemoryError, OverflowError) as error:
            problem = str(error) or type(error).__name__
            raise ModelError(
                f"the chat template does not end within its limits: {problem}",
                fix="use another chat template, or set model.template=plain",
            ) from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # All except TemplateError: the template does not expect this form of message.
            roles = ", ".join(message["role"] for message in messages).replace(CUT, "")
            raise DataError(
                f"the chat template rejects a conversation with the roles {roles}: {error}",
                fix="change the roles in the data, or set model.template=plain",
            ) from error

    def _tokenize(self, text: str) -> IntArray:
        """Ids of this text only: templates write the begin-of-sequence token themselves."""
        pieces = text.split(CUT)
        ids = [self._tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
        return _concatenate(*ids)


def _to_messages(turns: Sequence[Turn]) -> Messages:
    return [{"role": "user" if t.role == "text" else t.role, "content": t.content} for t in turns]


def _join_contents(messages: Messages) -> str:
    return "".join(message["content"] for message in messages)


def _concatenate(*parts: npt.ArrayLike) -> IntArray:
    arrays = [np.asarray(part, dtype=np.int32) for part in parts]
    return frozen_array(np.concatenate(arrays), np.int32)

"""ChatCodec: the one home of chat templates. Turns to token ids and back.

Owns how a conversation becomes ids, which ids end a turn, and the fingerprint of a tokenizer.
The tokenizer (of transformers) is passed in; nothing is loaded here.

Ids that exist are never tokenised again: a sample's tokens are what the engine drew, and a
conversation grows by ids put behind them (`append_turns`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rollick.errors import DataError, ModelError
from rollick.types import BoolArray, Fingerprint, IntArray, Turn, frozen_array

Tokenizer = Any
"""A tokenizer of transformers; untyped, because this package does not import transformers."""

Message = Mapping[str, Any]
"""A turn as a chat template reads it: role and content, and what else the template knows."""

MARK = "rollick0mark"
"""Stands for an assistant's answer where the template's text after it is looked for."""


class ChatCodec:
    """Encodes and decodes with one tokenizer and one way to write turns.

    `chat` is the tokenizer's own template. `plain` writes the contents one after another with
    nothing between them, after the begin-of-sequence token where the tokenizer has one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Literal["chat", "plain"] = "chat",
        *,
        end_of_turn_ids: Sequence[int] = (),
    ) -> None:
        """`end_of_turn_ids` are the ends named by the model's generation config, if any."""
        if template == "chat" and not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template",
                fix="set model.template=plain, or take a tokenizer with a template",
            )
        self._tokenizer = tokenizer
        self._template = template
        self._end_of_turn_ids = tuple(int(token) for token in end_of_turn_ids)

    def encode_prompt(self, turns: Sequence[Turn]) -> IntArray:
        """[T] ids of the conversation, ready for the assistant to speak."""
        return self.encode_messages(_messages(turns))

    def encode_messages(
        self, messages: Sequence[Message], *, tools: Sequence[Message] = ()
    ) -> IntArray:
        """The same for messages with more than role and content, and for the tools on offer."""
        if self._template == "chat":
            return self._tokenized(self._render(messages, open_answer=True, tools=tools))
        return self.encode_text("".join(message["content"] for message in messages))

    def encode_text(self, text: str) -> IntArray:
        """[T] ids of a text to be gone on with, behind the begin-of-sequence token if any."""
        bos = self._tokenizer.bos_token_id
        return _joined([] if bos is None else [bos], self._tokenized(text))

    def append_turns(self, token_ids: npt.ArrayLike, turns: Sequence[Turn]) -> IntArray:
        """[T] the same ids, the assistant's turn closed, `turns` added, the next answer opened.

        What is added is the text that the template puts behind a stand-in answer. An answer that
        already ends with the template's end-of-turn token does not get a second one.
        """
        return self.append_messages(token_ids, _messages(turns))

    def append_messages(
        self,
        token_ids: npt.ArrayLike,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
    ) -> IntArray:
        """The same for messages with more than role and content, and for the tools on offer."""
        if self._template == "plain":
            text = "".join(message["content"] for message in messages)
            return self.append_text(token_ids, text)
        added = self._tokenized(self._text_after_answer(messages, open_answer=True, tools=tools))
        if self._is_closed(token_ids, added):
            added = added[1:]
        return _joined(token_ids, added)

    def append_text(self, token_ids: npt.ArrayLike, text: str) -> IntArray:
        """[T] the same ids and those of the text, with nothing between them."""
        return _joined(token_ids, self._tokenized(text))

    def encode_example(self, turns: Sequence[Turn], completion: str) -> tuple[IntArray, BoolArray]:
        """[T] ids of prompt, completion and end of turn; [T] True on the last two."""
        prompt, answer = self.encode_prompt(turns), self.encode_answer(completion)
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        return _joined(prompt, answer), frozen_array(mask, np.bool_)

    def encode_answer(self, text: str) -> IntArray:
        """[T] ids of an answer as the assistant should draw it, with the end of its turn."""
        return _joined(self._tokenized(text), [] if self.end_id is None else [self.end_id])

    def decode(self, token_ids: npt.ArrayLike) -> str:
        """The text, without special tokens and with its spaces as they were drawn."""
        ids = np.asarray(token_ids, dtype=np.int64).tolist()
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    @cached_property
    def end_id(self) -> int | None:
        """What ends an answer: the special token that the template closes it with, else eos."""
        if self._template == "chat":
            closing = self._tokenized(self._text_after_answer((), open_answer=False))
            if len(closing) and int(closing[0]) in self._special_ids:
                return int(closing[0])
        return self._tokenizer.eos_token_id

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end generation: eos, the template's end of turn, those of the model's config."""
        ends = (self._tokenizer.eos_token_id, self.end_id, *self._end_of_turn_ids)
        return frozenset(int(token) for token in ends if token is not None)

    @cached_property
    def vocabulary_size(self) -> int:
        """Ids run from 0 to below this."""
        return len(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest one, as the vocabulary writes it: at least one for each
        character that it stands for, whether it is written in characters or in bytes."""
        return max(len(token) for token in self._tokenizer.get_vocab())

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template writes anything about tools that are on offer."""
        if self._template == "plain":
            return False
        asked = [{"role": "user", "content": "x"}]
        tool = {"name": "f", "description": MARK, "parameters": {"type": "object"}}
        try:
            shown = self._render(
                asked, open_answer=True, tools=[{"type": "function", "function": tool}]
            )
        except DataError:
            return False
        return shown != self._render(asked, open_answer=True)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Hash of the vocabulary: equal for two tokenizers that number their tokens alike."""
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        digest = hashlib.blake2b(json.dumps(vocabulary).encode(), digest_size=16)
        return Fingerprint(digest.hexdigest())

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(
            (*self._tokenizer.all_special_ids, *self._tokenizer.get_added_vocab().values())
        )

    def _is_closed(self, token_ids: npt.ArrayLike, added: IntArray) -> bool:
        ids = np.asarray(token_ids)
        if not len(ids) or not len(added) or ids[-1] != added[0]:
            return False
        # An ordinary token may be the answer's last one by chance; only a special one closes.
        return int(added[0]) in self._special_ids

    def _text_after_answer(
        self, messages: Sequence[Message], *, open_answer: bool, tools: Sequence[Message] = ()
    ) -> str:
        stand_in = (*_messages([Turn("user", "x"), Turn("assistant", MARK)]), *messages)
        text = self._render(stand_in, open_answer=open_answer, tools=tools)
        _, found, after = text.partition(MARK)
        if not found:
            raise ModelError(
                "the chat template leaves out an assistant's answer",
                fix="use another template, or model.template=plain",
            )
        return after

    def _render(
        self, messages: Sequence[Message], *, open_answer: bool, tools: Sequence[Message] = ()
    ) -> str:
        from jinja2 import TemplateError

        # An empty list is no list: some templates ask only whether tools are defined.
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=open_answer, tokenize=False, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            # A template that gets a shape it does not expect fails like any other program.
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"the chat template refuses a conversation of the roles {roles}: {error}",
                fix="change the roles in the data, or set model.template=plain",
            ) from error

    def _tokenized(self, text: str) -> IntArray:
        """Ids of exactly this text: templates write the begin-of-sequence token themselves."""
        return frozen_array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _messages(turns: Sequence[Turn]) -> list[Message]:
    return [
        {"role": "user" if turn.role == "text" else turn.role, "content": turn.content}
        for turn in turns
    ]


def _joined(*parts: npt.ArrayLike) -> IntArray:
    arrays = [np.asarray(part, dtype=np.int32) for part in parts]
    return frozen_array(np.concatenate(arrays), np.int32)

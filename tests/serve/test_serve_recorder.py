"""SessionRecorder: the segments that an agent's requests become, token by token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollick.data.chat import ChatCodec
from rollick.errors import DataError
from rollick.serve.choices import ChoiceChunk
from rollick.serve.recorder import Segment, SessionRecorder
from rollick.serve.requests import ChatPrompt
from rollick.testing.tiny import tiny_tokenizer
from rollick.types import NOT_SAMPLED, Sampling, StopReason

TOKENIZER = tiny_tokenizer()
CODEC = ChatCodec(TOKENIZER, "chat")
EOS = 2
PLAIN = Sampling(temperature=1.0, max_tokens=8)


def make_chat(*texts: str) -> ChatPrompt:
    """A chat prompt in which user and assistant alternate."""
    roles = ("user", "assistant")
    return ChatPrompt(
        tuple({"role": roles[n % 2], "content": text} for n, text in enumerate(texts))
    )


def encode_text(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def make_choice(
    ids: Sequence[int], text: str, *, version: int = 0, stop: StopReason = StopReason.STOP
) -> ChoiceChunk:
    return ChoiceChunk(
        0,
        np.zeros(0, np.int32),
        text,
        np.array(ids, np.int32),
        np.full(len(ids), -0.5, np.float32),
        np.full(len(ids), version, np.int32),
        stop,
    )


def record_request(
    recorder: SessionRecorder,
    prompt: Any,
    reply: str,
    *,
    version: int = 0,
    sampling: Sampling = PLAIN,
    ids: Sequence[int] | None = None,
) -> list[int]:
    """Record one request with this reply; returns the ids that the engine received."""
    plan = recorder.plan(prompt, sampling)
    choice = make_choice([*encode_text(reply), EOS] if ids is None else ids, reply, version=version)
    recorder.add(plan, choice)
    return plan.token_ids.tolist()


def show_tokens(segment: Segment) -> str:
    """Trained tokens as letters, other tokens as dots, the end of a turn as `$`."""
    letters = [
        "$" if token == EOS else TOKENIZER.decode([token]) for token in segment.token_ids.tolist()
    ]
    return "".join(
        letter if mask else "." for letter, mask in zip(letters, segment.loss_mask, strict=True)
    )


def test_the_first_segment_is_the_templates_text_and_the_response():
    recorder = SessionRecorder(CODEC)
    prompt_ids = record_request(recorder, make_chat("hi"), "yo", version=3)
    (segment,) = recorder.segments
    assert prompt_ids == CODEC.encode_messages(make_chat("hi").messages).tolist()
    assert segment.token_ids.tolist() == [*prompt_ids, *encode_text("yo"), EOS]
    assert show_tokens(segment) == "....yo$"
    assert segment.versions.tolist() == [NOT_SAMPLED] * 4 + [3] * 3
    assert segment.logprobs.tolist() == [0.0] * 4 + [-0.5] * 3


def test_a_continued_conversation_extends_one_segment():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, make_chat("hi"), "yo")
    record_request(recorder, make_chat("hi", "yo", "b"), "c", version=1)
    (segment,) = recorder.segments
    assert show_tokens(segment) == "....yo$..c$"
    assert segment.versions.tolist()[4:] == [0, 0, 0, NOT_SAMPLED, NOT_SAMPLED, 1, 1]
    assert (segment.turns, segment.text) == (2, "yo\nc")


def test_a_response_keeps_its_sampled_ids_and_is_never_tokenised_again():
    recorder = SessionRecorder(CODEC)
    strange = [3, *encode_text("a"), EOS]  # the unknown token decodes to nothing that encodes to it
    record_request(recorder, make_chat("hi"), "a", ids=strange)
    prompt_ids = record_request(recorder, make_chat("hi", "a", "b"), "c")
    before = CODEC.encode_messages(make_chat("hi").messages).tolist()
    assert prompt_ids == [*before, *strange, *encode_text("b|")]


def test_a_truncated_response_is_closed_by_the_template_with_untrained_tokens():
    recorder = SessionRecorder(CODEC)
    plan = recorder.plan(make_chat("hi"), PLAIN)
    recorder.add(plan, make_choice(encode_text("yo"), "yo", stop=StopReason.LENGTH))
    assert recorder.segments[0].stop is StopReason.LENGTH
    record_request(recorder, make_chat("hi", "yo", "b"), "c")
    assert show_tokens(recorder.segments[0]) == "....yo...c$"
    assert recorder.segments[0].token_ids.tolist()[6] == EOS


def test_stripping_a_response_is_not_a_rewrite():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, make_chat("hi"), " yo ")
    record_request(recorder, make_chat("hi", "yo", "b"), "c")
    assert len(recorder.segments) == 1


def test_a_rewritten_response_starts_a_new_segment_from_text():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, make_chat("hi"), "yo")
    prompt_ids = record_request(recorder, make_chat("hi", "no", "b"), "c")
    assert prompt_ids == CODEC.encode_messages(make_chat("hi", "no", "b").messages).tolist()
    assert [show_tokens(segment) for segment in recorder.segments] == ["....yo$", ".........c$"]


def test_a_dropped_turn_starts_a_new_segment():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, make_chat("hi"), "yo")
    record_request(recorder, make_chat("hi", "yo", "b"), "c")
    record_request(recorder, make_chat("b", "c", "d"), "e")
    assert [segment.turns for segment in recorder.segments] == [2, 1]


def test_a_rewritten_user_message_keeps_the_ids_of_earlier_responses():
    recorder = SessionRecorder(CODEC)
    strange = [3, *encode_text("a"), EOS]
    record_request(recorder, make_chat("hi"), "a", ids=strange)
    record_request(recorder, make_chat("hi", "a", "b"), "c")
    prompt_ids = record_request(recorder, make_chat("hi", "a", "x"), "d")
    assert prompt_ids == [*recorder.segments[0].token_ids.tolist()[:7], *encode_text("x|")]
    first, second = recorder.segments
    assert show_tokens(first).endswith("a$..c$")
    assert show_tokens(second) == ".........d$"


def test_a_sampled_token_is_trained_on_in_one_segment_only():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, make_chat("hi"), "a")
    for question in ("b", "x", "y"):
        record_request(recorder, make_chat("hi", "a", question), "c")
    assert [int(segment.loss_mask.sum()) for segment in recorder.segments] == [4, 2, 2]
    counts = [int((segment.versions != NOT_SAMPLED).sum()) for segment in recorder.segments]
    assert counts == [4, 2, 2]


def test_repeating_a_request_starts_another_segment():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, make_chat("hi"), "a")
    record_request(recorder, make_chat("hi"), "b")
    assert [show_tokens(segment) for segment in recorder.segments] == ["....a$", "....b$"]
    record_request(recorder, make_chat("hi", "b", "c"), "d")
    assert [segment.turns for segment in recorder.segments] == [1, 2]


def test_a_branch_and_its_origin_can_both_be_continued():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, make_chat("hi"), "a")
    record_request(recorder, make_chat("hi", "a", "b"), "c")
    record_request(recorder, make_chat("hi", "a", "x"), "d")
    record_request(recorder, make_chat("hi", "a", "x", "d", "y"), "e")
    record_request(recorder, make_chat("hi", "a", "b", "c", "z"), "f")
    assert [show_tokens(segment) for segment in recorder.segments] == [
        "....a$..c$..f$",
        "........d$..e$",
    ]


def test_another_temperature_starts_a_new_segment_with_the_same_ids():
    recorder = SessionRecorder(CODEC)
    strange = [3, *encode_text("a"), EOS]
    record_request(recorder, make_chat("hi"), "a", ids=strange)
    prompt_ids = record_request(
        recorder,
        make_chat("hi", "a", "b"),
        "c",
        sampling=Sampling(temperature=0.5, max_tokens=8),
    )
    assert prompt_ids[:7] == recorder.segments[0].token_ids.tolist()
    assert [segment.sampling.temperature for segment in recorder.segments] == [1.0, 0.5]


def test_other_tools_start_a_new_segment():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, make_chat("hi"), "a")
    more = ChatPrompt(make_chat("hi", "a", "b").messages, ({"type": "function"},))
    record_request(recorder, more, "c")
    assert len(recorder.segments) == 2


def test_a_plan_without_a_response_has_no_effect():
    recorder = SessionRecorder(CODEC)
    recorder.plan(make_chat("hi"), PLAIN)
    assert recorder.segments == ()
    assert recorder.tokens == 0


def test_a_continued_text_extends_its_segment_by_the_new_characters():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, "1+1=", "2", ids=encode_text("2;"))
    prompt_ids = record_request(recorder, "1+1=2; 3+3=", "6", ids=encode_text("6"))
    assert prompt_ids == [1, *encode_text("1+1=2; 3+3=")]
    assert [show_tokens(segment) for segment in recorder.segments] == [".....2;.....6"]


def test_a_text_without_the_sampled_stop_string_is_another_text():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, "1+1=", "2", ids=encode_text("2;"))
    record_request(recorder, "1+1=2 3+3=", "6", ids=encode_text("6"))
    assert len(recorder.segments) == 2


def test_continued_token_ids_extend_their_segment():
    recorder = SessionRecorder(CODEC)
    record_request(recorder, (1, 5), "", ids=[6, 7])
    record_request(recorder, (1, 5, 6, 7, 8), "", ids=[9])
    record_request(recorder, (1, 5, 6, 8), "", ids=[9])
    assert [segment.token_ids.tolist() for segment in recorder.segments] == [
        [1, 5, 6, 7, 8, 9],
        [1, 5, 6, 8, 9],
    ]


def test_a_template_that_cannot_append_encodes_the_full_conversation_again():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' and messages[0]['content'] == 'x' %}"
        "{{ raise_exception('no') }}{% endif %}{{ m['content'] }}|{% endfor %}"
    )
    recorder = SessionRecorder(ChatCodec(tokenizer, "chat"))
    record_request(recorder, make_chat("hi"), "a")
    tool = {"role": "tool", "content": "b"}
    record_request(recorder, ChatPrompt((*make_chat("hi", "a").messages, tool)), "c")
    assert len(recorder.segments) == 2
    with pytest.raises(DataError, match="rejects"):
        recorder.plan(ChatPrompt((*make_chat("x", "a").messages, tool)), PLAIN)

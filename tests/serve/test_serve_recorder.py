"""SessionRecorder: what an agent's requests become, token by token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollick.data.chat import ChatCodec
from rollick.errors import DataError
from rollick.serve.asked import Conversation
from rollick.serve.recorder import Segment, SessionRecorder
from rollick.testing.fakes import prompt
from rollick.testing.tiny import tiny_tokenizer
from rollick.types import NOT_SAMPLED, Completion, SampleId, Sampling, StopReason

TOKENIZER = tiny_tokenizer()
CODEC = ChatCodec(TOKENIZER, "chat")
EOS = 2
PLAIN = Sampling(temperature=1.0, max_tokens=8)


def said(*texts: str) -> Conversation:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    return Conversation(
        tuple({"role": roles[n % 2], "content": text} for n, text in enumerate(texts))
    )


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def drawn(
    ids: Sequence[int], *, version: int = 0, stop: StopReason = StopReason.STOP
) -> Completion:
    return Completion(
        SampleId(0, 0),
        np.array(ids, np.int32),
        np.full(len(ids), -0.5, np.float32),
        np.full(len(ids), version, np.int32),
        stop,
    )


def ask(
    recorder: SessionRecorder,
    content: Any,
    answer: str,
    *,
    version: int = 0,
    sampling: Sampling = PLAIN,
    ids: Sequence[int] | None = None,
) -> list[int]:
    """One request whose answer is this text; gives the ids that the engine was asked with."""
    plan = recorder.plan(content, sampling)
    completion = drawn([*ids_of(answer), EOS] if ids is None else ids, version=version)
    recorder.add(plan, completion, shown=answer)
    return plan.token_ids.tolist()


def shown(segment: Segment) -> str:
    """Tokens that are trained on, as letters; the others as dots; the end of a turn as `$`."""
    letters = [
        "$" if token == EOS else TOKENIZER.decode([token]) for token in segment.token_ids.tolist()
    ]
    return "".join(
        letter if mask else "." for letter, mask in zip(letters, segment.loss_mask, strict=True)
    )


def test_the_first_request_is_the_templates_text_with_the_answer_behind_it():
    recorder = SessionRecorder(CODEC)
    asked = ask(recorder, said("hi"), "yo", version=3)
    (segment,) = recorder.segments
    assert asked == CODEC.encode_messages(said("hi").messages).tolist()
    assert segment.token_ids.tolist() == [*asked, *ids_of("yo"), EOS]
    assert shown(segment) == "....yo$"
    assert segment.versions.tolist() == [NOT_SAMPLED] * 4 + [3] * 3
    assert segment.logprobs.tolist() == [0.0] * 4 + [-0.5] * 3


def test_a_conversation_that_goes_on_grows_one_segment():
    recorder = SessionRecorder(CODEC)
    ask(recorder, said("hi"), "yo")
    ask(recorder, said("hi", "yo", "b"), "c", version=1)
    (segment,) = recorder.segments
    assert shown(segment) == "....yo$..c$"
    assert segment.versions.tolist()[4:] == [0, 0, 0, NOT_SAMPLED, NOT_SAMPLED, 1, 1]
    assert (segment.turns, segment.text) == (2, "yo\nc")


def test_an_answer_stays_as_the_ids_that_were_drawn_whatever_its_text_would_be_as_tokens():
    recorder = SessionRecorder(CODEC)
    strange = [3, *ids_of("a"), EOS]  # the unknown token decodes to nothing that encodes to it
    ask(recorder, said("hi"), "a", ids=strange)
    asked = ask(recorder, said("hi", "a", "b"), "c")
    before = CODEC.encode_messages(said("hi").messages).tolist()
    assert asked == [*before, *strange, *ids_of("b|")]


def test_an_answer_that_was_cut_off_is_closed_by_the_template_and_that_is_not_trained_on():
    recorder = SessionRecorder(CODEC)
    plan = recorder.plan(said("hi"), PLAIN)
    recorder.add(plan, drawn(ids_of("yo"), stop=StopReason.LENGTH), shown="yo")
    assert recorder.segments[0].stop is StopReason.LENGTH
    ask(recorder, said("hi", "yo", "b"), "c")
    assert shown(recorder.segments[0]) == "....yo...c$"
    assert recorder.segments[0].token_ids.tolist()[6] == EOS


def test_an_agent_that_strips_an_answer_has_not_rewritten_it():
    recorder = SessionRecorder(CODEC)
    ask(recorder, said("hi"), " yo ")
    ask(recorder, said("hi", "yo", "b"), "c")
    assert len(recorder.segments) == 1


def test_a_rewritten_answer_starts_a_new_segment_from_text():
    recorder = SessionRecorder(CODEC)
    ask(recorder, said("hi"), "yo")
    asked = ask(recorder, said("hi", "no", "b"), "c")
    assert asked == CODEC.encode_messages(said("hi", "no", "b").messages).tolist()
    assert [shown(segment) for segment in recorder.segments] == ["....yo$", ".........c$"]


def test_a_dropped_turn_starts_a_new_segment():
    recorder = SessionRecorder(CODEC)
    ask(recorder, said("hi"), "yo")
    ask(recorder, said("hi", "yo", "b"), "c")
    ask(recorder, said("b", "c", "d"), "e")
    assert [segment.turns for segment in recorder.segments] == [2, 1]


def test_a_rewritten_question_keeps_the_ids_of_the_answers_before_it():
    recorder = SessionRecorder(CODEC)
    strange = [3, *ids_of("a"), EOS]
    ask(recorder, said("hi"), "a", ids=strange)
    ask(recorder, said("hi", "a", "b"), "c")
    asked = ask(recorder, said("hi", "a", "x"), "d")
    assert asked == [*recorder.segments[0].token_ids.tolist()[:7], *ids_of("x|")]
    first, second = recorder.segments
    assert shown(first).endswith("a$..c$")
    assert shown(second) == ".........d$"


def test_a_drawn_token_is_trained_on_and_counted_in_one_segment_only():
    recorder = SessionRecorder(CODEC)
    ask(recorder, said("hi"), "a")
    for question in ("b", "x", "y"):
        ask(recorder, said("hi", "a", question), "c")
    assert [int(segment.loss_mask.sum()) for segment in recorder.segments] == [4, 2, 2]
    counts = [int((segment.versions != NOT_SAMPLED).sum()) for segment in recorder.segments]
    assert counts == [4, 2, 2]


def test_the_same_question_again_is_another_segment():
    recorder = SessionRecorder(CODEC)
    ask(recorder, said("hi"), "a")
    ask(recorder, said("hi"), "b")
    assert [shown(segment) for segment in recorder.segments] == ["....a$", "....b$"]
    ask(recorder, said("hi", "b", "c"), "d")
    assert [segment.turns for segment in recorder.segments] == [1, 2]


def test_a_branch_can_be_gone_on_with_and_so_can_the_branch_it_left():
    recorder = SessionRecorder(CODEC)
    ask(recorder, said("hi"), "a")
    ask(recorder, said("hi", "a", "b"), "c")
    ask(recorder, said("hi", "a", "x"), "d")
    ask(recorder, said("hi", "a", "x", "d", "y"), "e")
    ask(recorder, said("hi", "a", "b", "c", "z"), "f")
    assert [shown(segment) for segment in recorder.segments] == ["....a$..c$..f$", "........d$..e$"]


def test_another_temperature_starts_a_segment_with_the_same_ids():
    recorder = SessionRecorder(CODEC)
    strange = [3, *ids_of("a"), EOS]
    ask(recorder, said("hi"), "a", ids=strange)
    asked = ask(
        recorder, said("hi", "a", "b"), "c", sampling=Sampling(temperature=0.5, max_tokens=8)
    )
    assert asked[:7] == recorder.segments[0].token_ids.tolist()
    assert [segment.sampling.temperature for segment in recorder.segments] == [1.0, 0.5]


def test_other_tools_start_a_new_segment():
    recorder = SessionRecorder(CODEC)
    ask(recorder, said("hi"), "a")
    more = Conversation(said("hi", "a", "b").messages, ({"type": "function"},))
    ask(recorder, more, "c")
    assert len(recorder.segments) == 2


def test_a_plan_that_was_never_answered_leaves_nothing_behind():
    recorder = SessionRecorder(CODEC)
    recorder.plan(said("hi"), PLAIN)
    assert recorder.segments == ()
    assert recorder.tokens == 0


def test_a_text_that_goes_on_grows_its_segment_by_the_new_letters():
    recorder = SessionRecorder(CODEC)
    ask(recorder, "1+1=", "2", ids=ids_of("2;"))
    asked = ask(recorder, "1+1=2; 3+3=", "6", ids=ids_of("6"))
    assert asked == [1, *ids_of("1+1=2; 3+3=")]
    assert [shown(segment) for segment in recorder.segments] == [".....2;.....6"]


def test_a_text_without_the_stop_string_that_was_drawn_is_another_text():
    recorder = SessionRecorder(CODEC)
    ask(recorder, "1+1=", "2", ids=ids_of("2;"))
    ask(recorder, "1+1=2 3+3=", "6", ids=ids_of("6"))
    assert len(recorder.segments) == 2


def test_token_ids_that_go_on_grow_their_segment():
    recorder = SessionRecorder(CODEC)
    ask(recorder, (1, 5), "", ids=[6, 7])
    ask(recorder, (1, 5, 6, 7, 8), "", ids=[9])
    ask(recorder, (1, 5, 6, 8), "", ids=[9])
    assert [segment.token_ids.tolist() for segment in recorder.segments] == [
        [1, 5, 6, 7, 8, 9],
        [1, 5, 6, 8, 9],
    ]


def test_a_template_that_cannot_go_on_writes_the_whole_conversation_anew():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' and messages[0]['content'] == 'x' %}"
        "{{ raise_exception('no') }}{% endif %}{{ m['content'] }}|{% endfor %}"
    )
    recorder = SessionRecorder(ChatCodec(tokenizer, "chat"))
    ask(recorder, said("hi"), "a")
    tool = {"role": "tool", "content": "b"}
    ask(recorder, Conversation((*said("hi", "a").messages, tool)), "c")
    assert len(recorder.segments) == 2
    with pytest.raises(DataError, match="refuses"):
        recorder.plan(Conversation((*said("x", "a").messages, tool)), PLAIN)


def test_a_segment_is_a_sample_of_its_prompt():
    recorder = SessionRecorder(CODEC)
    ask(recorder, said("hi"), "yo", sampling=Sampling(temperature=0.7, max_tokens=8))
    asked = prompt("hi")
    sample = recorder.segments[0].sample(SampleId(4, 2), asked)
    assert (sample.uid, sample.prompt, sample.text) == (SampleId(4, 2), asked, "yo")
    assert (sample.length, sample.response_length, sample.temperature) == (7, 3, 0.7)
    assert not sample.token_ids.flags.writeable

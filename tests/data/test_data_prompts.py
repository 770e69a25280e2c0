"""PromptStream: order, shares, cursor, and the quarantine of bad rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.config.schema import DpoDomain, RlDataConfig, RlvrDomain, SftDomain, ValidationDomain
from rollick.data.prompts import PromptStream
from rollick.errors import DataError
from rollick.types import Prompt, Turn

Rows = list[Any]


def open_stream(rows: Rows | dict[str, Rows], *, seed: int = 0, **options: Any) -> PromptStream:
    """A stream over Python rows; options of the data section, of the domain, or of `open`."""
    sources = rows if isinstance(rows, dict) else {"toy": rows}
    shares = options.pop("shares", {})
    open_options = {
        key: options.pop(key) for key in ("count_tokens", "engine_limit") if key in options
    }
    full = {key: options.pop(key) for key in list(options) if key in RlDataConfig.model_fields}
    kind = SftDomain if "completion" in options else RlvrDomain
    kind = DpoDomain if "chosen" in options else kind
    domains = {
        name: kind(source=f"object:{name}", share=shares.get(name, 1.0), **options)
        for name in sources
    }
    data = RlDataConfig[Any](domains=domains, **full)
    return PromptStream.open(data, seed=seed, base=None, objects=sources, **open_options)


def draw_uids(stream: PromptStream, count: int) -> list[str]:
    return [stream.next().uid for _ in range(count)]


def test_a_string_is_a_user_turn_and_its_uid_is_domain_and_row():
    prompt = open_stream(["hello"]).next()
    assert prompt == Prompt("toy/0", "toy", (Turn("user", "hello"),), {"prompt": "hello"})


def test_a_list_of_messages_keeps_its_roles_and_the_row_its_columns():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompt = open_stream([{"question": messages, "answer": 7}], prompt="question").next()
    assert prompt.turns == (Turn("user", "a"), Turn("assistant", "b"))
    assert prompt.row["answer"] == 7


def test_a_format_is_filled_from_the_columns():
    prompt = open_stream([{"a": 1, "b": 2}], prompt="What is {a} + {b}?").next()
    assert prompt.turns == (Turn("user", "What is 1 + 2?"),)


def test_the_system_message_comes_first_unless_the_row_has_its_own():
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "b"}]
    first, second = open_stream(["a", {"prompt": own}], system="be brief").all()
    assert first.turns == (Turn("system", "be brief"), Turn("user", "a"))
    assert second.turns == (Turn("system", "mine"), Turn("user", "b"))


def test_every_epoch_draws_each_row_once_and_in_another_order():
    stream = open_stream([f"p{n}" for n in range(20)])
    epochs = [draw_uids(stream, 20) for _ in range(3)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_is_the_same_in_every_process_and_version():
    assert draw_uids(open_stream(list("abcdef"), seed=7), 6) == [
        f"toy/{row}" for row in (4, 3, 5, 2, 1, 0)
    ]


def test_the_seed_and_the_domain_choose_the_order():
    rows = [f"p{n}" for n in range(20)]
    assert draw_uids(open_stream(rows, seed=1), 20) != draw_uids(open_stream(rows, seed=2), 20)
    other = [
        uid.replace("else", "toy") for uid in draw_uids(open_stream({"else": rows}, seed=1), 20)
    ]
    assert draw_uids(open_stream(rows, seed=1), 20) != other


def test_without_shuffle_rows_come_in_file_order_again_and_again():
    assert draw_uids(open_stream(["a", "b"], shuffle=False), 4) == ["toy/0", "toy/1"] * 2


def test_three_parts_to_one_are_interleaved_and_not_drawn_in_blocks():
    stream = open_stream({"a": ["x"], "b": ["y"]}, shares={"a": 3, "b": 1})
    assert "".join(uid[0] for uid in draw_uids(stream, 8)) == "aabaaaba"


@settings(max_examples=25, deadline=None)
@given(shares=st.lists(st.floats(0.05, 10), min_size=1, max_size=4), skip=st.integers(0, 60))
def test_shares_hold_over_any_window(shares: list[float], skip: int):
    share_by_domain = {f"d{n}": share for n, share in enumerate(shares)}
    stream = open_stream({name: ["x"] for name in share_by_domain}, shares=share_by_domain)
    draw_uids(stream, skip)
    window = Counter(uid.split("/")[0] for uid in draw_uids(stream, 100))
    for name, share in share_by_domain.items():
        assert abs(window[name] - 100 * share / sum(shares)) <= len(shares)


@settings(max_examples=25, deadline=None)
@given(before=st.integers(0, 30), share=st.floats(0.1, 5), seed=st.integers(0, 5))
def test_a_restored_stream_continues_with_the_next_prompt(before: int, share: float, seed: int):
    rows = {"a": list("abcde"), "b": list("xyz")}
    full = open_stream(rows, shares={"a": share}, seed=seed)
    draw_uids(full, before)
    state = json.loads(json.dumps(full.state()))
    resumed = open_stream(rows, shares={"a": share}, seed=seed)
    draw_uids(resumed, 3)
    resumed.restore(state)
    assert draw_uids(resumed, 20) == draw_uids(full, 20)
    assert resumed.state() == full.state()


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ({"toy": ["a", "b"]}, {}, "3 usable rows then, 2 now"),
        ({"toy": ["a", "b", "C"]}, {}, "differ from those of the saved run"),
        ({"toy": ["a", "b", "c"], "new": ["x"]}, {}, "has the domains toy, this one toy, new"),
        ({"toy": ["a", "b", "c"]}, {"seed": 5}, "has seed=0, this one 5. resume with seed=0"),
        ({"toy": ["a", "b", "c"]}, {"shuffle": False}, "has shuffle=True, this one False"),
    ],
)
def test_a_cursor_into_other_rows_or_another_order_is_refused(
    rows: dict[str, Rows], options: dict[str, Any], message: str
):
    state = open_stream(["a", "b", "c"]).state()
    other = open_stream(rows, **options)
    with pytest.raises(DataError, match=message):
        other.restore(state)
    assert draw_uids(other, 4) == draw_uids(open_stream(rows, **options), 4)


def test_all_yields_every_prompt_in_file_order_and_keeps_the_cursor():
    stream = open_stream({"a": ["x", "y"], "b": ["z"]})
    before = stream.state()
    assert [prompt.uid for prompt in stream.all()] == ["a/0", "a/1", "b/0"]
    assert stream.sizes == {"a": 2, "b": 1}
    assert stream.state() == before


def test_validation_prompts_come_from_the_validation_domains():
    train, held_out = RlvrDomain(source="object:t"), ValidationDomain(source="object:v")
    data = RlDataConfig[RlvrDomain](domains={"t": train}, validation={"v": held_out})
    objects = {"t": ["train"], "v": ["held out"]}
    stream = PromptStream.open(data, seed=0, base=None, objects=objects, validation=True)
    assert [prompt.text for prompt in stream.all()] == ["held out"]


def test_drawing_from_a_stream_without_domains_is_an_error():
    data = RlDataConfig[RlvrDomain](domains={"t": RlvrDomain(source="object:t")})
    stream = PromptStream.open(data, seed=0, base=None, validation=True)
    assert stream.all() == []
    with pytest.raises(DataError, match="no domains"):
        stream.next()


BAD_ROWS = [
    (7, "not_a_row", "expected named columns, got int 7"),
    ({"promt": "x"}, "missing_column", "no 'prompt' among promt; did you mean 'promt'?"),
    ({"prompt": None}, "wrong_type", "'prompt' is NoneType None, expected text or a list"),
    ({"prompt": []}, "wrong_type", "'prompt' is list []"),
    ({"prompt": ["hi"]}, "wrong_type", "a message in 'prompt' is str 'hi', expected text for role"),
    (
        {"prompt": [{"role": "user", "content": ["x"]}]},
        "wrong_type",
        "expected text for role and content",
    ),
    ("  \n", "empty_prompt", "no text"),
    ("half \ud800 pair", "not_text", "surrogates not allowed"),
]


def count_reasons(stream: PromptStream) -> Counter[str]:
    return Counter(row.reason for row in stream.bad_rows)


@pytest.mark.parametrize(("row", "reason", "detail"), BAD_ROWS)
def test_a_bad_row_is_counted_by_reason_and_skipped(row: Any, reason: str, detail: str):
    stream = open_stream(["good", row, "fine"], max_bad_rows=0.5)
    assert [prompt.uid for prompt in stream.all()] == ["toy/0", "toy/2"]
    assert count_reasons(stream) == {reason: 1}
    (bad,) = stream.bad_rows
    assert bad.location == "object:toy: row 2"
    assert detail in bad.detail


@pytest.mark.parametrize(
    ("row", "reason"), [({"a": 1}, "missing_column"), ({"a": 1, "b": "x"}, "wrong_type")]
)
def test_a_row_that_does_not_fit_the_format_is_bad(row: dict[str, Any], reason: str):
    rows = [{"a": 1, "b": 2}, row]
    stream = open_stream(rows, prompt="{a} {b:d}", max_bad_rows=0.5)
    assert count_reasons(stream) == {reason: 1}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [({}, "missing_column"), ({"y": 3}, "wrong_type"), ({"y": ""}, "empty_completion")],
)
def test_a_row_without_the_answer_to_imitate_is_bad(answer: dict[str, Any], reason: str):
    rows = [{"prompt": "q", "y": "a"}, {"prompt": "q", **answer}]
    stream = open_stream(rows, completion="y", max_bad_rows=0.5)
    assert count_reasons(stream) == {reason: 1}
    assert stream.answers_of(stream.next(), "completion") == ["a"]


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ({"good": "a"}, "missing_column"),
        ({"good": "a", "bad": ["b"]}, "wrong_type"),
        ({"good": "", "bad": "b"}, "empty_chosen"),
        ({"good": "a", "bad": ""}, "empty_rejected"),
        ({"good": "a", "bad": "\ud800"}, "not_text"),
        ({"good": "a", "bad": "a"}, "no_preference"),
    ],
)
def test_a_row_without_a_better_and_a_worse_answer_is_bad(pair: dict[str, Any], reason: str):
    rows = [{"prompt": "q", "good": "a", "bad": "b"}, {"prompt": "q", **pair}]
    stream = open_stream(rows, chosen="good", rejected="bad", max_bad_rows=0.5)
    assert count_reasons(stream) == {reason: 1}
    assert stream.answers_of(stream.next(), "chosen", "rejected") == ["a", "b"]


def test_an_answer_without_a_named_column_is_an_error():
    stream = open_stream(["q"])
    with pytest.raises(DataError, match=r"set data\.domains\.toy\.completion"):
        stream.answers_of(stream.next(), "completion")
    with pytest.raises(DataError, match=r"set data\.domains\.toy\.chosen"):
        stream.answers_of(stream.next(), "chosen", "rejected")


def test_too_long_prompts_and_those_that_cannot_be_encoded_are_quarantined():
    def count(prompt: Prompt) -> int:
        if prompt.text == "odd":
            raise DataError("the chat template refuses it")
        return len(prompt.text)

    rows = ["1234", "12345", "odd"]
    stream = open_stream(rows, count_tokens=count, max_prompt_tokens=4, max_bad_rows=1)
    assert [prompt.text for prompt in stream.all()] == ["1234"]
    assert count_reasons(stream) == {"too_long": 1, "cannot_encode": 1}
    assert stream.bad_rows[0].detail == "5 tokens, data.max_prompt_tokens is 4"


def test_prompts_that_the_engines_have_no_room_for_are_quarantined():
    def count(prompt: Prompt) -> int:
        return len(prompt.text)

    stream = open_stream(["123", "1234"], count_tokens=count, engine_limit=3, max_bad_rows=1)
    assert [prompt.text for prompt in stream.all()] == ["123"]
    assert stream.bad_rows[0].detail == "4 tokens, the limit of infer.max_length is 3"


def test_only_the_first_twenty_bad_rows_are_listed_and_all_are_counted():
    stream = open_stream(["good", *[""] * 30], max_bad_rows=1)
    assert stream.metrics()["data/quarantined"] == 30
    assert len(stream.bad_rows) == 20


def test_bad_rows_up_to_the_allowed_part_are_fine_and_one_more_stops(tmp_path: Path):
    def open_with(bad: int) -> PromptStream:
        lines = ['{"prompt": "x"}'] * (20 - bad) + ["{not json"] * bad
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        data = RlDataConfig[RlvrDomain](
            domains={"toy": RlvrDomain(source="rows.jsonl")}, max_bad_rows=0.05
        )
        return PromptStream.open(data, seed=0, base=tmp_path)

    assert len(open_with(1).bad_rows) == 1
    with pytest.raises(DataError) as caught:
        open_with(2)
    assert str(caught.value) == (
        "2 of the 20 rows of domain 'toy' are unusable (2 not_json), data.max_bad_rows allows 5%; "
        "first: rows.jsonl:19: not_json (Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)). correct or remove these rows, or raise data.max_bad_rows"
    )


def test_a_source_without_a_usable_row_names_the_columns_it_has():
    with pytest.raises(DataError) as caught:
        open_stream([{"question": "q", "answr": "a"}] * 2, prompt="question", completion="answer")
    assert "none of the 2 rows of domain 'toy' is usable: 2 missing_column" in str(caught.value)
    assert "no 'answer' among question, answr; did you mean 'answr'?" in str(caught.value)


def test_a_source_without_rows_is_an_error():
    with pytest.raises(DataError, match=r"object:toy .domain 'toy'. has no rows"):
        open_stream([])


def test_a_prompt_that_is_found_replaces_the_next_one():
    rows = {"a": [f"a{n}" for n in range(6)], "b": [f"b{n}" for n in range(6)]}
    plain, replayed = open_stream(rows, seed=3), open_stream(rows, seed=3)
    order = draw_uids(plain, 8)
    assert [replayed.redraw(uid).uid for uid in ("b/5", "a/0", order[2])] == [
        "b/5",
        "a/0",
        order[2],
    ]
    assert draw_uids(replayed, 5) == order[3:]
    assert replayed.state() == plain.state()


def test_a_prompt_that_was_found_counts_as_in_flight():
    rows = [f"p{n}" for n in range(6)]
    plain, replayed = (open_stream(rows, selection={"near_half_window": 3}) for _ in range(2))
    order = draw_uids(plain, 4)
    assert [replayed.redraw(uid).uid for uid in order] == order
    assert replayed.state() == plain.state()


def test_a_prompt_that_is_not_there_cannot_be_found():
    with pytest.raises(DataError, match="prompt 'toy/9', which the run drew"):
        open_stream(["a"]).redraw("toy/9")

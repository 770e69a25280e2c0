"""Detokenizer: pieces are complete characters, join to the reply and contain no stop string."""

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.serve.choices import MAX_REPLACEMENTS, REPLACEMENT, Detokenizer


def decode_bytes(ids: Sequence[int]) -> str:
    """A tokenizer with a token for each byte."""
    return bytes(ids).decode("utf-8", "replace")


def decode_words(ids: Sequence[int]) -> str:
    """A tokenizer that writes spaces between words, but none before the first: a, a b, a b c."""
    return " ".join("abc"[number] for number in ids)


def decode_runs(ids: Sequence[int]) -> str:
    """A tokenizer that decodes a text as broken while its last character is incomplete."""
    text = decode_bytes(ids)
    return REPLACEMENT * len(ids) if REPLACEMENT in text else text


def collect_pieces(stream: Detokenizer, *deltas: Sequence[int]) -> list[str]:
    return [*(stream.push(delta) for delta in deltas), stream.finish()]


def test_text_is_released_as_tokens_arrive():
    assert collect_pieces(Detokenizer(decode_bytes), b"ab", b"c") == ["ab", "c", ""]


def test_a_character_of_several_tokens_waits_for_its_last():
    first, *rest = (bytes([byte]) for byte in "é".encode())
    assert collect_pieces(Detokenizer(decode_bytes), b"a", first, *rest) == ["a", "", "é", ""]


def test_bytes_that_never_form_a_character_are_released_at_the_end():
    assert collect_pieces(Detokenizer(decode_bytes), b"a", b"\xc3") == ["a", "", "\ufffd"]


def test_invalid_bytes_do_not_hold_back_the_rest():
    released = collect_pieces(
        Detokenizer(decode_bytes), b"a", *[b"\xff"] * (MAX_REPLACEMENTS + 5), b"b"
    )
    assert [piece for piece in released if piece] == [
        "a",
        REPLACEMENT * MAX_REPLACEMENTS,
        REPLACEMENT * 5 + "b",
    ]


def test_a_token_is_decoded_in_the_context_of_the_previous_one():
    assert collect_pieces(Detokenizer(decode_words), [0], [1], [], [2]) == ["a", " b", "", " c", ""]


def test_a_stop_string_over_two_tokens_is_never_released():
    stream = Detokenizer(decode_bytes, stops=["END"])
    assert collect_pieces(stream, b"a E", b"ND b") == ["a ", "", ""]
    assert stream.stopped


def test_text_that_only_begins_like_a_stop_string_is_released_later():
    assert collect_pieces(Detokenizer(decode_bytes, stops=["END"]), b"aEN", b"x", b"E") == [
        "a",
        "ENx",
        "",
        "E",
    ]


def test_the_first_of_several_stop_strings_ends_the_text():
    assert collect_pieces(Detokenizer(decode_bytes, stops=["c", "bc"]), b"abcd") == ["a", ""]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([decode_bytes, decode_runs]),
    st.text("ab-é漢", max_size=15),
    st.lists(st.integers(1, 4), max_size=40),
    st.text("ab-"),
)
def test_the_released_parts_make_the_text_before_the_stop(
    decode: Callable[[Sequence[int]], str], text: str, sizes: list[int], stop: str
):
    data, deltas = text.encode(), []
    for size in [*sizes, len(data)]:
        deltas.append(data[:size])
        data = data[size:]
    stream = Detokenizer(decode, stops=[stop] if stop else [])
    expected = text.partition(stop)[0] if stop else text
    assert "".join(collect_pieces(stream, *deltas)) == expected

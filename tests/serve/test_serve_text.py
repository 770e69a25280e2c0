"""TextStream: pieces that are whole characters, put together are the answer, and hide stops."""

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.serve.text import BROKEN, MAX_BROKEN, TextStream


def by_bytes(ids: Sequence[int]) -> str:
    """A tokenizer with a token for each byte."""
    return bytes(ids).decode("utf-8", "replace")


def by_words(ids: Sequence[int]) -> str:
    """One that writes spaces between words, so that a first token has none: a, a b, a b c."""
    return " ".join("abc"[number] for number in ids)


def by_runs(ids: Sequence[int]) -> str:
    """One that writes all of a text as broken while its last character is not whole."""
    text = by_bytes(ids)
    return BROKEN * len(ids) if BROKEN in text else text


def pieces(stream: TextStream, *deltas: Sequence[int]) -> list[str]:
    return [*(stream.push(delta) for delta in deltas), stream.finish()]


def test_text_comes_as_it_is_drawn():
    assert pieces(TextStream(by_bytes), b"ab", b"c") == ["ab", "c", ""]


def test_a_character_of_several_tokens_waits_for_its_last():
    first, *rest = (bytes([byte]) for byte in "é".encode())
    assert pieces(TextStream(by_bytes), b"a", first, *rest) == ["a", "", "é", ""]


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    assert pieces(TextStream(by_bytes), b"a", b"\xc3") == ["a", "", "\ufffd"]


def test_bytes_that_are_no_character_do_not_hold_the_rest_back_for_ever():
    shown = pieces(TextStream(by_bytes), b"a", *[b"\xff"] * (MAX_BROKEN + 5), b"b")
    assert [piece for piece in shown if piece] == ["a", BROKEN * MAX_BROKEN, BROKEN * 5 + "b"]


def test_a_token_is_written_as_it_is_behind_the_one_before():
    assert pieces(TextStream(by_words), [0], [1], [], [2]) == ["a", " b", "", " c", ""]


def test_a_stop_string_over_two_tokens_is_never_shown():
    stream = TextStream(by_bytes, stops=["END"])
    assert pieces(stream, b"a E", b"ND b") == ["a ", "", ""]
    assert stream.stopped


def test_what_only_began_like_a_stop_string_is_shown_later():
    assert pieces(TextStream(by_bytes, stops=["END"]), b"aEN", b"x", b"E") == ["a", "ENx", "", "E"]


def test_the_first_of_several_stop_strings_ends_the_text():
    assert pieces(TextStream(by_bytes, stops=["c", "bc"]), b"abcd") == ["a", ""]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([by_bytes, by_runs]),
    st.text("ab-é漢", max_size=15),
    st.lists(st.integers(1, 4), max_size=40),
    st.text("ab-"),
)
def test_pieces_put_together_are_the_text_before_the_stop(
    decode: Callable[[Sequence[int]], str], text: str, sizes: list[int], stop: str
):
    data, deltas = text.encode(), []
    for size in [*sizes, len(data)]:
        deltas.append(data[:size])
        data = data[size:]
    stream = TextStream(decode, stops=[stop] if stop else [])
    expected = text.partition(stop)[0] if stop else text
    assert "".join(pieces(stream, *deltas)) == expected

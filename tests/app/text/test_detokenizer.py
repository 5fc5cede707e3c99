"""Incremental decoding, against the one-shot decode of all bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.text.detokenizer import Detokenizer, TokenTexts
from tests.app.text.test_stop_strings import cut

_BYTES = st.one_of(
    st.binary(max_size=4),
    st.sampled_from(
        [b"a", b" ", b" b", "é".encode(), b"\xf0\x9f", b"\x98\x80", b"\xe2", b"\x82\xac", b"\xed\xa0", b"\xff"]
    ),
)
_TOKENS = st.lists(_BYTES, max_size=25)


def detokenizer_of(tokens: Sequence[bytes], stop: Sequence[str] = (), strips: bool = False) -> Detokenizer:
    return Detokenizer(TokenTexts(lambda token_id: tokens[token_id]), stop, strip_leading_space=strips)


def groups_of(data: st.DataObject, num_tokens: int) -> list[list[int]]:
    ends = sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=8)))
    return [list(range(start, end)) for start, end in zip([0, *ends], [*ends, num_tokens], strict=True)]


def one_shot(tokens: Sequence[bytes], strips: bool) -> str:
    text = b"".join(tokens).decode("utf-8", "replace")
    return text.removeprefix(" ") if strips else text


@given(tokens=_TOKENS, strips=st.booleans(), data=st.data())
@example(tokens=[b"\xed", b"\xa0", b"\x80"], strips=False, data=None)
@example(tokens=[b"\xf0", b"\x9f", b"a"], strips=False, data=None)
def test_joined_pieces_are_the_one_shot_decode(tokens: list[bytes], strips: bool, data: st.DataObject | None) -> None:
    detokenizer = detokenizer_of(tokens, strips=strips)
    groups = [[n] for n in range(len(tokens))] if data is None else groups_of(data, len(tokens))
    text = "".join(detokenizer.push(group) for group in groups) + detokenizer.finish()
    assert text == one_shot(tokens, strips)
    assert detokenizer.num_tokens_used == len(tokens)
    assert not detokenizer.stopped


@given(
    tokens=_TOKENS,
    stop=st.lists(st.text(alphabet="ab é😀€\ufffd", min_size=1, max_size=3), min_size=1, max_size=4),
    strips=st.booleans(),
    data=st.data(),
)
def test_stopping_is_the_one_shot_cut(
    tokens: list[bytes], stop: list[str], strips: bool, data: st.DataObject
) -> None:
    detokenizer = detokenizer_of(tokens, stop, strips)
    text = "".join(detokenizer.push(group) for group in groups_of(data, len(tokens))) + detokenizer.finish()
    expected = cut(one_shot(tokens, strips), stop)
    assert text == (one_shot(tokens, strips) if expected is None else expected)
    assert detokenizer.stopped == (expected is not None)


@given(tokens=_TOKENS, data=st.data())
def test_the_number_of_tokens_used_ends_with_the_one_that_completes_the_stop_string(
    tokens: list[bytes], data: st.DataObject
) -> None:
    whole = detokenizer_of(tokens, ["ab", "€"])
    for group in groups_of(data, len(tokens)):
        whole.push(group)
    single = detokenizer_of(tokens, ["ab", "€"])
    used = 0
    while used < len(tokens) and not single.stopped:
        single.push([used])
        used += 1
    assert whole.num_tokens_used == used


def test_text_before_an_incomplete_character_is_sent_at_once() -> None:
    detokenizer = detokenizer_of([b"hi \xf0\x9f", b"\x98", b"\x80!"])
    assert [detokenizer.push([n]) for n in range(3)] == ["hi ", "", "😀!"]


def test_an_incomplete_character_is_flushed_once_as_one_replacement() -> None:
    detokenizer = detokenizer_of([b"hi \xf0\x9f\x98"])
    assert detokenizer.push([0]) == "hi "
    assert (detokenizer.finish(), detokenizer.finish()) == ("\ufffd", "")


def test_invalid_bytes_are_replaced_as_soon_as_they_are_known_to_be_invalid() -> None:
    detokenizer = detokenizer_of([b"\xe2", b"a", b"\xff"])
    assert [detokenizer.push([n]) for n in range(3)] == ["", "\ufffda", "\ufffd"]


def test_tokens_without_text_do_not_disturb_a_character() -> None:
    detokenizer = detokenizer_of([b"\xc3", b"", b"\xa9"])
    assert detokenizer.push([0, 1, 2]) == "é"


def test_only_the_first_leading_space_is_stripped_even_after_tokens_without_text() -> None:
    detokenizer = detokenizer_of([b"", b"  a", b" b"], strips=True)
    assert [detokenizer.push([n]) for n in range(3)] == ["", " a", " b"]


def test_a_space_after_the_beginning_is_kept() -> None:
    detokenizer = detokenizer_of([b"a", b" b"], strips=True)
    assert detokenizer.push([0, 1]) == "a b"


def test_tokens_after_a_stop_string_are_not_used() -> None:
    detokenizer = detokenizer_of([b"a", b"\n", b"b"], ["\n"])
    assert detokenizer.push([0, 1, 2]) == "a"
    assert (detokenizer.stopped, detokenizer.num_tokens_used) == (True, 2)
    assert (detokenizer.push([2]), detokenizer.finish(), detokenizer.num_tokens_used) == ("", "", 2)


def test_a_stop_string_inside_a_token_cuts_the_token() -> None:
    detokenizer = detokenizer_of([b"one\n\ntwo"], ["\n\n"])
    assert detokenizer.push([0]) == "one"


def test_a_half_stop_string_is_flushed_at_the_end_with_the_incomplete_character() -> None:
    detokenizer = detokenizer_of([b"a\n", b"\xf0"], ["\n\n"])
    assert detokenizer.push([0, 1]) == "a"
    assert detokenizer.finish() == "\n\ufffd"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="non-empty"):
        detokenizer_of([b"a"], [""])

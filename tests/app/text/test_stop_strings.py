"""Stop strings in text that comes in pieces, against the one-shot cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.stop_strings import StopStrings

_TEXT = st.text(alphabet="ab\n😀", max_size=30)
_STOPS = st.lists(st.text(alphabet="ab\n😀", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, stops: list[str]) -> str | None:
    """The specification: the shortest beginning that ends with a stop string, without the longest such one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return None


def pieces_of(data: st.DataObject, text: str) -> list[str]:
    pieces = []
    while text:
        size = data.draw(st.integers(1, len(text)))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@given(text=_TEXT, stops=_STOPS, data=st.data())
def test_any_grouping_gives_the_one_shot_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopStrings(stops)
    sent = "".join(matcher.push(piece) for piece in pieces_of(data, text)) + matcher.finish()
    expected = cut(text, stops)
    assert sent == (text if expected is None else expected)
    assert matcher.matched == (expected is not None)


@given(text=_TEXT, stops=_STOPS)
def test_exactly_the_longest_suffix_that_may_become_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    sent = matcher.push(text)
    if not matcher.matched:
        starts = (start for start in range(len(text)) if any(s.startswith(text[start:]) for s in stops))
        assert sent == text[: next(starts, len(text))]


def test_nothing_of_a_stop_string_that_comes_in_parts_is_sent() -> None:
    matcher = StopStrings(["DEFGHIJ"])
    assert [matcher.push(piece) for piece in ("ABC", "DEF", "G", "HI", "JK")] == ["ABC", "", "", "", ""]
    assert matcher.matched
    assert matcher.finish() == ""


def test_text_after_a_match_is_never_returned() -> None:
    matcher = StopStrings(["."])
    assert matcher.push("one. two") == "one"
    assert matcher.push("three. four") == ""


def test_held_text_is_sent_as_soon_as_it_cannot_match_any_more() -> None:
    matcher = StopStrings(["abc"])
    assert matcher.push("xab") == "x"
    assert matcher.push("abd") == "ababd"


def test_held_text_is_flushed_once_at_the_end() -> None:
    matcher = StopStrings(["abc"])
    matcher.push("ab")
    assert (matcher.finish(), matcher.finish()) == ("ab", "")


def test_the_stop_string_that_is_complete_first_counts() -> None:
    matcher = StopStrings(["abcdef", "cd"])
    assert matcher.push("abcdef") == "ab"


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_empty_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="non-empty"):
        StopStrings(stops)

"""Framing of server-sent events, with literals, the hostile ones too."""

from __future__ import annotations

from openai._streaming import SSEDecoder

from bridge.streams.sse import DONE, KEEP_ALIVE, comment, frame


def test_an_event_is_its_id_its_data_and_an_empty_line() -> None:
    assert frame(b'{"a":1}', b"7") == b'id: 7\ndata: {"a":1}\n\n'


def test_an_event_without_id_has_no_id_line() -> None:
    assert frame(b"x") == b"data: x\n\n"


def test_every_kind_of_line_break_in_data_starts_a_new_data_line() -> None:
    assert frame(b"a\nb\r\nc\rd") == b"data: a\ndata: b\ndata: c\ndata: d\n\n"


def test_data_cannot_forge_a_field() -> None:
    assert frame(b"x\nevent: done\nid: 99\n\ndata: y", b"1") == (
        b"id: 1\ndata: x\ndata: event: done\ndata: id: 99\ndata: \ndata: data: y\n\n"
    )


def test_unicode_line_separators_are_ordinary_text() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf".encode()
    assert frame(text) == b"data: " + text + b"\n\n"


def test_a_comment_is_one_line_whatever_it_says() -> None:
    assert comment("worker w1\r\ndata: forged\nid: 3") == b": worker w1 data: forged id: 3\n"


def test_comments_are_no_events_for_a_client_that_remembers_the_last_id() -> None:
    stream = frame(b"one", b"0") + KEEP_ALIVE + comment("worker w1") + frame(DONE, b"0")
    decoded = SSEDecoder().iter_bytes(iter([stream]))
    assert [event.data for event in decoded] == ["one", "[DONE]"]

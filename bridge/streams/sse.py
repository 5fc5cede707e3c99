"""Server-sent events as bytes: framing is a pure function of the data, the event id and nothing else.

Owns the wire format of https://html.spec.whatwg.org/multipage/server-sent-events.html. Refuses to know what the
data means and how it is sent. Data with line breaks becomes several `data:` lines; only CR LF, CR and LF count
as line breaks (U+2028 and its friends, which models do emit, are ordinary text).
"""

from __future__ import annotations

import re

DONE = b"[DONE]"
# NOTE: a comment ends with one line break, not with the blank line that ends an event: openai-python keeps the last
# `id`, so for it comment + blank line is an event with empty data, and it fails on that.
KEEP_ALIVE = b": keep-alive\n"

_LINE_BREAK = re.compile(rb"\r\n|\r|\n")


def frame(data: bytes, event_id: bytes | None = None) -> bytes:
    """One event. `event_id` is what a client sends back as `Last-Event-ID` when it resumes; it has no line break."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(_LINE_BREAK.split(data))
    if event_id is None:
        return b"data: %b\n\n" % data
    return b"id: %b\ndata: %b\n\n" % (event_id, data)


def comment(text: str) -> bytes:
    """A line that every client skips; line breaks in it become spaces, so it can never start a field."""
    return b": %b\n" % _LINE_BREAK.sub(b" ", text.encode())

"""Who reads which stream from where, as plain data for the reader's thread.

Owns how subscribers are put into as few reads as possible. Refuses to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tasks.protocol import keys
from tasks.protocol.contract import StreamEvent


class LogPlace(NamedTuple):
    """Where the tokens of an attempt are before they are in the request's own stream."""

    attempt: int
    log: bytes
    """The key of the worker's log."""
    slot: int


class Feed:
    """One subscriber's place in one request. A rewound subscriber gets a new feed, so that late arrivals of the old
    one are recognised and dropped."""

    __slots__ = (
        *("ahead", "ahead_index", "before", "deliver", "fail", "is_live", "key", "last_place", "next_index", "place"),
        *("position", "request_id"),
    )

    def __init__(
        self,
        request_id: str,
        position: bytes,
        next_index: int,
        deliver: Callable[[Feed, list[StreamEvent], bytes], None],
        fail: Callable[[Exception], None],
        before: Feed | None = None,
    ) -> None:
        """`deliver` and `fail` are called on the event loop. `before` is the feed whose place this one takes."""
        self.request_id = request_id
        self.key = keys.out(request_id).encode()
        self.position = position
        """In the request's own stream."""
        self.next_index = next_index
        """Of the next token to be handed over."""
        self.deliver = deliver
        self.fail = fail
        self.before = before
        self.place: LogPlace | None = None
        """What it follows (`bridge.streams.following`)."""
        self.last_place: LogPlace | None = None
        """What a feed that takes this one's place follows from its beginning."""
        self.is_live = False
        """The log has its next token; else it is catching up, and its own stream is read."""
        self.ahead: list[int] = []
        """Tokens that the log had before those between them and `next_index` were there."""
        self.ahead_index = 0
        """Of the first of them."""


Arrivals = list[tuple[Feed, list[StreamEvent], bytes]]
"""What one read brought: for each feed its events, and the id of the last entry of its own stream."""


def layers_of(feeds: Iterable[Feed]) -> list[dict[bytes, Feed]]:
    """Each layer can be one XREAD, which names a stream once: a second reader of a stream is in the second layer."""
    layers: list[dict[bytes, Feed]] = [{}]
    for feed in feeds:
        for layer in layers:
            if layer.setdefault(feed.key, feed) is feed:
                break
        else:
            layers.append({feed.key: feed})
    return layers


def deliver(arrivals: Arrivals) -> None:
    """Called on the event loop."""
    for feed, events, position in arrivals:
        feed.deliver(feed, events, position)

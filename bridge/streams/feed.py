"""Who reads which stream from where, as plain data for the reader's thread.

Owns how subscribers are put into as few reads as possible. Refuses to read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from tasks.protocol.contract import StreamEvent

if TYPE_CHECKING:
    from bridge.streams.subscription import Subscription


class Source(NamedTuple):
    """Where the tokens of an attempt are before they are in the request's own stream."""

    attempt: int
    log: bytes
    """The key of the worker's log."""
    slot: int


class Feed:
    """One subscriber's place in one request. A rewound subscriber gets a new feed, so that late batches of the old
    one are recognised and dropped."""

    __slots__ = ("ahead", "ahead_index", "is_live", "key", "next_index", "position", "source", "subscription")

    def __init__(self, key: bytes, position: bytes, subscription: Subscription) -> None:
        self.key = key
        self.position = position
        """In the request's own stream."""
        self.subscription = subscription
        self.next_index = subscription.next_index
        """Of the next token to be handed over."""
        self.source: Source | None = None
        """What it follows (`bridge.streams.following`)."""
        self.is_live = False
        """The log has its next token; else it is catching up, and its own stream is read."""
        self.ahead: list[int] = []
        """Tokens that the log had before those between them and `next_index` were there."""
        self.ahead_index = 0
        """Of the first of them."""


Batch = list[tuple[Feed, list[StreamEvent], bytes]]
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


def deliver(batch: Batch) -> None:
    """Called on the event loop."""
    for feed, events, position in batch:
        feed.subscription.accept(feed, events, position)

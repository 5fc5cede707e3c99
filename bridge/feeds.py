"""Who reads which stream from where, as plain data for the reader's thread.

Owns how subscribers are put into as few reads as possible. Refuses to read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tasks.contract import StreamEvent

if TYPE_CHECKING:
    from bridge.subscription import Subscription


class Feed:
    """One subscriber's place in one stream. A rewound subscriber gets a new feed, so that late batches of the old one
    are recognised and dropped."""

    __slots__ = ("key", "position", "subscription")

    def __init__(self, key: bytes, position: bytes, subscription: Subscription) -> None:
        self.key = key
        self.position = position
        self.subscription = subscription


Batch = list[tuple[Feed, list[StreamEvent], bytes]]
"""What one read brought: for each feed its events, and the id of the last entry."""


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

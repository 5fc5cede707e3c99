"""What the streams of some requests hold at the moment, read once.

Owns that one read. Refuses to wait (`bridge.streams.reader` does) and to know what the events mean. Blocking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import Redis

from bridge.streams.events import StreamLost, from_index
from tasks.protocol import keys
from tasks.protocol.contract import ContractError, StreamEvent, TerminalEvent, decode_entry


class History:
    """Use from any thread."""

    def __init__(self, redis: Redis) -> None:
        """`redis` is a short client of the main database."""
        self._redis = redis

    def read(self, request_ids: Sequence[str]) -> list[list[StreamEvent]]:
        """The events of each, in order, without repeats. Raises StreamLost, redis.exceptions.RedisError."""
        with self._redis.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.xrange(keys.out(request_id))
            streams: Any = pipe.execute()
        try:
            return [_in_order([decode_entry(entry, fields) for entry, fields in stream]) for stream in streams]
        except ContractError as error:
            raise StreamLost(f"the stream holds an entry that cannot be read: {error}") from error


def _in_order(events: Sequence[StreamEvent]) -> list[StreamEvent]:
    """Up to the terminal entry. Raises StreamLost for a gap."""
    found: list[StreamEvent] = []
    next_index = 0
    for event in events:
        if event.index > next_index:
            raise StreamLost(f"token {next_index} is missing from the stream")
        if isinstance(event, TerminalEvent):
            return [*found, event]
        if (fresh := from_index(event, next_index)) is not None:
            found.append(fresh)
            next_index = fresh.index + len(fresh.token_ids)
    return found

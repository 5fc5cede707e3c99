"""Streams written by hand, and a reader that is turned by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from redis import Redis

from bridge.reader import Reader
from bridge.subscription import Subscription
from tasks import keys
from tasks.contract import EndState, StreamEvent, encode_terminal, entry_id, pack_tokens
from tests.conftest import RedisServer


class Lease:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_live = True

    def reader_heartbeat(self, reader: str, lease_ms: int) -> bool:
        self.calls.append(f"{reader} {lease_ms}")
        return self.is_live

    def attach(self, request_ids: Sequence[str], reader: str) -> None:
        self.calls.append(f"{reader} reads {' '.join(request_ids)}")

    def reader_leave(self, reader: str) -> None:
        self.calls.append(f"{reader} left")


class Streams:
    """One reader, and the streams of the requests "a", "b", ...; every record exists unless a test deletes it."""

    def __init__(self, server: RedisServer, **options: Any) -> None:
        self.redis: Redis = server.connect()
        self.lease = Lease()
        self.now_s = 0.0
        self.reader = Reader(
            server.connect("blocking"), self.redis, "r1", self.lease, **{"window": 4, "block_ms": None, **options}
        )
        self.reader.bind(asyncio.get_running_loop())

    def open(self, request_id: str, after_index: int = -1) -> Subscription:
        self.redis.hset(keys.request(request_id), "state", "offered")
        return self.reader.subscribe(request_id, after_index)

    def append(self, request_id: str, index: int, *token_ids: int, attempt: int = 1) -> None:
        self.redis.xadd(keys.out(request_id), {"t": pack_tokens(token_ids)}, id=entry_id(index, attempt))

    def end(self, request_id: str, index: int, state: EndState = "finished", attempt: int = 1) -> None:
        self.redis.xadd(keys.out(request_id), {"e": encode_terminal(state, "stop")}, id=entry_id(index, attempt))

    async def turn(self) -> bool:
        reached = self.reader.tick(self.now_s)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return reached


def ready(subscription: Subscription) -> list[StreamEvent]:
    """What `next` gives without waiting; an empty list if it would wait."""
    waiting = subscription.next(3600)
    try:
        waiting.send(None)
    except StopIteration as done:
        events: list[StreamEvent] = done.value
        return events
    waiting.close()
    return []


def run(server: RedisServer, test: Callable[[Streams], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        streams = Streams(server, **options)
        try:
            await test(streams)
        finally:
            streams.reader.stop()

    asyncio.run(main())

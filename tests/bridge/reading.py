"""Streams written by hand, and a reader that is turned by hand."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redis import Redis

from bridge.streams.reader import Reader
from bridge.streams.subscription import Subscription
from bridge.streams.xread import Entries
from tasks.protocol import keys
from tasks.protocol.contract import (
    EndState,
    StreamEvent,
    TerminalEvent,
    TokenEvent,
    encode_terminal,
    entry_id,
    pack_source,
    pack_step,
    pack_tokens,
)
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
        self.reads: list[list[str]] = []
        """What each read so far has named: "a" for the stream of request "a", "w1:steps" for the log of "w1"."""
        self._note_reads()

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *error: object) -> None:
        self.reader.stop()

    def open(self, request_id: str, after_index: int = -1) -> Subscription:
        self.redis.hset(keys.request(request_id), "state", "offered")
        return self.reader.subscribe(request_id, after_index)

    def append(
        self, request_id: str, index: int, *token_ids: int, attempt: int = 1, source: tuple[str, int] | None = None
    ) -> None:
        """`source`: worker and slot of the tokens after these."""
        fields = {"t": pack_tokens(token_ids)} | ({} if source is None else {"s": pack_source(*source)})
        self.redis.xadd(keys.out(request_id), fields, id=entry_id(index, attempt))  # type: ignore[arg-type]

    def step(self, worker: str, number: int, *tokens: tuple[int, int, int]) -> None:
        """An entry of a worker's log: (slot, index, token id) each."""
        self.redis.xadd(
            keys.steps(worker), {"s": pack_step(tokens)}, f"{number}-0", maxlen=keys.STEPS_KEPT, approximate=False
        )

    def notice(self, request_id: str) -> None:
        """The request has ended, or was moved."""
        self.redis.xadd(keys.control("r1"), {"o": request_id})

    def end(self, request_id: str, index: int, state: EndState = "finished", attempt: int = 1) -> None:
        self.redis.xadd(keys.out(request_id), {"e": encode_terminal(state, "stop")}, id=entry_id(index, attempt))

    @property
    def last_read(self) -> list[str]:
        return self.reads[-1]

    def _note_reads(self) -> None:
        read = self.reader._xread.read

        def noting(positions: Mapping[bytes, bytes], *how: Any) -> list[tuple[bytes, Entries]]:
            names = [re.sub(r"tf:(worker:|\{)?|\}:out", "", key.decode()) for key in positions]
            self.reads.append([name for name in names if name != "control:r1"])
            return read(positions, *how)

        self.reader._xread.read = noting  # type: ignore[method-assign]

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


class Taker:
    """A subscriber of a random test, and what it got: contiguous from its start, and nothing after the end."""

    def __init__(self, subscription: Subscription, start: int) -> None:
        self.subscription, self.start = subscription, start
        self.got: list[int] = []
        self.end: TerminalEvent | None = None

    def take(self) -> None:
        """All that is there."""
        for event in ready(self.subscription):
            assert self.end is None
            if isinstance(event, TerminalEvent):
                self.end = event
            else:
                assert event.index == self.start + len(self.got)
                self.got += event.token_ids


def tokens(events: Iterable[StreamEvent]) -> list[int]:
    """Their token ids; the events must be tokens, with contiguous indices."""
    found: list[int] = []
    first: int | None = None
    for event in events:
        assert isinstance(event, TokenEvent)
        first = event.index if first is None else first
        assert event.index == first + len(found)
        found += event.token_ids
    return found

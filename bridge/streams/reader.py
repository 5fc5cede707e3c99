"""One thread that reads all that the subscribers of this web process wait for, with one blocking XREAD.

Owns the reading, and the bounded window of each subscriber. Refuses to know which streams that takes and who gets
what (`bridge.streams.following`), what tokens mean and where they go. A subscriber that does not keep up is taken out
of the read; once it has emptied its window it is read again from its last entry: Redis is the buffer.

The thread turns `tick()`; everything that subscribers see happens on the event loop, by one
`call_soon_threadsafe` a batch, once the next read is on its way. An entry on the control stream makes a blocked read
start again with the new list: a wake-up (`bridge.streams.waker`), or the notice that a request has ended or was
moved, whose own stream must be read now. Should a notice be lost, the heartbeat finds what it told: it reads the own
streams of all.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import RedisError

from bridge.streams.events import StreamLost
from bridge.streams.feed import Arrivals, Feed, deliver, layers_of
from bridge.streams.following import Following
from bridge.streams.history import History
from bridge.streams.subscription import Subscription, Waiting
from bridge.streams.waker import Waker
from bridge.streams.xread import Entries, Xread
from tasks.observe.metrics import RECONNECTS, REREADS, Meter
from tasks.protocol import keys
from tasks.protocol.contract import ContractError
from tasks.protocol.record import READER_LEASE_MS, RequestRecords

log = logging.getLogger(__name__)

MAX_BLOCK_S = 0.5
"""For the blocking client: a reply that never comes must be given up well before the lease is over."""
HEARTBEAT_S = 1.0
MAX_ENTRIES = 64
"""Of one stream in one read: with the window it bounds what a subscriber can have in memory."""


class Reader:
    def __init__(
        self,
        redis_blocking: Any,
        redis_short: Any,
        reader_id: str,
        lease: RequestRecords,
        *,
        window: int = 512,
        block_ms: int | None = int(MAX_BLOCK_S * 1000),
        lease_ms: int = READER_LEASE_MS,
        heartbeat_s: float = HEARTBEAT_S,
        outage_limit_s: float = 10.0,
    ) -> None:
        self.reader_id = reader_id
        self.meter = Meter(reader_id)
        """The numbers of this process."""
        self._rereads = self.meter.counter(REREADS)
        self.meter.counter(RECONNECTS)
        self.window = window
        self.history = History(redis_short)
        """What is there already, for those who do not wait for more."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._xread = Xread(redis_blocking, count=MAX_ENTRIES)
        self._short = redis_short
        self._lease = lease
        self._block_ms = block_ms
        self._lease_ms = lease_ms
        self._heartbeat_s = heartbeat_s
        self._outage_limit_s = outage_limit_s
        self._waker = Waker(redis_short, reader_id)
        self._control = self._waker.control
        self._control_position = b"0-0"
        self._batch: Arrivals = []
        """Read and not handed over yet."""
        # The loop appends, the thread takes: True adds the feed, False removes it.
        self._changes: deque[tuple[bool, Feed]] = deque()
        self._following = Following()
        self._wake_pending = False
        self._last_heartbeat_s = float("-inf")
        self._outage_since_s: float | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # Called on the event loop.

    @property
    def num_feeds(self) -> int:
        """Subscribers that were in the last read."""
        return len(self._following.feeds)

    def subscribe(
        self, request_id: str, after_index: int = -1, waiting: Waiting | None = None, num_sharing: int = 1
    ) -> Subscription:
        """Events of `request_id` with token index > `after_index`, from any position, as often as wanted."""
        return Subscription(self, request_id, after_index, waiting, num_sharing)

    def add(self, subscription: Subscription, position: bytes, before: Feed | None) -> Feed:
        """`before` is the feed that the subscription had until now."""
        feed = Feed(
            subscription.request_id, position, subscription.next_index, subscription.accept, subscription.fail, before
        )
        self._changes.append((True, feed))
        self._wake()
        return feed

    def remove(self, feed: Feed) -> None:
        """The next read leaves it out; a read that is under way may still bring a batch, which is dropped."""
        self._changes.append((False, feed))

    def reread(self) -> None:
        """A stream is taken up again that was not read for a while, or has a gap."""
        self._rereads.value += 1

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "the reader is bound to a loop before anybody subscribes"
        return self._loop

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop on which subscribers live."""
        self._loop = loop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.bind(loop)
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def stop(self, *, keep_lease: bool = False) -> None:
        """Ends the thread (waits for it) and gives the lease back, unless requests are left for the watchdog."""
        self._stopping.set()
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout=2)
        if self._thread is None or not self._thread.is_alive():
            self._xread.close()
        self._waker.close()
        if keep_lease:
            return
        try:
            self._lease.reader_leave(self.reader_id)
        except RedisError as error:
            log.warning("%s reader lease not given back: %s", self.reader_id, error)

    # Called on the reader's thread.

    def tick(self, now_s: float) -> bool:
        """One read of everything, handed over. False when Redis could not be reached. `now_s` is monotonic time."""
        try:
            return self._read_once(now_s)
        finally:
            # Also what came before an error: it will not be read again.
            self._hand_over()

    def _read_once(self, now_s: float) -> bool:
        """`tick`, but what a read has brought is handed over by the next one, after it has asked for more.

        PERF: the loop has the processor, and the GIL, to itself for what it does with a batch.
        """
        self._take_changes()
        try:
            if now_s - self._last_heartbeat_s >= self._heartbeat_s:
                self._hand_over()
                self._beat()
                self._last_heartbeat_s = now_s
                self._read_all(is_complete=True)
            else:
                self._read_all(is_complete=False)
        except RedisError as error:
            self._hand_over()
            self._note_outage(now_s, error)
            return False
        if self._outage_since_s is not None:
            self._outage_since_s = None
            self.meter.count(RECONNECTS)
        return True

    def _run(self) -> None:
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                reached = self._read_once(started_s)
            except Exception as error:
                self._hand_over()
                if self._stopping.is_set():
                    return
                log.exception("%s reader failed", self.reader_id)
                self._fail_all(StreamLost(f"the reader failed: {error}"))
                reached = False
            if not reached:
                self._stopping.wait(0.1)

    def _hand_over(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, []
            self.loop.call_soon_threadsafe(deliver, batch)

    def _take_changes(self) -> None:
        self._wake_pending = False
        while self._changes:
            is_added, feed = self._changes.popleft()
            if is_added:
                self._following.add(feed)
            else:
                self._following.remove(feed)

    def _read_all(self, is_complete: bool) -> None:
        """`is_complete`: the own streams of those that are live, too."""
        is_changed = self._following.arrange()
        if is_complete and self._following.has_live:
            self._read(layers_of(self._following.feeds), block=False)
            return
        layers = self._following.layers
        self._read(layers, block=not (is_changed and len(layers) > 1))

    def _read(self, layers: Sequence[dict[bytes, Feed]], block: bool) -> None:
        """Of one reply, first what has ended, then what the requests' own streams have, then the logs: as listed."""
        for number, layer in enumerate(layers):
            positions = {key: feed.position for key, feed in layer.items()}
            if number == 0:
                positions = {self._control: self._control_position, **positions, **self._following.logs()}
            block_ms = self._block_ms if block and number == 0 else None
            for key, entries in self._xread.read(positions, block_ms, self._hand_over if block else None):
                if key == self._control:
                    self._take_control(entries)
                elif (feed := layer.get(key)) is not None:
                    self._take_out(feed, entries)
                else:
                    self._batch += self._following.take_log(key, entries)

    def _take_control(self, entries: Entries) -> None:
        self._control_position = entries[-1][0]
        over = {keys.out(fields[1].decode()).encode() for _, fields in entries if fields[0] == b"o"}
        if over:
            self._following.attempt_over(over)

    def _take_out(self, feed: Feed, entries: Entries) -> None:
        try:
            events = self._following.take_out(feed, entries)
        except ContractError as error:
            log.error("%s unreadable entry: %s", feed.request_id, error)
            self._fail([feed], StreamLost(f"the stream holds an entry that cannot be read: {error}"))
            return
        if events:
            self._batch.append((feed, events, feed.position))

    def _beat(self) -> None:
        feeds = self._following.feeds
        if not self._lease.reader_heartbeat(self.reader_id, self._lease_ms) and feeds:
            # The lease was over: what was only waiting for a reader must know that it still has one.
            self._lease.attach([feed.request_id for feed in feeds], self.reader_id)
        self._fail_vanished()

    def _fail_vanished(self) -> None:
        """A record that is gone (Redis lost its data, or it expired) will never end: its readers are told now."""
        feeds = list(self._following.feeds)
        if not feeds:
            return
        names = [keys.request(feed.request_id) for feed in feeds]
        if self._short.exists(*names) == len(names):
            return
        pipeline = self._short.pipeline(transaction=False)
        for name in names:
            pipeline.exists(name)
        gone = [feed for feed, exists in zip(feeds, pipeline.execute(), strict=True) if not exists]
        self._fail(gone, StreamLost("the request is no longer known to the queue"))

    def _note_outage(self, now_s: float, error: RedisError) -> None:
        self._waker.doubt()
        if self._outage_since_s is None:
            self._outage_since_s = now_s
            log.warning("%s Redis not reachable: %s", self.reader_id, error)
        elif now_s - self._outage_since_s >= self._outage_limit_s:
            self._fail_all(StreamLost(f"the queue has not been reachable for {self._outage_limit_s:g} s"))

    def _fail_all(self, error: StreamLost) -> None:
        self._take_changes()
        self._fail(list(self._following.feeds), error)

    def _fail(self, feeds: Iterable[Feed], error: StreamLost) -> None:
        for feed in feeds:
            self._following.remove(feed)
            self.loop.call_soon_threadsafe(feed.fail, error)

    def _wake(self) -> None:
        if self._wake_pending or self._block_ms is None:
            return
        self._wake_pending = True
        self._waker.wake()

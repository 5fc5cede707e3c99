"""One subscriber's bounded window on one request's stream, on the event loop.

Owns the order: token indices are contiguous from where the subscription began, repeats are cut away, and a gap that
is still there on a second look ends the subscription with an error. Refuses to know how streams are read
(`bridge.streams.reader`) and what happens to the events. `fail` is the one way in which anything else (a client that
left, a shutdown, a lost stream) ends the wait. Several subscriptions can share one wait (`bridge.streams.choices`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from bridge.streams.events import StreamLost, from_index
from tasks.protocol.contract import StreamEvent, TerminalEvent

log = logging.getLogger(__name__)

START = b"0-0"


class Reading(Protocol):
    """`bridge.streams.reader.Reader`, which imports this file. Its feeds are tokens that are given back."""

    window: int

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    def add(self, subscription: Subscription, position: bytes, before: Any) -> Any: ...
    def remove(self, feed: Any) -> None: ...
    def reread(self) -> None: ...


class Waiting:
    """One task's wait for events, with a time-out, as often as wanted."""

    __slots__ = ("_deadline_s", "_future", "_loop", "_timeout_s", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_s = 0.0
        self._deadline_s = 0.0

    @property
    def is_on(self) -> bool:
        return self._future is not None

    async def wait(self, timeout_s: float) -> None:
        """Until `end`, or for `timeout_s`, which `extend` starts anew."""
        # PERF: one timer that is moved on when it fires costs a tenth of a timer a wait.
        self._timeout_s = timeout_s
        self._deadline_s = self._loop.time() + timeout_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline_s, self._on_timer)
        self._future = self._loop.create_future()
        try:
            await self._future
        finally:
            self._future = None

    def extend(self) -> None:
        self._deadline_s = self._loop.time() + self._timeout_s

    def end(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def close(self) -> None:
        """No more waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._future is None:
            return
        if self._loop.time() < self._deadline_s:
            self._timer = self._loop.call_at(self._deadline_s, self._on_timer)
        else:
            self.end()


class Subscription:
    """Use: `next` until it has given the TerminalEvent, then or earlier `close`."""

    def __init__(
        self, reader: Reading, request_id: str, after_index: int, waiting: Waiting | None = None, num_sharing: int = 1
    ) -> None:
        """`waiting`, and the reader's window, are shared by `num_sharing` subscriptions of the same task."""
        self.request_id = request_id
        self.next_index = after_index + 1
        self._reader = reader
        self._window = max(1, reader.window // num_sharing)
        self._waiting = Waiting(reader.loop) if waiting is None else waiting
        self._events: list[StreamEvent] = []
        self._num_tokens = 0
        self._position = START
        self._error: Exception | None = None
        self.on_first_token: Callable[[], None] | None = None
        """Called once, when the first tokens are there."""
        self.direct: Callable[[list[StreamEvent]], bool] | None = None
        """Offered each batch while somebody waits in `next`; True: it took the batch, and the wait goes on."""
        # None while this subscriber lags (its window is full) and after the end.
        self._feed: Any = reader.add(self, START, None)
        self._last_feed = self._feed
        self._has_ended = False
        self._gap_at: int | None = None

    @property
    def is_lagging(self) -> bool:
        return self._feed is None and not self._has_ended

    @property
    def is_ready(self) -> bool:
        """Whether `take` has something to give, or to raise."""
        return bool(self._events) or self._error is not None

    async def next(self, timeout_s: float) -> list[StreamEvent]:
        """All events that are there; waits for the first one. An empty list after `timeout_s` without any.

        Raises what `fail` was given, at once.
        """
        if not self.is_ready:
            await self._waiting.wait(timeout_s)
        return self.take()

    def take(self) -> list[StreamEvent]:
        """All events that are there, without waiting. Raises what `fail` was given."""
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        self._num_tokens = 0
        if self.is_lagging:
            self._reader.reread()
            self._follow(self._position)
        return events

    def fail(self, error: Exception) -> None:
        """Every wait, this one and later ones, raises `error`. The first error stays."""
        if self._error is None:
            self._error = error
            self._detach()
            self._waiting.end()

    def close(self) -> None:
        """No further reads for this subscriber. Idempotent."""
        self._has_ended = True
        self._detach()
        self._waiting.close()

    def accept(self, feed: Any, events: list[StreamEvent], position: bytes) -> None:
        """Called by the reader, on the event loop. A batch of a feed that was replaced is dropped."""
        if feed is not self._feed:
            return
        for event in events:
            if event.index > self.next_index:
                self._gap(event)
                return
            if isinstance(event, TerminalEvent):
                self._events.append(event)
                self._has_ended = True
                self._detach()
                break
            if event.index != self.next_index:
                fresh = from_index(event, self.next_index)
                if fresh is None:
                    continue
                event = fresh
            num_tokens = len(event.token_ids)
            self._events.append(event)
            self.next_index += num_tokens
            self._num_tokens += num_tokens
        self._position = position
        if self._num_tokens >= self._window:
            self._detach()
        if self._events:
            self._hand_over()

    def _hand_over(self) -> None:
        if self.on_first_token is not None and self._num_tokens:
            self.on_first_token()
            self.on_first_token = None
        # PERF: waking a task for each token costs more than everything else that is done with it.
        direct = self.direct
        if direct is not None and self._waiting.is_on and self._feed is not None and direct(self._events):
            self._events = []
            self._num_tokens = 0
            self._waiting.extend()
            return
        self._waiting.end()

    def _gap(self, event: StreamEvent) -> None:
        if self._gap_at == self.next_index:
            log.error("%s expected index %d, the stream has %d", self.request_id, self.next_index, event.index)
            self.fail(StreamLost(f"token {self.next_index} is missing from the stream"))
            return
        # A Redis that lost its last second gets those tokens again, perhaps in entries that begin before our
        # position: read the stream from its start, once; what is known already is cut away.
        self._gap_at = self.next_index
        self._detach()
        self._reader.reread()
        self._follow(START)

    def _follow(self, position: bytes) -> None:
        self._feed = self._last_feed = self._reader.add(self, position, self._last_feed)

    def _detach(self) -> None:
        if self._feed is not None:
            self._reader.remove(self._feed)
            self._feed = None

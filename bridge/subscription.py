"""One subscriber's bounded window on one request's stream, on the event loop.

Owns the order: token indices are contiguous from where the subscription began, repeats are cut away, and a gap that
is still there on a second look ends the subscription with an error. Refuses to know how streams are read
(`bridge.reader`) and what happens to the events. `fail` is the one way in which anything else (a client that left, a
shutdown, a lost stream) ends the wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tasks.contract import StreamEvent, TerminalEvent, TokenEvent

if TYPE_CHECKING:
    from bridge.feeds import Feed
    from bridge.reader import Reader

logger = logging.getLogger(__name__)

START = b"0-0"


class StreamLost(Exception):
    """The rest of a stream cannot be read; the message says why. The caller must tell its client."""


class Subscription:
    """Use: `next` until it has given the TerminalEvent, then or earlier `close`."""

    def __init__(self, reader: Reader, request_id: str, after_index: int) -> None:
        self.request_id = request_id
        self.next_index = after_index + 1
        self._reader = reader
        self._events: list[StreamEvent] = []
        self._num_tokens = 0
        self._position = START
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_s = 0.0
        self._deadline_s = 0.0
        self.direct: Callable[[list[StreamEvent]], bool] | None = None
        """Offered each batch while somebody waits in `next`; True: it took the batch, and the wait goes on."""
        # None while this subscriber lags (its window is full) and after the end.
        self._feed: Feed | None = reader.add(self, START)
        self._has_ended = False
        self._gap_at: int | None = None

    @property
    def is_lagging(self) -> bool:
        return self._feed is None and not self._has_ended

    async def next(self, timeout_s: float) -> list[StreamEvent]:
        """All events that are there; waits for the first one. An empty list after `timeout_s` without any.

        Raises what `fail` was given, at once.
        """
        if self._error is None and not self._events:
            await self._wait(timeout_s)
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        self._num_tokens = 0
        if self.is_lagging:
            self._feed = self._reader.add(self, self._position)
        return events

    def fail(self, error: Exception) -> None:
        """Every wait, this one and later ones, raises `error`. The first error stays."""
        if self._error is None:
            self._error = error
            self._detach()
            self._notify()

    def close(self) -> None:
        """No further reads for this subscriber. Idempotent."""
        self._has_ended = True
        self._detach()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def accept(self, feed: Feed, events: list[StreamEvent], position: bytes) -> None:
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
            self._accept_tokens(event)
        self._position = position
        if self._num_tokens >= self._reader.window:
            self._detach()
        if self._events:
            self._hand_over()

    def _hand_over(self) -> None:
        # PERF: waking a task for each token costs more than everything else that is done with it.
        can_be_direct = self.direct is not None and self._waiter is not None and self._feed is not None
        if can_be_direct and self.direct is not None and self.direct(self._events):
            self._events = []
            self._num_tokens = 0
            self._deadline_s = self._reader.loop.time() + self._timeout_s
            return
        self._notify()

    def _accept_tokens(self, event: TokenEvent) -> None:
        num_known = self.next_index - event.index
        token_ids = event.token_ids
        if num_known:
            token_ids = token_ids[num_known:]
            if not token_ids:
                return
            event = TokenEvent(self.next_index, event.attempt, token_ids, event.logprobs[num_known:])
        self._events.append(event)
        self.next_index += len(token_ids)
        self._num_tokens += len(token_ids)

    def _gap(self, event: StreamEvent) -> None:
        if self._gap_at == self.next_index:
            logger.error("%s expected index %d, the stream has %d", self.request_id, self.next_index, event.index)
            self.fail(StreamLost(f"token {self.next_index} is missing from the stream"))
            return
        # A Redis that lost its last second gets those tokens again, perhaps in entries that begin before our
        # position: read the stream from its start, once; what is known already is cut away.
        self._gap_at = self.next_index
        self._detach()
        self._feed = self._reader.add(self, START)

    async def _wait(self, timeout_s: float) -> None:
        loop = self._reader.loop
        # PERF: one timer that is moved on when it fires costs a tenth of a timer a wait.
        self._timeout_s = timeout_s
        self._deadline_s = loop.time() + timeout_s
        if self._timer is None:
            self._timer = loop.call_at(self._deadline_s, self._on_timer)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._reader.loop.time() < self._deadline_s:
            self._timer = self._reader.loop.call_at(self._deadline_s, self._on_timer)
        else:
            self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _detach(self) -> None:
        if self._feed is not None:
            self._reader.remove(self._feed)
            self._feed = None

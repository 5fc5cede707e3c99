"""One request's stream to server-sent events: what a streaming HTTP response iterates over.

Owns the order of an answer (opening, text, ending or one error event), the keep-alive comments and the clean-up.
Refuses to know what the bytes say: `render` comes from the caller. It never raises into the HTTP server, which
would cut the response silently: whatever goes wrong becomes an error event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from bridge.sse import KEEP_ALIVE
from bridge.subscription import Subscription
from tasks.contract import StreamEvent, TerminalEvent, TokenEvent

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """Nobody is there to read the answer any more: stop, and send nothing."""


class Renderer(Protocol):
    """Makes the bytes of one answer. Empty bytes mean that there is nothing to send yet."""

    def opening(self) -> bytes: ...
    def tokens(self, events: list[TokenEvent]) -> bytes: ...
    @property
    def is_satisfied(self) -> bool:
        """The answer is complete whatever the worker does next (a stop string was found)."""

    def ending(self, end: TerminalEvent) -> bytes: ...
    def failure(self, error: Exception) -> bytes: ...


class Outlet(Protocol):
    """A way to write to the client without waiting."""

    @property
    def is_ready(self) -> bool:
        """Whether the client keeps up; if not, the HTTP server's own way is taken, which waits for it."""

    def write(self, data: bytes) -> None: ...


class Relay:
    """An async iterator of response bytes, for one client, over one subscription.

    `close_request(state, reason)` ends the generation; it must not block. It is called when a stop string was
    found, when the client left, and when the answer failed on this side.
    """

    def __init__(
        self,
        subscription: Subscription,
        renderer: Renderer,
        close_request: Callable[[str, str], None],
        *,
        keep_alive_s: float = 10.0,
        outlet: Outlet | None = None,
    ) -> None:
        self._subscription = subscription
        self._renderer = renderer
        self._close_request = close_request
        self._keep_alive_s = keep_alive_s
        self._outlet = outlet
        self._is_opened = False
        self._is_over = False
        self._is_stopped = False

    def __aiter__(self) -> Relay:
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        if not self._is_opened:
            self._is_opened = True
            return self._renderer.opening()
        # By now the HTTP server has sent what came before.
        if self._outlet is not None:
            self._subscription.direct = self._write_through
        try:
            return await self._advance()
        except ClientGone:
            self.finish()
            raise StopAsyncIteration from None
        except asyncio.CancelledError:
            self.finish()
            raise
        except Exception as error:
            return self._fail(error)

    async def close(self) -> None:
        """Falcon's name for `finish`."""
        self.finish()

    def finish(self) -> None:
        """To be called at the end, whatever the end was. An unfinished answer is cancelled. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._subscription.close()
            if not self._is_stopped:
                self._close_request("cancelled", "disconnect")

    async def _advance(self) -> bytes:
        while True:
            events = await self._subscription.next(self._keep_alive_s)
            if not events:
                return KEEP_ALIVE
            end = events.pop() if isinstance(events[-1], TerminalEvent) else None
            data = self._render(events, close=end is None)
            if isinstance(end, TerminalEvent):
                self._is_over = True
                self._subscription.close()
                return data + self._renderer.ending(end)
            if data:
                return data

    def _render(self, events: list[StreamEvent], close: bool) -> bytes:
        if self._is_stopped or not events:
            return b""
        data = self._renderer.tokens(events)  # type: ignore[arg-type]
        if self._renderer.is_satisfied:
            self._is_stopped = True
            if close:
                self._close_request("finished", "stop")
        return data

    def _write_through(self, events: list[StreamEvent]) -> bool:
        """The short way for tokens: straight to the client. False: the task has to do it."""
        assert self._outlet is not None
        if not self._outlet.is_ready or isinstance(events[-1], TerminalEvent):
            return False
        try:
            if data := self._render(events, close=True):
                self._outlet.write(data)
        except Exception as error:
            self._subscription.fail(error)
        return True

    def _fail(self, error: Exception) -> bytes:
        logger.warning("%s answer failed: %r", self._subscription.request_id, error)
        self._is_over = True
        self._subscription.close()
        if not self._is_stopped:
            self._close_request("cancelled", getattr(error, "reason", "reader_lost"))
        return self._renderer.failure(error)

"""The streams of one answer to server-sent events: what a streaming HTTP response iterates over.

Owns the order of an answer (opening, the text of its choices as it comes, ending or one error event), the keep-alive
comments and the clean-up. Refuses to know what the bytes say: `render` comes from the caller. It never raises into
the HTTP server, which would cut the response silently: whatever goes wrong becomes an error event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from bridge.streams.choices import ChoiceStreams
from bridge.streams.sse import KEEP_ALIVE
from tasks.protocol.contract import EndState, StreamEvent, TerminalEvent, TokenEvent

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 4.0
"""Twice of it is less than the read time-outs of proxies that people set: 10 s at the least, 60 s by default."""


class ClientGone(Exception):
    """Nobody is there to read the answer any more: stop, and send nothing."""


class Renderer(Protocol):
    """Makes the bytes of one answer. Empty bytes mean that there is nothing to send yet."""

    def opening(self) -> bytes: ...
    def tokens(self, choice: int, events: list[TokenEvent]) -> bytes: ...
    def is_satisfied(self, choice: int) -> bool:
        """The choice is complete whatever the worker does next (a stop string was found)."""

    def ended(self, choice: int, end: TerminalEvent) -> bytes:
        """The rest of a choice, and how it finished."""

    def failed(self, choice: int, end: TerminalEvent) -> bytes:
        """The rest of a choice that did not finish, and the error that ends the whole answer."""

    def closing(self) -> bytes:
        """What follows when all choices have finished."""

    def failure(self, error: Exception) -> bytes: ...


class Control(Protocol):
    """Ends generations. Must not block."""

    def close(self, choice: int, state: EndState, reason: str) -> None:
        """Ends a choice for everybody."""

    def leave(self, choices: Sequence[int]) -> None:
        """This reader reads these no further; without any other reader they end."""


class Outlet(Protocol):
    """A way to write to the client without waiting."""

    @property
    def is_ready(self) -> bool:
        """Whether the client keeps up; if not, the HTTP server's own way is taken, which waits for it."""

    def write(self, data: bytes) -> None: ...


class Relay:
    """An async iterator of response bytes, for one client, over the streams of one answer.

    A choice is closed when its stop string was found, and when another one has failed; all that is not over is left
    when the client left, and when the answer failed on this side.
    """

    def __init__(
        self,
        streams: ChoiceStreams,
        renderer: Renderer,
        control: Control,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        outlet: Outlet | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._renderer = renderer
        self._control = control
        self._keep_alive_s = keep_alive_s
        self._outlet = outlet
        self._clock = clock
        self._spoke_s = clock()
        self.num_bytes_written = 0
        """Through the outlet."""
        self._is_opened = False
        self._is_over = False
        self._open = set(range(len(streams)))
        """Choices without a terminal entry."""
        self._satisfied: set[int] = set()

    def __aiter__(self) -> Relay:
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        if not self._is_opened:
            self._is_opened = True
            if opening := self._renderer.opening():
                return opening
        if self._outlet is not None:
            # By now the HTTP server has sent what came before.
            for choice, subscription in enumerate(self._streams.subscriptions):
                if subscription.direct is None:
                    subscription.direct = partial(self._write_through, choice)
        try:
            return await self._advance()
        except ClientGone:
            self.finish()
            raise StopAsyncIteration from None
        except asyncio.CancelledError:
            self.finish()
            raise
        except Exception as error:
            log.warning("%s answer failed: %r", self._streams.request_id, error)
            self.finish()
            return self._renderer.failure(error)

    async def close(self) -> None:
        """Falcon's name for `finish`."""
        self.finish()

    def finish(self) -> None:
        """To be called at the end, whatever the end was. What is not over is left. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._streams.close()
            # One that is satisfied has been closed, and the two must not overtake each other.
            if left := sorted(self._open - self._satisfied):
                self._control.leave(left)

    async def _advance(self) -> bytes:
        while True:
            batches = await self._streams.next(self._keep_alive_s)
            if not batches:
                self._spoke_s = self._clock()
                return KEEP_ALIVE
            data = b""
            for choice, events in batches:
                end = events.pop() if isinstance(events[-1], TerminalEvent) else None
                data += self._render(choice, events, close=end is None)
                if isinstance(end, TerminalEvent):
                    data += self._end(choice, end)
                    if self._is_over:
                        return data
            if data := self._audible(data):
                return data

    def _audible(self, data: bytes) -> bytes:
        """`data`; a comment where there is none, and has been none for long though tokens came.

        Text is held back while it may become a stop string or a call. Together with the waits the client hears
        something every two keep-alive times at least.
        """
        now_s = self._clock()
        if not data and now_s - self._spoke_s >= self._keep_alive_s:
            data = KEEP_ALIVE
        if data:
            self._spoke_s = now_s
        return data

    def _render(self, choice: int, events: list[StreamEvent], close: bool) -> bytes:
        if not events or choice in self._satisfied:
            return b""
        data = self._renderer.tokens(choice, events)  # type: ignore[arg-type]
        if self._renderer.is_satisfied(choice):
            self._satisfied.add(choice)
            if close:
                self._control.close(choice, "finished", "stop")
        return data

    def _end(self, choice: int, end: TerminalEvent) -> bytes:
        self._open.discard(choice)
        if end.state != "finished" and choice not in self._satisfied:
            self._is_over = True
            self._streams.close()
            close_others(self._control, self._open - self._satisfied, end)
            return self._renderer.failed(choice, end)
        data = self._renderer.ended(choice, end)
        if not self._open:
            self._is_over = True
            self._streams.close()
            data += self._renderer.closing()
        return data

    def _write_through(self, choice: int, events: list[StreamEvent]) -> bool:
        """The short way for tokens: straight to the client. False: the task has to do it."""
        assert self._outlet is not None
        if not self._outlet.is_ready or isinstance(events[-1], TerminalEvent):
            return False
        try:
            if data := self._audible(self._render(choice, events, close=True)):
                self.num_bytes_written += len(data)
                self._outlet.write(data)
        except Exception as error:
            self._streams.fail(error)
        return True


def close_others(control: Control, choices: Iterable[int], end: TerminalEvent) -> None:
    """One choice ended without finishing: the answer cannot be completed, so the others are not needed any more."""
    reason = end.reason if end.state == "cancelled" else "other_choice_failed"
    for choice in sorted(choices):
        control.close(choice, "cancelled", reason)

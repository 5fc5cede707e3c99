"""The outermost ASGI layer: knows at any moment whether the client is still there, and whether it is reading.

Owns one `Connection` for each HTTP exchange, put into the scope. Refuses to know what the exchange is about. An
ASGI application only learns of a disconnect by calling `receive`, which nobody does while an answer is generated;
so the first `on_gone` starts a task that does. A client that leaves a send blocked beyond the stall limit counts as
gone, and its socket is aborted: closing it would wait for the unread bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

CONNECTION = "tokenferry.connection"
ABORT = "tokenferry.abort"
"""Scope key of a function that drops the client's socket at once; set by our HTTP protocol (`app.server`)."""

ARRIVED_S = "tokenferry.arrived_s"
"""Scope key of the monotonic time at which the head of the request was read; set by our HTTP protocol."""

OUTLET = "tokenferry.outlet"
"""Scope key of a `bridge.streams.relay.Outlet` for a streamed body; set by our HTTP protocol, absent elsewhere."""


class Connection:
    """One HTTP exchange, as long as it lasts."""

    __slots__ = (
        "_abort",
        "_at_end",
        "_blocked_since_s",
        "_clock",
        "_on_gone",
        "_receive",
        "_send",
        "_watcher",
        "is_gone",
        "name",
        "num_bytes_sent",
    )

    def __init__(
        self, receive: Receive, send: Send, abort: Callable[[], None] | None, clock: Callable[[], float]
    ) -> None:
        self.is_gone = False
        self.name = "-"
        """The request id, once there is one: for the log."""
        self.num_bytes_sent = 0
        """Of the body, by `send`."""
        self._receive = receive
        self._send = send
        self._abort = abort
        self._clock = clock
        self._blocked_since_s: float | None = None
        self._on_gone: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._watcher: asyncio.Task[None] | None = None

    def on_gone(self, callback: Callable[[], None]) -> None:
        """`callback` runs once when the client leaves; now, if it has left. Call after the body has been read."""
        if self.is_gone:
            callback()
            return
        self._on_gone.append(callback)
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def at_end(self, callback: Callable[[], None]) -> None:
        """`callback` runs once when the exchange is over, however it ended."""
        self._at_end.append(callback)

    async def send(self, message: Message) -> None:
        self._blocked_since_s = self._clock()
        self.num_bytes_sent += len(message.get("body", b""))
        try:
            await self._send(message)
        finally:
            self._blocked_since_s = None

    def blocked_s(self, now_s: float) -> float:
        """For how long the present send has been waiting for the client to read."""
        return 0.0 if self._blocked_since_s is None else now_s - self._blocked_since_s

    def drop(self) -> None:
        """Gives the client up."""
        if self._abort is not None:
            self._abort()
        self._gone()

    def end(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._on_gone.clear()
        for callback in self._at_end:
            callback()
        self._at_end.clear()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _gone(self) -> None:
        self.is_gone = True
        callbacks, self._on_gone = self._on_gone, []
        for callback in callbacks:
            callback()


class DisconnectWatch:
    """Wraps an ASGI application; `sweep` is to be called every second or so."""

    def __init__(self, app: Asgi, *, stall_limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._stall_limit_s = stall_limit_s
        self._clock = clock
        self._open: set[Connection] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = Connection(receive, send, scope.get(ABORT), self._clock)
        scope[CONNECTION] = connection
        self._open.add(connection)
        try:
            await self._app(scope, receive, connection.send)
        finally:
            self._open.discard(connection)
            connection.end()

    def sweep(self, now_s: float) -> None:
        """Drops every client that has not read for longer than the stall limit."""
        for connection in list(self._open):
            if connection.blocked_s(now_s) >= self._stall_limit_s:
                log.info("%s client did not read for %g s: dropped", connection.name, self._stall_limit_s)
                connection.drop()

"""Our HTTP protocol and server: uvicorn's, with a way to drop a client, and a drain before the end.

Owns the listening socket's options, the limits of a connection's buffers, and what a signal does. Refuses to know the
application beyond its `drain`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.application import Application
from app.errors import malformed
from app.http.connection import ABORT, ARRIVED_S, OUTLET

log = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 128 * 1024
"""In the kernel, for each client (which doubles the figure); the default grows to 4 MB. In this process asyncio's
default holds: a send waits while more than 64 KB are unsent."""
KEEP_ALIVE_S = 75
"""Longer than the pools of clients and proxies keep a connection (5 s to 60 s), so that they close it, not we."""
DRAIN_S = 2.0
EXIT_S = 3.8
"""A process manager kills 5 s after SIGTERM; a thread that hangs in a call to Redis must not let it come to that."""


def listen(host: str, port: int, *, stall_limit_s: float) -> socket.socket:
    """A bound socket that several web processes can share. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections take these over from the socket that accepts them.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Ends a connection whose peer is gone without a word, or reads nothing.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_limit_s * 1000))
        listener.bind(address)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class BodyOutlet:
    """Writes parts of a streamed response body without a coroutine (`bridge.streams.relay.Outlet`).

    PERF: about 3 microseconds less for each part than ASGI's `send` through Falcon, in the warm case.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class OpenEndedSend:
    """ASGI's `send` to a client of HTTP/1.0, which knows no chunks: the end of a body is that of the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._is_open_ended = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._is_open_ended = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if self._is_open_ended:
                self._cycle.chunked_encoding = False
        elif self._is_open_ended:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class Protocol(HttpToolsProtocol):
    """One connection."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # The application starts later, as a task, and finds these in its scope.
        scope = cast(dict[str, Any], self.scope)
        scope[ARRIVED_S] = time.monotonic()
        scope[ABORT] = self.transport.abort
        scope[OUTLET] = BodyOutlet(self.cycle)
        if scope["http_version"] == "1.0":
            self.cycle.send = OpenEndedSend(self.cycle)  # type: ignore[method-assign]

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP request."""
        body = malformed(msg, "invalid_http").render()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()


class Server(uvicorn.Server):
    """Drains at the first SIGTERM or SIGINT: refuses what is new, finishes or ends what is open, then exits."""

    def __init__(self, application: Application, *, drain_s: float = DRAIN_S, exit_s: float | None = EXIT_S) -> None:
        super().__init__(
            Config(
                application,
                http=Protocol,
                loop="uvloop",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._application = application
        self._drain_s = drain_s
        self._exit_s = exit_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._is_ending = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            log.info("listening on http://%s:%d/v1", *listener.getsockname()[:2])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A process manager sends more than one signal: only the first means anything."""
        if self._is_ending or self._loop is None:
            return
        self._is_ending = True
        log.info("%s: draining %d answers", signal.Signals(sig).name, self._application.num_open)
        if self._exit_s is not None:
            deadline = threading.Timer(self._exit_s, os._exit, [0])
            deadline.daemon = True
            deadline.start()
        self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Begins the drain; call on the event loop."""
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._application.drain(self._drain_s)
        self.should_exit = True

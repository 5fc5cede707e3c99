"""A TCP proxy between the processes of a cell and Valkey, one link for each process, whose faults a test chooses.

Owns the links and what they do to bytes: pass them on, hold them, drop the connections, or lose one reply. Refuses
to know Redis, except that a request is found by bytes that it contains. Loopback only; one thread, one event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import uvloop

HOST = "127.0.0.1"
LIMIT_BYTES = 1 << 20

T = TypeVar("T")
After = Literal["cut", "mute"]
"""What becomes of the connection whose reply was lost: closed, or open and silent for ever."""


@dataclass(slots=True)
class Loss:
    """The reply to the next request that contains `needle` gets lost."""

    needle: bytes
    after: After
    happened: threading.Event = field(default_factory=threading.Event)


class Link:
    """The way of one process to Valkey. Made by `Proxy.link`; every method may be called from any thread."""

    def __init__(self, proxy: Proxy, name: str) -> None:
        self.name = name
        self.port = 0
        self._proxy = proxy
        self._pipes: set[Pipe] = set()
        self._flow = asyncio.Event()
        self._is_refusing = False
        self._losses: list[Loss] = []

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def num_connections(self) -> int:
        return len(self._pipes)

    def stall(self) -> None:
        """From now on nothing passes; connections stay open, and new ones are taken."""
        self._proxy.call(self._flow.clear)

    def flow(self) -> None:
        """Everything passes again, what was held first."""
        self._proxy.call(self._flow.set)

    def cut(self) -> None:
        """Close every connection, now."""
        self._proxy.call(self._cut)

    def refuse(self) -> None:
        """Close every connection, and every new one, until `accept`."""
        self._proxy.call(self._refuse, True)

    def accept(self) -> None:
        self._proxy.call(self._refuse, False)

    def lose_reply(self, needle: bytes, after: After) -> Loss:
        """Lose the reply to the next request that contains `needle`."""
        loss = Loss(needle, after)
        self._proxy.call(self._losses.append, loss)
        return loss

    def _cut(self) -> None:
        for pipe in list(self._pipes):
            pipe.close()

    def _refuse(self, is_refusing: bool) -> None:
        self._is_refusing = is_refusing
        if is_refusing:
            self._cut()

    def _loss_for(self, request: bytes) -> Loss | None:
        for loss in self._losses:
            if loss.needle in request:
                self._losses.remove(loss)
                return loss
        return None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            writer.close()
            return
        await self._flow.wait()
        try:
            there = await asyncio.open_unix_connection(self._proxy.target, limit=LIMIT_BYTES)
        except OSError:
            writer.close()
            return
        pipe = Pipe(self, (reader, writer), there)
        self._pipes.add(pipe)
        try:
            await pipe.run()
        finally:
            pipe.close()
            self._pipes.discard(pipe)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Pipe:
    """One connection, in both directions."""

    def __init__(self, link: Link, here: Ends, there: Ends) -> None:
        self._link = link
        self._here = here
        self._there = there
        self._loss: Loss | None = None
        self._is_mute = False

    async def run(self) -> None:
        ways = [asyncio.ensure_future(self._requests()), asyncio.ensure_future(self._replies())]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)

    def close(self) -> None:
        for _, writer in (self._here, self._there):
            writer.transport.abort()

    async def _requests(self) -> None:
        reader, writer = self._here[0], self._there[1]
        while data := await reader.read(LIMIT_BYTES):
            await self._link._flow.wait()
            if self._loss is None:
                self._loss = self._link._loss_for(data)
            writer.write(data)

    async def _replies(self) -> None:
        reader, writer = self._there[0], self._here[1]
        while data := await reader.read(LIMIT_BYTES):
            await self._link._flow.wait()
            if self._loss is not None:
                self._loss.happened.set()
                if self._loss.after == "cut":
                    return
                self._is_mute = True
            if not self._is_mute:
                writer.write(data)


class Proxy:
    """`with Proxy(socket) as proxy: proxy.link("web").url`. `target` is the Unix socket of the server."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)
        self.links: dict[str, Link] = {}
        self._loop = uvloop.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def link(self, name: str) -> Link:
        """The link of that name; made at the first call."""
        if name not in self.links:
            self.links[name] = self.do(self._open(name))
        return self.links[name]

    def call(self, function: Any, *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _open(self, name: str) -> Link:
        link = Link(self, name)
        link._flow.set()
        server = await asyncio.start_server(link._connected, HOST, 0, limit=LIMIT_BYTES)
        self._servers.append(server)
        link.port = server.sockets[0].getsockname()[1]
        return link

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for link in self.links.values():
            link._flow.set()
            link._cut()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *raised: object) -> None:
        self.do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

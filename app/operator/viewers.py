"""Who watches the dashboard: one look at the cell a second for all of them, and none when nobody is there.

Owns the set of viewers and the task that looks while it is not empty. Refuses to know what a picture holds. A viewer
that does not keep up misses pictures, and nothing is kept for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

import orjson
from redis.exceptions import RedisError

from app.errors import shutting_down, unavailable
from bridge.streams.sse import frame

log = logging.getLogger(__name__)

MAX_VIEWERS = 32
EVERY_S = 1.0

Pause = Callable[[float], Awaitable[None]]


class Viewer:
    """The response body of one viewer: always the latest picture that it has not seen."""

    def __init__(self) -> None:
        self._unseen: bytes | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    def show(self, picture: bytes) -> None:
        self._unseen = picture
        self._changed.set()

    def end(self) -> None:
        """Idempotent."""
        self._is_over = True
        self._changed.set()

    def __aiter__(self) -> Viewer:
        return self

    async def __anext__(self) -> bytes:
        while not self._is_over:
            if (picture := self._unseen) is not None:
                self._unseen = None
                return picture
            self._changed.clear()
            await self._changed.wait()
        raise StopAsyncIteration


class Viewers:
    def __init__(self, look: Callable[[], dict[str, Any]], pool: Executor, pause: Pause = asyncio.sleep) -> None:
        """`look` may block, and raises RedisError."""
        self._look = look
        self._pool = pool
        self._pause = pause
        self._viewers: set[Viewer] = set()
        self._watch: asyncio.Task[None] | None = None
        self._latest: bytes | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._viewers)

    def join(self) -> Viewer:
        """Raises ApiError when there are too many, or the process is shutting down."""
        if self._is_closed:
            raise shutting_down()
        if len(self._viewers) >= MAX_VIEWERS:
            raise unavailable(
                "too_many_viewers", f"{MAX_VIEWERS} dashboards are open at this process already: close one.", 10
            )
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._look_on())
        elif self._latest is not None:
            viewer.show(self._latest)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        viewer.end()
        self._viewers.discard(viewer)

    def close(self) -> None:
        """Ends all of them: the process is shutting down."""
        self._is_closed = True
        for viewer in list(self._viewers):
            self.leave(viewer)

    async def _look_on(self) -> None:
        while self._viewers:
            self._latest = frame(await self._picture())
            for viewer in self._viewers:
                viewer.show(self._latest)
            await self._pause(EVERY_S)
        self._latest = None

    async def _picture(self) -> bytes:
        try:
            return orjson.dumps(await asyncio.get_running_loop().run_in_executor(self._pool, self._look))
        except RedisError as error:
            log.debug("no picture for the dashboard: %s", error)
            return orjson.dumps({"error": "queue_unreachable"})
        except Exception:
            # Viewers would wait for ever for pictures that do not come.
            log.exception("the dashboard's picture failed")
            return orjson.dumps({"error": "internal_error"})

"""One wait with a time-out that can be put off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from bridge.streams.subscription import Waiting


class Loop:
    """An event loop whose time is set by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> object:
        self.timers.append((when_s, callback))
        return object()

    def go_to(self, now_s: float) -> None:
        self.now_s = now_s
        due = [timer for timer in self.timers if timer[0] <= now_s]
        self.timers = [timer for timer in self.timers if timer[0] > now_s]
        for _, callback in due:
            callback()


async def test_a_wait_ends_at_its_time_counted_from_when_it_was_last_put_off() -> None:
    clock = Loop()
    loop: Any = clock
    waiting = Waiting(loop)
    task = asyncio.ensure_future(waiting.wait(10))
    await asyncio.sleep(0)
    clock.go_to(8)
    waiting.extend()
    clock.go_to(17.9)
    await asyncio.sleep(0)
    assert waiting.is_on
    clock.go_to(18)
    await task
    assert not waiting.is_on
    assert len(clock.timers) <= 1

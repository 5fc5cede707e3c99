"""Viewers of the dashboard: one look for all, none for nobody, and never more than it takes."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from redis.exceptions import ConnectionError

from app.errors import ApiError
from app.operator.viewers import MAX_VIEWERS, Viewer, Viewers
from tests.app.web import Inline


class Looks:
    """A cell that is looked at, and a clock that is turned by hand."""

    def __init__(self) -> None:
        self.num = 0
        self.error: Exception | None = None
        self.is_odd = False
        self._turns = asyncio.Semaphore(0)
        self.viewers = Viewers(self.look, Inline(), self.pause)

    def look(self) -> dict[str, Any]:
        self.num += 1
        if self.error is not None:
            raise self.error
        if self.is_odd:
            return {"look": object()}
        return {"look": self.num}

    async def pause(self, seconds: float) -> None:
        assert seconds > 0
        await self._turns.acquire()

    async def turn(self) -> None:
        """A second goes by."""
        self._turns.release()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def next_of(viewer: Viewer) -> Any:
    data = await asyncio.wait_for(viewer.__anext__(), 5)
    return orjson.loads(data.removeprefix(b"data: "))


async def test_nobody_looks_at_the_cell_while_nobody_views() -> None:
    cell = Looks()
    await settle()
    assert cell.num == 0
    viewer = cell.viewers.join()
    await settle()
    cell.viewers.leave(viewer)
    for _ in range(3):
        await cell.turn()
    assert cell.num == 1


async def test_all_viewers_share_one_look_a_second() -> None:
    cell = Looks()
    viewers = [cell.viewers.join() for _ in range(5)]
    assert [await next_of(viewer) for viewer in viewers] == [{"look": 1}] * 5
    await cell.turn()
    assert [await next_of(viewer) for viewer in viewers] == [{"look": 2}] * 5
    assert cell.num == 2


async def test_who_comes_later_sees_the_latest_picture_at_once_and_causes_no_look() -> None:
    cell = Looks()
    cell.viewers.join()
    await settle()
    assert await next_of(cell.viewers.join()) == {"look": 1}
    assert cell.num == 1


async def test_a_viewer_that_reads_slowly_skips_pictures() -> None:
    cell = Looks()
    viewer = cell.viewers.join()
    await settle()
    for _ in range(3):
        await cell.turn()
    assert await next_of(viewer) == {"look": 4}


async def test_looking_begins_again_after_everybody_had_left() -> None:
    cell = Looks()
    cell.viewers.leave(cell.viewers.join())
    await cell.turn()
    await cell.turn()
    viewer = cell.viewers.join()
    assert (await next_of(viewer))["look"] >= 1


async def test_one_viewer_too_many_is_refused_until_another_leaves() -> None:
    cell = Looks()
    viewers = [cell.viewers.join() for _ in range(MAX_VIEWERS)]
    with pytest.raises(ApiError) as refusal:
        cell.viewers.join()
    assert (refusal.value.status, refusal.value.code) == (503, "too_many_viewers")
    cell.viewers.leave(viewers[0])
    cell.viewers.join()
    assert len(cell.viewers) == MAX_VIEWERS


async def test_a_viewer_that_has_left_gets_the_end_of_its_stream() -> None:
    cell = Looks()
    viewer = cell.viewers.join()
    await next_of(viewer)
    waiting = asyncio.ensure_future(viewer.__anext__())
    await settle()
    cell.viewers.leave(viewer)
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_a_picture_that_is_no_json_is_told_and_ends_nobody_s_view() -> None:
    cell = Looks()
    cell.is_odd = True
    viewer = cell.viewers.join()
    assert await next_of(viewer) == {"error": "internal_error"}
    cell.is_odd = False
    await cell.turn()
    assert await next_of(viewer) == {"look": 2}


@pytest.mark.parametrize(
    ("error", "code"), [(ConnectionError("away"), "queue_unreachable"), (KeyError("ours"), "internal_error")]
)
async def test_a_look_that_fails_is_told_and_the_next_one_comes_all_the_same(error: Exception, code: str) -> None:
    cell = Looks()
    cell.error = error
    viewer = cell.viewers.join()
    assert await next_of(viewer) == {"error": code}
    cell.error = None
    await cell.turn()
    assert await next_of(viewer) == {"look": 2}

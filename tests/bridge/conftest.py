"""A cell to test the bridge process on: the main and the Dramatiq database, on fakeredis and on the real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.bridge.cell import Cell
from tests.bridge.reading import Streams
from tests.conftest import RedisServer


@pytest.fixture
def cell(redis_server: RedisServer) -> Cell:
    return Cell(redis_server.connect("short"), redis_server.connect("queue"))


@pytest.fixture
async def streams(redis_server: RedisServer) -> AsyncIterator[Streams]:
    with Streams(redis_server) as streams:
        yield streams

"""A cell to test the bridge process on: the main and the Dramatiq database, on fakeredis and on the real server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import fakeredis
import pytest

from tasks.clients import connect, connect_fake
from tests.bridge.cell import Cell
from tokenferry.valkey import Valkey


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    # Not tmp_path: a Unix socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="tf") as folder, Valkey(Path(folder)) as valkey:
        yield valkey.url


@pytest.fixture(params=["fakeredis", "valkey"])
def cell(request: pytest.FixtureRequest) -> Iterator[Cell]:
    if request.param == "fakeredis":
        server = fakeredis.FakeServer()
        redis, queue = connect_fake(server, use="short"), connect_fake(server, use="queue")
    else:
        url = request.getfixturevalue("valkey_url")
        redis, queue = connect(url, use="short"), connect(url, use="queue")
        redis.flushall()
    yield Cell(redis, queue)
    redis.close()
    queue.close()

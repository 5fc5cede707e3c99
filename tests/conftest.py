"""What the tests of all rooms share: a Redis server of two kinds, so that one suite runs on the fake and on the real.

`redis_server` is fakeredis and then an embedded Valkey (on a private Unix socket, started once for the session);
every test gets it empty. `fake_server` and `real_server` are one of them alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fakeredis
import pytest
from hypothesis import HealthCheck, settings
from redis import Redis

from tasks.process.clients import Use, connect, connect_fake
from tokenferry.cell.valkey import Valkey

# How long an example takes says nothing on a machine that others use, too.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


class RedisServer:
    """Makes clients as composition roots do (`tasks.process.clients`), and closes them after the test."""

    def __init__(self, kind: str, make: Callable[[Use], Redis], url: str | None = None) -> None:
        self.kind = kind
        self.url = url
        """Where the real one listens; None for the fake."""
        self._make = make
        self._clients: list[Redis] = []

    def connect(self, use: Use = "short") -> Redis:
        client = self._make(use)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()
            client.connection_pool.disconnect()


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    # Not tmp_path: a Unix socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="tf") as folder, Valkey(Path(folder)) as valkey:
        yield valkey.url


@pytest.fixture
def fake_server() -> Iterator[RedisServer]:
    shared = fakeredis.FakeServer()
    server = RedisServer("fakeredis", lambda use: connect_fake(shared, use=use))
    yield server
    server.close()


@pytest.fixture
def real_server(valkey_url: str) -> Iterator[RedisServer]:
    server = RedisServer("valkey", lambda use: connect(valkey_url, use=use), valkey_url)
    server.connect().flushall()
    yield server
    server.close()


@pytest.fixture(params=["fakeredis", "valkey"])
def redis_server(request: pytest.FixtureRequest) -> RedisServer:
    name = "fake_server" if request.param == "fakeredis" else "real_server"
    server: RedisServer = request.getfixturevalue(name)
    return server


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"

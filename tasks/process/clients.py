"""Redis clients, the one place where time-outs, retries and pool sizes are chosen.

Owns the four ways we talk to Redis. Only composition roots call this; everyone else is handed a client.
redis-py 8 by default cuts a read after 5 s (a blocking read too), silently sends a failed command again up to ten
times, raises when 100 connections are out, and speaks RESP3: each of these is set on purpose here.
"""

from __future__ import annotations

from typing import Any, Literal

from redis import Redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.connection import BlockingConnectionPool, parse_url
from redis.exceptions import ConnectionError
from redis.retry import Retry

MAX_BLOCK_S = 2.0
"""The longest that anyone may ask Redis to block (BLPOP, XREAD BLOCK): below the blocking client's read time-out."""

Use = Literal["short", "blocking", "queue"]

BLOCKING_GRACE_S = 3.0
"""How much longer than the blocking itself a reply may take."""


def connect(url: str, *, use: Use, max_connections: int = 16, max_block_s: float = MAX_BLOCK_S) -> Redis:
    """A client for `url` (redis://, rediss:// or unix://; database N in `?db=` or the path). Connects at first use.

    - "short": scripts and plain commands on database N. Sent once more when the connection broke (all are safe to
      repeat), never after a time-out: the caller decides.
    - "blocking": commands that wait at most `max_block_s`, on database N. Never repeated.
    - "queue": Dramatiq's database N+1. Never repeated: a fetch whose reply is lost must be noticed.

    Raises ValueError for a URL that cannot be read.
    """
    options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    options["db"] = int(options.get("db", 0)) + (use == "queue")
    options.update(
        protocol=2,
        decode_responses=False,
        socket_timeout=max_block_s + BLOCKING_GRACE_S if use == "blocking" else 3.0,
        socket_connect_timeout=1.0,
        health_check_interval=0,
        retry=Retry(ConstantBackoff(0.02), 1, (ConnectionError,)) if use == "short" else Retry(NoBackoff(), 0),
        retry_on_error=[],
    )
    if "path" not in options:
        options["socket_keepalive"] = True
    pool = BlockingConnectionPool(max_connections=max_connections, timeout=3, **options)  # type: ignore[no-untyped-call]
    return Redis.from_pool(pool)


def connect_fake(server: Any, *, use: Use) -> Redis:
    """The same over a `fakeredis.FakeServer`, in this process: for tests and the one-process composition."""
    import fakeredis  # here, because no other process needs to load it

    client: Redis = fakeredis.FakeRedis(
        server=server, db=int(use == "queue"), protocol=2, decode_responses=False, socket_timeout=None
    )
    return client

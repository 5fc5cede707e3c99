"""Ends a blocked read of this process, so that it starts again with the streams that it has to read by now.

Owns the control stream that such a read has beside the others, and one connection on which Redis is told not to
answer. Refuses to know who reads. A wake-up may get lost with its connection: the read returns by itself as well.

PERF: nobody waits for a reply that says nothing, and no thread is woken to do so: 0.25 ms of CPU a request, of 3.3
that a web process needs.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from bridge.xread import pack
from tasks import keys

logger = logging.getLogger(__name__)

CONTROL_TTL_MS = 86_400_000
"""A process that is killed leaves its control stream behind."""


class Waker:
    """`wake` and `doubt` may be called from any thread, and do not block."""

    def __init__(self, client: Redis, reader_id: str) -> None:
        """`client` lends one connection, for good."""
        self.control = keys.control(reader_id).encode()
        self._client = client
        self._commands = _command(b"XADD", self.control, b"MAXLEN", b"1", b"*", b"w", b"") + _command(
            b"PEXPIRE", self.control, b"%d" % CONTROL_TTL_MS
        )
        self._lock = threading.Lock()
        self._connection: Any = None
        self._is_doubtful = False
        self._connector = ThreadPoolExecutor(1, thread_name_prefix="reader-wake")

    def wake(self) -> None:
        with self._lock:
            if self._connection is not None and not self._is_doubtful:
                try:
                    self._connection.send_packed_command([self._commands], check_health=False)
                    return
                except (RedisError, OSError):
                    self._is_doubtful = True
        self._connector.submit(self._connect_and_wake)

    def doubt(self) -> None:
        """The connection may be broken: the next wake-up goes over another one."""
        self._is_doubtful = True

    def close(self) -> None:
        self._connector.shutdown(cancel_futures=True)
        with self._lock:
            self._give_back()

    def _connect_and_wake(self) -> None:
        try:
            with self._lock:
                if self._is_doubtful:
                    self._give_back()
            if self._connection is None:
                connection: Any = self._client.connection_pool.get_connection()
                connection.send_command("CLIENT", "REPLY", "OFF")
                with self._lock:
                    self._connection = connection
            self._connection.send_packed_command([self._commands], check_health=False)
        except (RedisError, OSError) as error:
            self._is_doubtful = True
            logger.warning("reader not woken: %s", error)

    def _give_back(self) -> None:
        self._is_doubtful = False
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.disconnect()
            self._client.connection_pool.release(connection)


def _command(*arguments: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(arguments), pack(arguments))

"""Ends a blocked read of this process, so that it starts again with the streams that it has to read by now.

Owns the wake-ups in the control stream that such a read has beside the others, and one connection on which Redis is
told not to answer. Refuses to know who reads. A wake-up on that connection may get lost with it: the read returns by
itself, too.

PERF: nobody waits for a reply that says nothing, and no thread is woken to do so: 0.25 ms of CPU a request, of 3.3
that a web process needs.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hiredis
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from tasks.protocol import keys

log = logging.getLogger(__name__)


class Waker:
    """`wake` and `doubt` may be called from any thread, and do not block."""

    def __init__(self, client: Redis, reader_id: str) -> None:
        """`client` lends one connection, for good."""
        self.control = keys.control(reader_id).encode()
        self._client = client
        add: Any = (b"XADD", self.control, b"MAXLEN", b"~", keys.CONTROL_KEPT, b"*", b"w", b"")
        expire: Any = (b"PEXPIRE", self.control, keys.CONTROL_TTL_MS)
        self._commands = hiredis.pack_command(add) + hiredis.pack_command(expire)
        self._lock = threading.Lock()
        self._silent: Any = None
        self._is_doubtful = False
        self._may_be_silent = True
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reader-wake")

    def wake(self) -> None:
        with self._lock:
            if self._silent is not None and not self._is_doubtful:
                try:
                    self._silent.send_packed_command([self._commands], check_health=False)
                    return
                except (RedisError, OSError):
                    self._is_doubtful = True
        self._pool.submit(self._wake_and_connect)

    def doubt(self) -> None:
        """The connection may be broken: the next wake-up goes over another one."""
        self._is_doubtful = True

    def close(self) -> None:
        """Does not wait for a Redis that does not answer."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._give_back()

    def _wake_and_connect(self) -> None:
        """Wakes with replies, and prepares for the next time."""
        try:
            with self._client.pipeline(transaction=False) as pipe:
                pipe.xadd(self.control, {b"w": b""}, maxlen=keys.CONTROL_KEPT, approximate=True)
                pipe.pexpire(self.control, keys.CONTROL_TTL_MS)
                pipe.execute()
            with self._lock:
                if self._is_doubtful:
                    self._give_back()
            if self._silent is None and self._may_be_silent:
                silent = self._connect()
                with self._lock:
                    self._silent = silent
        except (RedisError, OSError) as error:
            log.warning("reader not woken: %s", error)

    def _connect(self) -> Any:
        """A connection on which Redis does not answer; None, from now on, if it does not allow that."""
        connection: Any = self._client.connection_pool.get_connection()
        try:
            # The reply to the second says that the first has worked.
            connection.send_command("CLIENT", "REPLY", "OFF")
            connection.send_command("CLIENT", "REPLY", "ON")
            connection.read_response()
            connection.send_command("CLIENT", "REPLY", "OFF")
            return connection
        except ResponseError as error:
            log.info("every request costs this process a little more, Redis refuses CLIENT REPLY: %s", error)
            self._may_be_silent = False
            self._release(connection)
            return None
        except (RedisError, OSError):
            self._release(connection)
            raise

    def _give_back(self) -> None:
        self._is_doubtful = False
        if self._silent is not None:
            connection, self._silent = self._silent, None
            self._release(connection)

    def _release(self, connection: Any) -> None:
        connection.disconnect()
        self._client.connection_pool.release(connection)

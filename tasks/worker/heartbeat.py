"""The heartbeat: renews this worker's lease from a thread of its own, and lets it run out when the engine hangs.

Owns the lease of one worker. Refuses to know about requests: whoever notices an expired lease re-offers them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from redis.exceptions import RedisError

from tasks.protocol.contract import WorkerInfo, WorkerLoad
from tasks.protocol.record import RequestRecords

log = logging.getLogger(__name__)


class Heartbeat:
    def __init__(
        self,
        records: RequestRecords,
        info: WorkerInfo,
        *,
        load: Callable[[int], WorkerLoad],
        stalled_s: Callable[[], float],
        clock_ms: Callable[[], int],
        on_fatal: Callable[[str], None],
        on_reconnected: Callable[[], None] = lambda: None,
        heartbeat_ms: int = 100,
        lease_ms: int = 500,
        stall_limit_s: float = 30.0,
    ) -> None:
        """`load` takes the time (epoch milliseconds); `stalled_s` says how long the running step has been running."""
        self._records = records
        self._info = info
        self._load = load
        self._stalled_s = stalled_s
        self._clock_ms = clock_ms
        self._on_fatal = on_fatal
        self._on_reconnected = on_reconnected
        self._heartbeat_ms = heartbeat_ms
        self._lease_ms = lease_ms
        self._stall_limit_s = stall_limit_s
        self._num_failures = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.num_live_workers = 0
        """Live workers of this model, this one included, as of the last heartbeat."""

    def tick(self) -> bool:
        """Renew the lease once. False when it was not renewed: Redis is away, or the engine hangs."""
        if (stalled_s := self._stalled_s()) > self._stall_limit_s:
            message = f"the engine has been in one step for {stalled_s:.0f} s"
            log.critical("%s: the lease is not renewed", message)
            self._on_fatal(message)
            return False
        try:
            load = self._load(self._clock_ms())
            self.num_live_workers = self._records.heartbeat(self._info, load, self._lease_ms)
        except RedisError as error:
            self._num_failures += 1
            if self._num_failures == 1:
                log.warning("Redis is not reachable, trying on: %s", error)
            return False
        if self._num_failures:
            log.info("Redis is back after %d missed heartbeats", self._num_failures)
            self._num_failures = 0
            self._on_reconnected()
        return True

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread and leave, if Redis lets us.

        What is held still (the engine did not let go in time) is for the watchdog, at once: the lease is over.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        try:
            self._records.leave(self._info.worker, self._info.model)
        except RedisError as error:
            log.warning("left without saying so, the lease will run out: %s", error)

    def _run(self) -> None:
        while True:
            self.tick()
            if self._stopping.wait(self._heartbeat_ms / 1000):
                return

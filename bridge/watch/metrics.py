"""What the bridge measures: what its watchdog did.

Owns when each of these numbers grows. Refuses to decide anything.
"""

from __future__ import annotations

from typing import Any

from redis import Redis

from bridge.watch.watchdog import Tick
from tasks.observe.metrics import READERS_GONE, RECONNECTS, REOFFERS, WORKERS_GONE, Meter, count_end
from tasks.protocol import keys


class BridgeMetrics:
    """Raises redis.exceptions.RedisError."""

    def __init__(self, meter: Meter, redis: Redis) -> None:
        self.meter = meter
        self._redis: Any = redis
        for metric in (REOFFERS, WORKERS_GONE, READERS_GONE, RECONNECTS):
            meter.counter(metric)

    def count(self, done: Tick) -> None:
        """What one tick did; nothing, nearly always."""
        for metric, things in (
            (REOFFERS, done.reoffered),
            (WORKERS_GONE, done.workers_gone),
            (READERS_GONE, done.readers_gone),
        ):
            if things:
                self.meter.count(metric, by=len(things))
        ended = [(one.request_id, "failed", one.reason) for one in done.failed]
        ended += [(request_id, "cancelled", "disconnect") for request_id in done.cancelled]
        if not ended:
            return
        with self._redis.pipeline(transaction=False) as pipe:
            for request_id, _, _ in ended:
                pipe.hget(keys.request(request_id), "model")
            models = pipe.execute()
        for (_, state, reason), model in zip(ended, models, strict=True):
            count_end(self.meter, (model or b"").decode(), state, reason)

    def reconnected(self) -> None:
        self.meter.count(RECONNECTS)

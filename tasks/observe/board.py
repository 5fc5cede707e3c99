"""Where all processes of a cell put their numbers, so that any web process can show all of them.

Owns the two kinds of key, how often a process writes and how long its numbers outlive it. Refuses to know what is
measured (`tasks.observe.metrics`). A process writes once a second, whatever happens in it; what it counted last stays
readable for a minute after its end, so that a scraper which comes by every half minute misses little.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from tasks.observe.metrics import Meter, Sample, unpack
from tasks.protocol import keys
from tasks.protocol.contract import ContractError, Priority
from tasks.protocol.priorities import PRIORITIES

log = logging.getLogger(__name__)

EVERY_S = 1.0
KEEP_MS = 60_000
FRESH_MS = 5_000
"""A process that has not written for so long is gone, or cannot reach Redis: its gauges say nothing any more."""


@dataclass(frozen=True, slots=True)
class ProcessNumbers:
    process: str
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class QueueLength:
    model: str
    priority: Priority
    num_waiting: int
    age_s: float
    """Of the oldest offer."""


class MetricsBoard:
    """Raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis

    def put(self, meter: Meter) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(keys.metrics(meter.process), meter.pack(), px=KEEP_MS)
            pipe.sadd(keys.MEASURED, meter.process)
            pipe.pexpire(keys.MEASURED, KEEP_MS)
            pipe.execute()

    def read(self) -> list[ProcessNumbers]:
        """The numbers of all processes, by name; of those that are gone without their gauges."""
        processes = sorted(raw.decode() for raw in self._redis.smembers(keys.MEASURED))
        with self._redis.pipeline(transaction=False) as pipe:
            for process in processes:
                pipe.get(keys.metrics(process))
                pipe.pttl(keys.metrics(process))
            replies = pipe.execute()
        found: list[ProcessNumbers] = []
        gone: list[str] = []
        for process, data, ttl_ms in zip(processes, replies[::2], replies[1::2], strict=True):
            if data is None:
                gone.append(process)
                continue
            try:
                name, samples = unpack(data)
            except ContractError as error:
                log.warning("the numbers of %s cannot be shown: %s", process, error)
                continue
            is_fresh = KEEP_MS - ttl_ms <= FRESH_MS
            found.append(ProcessNumbers(name, [one for one in samples if is_fresh or one.metric.kind != "gauge"]))
        if gone:
            self._redis.srem(keys.MEASURED, *gone)
        return found

    def queue(self, models: Sequence[str]) -> list[QueueLength]:
        """What waits for a worker, for each model and class."""
        queues = [(model, priority) for model in models for priority in PRIORITIES]
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for model, priority in queues:
                pipe.zcard(keys.waiting(model, priority))
                pipe.zrange(keys.waiting(model, priority), 0, 0, withscores=True)
            (seconds, micros), *replies = pipe.execute()
        now_s = int(seconds) + int(micros) / 1e6
        return [
            QueueLength(model, priority, int(num), max(0.0, now_s - float(oldest[0][1]) / 1000) if oldest else 0.0)
            for (model, priority), num, oldest in zip(queues, replies[::2], replies[1::2], strict=True)
        ]


class MetricsWriter:
    """Puts the numbers of this process on the board, from a thread of its own."""

    def __init__(self, board: MetricsBoard, meter: Meter, *, every_s: float = EVERY_S) -> None:
        self._board = board
        self._meter = meter
        self._every_s = every_s
        self._is_failing = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def tick(self) -> bool:
        """Writes once. False when Redis was away: the numbers go with the next time."""
        try:
            self._board.put(self._meter)
        except RedisError as error:
            if not self._is_failing:
                log.warning("%s: metrics wait for Redis: %s", self._meter.process, error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread, after it has written once more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self.tick()
            if self._stopping.wait(self._every_s):
                self.tick()
                return

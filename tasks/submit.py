"""Putting an assignment on offer: the record, then the Dramatiq message, then a wake token.

Owns that order. Refuses to know what happens next: a message that gets lost after the record was made is the
watchdog's business (`RequestRecords.look`), so an accepted request never depends on the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dramatiq.brokers.redis import RedisBroker
from redis import Redis
from redis.exceptions import RedisError

from tasks import keys
from tasks.broker import assignment_message
from tasks.contract import GenerationJob
from tasks.record import UNKNOWN, Idempotency, Origin, Reoffer, RequestRecords, Submitted

log = logging.getLogger(__name__)


class Submitter:
    """Synchronous; web calls it in a thread."""

    def __init__(self, records: RequestRecords, broker: RedisBroker, redis: Redis) -> None:
        """`redis` is the short client of the main database, for the wake tokens."""
        self._records = records
        self._broker = broker
        self._redis = redis

    def submit(
        self,
        jobs: Sequence[GenerationJob],
        *,
        reader: str | None,
        outlive_reader: bool = False,
        max_waiting: int,
        answer: bytes = b"",
        idempotency: Idempotency | None = None,
        origin: Origin = UNKNOWN,
    ) -> Submitted:
        """Offer all choices of a request for the first time, or join it; see `RequestRecords.submit`.

        Raises QueueFull, NoWorker, IdempotencyConflict, redis.exceptions.RedisError (accepted or not).
        """
        submitted = self._records.submit(
            jobs,
            reader=reader,
            outlive_reader=outlive_reader,
            max_waiting=max_waiting,
            answer=answer,
            idempotency=idempotency,
            origin=origin,
        )
        if submitted.created:
            for job in jobs:
                self._enqueue(keys.queue_new(job.model, job.priority), job.request_id, submitted.attempt)
        return submitted

    def requeue(self, reoffer: Reoffer) -> None:
        """Offer the next attempt of a request that was released or re-offered."""
        self._enqueue(reoffer.queue, reoffer.request_id, reoffer.attempt)

    def _enqueue(self, queue: str, request_id: str, attempt: int) -> None:
        try:
            self._broker.enqueue(assignment_message(queue, request_id, attempt))
            wake(self._redis, queue)
        except RedisError as error:
            log.warning("%s attempt=%d: not enqueued, the watchdog will: %s", request_id, attempt, error)


def wake(redis: Redis, queue: str) -> None:
    """Wake one idle consumer of `queue`."""
    key = keys.wake(queue)
    with redis.pipeline(transaction=False) as pipe:
        pipe.lpush(key, b"1")
        pipe.ltrim(key, 0, keys.MAX_WAKE_TOKENS - 1)
        pipe.pexpire(key, keys.WAKE_TTL_MS)
        pipe.execute()

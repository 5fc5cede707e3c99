"""Putting an assignment on offer: the Dramatiq message and a wake token, for a new request together with its record.

Owns the messages. One script makes record, message and token, in one call: a request that is accepted is queued.
Refuses to know what happens next: a message that gets lost all the same, or that Redis did not take for a further
attempt, is the watchdog's business (`RequestRecords.look`), so an accepted request never depends on the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from dramatiq.brokers.redis import RedisBroker
from redis import Redis
from redis.exceptions import RedisError

from tasks.protocol import keys
from tasks.protocol.broker import assignment_message
from tasks.protocol.contract import GenerationJob
from tasks.protocol.lua import Scripts
from tasks.protocol.record import UNKNOWN, Idempotency, Messages, Origin, Reoffer, RequestRecords, Storing, Submitted

log = logging.getLogger(__name__)


class Submitter:
    """Synchronous; web calls it in a thread."""

    def __init__(self, records: RequestRecords, broker: RedisBroker, redis: Redis) -> None:
        """`redis` is the short client of the main database, `broker` is on Dramatiq's."""
        self._records = records
        self._place = place_of(redis, broker)
        self._scripts = Scripts(redis)

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
        storing: Storing | None = None,
    ) -> Submitted:
        """Offer all choices of a request for the first time, or join it; see `RequestRecords.submit`.

        Raises QueueFull, NoWorker, IdempotencyConflict, redis.exceptions.RedisError (accepted or not).
        """
        queues = [keys.queue_new(job.model, job.priority) for job in jobs]
        items = [_item(queue, job.request_id, 1) for queue, job in zip(queues, jobs, strict=True)]
        return self._records.submit(
            jobs,
            reader=reader,
            outlive_reader=outlive_reader,
            max_waiting=max_waiting,
            answer=answer,
            idempotency=idempotency,
            origin=origin,
            messages=Messages(self._place, items),
            storing=storing,
        )

    def requeue(self, reoffer: Reoffer) -> None:
        """Offer the next attempt of a request that was released or re-offered."""
        request_id, attempt, queue = reoffer.request_id, reoffer.attempt, reoffer.queue
        try:
            self._scripts.call("enqueue", None, self._place, queue, *_item(queue, request_id, attempt))
        except RedisError as error:
            log.warning("%s attempt=%d: not enqueued, the watchdog will: %s", request_id, attempt, error)


def place_of(redis: Redis, broker: RedisBroker) -> str:
    """Where messages go, for the script: the numbers of the main and of Dramatiq's database."""
    client: Any = broker.client
    databases = (each.connection_pool.connection_kwargs.get("db", 0) for each in (redis, client))
    return " ".join(map(str, databases))


def _item(queue: str, request_id: str, attempt: int) -> tuple[str, bytes]:
    """A message as Dramatiq keeps it: its id in the queue, and its bytes."""
    return str(uuid4()), assignment_message(queue, request_id, attempt).encode()


def wake(redis: Redis, queue: str) -> None:
    """Wake one idle consumer of `queue`."""
    key = keys.wake(queue)
    with redis.pipeline(transaction=False) as pipe:
        pipe.lpush(key, b"1")
        pipe.ltrim(key, 0, keys.MAX_WAKE_TOKENS - 1)
        pipe.pexpire(key, keys.WAKE_TTL_MS)
        pipe.execute()

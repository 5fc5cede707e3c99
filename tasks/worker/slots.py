"""Dramatiq's worker as we use it: actor threads that sleep, and our consumer instead of Dramatiq's.

Owns the actor threads. A thread is a batch slot: it runs one message at a time and costs nothing while it waits
(Dramatiq's own wake up every second). Refuses to know what the actor does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Queue
from typing import Any

import dramatiq.worker
from dramatiq import MessageProxy
from dramatiq.brokers.redis import RedisBroker

from tasks.worker.consumer import AssignmentConsumer


class SlotThread(dramatiq.worker.WorkerThread):
    """Waits for the next message without a time-out; None ends it."""

    def run(self) -> None:
        work: Queue[Any] = self.work_queue
        for message in iter(work.get, None):
            self.process_message(message)


class SlotWorker(dramatiq.Worker):
    """`start` and `stop` as Dramatiq's, with `num_slots` actor threads and one consumer for all queues."""

    def __init__(
        self, broker: RedisBroker, num_slots: int, make_consumer: Callable[[Callable[[MessageProxy], None]], Any]
    ) -> None:
        """`make_consumer` gets the function that delivers a message to an actor thread."""
        super().__init__(broker, worker_threads=num_slots)
        self._work: Queue[MessageProxy | None] = Queue()
        self.consumer: AssignmentConsumer = make_consumer(self._work.put)

    def start(self) -> None:
        self.broker.emit_before("worker_boot", self)
        consumers: Any = dict.fromkeys(self.consumer.queues, self.consumer)
        work: Any = self._work
        for _ in range(self.worker_threads):
            thread = SlotThread(broker=self.broker, consumers=consumers, work_queue=work, worker_timeout=0)
            self.workers.append(thread)
            thread.start()
        self.consumer.start()
        self.broker.emit_after("worker_boot", self)

    def stop(self, timeout: int = 600_000) -> None:
        """End the actor threads once they are done, then the consumer. `timeout` in milliseconds, for all of it."""
        deadline_s = time.monotonic() + timeout / 1000
        self.broker.emit_before("worker_shutdown", self)
        for _ in self.workers:
            self._work.put(None)
        for thread in self.workers:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self.consumer.stop(max(0.1, deadline_s - time.monotonic()))
        self.broker.emit_after("worker_shutdown", self)

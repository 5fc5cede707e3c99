"""The watchdog: finds what nobody looks after any more, and has it put right.

Owns when to look: at workers and web processes whose lease is over, and at requests whose time in `tf:due` has come.
Refuses to decide what becomes of a request: each decision is one script (`tasks.protocol.record`), fenced by the
attempt, so two watchdogs at once, or one that was stopped for a while, do no harm.

An idle tick is one round trip: it reads the earliest of each kind of deadline, and goes on only if one has passed.
Leases are only ever extended, so nothing needs another look before the earliest of them; PERF: looking again exactly
then, and otherwise ten times a second, halves the idle CPU of a fixed 50 ms and finds a dead worker sooner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from tasks.protocol import keys
from tasks.protocol.record import Cancelled, Failed, Outlook, Reoffer, RequestRecords
from tasks.protocol.submit import Submitter

log = logging.getLogger(__name__)

MAX_WAIT_MS = 100
"""Between two ticks at most: a supervisor that saw its worker die cuts the lease short (`expire_lease`)."""
MIN_WAIT_MS = 20
SLOW_MS = 1_000
"""A look at the deadlines that takes longer says nothing: Redis answered nobody, so no lease was renewed."""
MAX_DUE = 100
"""Due requests looked at in one tick, so that a long queue never keeps a dead worker waiting."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The earliest deadline of each kind, in epoch ms; None where there is none."""

    now_ms: int
    worker_lease_ms: int | None
    reader_lease_ms: int | None
    due_ms: int | None

    @property
    def is_worker_expired(self) -> bool:
        return self._has_passed(self.worker_lease_ms)

    @property
    def is_reader_expired(self) -> bool:
        return self._has_passed(self.reader_lease_ms)

    @property
    def is_request_due(self) -> bool:
        return self._has_passed(self.due_ms)

    @property
    def wait_ms(self) -> int:
        """How long nothing of this needs another look."""
        known = [ms for ms in (self.worker_lease_ms, self.reader_lease_ms, self.due_ms) if ms is not None]
        return max(MIN_WAIT_MS, min([MAX_WAIT_MS, *(ms - self.now_ms for ms in known)]))

    def _has_passed(self, deadline_ms: int | None) -> bool:
        return deadline_ms is not None and deadline_ms <= self.now_ms


@dataclass(slots=True)
class Tick:
    """What one tick did, and when the next one should be."""

    wait_ms: int
    was_slow: bool = False
    """Redis took so long to answer that nothing was concluded from it."""
    reoffered: list[Reoffer] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    workers_gone: list[str] = field(default_factory=list)
    readers_gone: list[str] = field(default_factory=list)


class Watchdog:
    """Use from one thread. `tick` raises RedisError; call it again, it goes on where it was."""

    def __init__(
        self,
        redis: Redis,
        records: RequestRecords,
        submitter: Submitter,
        *,
        is_queue_empty: Callable[[str], bool],
        max_due: int = MAX_DUE,
        monotonic_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
    ) -> None:
        """`redis` is a short client of the main database. `is_queue_empty` says whether a queue holds no message."""
        self._redis = redis
        self._records = records
        self._submitter = submitter
        self._is_queue_empty = is_queue_empty
        self._max_due = max_due
        self._monotonic_ms = monotonic_ms
        self._models: list[str] = []

    def tick(self, now_ms: int | None = None, *, however_slow: bool = False) -> Tick:
        """Puts right what is overdue. `now_ms` is for tests, the default is Redis' clock.

        Concludes nothing from a slow answer, unless `however_slow`.
        """
        asked_ms = self._monotonic_ms()
        deadlines = self.deadlines(now_ms)
        if self._monotonic_ms() - asked_ms > SLOW_MS and not however_slow:
            return Tick(MIN_WAIT_MS, was_slow=True)
        done = Tick(deadlines.wait_ms)
        if deadlines.is_worker_expired:
            self._bury_workers(now_ms, done)
        if deadlines.is_reader_expired:
            self._bury_readers(now_ms, done)
        if deadlines.is_request_due:
            self._look_at_due(now_ms, done)
        return done

    def deadlines(self, now_ms: int | None = None) -> Deadlines:
        """One round trip. A model that is new to the cell is seen one tick later."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.smembers(keys.MODELS)
            earliest = [keys.READERS, keys.DUE, *map(keys.workers, self._models)]
            for key in earliest:
                pipe.zrange(key, 0, 0, withscores=True)
            (seconds, micros), models, *found = pipe.execute()
        self._models = sorted(model.decode() for model in models)
        readers, due, *workers = [_score(pairs) for pairs in found]
        return Deadlines(
            now_ms=int(seconds) * 1000 + int(micros) // 1000 if now_ms is None else now_ms,
            worker_lease_ms=min((lease for lease in workers if lease is not None), default=None),
            reader_lease_ms=readers,
            due_ms=due,
        )

    def _bury_workers(self, now_ms: int | None, done: Tick) -> None:
        for model, worker in self._records.expired_workers(now_ms):
            held = self._records.held(worker)
            log.warning("worker=%s model=%s: lease is over, re-offering %d requests", worker, model, len(held))
            for request_id, attempt in held:
                self._settle(self._records.reoffer(request_id, attempt, "worker_lost", now_ms), done)
            # Last, so that a watchdog killed on the way is followed by one that finds the worker again.
            if self._records.forget_worker(worker, model, now_ms):
                done.workers_gone.append(worker)

    def _bury_readers(self, now_ms: int | None, done: Tick) -> None:
        for reader in self._records.expired_readers(now_ms):
            open_ids = self._records.open_of(reader)
            log.warning("reader=%s: lease is over, detaching it from %d requests", reader, len(open_ids))
            if open_ids:
                done.cancelled += self._records.detach(open_ids, reader, now_ms=now_ms)
            if self._records.forget_reader(reader, now_ms):
                done.readers_gone.append(reader)

    def _look_at_due(self, now_ms: int | None, done: Tick) -> None:
        request_ids = self._records.due(now_ms, self._max_due)
        is_empty: dict[str, bool] = {}
        for request_id, queue in zip(request_ids, self._queues_of(request_ids), strict=True):
            if queue not in is_empty:
                is_empty[queue] = self._is_queue_empty(queue)
            self._settle(self._records.look(request_id, is_empty[queue], now_ms), done)

    def _queues_of(self, request_ids: Sequence[str]) -> list[str]:
        with self._redis.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.hget(keys.request(request_id), "queue")
            return [(queue or b"").decode() for queue in pipe.execute()]

    def _settle(self, outcome: Outlook, done: Tick) -> None:
        match outcome:
            case Reoffer():
                log.info("%s attempt=%d queue=%s: re-offered", outcome.request_id, outcome.attempt, outcome.queue)
                self._submitter.requeue(outcome)
                done.reoffered.append(outcome)
            case Failed():
                log.warning("%s: failed, %s", outcome.request_id, outcome.reason)
                done.failed.append(outcome)
            case Cancelled():
                log.info("%s: cancelled, nobody came back to read it", outcome.request_id)
                done.cancelled.append(outcome.request_id)
            case None:
                pass


def _score(pairs: Any) -> int | None:
    return int(pairs[0][1]) if pairs else None

"""The live picture of a cell, read from Redis: workers, queues, the requests that are waiting or running, late facts.

Owns the reads. Changes nothing and remembers nothing: a dashboard or a terminal that wants rates looks twice. What is
read is bounded, however many requests there are. What happened before what `tf:events` still has is in the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from tasks.process.crashes import Crashes, recent_crashes
from tasks.protocol import keys
from tasks.protocol.contract import (
    ContractError,
    Priority,
    WorkerInfo,
    WorkerLoad,
    decode_job,
    decode_worker_info,
    decode_worker_load,
)
from tasks.protocol.priorities import PRIORITIES

MAX_REQUESTS = 500
"""Requests that one look describes; the others are counted."""
MAX_WAITING_SHOWN = 25
"""Of each class, those that have waited longest."""
MAX_JOB_BYTES = 65_536
"""A job that is larger (a prompt of some 10,000 tokens) is not read for its numbers."""
FACTS_AT_ONCE = 1_000

Entry = tuple[bytes, dict[bytes, bytes]]
"""One entry of the events stream: its id and its fields."""


@dataclass(frozen=True, slots=True)
class LiveWorker:
    info: WorkerInfo
    load: WorkerLoad
    is_live: bool
    """False: its lease is over, and the watchdog has yet to see to what it held."""
    num_held: int


@dataclass(frozen=True, slots=True)
class Queue:
    """What is on offer and not claimed, of one model and one class."""

    model: str
    priority: Priority
    num_waiting: int
    oldest_ms: int
    """When the oldest was offered (epoch milliseconds), 0 without any."""


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One that is waiting or running. Times are epoch milliseconds, 0 where it has not happened."""

    request_id: str
    model: str
    priority: str
    state: str
    worker: str
    attempt: int
    num_tokens: int
    """Output tokens that are published."""
    num_cached_tokens: int
    submitted_ms: int
    offered_ms: int
    claimed_ms: int
    first_token_ms: int
    num_prompt_tokens: int | None
    max_tokens: int | None
    """None, as `num_prompt_tokens`, where the job was too large to be read for it, or this version cannot."""


@dataclass(frozen=True, slots=True)
class Overview:
    at_ms: int
    """By the clock of Redis, as all times are."""
    workers: tuple[LiveWorker, ...]
    queues: tuple[Queue, ...]
    requests: tuple[LiveRequest, ...]
    num_running: int
    """All that a worker holds, also those that `requests` had no room for."""
    num_strange_workers: int = 0
    """Workers of another version, which this one cannot describe."""
    crashes: tuple[Crashes, ...] = ()
    """What died lately, by supervisor: also what never came to serve."""


class LiveCell:
    """Raises redis.exceptions.RedisError. `now_ms` is for tests, the default is Redis' clock."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis  # redis-py's reply types fit neither RESP version

    def look(self, max_requests: int = MAX_REQUESTS, now_ms: int | None = None) -> Overview:
        """A handful of round trips, whatever there is to see."""
        redis_ms, models = self._start()
        at_ms = redis_ms if now_ms is None else now_ms
        leases, queues, waiting = self._leases_and_queues(models)
        workers, held, num_strange = self._workers(leases, at_ms)
        shown = [*held[:max_requests], *waiting]
        crashes = recent_crashes(self._redis, redis_ms)
        return Overview(at_ms, workers, queues, tuple(self._requests(shown)), len(held), num_strange, crashes)

    def last_facts(self, count: int) -> list[Entry]:
        """The latest facts that `tf:events` has, in the order in which they happened."""
        found: list[Entry] = []
        for entries in self._backwards(count):
            found += entries
        return found[::-1]

    def facts_after(self, entry_id: bytes, count: int = FACTS_AT_ONCE) -> list[Entry]:
        """The next facts after that entry."""
        entries: list[Entry] = self._redis.xrange(keys.EVENTS, min=_following(entry_id), count=count)
        return entries

    def facts_of(self, request_id: str, max_scanned: int) -> list[Entry]:
        """What `tf:events` has of one request among its last `max_scanned` facts; complete if it begins with
        `submitted`."""
        wanted, found = request_id.encode(), list[Entry]()
        for entries in self._backwards(max_scanned):
            for entry in entries:
                if entry[1].get(b"id") == wanted:
                    found.append(entry)
                    if entry[1].get(b"k") == b"submitted":
                        return found[::-1]
        return found[::-1]

    def _backwards(self, count: int) -> Iterator[list[Entry]]:
        """The last `count` facts in pieces, the latest first: one long reply would hold everybody up."""
        last = "+"
        while count > 0:
            entries: list[Entry] = self._redis.xrevrange(keys.EVENTS, max=last, count=min(count, FACTS_AT_ONCE))
            if not entries:
                return
            yield entries
            count -= len(entries)
            last = f"({entries[-1][0].decode()}"

    def _start(self) -> tuple[int, list[str]]:
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.smembers(keys.MODELS)
            (seconds, micros), models = pipe.execute()
        return int(seconds) * 1000 + int(micros) // 1000, sorted(model.decode() for model in models)

    def _leases_and_queues(
        self, models: Sequence[str]
    ) -> tuple[list[tuple[str, float]], tuple[Queue, ...], list[str]]:
        """Every worker with the end of its lease, every queue, and the requests that have waited longest."""
        classes = [(model, priority) for model in models for priority in PRIORITIES]
        with self._redis.pipeline(transaction=False) as pipe:
            for model in models:
                pipe.zrange(keys.workers(model), 0, -1, withscores=True)
            for model, priority in classes:
                pipe.zcard(keys.waiting(model, priority))
                pipe.zrange(keys.waiting(model, priority), 0, MAX_WAITING_SHOWN - 1, withscores=True)
            replies = pipe.execute()
        leases = [(worker.decode(), until) for reply in replies[: len(models)] for worker, until in reply]
        queues, waiting = [], list[str]()
        for (model, priority), count, oldest in zip(
            classes, replies[len(models) :: 2], replies[len(models) + 1 :: 2], strict=True
        ):
            queues.append(Queue(model, priority, int(count), int(oldest[0][1]) if oldest else 0))
            waiting += [request_id.decode() for request_id, _ in oldest]
        return sorted(leases), tuple(queues), waiting

    def _workers(
        self, leases: Sequence[tuple[str, float]], at_ms: int
    ) -> tuple[tuple[LiveWorker, ...], list[str], int]:
        """The workers, what they hold, and how many of them cannot be described."""
        with self._redis.pipeline(transaction=False) as pipe:
            for worker, _ in leases:
                pipe.hmget(keys.worker(worker), "info", "load")
                pipe.smembers(keys.held(worker))
            replies = pipe.execute() if leases else []
        workers, held, num_strange = [], list[str](), 0
        for (_, until), (info, load), ids in zip(leases, replies[::2], replies[1::2], strict=True):
            held += sorted(request_id.decode() for request_id in ids)
            if info is None or load is None:
                continue
            try:
                described = decode_worker_info(info), decode_worker_load(load)
            except ContractError:
                num_strange += 1
            else:
                workers.append(LiveWorker(*described, is_live=until > at_ms, num_held=len(ids)))
        return tuple(workers), held, num_strange

    def _requests(self, ids: Sequence[str]) -> Iterator[LiveRequest]:
        """In the order of their submission. What has ended in the meantime is left out."""
        with self._redis.pipeline(transaction=False) as pipe:
            for request_id in ids:
                pipe.hmget(keys.request(request_id), *_FIELDS)
                pipe.hstrlen(keys.request(request_id), "job")
            replies = pipe.execute() if ids else []
        records = {
            request_id: (dict(zip(_FIELDS, values, strict=True)), size)
            for request_id, values, size in zip(ids, replies[::2], replies[1::2], strict=True)
            if values[0] in _OPEN
        }
        small = [request_id for request_id, (_, size) in records.items() if 0 < size <= MAX_JOB_BYTES]
        with self._redis.pipeline(transaction=False) as pipe:
            for request_id in small:
                pipe.hget(keys.request(request_id), "job")
            jobs = dict(zip(small, pipe.execute() if small else [], strict=True))
        found = [_request(request_id, values, jobs.get(request_id)) for request_id, (values, _) in records.items()]
        yield from sorted(found, key=lambda request: (request.submitted_ms, request.request_id))


_OPEN = (b"offered", b"claimed", b"streaming")
_FIELDS = (
    "state",
    "model",
    "class",
    "worker",
    "attempt",
    "next_index",
    "cached",
    "submitted_ms",
    "offered_ms",
    "claimed_ms",
    "first_token_ms",
)


def _request(request_id: str, values: dict[str, bytes | None], job: bytes | None) -> LiveRequest:
    def text(name: str) -> str:
        return (values[name] or b"").decode()

    def number(name: str) -> int:
        return int(values[name] or 0)

    num_prompt_tokens, max_tokens = _numbers_of(job)
    return LiveRequest(
        request_id=request_id,
        model=text("model"),
        priority=text("class"),
        state=text("state"),
        worker=text("worker"),
        attempt=number("attempt"),
        num_tokens=number("next_index"),
        num_cached_tokens=number("cached"),
        submitted_ms=number("submitted_ms"),
        offered_ms=number("offered_ms"),
        claimed_ms=number("claimed_ms"),
        first_token_ms=number("first_token_ms"),
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
    )


def _numbers_of(job: bytes | None) -> tuple[int | None, int | None]:
    if job is None:
        return None, None
    try:
        read = decode_job(job)
    except ContractError:  # of another version: its worker reads it, and here it is only shown
        return None, None
    return len(read.prompt_token_ids), read.sampling.max_tokens


def _following(entry_id: bytes) -> str:
    ms, _, number = entry_id.decode().partition("-")
    return f"{ms}-{int(number) + 1}"

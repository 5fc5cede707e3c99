"""Leases: which workers and web processes are alive, what each of them holds or reads, what they say of themselves.

Owns the calls about processes; the calls about requests are in `tasks.protocol.record`, which builds on this. A lease
lasts until its time is over, whoever wrote it; what its owner held is then for the watchdog.
"""

from __future__ import annotations

from typing import Any

from redis import Redis

from tasks.protocol import keys
from tasks.protocol.contract import (
    WorkerInfo,
    WorkerLoad,
    decode_worker_info,
    decode_worker_load,
    encode_worker_info,
    encode_worker_load,
)
from tasks.protocol.lua import Scripts

READERS_TTL_MS = 86_400_000


class Leases:
    """Raises redis.exceptions.RedisError. `now_ms` is for tests, the default is Redis' clock."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis  # redis-py's reply types fit neither RESP version
        self._scripts = Scripts(redis)

    # -- workers

    def heartbeat(self, info: WorkerInfo, load: WorkerLoad, lease_ms: int, now_ms: int | None = None) -> int:
        """Renew the lease (joining if it is new). Returns the number of live workers of that model."""
        return int(
            self._scripts.call(
                "heartbeat",
                now_ms,
                info.worker,
                info.model,
                encode_worker_info(info),
                encode_worker_load(load),
                info.max_num_seqs,
                lease_ms,
            )
        )

    def leave(self, worker: str, model: str, now_ms: int | None = None) -> None:
        """A worker ends. What it still holds is the watchdog's to offer again, at once: its lease is over."""
        self._scripts.call("leave", now_ms, worker, model, 0)

    def forget_worker(self, worker: str, model: str, now_ms: int | None = None) -> bool:
        """By the watchdog, after re-offering all of it. False: it is alive again, or has begun to hold something."""
        return bool(self._scripts.call("leave", now_ms, worker, model, 1))

    def expire_lease(self, worker: str, model: str) -> None:
        """Say that a worker is dead before its lease runs out (its supervisor saw it die)."""
        self._redis.zadd(keys.workers(model), {worker: 0}, xx=True)

    def least_held_by_peers(self, worker: str, model: str, now_ms: int | None = None) -> int | None:
        """The smallest number of requests held by another live worker that has a free slot; None without such."""
        least = int(self._scripts.call("peers", now_ms, worker, model))
        return None if least < 0 else least

    def models(self) -> list[str]:
        """The models that ever had a worker."""
        return sorted(item.decode() for item in self._redis.smembers(keys.MODELS))

    def workers(self, model: str | None = None, now_ms: int | None = None) -> list[tuple[WorkerInfo, WorkerLoad]]:
        """The live workers, of one model or of all, by id."""
        now = self._now(now_ms)
        found: list[tuple[WorkerInfo, WorkerLoad]] = []
        for name in self.models() if model is None else [model]:
            ids: Any = self._redis.zrangebyscore(keys.workers(name), f"({now}", "+inf")
            for worker in sorted(ids):
                info, load = self._redis.hmget(keys.worker(worker.decode()), "info", "load")
                if info is not None and load is not None:
                    found.append((decode_worker_info(info), decode_worker_load(load)))
        return found

    def expired_workers(self, now_ms: int | None = None) -> list[tuple[str, str]]:
        """(model, worker) of every worker whose lease is over and that nobody has forgotten yet."""
        now = self._now(now_ms)
        return [
            (model, worker.decode())
            for model in self.models()
            for worker in self._redis.zrangebyscore(keys.workers(model), "-inf", now)
        ]

    def held(self, worker: str) -> list[tuple[str, int]]:
        """(request id, attempt) of everything a worker holds."""
        found: list[tuple[str, int]] = []
        for raw in sorted(self._redis.smembers(keys.held(worker))):
            attempt: Any = self._redis.hget(keys.request(raw.decode()), "attempt")
            if attempt is None:
                self._redis.srem(keys.held(worker), raw)
            else:
                found.append((raw.decode(), int(attempt)))
        return found

    # -- web processes, as readers of requests

    def reader_heartbeat(self, reader: str, lease_ms: int, now_ms: int | None = None) -> bool:
        """Renew the lease of a web process. False: it had none (any more), so it must attach again what it reads."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.zadd(keys.READERS, {reader: self._now(now_ms) + lease_ms})
            pipe.pexpire(keys.READERS, READERS_TTL_MS)
            return int(pipe.execute()[0]) == 0

    def reader_leave(self, reader: str, now_ms: int | None = None) -> None:
        """A web process ends. What it still reads is the watchdog's to detach, at once: its lease is over."""
        self._scripts.call("reader_leave", now_ms, reader, 0)

    def forget_reader(self, reader: str, now_ms: int | None = None) -> bool:
        """By the watchdog, after detaching all of it. False: it is alive again, or has begun to read something."""
        return bool(self._scripts.call("reader_leave", now_ms, reader, 1))

    def expired_readers(self, now_ms: int | None = None) -> list[str]:
        raw: Any = self._redis.zrangebyscore(keys.READERS, "-inf", self._now(now_ms))
        return [item.decode() for item in raw]

    def open_of(self, reader: str) -> list[str]:
        """The requests that this reader reads and that may end when it is gone."""
        return sorted(item.decode() for item in self._redis.smembers(keys.reader_open(reader)))

    def _now(self, now_ms: int | None) -> int:
        if now_ms is not None:
            return now_ms
        seconds, micros = self._redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

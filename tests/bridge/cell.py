"""What the tests of the bridge process do to a cell: jobs come in, workers join, claim, publish and die."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from redis import Redis

from bridge.watch.watchdog import Watchdog
from decode.engine.sampling import SamplingParams
from tasks.protocol import keys
from tasks.protocol.broker import build_broker
from tasks.protocol.contract import GenerationJob, TerminalEvent, WorkerInfo, WorkerLoad, decode_entry
from tasks.protocol.record import Append, RequestRecords, Terminal
from tasks.protocol.submit import Submitter

MODEL = "m"
FINGERPRINT = "fp1"
LEASE_MS = 500


@dataclass
class Cell:
    redis: Redis
    queue: Redis

    def __post_init__(self) -> None:
        self.records = RequestRecords(self.redis)
        self.submitter = Submitter(self.records, build_broker(self.queue), self.redis)
        self.watchdog = Watchdog(
            self.redis, self.records, self.submitter, is_queue_empty=lambda name: not self.messages(name)
        )
        self.claims = 0

    def join(self, worker: str, now_ms: int) -> None:
        info = WorkerInfo(
            worker=worker,
            pid=1,
            host="h",
            device="cpu",
            model=MODEL,
            fingerprint=FINGERPRINT,
            variant="fp32",
            max_model_len=100,
            max_num_seqs=8,
            kv_cache_tokens=1000,
            started_ms=now_ms,
        )
        self.records.heartbeat(info, WorkerLoad(), LEASE_MS, now_ms=now_ms)

    def offer(
        self,
        request_id: str,
        now_ms: int,
        *,
        reader: str | None = None,
        outlive_reader: bool = False,
        lost: bool = False,
    ) -> None:
        """A job comes in; with `lost`, its message never reaches the queue."""
        job = GenerationJob(request_id, MODEL, (1, 2, 3), SamplingParams(max_tokens=9), now_ms)
        self.records.submit([job], reader=reader, outlive_reader=outlive_reader, max_waiting=1000, now_ms=now_ms)
        if not lost:
            self.queue.rpush(keys.message_list(keys.queue_new(MODEL)), request_id)

    def claim(self, request_id: str, worker: str, now_ms: int, attempt: int = 1) -> tuple[int, ...]:
        """The worker takes the message out of the queue and claims; returns the tokens to continue from."""
        self.claims += 1
        queue = self.records.queue_of(request_id)
        assert queue is not None
        self.queue.lpop(keys.message_list(queue))
        claim_id = f"claim-{self.claims}"
        return self.records.claim(request_id, attempt, worker, FINGERPRINT, claim_id, now_ms=now_ms).token_ids

    def publish(
        self,
        request_id: str,
        attempt: int,
        first_index: int,
        tokens: tuple[int, ...],
        now_ms: int,
        *,
        end: bool = False,
        cached: int = 0,
    ) -> str:
        terminal = Terminal("finished", "stop") if end else None
        append = Append(request_id, attempt, first_index, tokens, cached, terminal)
        return type(self.records.append_many([append], now_ms=now_ms)[0]).__name__

    def messages(self, queue: str) -> int:
        return int(self.queue.llen(keys.message_list(queue)))

    def queued(self) -> list[str]:
        """The queues that hold messages."""
        names = [keys.queue_continue(MODEL, FINGERPRINT), keys.queue_again(MODEL), keys.queue_new(MODEL)]
        return [name for name in names if self.messages(name)]

    def output(self, request_id: str) -> tuple[list[int], list[TerminalEvent]]:
        """Every token published and every terminal entry of a request."""
        tokens: list[int] = []
        ends: list[TerminalEvent] = []
        entries: Any = self.redis.xrange(keys.out(request_id))
        for entry_id, fields in entries:
            match decode_entry(entry_id, fields):
                case TerminalEvent() as end:
                    ends.append(end)
                case event:
                    assert event.index == len(tokens)
                    tokens += event.token_ids
        return tokens, ends

    def fact(
        self, kind: str, request_id: str = "", attempt: int | str = "", *, entry_id: str = "*", **other: Any
    ) -> None:
        """Writes a fact as the scripts do; `t`, `w` and `m` by name, other names go into its details."""
        fields: dict[Any, Any] = {"k": kind, "id": request_id, "a": str(attempt), "w": "", "m": "m", "t": "1000"}
        fields |= {name: str(other.pop(name)) for name in ("w", "m", "t") if name in other}
        self.redis.xadd(keys.EVENTS, {**fields, "d": json.dumps(other)}, id=entry_id)

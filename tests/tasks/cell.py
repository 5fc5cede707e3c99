"""What the tests of the request record and of the worker share: a job, a worker's description, a room of records."""

from __future__ import annotations

from typing import Any

from redis import Redis

from decode.engine.sampling import SamplingParams
from tasks.protocol import keys
from tasks.protocol.contract import GenerationJob, StreamEvent, TerminalEvent, WorkerInfo, WorkerLoad, decode_entry
from tasks.protocol.record import Append, AppendResult, RequestRecords, Terminal
from tests.conftest import RedisServer

MODEL = "m"
START_MS = 1_700_000_000_000
LEASE_MS = 500


def job(
    request_id: str = "r1", *, prompt: tuple[int, ...] = (1, 2, 3), model: str = MODEL, **sampling: Any
) -> GenerationJob:
    known = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return GenerationJob(request_id, model, prompt, SamplingParams(**known), START_MS)


def info(worker: str = "w1", *, fingerprint: str = "fp", model: str = MODEL, max_num_seqs: int = 8) -> WorkerInfo:
    return WorkerInfo(worker, 1, "host", "cpu", model, fingerprint, "fp32", 1000, max_num_seqs, 4096, START_MS)


class Cell:
    """Records over one server, with a clock that stands still until a test moves it."""

    def __init__(self, server: RedisServer, **options: Any) -> None:
        self.server = server
        self.redis: Any = server.connect()
        self.queue: Redis = server.connect("queue")
        self.records = RequestRecords(self.redis, **options)
        self.now_ms = START_MS
        self.join("w1")

    def join(self, worker: str, *, fingerprint: str = "fp", lease_ms: int = LEASE_MS) -> int:
        return self.records.heartbeat(info(worker, fingerprint=fingerprint), WorkerLoad(), lease_ms, self.now_ms)

    def submit(self, request_id: str = "r1", *, reader: str | None = "web", max_waiting: int = 100, **kw: Any) -> Any:
        made = job(request_id)
        return self.records.submit([made], reader=reader, max_waiting=max_waiting, now_ms=self.now_ms, **kw)

    def claim(self, request_id: str = "r1", attempt: int = 1, worker: str = "w1", fp: str = "fp", **kw: Any) -> Any:
        return self.records.claim(request_id, attempt, worker, fp, now_ms=self.now_ms, **kw)

    def append(
        self,
        first_index: int,
        *token_ids: int,
        end: str = "",
        request_id: str = "r1",
        attempt: int = 1,
        cached: int = 0,
    ) -> AppendResult:
        terminal = Terminal("finished", end) if end else None
        item = Append(request_id, attempt, first_index, token_ids, cached, terminal)
        return self.records.append_many([item], self.now_ms)[0]

    def state(self, request_id: str = "r1") -> Any:
        return self.records.state(request_id)

    def stream(self, request_id: str = "r1") -> list[StreamEvent]:
        return [decode_entry(entry, fields) for entry, fields in self.redis.xrange(keys.out(request_id))]

    def tokens(self, request_id: str = "r1") -> list[int]:
        """The output so far; asserts that the indices are contiguous and that nothing follows the terminal entry."""
        tokens: list[int] = []
        over = False
        for event in self.stream(request_id):
            assert not over, f"{event} after the end"
            assert event.index == len(tokens), f"{event} at {len(tokens)}"
            if isinstance(event, TerminalEvent):
                over = True
            else:
                tokens.extend(event.token_ids)
        return tokens

    def end(self, request_id: str = "r1") -> TerminalEvent:
        """The one terminal entry."""
        [event] = [event for event in self.stream(request_id) if isinstance(event, TerminalEvent)]
        return event

    def events(self) -> list[tuple[str, str, str]]:
        """(kind, request id, attempt) of every lifecycle fact."""
        return [
            (fields[b"k"].decode(), fields[b"id"].decode(), fields[b"a"].decode())
            for _, fields in self.redis.xrange(keys.EVENTS)
        ]

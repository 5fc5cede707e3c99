"""A worker whose calls to Redis get lost, on the way there or back: every request still ends, exactly."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ConnectionError

from decode.scripted import SCRIPTED_MAX_MODEL_LEN, generate, scripted_engine
from tasks.protocol import keys
from tasks.protocol.broker import build_broker
from tasks.protocol.record import Reoffer, RequestRecords
from tasks.protocol.submit import Submitter
from tasks.worker.assembly import describe_worker, start_worker
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, Cell, job

NUM_REQUESTS = 30
LOSS = 0.08
WAIT_S = 30.0


class Fate:
    """Decides which calls get lost. One for all threads, so the seed fixes the share and not the order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.num_lost = 0

    def strikes(self) -> bool:
        with self._lock:
            struck = self._random.random() < LOSS
            self.num_lost += struck
            return struck


class LossyPipeline(Pipeline):
    fate: Fate

    def execute(self, raise_on_error: bool = True) -> Any:
        if self.fate.strikes():
            self.reset()
            raise ConnectionError("lost on the way there")
        replies = super().execute(raise_on_error)
        if self.fate.strikes():
            raise ConnectionError("lost on the way back")
        return replies


class LossyRedis(Redis):
    fate: Fate

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if self.fate.strikes():
            raise ConnectionError("lost on the way there")
        reply = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if self.fate.strikes():
            raise ConnectionError("lost on the way back")
        return reply

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Any:
        pipe = LossyPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipe.fate = self.fate
        return pipe


def lossy(client: Redis, fate: Fate) -> LossyRedis:
    made = LossyRedis(connection_pool=client.connection_pool)
    made.fate = fate
    return made


def watch(records: RequestRecords, submitter: Submitter, queue: Any) -> None:
    """What the watchdog does, once."""
    for request_id in records.due():
        name = records.queue_of(request_id) or ""
        outcome = records.look(request_id, not queue.llen(keys.message_list(name)))
        if isinstance(outcome, Reoffer):
            submitter.requeue(outcome)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_ends_exactly_however_many_calls_get_lost(real_server: RedisServer, seed: int) -> None:
    cell, fate = Cell(real_server), Fate(seed)
    cell.records.leave("w1", MODEL)
    records = RequestRecords(cell.redis, offer_deadline_ms=100)
    submitter = Submitter(records, build_broker(cell.queue), cell.redis)
    engine = scripted_engine(kv_cache_tokens=4096, max_num_seqs=8, max_num_batched_tokens=64)
    worker = start_worker(
        engine,
        describe_worker(engine, model=MODEL, device="cpu"),
        redis=lossy(real_server.connect("short"), fate),
        blocking=lossy(real_server.connect("blocking"), fate),
        queue=lossy(real_server.connect("queue"), fate),
        heartbeat_ms=20,
        lease_ms=60_000,
    )
    try:
        turn = threading.Event()
        for _ in range(500):
            if records.workers(MODEL):
                break
            turn.wait(0.01)
        jobs = [job(f"r{n}", prompt=(n, 3, 4), max_tokens=4 + n % 7) for n in range(NUM_REQUESTS)]
        for made in jobs:
            submitter.submit([made], reader="web", max_waiting=1000)
        for _ in range(int(WAIT_S / 0.02)):
            states = [records.state(made.request_id) for made in jobs]
            if all(state is not None and state.is_over for state in states):
                break
            watch(records, submitter, cell.queue)
            turn.wait(0.02)
    finally:
        worker.stop(0)
    for made in jobs:
        assert (
            cell.tokens(made.request_id) == generate(made.prompt_token_ids, made.sampling, SCRIPTED_MAX_MODEL_LEN)[0]
        )
        assert cell.end(made.request_id).state == "finished"
    assert fate.num_lost > 10
    assert cell.redis.keys("*:held") == []
    assert records.open_of("web") == []
    assert records.num_waiting(MODEL) == 0

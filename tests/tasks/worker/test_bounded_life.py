"""Bounded life: whatever becomes of requests, what they leave in Redis has an end, and the books are as before."""

from __future__ import annotations

import random
from dataclasses import replace

from tasks.protocol import keys
from tasks.protocol.contract import Priority, WorkerLoad
from tasks.protocol.moves import Storing
from tasks.protocol.priorities import PRIORITIES
from tasks.protocol.record import Append, Appended, AppendResult, Idempotency, Refused, Reoffer, Terminal
from tasks.worker.step_log import StepLog
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, Cell, info, job

NUM_REQUESTS = 300
STREAM_TTL_S = 3_600
FOR_EVER = {keys.EVENTS}
"""Capped, and trimmed by the recorder (the table in `tasks.protocol.keys`)."""
FATES = (
    *("finished", "failed", "stopped", "disconnect", "grace", "poison"),
    *("released", "web died", "refused", "deleted"),
)


class Load:
    """Requests of every kind, each led to one of the ends that there are."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell = cell
        self.random = random.Random(seed)
        self.fates: set[str] = set()
        self.log = StepLog("w1")

    def one(self, number: int) -> None:
        cell, name = self.cell, f"r{number}"
        fate = self.random.choice(FATES)
        self.fates.add(fate)
        ids = [name, *(f"{name}.{n}" for n in range(1, self.random.choice((1, 1, 3))))]
        outlives = fate in ("finished", "stopped") and self.random.random() < 0.3
        key = Idempotency(f"key-{number // 2}", "digest") if self.random.random() < 0.3 else None
        priority: Priority = self.random.choice(PRIORITIES)
        submitted = cell.records.submit(
            [replace(job(request_id), priority=priority) for request_id in ids],
            reader=f"web{number % 3}",
            outlive_reader=outlives,
            max_waiting=10**6,
            answer=b"spec",
            idempotency=key,
            storing=Storing(f"owner{number % 2}", b"[]") if self.random.random() < 0.5 else None,
            now_ms=cell.now_ms,
        )
        if not submitted.created:
            return
        for request_id in ids:
            self.lead(request_id, fate, f"web{number % 3}")
        cell.now_ms += 7

    def lead(self, request_id: str, fate: str, web: str) -> None:
        cell, records, now_ms = self.cell, self.cell.records, self.cell.now_ms
        if self.random.random() < 0.7 or fate in ("finished", "failed"):
            cell.claim(request_id)
            self.publish(Append(request_id, 1, 0, (5,)))
            self.publish(Append(request_id, 1, 1, (6,)))
        state, attempt = cell.state(request_id).state, 1
        if fate == "released" and state == "streaming":
            reoffer = records.release(request_id, 1, "w1", "drain", now_ms)
            assert isinstance(reoffer, Reoffer)
            cell.claim(request_id, 2)
            attempt = 2
        match fate:
            case "finished" | "released" if state == "streaming":
                end = Append(request_id, attempt, 2, (7,), 0, Terminal("finished", "stop"))
                self.publish(end)
            case "failed":
                self.publish(Append(request_id, 1, 2, (), 0, Terminal("failed", "x")))
            case "poison" if state == "streaming":
                for count in (1, 2, 3):
                    records.release(request_id, count, "w1", "engine_error", now_ms)
                    if count < 3:
                        cell.claim(request_id, count + 1)
            case "disconnect":
                records.detach([request_id], web, now_ms=now_ms)
            case "grace":
                records.detach([request_id], web, 100, now_ms=now_ms)
            case "web died":
                pass
            case "deleted" if state == "streaming":
                end = Append(request_id, attempt, 2, (7,), 0, Terminal("finished", "stop"))
                self.publish(end)
                first = request_id.split(".")[0]
                records.stored.delete(first, f"owner{int(first[1:]) % 2}")
            case _:
                records.close(request_id, "cancelled", "stopped", now_ms=now_ms)

    def publish(self, item: Append) -> None:
        """The second of a request goes into the log alone, unless something has ended since the first."""
        plan = self.log.plan([item])
        published = self.cell.records.publish(plan.appends, plan.step, self.cell.now_ms)
        settled = self.log.take(plan, published)
        if plan.logged and not published.is_undisturbed:
            plan = self.log.plan_unlogged(plan)
            settled += self.log.take(plan, self.cell.records.publish(plan.appends, plan.step, self.cell.now_ms))
        assert all(isinstance(result, Appended) for _, result in settled)

    def settle(self) -> None:
        """The web processes are dead, and every grace is over."""
        cell = self.cell
        for number in range(3):
            web = f"web{number}"
            if open_ids := cell.records.open_of(web):
                cell.records.detach(open_ids, web, now_ms=cell.now_ms)
            assert cell.records.forget_reader(web, cell.now_ms + 10**6)
        cell.now_ms += 20_000
        while due := cell.records.due(cell.now_ms):
            for request_id in due:
                cell.records.look(request_id, False, cell.now_ms)


def lasting(cell: Cell) -> set[str]:
    """The keys that are there still when the time of every stream is over."""
    return {key.decode() for key in cell.redis.keys("*") if not 0 < cell.redis.pttl(key) <= STREAM_TTL_S * 1000}


def test_after_many_requests_of_every_kind_only_what_was_there_before_lasts(redis_server: RedisServer) -> None:
    cell = Cell(redis_server, stream_ttl_s=STREAM_TTL_S, store_ttl_s=STREAM_TTL_S, store_max=5)
    cell.records.heartbeat(info(), WorkerLoad(), 10**9, cell.now_ms)
    warm = Load(cell, 0)
    warm.one(10**6)
    warm.settle()
    cell.records.close(f"r{10**6}", "cancelled", "stopped", now_ms=cell.now_ms)
    before = lasting(cell)
    load = Load(cell, 1)
    for number in range(NUM_REQUESTS):
        load.one(number)
    load.settle()
    assert load.fates == set(FATES)
    marks = {keys.claimed_until(queue) for queue in keys.worker_queues(MODEL, "fp")}
    marks |= {keys.control(f"web{number}") for number in range(3)}
    assert lasting(cell) - before <= marks
    assert {key.decode() for key in cell.redis.keys("*") if cell.redis.pttl(key) < 0} <= FOR_EVER
    assert {cell.redis.zcard(keys.stored(f"owner{number}")) for number in (0, 1)} == {5}
    assert cell.records.num_waiting(MODEL) == 0
    assert cell.records.held("w1") == []


def test_a_flushed_redis_is_not_written_to_by_those_who_did_not_notice(redis_server: RedisServer) -> None:
    cell = Cell(redis_server)
    cell.submit()
    cell.claim()
    cell.append(0, 5)
    cell.redis.flushall()
    assert cell.append(1, 6).reason == "missing"  # type: ignore[union-attr]
    assert cell.append(1, 6, end="stop").reason == "missing"  # type: ignore[union-attr]
    assert cell.records.release("r1", 1, "w1", "drain", cell.now_ms) is None
    assert cell.records.reoffer("r1", 1, "worker_lost", cell.now_ms) is None
    assert not cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.records.attach(["r1"], "web", cell.now_ms) == [False]
    assert cell.records.detach(["r1"], "web", now_ms=cell.now_ms) == []
    assert cell.records.look("r1", True, cell.now_ms) is None
    assert cell.redis.keys("*") == []


def test_a_worker_with_a_log_that_did_not_notice_leaves_only_what_has_an_end(redis_server: RedisServer) -> None:
    cell = Cell(redis_server)
    log = StepLog("w1")
    cell.submit()
    cell.claim()
    refused: list[AppendResult] = []
    for index in range(4):
        if index == 2:
            cell.redis.flushall()
        plan = log.plan([Append("r1", 1, index, (index,))])
        published = cell.records.publish(plan.appends, plan.step, cell.now_ms)
        settled = log.take(plan, published)
        if plan.logged and not published.is_undisturbed:
            plan = log.plan_unlogged(plan)
            settled += log.take(plan, cell.records.publish(plan.appends, plan.step, cell.now_ms))
        refused += [result for _, result in settled if isinstance(result, Refused)]
    assert refused == [Refused("missing")] * 2
    left = [keys.worker_rev("w1"), keys.steps("w1")]
    assert sorted(cell.redis.keys("*")) == [name.encode() for name in left]
    assert all(0 < cell.redis.pttl(name) <= keys.STEPS_TTL_MS for name in left)

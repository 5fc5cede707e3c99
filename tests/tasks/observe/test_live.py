"""The live picture: what one look at Redis says about a cell."""

from __future__ import annotations

import pytest

from decode.engine.sampling import SamplingParams
from tasks.observe.live import MAX_WAITING_SHOWN, LiveCell, LiveRequest, Overview
from tasks.protocol import keys
from tasks.protocol.contract import GenerationJob, Priority, WorkerInfo, WorkerLoad
from tasks.protocol.record import Append, RequestRecords
from tests.conftest import RedisServer

NOW_MS = 1_000_000


def info(worker: str) -> WorkerInfo:
    return WorkerInfo(
        worker=worker,
        pid=1,
        host="h",
        device="cpu",
        model="m",
        fingerprint="fp",
        variant="fp32",
        max_model_len=100,
        max_num_seqs=8,
        kv_cache_tokens=1000,
        started_ms=0,
    )


class Cell:
    """Its clock is that of Redis, so that leases are live; what is submitted is of any time."""

    def __init__(self, server: RedisServer) -> None:
        self.redis = server.connect()
        self.records = RequestRecords(self.redis)
        self.live = LiveCell(self.redis)

    def join(self, worker: str, lease_ms: int = 3_600_000) -> None:
        self.records.heartbeat(info(worker), WorkerLoad(num_running=2, num_free_blocks=3, num_blocks=9), lease_ms)

    def submit(self, *ids: str, priority: Priority = "default", prompt: int = 3) -> None:
        for request_id in ids:
            job = GenerationJob(request_id, "m", (1,) * prompt, SamplingParams(max_tokens=9), 0, priority)
            self.records.submit([job], reader=None, max_waiting=2000)

    def claim(self, request_id: str, worker: str) -> None:
        self.records.claim(request_id, 1, worker, "fp")


@pytest.fixture
def cell(redis_server: RedisServer) -> Cell:
    return Cell(redis_server)


def one(overview: Overview) -> LiveRequest:
    [request] = overview.requests
    return request


def test_an_empty_cell_is_a_picture_too(cell: Cell) -> None:
    seen = cell.live.look()
    assert (seen.workers, seen.queues, seen.requests, seen.num_running) == ((), (), (), 0)
    assert seen.at_ms > 0
    assert cell.live.last_facts(10) == []


def test_a_worker_is_shown_with_its_load_and_what_it_holds(cell: Cell) -> None:
    cell.join("w1")
    cell.submit("a")
    cell.claim("a", "w1")
    [worker] = cell.live.look().workers
    assert (worker.info.worker, worker.load.num_blocks, worker.is_live, worker.num_held) == ("w1", 9, True, 1)


def test_a_worker_without_a_lease_is_shown_as_lost_until_the_watchdog_has_seen_to_it(cell: Cell) -> None:
    cell.join("w1")
    cell.records.expire_lease("w1", "m")
    assert [worker.is_live for worker in cell.live.look().workers] == [False]
    cell.records.leave("w1", "m")
    assert cell.live.look().workers == ()


def test_a_worker_of_another_version_is_counted_and_hides_nobody(cell: Cell) -> None:
    cell.join("w1")
    cell.join("w2")
    cell.redis.hset(keys.worker("w1"), "info", b'{"v": 99}')
    seen = cell.live.look()
    assert [worker.info.worker for worker in seen.workers] == ["w2"]
    assert seen.num_strange_workers == 1


def test_each_class_has_its_length_and_the_age_of_its_oldest(cell: Cell) -> None:
    cell.join("w1")
    cell.submit("a", "b")
    cell.submit("c", priority="flex")
    offered = cell.records.state("a")
    assert offered is not None
    counts = {queue.priority: (queue.num_waiting, queue.oldest_ms) for queue in cell.live.look().queues}
    assert counts["priority"] == (0, 0)
    assert counts["default"] == (2, offered.offered_ms)
    assert counts["flex"][0] == 1


def test_a_request_is_followed_from_offer_to_tokens_to_nothing(cell: Cell) -> None:
    cell.join("w1")
    cell.submit("a")
    waiting = one(cell.live.look())
    assert (waiting.state, waiting.worker, waiting.num_tokens, waiting.claimed_ms) == ("offered", "", 0, 0)
    assert (waiting.num_prompt_tokens, waiting.max_tokens, waiting.priority) == (3, 9, "default")
    cell.claim("a", "w1")
    cell.records.append_many([Append("a", 1, 0, (5, 6), 2)])
    running = one(cell.live.look())
    assert (running.state, running.worker, running.num_tokens, running.num_cached_tokens) == ("streaming", "w1", 2, 2)
    assert 0 < running.submitted_ms <= running.claimed_ms <= running.first_token_ms
    cell.records.close("a", "cancelled", "stopped")
    assert cell.live.look().requests == ()


def test_a_huge_job_is_not_read_for_its_numbers(cell: Cell) -> None:
    cell.join("w1")
    cell.submit("a", prompt=40_000)
    assert (one(cell.live.look()).num_prompt_tokens, one(cell.live.look()).max_tokens) == (None, None)


def test_a_job_of_another_version_is_shown_without_its_numbers(cell: Cell) -> None:
    cell.join("w1")
    cell.submit("a")
    cell.redis.hset(keys.request("a"), "job", b'{"v": 99}')
    assert one(cell.live.look()).max_tokens is None


def test_a_look_is_bounded_and_still_counts_all(cell: Cell) -> None:
    cell.join("w1")
    cell.submit(*(f"r{n}" for n in range(6)))
    for n in range(6):
        cell.claim(f"r{n}", "w1")
    cell.submit(*(f"q{n:02}" for n in range(MAX_WAITING_SHOWN + 5)))
    seen = cell.live.look(max_requests=4)
    assert seen.num_running == 6
    assert sum(request.worker == "w1" for request in seen.requests) == 4
    assert sum(request.state == "offered" for request in seen.requests) == MAX_WAITING_SHOWN
    assert sum(queue.num_waiting for queue in seen.queues) == MAX_WAITING_SHOWN + 5


def test_late_facts_come_in_order_and_go_on_where_one_left(cell: Cell) -> None:
    cell.join("w1")
    with cell.redis.pipeline(transaction=False) as pipe:
        for n in range(1500):
            pipe.xadd(keys.EVENTS, {"k": "submitted", "id": f"r{n}"})
        pipe.execute()
    facts = cell.live.last_facts(1200)
    assert [fields[b"id"] for _, fields in facts] == [f"r{n}".encode() for n in range(300, 1500)]
    cell.submit("z")
    assert [fields[b"id"] for _, fields in cell.live.facts_after(facts[-1][0])] == [b"z"]


def test_the_facts_of_one_request_are_found_among_all_others_back_to_its_submission(cell: Cell) -> None:
    cell.join("w1")
    cell.submit("a", "b")
    cell.claim("a", "w1")
    cell.submit("c")
    assert [fields[b"k"] for _, fields in cell.live.facts_of("a", 100)] == [b"submitted", b"claimed"]
    assert [fields[b"k"] for _, fields in cell.live.facts_of("a", 2)] == [b"claimed"]
    assert cell.live.facts_of("nobody", 100) == []

"""What the watchdog decides from: leases, due times, lost messages, poison, and the lifetime of every key."""

from __future__ import annotations

import pytest

from tasks.protocol import keys
from tasks.protocol.contract import WorkerLoad
from tasks.protocol.record import LEASE_CHECK_MS, Failed, Reoffer
from tests.conftest import RedisServer
from tests.tasks.cell import LEASE_MS, MODEL, Cell, info

OFFER_MS = 1_000
DEADLINE_MS = 60_000


@pytest.fixture
def cell(redis_server: RedisServer) -> Cell:
    return Cell(redis_server, offer_deadline_ms=OFFER_MS, first_token_deadline_ms=DEADLINE_MS)


def lose_worker(cell: Cell, worker: str = "w1") -> None:
    cell.records.expire_lease(worker, MODEL)


# -- leases


def test_a_lease_lasts_as_long_as_it_says(cell: Cell) -> None:
    cell.now_ms += LEASE_MS - 1
    assert [worker.worker for worker, _ in cell.records.workers(now_ms=cell.now_ms)] == ["w1"]
    assert cell.records.expired_workers(cell.now_ms) == []
    cell.now_ms += 1
    assert cell.records.workers(now_ms=cell.now_ms) == []
    assert cell.records.expired_workers(cell.now_ms) == [(MODEL, "w1")]


def test_a_heartbeat_renews_the_lease_and_counts_the_live_workers(cell: Cell) -> None:
    cell.now_ms += LEASE_MS - 1
    assert cell.join("w2") == 2
    assert cell.join("w1") == 2
    cell.now_ms += LEASE_MS - 1
    assert cell.join("w2") == 2
    cell.now_ms += 1
    assert cell.join("w2") == 1
    assert cell.records.expired_workers(cell.now_ms) == [(MODEL, "w1")]


def test_a_heartbeat_carries_what_the_worker_is_and_does(cell: Cell) -> None:
    load = WorkerLoad(1, 2, 3, 4, 5)
    cell.records.heartbeat(info("w2"), load, LEASE_MS, cell.now_ms)
    assert cell.records.workers(MODEL, cell.now_ms)[1] == (info("w2"), load)


def test_a_worker_that_left_is_gone_at_once(cell: Cell) -> None:
    cell.records.leave("w1", MODEL, cell.now_ms)
    assert cell.records.workers(now_ms=cell.now_ms) == []
    assert cell.records.expired_workers(cell.now_ms + LEASE_MS) == []
    assert cell.events()[-1] == ("worker_left", "", "")


def test_a_lease_can_be_ended_before_its_time_but_not_created(cell: Cell) -> None:
    lose_worker(cell)
    lose_worker(cell, "stranger")
    assert cell.records.expired_workers(cell.now_ms) == [(MODEL, "w1")]


def test_the_least_loaded_peer_is_the_live_one_that_holds_least_and_has_a_slot(cell: Cell) -> None:
    assert cell.records.least_held_by_peers("w1", MODEL, cell.now_ms) is None
    cell.join("w2")
    cell.join("w3")
    for request_id, worker in (("a", "w2"), ("b", "w2"), ("c", "w3")):
        cell.submit(request_id)
        cell.claim(request_id, worker=worker)
    assert cell.records.least_held_by_peers("w1", MODEL, cell.now_ms) == 1
    cell.records.expire_lease("w3", MODEL)
    assert cell.records.least_held_by_peers("w1", MODEL, cell.now_ms) == 2


def test_a_peer_without_a_free_slot_does_not_count(cell: Cell) -> None:
    cell.records.heartbeat(info("w2", max_num_seqs=1), WorkerLoad(), LEASE_MS, cell.now_ms)
    cell.submit()
    cell.claim(worker="w2")
    assert cell.records.least_held_by_peers("w1", MODEL, cell.now_ms) is None


def test_a_reader_expires_with_the_requests_that_end_with_their_readers(cell: Cell) -> None:
    assert not cell.records.reader_heartbeat("web", 500, cell.now_ms)
    assert cell.records.reader_heartbeat("web", 500, cell.now_ms)
    cell.submit("r1")
    cell.submit("r2", outlive_reader=True)
    assert cell.records.expired_readers(cell.now_ms + 499) == []
    assert cell.records.expired_readers(cell.now_ms + 500) == ["web"]
    assert cell.records.open_of("web") == ["r1"]


# -- a lost worker


def test_what_a_lost_worker_held_is_offered_again(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    lose_worker(cell)
    assert cell.records.held("w1") == [("r1", 1)]
    assert cell.records.reoffer("r1", 1, "worker_lost", cell.now_ms) == Reoffer("r1", 2, keys.queue_again(MODEL))
    assert cell.records.held("w1") == []


def test_a_live_worker_keeps_what_it_holds(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    assert cell.records.reoffer("r1", 1, "worker_lost", cell.now_ms) is None
    assert cell.state().attempt == 1


def test_only_the_active_attempt_is_offered_again_and_only_once(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    lose_worker(cell)
    assert cell.records.reoffer("r1", 2, "worker_lost", cell.now_ms) is None
    assert isinstance(cell.records.reoffer("r1", 1, "worker_lost", cell.now_ms), Reoffer)
    assert cell.records.reoffer("r1", 1, "worker_lost", cell.now_ms) is None
    assert cell.records.reoffer("r1", 2, "worker_lost", cell.now_ms) is None
    assert cell.records.reoffer("nobody", 1, "worker_lost", cell.now_ms) is None


def test_an_ended_request_is_never_offered_again(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, end="stop")
    lose_worker(cell)
    assert cell.records.reoffer("r1", 1, "worker_lost", cell.now_ms) is None
    assert cell.records.reoffer("r1", 1, "message_lost", cell.now_ms) is None


def test_the_returning_worker_is_fenced_out(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5)
    lose_worker(cell)
    cell.records.reoffer("r1", 1, "worker_lost", cell.now_ms)
    cell.join("w2")
    assert cell.claim(attempt=2, worker="w2").token_ids == (5,)
    assert cell.append(1, 99, attempt=1).reason == "stale"  # type: ignore[union-attr]
    cell.append(1, 6, attempt=2, end="stop")
    assert cell.tokens() == [5, 6]


def test_three_lost_workers_without_a_token_in_between_are_poison(cell: Cell) -> None:
    cell.submit()
    for attempt in (1, 2):
        cell.claim(attempt=attempt)
        lose_worker(cell)
        assert isinstance(cell.records.reoffer("r1", attempt, "worker_lost", cell.now_ms), Reoffer)
        cell.join("w1")
    cell.claim(attempt=3)
    lose_worker(cell)
    assert cell.records.reoffer("r1", 3, "worker_lost", cell.now_ms) == Failed("r1", "poison")
    assert (cell.end().state, cell.end().reason) == ("failed", "poison")
    assert cell.records.held("w1") == []


def test_a_token_in_between_forgives_the_lost_workers(cell: Cell) -> None:
    cell.submit()
    for attempt in range(1, 6):
        cell.claim(attempt=attempt)
        cell.append(attempt - 1, attempt, attempt=attempt)
        lose_worker(cell)
        assert isinstance(cell.records.reoffer("r1", attempt, "worker_lost", cell.now_ms), Reoffer)
        cell.join("w1")
    assert cell.tokens() == [1, 2, 3, 4, 5]


def test_planned_releases_and_lost_messages_are_never_poison(cell: Cell) -> None:
    cell.submit()
    for attempt in range(1, 10, 2):
        assert isinstance(cell.records.reoffer("r1", attempt, "message_lost", cell.now_ms), Reoffer)
        cell.claim(attempt=attempt + 1)
        assert isinstance(cell.records.release("r1", attempt + 1, "w1", "drain", cell.now_ms), Reoffer)


def test_engine_errors_count_like_lost_workers(cell: Cell) -> None:
    cell.submit()
    for attempt in (1, 2):
        cell.claim(attempt=attempt)
        assert isinstance(cell.records.release("r1", attempt, "w1", "engine_error", cell.now_ms), Reoffer)
    cell.claim(attempt=3)
    assert cell.records.release("r1", 3, "w1", "engine_error", cell.now_ms) == Failed("r1", "poison")


# -- a lost message


def test_only_an_offered_request_can_have_lost_its_message(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    assert cell.records.reoffer("r1", 1, "message_lost", cell.now_ms) is None


def test_an_offer_is_due_after_its_deadline_and_lost_when_the_queue_is_empty(cell: Cell) -> None:
    cell.submit()
    assert cell.records.due(cell.now_ms + OFFER_MS - 1) == []
    cell.now_ms += OFFER_MS
    assert cell.records.due(cell.now_ms) == ["r1"]
    assert cell.records.look("r1", True, cell.now_ms) == Reoffer("r1", 2, keys.queue_again(MODEL))
    assert cell.records.due(cell.now_ms) == []


def test_an_offer_in_a_long_queue_is_not_lost(cell: Cell) -> None:
    cell.submit("r1")
    cell.now_ms += 5
    cell.submit("r2")
    cell.claim("r1")
    cell.now_ms += OFFER_MS
    assert cell.records.look("r2", False, cell.now_ms) is None
    assert cell.state("r2").attempt == 1
    assert cell.records.due(cell.now_ms) == []
    assert cell.records.due(cell.now_ms + OFFER_MS) == ["r2"]


def test_an_offer_that_the_queue_has_passed_is_lost(cell: Cell) -> None:
    cell.submit("r1")
    cell.now_ms += 5
    cell.submit("r2")
    cell.claim("r2")
    cell.now_ms += OFFER_MS
    assert cell.records.look("r1", False, cell.now_ms) == Reoffer("r1", 2, keys.queue_again(MODEL))


def test_looking_too_early_changes_nothing(cell: Cell) -> None:
    cell.submit()
    assert cell.records.look("r1", True, cell.now_ms + OFFER_MS - 1) is None
    assert cell.records.due(cell.now_ms + OFFER_MS) == ["r1"]


def test_looking_finds_a_lost_worker_that_its_held_set_does_not_name(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.redis.delete(keys.held("w1"))
    cell.now_ms += LEASE_CHECK_MS
    assert cell.records.due(cell.now_ms) == ["r1"]
    assert cell.records.look("r1", True, cell.now_ms) == Reoffer("r1", 2, keys.queue_again(MODEL))


def test_looking_at_what_a_live_worker_holds_only_looks_again_later(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.now_ms += LEASE_CHECK_MS
    cell.join("w1")
    assert cell.records.look("r1", True, cell.now_ms) is None
    assert cell.records.due(cell.now_ms) == []
    assert cell.records.due(cell.now_ms + LEASE_CHECK_MS) == ["r1"]


@pytest.mark.parametrize("request_id", ["r1", "nobody"])
def test_what_is_over_or_unknown_is_no_longer_due(cell: Cell, request_id: str) -> None:
    cell.submit("r1")
    cell.records.close("r1", "cancelled", "disconnect", now_ms=cell.now_ms)
    cell.redis.zadd(keys.DUE, {request_id: 0})
    assert cell.records.look(request_id, True, cell.now_ms) is None
    assert cell.redis.zcard(keys.DUE) == 0


def test_a_request_that_nobody_can_take_fails_at_the_first_token_deadline(cell: Cell) -> None:
    cell.submit()
    cell.now_ms += DEADLINE_MS - 1
    assert cell.records.look("r1", False, cell.now_ms) is None
    cell.now_ms += 1
    assert cell.records.look("r1", False, cell.now_ms) == Failed("r1", "no_worker")
    assert (cell.end().state, cell.end().reason) == ("failed", "no_worker")


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_request_that_live_workers_do_not_start_fails_at_the_deadline(cell: Cell, is_claimed: bool) -> None:
    cell.submit()
    if is_claimed:
        cell.claim()
    cell.now_ms += DEADLINE_MS
    cell.join("w1")
    assert cell.records.look("r1", False, cell.now_ms) == Failed("r1", "first_token_deadline")
    assert cell.records.held("w1") == []


def test_lost_messages_do_not_extend_the_deadline(cell: Cell) -> None:
    cell.submit()
    cell.now_ms += DEADLINE_MS - 10
    cell.join("w1")
    assert isinstance(cell.records.look("r1", True, cell.now_ms), Reoffer)
    cell.now_ms += 10
    assert cell.records.look("r1", True, cell.now_ms) == Failed("r1", "first_token_deadline")


def test_a_streaming_request_has_no_first_token_deadline(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5)
    cell.now_ms += 2 * DEADLINE_MS
    cell.join("w1")
    assert cell.records.look("r1", False, cell.now_ms) is None


def test_a_stream_that_nobody_can_continue_fails_a_deadline_after_it_was_let_down(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5)
    cell.now_ms += 2 * DEADLINE_MS
    lose_worker(cell)
    cell.records.reoffer("r1", 1, "worker_lost", cell.now_ms)
    cell.join("w2", fingerprint="other", lease_ms=2 * DEADLINE_MS)
    assert cell.records.look("r1", False, cell.now_ms + DEADLINE_MS - 1) is None
    assert cell.records.look("r1", False, cell.now_ms + DEADLINE_MS) == Failed("r1", "no_worker")
    assert cell.tokens() == [5]


def test_the_longest_overdue_comes_first_and_the_limit_holds(cell: Cell) -> None:
    for request_id in ("b", "a", "c"):
        cell.submit(request_id)
        cell.now_ms += 1
    assert cell.records.due(cell.now_ms + OFFER_MS, limit=2) == ["b", "a"]


def test_the_queue_of_a_request_is_where_it_was_last_offered(cell: Cell) -> None:
    cell.submit()
    assert cell.records.queue_of("r1") == keys.queue_new(MODEL)
    cell.records.reoffer("r1", 1, "message_lost", cell.now_ms)
    assert cell.records.queue_of("r1") == keys.queue_again(MODEL)
    assert cell.records.queue_of("nobody") is None


# -- lifetimes


def test_everything_written_for_a_request_expires_or_is_bounded(cell: Cell) -> None:
    cell.records.reader_heartbeat("web", 500, cell.now_ms)
    cell.submit("r1")
    cell.submit("r2")
    cell.claim("r1")
    cell.append(0, 5)
    bounded = {keys.EVENTS.encode(), keys.DUE.encode()}
    eternal = {key for key in cell.redis.keys("*") if cell.redis.pttl(key) < 0}
    assert eternal == bounded


def test_an_ended_request_is_kept_for_the_time_of_its_stream(redis_server: RedisServer) -> None:
    cell = Cell(redis_server, stream_ttl_s=7, active_ttl_s=1000)
    cell.submit()
    cell.claim()
    cell.append(0, 5)
    assert cell.redis.ttl(keys.request("r1")) > 900
    assert cell.redis.ttl(keys.out("r1")) > 900
    cell.append(1, end="stop")
    assert 0 < cell.redis.pttl(keys.request("r1")) <= 7000
    assert 0 < cell.redis.pttl(keys.out("r1")) <= 7000


def test_a_request_closed_while_it_is_queued_expires_too(redis_server: RedisServer) -> None:
    cell = Cell(redis_server, stream_ttl_s=7)
    cell.submit()
    cell.records.close("r1", "cancelled", "disconnect", now_ms=cell.now_ms)
    assert 0 < cell.redis.pttl(keys.request("r1")) <= 7000
    assert 0 < cell.redis.pttl(keys.out("r1")) <= 7000


def test_the_job_is_forgotten_with_the_end(cell: Cell) -> None:
    cell.submit()
    cell.records.close("r1", "cancelled", "disconnect", now_ms=cell.now_ms)
    assert not cell.redis.hexists(keys.request("r1"), "job")


def test_an_expired_record_leaves_the_books_of_its_worker(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.redis.delete(keys.request("r1"))
    assert cell.records.held("w1") == []
    assert not cell.redis.exists(keys.held("w1"))


def test_an_offer_whose_record_expired_does_not_fill_the_queue_for_ever(redis_server: RedisServer) -> None:
    cell = Cell(redis_server, active_ttl_s=10)
    cell.submit("r1", max_waiting=1)
    cell.redis.delete(keys.request("r1"))
    cell.now_ms += 10_000
    cell.join("w1")
    assert cell.submit("r2", max_waiting=1).created

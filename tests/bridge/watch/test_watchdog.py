"""The watchdog on a cell where everything that can be lost is lost, each bad moment as a plain sequence of calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis.exceptions import ConnectionError

from bridge.watch.watchdog import Deadlines, Tick, Watchdog
from tasks.protocol import keys
from tasks.protocol.errors import Stale
from tasks.protocol.record import READER_LEASE_MS, Failed, Reoffer, RequestRecords
from tests.bridge.cell import LEASE_MS, MODEL, Cell

T0 = 1_000_000
AGAIN = keys.queue_again(MODEL)
DEAD = T0 + LEASE_MS + 100
"""By then the lease of a worker that was last heard of at T0 + 100 is over."""


def settle(cell: Cell, now_ms: int) -> None:
    """The first tick learns which models there are."""
    cell.watchdog.tick(now_ms)


def test_an_idle_tick_is_one_round_trip_and_does_nothing(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    cell.join("w1", T0)
    settle(cell, T0)

    class Untouchable:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"idle, yet {name} was asked")

    watchdog = Watchdog(cell.redis, Untouchable(), Untouchable(), is_queue_empty=bool)  # type: ignore[arg-type]
    trips = 0
    pipeline = cell.redis.pipeline

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal trips
        trips += 1
        return pipeline(*args, **kwargs)

    monkeypatch.setattr(cell.redis, "pipeline", counted)
    monkeypatch.setattr(cell.redis, "execute_command", Untouchable())
    done = watchdog.tick(T0 + 1)
    assert (trips, done.reoffered, done.workers_gone) == (1, [], [])


def test_a_deadline_has_passed_from_its_own_millisecond_on() -> None:
    assert Deadlines(10, 10, None, 11).is_worker_expired
    assert not Deadlines(10, 10, None, 11).is_request_due
    assert not Deadlines(10, 10, None, 11).is_reader_expired


@pytest.mark.parametrize(
    ("worker_lease_ms", "due_ms", "wait_ms"),
    [(None, None, 100), (1400, None, 100), (1060, 1070, 60), (None, 1070, 70), (1003, None, 20), (900, None, 20)],
)
def test_the_next_tick_is_at_the_earliest_deadline_within_limits(
    worker_lease_ms: int | None, due_ms: int | None, wait_ms: int
) -> None:
    assert Deadlines(1000, worker_lease_ms, None, due_ms).wait_ms == wait_ms
    assert Deadlines(1000, None, worker_lease_ms, due_ms).wait_ms == wait_ms


def test_a_tick_says_when_the_next_one_should_be(cell: Cell) -> None:
    cell.join("w1", T0)
    settle(cell, T0)
    assert cell.watchdog.tick(T0 + LEASE_MS - 70).wait_ms == 70


def test_redis_own_clock_is_used_when_none_is_given(cell: Cell) -> None:
    assert cell.watchdog.deadlines().now_ms > 1_600_000_000_000


def test_a_worker_that_dies_after_its_claim_is_buried_and_its_request_offered_again(cell: Cell) -> None:
    cell.join("w1", T0)
    settle(cell, T0)
    cell.offer("r1", T0)
    cell.claim("r1", "w1", T0 + 10)
    cell.join("w1", T0 + 100)
    assert cell.watchdog.tick(DEAD - 1).reoffered == []
    done = cell.watchdog.tick(DEAD)
    assert done.reoffered == [Reoffer("r1", 2, AGAIN)]
    assert done.workers_gone == ["w1"]
    assert cell.queued() == [AGAIN]
    assert cell.watchdog.tick(DEAD + 50).workers_gone == []
    assert cell.records.held("w1") == []


def test_after_tokens_the_next_worker_continues_and_the_dead_one_cannot_write(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.join("w2", T0 + 400)
    settle(cell, T0 + 400)
    cell.offer("r1", T0)
    cell.claim("r1", "w1", T0 + 10)
    cell.publish("r1", 1, 0, (11, 12), T0 + 20)
    done = cell.watchdog.tick(T0 + LEASE_MS)
    assert done.reoffered == [Reoffer("r1", 2, keys.queue_continue(MODEL, "fp1"))]
    assert cell.publish("r1", 1, 2, (99,), T0 + 510) == "Refused"
    assert cell.claim("r1", "w2", T0 + 520, attempt=2) == (11, 12)
    cell.publish("r1", 2, 2, (13,), T0 + 530, end=True)
    tokens, ends = cell.output("r1")
    assert tokens == [11, 12, 13]
    assert [end.state for end in ends] == ["finished"]


def test_a_worker_that_dies_between_fetching_the_message_and_claiming_leaves_a_lost_message(cell: Cell) -> None:
    cell.join("w1", T0)
    settle(cell, T0)
    cell.offer("r1", T0)
    cell.queue.lpop(keys.message_list(keys.queue_new(MODEL)))
    assert cell.watchdog.tick(T0 + LEASE_MS).reoffered == []
    assert cell.watchdog.tick(T0 + 1000).reoffered == [Reoffer("r1", 2, AGAIN)]


def test_a_message_that_never_reached_the_queue_is_sent_again_at_the_offer_deadline(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.offer("r1", T0, lost=True)
    assert cell.watchdog.tick(T0 + 999).reoffered == []
    assert cell.watchdog.tick(T0 + 1000).reoffered == [Reoffer("r1", 2, AGAIN)]
    assert cell.queued() == [AGAIN]


def test_a_long_queue_is_not_mistaken_for_lost_messages(cell: Cell) -> None:
    cell.join("w1", T0)
    for n in range(5):
        cell.offer(f"r{n}", T0 + n)
    for now_ms in range(T0 + 1000, T0 + 10_000, 500):
        cell.join("w1", now_ms)
        assert cell.watchdog.tick(now_ms).reoffered == []
    assert cell.messages(keys.queue_new(MODEL)) == 5


def test_a_lost_message_in_a_long_queue_is_known_by_a_younger_one_that_was_claimed(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.offer("lost", T0, lost=True)
    for n in range(3):
        cell.offer(f"r{n}", T0 + 1 + n)
    cell.claim("r0", "w1", T0 + 10)
    cell.join("w1", T0 + 1100)
    done = cell.watchdog.tick(T0 + 1100)
    assert [reoffer.request_id for reoffer in done.reoffered] == ["lost"]


def test_a_claim_that_comes_after_the_message_was_taken_for_lost_is_refused(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.offer("r1", T0, lost=True)
    cell.watchdog.tick(T0 + 1000)
    with pytest.raises(Stale):
        cell.claim("r1", "w1", T0 + 1001, attempt=1)
    assert cell.claim("r1", "w1", T0 + 1002, attempt=2) == ()


def claim_and_die(cell: Cell, *, num_workers: int, with_a_token: bool) -> Tick:
    """One worker after the other claims r1, and is lost; returns what was done about the last one."""
    cell.join("w0", T0)
    cell.offer("r1", T0)
    now_ms = T0
    for n in range(num_workers):
        cell.join(f"w{n}", now_ms)
        settle(cell, now_ms)
        cell.claim("r1", f"w{n}", now_ms + 1, attempt=n + 1)
        if with_a_token:
            cell.publish("r1", n + 1, n, (20 + n,), now_ms + 2)
        now_ms += LEASE_MS
        done = cell.watchdog.tick(now_ms)
    return done


def test_a_request_whose_workers_keep_dying_without_a_token_is_poison(cell: Cell) -> None:
    done = claim_and_die(cell, num_workers=3, with_a_token=False)
    assert done.failed == [Failed("r1", "poison")]
    assert [end.reason for end in cell.output("r1")[1]] == ["poison"]
    assert cell.queued() == []


def test_a_token_between_the_deaths_takes_the_poison_away(cell: Cell) -> None:
    done = claim_and_die(cell, num_workers=4, with_a_token=True)
    assert [reoffer.attempt for reoffer in done.reoffered] == [5]


def test_a_request_without_any_worker_fails_at_the_first_token_deadline(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.offer("r1", T0)
    failed = [done for now_ms in range(T0, T0 + 60_001, 500) for done in cell.watchdog.tick(now_ms).failed]
    assert failed == [Failed("r1", "no_worker")]
    assert [end.reason for end in cell.output("r1")[1]] == ["no_worker"]


def test_the_requests_of_a_reader_that_is_gone_are_cancelled(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.records.reader_heartbeat("web1", LEASE_MS, now_ms=T0)
    cell.offer("queued", T0, reader="web1")
    cell.offer("running", T0, reader="web1")
    cell.claim("running", "w1", T0 + 10)
    assert cell.watchdog.tick(T0 + LEASE_MS - 1).cancelled == []
    cell.join("w1", T0 + LEASE_MS - 1)
    done = cell.watchdog.tick(T0 + LEASE_MS)
    assert done.cancelled == ["queued", "running"]
    assert done.readers_gone == ["web1"]
    assert cell.publish("running", 1, 0, (1,), T0 + 600) == "Refused"
    for request_id in ("queued", "running"):
        assert [(end.state, end.reason) for end in cell.output(request_id)[1]] == [("cancelled", "disconnect")]
    assert cell.watchdog.tick(T0 + 700).readers_gone == []


def test_a_request_that_another_web_process_reads_as_well_goes_on(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.records.reader_heartbeat("web1", LEASE_MS, now_ms=T0)
    cell.offer("r1", T0, reader="web1")
    cell.records.attach(["r1"], "web2", now_ms=T0)
    assert cell.watchdog.tick(T0 + LEASE_MS).readers_gone == ["web1"]
    assert cell.output("r1")[1] == []
    assert cell.watchdog.tick(T0 + READER_LEASE_MS).cancelled == ["r1"]


def test_a_web_process_that_died_before_its_first_heartbeat_is_found(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.offer("r1", T0, reader="web1")
    done = cell.watchdog.tick(T0 + READER_LEASE_MS)
    assert (done.cancelled, done.readers_gone) == (["r1"], ["web1"])


def test_a_client_that_left_may_come_back_within_its_grace_and_no_later(cell: Cell) -> None:
    cell.join("w1", T0)
    for request_id in ("back", "gone"):
        cell.offer(request_id, T0, reader="web1")
    cell.records.detach(["back", "gone"], "web1", 2_000, now_ms=T0)
    assert cell.watchdog.tick(T0 + 1_999).cancelled == []
    cell.records.attach(["back"], "web1", now_ms=T0 + 1_999)
    assert cell.watchdog.tick(T0 + 2_000).cancelled == ["gone"]
    assert cell.output("back")[1] == []


def test_a_request_that_was_asked_to_outlive_its_reader_goes_on(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.records.reader_heartbeat("web1", LEASE_MS, now_ms=T0)
    cell.offer("r1", T0, reader="web1", outlive_reader=True)
    cell.claim("r1", "w1", T0 + 10)
    cell.join("w1", T0 + LEASE_MS)
    assert cell.watchdog.tick(T0 + LEASE_MS).cancelled == []
    assert cell.publish("r1", 1, 0, (1,), T0 + 600, end=True) == "Appended"


def test_a_finished_request_of_a_reader_that_is_gone_stays_finished(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.records.reader_heartbeat("web1", LEASE_MS, now_ms=T0)
    cell.offer("r1", T0, reader="web1")
    cell.claim("r1", "w1", T0 + 10)
    cell.publish("r1", 1, 0, (1,), T0 + 20, end=True)
    assert cell.watchdog.tick(T0 + LEASE_MS).cancelled == []
    assert [end.state for end in cell.output("r1")[1]] == ["finished"]


def test_a_watchdog_killed_in_the_middle_of_a_burial_is_followed_by_one_that_ends_it(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell.join("w1", T0)
    settle(cell, T0)
    for n in range(4):
        cell.offer(f"r{n}", T0)
        cell.claim(f"r{n}", "w1", T0 + 1)
    reoffer, calls = RequestRecords.reoffer, 0

    def dying(self: RequestRecords, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ConnectionError("killed")
        return reoffer(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RequestRecords, "reoffer", dying)
    with pytest.raises(ConnectionError):
        cell.watchdog.tick(T0 + LEASE_MS)
    done = cell.watchdog.tick(T0 + LEASE_MS + 50)
    assert sorted(item.request_id for item in done.reoffered) == ["r2", "r3"]
    assert done.workers_gone == ["w1"]
    assert cell.messages(AGAIN) == 4


def test_a_reoffer_whose_message_was_not_sent_is_found_by_its_offer_deadline(cell: Cell) -> None:
    cell.join("w1", T0)
    settle(cell, T0)
    cell.offer("r1", T0)
    cell.claim("r1", "w1", T0 + 1)
    cell.records.reoffer("r1", 1, "worker_lost", now_ms=T0 + LEASE_MS)  # and then the watchdog was killed
    assert cell.watchdog.tick(T0 + LEASE_MS + 1000).reoffered == [Reoffer("r1", 3, AGAIN)]


def test_two_watchdogs_offer_a_request_once(cell: Cell) -> None:
    cell.join("w1", T0)
    other = Watchdog(cell.redis, cell.records, cell.submitter, is_queue_empty=lambda name: not cell.messages(name))
    settle(cell, T0)
    other.tick(T0)
    cell.offer("r1", T0)
    cell.claim("r1", "w1", T0 + 1)
    assert len(cell.watchdog.tick(T0 + LEASE_MS).reoffered) == 1
    assert other.tick(T0 + LEASE_MS).reoffered == []
    assert cell.messages(AGAIN) == 1


def test_a_held_request_that_its_worker_forgot_is_found_by_its_lease_check(cell: Cell) -> None:
    cell.join("w1", T0)
    cell.offer("r1", T0)
    cell.claim("r1", "w1", T0 + 1)
    cell.redis.delete(keys.held("w1"))
    cell.watchdog.tick(T0 + LEASE_MS)
    done = [item for now_ms in range(T0 + 1000, T0 + 6000, 500) for item in cell.watchdog.tick(now_ms).reoffered]
    assert [item.attempt for item in done[:1]] == [2]


def meanwhile(monkeypatch: pytest.MonkeyPatch, happen: Callable[[], object]) -> None:
    """Right after the watchdog has looked at what a worker holds."""
    held = RequestRecords.held

    def looked(self: RequestRecords, worker: str) -> list[tuple[str, int]]:
        found = held(self, worker)
        happen()
        return found

    monkeypatch.setattr(RequestRecords, "held", looked)


def test_what_a_worker_claims_during_its_burial_is_found_by_the_next_tick(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell.join("w1", T0)
    settle(cell, T0)
    cell.offer("r1", T0)
    with monkeypatch.context() as patch:
        meanwhile(patch, lambda: cell.claim("r1", "w1", T0 + LEASE_MS))
        assert cell.watchdog.tick(T0 + LEASE_MS).workers_gone == []
    done = cell.watchdog.tick(T0 + LEASE_MS + 20)
    assert done.reoffered == [Reoffer("r1", 2, AGAIN)]
    assert done.workers_gone == ["w1"]


def test_what_a_dead_worker_claims_after_its_burial_is_found_when_a_lease_is_over(cell: Cell) -> None:
    """Its claim was on its way when its supervisor saw it die."""
    cell.join("w1", T0)
    settle(cell, T0)
    cell.offer("r1", T0)
    cell.records.expire_lease("w1", MODEL)
    assert cell.watchdog.tick(T0 + 50).workers_gone == ["w1"]
    cell.claim("r1", "w1", T0 + 51)
    assert cell.watchdog.tick(T0 + 50 + LEASE_MS).reoffered == []
    assert cell.watchdog.tick(T0 + 51 + LEASE_MS).reoffered == [Reoffer("r1", 2, AGAIN)]


def test_a_worker_that_is_heard_of_again_during_its_burial_is_not_forgotten(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten, its requests would wait for the lease check if it died before its next heartbeat."""
    cell.join("w1", T0)
    settle(cell, T0)
    cell.offer("r1", T0)
    cell.claim("r1", "w1", T0 + 1)
    with monkeypatch.context() as patch:
        meanwhile(patch, lambda: cell.join("w1", T0 + LEASE_MS))
        done = cell.watchdog.tick(T0 + LEASE_MS)
    assert (done.reoffered, done.workers_gone) == ([], [])
    assert cell.watchdog.tick(T0 + 2 * LEASE_MS).reoffered == [Reoffer("r1", 2, AGAIN)]


def test_what_a_forgotten_worker_no_longer_holds_does_not_keep_its_name(cell: Cell) -> None:
    cell.join("w1", T0)
    settle(cell, T0)
    cell.redis.sadd(keys.held("w1"), "ghost")
    assert cell.watchdog.tick(T0 + LEASE_MS).workers_gone == ["w1"]
    assert cell.redis.exists(keys.held("w1")) == 0


def test_a_tick_looks_at_a_bounded_number_of_due_requests(cell: Cell) -> None:
    cell.join("w1", T0)
    watchdog = Watchdog(cell.redis, cell.records, cell.submitter, is_queue_empty=lambda name: True, max_due=2)
    for n in range(5):
        cell.offer(f"r{n}", T0 + n, lost=True)
    counts = [len(watchdog.tick(T0 + 1100).reoffered) for _ in range(4)]
    assert counts == [2, 2, 1, 0]


def test_a_due_entry_without_a_record_is_dropped(cell: Cell) -> None:
    cell.redis.zadd(keys.DUE, {"ghost": T0})
    assert cell.watchdog.tick(T0).reoffered == []
    assert cell.redis.zcard(keys.DUE) == 0

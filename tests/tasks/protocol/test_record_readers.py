"""Who reads a request: attach, detach, grace, dead web processes. Disconnect, stop and resume are three outcomes."""

from __future__ import annotations

import pytest

from tasks.protocol import keys
from tasks.protocol.record import READER_LEASE_MS, Cancelled, Reoffer
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, Cell


@pytest.fixture
def cell(redis_server: RedisServer) -> Cell:
    return Cell(redis_server)


def attach(cell: Cell, reader: str, *request_ids: str) -> list[bool]:
    return cell.records.attach(request_ids, reader, cell.now_ms)


def detach(cell: Cell, reader: str, *request_ids: str, grace_ms: int = 0) -> list[str]:
    return cell.records.detach(request_ids, reader, grace_ms, cell.now_ms)


# -- disconnect, stop, resume


def test_the_last_reader_leaving_ends_a_request_as_a_disconnect(cell: Cell) -> None:
    cell.submit()
    attach(cell, "other", "r1")
    assert detach(cell, "web", "r1") == []
    assert not cell.state().is_over
    assert detach(cell, "other", "r1") == ["r1"]
    assert (cell.end().state, cell.end().reason) == ("cancelled", "disconnect")


def test_a_stop_is_not_a_disconnect_and_stopping_again_changes_nothing(cell: Cell) -> None:
    cell.submit()
    assert cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert not cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms + 5)
    assert detach(cell, "web", "r1") == []
    assert (cell.end().reason, cell.state().ended_ms) == ("stopped", cell.now_ms)


def test_a_resume_within_the_grace_keeps_the_request_alive(cell: Cell) -> None:
    cell.submit()
    assert detach(cell, "web", "r1", grace_ms=2_000) == []
    cell.now_ms += 1_999
    assert attach(cell, "other", "r1") == [True]
    cell.now_ms += 1
    cell.join("w1")
    assert isinstance(cell.records.look("r1", True, cell.now_ms), Reoffer)
    assert not cell.state().is_over
    assert detach(cell, "other", "r1") == ["r1"]


def test_without_a_resume_the_request_ends_when_the_grace_is_over(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    detach(cell, "web", "r1", grace_ms=300)
    assert cell.records.due(cell.now_ms + 299) == []
    cell.now_ms += 300
    assert cell.records.due(cell.now_ms) == ["r1"]
    assert cell.records.look("r1", False, cell.now_ms) == Cancelled("r1", "disconnect")
    assert cell.end().reason == "disconnect"
    assert cell.records.held("w1") == []


def test_a_grace_is_not_forgotten_when_the_request_changes_hands(cell: Cell) -> None:
    cell.submit()
    detach(cell, "web", "r1", grace_ms=500)
    cell.claim()
    assert cell.records.due(cell.now_ms + 500) == ["r1"]
    cell.records.release("r1", 1, "w1", "drain", cell.now_ms)
    assert cell.records.due(cell.now_ms + 500) == ["r1"]


def test_a_grace_longer_than_an_offers_deadline_delays_no_re_offer(cell: Cell) -> None:
    cell.submit()
    detach(cell, "web", "r1", grace_ms=60_000)
    cell.now_ms += 1_000
    assert cell.records.due(cell.now_ms) == ["r1"]
    assert isinstance(cell.records.look("r1", True, cell.now_ms), Reoffer)


def test_a_detach_sent_again_neither_ends_nor_prolongs_anything(cell: Cell) -> None:
    cell.submit()
    detach(cell, "web", "r1", grace_ms=1_000)
    cell.now_ms += 400
    assert detach(cell, "web", "r1") == []
    assert detach(cell, "web", "r1", grace_ms=1_000) == []
    assert cell.records.look("r1", False, cell.now_ms + 600) == Cancelled("r1", "disconnect")


def test_somebody_who_never_read_a_request_cannot_end_it_by_leaving(cell: Cell) -> None:
    cell.submit(reader=None)
    assert detach(cell, "web", "r1") == []
    assert not cell.state().is_over


def test_a_request_that_outlives_its_readers_is_never_ended_for_want_of_them(cell: Cell) -> None:
    cell.submit(outlive_reader=True)
    assert attach(cell, "web", "r1") == [True]
    assert detach(cell, "web", "r1") == []
    assert cell.records.open_of("web") == []
    assert not cell.state().is_over
    assert cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)


def test_what_is_over_or_unknown_can_be_read_but_is_nobodys_to_keep(cell: Cell) -> None:
    cell.submit()
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert attach(cell, "other", "r1", "nobody") == [False, False]
    assert detach(cell, "other", "r1", "nobody") == []
    assert cell.records.open_of("other") == []
    assert not cell.redis.exists(keys.readers_of("r1"), keys.readers_of("nobody"))


def test_several_choices_are_detached_in_one_call(cell: Cell) -> None:
    cell.submit("a")
    cell.submit("b")
    attach(cell, "other", "b")
    assert detach(cell, "web", "a", "b") == ["a"]


# -- web processes


def test_who_reads_is_watched_before_its_first_heartbeat(cell: Cell) -> None:
    cell.submit()
    assert cell.records.expired_readers(cell.now_ms + READER_LEASE_MS) == ["web"]
    attach(cell, "other", "r1")
    assert cell.records.expired_readers(cell.now_ms + READER_LEASE_MS) == ["other", "web"]


def test_an_attach_does_not_shorten_a_lease(cell: Cell) -> None:
    cell.records.reader_heartbeat("web", 60_000, cell.now_ms)
    cell.submit()
    assert cell.records.expired_readers(cell.now_ms + READER_LEASE_MS) == []


def test_a_reader_that_was_believed_dead_is_told_to_attach_again(cell: Cell) -> None:
    cell.records.reader_heartbeat("web", 500, cell.now_ms)
    assert cell.records.forget_reader("web", cell.now_ms + 500)
    assert not cell.records.reader_heartbeat("web", 500, cell.now_ms + 600)


def test_a_reader_with_a_live_lease_or_with_anything_open_is_not_forgotten(cell: Cell) -> None:
    cell.records.reader_heartbeat("web", 500, cell.now_ms)
    assert not cell.records.forget_reader("web", cell.now_ms + 499)
    cell.submit()  # between the watchdog's detach and its last word
    assert not cell.records.forget_reader("web", cell.now_ms + 500)
    assert cell.records.expired_readers(cell.now_ms + 500) == ["web"]
    detach(cell, "web", "r1")
    assert cell.records.forget_reader("web", cell.now_ms + 500)
    assert cell.redis.zcard(keys.READERS) == 0


def test_a_reader_that_leaves_with_something_open_leaves_it_to_the_watchdog_at_once(cell: Cell) -> None:
    cell.records.reader_heartbeat("web", 60_000, cell.now_ms)
    cell.submit()
    cell.records.reader_leave("web", cell.now_ms)
    assert cell.records.expired_readers(cell.now_ms) == ["web"]
    assert cell.records.open_of("web") == ["r1"]


def test_the_end_of_a_request_leaves_the_books_of_all_its_readers(cell: Cell) -> None:
    cell.submit()
    attach(cell, "other", "r1")
    cell.claim()
    cell.append(0, 5, end="stop")
    assert cell.records.open_of("web") == cell.records.open_of("other") == []
    assert not cell.redis.exists(keys.readers_of("r1"))


def test_readers_of_requests_expire_with_them(cell: Cell) -> None:
    cell.submit()
    attach(cell, "other", "r1")
    for key in (keys.readers_of("r1"), keys.reader_open("web"), keys.reader_open("other"), keys.READERS):
        assert cell.redis.pttl(key) > 0
    assert cell.records.num_waiting(MODEL) == 1

"""Stored answers: which are kept, for how long, in which order, and how they go."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.protocol import keys
from tasks.protocol.moves import Storing
from tests.conftest import RedisServer
from tests.tasks.cell import Cell, job

STORE_S = 1000
STREAM_S = 7


@pytest.fixture
def cell(redis_server: RedisServer) -> Cell:
    return Cell(redis_server, stream_ttl_s=STREAM_S, store_ttl_s=STORE_S, store_max=3)


def begin(cell: Cell, *ids: str, owner: str = "", at_ms: int = 0, **options: Any) -> None:
    cell.records.submit(
        [job(request_id) for request_id in ids],
        reader="web",
        max_waiting=100,
        answer=f"spec of {ids[0]}".encode(),
        storing=Storing(owner, b"messages"),
        now_ms=cell.now_ms + at_ms,
        **options,
    )
    for request_id in ids:
        cell.claim(request_id)


def finish(cell: Cell, *ids: str) -> None:
    for request_id in ids:
        cell.append(0, 5, end="stop", request_id=request_id)


def listed(
    cell: Cell, after: str = "", *, newest_first: bool = False, count: int = 100, owner: str = ""
) -> list[str]:
    page = cell.records.stored.page(owner, after, newest_first=newest_first, count=count)
    assert page is not None
    return [request_id for request_id, _ in page]


def lifetime(cell: Cell, request_id: str) -> set[int]:
    """Whole seconds, of all keys of a request."""
    found = {cell.redis.pttl(key(request_id)) for key in (keys.request, keys.out)}
    return {round(ttl_ms / 1000) for ttl_ms in found}


def test_a_finished_answer_is_stored_with_what_it_answers(cell: Cell) -> None:
    begin(cell, "r1")
    assert listed(cell) == []
    finish(cell, "r1")
    assert cell.records.stored.page("", "", newest_first=True, count=1) == [("r1", b"spec of r1")]
    assert cell.records.stored.messages("r1") == b"messages"
    assert lifetime(cell, "r1") == {STORE_S}
    assert cell.redis.pttl(keys.stored("")) == pytest.approx(STORE_S * 1000, abs=1000)


def test_an_answer_that_was_not_asked_to_be_stored_is_not(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    finish(cell, "r1")
    assert listed(cell) == []
    assert cell.records.stored.messages("r1") is None
    assert lifetime(cell, "r1") == {STREAM_S}


def test_all_choices_are_kept_from_the_end_of_the_last_on(cell: Cell) -> None:
    begin(cell, "r1", "r1.1", "r1.2")
    finish(cell, "r1", "r1.2")
    assert listed(cell) == []
    finish(cell, "r1.1")
    assert listed(cell) == ["r1"]
    assert lifetime(cell, "r1") == lifetime(cell, "r1.1") == lifetime(cell, "r1.2") == {STORE_S}


@pytest.mark.parametrize("state", ["cancelled", "failed"])
def test_an_answer_of_which_a_choice_did_not_finish_is_kept_like_any_other(cell: Cell, state: Any) -> None:
    begin(cell, "r1", "r1.1")
    cell.records.close("r1.1", state, "x", now_ms=cell.now_ms)
    finish(cell, "r1")
    assert listed(cell) == []
    assert lifetime(cell, "r1") == lifetime(cell, "r1.1") == {STREAM_S}


def test_an_end_that_is_sent_again_stores_once(cell: Cell) -> None:
    begin(cell, "r1")
    finish(cell, "r1", "r1")
    assert listed(cell) == ["r1"]


def test_pages_go_through_the_list_in_both_directions(cell: Cell) -> None:
    for number, name in enumerate(("c", "a", "b")):
        begin(cell, name, at_ms=number)
    finish(cell, "a", "b", "c")
    assert listed(cell) == ["c", "a", "b"]
    assert listed(cell, newest_first=True) == ["b", "a", "c"]
    assert listed(cell, count=2) == ["c", "a"]
    assert listed(cell, "a") == ["b"]
    assert listed(cell, "a", newest_first=True) == ["c"]
    assert listed(cell, "b") == []
    assert cell.records.stored.page("", "never", newest_first=False, count=1) is None


def test_each_owner_has_a_list_and_a_bound(cell: Cell) -> None:
    for number in range(4):
        begin(cell, f"a{number}", owner="Ann", at_ms=number)
        finish(cell, f"a{number}")
    begin(cell, "b", owner="Bob")
    finish(cell, "b")
    assert listed(cell, owner="Ann") == ["a1", "a2", "a3"]
    assert listed(cell, owner="Bob") == ["b"]
    assert listed(cell) == []


def test_beyond_the_bound_the_oldest_go_and_live_on_like_what_is_not_stored(cell: Cell) -> None:
    begin(cell, "r0", "r0.1")
    finish(cell, "r0", "r0.1")
    for number in (1, 2, 3):
        begin(cell, f"r{number}", at_ms=number)
        finish(cell, f"r{number}")
    assert listed(cell) == ["r1", "r2", "r3"]
    assert lifetime(cell, "r0") == lifetime(cell, "r0.1") == {STREAM_S}
    assert lifetime(cell, "r1") == {STORE_S}


def test_what_ends_late_is_stored_even_if_it_is_the_oldest(cell: Cell) -> None:
    begin(cell, "slow")
    for number in (1, 2, 3):
        begin(cell, f"r{number}", at_ms=number)
        finish(cell, f"r{number}")
    finish(cell, "slow")
    assert listed(cell) == ["slow", "r2", "r3"]
    assert lifetime(cell, "slow") == {STORE_S}


def test_what_has_expired_leaves_the_index_with_the_next_that_comes(cell: Cell) -> None:
    for number in range(2):
        begin(cell, f"r{number}", at_ms=number)
        finish(cell, f"r{number}")
    cell.redis.delete(keys.request("r0"), keys.out("r0"))
    assert cell.records.stored.page("", "", newest_first=False, count=1) == [("r0", b"")]
    begin(cell, "r2", at_ms=2)
    finish(cell, "r2")
    assert listed(cell) == ["r1", "r2"]


def test_a_bound_of_one_keeps_the_newest(redis_server: RedisServer) -> None:
    cell = Cell(redis_server, store_max=1)
    for number in range(3):
        begin(cell, f"r{number}", at_ms=number)
        finish(cell, f"r{number}")
    assert listed(cell) == ["r2"]


def test_deleting_leaves_nothing_but_its_place_for_a_while(cell: Cell) -> None:
    begin(cell, "r1", "r1.1")
    finish(cell, "r1", "r1.1")
    assert cell.records.stored.delete("r1", "") == "deleted"
    left = {key.decode() for key in cell.redis.keys("*") if b"r1" in key}
    assert left == {keys.deleted("r1")}
    assert 0 < cell.redis.pttl(keys.deleted("r1")) <= 600_000
    assert listed(cell) == []
    assert cell.records.stored.delete("r1", "") == "deleted"
    assert cell.records.stored.delete("never", "") == "unknown"


def test_what_is_not_over_is_not_deleted(cell: Cell) -> None:
    begin(cell, "r1", "r1.1")
    finish(cell, "r1")
    assert cell.records.stored.delete("r1", "") == "open"
    finish(cell, "r1.1")
    assert listed(cell) == ["r1"]


@pytest.mark.parametrize("newest_first", [False, True])
def test_whoever_deletes_what_a_page_shows_goes_on_after_it(cell: Cell, newest_first: bool) -> None:
    for name in ("b", "a", "c"):  # at the same time
        begin(cell, name)
        finish(cell, name)
    seen = []
    after = ""
    while page := listed(cell, after, newest_first=newest_first, count=1):
        [after] = page
        seen.append(after)
        cell.records.stored.delete(after, "")
    assert seen == sorted("abc", reverse=newest_first)
    assert not cell.redis.exists(keys.stored(""))


def test_amending_replaces_the_answer_and_makes_no_record(cell: Cell) -> None:
    begin(cell, "r1")
    finish(cell, "r1")
    assert cell.records.stored.amend("r1", b"new")
    assert cell.records.answer("r1") == b"new"
    assert lifetime(cell, "r1") == {STORE_S}
    cell.records.stored.delete("r1", "")
    assert not cell.records.stored.amend("r1", b"newer")
    assert not cell.redis.exists(keys.request("r1"))


def test_a_shorter_time_to_keep_does_not_shorten_that_of_what_is_there(redis_server: RedisServer) -> None:
    long, short = Cell(redis_server, store_ttl_s=STORE_S), Cell(redis_server, store_ttl_s=10)
    begin(long, "r1")
    finish(long, "r1")
    begin(short, "r2", at_ms=1)
    finish(short, "r2")
    assert short.redis.pttl(keys.stored("")) > 10_000
    assert lifetime(short, "r2") == {10}

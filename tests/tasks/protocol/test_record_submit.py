"""Submitting: several choices at once, idempotency keys and their races, the bound of each class, and Retry-After."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.protocol import keys
from tasks.protocol.contract import Priority
from tasks.protocol.errors import IdempotencyConflict, QueueFull, Stale
from tasks.protocol.record import (
    FORESTALL_MS,
    IDEMPOTENT_GRACE_MS,
    MAX_RETRY_AFTER_S,
    Idempotency,
    Refused,
    Submitted,
    retry_after_s,
)
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, Cell, job

KEY = Idempotency("client/key", "digest")


@pytest.fixture
def cell(redis_server: RedisServer) -> Cell:
    return Cell(redis_server, stream_ttl_s=7)


def submit(cell: Cell, *request_ids: str, priority: Priority = "default", **options: Any) -> Submitted:
    jobs = [replace(job(request_id), priority=priority) for request_id in request_ids]
    known = {"reader": "web", "max_waiting": 100, "now_ms": cell.now_ms, **options}
    return cell.records.submit(jobs, **known)


def ended(cell: Cell, *request_ids: str) -> Sequence[bool]:
    return [cell.state(request_id).is_over for request_id in request_ids]


# -- choices


def test_all_choices_are_offered_each_with_its_own_record(cell: Cell) -> None:
    assert submit(cell, "x", "x.1", "x.2") == Submitted("x", 1, True)
    assert cell.records.num_waiting(MODEL) == 3
    assert [cell.claim(request_id).job.request_id for request_id in ("x", "x.1", "x.2")] == ["x", "x.1", "x.2"]
    assert cell.records.open_of("web") == ["x", "x.1", "x.2"]


def test_choices_that_do_not_all_fit_into_the_queue_are_all_refused(cell: Cell) -> None:
    submit(cell, "r1", max_waiting=3)
    with pytest.raises(QueueFull) as refusal:
        submit(cell, "x", "x.1", "x.2", max_waiting=3)
    assert refusal.value.num_waiting == 1
    assert [cell.state(request_id) for request_id in ("x", "x.1", "x.2")] == [None] * 3
    assert submit(cell, "y", "y.1", max_waiting=3).created


def test_choices_sent_again_after_a_lost_reply_count_as_the_first_time(cell: Cell) -> None:
    assert submit(cell, "x", "x.1", nonce="n").created
    assert submit(cell, "x", "x.1", nonce="n").created
    assert cell.records.num_waiting(MODEL) == 2


def test_choices_are_kept_until_the_last_of_them_has_been_over_for_a_while(cell: Cell) -> None:
    submit(cell, "x", "x.1", "x.2", idempotency=KEY)
    for request_id in ("x.1", "x"):
        cell.records.close(request_id, "cancelled", "stopped", now_ms=cell.now_ms)
    kept = [keys.request("x"), keys.request("x.1"), keys.out("x"), keys.out("x.1"), keys.idempotency(KEY.key)]
    assert all(cell.redis.pttl(key) > 7000 or cell.redis.pttl(key) == -1 for key in kept[:2])
    cell.records.close("x.2", "cancelled", "stopped", now_ms=cell.now_ms)
    kept += [keys.request("x.2"), keys.out("x.2")]
    assert all(0 < cell.redis.pttl(key) <= 7000 for key in kept)


def test_a_choice_that_ends_before_its_siblings_has_a_lifetime_already(cell: Cell) -> None:
    submit(cell, "x", "x.1")
    cell.records.close("x", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.redis.pttl(keys.request("x")) > 7000
    assert cell.redis.pttl(keys.out("x")) > 7000


# -- the answer


def test_what_is_needed_to_render_the_answer_stays_with_the_first_choice_to_its_end_of_life(cell: Cell) -> None:
    submit(cell, "x", "x.1", answer=b"\x00spec")
    assert cell.records.answer("x") == b"\x00spec"
    assert cell.records.answer("x.1") is None
    assert cell.records.answer("nobody") is None
    for request_id in ("x", "x.1"):
        cell.records.close(request_id, "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.records.answer("x") == b"\x00spec"


# -- idempotency keys


def test_a_repeated_request_joins_the_first_and_is_read_by_both(cell: Cell) -> None:
    submit(cell, "x", "x.1", idempotency=KEY)
    assert submit(cell, "y", "y.1", idempotency=KEY, reader="other") == Submitted("x", 1, False)
    assert cell.state("y") is None
    assert cell.records.open_of("other") == ["x", "x.1"]
    assert cell.records.detach(["x", "x.1"], "web", now_ms=cell.now_ms) == []
    assert ended(cell, "x", "x.1") == [False, False]


def test_another_body_under_the_same_key_is_a_conflict(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY)
    with pytest.raises(IdempotencyConflict) as refusal:
        submit(cell, "y", idempotency=Idempotency(KEY.key, "another"))
    assert refusal.value.request_id == "x"
    assert cell.state("y") is None


def test_a_conflict_attaches_nobody(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY)
    with pytest.raises(IdempotencyConflict):
        submit(cell, "y", idempotency=Idempotency(KEY.key, "another"), reader="other")
    assert cell.records.open_of("other") == []


def test_two_submits_at_once_make_one_request_in_either_order(cell: Cell) -> None:
    # Each is one script, so "at once" is one of these two orders; the loser's id is never heard of again.
    for first, second in (("a", "b"), ("d", "c")):
        key = Idempotency(first, "digest")
        assert submit(cell, first, idempotency=key, nonce="1").created
        assert submit(cell, second, idempotency=key, nonce="2") == Submitted(first, 1, False)
        assert submit(cell, first, idempotency=key, nonce="1") == Submitted(first, 1, True)


def test_a_retry_after_a_lost_reply_joins_what_was_made(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY, nonce="the reply to this got lost")
    assert submit(cell, "y", idempotency=KEY, nonce="by the client's retry") == Submitted("x", 1, False)


def test_a_refused_submit_leaves_its_key_free(cell: Cell) -> None:
    with pytest.raises(QueueFull):
        submit(cell, "x", idempotency=KEY, max_waiting=0)
    assert submit(cell, "y", idempotency=Idempotency(KEY.key, "another")) == Submitted("y", 1, True)


def test_a_finished_request_is_joined_while_its_stream_is_kept(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY)
    cell.claim("x")
    cell.append(0, 5, end="stop", request_id="x")
    assert submit(cell, "y", idempotency=KEY) == Submitted("x", 1, False)
    assert cell.records.open_of("web") == []
    assert 0 < cell.redis.pttl(keys.idempotency(KEY.key)) <= 7000


def fail(cell: Cell, request_id: str) -> None:
    cell.records.close(request_id, "failed", "engine_error", now_ms=cell.now_ms)


def lose_readers(cell: Cell, request_id: str) -> None:
    cell.records.detach([request_id], "web", now_ms=cell.now_ms)
    cell.now_ms += IDEMPOTENT_GRACE_MS
    cell.records.look(request_id, False, cell.now_ms)


@pytest.mark.parametrize("let_down", [fail, lose_readers])
def test_a_request_that_was_let_down_is_generated_anew_when_it_is_repeated(
    cell: Cell, let_down: Callable[[Cell, str], None]
) -> None:
    submit(cell, "x", "x.1", idempotency=KEY)
    let_down(cell, "x.1")
    cell.join("w1")
    assert submit(cell, "y", "y.1", idempotency=KEY) == Submitted("y", 1, True)
    assert cell.state("y").state == "offered"
    assert submit(cell, "z", "z.1", idempotency=KEY) == Submitted("y", 1, False), "the key names the new one"
    with pytest.raises(IdempotencyConflict):
        submit(cell, "z", idempotency=Idempotency(KEY.key, "another"))


def test_another_body_under_the_key_of_a_failed_request_is_a_conflict_still(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY)
    fail(cell, "x")
    with pytest.raises(IdempotencyConflict):
        submit(cell, "y", idempotency=Idempotency(KEY.key, "another"))


def test_a_stopped_request_is_joined_for_its_client_wanted_that_end(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY)
    cell.records.close("x", "cancelled", "stopped", now_ms=cell.now_ms)
    assert submit(cell, "y", idempotency=KEY) == Submitted("x", 1, False)


def test_a_failed_submit_that_comes_again_late_is_not_made_again(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY, nonce="1")
    fail(cell, "x")
    submit(cell, "x", idempotency=KEY, nonce="1")
    assert cell.state("x").state == "failed"
    submit(cell, "y", idempotency=KEY, nonce="2")
    assert submit(cell, "x", idempotency=KEY, nonce="1") == Submitted("y", 1, False)


def test_a_key_that_cannot_be_served_anew_still_names_the_failed_request(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY)
    fail(cell, "x")
    with pytest.raises(QueueFull):
        submit(cell, "y", idempotency=KEY, max_waiting=0)
    assert submit(cell, "y", idempotency=KEY).created


# -- submits that were given up


def test_a_submit_that_arrives_after_it_was_given_up_is_refused(cell: Cell) -> None:
    cell.records.forestall(["x", "x.1"], cell.now_ms)
    assert not cell.records.close("x", "cancelled", "not_accepted", now_ms=cell.now_ms)
    assert submit(cell, "x", "x.1") == Submitted("x", 0, False)
    assert (cell.state("x").state, cell.state("x").reason) == ("cancelled", "not_accepted")
    assert cell.records.num_waiting(MODEL) == 0
    assert cell.records.open_of("web") == []


def test_one_choice_that_was_given_up_is_enough_to_refuse_the_request(cell: Cell) -> None:
    cell.records.forestall(["x.1"], cell.now_ms)
    assert not submit(cell, "x", "x.1").created
    assert cell.state("x") is None


def test_a_submit_with_a_key_that_arrives_after_it_was_given_up_leaves_the_key_free(cell: Cell) -> None:
    cell.records.forestall(["x"], cell.now_ms)
    assert not submit(cell, "x", idempotency=KEY).created
    assert submit(cell, "y", idempotency=KEY) == Submitted("y", 1, True)


def test_what_had_arrived_when_it_was_given_up_is_left_as_it_is(cell: Cell) -> None:
    submit(cell, "x")
    cell.records.forestall(["x"], cell.now_ms)
    assert cell.state("x").state == "offered"
    assert cell.records.close("x", "cancelled", "not_accepted", now_ms=cell.now_ms)


def test_what_was_given_up_is_remembered_for_a_while_only_and_can_do_nothing(cell: Cell) -> None:
    cell.records.forestall(["x"], cell.now_ms)
    assert 0 < cell.redis.pttl(keys.request("x")) <= FORESTALL_MS
    with pytest.raises(Stale):
        cell.claim("x", 0)
    assert cell.records.attach(["x"], "web", cell.now_ms) == [False]
    assert cell.records.detach(["x"], "web", now_ms=cell.now_ms) == []
    assert cell.records.look("x", True, cell.now_ms) is None
    assert cell.append(0, 5, request_id="x", attempt=0) == Refused("closed")
    assert cell.stream("x") == []


def test_a_key_whose_record_has_expired_is_free_for_any_body(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY)
    cell.redis.delete(keys.request("x"), keys.out("x"))
    assert submit(cell, "y", idempotency=Idempotency(KEY.key, "another")) == Submitted("y", 1, True)


def test_the_end_of_an_older_request_does_not_shorten_a_key_that_is_anothers_now(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY)
    cell.redis.hset(keys.idempotency(KEY.key), "id", "y")
    cell.records.close("x", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.redis.pttl(keys.idempotency(KEY.key)) > 7000


def test_a_lost_client_with_a_key_has_time_to_come_back(cell: Cell) -> None:
    submit(cell, "x", idempotency=KEY)
    assert cell.records.detach(["x"], "web", now_ms=cell.now_ms) == []
    assert ended(cell, "x") == [False]
    cell.now_ms += 9_999
    submit(cell, "y", idempotency=KEY, reader="other")
    cell.now_ms += 1
    cell.join("w1")
    assert cell.records.look("x", False, cell.now_ms) is None
    assert ended(cell, "x") == [False]


# -- classes


def test_a_class_is_not_refused_for_what_waits_below_it(cell: Cell) -> None:
    for number in range(2):
        submit(cell, f"f{number}", priority="flex", max_waiting=2)
    with pytest.raises(QueueFull):
        submit(cell, "f2", priority="flex", max_waiting=2)
    for number in range(2):
        submit(cell, f"d{number}", max_waiting=2)
    with pytest.raises(QueueFull):
        submit(cell, "d2", max_waiting=2)
    with pytest.raises(QueueFull):
        submit(cell, "f2", priority="flex", max_waiting=2)
    assert submit(cell, "p0", priority="priority", max_waiting=2).created
    assert cell.records.num_waiting(MODEL) == 5


def test_each_class_has_its_queue_and_a_re_offer_comes_before_all(cell: Cell) -> None:
    submit(cell, "p", priority="priority")
    submit(cell, "f", priority="flex")
    assert cell.records.queue_of("p") == keys.queue_new(MODEL, "priority")
    assert cell.records.queue_of("f") == keys.queue_new(MODEL, "flex")
    cell.claim("f")
    cell.records.release("f", 1, "w1", "drain", cell.now_ms)
    assert cell.records.queue_of("f") == keys.queue_again(MODEL)
    assert cell.redis.zcard(keys.waiting(MODEL, "flex")) == 1


# -- Retry-After


def test_the_time_to_come_back_follows_from_the_rate_of_claims(cell: Cell) -> None:
    cell.now_ms -= cell.now_ms % keys.CLAIMS_BUCKET_MS
    for number in range(30):
        submit(cell, f"r{number}")
    for number in range(20):
        cell.claim(f"r{number}")
    cell.now_ms += 10_000
    assert cell.records.retry_after_s(MODEL, now_ms=cell.now_ms) == 5  # 20 in 10 s, and 10 wait
    assert cell.records.retry_after_s(MODEL, "priority", cell.now_ms) == 1
    cell.now_ms += 40_000
    assert cell.records.retry_after_s(MODEL, now_ms=cell.now_ms) == MAX_RETRY_AFTER_S


def test_a_claim_sent_again_is_counted_once(cell: Cell) -> None:
    submit(cell, "x")
    for _ in range(3):
        cell.claim("x", claim_id="c")
    [count] = [cell.redis.get(key) for key in cell.redis.keys("tf:claims:*")]
    assert int(count) == 1


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**4), min_size=7, max_size=7), st.integers(0, 4999))
def test_the_time_to_come_back_is_bounded_and_grows_with_the_queue(
    num_waiting: int, claimed: list[int], elapsed_ms: int
) -> None:
    seconds = retry_after_s(num_waiting, claimed, elapsed_ms)
    assert 1 <= seconds <= MAX_RETRY_AFTER_S
    assert retry_after_s(num_waiting + 1, claimed, elapsed_ms) >= seconds


def test_idle_time_before_a_flood_does_not_count() -> None:
    assert retry_after_s(100, [0, 0, 0, 0, 0, 0, 50], 1000) == 2
    assert retry_after_s(100, [50, 0, 0, 0, 0, 0, 0], 0) == 60

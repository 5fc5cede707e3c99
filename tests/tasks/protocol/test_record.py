"""The request record on both servers: every move, and every refusal, as plain sequences of calls."""

from __future__ import annotations

from typing import Any

import pytest

from decode.engine.sampling import TokenLogprobs
from tasks.protocol import keys
from tasks.protocol.contract import ContractError, TerminalEvent, TokenEvent, WorkerLoad, pack_logprobs
from tasks.protocol.errors import FingerprintMismatch, NoWorker, QueueFull, Stale
from tasks.protocol.record import Append, Appended, Refused, Reoffer, Terminal
from tests.conftest import RedisServer
from tests.tasks.cell import LEASE_MS, START_MS, Cell, info, job


@pytest.fixture
def cell(redis_server: RedisServer) -> Cell:
    return Cell(redis_server)


# -- the straight line


def test_a_request_goes_from_offered_to_finished(cell: Cell) -> None:
    assert cell.submit().created
    assert cell.state().state == "offered"
    claimed = cell.claim()
    assert (claimed.job, claimed.token_ids) == (job(), ())
    assert cell.state().state == "claimed"
    assert cell.append(0, 5, cached=2) == Appended(1)
    assert cell.state().state == "streaming"
    assert cell.append(1, 6, 7, end="stop", cached=2) == Appended(3)
    state = cell.state()
    assert (state.state, state.reason, state.next_index, state.worker) == ("finished", "stop", 3, "w1")
    assert state.is_over
    assert state.num_cached_tokens == 2
    assert cell.stream() == [
        TokenEvent(0, 1, (5,)),
        TokenEvent(1, 1, (6, 7)),
        TerminalEvent(3, 1, "finished", "stop", "", "w1", 2),
    ]


def test_log_probabilities_ride_with_their_tokens_and_are_cut_with_them(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    first, second, third = (TokenLogprobs(-float(n), ((n, -0.5), (n + 1, -2.0))) for n in (1, 2, 3))

    def append(index: int, token_ids: tuple[int, ...], *logprobs: TokenLogprobs) -> None:
        item = Append("r1", 1, index, token_ids, logprobs=pack_logprobs(logprobs))
        cell.records.append_many([item], cell.now_ms)

    append(0, (5,), first)
    append(0, (5, 6, 7), first, second, third)
    append(0, (5, 6, 7), first, second, third)
    assert cell.stream() == [TokenEvent(0, 1, (5,), (first,)), TokenEvent(1, 1, (6, 7), (second, third))]


def test_the_times_of_each_move_are_kept(cell: Cell) -> None:
    cell.submit()
    cell.now_ms += 10
    cell.claim()
    cell.now_ms += 10
    cell.append(0, 5)
    cell.now_ms += 10
    cell.append(1, end="length")
    state = cell.state()
    times = state.submitted_ms, state.offered_ms, state.claimed_ms, state.first_token_ms, state.ended_ms
    assert [time - START_MS for time in times] == [0, 0, 10, 20, 30]


def test_without_an_explicit_time_redis_has_the_clock(cell: Cell) -> None:
    cell.records.heartbeat(info(), WorkerLoad(), 60_000)
    cell.records.submit([job()], reader=None, max_waiting=1)
    assert cell.state().submitted_ms > START_MS
    assert cell.records.due() == []
    assert 1 <= cell.records.retry_after_s("m") <= 40


def test_token_ids_above_two_bytes_survive_being_cut_by_a_script(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 1, 2)
    cell.append(0, 1, 2, 0x1234_5678, 0)
    assert cell.tokens() == [1, 2, 0x1234_5678, 0]


def test_every_move_leaves_a_fact_for_the_recorder(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5)
    cell.records.release("r1", 1, "w1", "drain", cell.now_ms)
    cell.claim(attempt=2)
    cell.append(1, end="stop", attempt=2)
    assert cell.events() == [
        ("worker_joined", "", ""),
        ("submitted", "r1", "1"),
        ("claimed", "r1", "1"),
        ("first_token", "r1", "1"),
        ("released", "r1", "1"),
        ("reoffered", "r1", "2"),
        ("claimed", "r1", "2"),
        ("ended", "r1", "2"),
    ]


# -- submit


def test_submitting_the_same_id_again_changes_nothing(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    again = cell.submit()
    assert (again.attempt, again.created) == (1, False)
    assert cell.state().state == "claimed"


def test_a_submit_sent_again_after_a_lost_reply_counts_as_the_first(cell: Cell) -> None:
    assert cell.submit(nonce="n").created
    assert cell.submit(nonce="n").created
    assert [kind for kind, _, _ in cell.events()].count("submitted") == 1


def test_a_full_queue_refuses_and_says_how_many_wait(cell: Cell) -> None:
    cell.submit("r1", max_waiting=2)
    cell.submit("r2", max_waiting=2)
    with pytest.raises(QueueFull) as refusal:
        cell.submit("r3", max_waiting=2)
    assert refusal.value.num_waiting == 2
    assert cell.state("r3") is None


def test_a_claim_makes_room_in_the_queue(cell: Cell) -> None:
    cell.submit("r1", max_waiting=1)
    cell.claim("r1")
    assert cell.submit("r2", max_waiting=1).created
    assert cell.records.num_waiting("m") == 1


def test_without_a_live_worker_of_the_model_a_submit_is_refused(cell: Cell) -> None:
    with pytest.raises(NoWorker):
        cell.records.submit([job(model="other")], reader=None, max_waiting=9, now_ms=cell.now_ms)
    cell.now_ms += LEASE_MS + keys.LATELY_MS
    with pytest.raises(NoWorker) as refusal:
        cell.submit()
    assert refusal.value.model == "m"
    assert cell.state() is None


@pytest.mark.parametrize("is_buried", [False, True])
def test_a_submit_is_taken_for_a_while_after_every_lease_has_lapsed(cell: Cell, is_buried: bool) -> None:
    cell.now_ms += LEASE_MS
    if is_buried:
        assert cell.records.forget_worker("w1", "m", cell.now_ms)
    cell.now_ms += keys.LATELY_MS - 1
    assert cell.submit("r1").created
    cell.now_ms += 1
    with pytest.raises(NoWorker):
        cell.submit("r2")


def test_a_worker_that_held_something_when_its_lease_lapsed_counts_for_a_while(cell: Cell) -> None:
    cell.submit("r1")
    cell.claim("r1")
    cell.now_ms += LEASE_MS
    assert not cell.records.forget_worker("w1", "m", cell.now_ms)
    assert cell.submit("r2").created


def test_a_worker_that_has_left_or_is_known_to_be_dead_takes_nothing_more(cell: Cell) -> None:
    cell.records.expire_lease("w1", "m")
    for _ in range(2):
        with pytest.raises(NoWorker):
            cell.submit()
        cell.records.forget_worker("w1", "m", cell.now_ms)
    cell.join("w2")
    cell.records.leave("w2", "m", cell.now_ms)
    with pytest.raises(NoWorker):
        cell.submit()


def test_a_known_request_is_answered_even_when_no_worker_is_left(cell: Cell) -> None:
    cell.submit()
    cell.now_ms += LEASE_MS
    assert not cell.submit().created


# -- claim


def test_an_unknown_request_cannot_be_claimed(cell: Cell) -> None:
    with pytest.raises(Stale):
        cell.claim("nobody")


def test_a_second_claim_of_the_same_attempt_is_stale(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    with pytest.raises(Stale):
        cell.claim(worker="w2")
    with pytest.raises(Stale):
        cell.claim(worker="w1")
    assert cell.state().worker == "w1"


def test_a_claim_sent_again_after_a_lost_reply_is_granted_again(cell: Cell) -> None:
    cell.submit()
    first = cell.claim(claim_id="c")
    assert cell.claim(claim_id="c") == first
    assert [kind for kind, _, _ in cell.events()].count("claimed") == 1


def test_a_claim_of_an_older_attempt_is_stale(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.records.release("r1", 1, "w1", "drain", cell.now_ms)
    with pytest.raises(Stale):
        cell.claim(attempt=1)
    assert cell.claim(attempt=2).token_ids == ()


def test_a_claim_of_an_attempt_that_does_not_exist_yet_is_stale(cell: Cell) -> None:
    cell.submit()
    with pytest.raises(Stale):
        cell.claim(attempt=2)


@pytest.mark.parametrize("state", ["finished", "cancelled", "failed"])
def test_an_ended_request_cannot_be_claimed(cell: Cell, state: Any) -> None:
    cell.submit()
    cell.records.close("r1", state, "why", now_ms=cell.now_ms)
    with pytest.raises(Stale):
        cell.claim()


def test_a_worker_of_another_fingerprint_may_start_a_request_but_not_continue_it(cell: Cell) -> None:
    cell.submit()
    cell.claim(fp="one")
    cell.append(0, 5)
    reoffer = cell.records.release("r1", 1, "w1", "drain", cell.now_ms)
    assert reoffer == Reoffer("r1", 2, keys.queue_continue("m", "one"))
    with pytest.raises(FingerprintMismatch) as refusal:
        cell.claim(attempt=2, fp="two")
    assert refusal.value.required == "one"
    assert cell.state().state == "offered"
    assert cell.claim(attempt=2, fp="one").token_ids == (5,)


def test_before_the_first_token_any_fingerprint_may_take_over(cell: Cell) -> None:
    cell.submit()
    cell.claim(fp="one")
    assert cell.records.release("r1", 1, "w1", "drain", cell.now_ms) == Reoffer("r1", 2, keys.queue_again("m"))
    cell.claim(attempt=2, fp="two")
    cell.append(0, 5, attempt=2)
    assert cell.state().fingerprint == "two"


def test_a_continuation_gets_all_tokens_of_all_attempts(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5, 6)
    cell.append(2, 7)
    cell.records.release("r1", 1, "w1", "drain", cell.now_ms)
    cell.claim(attempt=2)
    cell.append(3, 8, attempt=2)
    cell.records.release("r1", 2, "w1", "drain", cell.now_ms)
    assert cell.claim(attempt=3).token_ids == (5, 6, 7, 8)


def test_a_job_of_another_codec_version_is_not_guessed_at(cell: Cell) -> None:
    cell.submit()
    cell.redis.hset(keys.request("r1"), "job", b'{"v":99}')
    with pytest.raises(ContractError, match="codec version 99"):
        cell.claim()


# -- append


def test_an_append_before_the_claim_is_stale(cell: Cell) -> None:
    cell.submit()
    assert cell.append(0, 5) == Refused("stale")
    assert cell.stream() == []


def test_an_append_to_an_unknown_request_is_refused_as_missing(cell: Cell) -> None:
    assert cell.append(0, 5, request_id="nobody") == Refused("missing")


def test_an_append_of_an_older_attempt_is_stale_even_when_its_tokens_would_fit(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5)
    cell.records.release("r1", 1, "w1", "drain", cell.now_ms)
    assert cell.append(1, 6, attempt=1) == Refused("stale")
    cell.claim(attempt=2)
    assert cell.append(1, 6, attempt=1) == Refused("stale")
    assert cell.append(1, end="stop", attempt=1) == Refused("stale")
    assert cell.append(1, 7, attempt=2) == Appended(2)
    assert cell.append(2, 8, attempt=1) == Refused("stale")
    assert cell.append(2, 9, attempt=2) == Appended(3)
    assert cell.append(3, 8, attempt=1) == Refused("stale")
    assert cell.tokens() == [5, 7, 9]


def test_an_append_ahead_of_the_next_index_is_a_gap(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    assert cell.append(1, 6) == Refused("gap")
    cell.append(0, 5)
    assert cell.append(2, 7) == Refused("gap")
    assert cell.append(2, end="stop") == Refused("gap")
    assert cell.tokens() == [5]


def test_an_append_sent_again_adds_nothing(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    assert cell.append(0, 5, 6) == Appended(2)
    assert cell.append(0, 5, 6) == Appended(2)
    assert cell.append(0, 5) == Appended(2)
    assert cell.tokens() == [5, 6]


def test_an_append_that_overlaps_adds_only_what_is_new(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5, 6)
    assert cell.append(1, 6, 7, 8) == Appended(4)
    assert cell.tokens() == [5, 6, 7, 8]
    assert cell.stream()[-1] == TokenEvent(2, 1, (7, 8))


def test_reordered_appends_never_reorder_tokens(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    assert cell.append(2, 7) == Refused("gap")
    assert cell.append(0, 5, 6) == Appended(2)
    assert cell.append(2, 7) == Appended(3)
    assert cell.append(0, 5, 6) == Appended(3)
    assert cell.tokens() == [5, 6, 7]


def test_the_last_append_sent_again_is_accepted_and_adds_nothing(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    assert cell.append(0, 5, end="stop") == Appended(1)
    assert cell.append(0, 5, end="stop") == Appended(1)
    assert len(cell.stream()) == 2


def test_tokens_after_the_end_are_refused_as_closed(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5, end="stop")
    assert cell.append(1, 6) == Refused("closed")
    assert cell.tokens() == [5]


def test_an_append_after_a_cancel_is_refused_as_closed_terminal_or_not(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5)
    cell.records.close("r1", "cancelled", "disconnect", now_ms=cell.now_ms)
    assert cell.append(1, 6) == Refused("closed")
    assert cell.append(1, 6, end="stop") == Refused("closed")
    assert cell.tokens() == [5]
    assert cell.end().reason == "disconnect"


def test_an_empty_append_only_asks_whether_to_go_on(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    assert cell.append(0) == Appended(0)
    assert cell.state().state == "claimed"
    assert cell.stream() == []
    cell.records.close("r1", "cancelled", "disconnect", now_ms=cell.now_ms)
    assert cell.append(0) == Refused("closed")


def test_a_request_may_end_without_any_token(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    failed = Append("r1", 1, 0, (), 0, Terminal("failed", "engine_error", "broke"))
    assert cell.records.append_many([failed], cell.now_ms) == [Appended(0)]
    assert cell.stream() == [TerminalEvent(0, 1, "failed", "engine_error", "broke", "w1", 0)]


def test_one_pipeline_answers_each_append_for_itself(cell: Cell) -> None:
    for request_id in ("a", "b", "c"):
        cell.submit(request_id)
        cell.claim(request_id)
    cell.records.close("b", "cancelled", "disconnect", now_ms=cell.now_ms)
    appends = [Append("a", 1, 0, (1,)), Append("b", 1, 0, (2,)), Append("c", 1, 1, (3,)), Append("d", 1, 0, (4,))]
    appends.append(Append("a", 1, 1, (5,)))
    assert cell.records.append_many(appends, cell.now_ms) == [
        Appended(1),
        Refused("closed"),
        Refused("gap"),
        Refused("missing"),
        Appended(2),
    ]
    assert cell.tokens("a") == [1, 5]


# -- release


def test_a_release_offers_the_next_attempt_and_frees_the_worker(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    assert cell.records.held("w1") == [("r1", 1)]
    cell.records.release("r1", 1, "w1", "drain", cell.now_ms)
    state = cell.state()
    assert (state.state, state.attempt, state.worker) == ("offered", 2, "")
    assert cell.records.held("w1") == []
    assert cell.records.num_waiting("m") == 1


def test_a_release_sent_again_after_a_lost_reply_gives_the_same_answer(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    first = cell.records.release("r1", 1, "w1", "drain", cell.now_ms)
    assert cell.records.release("r1", 1, "w1", "drain", cell.now_ms) == first
    assert cell.state().attempt == 2


def test_only_the_holder_may_release(cell: Cell) -> None:
    cell.submit()
    assert cell.records.release("r1", 1, "w1", "drain", cell.now_ms) is None
    cell.claim()
    assert cell.records.release("r1", 1, "w2", "drain", cell.now_ms) is None
    assert cell.records.release("r1", 2, "w1", "drain", cell.now_ms) is None
    assert cell.records.release("nobody", 1, "w1", "drain", cell.now_ms) is None
    assert cell.state().state == "claimed"


def test_an_ended_request_cannot_be_released(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, end="stop")
    assert cell.records.release("r1", 1, "w1", "drain", cell.now_ms) is None
    assert cell.state().state == "finished"


# -- close


def test_a_request_is_closed_once(cell: Cell) -> None:
    cell.submit()
    assert cell.records.close("r1", "cancelled", "disconnect", "left", now_ms=cell.now_ms)
    assert not cell.records.close("r1", "failed", "other", now_ms=cell.now_ms)
    assert cell.stream() == [TerminalEvent(0, 1, "cancelled", "disconnect", "left")]
    assert (cell.state().state, cell.state().reason) == ("cancelled", "disconnect")


def test_a_close_says_who_held_the_request_and_what_was_cached(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5, cached=48)
    message = 'the "stop" string / matched: \u00fc\u2028'
    cell.records.close("r1", "finished", "stop", message, now_ms=cell.now_ms)
    assert cell.end() == TerminalEvent(1, 1, "finished", "stop", message, "w1", 48)


def test_closing_a_finished_request_changes_nothing(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5, end="stop")
    assert not cell.records.close("r1", "cancelled", "disconnect", now_ms=cell.now_ms)
    assert cell.end().reason == "stop"


def test_closing_an_unknown_request_is_refused_and_leaves_no_key(cell: Cell) -> None:
    assert not cell.records.close("nobody", "cancelled", "disconnect", now_ms=cell.now_ms)
    assert cell.redis.exists(keys.request("nobody"), keys.out("nobody")) == 0


def test_the_end_frees_everything_that_named_the_request(cell: Cell) -> None:
    cell.submit()
    cell.claim()
    assert cell.records.open_of("web") == ["r1"]
    cell.records.close("r1", "cancelled", "disconnect", now_ms=cell.now_ms)
    assert cell.records.held("w1") == []
    assert cell.records.open_of("web") == []
    assert cell.records.num_waiting("m") == 0
    assert cell.redis.zcard(keys.DUE) == 0


# -- the scripts themselves


def test_scripts_that_the_server_has_forgotten_are_loaded_again(cell: Cell) -> None:
    cell.submit()
    cell.redis.script_flush()
    cell.claim()
    cell.redis.script_flush()
    appends = [Append("r1", 1, 0, (1,)), Append("r1", 1, 1, (2,)), Append("nobody", 1, 0, (3,))]
    assert cell.records.append_many(appends, cell.now_ms) == [Appended(1), Appended(2), Refused("missing")]
    assert cell.tokens() == [1, 2]


def test_no_appends_need_no_redis(cell: Cell) -> None:
    assert cell.records.append_many([], cell.now_ms) == []

"""The log of steps on both servers: what is only there is not lost, not doubled, and not written by a stranger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tasks.protocol import keys
from tasks.protocol.contract import TerminalEvent, TokenEvent, entry_id, pack_source, pack_step, unpack_step
from tasks.protocol.moves import LoggedStep, Published
from tasks.protocol.record import Append, Appended, Failed, Refused, Reoffer, Terminal
from tasks.worker.step_log import FLUSH_AFTER, StepLog
from tests.conftest import RedisServer
from tests.tasks.cell import LEASE_MS, MODEL, Cell
from tests.tasks.visible import visible_tokens

SLOT = 7
STOP = Terminal("finished", "stop")


class Logging(Cell):
    """A cell whose worker w1 has a log that a test writes by hand."""

    rev = ""
    number = 0

    def step(
        self,
        *logged: tuple[int, int, int],
        own: Sequence[Append] = (),
        slots: dict[tuple[str, int], int] | None = None,
        rev: str | None = None,
        number: int | None = None,
        worker: str = "w1",
    ) -> Published:
        """The next step, of tokens (slot, index, token id). With `number`: that one, once more."""
        if number is None:
            self.number += 1
        step = LoggedStep(worker, rev or self.rev, number or self.number, pack_step(logged), slots or {})
        published = self.records.publish(own, step, self.now_ms)
        self.rev = published.rev
        return published

    def begin(self, request_id: str = "r1", slot: int = SLOT, token_id: int = 100, attempt: int = 1) -> None:
        """Claim it, and publish its first token and the slot of the rest."""
        if attempt == 1:
            self.submit(request_id)
        claimed = self.claim(request_id, attempt)
        index = len(claimed.token_ids)
        published = self.step(
            own=[Append(request_id, attempt, index, (token_id,))], slots={(request_id, attempt): slot}
        )
        assert published.results == [Appended(index + 1)]

    def log(self, worker: str = "w1") -> list[tuple[int, list[tuple[int, int, int]]]]:
        """Number and tokens of each step."""
        entries = self.redis.xrange(keys.steps(worker))
        return [(int(entry.partition(b"-")[2]), [*unpack_step(fields[b"s"])]) for entry, fields in entries]

    def notices(self, reader: str = "web") -> list[str]:
        return [fields[b"o"].decode() for _, fields in self.redis.xrange(keys.control(reader))]

    def lose_worker(self, worker: str = "w1") -> None:
        self.records.expire_lease(worker, MODEL)


@pytest.fixture
def cell(redis_server: RedisServer) -> Logging:
    return Logging(redis_server)


# -- the straight line


def test_the_first_entry_of_an_attempt_says_where_the_rest_is(cell: Logging) -> None:
    cell.begin()
    [(entry, fields)] = cell.redis.xrange(keys.out("r1"))
    assert (entry.decode(), fields[b"s"]) == (entry_id(0, 1), pack_source("w1", SLOT))
    assert cell.stream() == [TokenEvent(0, 1, (100,))]
    cell.step(own=[Append("r1", 1, 1, (101,))])
    assert b"s" not in cell.redis.xrange(keys.out("r1"))[1][1]


def test_a_step_is_one_entry_with_the_tokens_of_all(cell: Logging) -> None:
    cell.begin("a", 1, 10)
    cell.begin("b", 2, 20)
    assert cell.step((1, 1, 11), (2, 1, 21), (2, 2, 22)).is_undisturbed
    assert cell.step((1, 2, 12)).is_undisturbed
    assert cell.log() == [(3, [(1, 1, 11), (2, 1, 21), (2, 2, 22)]), (4, [(1, 2, 12)])]
    assert (cell.tokens("a"), cell.tokens("b")) == ([10], [20])
    assert (visible_tokens(cell.redis, "a"), visible_tokens(cell.redis, "b")) == ([10, 11, 12], [20, 21, 22])
    assert cell.state("a").next_index == 1


def test_a_step_without_logged_tokens_is_no_entry(cell: Logging) -> None:
    cell.begin()
    assert cell.step(own=[Append("r1", 1, 1, (101,))]).is_undisturbed
    assert cell.log() == []


def test_a_flush_adds_what_the_log_has_and_nothing_twice(cell: Logging) -> None:
    cell.begin()
    cell.step((SLOT, 1, 101))
    cell.step((SLOT, 2, 102))
    cell.step(own=[Append("r1", 1, 1, (101, 102, 103))])
    assert cell.redis.hget(keys.request("r1"), "logged").decode() == f"{cell.rev}-{cell.number}"
    cell.step((SLOT, 4, 104))
    assert cell.tokens() == [100, 101, 102, 103]
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens() == [100, 101, 102, 103, 104]


def test_a_flush_that_is_in_the_log_as_well_is_there_once(cell: Logging) -> None:
    cell.begin()
    cell.step((SLOT, 1, 101))
    cell.step((SLOT, 2, 102), own=[Append("r1", 1, 1, (101, 102))])
    assert visible_tokens(cell.redis, "r1") == [100, 101, 102]
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens() == [100, 101, 102]


# -- the fence


def test_without_the_rev_of_now_nothing_is_logged(cell: Logging) -> None:
    cell.begin()
    rev = cell.rev
    for wrong in ("1", str(int(rev) - 1)):
        assert not cell.step((SLOT, 1, 101), rev=wrong).is_undisturbed
    assert cell.log() == []
    assert cell.rev == rev
    assert cell.step((SLOT, 1, 101)).is_undisturbed


def test_a_log_that_is_gone_is_begun_anew_only_by_who_is_undisturbed(cell: Logging) -> None:
    cell.begin()
    cell.redis.delete(keys.steps("w1"))
    assert not cell.step((SLOT, 1, 101), rev="1").is_undisturbed
    assert cell.log() == []
    assert cell.step((SLOT, 1, 101)).is_undisturbed
    assert [tokens for _, tokens in cell.log()] == [[(SLOT, 1, 101)]]
    assert cell.redis.pttl(keys.steps("w1")) > 0


def test_the_first_step_of_a_worker_is_told_its_rev(cell: Logging) -> None:
    published = cell.step((SLOT, 1, 101))
    assert not published.is_undisturbed
    assert published.rev == cell.redis.get(keys.worker_rev("w1")).decode() != ""
    assert cell.log() == []
    assert cell.step().is_undisturbed


@pytest.mark.parametrize("ahead_ms", [0, 5])
def test_a_redis_that_has_lost_everything_has_no_rev_that_the_worker_knows(cell: Logging, ahead_ms: int) -> None:
    cell.begin()
    cell.step((SLOT, 1, 101))
    known = cell.rev = str(cell.now_ms + ahead_ms)
    cell.redis.flushall()
    for _ in range(2):
        published = cell.step((SLOT, 2, 102), own=[Append("r1", 1, 1, (101,))], rev=known)
        assert not published.is_undisturbed
        assert published.results == [Refused("missing")]
    assert cell.log() == []


def test_after_redis_has_lost_its_last_second_a_rev_does_not_come_again(cell: Logging) -> None:
    cell.begin("a", 1)
    cell.begin("b", 2)
    before = cell.redis.get(keys.worker_rev("w1"))
    cell.step(own=[Append("a", 1, 1, (), 0, STOP)])
    known = cell.rev
    cell.redis.set(keys.worker_rev("w1"), before)
    cell.now_ms += 1_000
    cell.records.close("b", "cancelled", "stopped", now_ms=cell.now_ms)
    assert not cell.step((2, 1, 101), rev=known).is_undisturbed


def test_a_redis_that_has_lost_its_last_second_tells_a_higher_rev_as_soon_as_it_judges(cell: Logging) -> None:
    cell.begin("a", 1)
    cell.begin("b", 2)
    before = cell.redis.get(keys.worker_rev("w1"))
    cell.step(own=[Append("a", 1, 1, (), 0, STOP)])
    known = int(cell.rev)
    cell.redis.set(keys.worker_rev("w1"), before)
    assert not cell.step(own=[Append("b", 1, 1, (101,))]).is_undisturbed
    assert int(cell.rev) > known
    assert cell.step((2, 2, 102)).is_undisturbed
    assert visible_tokens(cell.redis, "b") == [100, 101, 102]


@pytest.mark.parametrize("move", ["close", "detach", "release", "lost", "look"])
def test_whatever_ends_or_moves_one_disturbs_the_next_step(cell: Logging, move: str) -> None:
    cell.begin("a", 1, 10)
    cell.begin("b", 2, 20)
    cell.step((1, 1, 11), (2, 1, 21))
    shift(cell, move, "b")
    published = cell.step((1, 2, 12), (2, 2, 22))
    assert not published.is_undisturbed
    assert len(cell.log()) == 1
    own = [Append("a", 1, 1, (11, 12)), Append("b", 1, 1, (21, 22))]
    a, b = cell.step(own=own).results
    assert a == Appended(3)
    assert isinstance(b, Refused)
    assert (cell.tokens("a"), cell.tokens("b")) == ([10, 11, 12], [20, 21])
    assert cell.step((1, 3, 13)).is_undisturbed


def test_an_end_by_the_worker_itself_does_not_disturb_it(cell: Logging) -> None:
    cell.begin("a", 1, 10)
    cell.begin("b", 2, 20)
    assert cell.step((2, 1, 21), own=[Append("a", 1, 1, (11,), 0, STOP)]).is_undisturbed
    assert cell.step((2, 2, 22)).is_undisturbed
    assert visible_tokens(cell.redis, "b") == [20, 21, 22]


def test_workers_do_not_disturb_each_other(cell: Logging) -> None:
    cell.begin()
    cell.join("w2")
    cell.submit("other")
    cell.claim("other", worker="w2")
    cell.records.close("other", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.step((SLOT, 1, 101)).is_undisturbed


# -- sent again


def test_a_step_sent_again_is_there_once_and_taken(cell: Logging) -> None:
    cell.begin()
    own = [Append("r2", 1, 0, (5,))]
    cell.submit("r2")
    cell.claim("r2")
    first = cell.step((SLOT, 1, 101), own=own, slots={("r2", 1): 8})
    again = cell.step((SLOT, 1, 101), own=own, slots={("r2", 1): 8}, number=cell.number)
    assert first == again
    assert first.is_undisturbed
    assert [tokens for _, tokens in cell.log()] == [[(SLOT, 1, 101)]]
    cell.step((SLOT, 2, 102))
    late = cell.step((SLOT, 1, 101), own=own, slots={("r2", 1): 8}, number=cell.number - 1)
    assert late.results == [Appended(1)]
    assert [number for number, _ in cell.log()] == [2, 3]
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens() == [100, 101, 102]


def test_a_step_with_an_end_sent_again_adds_nothing(cell: Logging) -> None:
    cell.begin("a", 1, 10)
    cell.begin("b", 2, 20)
    rev, own = cell.rev, [Append("a", 1, 1, (11,), 0, STOP)]
    cell.step((2, 1, 21), own=own)
    again = cell.step((2, 1, 21), own=own, rev=rev, number=cell.number)
    assert again.results == [Appended(2)]
    assert not again.is_undisturbed
    assert cell.step(own=[Append("b", 1, 1, (21, 22))]).results == [Appended(3)]
    assert (cell.tokens("a"), cell.tokens("b")) == ([10, 11], [20, 21, 22])


def test_a_first_append_that_comes_again_late_does_not_bring_its_slot_back(cell: Logging) -> None:
    cell.begin(slot=1)
    first = cell.number
    assert cell.append(1, 101) == Appended(2)
    cell.step(own=[Append("r1", 1, 2, (102,))], slots={("r1", 1): 2})
    cell.step((2, 3, 103))
    cell.step(own=[Append("r1", 1, 0, (100,))], slots={("r1", 1): 1}, number=first)
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens() == [100, 101, 102, 103]


def test_another_error_of_the_log_is_an_error(cell: Logging) -> None:
    cell.begin()
    cell.redis.set(keys.steps("w1"), "x")
    with pytest.raises(Exception, match=r"WRONGTYPE|ResponseError"):
        cell.step((SLOT, 1, 101))


# -- what is only in the log when something becomes of the request


def shift(cell: Logging, move: str, request_id: str = "r1") -> Any:
    match move:
        case "close":
            return cell.records.close(request_id, "cancelled", "stopped", now_ms=cell.now_ms)
        case "detach":
            return cell.records.detach([request_id], "web", now_ms=cell.now_ms)
        case "release":
            return cell.records.release(request_id, 1, "w1", "drain", cell.now_ms)
        case "lost":
            cell.lose_worker()
            outcome = cell.records.reoffer(request_id, 1, "worker_lost", cell.now_ms)
            cell.join("w1")
            return outcome
        case "look":
            cell.now_ms += LEASE_MS
            outcome = cell.records.look(request_id, True, cell.now_ms)
            cell.join("w1")
            return outcome
        case "grace":
            cell.records.detach([request_id], "web", 100, now_ms=cell.now_ms)
            cell.now_ms += 100
            return cell.records.look(request_id, True, cell.now_ms)
        case _:
            raise AssertionError(move)


@pytest.mark.parametrize("move", ["close", "detach", "grace"])
def test_an_end_from_outside_comes_after_all_that_was_visible(cell: Logging, move: str) -> None:
    cell.begin()
    cell.step((SLOT, 1, 101))
    cell.step((SLOT, 2, 102), (SLOT, 3, 103))
    assert shift(cell, move)
    assert cell.stream()[:2] == [TokenEvent(0, 1, (100,)), TokenEvent(1, 1, (101, 102, 103))]
    assert cell.tokens() == [100, 101, 102, 103]
    assert isinstance(cell.stream()[-1], TerminalEvent)
    assert cell.end().index == cell.state().next_index == 4
    assert not cell.step((SLOT, 4, 104)).is_undisturbed
    assert cell.step(own=[Append("r1", 1, 4, (104,))]).results == [Refused("closed")]
    assert cell.tokens() == [100, 101, 102, 103]


@pytest.mark.parametrize("move", ["release", "lost", "look"])
def test_the_next_attempt_goes_on_after_all_that_was_visible(cell: Logging, move: str) -> None:
    cell.begin()
    cell.step((SLOT, 1, 101))
    cell.step((SLOT, 2, 102))
    assert shift(cell, move) == Reoffer("r1", 2, keys.queue_continue(MODEL, "fp"))
    assert cell.tokens() == [100, 101, 102]
    assert cell.state().next_index == 3
    assert not cell.step((SLOT, 3, 103)).is_undisturbed
    assert cell.step(own=[Append("r1", 1, 3, (103,))]).results == [Refused("stale")]
    cell.join("w2")
    assert cell.claim(attempt=2, worker="w2").token_ids == (100, 101, 102)
    assert cell.step(own=[Append("r1", 1, 3, (103,))]).results == [Refused("stale")]
    assert cell.append(3, 103, attempt=2, end="stop") == Appended(4)
    assert cell.tokens() == [100, 101, 102, 103]


def test_each_attempt_has_its_own_slot(cell: Logging) -> None:
    cell.begin()
    cell.step((SLOT, 1, 101))
    shift(cell, "release")
    cell.begin(attempt=2, slot=9, token_id=102)
    sources = [fields[b"s"] for _, fields in cell.redis.xrange(keys.out("r1")) if b"s" in fields]
    assert sources == [pack_source("w1", SLOT), pack_source("w1", 9)]
    cell.step((9, 3, 103), (SLOT, 3, 666))
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens() == [100, 101, 102, 103]
    assert [event.attempt for event in cell.stream()] == [1, 1, 2, 2, 2]


def test_a_request_on_offer_takes_nothing_from_a_log(cell: Logging) -> None:
    cell.begin()
    shift(cell, "release")
    cell.step((SLOT, 1, 666))
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens() == [100]


def test_poison_ends_after_all_that_was_visible(redis_server: RedisServer) -> None:
    cell = Logging(redis_server, max_attempts=1)
    cell.begin()
    cell.step((SLOT, 1, 101))
    assert cell.records.release("r1", 1, "w1", "engine_error", cell.now_ms) == Failed("r1", "poison")
    assert cell.tokens() == [100, 101]
    assert (cell.end().reason, cell.end().index) == ("poison", 2)


def test_the_workers_own_end_brings_what_only_the_log_had_once(cell: Logging) -> None:
    cell.begin()
    cell.step((SLOT, 1, 101))
    cell.step((SLOT, 2, 102))
    assert cell.step(own=[Append("r1", 1, 1, (101, 102, 103), 0, STOP)]).results == [Appended(4)]
    assert cell.stream()[1] == TokenEvent(1, 1, (101, 102, 103))
    assert cell.tokens() == [100, 101, 102, 103]


def test_only_what_follows_without_a_gap_is_taken(cell: Logging) -> None:
    cell.begin()
    cell.step((SLOT, 1, 101))
    cell.step((SLOT, 3, 103))
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens() == [100, 101]


# -- how a log is searched


def test_bytes_of_a_slot_that_are_something_else_are_not_taken_for_it(cell: Logging) -> None:
    cell.begin("r1", 5, 5)
    cell.begin("r2", 0x0500, 50)
    cell.begin("r3", 0x05_00_00_05, 60)
    cell.step((0x0500, 1, 5), (5, 1, 5), (0x0500, 5, 1), (0x05_00_00_05, 1, 5), (5, 2, 0x0500))
    cell.step((1, 5, 5), (5, 3, 7), (0x0500, 2, 5), (0x05_00_00_05, 2, 0x0500), (5, 4, 5), (5, 5, 5))
    for name in ("r1", "r2", "r3"):
        cell.records.close(name, "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens("r1") == [5, 5, 0x0500, 7, 5, 5]
    assert cell.tokens("r2") == [50, 5, 5]
    assert cell.tokens("r3") == [60, 5, 0x0500]


def test_a_slot_at_an_unaligned_place_followed_by_the_right_index_is_not_taken(cell: Logging) -> None:
    """Slot 5 and index 1 are the index and token of slot 9: bytes as they should be, at the wrong place."""
    cell.begin("r1", 5, 100)
    cell.step((9, 5, 1), (666, 0, 0))
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens("r1") == [100]


@pytest.mark.parametrize("slot", [1, 255, 256, 65_535, 65_536, 70_000, 0x25_2E_5B_28, 0xFFFF_FFFF])
def test_slots_of_any_size_are_found(cell: Logging, slot: int) -> None:
    """Also such as would be magic in a Lua pattern."""
    cell.begin(slot=slot)
    for first, after in ((1, 255), (255, 256), (256, 257)):
        cell.step(*[(slot, index, 3 * index) for index in range(first, after)])
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens() == [100, *(3 * n for n in range(1, 257))]


def test_indices_and_tokens_above_two_bytes_are_taken(cell: Logging) -> None:
    cell.begin()
    for index in range(1, 70_000, 10_000):
        cell.step(own=[Append("r1", 1, index, tuple(range(10_000)))])
    last = cell.state().next_index
    assert last > 65_536
    cell.step((SLOT, last, 0xFEDC_BA98))
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens()[last:] == [0xFEDC_BA98]


# -- bounds


def test_the_log_keeps_what_may_be_nowhere_else(cell: Logging) -> None:
    cell.begin()
    num_steps = keys.STEPS_KEPT + 10
    for index in range(1, num_steps):
        cell.step((SLOT, index, index))
        if index % FLUSH_AFTER == 0:
            first = cell.state().next_index
            cell.step(own=[Append("r1", 1, first, tuple(range(first, index + 1)))])
    assert len(cell.log()) == keys.STEPS_KEPT >= 2 * FLUSH_AFTER
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.tokens() == [100, *range(1, num_steps)]


def test_what_a_log_leaves_behind_has_an_end(cell: Logging) -> None:
    cell.begin()
    cell.step((SLOT, 1, 101))
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    for key in (keys.steps("w1"), keys.worker_rev("w1")):
        assert 0 < cell.redis.pttl(key) <= keys.STEPS_TTL_MS
    assert 0 < cell.redis.pttl(keys.control("web")) <= keys.CONTROL_TTL_MS
    assert not {b"slot", b"logged"} & set(cell.redis.hkeys(keys.request("r1")))
    cell.records.leave("w1", MODEL, cell.now_ms)
    assert not cell.redis.exists(keys.steps("w1"), keys.worker_rev("w1"))


def test_a_move_of_a_worker_without_a_log_makes_no_rev(cell: Logging) -> None:
    cell.submit()
    cell.claim()
    cell.append(0, 5)
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert not cell.redis.exists(keys.worker_rev("w1"), keys.steps("w1"), keys.control("web"))


# -- notices


@pytest.mark.parametrize("move", ["close", "release", "lost", "grace", "end"])
def test_each_reader_of_what_was_logged_is_told_of_its_end_and_of_its_next_attempt(cell: Logging, move: str) -> None:
    cell.begin()
    if move == "grace":
        cell.records.detach(["r1"], "web", 100, now_ms=cell.now_ms)
        cell.records.look("r1", True, cell.now_ms + 100)
        assert cell.notices() == []
        return
    cell.records.attach(["r1"], "web2", cell.now_ms)
    cell.step((SLOT, 1, 101))
    assert cell.notices() == cell.notices("web2") == []
    if move == "end":
        cell.step(own=[Append("r1", 1, 1, (101,), 0, STOP)])
    else:
        assert shift(cell, move)
    assert cell.notices() == cell.notices("web2") == ["r1"]


@pytest.mark.parametrize("move", ["close", "release", "end"])
def test_readers_are_told_of_what_outlives_them_as_well(cell: Logging, move: str) -> None:
    cell.submit(outlive_reader=True, reader="web0")
    for _ in range(2):
        cell.submit(outlive_reader=True)
        cell.records.attach(["r1"], "web2", cell.now_ms)
        cell.records.attach(["r1"], "we", cell.now_ms)
    cell.submit(outlive_reader=True, reader="web3")
    cell.claim()
    cell.step(own=[Append("r1", 1, 0, (1,))], slots={("r1", 1): SLOT})
    if move == "end":
        cell.step(own=[Append("r1", 1, 1, (2,), 0, STOP)])
    else:
        assert shift(cell, move)
    assert [cell.notices(reader) for reader in ("web0", "web", "web2", "web3", "we")] == [["r1"]] * 5
    assert cell.redis.hexists(keys.request("r1"), "followers") == (move == "release")
    assert not cell.redis.exists(keys.readers_of("r1"), keys.reader_open("web"))


def test_an_end_in_the_step_that_gave_the_slot_is_told(cell: Logging) -> None:
    cell.submit()
    cell.claim()
    cell.step(own=[Append("r1", 1, 0, (1,), 0, STOP)], slots={("r1", 1): SLOT})
    assert cell.notices() == ["r1"]


def test_of_what_was_never_logged_nobody_is_told(cell: Logging) -> None:
    for request_id in ("a", "b", "c"):
        cell.submit(request_id)
        cell.claim(request_id)
    cell.step(own=[Append("a", 1, 0, (1,)), Append("b", 1, 0, (1,), 0, STOP), Append("c", 1, 0, ())])
    cell.records.close("a", "cancelled", "stopped", now_ms=cell.now_ms)
    cell.records.release("c", 1, "w1", "drain", cell.now_ms)
    assert cell.notices() == []
    assert not cell.redis.exists(keys.control("web"))


def test_after_a_next_attempt_nobody_is_told_again_until_that_is_logged(cell: Logging) -> None:
    cell.begin()
    shift(cell, "release")
    cell.claim(attempt=2)
    cell.records.release("r1", 2, "w1", "drain", cell.now_ms)
    assert cell.notices() == ["r1"]
    cell.begin(attempt=3, slot=9, token_id=101)
    cell.records.close("r1", "cancelled", "stopped", now_ms=cell.now_ms)
    assert cell.notices() == ["r1", "r1"]


# -- with the worker's side


def test_two_requests_of_one_worker_are_exact_while_one_is_cancelled(cell: Logging) -> None:
    log = StepLog("w1")
    for request_id in ("a", "b"):
        cell.submit(request_id)
        cell.claim(request_id)
    refused: dict[str, int] = {}
    for index in range(40):
        if index == 21:
            cell.records.close("b", "cancelled", "stopped", now_ms=cell.now_ms)
        end = STOP if index == 39 else None
        batch = [Append(name, 1, index, (index,), 0, end) for name in ("a", "b") if name not in refused]
        plan = log.plan(batch)
        published = cell.records.publish(plan.appends, plan.step, cell.now_ms)
        settled = log.take(plan, published)
        if not published.is_undisturbed:
            plan = log.plan_unlogged(plan)
            settled += log.take(plan, cell.records.publish(plan.appends, plan.step, cell.now_ms))
        assert len(settled) == len(batch)
        refused |= {item.request_id: index for item, result in settled if isinstance(result, Refused)}
        assert visible_tokens(cell.redis, "a") == [*range(index + 1)]
    assert refused == {"b": 21}
    assert (cell.tokens("a"), cell.tokens("b")) == ([*range(40)], [*range(21)])
    assert len(cell.stream("a")) < 40 / FLUSH_AFTER + 5

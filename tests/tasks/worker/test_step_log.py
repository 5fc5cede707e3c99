"""What the worker's log is told and what it says to send, call by call; and random steps against the real scripts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from decode.engine.sampling import TokenLogprobs
from tasks.protocol.contract import pack_logprobs, unpack_step
from tasks.protocol.moves import LoggedStep, Published
from tasks.protocol.record import Append, Appended, AppendResult, Refused, Reoffer, Terminal
from tasks.worker.step_log import FLUSH_AFTER, Plan, StepLog
from tests.conftest import RedisServer
from tests.tasks.cell import Cell
from tests.tasks.visible import has_ended, visible_tokens

STOP = Terminal("finished", "stop")
KEY = ("a", 1)


def tokens(request_id: str, first_index: int, *token_ids: int, end: Terminal | None = None) -> Append:
    return Append(request_id, 1, first_index, token_ids, 0, end)


def logged(plan: Plan) -> list[tuple[int, int, int]]:
    return [*unpack_step(plan.step.packed)]


def taken(plan: Plan, rev: str = "5", *, is_undisturbed: bool = True) -> Published:
    """All that the plan appends is taken by Redis."""
    results = [Appended(item.first_index + len(item.token_ids)) for item in plan.appends]
    return Published(rev, is_undisturbed, results)


def step(log: StepLog, *batch: Append) -> Plan:
    plan = log.plan(batch)
    log.take(plan, taken(plan))
    return plan


@pytest.fixture
def log() -> StepLog:
    """Of a worker that has published the first token of a."""
    log = StepLog("w1")
    step(log, tokens("a", 0, 10))
    return log


# -- what goes where


def test_first_tokens_go_into_the_own_stream_with_a_slot_each() -> None:
    log = StepLog("w1")
    plan = log.plan([tokens("a", 0, 10), tokens("b", 0, 20), tokens("c", 0), tokens("d", 0, 40, end=STOP)])
    assert plan.appends == plan.batch
    assert plan.step == LoggedStep("w1", "", 1, b"", {("a", 1): 1, ("b", 1): 2})
    assert not plan.logged


def test_the_tokens_after_it_go_into_the_log_alone(log: StepLog) -> None:
    plan = log.plan([tokens("a", 1, 11, 12)])
    assert plan.appends == []
    assert plan.step == LoggedStep("w1", "5", 2, plan.step.packed, {})
    assert logged(plan) == [(1, 1, 11), (1, 2, 12)]
    assert log.take(plan, taken(plan)) == [(tokens("a", 1, 11, 12), Appended(3))]


def test_after_so_many_steps_all_is_flushed_and_counted_anew(log: StepLog) -> None:
    next_index = 1
    for _ in range(3):
        flushed = next_index
        for _ in range(FLUSH_AFTER - 1):
            assert step(log, tokens("a", next_index, next_index)).appends == []
            next_index += 1
        plan = step(log, tokens("a", next_index, next_index))
        next_index += 1
        assert plan.appends == [tokens("a", flushed, *range(flushed, next_index))]


def test_a_flush_is_in_the_log_too_so_that_who_follows_it_misses_nothing(log: StepLog) -> None:
    for index in range(1, 4 * FLUSH_AFTER):
        assert logged(step(log, tokens("a", index, index))) == [(1, index, index)]


def test_steps_without_tokens_count_towards_the_flush(log: StepLog) -> None:
    step(log, tokens("a", 1, 11))
    for _ in range(FLUSH_AFTER - 2):
        assert step(log, tokens("a", 2)).appends == []
    assert step(log, tokens("a", 2)).appends == [tokens("a", 1, 11)]


def test_an_end_takes_along_what_only_the_log_has(log: StepLog) -> None:
    step(log, tokens("a", 1, 11))
    plan = log.plan([tokens("a", 2, 12, end=STOP)])
    assert plan.appends == [tokens("a", 1, 11, 12, end=STOP)]
    assert logged(plan) == []
    assert log.take(plan, taken(plan)) == [(tokens("a", 2, 12, end=STOP), Appended(3))]
    assert log.plan([tokens("a", 3, 13)]).step.slots == {KEY: 2}


def test_log_probabilities_are_never_logged(log: StepLog) -> None:
    item = Append("a", 1, 1, (11,), logprobs=pack_logprobs([TokenLogprobs(-1.0, ())]))
    plan = step(log, item)
    assert (plan.appends, logged(plan)) == ([item], [])
    assert step(log, tokens("a", 2, 12)).appends == []


def test_an_assignment_of_another_attempt_is_another(log: StepLog) -> None:
    plan = log.plan([Append("a", 2, 1, (11,))])
    assert plan.step.slots == {("a", 2): 2}
    assert logged(plan) == []


def test_numbers_rise_and_slots_never_come_again(log: StepLog) -> None:
    numbers: list[int] = []
    slots: list[int] = []
    for _ in range(5):
        plan = step(log, tokens("a", 0, 10))
        log.forget(KEY)
        numbers.append(plan.step.number)
        slots += plan.step.slots.values()
    assert numbers == [2, 3, 4, 5, 6]
    assert len(slots) == len({*slots, 1}) - 1


# -- disturbances


def test_after_a_disturbance_each_is_judged_and_then_logged_again(log: StepLog) -> None:
    step(log, tokens("b", 0, 20))
    step(log, tokens("a", 1, 11), tokens("b", 1, 21))
    plan = log.plan([tokens("a", 2, 12), tokens("b", 2, 22), tokens("c", 0, 30)])
    assert log.take(plan, taken(plan, "6", is_undisturbed=False)) == [(tokens("c", 0, 30), Appended(1))]
    again = log.plan_unlogged(plan)
    assert again.appends == [tokens("a", 1, 11, 12), tokens("b", 1, 21, 22)]
    assert (again.step.rev, again.step.number, logged(again), again.logged) == ("6", 5, [], ())
    results: list[AppendResult] = [Appended(3), Refused("stale")]
    assert log.take(again, Published("6", True, results)) == [
        (tokens("a", 2, 12), Appended(3)),
        (tokens("b", 2, 22), Refused("stale")),
    ]
    assert logged(log.plan([tokens("a", 3, 13), tokens("b", 3, 23)])) == [(1, 3, 13)]


def test_whoever_was_not_asked_after_a_disturbance_is_judged_with_its_next_step(log: StepLog) -> None:
    step(log, tokens("b", 0, 20))
    step(log, tokens("a", 1, 11))
    plan = log.plan([tokens("b", 1, 21)])
    log.take(plan, taken(plan, "6", is_undisturbed=False))
    plan = log.plan_unlogged(plan)
    log.take(plan, taken(plan, "6"))
    assert step(log, tokens("a", 2, 12), tokens("b", 2, 22)).appends == [tokens("a", 1, 11, 12)]
    assert step(log, tokens("a", 3, 13)).appends == []


def test_a_disturbance_of_the_second_call_makes_all_others_be_judged_again(log: StepLog) -> None:
    step(log, tokens("b", 0, 20))
    plan = log.plan([tokens("a", 1, 11), tokens("c", 0, 30)])
    log.take(plan, taken(plan, "6", is_undisturbed=False))
    again = log.plan_unlogged(plan)
    log.take(again, taken(again, "7", is_undisturbed=False))
    plan = log.plan([tokens("a", 2, 12), tokens("b", 1, 21), tokens("c", 1, 31)])
    assert plan.step.rev == "7"
    assert logged(plan) == [(1, 2, 12)]
    assert plan.appends == [tokens("b", 1, 21), tokens("c", 1, 31)]


# -- what is over, or given up


def test_what_was_refused_is_forgotten(log: StepLog) -> None:
    plan = log.plan([tokens("a", 1, 11, end=STOP)])
    log.take(plan, Published("5", True, [Refused("closed")]))
    assert log.plan([tokens("a", 2, 12)]).appends == [tokens("a", 2, 12)]


def test_what_is_forgotten_begins_again_with_another_slot(log: StepLog) -> None:
    step(log, tokens("a", 1, 11))
    log.forget(KEY)
    log.forget(KEY)
    plan = log.plan([tokens("a", 2, 12)])
    assert plan.appends == [tokens("a", 2, 12)]
    assert plan.step.slots == {KEY: 2}


@pytest.mark.parametrize("num_logged", [0, 2])
@pytest.mark.parametrize("end", [None, STOP])
def test_after_a_step_that_was_given_up_no_token_takes_the_place_of_another(
    log: StepLog, num_logged: int, end: Terminal | None
) -> None:
    for index in range(1, 1 + num_logged):
        step(log, tokens("a", index, index))
    first = 1 + num_logged
    log.plan([tokens("a", first, 66)])
    item = tokens("a", first + 1, 77, end=end)
    plan = log.plan([item])
    assert plan.appends == [item]
    assert logged(plan) == []


# -- random steps against the scripts


class Oracle:
    """Three assignments in turn, a worker's log, and all that can happen to a call or to a request in between."""

    def __init__(self, server: RedisServer, seed: int) -> None:
        self.cell = Cell(server)
        self.cell.join("w1", lease_ms=10**9)
        self.random = random.Random(seed)
        self.log = StepLog("w1")
        self.attempts: dict[str, int] = {}
        self.next_index: dict[str, int] = {}
        self.seen: dict[str, list[int]] = {}
        self.over: dict[str, list[int]] = {}
        self.late: list[tuple[Sequence[Append], LoggedStep]] = []
        self.happened: set[str] = set()
        self.num_requests = 0

    def token(self, request_id: str, index: int, attempt: int) -> int:
        """Other ones in each attempt: a token that is not the one that was seen shows."""
        return index * 1000 + attempt * 10 + int(request_id[1:]) % 10

    def begin(self) -> None:
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        self.cell.submit(request_id)
        self.seen[request_id] = []
        self.take_up(request_id, 1)

    def take_up(self, request_id: str, attempt: int) -> None:
        claimed = self.cell.claim(request_id, attempt)
        assert list(claimed.token_ids) == self.seen[request_id], "the next attempt has what was visible"
        self.attempts[request_id] = attempt
        self.next_index[request_id] = len(claimed.token_ids)

    def step(self) -> None:
        batch: list[Append] = []
        for request_id, attempt in self.attempts.items():
            first, num_new = self.next_index[request_id], self.random.choice((0, 1, 1, 1, 2))
            token_ids = tuple(self.token(request_id, first + n, attempt) for n in range(num_new))
            end = STOP if self.random.random() < 0.01 else None
            batch.append(Append(request_id, attempt, first, token_ids, 0, end))
            self.next_index[request_id] += num_new
        if not batch:
            return
        plan = self.log.plan(batch)
        is_undisturbed = self.publish(plan)
        if not is_undisturbed and plan.logged:
            if self.random.random() < 0.3:
                self.disturb()
            self.publish(self.log.plan_unlogged(plan))

    def publish(self, plan: Plan) -> bool:
        records, now_ms = self.cell.records, self.cell.now_ms
        while self.random.random() < 0.15:  # the reply is lost
            records.publish(plan.appends, plan.step, now_ms)
            self.happened.add("reply lost")
            self.look()
            if self.random.random() < 0.3:
                self.disturb()
        published = records.publish(plan.appends, plan.step, now_ms)
        self.late.append((plan.appends, plan.step))
        self.happened.add("undisturbed" if published.is_undisturbed else "disturbed")
        for item, result in self.log.take(plan, published):
            if isinstance(result, Refused):
                self.happened.add(f"refused {result.reason}")
                if result.reason == "gap":
                    self.give_back(item.request_id, "gap")
                else:
                    self.attempts.pop(item.request_id, None)
            elif item.terminal is not None:
                self.attempts.pop(item.request_id, None)
                assert len(self.seen_now(item.request_id)) == item.first_index + len(item.token_ids)
        return published.is_undisturbed

    def disturb(self) -> None:
        if not self.attempts:
            return
        request_id = self.random.choice(sorted(self.attempts))
        attempt = self.cell.state(request_id).attempt
        if self.random.random() < 0.3:
            self.cell.records.close(request_id, "cancelled", "stopped", now_ms=self.cell.now_ms)
            return
        outcome = self.cell.records.release(request_id, attempt, "w1", "drain", self.cell.now_ms)
        self.look()
        if isinstance(outcome, Reoffer) and self.random.random() < 0.5:
            self.cell.claim(request_id, outcome.attempt, "w2", claim_id="other")
            index = self.cell.state(request_id).next_index
            item = Append(request_id, outcome.attempt, index, (self.token(request_id, index, outcome.attempt),))
            self.cell.records.append_many([item], self.cell.now_ms)

    def give_back(self, request_id: str, reason: str) -> None:
        """And another worker's continues it, or this one does."""
        attempt = self.attempts.pop(request_id)
        outcome = self.cell.records.release(request_id, attempt, "w1", reason, self.cell.now_ms)
        self.look()
        if isinstance(outcome, Reoffer) and len(self.attempts) < 3:
            self.take_up(request_id, outcome.attempt)

    def give_up_a_step(self) -> None:
        """It has arrived, or not; what came of it nobody knows."""
        for request_id, attempt in self.attempts.items():
            first = self.next_index[request_id]
            self.next_index[request_id] += 1
            plan = self.log.plan([Append(request_id, attempt, first, (self.token(request_id, first, attempt),))])
            if self.random.random() < 0.5:
                self.cell.records.publish(plan.appends, plan.step, self.cell.now_ms)
            self.happened.add("given up")
            break

    def come_late(self) -> None:
        appends, step = self.random.choice(self.late)
        self.cell.records.publish(appends, step, self.cell.now_ms)

    def seen_now(self, request_id: str) -> list[int]:
        return visible_tokens(self.cell.redis, request_id)

    def look(self) -> None:
        for request_id, before in self.seen.items():
            now = self.seen_now(request_id)
            assert now[: len(before)] == before, f"{request_id} had {before}, now {now}"
            self.seen[request_id] = now
        # PERF: what is over does not change any more; the end of the test looks once again.
        for request_id in [request_id for request_id in self.seen if has_ended(self.cell.redis, request_id)]:
            self.over[request_id] = self.seen.pop(request_id)

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self.cell.now_ms += self.random.randrange(3)
            roll = self.random.random()
            if len(self.attempts) < 3 and roll < 0.2:
                self.begin()
            elif roll < 0.26:
                self.disturb()
            elif roll < 0.32 and self.late:
                self.come_late()
            elif roll < 0.33 and self.attempts:
                request_id = self.random.choice([*self.attempts])
                self.log.forget((request_id, self.attempts[request_id]))
                self.give_back(request_id, "drain")
                self.happened.add("given back")
            elif roll < 0.34:
                self.give_up_a_step()
            else:
                self.step()
            self.look()
        for request_id, before in (self.seen | self.over).items():
            self.cell.records.close(request_id, "cancelled", "stopped", now_ms=self.cell.now_ms)
            assert self.cell.tokens(request_id) == before


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_what_was_visible_stays(fake_server: RedisServer, seed: int) -> None:
    oracle = Oracle(fake_server, seed)
    oracle.run(150)
    assert oracle.happened >= {"disturbed", "undisturbed", "reply lost", "refused closed", "refused stale"}


def test_whatever_happens_on_a_real_server_what_was_visible_stays(real_server: RedisServer) -> None:
    Oracle(real_server, 99).run(250)

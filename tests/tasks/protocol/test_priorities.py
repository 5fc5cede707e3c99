"""Which class is served next: the rule, and the script that follows it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.process.settings import WebSettings
from tasks.protocol import keys
from tasks.protocol.broker import AssignmentMessage, build_broker
from tasks.protocol.contract import Priority
from tasks.protocol.lua import Scripts
from tasks.protocol.priorities import HEAD_START_MS, PRIORITIES, served_first, up_to
from tests.conftest import RedisServer

M = "m"
OFFERS = st.dictionaries(st.sampled_from(PRIORITIES), st.integers(0, 100_000))


def test_without_any_offer_no_class_is_served() -> None:
    assert served_first({}) is None


@given(OFFERS)
def test_a_higher_class_comes_first_unless_a_lower_one_has_waited_too_long(offers: dict[Priority, int]) -> None:
    first = served_first(offers)
    if first is None:
        return
    for other in offers:
        if PRIORITIES.index(other) < PRIORITIES.index(first):
            assert offers[other] - offers[first] > HEAD_START_MS[first] - HEAD_START_MS[other]
        if PRIORITIES.index(other) > PRIORITIES.index(first):
            assert offers[first] - offers[other] <= HEAD_START_MS[other] - HEAD_START_MS[first]


@given(st.sampled_from(PRIORITIES), OFFERS)
def test_nothing_starves(priority: Priority, offers: dict[Priority, int]) -> None:
    latest = max(offers.values(), default=0)
    offers = dict.fromkeys(PRIORITIES, latest) | {priority: latest - HEAD_START_MS[priority] - 1}
    assert served_first(offers) == priority


def test_nobody_reaches_the_first_token_deadline_because_of_the_head_start_of_others() -> None:
    deadline_s = WebSettings.from_env({"REDIS_URL": "redis://localhost"}).first_token_deadline_s
    assert max(HEAD_START_MS.values()) <= deadline_s * 1000 / 2


def test_a_class_waits_for_itself_and_those_above() -> None:
    assert [up_to(priority) for priority in PRIORITIES] == [PRIORITIES[:1], PRIORITIES[:2], PRIORITIES]


class Queues:
    def __init__(self, server: RedisServer) -> None:
        self.client = server.connect("queue")
        self.broker = build_broker(self.client)
        self.scripts = Scripts(self.client)

    def offer(self, queue: str, request_id: str, offered_ms: int) -> None:
        message = AssignmentMessage(queue, "generate", (request_id, 1), {}, {}, message_timestamp=offered_ms)
        self.broker.do_enqueue(queue, request_id, message.encode())  # type: ignore[attr-defined]

    def fetch(self) -> str | None:
        head_starts = {keys.queue_new(M, priority): ms for priority, ms in HEAD_START_MS.items()}
        arguments = [
            key
            for queue in keys.worker_queues(M, "fp")
            for key in (
                keys.message_list(queue),
                keys.messages(queue),
                keys.message_acks("b", queue),
                keys.wake(queue),
                head_starts.get(queue, ""),
                "",
            )
        ]
        reply = self.scripts.call("fetch", None, "b", keys.MESSAGE_HEARTBEATS, 1000, "0 1", *arguments)
        return None if reply is None else reply[1].decode()


@pytest.fixture
def queues(redis_server: RedisServer) -> Queues:
    return Queues(redis_server)


@pytest.mark.parametrize("seed", range(5))
def test_the_script_takes_messages_in_the_order_of_the_rule(queues: Queues, seed: int) -> None:
    rng = random.Random(seed)
    waiting: dict[Priority, list[int]] = {priority: [] for priority in PRIORITIES}
    for number in range(60):
        priority = rng.choice(PRIORITIES)
        offered_ms = number * 1000 + rng.randrange(900)
        waiting[priority].append(offered_ms)
        queues.offer(keys.queue_new(M, priority), f"{priority}-{offered_ms}", offered_ms)
    while first := served_first({priority: offers[0] for priority, offers in waiting.items() if offers}):
        assert queues.fetch() == f"{first}-{waiting[first].pop(0)}"
    assert queues.fetch() is None


def test_re_offers_come_before_every_class_however_old(queues: Queues) -> None:
    for priority in PRIORITIES:
        queues.offer(keys.queue_new(M, priority), priority, 0)
    queues.offer(keys.queue_again(M), "again", 10**9)
    queues.offer(keys.queue_continue(M, "fp"), "continue", 10**9)
    assert [queues.fetch() for _ in range(5)] == ["continue", "again", *PRIORITIES]


def test_what_was_purged_is_passed_over_and_what_cannot_be_read_is_taken_out_first(queues: Queues) -> None:
    new, flex = keys.queue_new(M), keys.queue_new(M, "flex")
    queues.offer(new, "purged", 1)
    queues.client.hdel(keys.messages(new), "purged")
    queues.offer(new, "kept", 2)
    queues.broker.do_enqueue(flex, "junk", b"\x00")  # type: ignore[attr-defined]
    queues.offer(keys.queue_new(M, "priority"), "urgent", 40_000)
    assert [queues.fetch() for _ in range(3)] == ["kept", "junk", "urgent"]

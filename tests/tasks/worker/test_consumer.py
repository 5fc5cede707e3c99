"""The consumer on both servers, its thread turned by hand: order, room, turns, and messages that are no good."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from dramatiq import MessageProxy
from redis.exceptions import ConnectionError

from decode.scripted import scripted_engine
from tasks.process import clients
from tasks.protocol import keys
from tasks.protocol.broker import assignment_message, build_broker
from tasks.protocol.record import Reoffer
from tasks.protocol.submit import Submitter, wake
from tasks.worker import consumer
from tasks.worker.consumer import AssignmentConsumer
from tasks.worker.gate import Gate
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, Cell, info, job

NEW, AGAIN, CONTINUE = keys.queue_new(MODEL), keys.queue_again(MODEL), keys.queue_continue(MODEL, "fp")


class Worker:
    """A consumer whose messages go into a list; the engine behind its gate sees each at once."""

    def __init__(self, cell: Cell, name: str, *, num_slots: int = 8, num_live: int = 1) -> None:
        self.cell = cell
        self.name = name
        self.taken: list[MessageProxy] = []
        self.pauses = 0
        self.on_pause: Callable[[], object] = lambda: None
        self.gate = Gate()
        self.gate.observe(
            scripted_engine(kv_cache_tokens=16 * 1024, max_num_seqs=num_slots, max_num_batched_tokens=64)
        )
        self.broker = build_broker(cell.server.connect("queue"))
        self.blocking = cell.server.connect("blocking")
        self.consumer = AssignmentConsumer(
            self.broker,
            cell.records,
            info(name),
            self.gate,
            self.take,
            redis=cell.server.connect("short"),
            blocking=self.blocking,
            num_live_workers=lambda: num_live,
            block_s=0.01,
            monotonic=lambda: cell.now_ms / 1000,
            pause=self.pause,
        )
        cell.join(name, lease_ms=10**13)  # live by the real clock too

    def take(self, message: MessageProxy) -> None:
        self.taken.append(message)
        self.gate.seen()

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        self.on_pause()

    def claim_all(self) -> None:
        for message in self.taken:
            request_id, attempt = message.args
            if self.cell.state(request_id).state == "offered":
                self.cell.records.claim(request_id, attempt, self.name, "fp")

    @property
    def ids(self) -> list[str]:
        return [message.args[0] for message in self.taken]


@pytest.fixture
def cell(redis_server: RedisServer) -> Cell:
    return Cell(redis_server)


@pytest.fixture
def worker(cell: Cell) -> Worker:
    return Worker(cell, "w1")


def push(cell: Cell, queue: str, request_id: str, attempt: int = 1) -> None:
    build_broker(cell.queue).enqueue(assignment_message(queue, request_id, attempt))


def submitter(cell: Cell) -> Submitter:
    return Submitter(cell.records, build_broker(cell.queue), cell.redis)


def test_a_message_is_delivered_with_its_assignment(cell: Cell, worker: Worker) -> None:
    push(cell, NEW, "r1", 3)
    assert worker.consumer.tick()
    assert [message.args for message in worker.taken] == [("r1", 3)]
    assert not worker.consumer.tick()


def test_unfinished_streams_come_before_let_down_requests_before_new_ones(cell: Cell, worker: Worker) -> None:
    for queue, request_id in ((NEW, "n"), (AGAIN, "a"), (CONTINUE, "c"), (NEW, "m")):
        push(cell, queue, request_id)
    for _ in range(4):
        worker.consumer.tick()
    assert worker.ids == ["c", "a", "n", "m"]


def test_after_the_last_message_the_consumer_waits_before_it_looks_again(
    cell: Cell, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def note(client: Any, name: str) -> None:
        call = getattr(client, name)
        monkeypatch.setattr(client, name, lambda *args, **options: done.append(name) or call(*args, **options))

    note(worker.broker.client, "evalsha")
    note(worker.blocking, "blpop")
    push(cell, NEW, "r1")
    push(cell, AGAIN, "r2")
    for _ in range(3):
        worker.consumer.tick()
    assert done == ["evalsha", "evalsha", "blpop", "evalsha"]


def test_continuations_of_another_fingerprint_are_left_alone(cell: Cell, worker: Worker) -> None:
    push(cell, keys.queue_continue(MODEL, "other"), "r1")
    assert not worker.consumer.tick()


def test_nothing_is_fetched_without_room(cell: Cell) -> None:
    worker = Worker(cell, "w1", num_slots=2)
    worker.gate.take()
    worker.gate.take()
    push(cell, NEW, "r1")
    assert not worker.consumer.tick()
    assert cell.queue.llen(keys.message_list(NEW)) == 1
    worker.gate.seen()
    assert worker.consumer.tick()


def test_an_acknowledged_message_leaves_nothing_in_dramatiqs_books(cell: Cell, worker: Worker) -> None:
    push(cell, NEW, "r1")
    worker.consumer.tick()
    broker: Any = worker.broker
    assert broker.do_qsize(NEW) == 2  # the message, and that it is here
    worker.consumer.acknowledge(worker.taken[0])
    assert worker.gate.num_taken == 0
    worker.consumer.tick()
    assert broker.do_qsize(NEW) == 0


def test_what_is_acknowledged_is_told_without_room_and_at_the_end_too(cell: Cell) -> None:
    worker = Worker(cell, "w1", num_slots=2)
    broker: Any = worker.broker
    for request_id in ("r1", "r2"):
        push(cell, NEW, request_id)
        worker.consumer.tick()
    worker.consumer.acknowledge(worker.taken[0])
    worker.gate.close()
    worker.consumer.tick()
    assert broker.do_qsize(NEW) == 2
    worker.consumer.acknowledge(worker.taken[1])
    worker.consumer.stop(1)
    assert broker.do_qsize(NEW) == 0


def test_only_what_is_here_can_be_acknowledged(cell: Cell, worker: Worker) -> None:
    push(cell, NEW, "r1")
    worker.consumer.tick()
    worker.broker.do_requeue(NEW, worker.taken[0].options["redis_message_id"])  # type: ignore[attr-defined]
    worker.consumer.acknowledge(worker.taken[0])
    assert worker.consumer.tick()
    assert worker.ids == ["r1", "r1"]


def test_the_books_of_a_fetch_expire(cell: Cell, worker: Worker) -> None:
    push(cell, NEW, "r1")
    worker.consumer.tick()
    acks = keys.message_acks(worker.broker.broker_id, NEW)
    assert cell.queue.pttl(acks) > 0
    assert cell.queue.pttl(keys.MESSAGE_HEARTBEATS) > 0


def test_an_acknowledgement_is_told_until_redis_answers(
    cell: Cell, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(cell, NEW, "r1")
    worker.consumer.tick()
    worker.consumer.acknowledge(worker.taken[0])
    broker: Any = worker.broker
    with monkeypatch.context() as away:
        away.setattr(worker.consumer, "_scripts", Away())
        away.setattr(broker, "do_ack", Away().call, raising=False)
        for _ in range(3):
            assert not worker.consumer.tick()
    worker.consumer.tick()
    assert broker.do_qsize(NEW) == 0
    assert cell.queue.llen(keys.message_list(NEW)) == 0, "and was not given back"


class Away:
    def call(self, *args: Any) -> None:
        raise ConnectionError("away")


# -- messages that are no good


def test_the_same_message_twice_is_delivered_twice(cell: Cell, worker: Worker) -> None:
    push(cell, NEW, "r1")
    push(cell, NEW, "r1")
    worker.consumer.tick()
    worker.consumer.tick()
    assert worker.ids == ["r1", "r1"]


@pytest.mark.parametrize("what", ["list", "contents", "purge"])
def test_a_purged_queue_delivers_nothing_and_then_works_again(cell: Cell, worker: Worker, what: str) -> None:
    push(cell, NEW, "r1")
    push(cell, NEW, "r2")
    if what == "list":
        cell.queue.delete(keys.message_list(NEW))
    elif what == "contents":
        cell.queue.delete(keys.messages(NEW))
    else:
        worker.broker.flush(NEW)
    assert not worker.consumer.tick()
    push(cell, NEW, "r3")
    wake(cell.redis, NEW)
    assert worker.consumer.tick()
    assert worker.ids == ["r3"]


@pytest.mark.parametrize(
    "data",
    [
        b"\x00garbage",
        b"[]",
        b"null",
        b"{}",
        b'{"queue_name":"q","actor_name":"other","args":["r",1],"kwargs":{},"options":{}}',
        b'{"queue_name":"q","actor_name":"generate","args":["r"],"kwargs":{},"options":{}}',
        b'{"queue_name":"q","actor_name":"generate","args":[1,"r"],"kwargs":{},"options":{}}',
        b'{"queue_name":"q","actor_name":"generate","args":["r",true],"kwargs":{},"options":{}}',
        b'{"queue_name":"q","actor_name":"generate","args":["r",1],"kwargs":{},"options":{},"surprise":1}',
    ],
)
def test_an_unreadable_message_is_dropped_loudly_and_the_next_one_comes(
    cell: Cell, worker: Worker, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    broker: Any = build_broker(cell.queue)
    broker.do_enqueue(NEW, "id", data)
    push(cell, NEW, "r1")
    assert not worker.consumer.tick()
    assert "dropped an unreadable message" in caplog.text
    assert worker.consumer.tick()
    assert worker.ids == ["r1"]
    worker.consumer.acknowledge(worker.taken[0])
    worker.consumer.tick()
    assert broker.do_qsize(NEW) == 0


def test_a_message_that_lies_about_its_queue_is_acknowledged_where_it_was(cell: Cell, worker: Worker) -> None:
    broker: Any = build_broker(cell.queue)
    broker.do_enqueue(NEW, "real", assignment_message("lie", "r1", 1).encode())
    worker.consumer.tick()
    assert worker.taken[0].queue_name == NEW
    worker.consumer.acknowledge(worker.taken[0])
    worker.consumer.tick()
    assert cell.queue.hlen(keys.messages(NEW)) == 0


def test_a_message_whose_delivery_got_lost_is_given_back(
    cell: Cell, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(cell, NEW, "r1")
    real = worker.consumer._scripts.call

    def lose_the_reply(*args: Any) -> None:
        monkeypatch.undo()
        real(*args)
        raise ConnectionError("reply lost")

    monkeypatch.setattr(worker.consumer._scripts, "call", lose_the_reply)
    assert not worker.consumer.tick()
    assert cell.queue.llen(keys.message_list(NEW)) == 0
    assert worker.consumer.tick()
    assert worker.ids == ["r1"]


def test_the_messages_of_a_worker_that_died_long_ago_are_dropped_and_those_of_a_live_one_stay(
    cell: Cell, worker: Worker
) -> None:
    dead, live = Worker(cell, "dead"), Worker(cell, "live")
    for other, request_id in ((dead, "r1"), (live, "r2")):
        push(cell, NEW, request_id)
        assert other.consumer.tick()
    cell.queue.zadd(keys.MESSAGE_HEARTBEATS, {dead.broker.broker_id: 1})
    worker.consumer._keep_house()
    assert cell.queue.hlen(keys.messages(NEW)) == 1
    assert cell.queue.exists(keys.message_acks(dead.broker.broker_id, NEW)) == 0
    assert cell.queue.zscore(keys.MESSAGE_HEARTBEATS, dead.broker.broker_id) is None
    for other in (dead, live):  # the dead one was only frozen
        other.consumer.acknowledge(other.taken[0])
        other.consumer.tick()
    assert cell.queue.hlen(keys.messages(NEW)) == 0


def test_a_message_at_work_is_not_given_back(cell: Cell, worker: Worker) -> None:
    push(cell, NEW, "r1")
    worker.consumer.tick()
    worker.consumer._keep_house()
    assert cell.queue.llen(keys.message_list(NEW)) == 0


# -- Redis away, and bugs


def test_without_redis_the_consumer_waits_and_says_so_once(
    cell: Cell, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push(cell, NEW, "r1")
    with monkeypatch.context() as patch:

        def away(*args: Any) -> None:
            raise ConnectionError("away")

        patch.setattr(worker.consumer._scripts, "call", away)
        assert not worker.consumer.tick()
        assert not worker.consumer.tick()
    assert worker.pauses == 2
    with caplog.at_level("INFO"):
        assert worker.consumer.tick()
    assert [record.message for record in caplog.records if record.name == "tasks.worker.consumer"] == [
        "the consumer waits for Redis: away",
        "the consumer goes on after 2 failures",
    ]


def test_a_bug_does_not_end_the_consumer(
    cell: Cell, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push(cell, NEW, "r1")
    with monkeypatch.context() as patch:

        def bug(*args: Any) -> None:
            raise KeyError("bug")

        patch.setattr(worker.consumer._scripts, "call", bug)
        assert not worker.consumer.tick()
    assert "the consumer failed and goes on" in caplog.text
    assert worker.consumer.tick()


# -- waiting


def test_an_idle_consumer_is_woken_by_a_submit(cell: Cell) -> None:
    worker = Worker(cell, "w1")
    worker.consumer._block_s = 60
    worker.consumer.tick()
    thread = threading.Thread(target=worker.consumer.tick)
    thread.start()
    submitter(cell).submit([job("r1")], reader=None, max_waiting=9)
    thread.join(10)
    if not worker.taken:  # the token may come before the message was looked for
        worker.consumer.tick()
    assert worker.ids == ["r1"]


@pytest.mark.parametrize("queue", [AGAIN, CONTINUE])
def test_an_idle_consumer_is_woken_by_a_requeue(cell: Cell, queue: str) -> None:
    worker = Worker(cell, "w1")
    worker.consumer._block_s = 60
    worker.consumer.tick()
    submitter(cell).requeue(Reoffer("r1", 2, queue))
    assert worker.consumer.tick()
    assert [message.args for message in worker.taken] == [("r1", 2)]


def test_a_lost_wake_token_only_costs_time(cell: Cell, worker: Worker) -> None:
    worker.consumer.tick()
    push(cell, NEW, "r1")
    assert worker.consumer.tick()


def test_blocking_ends_before_the_client_gives_up() -> None:
    assert consumer.BLOCK_S <= clients.MAX_BLOCK_S


def test_the_last_message_takes_the_wake_tokens_of_those_before_it_along(cell: Cell, worker: Worker) -> None:
    """Each would have somebody look in vain."""
    sender = submitter(cell)
    for n in range(3):
        sender.submit([job(f"r{n}")], reader=None, max_waiting=9)
    for num_left in (3, 3, 0):
        assert worker.consumer.tick()
        assert cell.redis.llen(keys.wake(NEW)) == num_left
    sender.submit([job("r3")], reader=None, max_waiting=9)
    assert cell.redis.llen(keys.wake(NEW)) == 1


def test_wake_tokens_are_bounded_and_expire(cell: Cell) -> None:
    for _ in range(keys.MAX_WAKE_TOKENS + 5):
        wake(cell.redis, NEW)
    assert cell.redis.llen(keys.wake(NEW)) == keys.MAX_WAKE_TOKENS
    assert 0 < cell.redis.pttl(keys.wake(NEW)) <= keys.WAKE_TTL_MS


def test_told_to_stop_an_idle_consumer_ends_at_once(cell: Cell) -> None:
    worker = Worker(cell, "w1")
    worker.consumer._block_s = 60
    worker.consumer.start()
    worker.consumer.stop_fetching()
    worker.consumer.stop(10)
    assert not worker.consumer._thread.is_alive()
    assert cell.queue.zscore(keys.MESSAGE_HEARTBEATS, worker.broker.broker_id) is None


def test_told_to_stop_it_takes_nothing_and_passes_the_wake_token_on(cell: Cell, worker: Worker) -> None:
    worker.consumer.tick()
    push(cell, NEW, "r1")
    wake(cell.redis, NEW)
    blocking = worker.consumer._blocking

    class ClosingMeanwhile:
        def blpop(self, *args: Any, **kwargs: Any) -> Any:
            reply = blocking.blpop(*args, **kwargs)
            worker.gate.close()
            return reply

    worker.consumer._blocking = ClosingMeanwhile()
    assert not worker.consumer.tick()
    assert cell.redis.llen(keys.wake(NEW)) == 1
    assert cell.queue.llen(keys.message_list(NEW)) == 1


# -- turns


def test_a_burst_spreads_evenly_even_when_one_consumer_is_always_first(cell: Cell) -> None:
    fast, slow = Worker(cell, "fast", num_live=2), Worker(cell, "slow", num_live=2)

    def let_the_other_work() -> None:
        slow.consumer.tick()
        slow.claim_all()

    fast.on_pause = let_the_other_work
    for n in range(12):
        submitter(cell).submit([job(f"r{n}")], reader=None, max_waiting=99)
    while len(fast.taken) + len(slow.taken) < 12:
        fast.consumer.tick()
        fast.claim_all()
    assert abs(len(fast.taken) - len(slow.taken)) <= 2
    assert sorted(fast.ids + slow.ids) == sorted(f"r{n}" for n in range(12))


def test_a_peer_that_does_not_take_its_turn_holds_up_nobody_for_long(cell: Cell) -> None:
    worker = Worker(cell, "w1", num_live=2)
    Worker(cell, "sleeper", num_live=2)
    for n in range(5):
        push(cell, NEW, f"r{n}")
    for _ in range(5):
        worker.consumer.tick()
    assert len(worker.taken) == 5
    assert worker.pauses == consumer.MAX_YIELD_STEPS


def test_a_worker_that_lets_a_peer_go_first_gives_it_the_wake_token(cell: Cell) -> None:
    worker = Worker(cell, "w1", num_live=2)
    Worker(cell, "peer", num_live=2)
    push(cell, NEW, "r1")
    worker.consumer.tick()
    worker.consumer.tick()
    assert worker.pauses == 0, "it waits for a peer only when there is a message to leave to it"
    tokens: list[int] = []
    worker.on_pause = lambda: tokens.append(cell.redis.llen(keys.wake(NEW)))
    push(cell, NEW, "r2")
    wake(cell.redis, NEW)
    worker.consumer.tick()
    assert tokens[0] == 1


def test_a_lone_worker_asks_for_no_peers(cell: Cell, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*args: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(cell.records, "least_held_by_peers", ask)
    push(cell, NEW, "r1")
    push(cell, NEW, "r2")
    assert worker.consumer.tick()
    assert worker.consumer.tick()

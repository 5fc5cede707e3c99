"""Redis clients and the broker: that what redis-py and Dramatiq would choose by themselves is chosen on purpose."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from dramatiq import get_broker
from redis.connection import BlockingConnectionPool
from redis.exceptions import ConnectionError, TimeoutError

from tasks.process.clients import MAX_BLOCK_S, Use, connect
from tasks.protocol import keys
from tasks.protocol.broker import AssignmentMessage, assignment_message, build_broker
from tasks.protocol.errors import QueueFull
from tasks.protocol.record import Reoffer
from tasks.protocol.submit import Submitter
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, Cell, job

USES: tuple[Use, ...] = ("short", "blocking", "queue")


def options(use: Use, url: str = "redis://h:1/3") -> dict[str, Any]:
    return dict(connect(url, use=use).connection_pool.connection_kwargs)


@pytest.mark.parametrize(
    ("url", "database"), [("redis://h:1", 0), ("redis://h:1/3", 3), ("redis://h:1?db=4", 4), ("unix:///s?db=2", 2)]
)
def test_dramatiq_has_the_database_after_ours(url: str, database: int) -> None:
    assert [options(use, url)["db"] for use in USES] == [database, database, database + 1]


def test_a_blocking_read_is_never_cut_short() -> None:
    assert options("blocking")["socket_timeout"] > MAX_BLOCK_S


def test_who_blocks_for_less_notices_earlier_that_no_reply_comes() -> None:
    client = connect("redis://h:1", use="blocking", max_block_s=0.5)
    assert client.connection_pool.connection_kwargs["socket_timeout"] == 3.5


@pytest.mark.parametrize("use", USES)
def test_every_read_ends_in_time(use: Use) -> None:
    assert 0 < options(use)["socket_timeout"] <= 6
    assert 0 < options(use)["socket_connect_timeout"] <= 1
    assert options(use)["protocol"] == 2


@pytest.mark.parametrize(("use", "num_tries"), [("short", 2), ("blocking", 1), ("queue", 1)])
def test_only_what_is_safe_to_repeat_is_repeated_and_only_when_the_connection_broke(use: Use, num_tries: int) -> None:
    retry = options(use)["retry"]
    for error, expected in ((ConnectionError, num_tries), (TimeoutError, 1)):
        tries: list[int] = []

        def call(tries: list[int] = tries, error: type[Exception] = error) -> None:
            tries.append(1)
            raise error("away")

        with pytest.raises(error):
            retry.call_with_retry(call, lambda reason: None)
        assert len(tries) == expected


def test_the_pool_makes_callers_wait_instead_of_failing() -> None:
    assert isinstance(connect("redis://h:1", use="short").connection_pool, BlockingConnectionPool)


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    with pytest.raises(ConnectionError):
        connect("unix:///nowhere/at/all.sock", use="short").ping()


def test_building_a_broker_changes_nothing_global(fake_server: RedisServer) -> None:
    broker = build_broker(fake_server.connect("queue"))
    assert broker.middleware == []
    assert get_broker() is not broker


def test_a_message_carries_only_the_assignment() -> None:
    message = assignment_message(keys.queue_new(MODEL), "r1", 2)
    fields = orjson.loads(message.encode())
    assert (fields["args"], fields["kwargs"], fields["options"]) == (["r1", 2], {}, {})


def test_a_submit_makes_the_record_then_the_message_then_the_wake_token(redis_server: RedisServer) -> None:
    cell = Cell(redis_server)
    cell.join("w1", lease_ms=10**13)
    submitter = Submitter(cell.records, build_broker(cell.queue), cell.redis)
    assert submitter.submit([job()], reader="web", max_waiting=9).created
    assert cell.queue.llen(keys.message_list(keys.queue_new(MODEL))) == 1
    assert cell.redis.llen(keys.wake(keys.queue_new(MODEL))) == 1
    assert cell.records.open_of("web") == ["r1"]


def test_a_repeated_submit_sends_no_second_message(redis_server: RedisServer) -> None:
    cell = Cell(redis_server)
    cell.join("w1", lease_ms=10**13)
    submitter = Submitter(cell.records, build_broker(cell.queue), cell.redis)
    submitter.submit([job()], reader="web", max_waiting=9)
    assert not submitter.submit([job()], reader="web", max_waiting=9).created
    assert cell.queue.llen(keys.message_list(keys.queue_new(MODEL))) == 1


def test_several_choices_are_queued_in_the_one_call_that_makes_their_records(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(redis_server)
    cell.join("w1", lease_ms=10**13)
    submitter = Submitter(cell.records, build_broker(cell.queue), cell.redis)
    calls: list[str] = []
    send = cell.redis.execute_command

    def count(*args: Any, **options: Any) -> Any:
        calls.append(args[0])
        return send(*args, **options)

    monkeypatch.setattr(cell.redis, "execute_command", count)
    submitter.submit([job("x"), job("x.1")], reader="web", max_waiting=9)
    assert set(calls) <= {"EVALSHA", "EVAL"}
    assert calls.count("EVALSHA") == 1
    assert cell.queue.llen(keys.message_list(keys.queue_new(MODEL))) == 2
    assert cell.redis.llen(keys.wake(keys.queue_new(MODEL))) == 2


def test_a_refused_submit_queues_nothing(redis_server: RedisServer) -> None:
    cell = Cell(redis_server)
    cell.join("w1", lease_ms=10**13)
    submitter = Submitter(cell.records, build_broker(cell.queue), cell.redis)
    with pytest.raises(QueueFull):
        submitter.submit([job()], reader="web", max_waiting=0)
    assert cell.queue.keys() == []


def test_what_was_queued_is_a_message_of_dramatiqs_with_its_assignment(redis_server: RedisServer) -> None:
    cell = Cell(redis_server)
    cell.join("w1", lease_ms=10**13)
    broker: Any = build_broker(cell.queue)
    Submitter(cell.records, broker, cell.redis).submit([job()], reader="web", max_waiting=9)
    [raw] = broker.do_fetch(keys.queue_new(MODEL), 1)
    assert AssignmentMessage.decode(raw).args == ("r1", 1)


def test_a_further_attempt_that_redis_does_not_take_is_left_to_the_watchdog(
    fake_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(fake_server)
    submitter = Submitter(cell.records, build_broker(cell.queue), cell.redis)

    def away(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(cell.redis, "evalsha", away)
    submitter.requeue(Reoffer("r1", 2, keys.queue_again(MODEL)))
    monkeypatch.undo()
    submitter.requeue(Reoffer("r1", 2, keys.queue_again(MODEL)))
    assert cell.queue.llen(keys.message_list(keys.queue_again(MODEL))) == 1
    assert cell.redis.llen(keys.wake(keys.queue_again(MODEL))) == keys.WAKE_TOKENS_AGAIN


def test_a_further_attempt_wakes_another_worker_than_the_frozen_one_that_waits_first(
    redis_server: RedisServer,
) -> None:
    cell = Cell(redis_server)
    queue = keys.queue_again(MODEL)
    Submitter(cell.records, build_broker(cell.queue), cell.redis).requeue(Reoffer("r1", 2, queue))
    frozen, other = cell.redis.rpop(keys.wake(queue)), cell.redis.rpop(keys.wake(queue))
    assert (frozen, other) == (b"1", b"1")

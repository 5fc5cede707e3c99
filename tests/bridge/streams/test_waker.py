"""Waking a blocked read: at once, without an answer, and over another connection once the first is in doubt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError, ResponseError

from bridge.streams.waker import Waker
from tasks.protocol import keys
from tests.conftest import RedisServer


@pytest.fixture
def redis(redis_server: RedisServer) -> Redis:
    return redis_server.connect()


@pytest.fixture
def waker(redis: Redis) -> Iterator[Waker]:
    one = Waker(redis, "r1")
    yield one
    one.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.002)


def last_entry(redis: Redis, waker: Waker, after: bytes = b"0-0") -> bytes:
    """The wake-up that comes after that one; the test fails if none comes."""
    found: list[bytes] = []

    def has_come() -> bool:
        entries: Any = redis.xrevrange(waker.control, count=1)
        found[:] = [entry_id for entry_id, _ in entries if entry_id > after]
        return bool(found)

    wait_until(has_come)
    return found[0]


def test_every_wake_up_is_an_entry_after_the_last(redis: Redis, waker: Waker) -> None:
    last = b"0-0"
    for _ in range(5):
        waker.wake()
        last = last_entry(redis, waker, last)
        time.sleep(0.002)


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_control_stream_of_a_reader_that_does_not_read_stays_small(
    redis: Redis, waker: Waker, is_silent: bool
) -> None:
    last = b"0-0"
    if is_silent:
        waker.wake()
        silent(waker)
        last = last_entry(redis, waker)
    with redis.pipeline(transaction=False) as pipe:
        for _ in range(2 * keys.CONTROL_KEPT):
            pipe.xadd(waker.control, {"o": "a"})
        last = pipe.execute()[-1]
    time.sleep(0.002)
    waker.wake()
    last_entry(redis, waker, last)
    assert keys.CONTROL_KEPT <= redis.xlen(waker.control) <= 1.2 * keys.CONTROL_KEPT


def test_the_control_stream_of_a_reader_that_was_killed_expires(redis: Redis, waker: Waker) -> None:
    waker.wake()
    last_entry(redis, waker)
    assert redis.pttl(waker.control) > 0


def silent(waker: Waker) -> Any:
    """The connection without replies; the first wake-up makes it."""
    wait_until(lambda: waker._silent is not None)
    return waker._silent


def test_wake_ups_are_not_answered_so_that_nothing_piles_up(redis: Redis, waker: Waker) -> None:
    waker.wake()
    connection, last = silent(waker), last_entry(redis, waker)
    time.sleep(0.002)
    waker.wake()
    last_entry(redis, waker, last)
    assert not connection.can_read(0.05)


def test_a_broken_connection_is_replaced(redis: Redis, waker: Waker, monkeypatch: pytest.MonkeyPatch) -> None:
    waker.wake()
    connection, last = silent(waker), last_entry(redis, waker)
    broken = connection._sock

    def send(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise ConnectionError("broken pipe")

    monkeypatch.setattr(connection, "send_packed_command", send)
    waker.wake()
    last_entry(redis, waker, last)
    wait_until(lambda: waker._silent is not None and waker._silent._sock not in (None, broken))


def test_a_connection_in_doubt_is_replaced(redis: Redis, waker: Waker) -> None:
    waker.wake()
    doubtful, last = silent(waker)._sock, last_entry(redis, waker)
    waker.doubt()
    waker.wake()
    last_entry(redis, waker, last)
    wait_until(lambda: waker._silent is not None and waker._silent._sock not in (None, doubtful))


def test_where_redis_must_not_be_silent_every_wake_up_is_answered(
    redis: Redis, waker: Waker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = redis.connection_pool
    get_connection = pool.get_connection

    def refusing() -> Any:
        connection = get_connection()
        read = connection.read_response

        def read_response(*_: object, **__: object) -> object:
            read()
            raise ResponseError("NOPERM")

        monkeypatch.setattr(connection, "read_response", read_response)
        return connection

    monkeypatch.setattr(pool, "get_connection", refusing)
    assert waker._connect() is None
    monkeypatch.undo()
    last = b"0-0"
    for _ in range(3):
        waker.wake()
        last = last_entry(redis, waker, last)
        time.sleep(0.002)
    assert waker._silent is None


def test_closing_does_not_wait_for_a_redis_that_does_not_answer(
    redis: Redis, waker: Waker, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_called, answers = threading.Event(), threading.Event()

    def pipeline(**_: object) -> None:
        is_called.set()
        answers.wait(20)
        raise ConnectionError("gone")

    monkeypatch.setattr(redis, "pipeline", pipeline)
    waker.wake()
    assert is_called.wait(5)
    closing = threading.Thread(target=waker.close)
    closing.start()
    closing.join(5)
    is_closed = not closing.is_alive()
    answers.set()
    closing.join()
    assert is_closed


def test_what_a_wake_up_costs_the_pool_is_given_back(redis: Redis, waker: Waker) -> None:
    for _ in range(3 * 16):
        waker.doubt()
        waker.wake()
    waker.close()
    assert redis.ping()

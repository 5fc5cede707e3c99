"""Waking a blocked read: at once, without an answer, and over another connection once the first is in doubt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from bridge.waker import Waker
from tests.conftest import RedisServer


@pytest.fixture
def redis(fake_server: RedisServer) -> Redis:
    return fake_server.connect()


@pytest.fixture
def waker(redis: Redis) -> Iterator[Waker]:
    one = Waker(redis, "r1")
    yield one
    one.close()


def last_entry(redis: Redis, waker: Waker, after: bytes = b"0-0") -> bytes:
    """The wake-up that comes after that one; the test fails if none comes."""
    until_s = time.monotonic() + 5
    while time.monotonic() < until_s:
        entries: Any = redis.xrevrange(waker.control, count=1)
        if entries and entries[0][0] > after:
            entry_id: bytes = entries[0][0]
            return entry_id
        time.sleep(0.002)
    raise AssertionError("nobody was woken")


def test_every_wake_up_is_an_entry_after_the_last(redis: Redis, waker: Waker) -> None:
    last = b"0-0"
    for _ in range(5):
        waker.wake()
        last = last_entry(redis, waker, last)
        time.sleep(0.002)
    assert redis.xlen(waker.control) == 1


def test_the_control_stream_of_a_reader_that_was_killed_expires(redis: Redis, waker: Waker) -> None:
    waker.wake()
    last_entry(redis, waker)
    assert redis.pttl(waker.control) > 0


def test_wake_ups_are_not_answered_so_that_nothing_piles_up(redis: Redis, waker: Waker) -> None:
    waker.wake()
    last = last_entry(redis, waker)
    time.sleep(0.002)
    waker.wake()
    last_entry(redis, waker, last)
    assert not waker._connection.can_read(0.05)


def test_a_broken_connection_is_replaced(redis: Redis, waker: Waker, monkeypatch: pytest.MonkeyPatch) -> None:
    waker.wake()
    last = last_entry(redis, waker)
    broken = waker._connection._sock

    def send(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise ConnectionError("broken pipe")

    monkeypatch.setattr(waker._connection, "send_packed_command", send)
    waker.wake()
    last_entry(redis, waker, last)
    assert waker._connection._sock is not broken


def test_a_connection_in_doubt_is_replaced(redis: Redis, waker: Waker) -> None:
    waker.wake()
    last = last_entry(redis, waker)
    doubtful = waker._connection._sock
    waker.doubt()
    waker.wake()
    last_entry(redis, waker, last)
    assert waker._connection._sock is not doubtful


def test_what_a_wake_up_costs_the_pool_is_given_back(redis: Redis, waker: Waker) -> None:
    for _ in range(3 * 16):
        waker.doubt()
        waker.wake()
    waker.close()
    assert redis.ping()

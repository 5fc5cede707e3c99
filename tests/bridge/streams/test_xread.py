"""The raw XREAD: what it sends is what the client would send, and what comes back is what is in the streams."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from bridge.streams.xread import Xread
from tests.conftest import RedisServer


def test_only_streams_with_something_new_come_back(redis_server: RedisServer) -> None:
    redis = redis_server.connect()
    redis.xadd("a", {"t": "1"}, id="1-1")
    redis.xadd("a", {"t": "2"}, id="2-1")
    redis.xadd("b", {"t": "3"}, id="1-1")
    xread = Xread(redis_server.connect("blocking"), count=64)
    assert xread.read({b"a": b"1-1", b"b": b"1-1", b"c": b"0-0"}, None) == [[b"a", [[b"2-1", [b"t", b"2"]]]]]
    assert xread.read({b"b": b"0-0"}, None) == [[b"b", [[b"1-1", [b"t", b"3"]]]]]
    assert xread.read({b"b": b"1-1"}, 1) == []
    xread.close()


def test_after_an_error_the_next_read_connects_again(redis_server: RedisServer) -> None:
    redis = redis_server.connect()
    redis.xadd("a", {"t": "1"}, id="1-1")
    xread = Xread(redis_server.connect("blocking"), count=64)
    with pytest.raises(ResponseError):
        xread.read({b"a": b"nonsense"}, None)
    assert xread.read({b"a": b"0-0"}, None) == [[b"a", [[b"1-1", [b"t", b"1"]]]]]
    xread.close()


def test_one_read_brings_no_more_of_a_stream_than_was_asked_for(redis_server: RedisServer) -> None:
    redis = redis_server.connect()
    for number in range(3):
        redis.xadd("a", {"t": "1"}, id=f"{number + 1}-1")
    xread = Xread(redis_server.connect("blocking"), count=2)
    [[_, entries]] = xread.read({b"a": b"0-0"}, 1)
    assert [entry for entry, _ in entries] == [b"1-1", b"2-1"]
    xread.close()

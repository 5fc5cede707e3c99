"""What there is of some streams, read once."""

from __future__ import annotations

import pytest
from redis import Redis

from bridge.streams.events import StreamLost
from bridge.streams.history import History
from tasks.protocol import keys
from tasks.protocol.contract import TerminalEvent, TokenEvent, encode_terminal, entry_id, pack_tokens
from tests.conftest import RedisServer


def append(redis: Redis, request_id: str, index: int, *token_ids: int, attempt: int = 1) -> None:
    redis.xadd(keys.out(request_id), {"t": pack_tokens(token_ids)}, id=entry_id(index, attempt))


def test_all_that_there_is_of_each_stream(redis_server: RedisServer) -> None:
    redis = redis_server.connect()
    append(redis, "a", 0, 5, 6)
    append(redis, "a", 2, 7, attempt=2)
    redis.xadd(keys.out("a"), {"e": encode_terminal("finished", "stop")}, id=entry_id(3, 2))
    append(redis, "b", 0, 8)
    assert History(redis).read(["a", "b", "c"]) == [
        [
            TokenEvent(0, 1, (5, 6)),
            TokenEvent(2, 2, (7,)),
            TerminalEvent(3, 2, "finished", "stop"),
        ],
        [TokenEvent(0, 1, (8,))],
        [],
    ]


def test_repeats_are_cut_away(fake_server: RedisServer) -> None:
    redis = fake_server.connect()
    append(redis, "a", 0, 5, 6)
    append(redis, "a", 0, 5, attempt=2)
    append(redis, "a", 1, 6, 7, attempt=2)
    [events] = History(redis).read(["a"])
    assert events == [TokenEvent(0, 1, (5, 6)), TokenEvent(2, 2, (7,))]


def test_a_gap_is_a_lost_stream(fake_server: RedisServer) -> None:
    redis = fake_server.connect()
    append(redis, "a", 1, 6)
    with pytest.raises(StreamLost, match="token 0 is missing"):
        History(redis).read(["a"])


def test_an_entry_that_cannot_be_read_is_a_lost_stream(fake_server: RedisServer) -> None:
    redis = fake_server.connect()
    redis.xadd(keys.out("a"), {"x": "y"}, id="1-1")
    with pytest.raises(StreamLost, match="cannot be read"):
        History(redis).read(["a"])

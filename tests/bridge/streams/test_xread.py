"""The raw XREAD: what it sends is what the client would send, and what comes back is what is in the streams."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import PythonRespSerializer
from redis.exceptions import ResponseError

from bridge.streams.xread import Xread
from tests.conftest import RedisServer

positions_of = st.dictionaries(st.binary(min_size=1, max_size=20), st.binary(min_size=1, max_size=12), min_size=1)


@given(st.lists(positions_of, min_size=1, max_size=4), st.one_of(st.none(), st.integers(0, 5000)))
def test_commands_are_packed_as_the_client_packs_them(reads: list[dict[bytes, bytes]], block_ms: int | None) -> None:
    xread = Xread(None, count=64)  # type: ignore[arg-type]
    for positions in reads:  # one after the other: the keys may be the same again, or others
        block = () if block_ms is None else ("BLOCK", str(block_ms))
        arguments = ("XREAD", "COUNT", "64", *block, "STREAMS", *positions, *positions.values())
        wanted = b"".join(PythonRespSerializer(6000, lambda value: _bytes(value)).pack(*arguments))
        assert xread._command(positions, block_ms) == wanted


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


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

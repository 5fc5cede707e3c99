"""The multiplexed reader, on the fake and the real server: order, laggards, several readers of a stream, loss."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from bridge.streams.events import StreamLost
from bridge.streams.reader import HEARTBEAT_S, MAX_BLOCK_S
from decode.engine.sampling import TokenLogprobs
from tasks.process.clients import BLOCKING_GRACE_S
from tasks.protocol import keys
from tasks.protocol.contract import TerminalEvent, TokenEvent, entry_id, pack_logprobs, pack_tokens
from tasks.protocol.record import READER_LEASE_MS
from tests.bridge.reading import Streams, ready
from tests.conftest import RedisServer


async def test_events_come_in_order_and_end_with_the_terminal(streams: Streams) -> None:
    subscription = streams.open("a")
    streams.append("a", 0, 5)
    streams.append("a", 1, 6, 7)
    await streams.turn()
    assert ready(subscription) == [TokenEvent(0, 1, (5,)), TokenEvent(1, 1, (6, 7))]
    streams.end("a", 3)
    await streams.turn()
    assert ready(subscription) == [TerminalEvent(3, 1, "finished", "stop")]
    await streams.turn()
    assert streams.reader.num_feeds == 0


async def test_each_subscriber_gets_its_own_stream(streams: Streams) -> None:
    a, b = streams.open("a"), streams.open("b")
    streams.append("b", 0, 9)
    await streams.turn()
    assert (ready(a), ready(b)) == ([], [TokenEvent(0, 1, (9,))])


async def test_another_attempt_continues_the_same_indices(streams: Streams) -> None:
    subscription = streams.open("a")
    streams.append("a", 0, 5, attempt=1)
    streams.append("a", 1, 6, attempt=3)
    await streams.turn()
    assert [event.index for event in ready(subscription)] == [0, 1]


async def test_a_gap_ends_the_subscription_with_an_error(streams: Streams) -> None:
    subscription = streams.open("a")
    streams.append("a", 0, 5)
    streams.append("a", 2, 7)
    await streams.turn()
    assert ready(subscription) == [TokenEvent(0, 1, (5,))]
    await streams.turn()
    with pytest.raises(StreamLost, match="token 1"):
        await subscription.next(1)


async def test_tokens_that_redis_lost_and_got_again_in_other_entries_are_found(streams: Streams) -> None:
    subscription = streams.open("a")
    streams.append("a", 0, 1)
    streams.append("a", 1, 2)
    streams.append("a", 2, 3)
    await streams.turn()
    assert [event.index for event in ready(subscription)] == [0, 1, 2]
    streams.redis.delete(keys.out("a"))
    streams.append("a", 0, 1)
    streams.append("a", 1, 2, 3, 4, 5)
    streams.append("a", 5, 6)
    await streams.turn()
    await streams.turn()
    assert ready(subscription) == [TokenEvent(3, 1, (4, 5)), TokenEvent(5, 1, (6,))]


async def test_log_probabilities_come_with_their_tokens(streams: Streams) -> None:
    subscription = streams.open("a")
    logprobs = (TokenLogprobs(-0.5, ((5, -0.5),)), TokenLogprobs(-1.5, ((7, -0.25),)))
    streams.redis.xadd(keys.out("a"), {"t": pack_tokens((5, 6)), "l": pack_logprobs(logprobs)}, id=entry_id(0, 1))
    await streams.turn()
    assert ready(subscription) == [TokenEvent(0, 1, (5, 6), logprobs)]


async def test_a_subscription_can_begin_anywhere_even_inside_an_entry(streams: Streams) -> None:
    streams.append("a", 0, 5, 6, 7)
    streams.append("a", 3, 8)
    streams.end("a", 4)
    subscription = streams.open("a", after_index=1)
    await streams.turn()
    assert ready(subscription) == [
        TokenEvent(2, 1, (7,)),
        TokenEvent(3, 1, (8,)),
        TerminalEvent(4, 1, "finished", "stop"),
    ]


async def test_a_subscription_beyond_the_end_gets_the_terminal_alone(streams: Streams) -> None:
    streams.append("a", 0, 5)
    streams.end("a", 1)
    subscription = streams.open("a", after_index=40)
    await streams.turn()
    assert ready(subscription) == [TerminalEvent(1, 1, "finished", "stop")]


async def test_a_full_window_is_not_read_further_until_it_is_emptied(streams: Streams) -> None:
    subscription = streams.open("a")
    streams.append("a", 0, 1, 2, 3, 4)
    await streams.turn()
    assert subscription.is_lagging
    streams.append("a", 4, 5)
    await streams.turn()
    assert streams.reader.num_feeds == 0
    assert ready(subscription) == [TokenEvent(0, 1, (1, 2, 3, 4))]
    assert not subscription.is_lagging
    await streams.turn()
    assert ready(subscription) == [TokenEvent(4, 1, (5,))]


async def test_a_late_batch_of_a_laggard_is_neither_lost_nor_repeated(streams: Streams) -> None:
    subscription = streams.open("a")
    streams.append("a", 0, 1, 2, 3, 4)
    streams.reader.tick(0)
    streams.append("a", 4, 5)
    streams.reader.tick(0)  # the reader does not know yet that the window is full
    await asyncio.sleep(0)
    assert ready(subscription) == [TokenEvent(0, 1, (1, 2, 3, 4))]
    streams.append("a", 5, 6)
    await streams.turn()
    assert ready(subscription) == [TokenEvent(4, 1, (5,)), TokenEvent(5, 1, (6,))]


async def test_two_subscribers_of_one_stream_each_get_all_of_it(streams: Streams) -> None:
    first = streams.open("a")
    streams.append("a", 0, 5)
    await streams.turn()
    second = streams.open("a")
    streams.append("a", 1, 6)
    await streams.turn()
    assert ready(first) == [TokenEvent(0, 1, (5,)), TokenEvent(1, 1, (6,))]
    assert ready(second) == [TokenEvent(0, 1, (5,)), TokenEvent(1, 1, (6,))]
    first.close()
    streams.end("a", 2)
    await streams.turn()
    assert ready(second) == [TerminalEvent(2, 1, "finished", "stop")]


async def test_a_closed_subscription_is_not_read_any_more(streams: Streams) -> None:
    subscription = streams.open("a")
    await streams.turn()
    assert streams.reader.num_feeds == 1
    subscription.close()
    subscription.close()
    await streams.turn()
    assert streams.reader.num_feeds == 0


async def test_an_unreadable_entry_fails_its_own_subscriber_only(streams: Streams) -> None:
    a, b = streams.open("a"), streams.open("b")
    streams.redis.xadd(keys.out("a"), {"x": "y"}, id="1-1")
    streams.append("b", 0, 5)
    await streams.turn()
    assert ready(b) == [TokenEvent(0, 1, (5,))]
    with pytest.raises(StreamLost, match="cannot be read"):
        await a.next(1)


async def test_a_record_that_is_gone_fails_its_subscriber_at_the_next_heartbeat(streams: Streams) -> None:
    a, b = streams.open("a"), streams.open("b")
    await streams.turn()
    streams.redis.delete(keys.request("a"))
    streams.now_s += 0.9
    await streams.turn()
    assert ready(a) == []
    streams.now_s += 0.1
    await streams.turn()
    with pytest.raises(StreamLost, match="no longer known"):
        await a.next(1)
    assert ready(b) == []


async def test_a_lease_that_was_lost_makes_the_reader_say_again_what_it_reads(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        streams.open("a")
        streams.open("b")
        await streams.turn()
        assert streams.lease.calls == ["r1 4700"]
        streams.lease.is_live = False
        streams.now_s += 1
        await streams.turn()
        assert streams.lease.calls[1:] == ["r1 4700", "r1 reads a b"]


def test_one_reply_that_never_comes_does_not_cost_a_reader_its_lease() -> None:
    assert MAX_BLOCK_S + BLOCKING_GRACE_S + HEARTBEAT_S < READER_LEASE_MS / 1000 < 5


async def test_the_lease_is_renewed_by_the_reading_itself(streams: Streams) -> None:
    await streams.turn()
    streams.now_s += 0.5
    await streams.turn()
    assert streams.lease.calls == ["r1 4700"]
    streams.now_s += 0.5
    await streams.turn()
    assert streams.lease.calls == ["r1 4700"] * 2
    streams.reader.stop()
    assert streams.lease.calls[-1] == "r1 left"
    streams.lease.calls.clear()
    streams.reader.stop(keep_lease=True)
    assert streams.lease.calls == []


async def test_an_outage_is_survived_up_to_a_limit(fake_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with Streams(fake_server) as streams:
        subscription = streams.open("a")
        await streams.turn()
        with monkeypatch.context() as broken:
            broken.setattr(streams.reader._xread, "read", unreachable)
            assert not await streams.turn()
            streams.now_s += 9
            assert not await streams.turn()
        streams.append("a", 0, 5)
        assert await streams.turn()
        assert ready(subscription) == [TokenEvent(0, 1, (5,))]
        with monkeypatch.context() as broken:
            broken.setattr(streams.reader._xread, "read", unreachable)
            streams.now_s += 5
            await streams.turn()
            assert ready(subscription) == [], "the first outage is over and forgotten"
            streams.now_s += 10
            await streams.turn()
        with pytest.raises(StreamLost, match="reachable"):
            await subscription.next(1)


async def test_a_second_reader_of_a_stream_does_not_wait_for_the_first(
    fake_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Streams(fake_server, block_ms=700) as streams:
        reads: list[int | None] = []

        def read(positions: dict[bytes, bytes], block_ms: int | None, meanwhile: object) -> list[object]:
            reads.append(block_ms)
            return []

        monkeypatch.setattr(streams.reader._xread, "read", read)
        streams.open("a")
        streams.reader.tick(0)
        streams.open("a")
        streams.reader.tick(0)
        streams.reader.tick(0)
        assert reads == [700, None, None, 700, None]


async def test_a_wake_up_is_read_once(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        control = keys.control("r1")
        for _ in range(3):
            streams.redis.xadd(control, {"w": ""})
        last = streams.redis.xrevrange(control, count=1)[0][0]  # type: ignore[index]
        streams.reader.tick(0)
        assert streams.reader._control_position == last


async def test_the_thread_asks_for_more_before_it_hands_over(
    fake_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Streams(fake_server) as streams:
        subscription = streams.open("a")
        streams.append("a", 0, 5)
        reader, done = streams.reader, list[str]()
        read, hand_over = reader._xread.read, reader.loop.call_soon_threadsafe

        def asking(positions: dict[bytes, bytes], block_ms: int | None, meanwhile: Any) -> object:
            entries = read(positions, block_ms, meanwhile)
            done.append("answered")
            return entries

        monkeypatch.setattr(reader._xread, "read", asking)
        monkeypatch.setattr(
            reader.loop, "call_soon_threadsafe", lambda *call: done.append("handed over") or hand_over(*call)
        )
        reader._read_once(0)
        reader._read_once(0)
        assert done == ["answered", "handed over", "answered"]
        await asyncio.sleep(0)
        assert ready(subscription) == [TokenEvent(0, 1, (5,))]


async def test_an_outage_does_not_keep_what_was_read(
    fake_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Streams(fake_server) as streams:
        subscription = streams.open("a")
        streams.append("a", 0, 5)
        streams.reader._read_once(0)
        with monkeypatch.context() as broken:
            broken.setattr(streams.reader._xread, "read", unreachable)
            assert not streams.reader._read_once(0)
        await asyncio.sleep(0)
        assert ready(subscription) == [TokenEvent(0, 1, (5,))]


async def test_what_was_read_before_an_error_is_handed_over(
    fake_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Streams(fake_server) as streams:
        first, second = streams.open("a"), streams.open("a")
        streams.append("a", 0, 5)
        streams.end("a", 1)
        read = streams.reader._xread.read

        def break_at_the_second_reader(positions: dict[bytes, bytes], *how: Any) -> object:
            if keys.control("r1").encode() not in positions:
                raise ConnectionError("refused")
            return read(positions, *how)

        with monkeypatch.context() as broken:
            broken.setattr(streams.reader._xread, "read", break_at_the_second_reader)
            assert not await streams.turn()
        assert len(ready(first)) == 2
        assert await streams.turn()
        assert len(ready(second)) == 2


def unreachable(*how: object) -> None:
    raise ConnectionError("refused")


async def test_a_broken_connection_is_replaced(real_server: RedisServer) -> None:
    with Streams(real_server) as streams:
        subscription = streams.open("a")
        await streams.turn()
        killer: Redis = streams.redis
        for client in killer.client_list():
            if client["cmd"] == "xread":
                killer.client_kill_filter(_id=client["id"])
        streams.append("a", 0, 5)
        assert not await streams.turn()
        assert await streams.turn()
        assert ready(subscription) == [TokenEvent(0, 1, (5,))]


async def test_next_gives_an_empty_list_when_nothing_comes_in_time(streams: Streams) -> None:
    subscription = streams.open("a")
    assert await subscription.next(0) == []
    subscription.close()


async def test_an_error_ends_a_wait_at_once_and_stays(streams: Streams) -> None:
    subscription = streams.open("a")
    waiting = asyncio.ensure_future(subscription.next(3600))
    await asyncio.sleep(0)
    subscription.fail(KeyError("first"))
    subscription.fail(ValueError("second"))
    with pytest.raises(KeyError):
        await waiting
    with pytest.raises(KeyError):
        await subscription.next(3600)
    await streams.turn()
    assert streams.reader.num_feeds == 0


async def test_the_thread_takes_up_new_streams_and_new_tokens_while_it_is_blocked(redis_server: RedisServer) -> None:
    """The one test of the running thread; it blocks for longer than the test may take."""
    with Streams(redis_server, block_ms=1900) as streams:
        streams.reader.start(asyncio.get_running_loop())
        async with asyncio.timeout(10):
            first = streams.open("a")
            streams.append("a", 0, 5)
            assert await first.next(60) == [TokenEvent(0, 1, (5,))]
            second = streams.open("b")
            streams.append("b", 0, 7)
            assert await second.next(60) == [TokenEvent(0, 1, (7,))]
            streams.append("a", 1, 6)
            assert await first.next(60) == [TokenEvent(1, 1, (6,))]
            third = streams.open("a")
            assert await third.next(60) == [TokenEvent(0, 1, (5,)), TokenEvent(1, 1, (6,))]
            for subscription in (first, second, third):
                subscription.close()

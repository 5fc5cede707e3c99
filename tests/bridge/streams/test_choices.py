"""Several streams waited for as one."""

from __future__ import annotations

import asyncio

import pytest

from bridge.streams.choices import ChoiceStreams, open_streams
from bridge.streams.relay import ClientGone
from bridge.streams.subscription import Waiting
from tasks.protocol.contract import TokenEvent
from tests.bridge.reading import Streams
from tests.conftest import RedisServer


def opened(streams: Streams, names: str) -> ChoiceStreams:
    for name in names:
        streams.open(name).close()
    return open_streams(streams.reader, names, Waiting(asyncio.get_running_loop()))


async def test_one_wait_is_ended_by_any_of_them(streams: Streams) -> None:
    choices = opened(streams, "abc")
    for name, number in (("b", 1), ("c", 2), ("a", 0)):
        waiting = asyncio.ensure_future(choices.next(3600))
        await asyncio.sleep(0)
        streams.append(name, 0, 5)
        await streams.turn()
        assert await waiting == [(number, [TokenEvent(0, 1, (5,))])]


async def test_what_came_of_several_is_given_together(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        choices = opened(streams, "abc")
        streams.append("c", 0, 7)
        streams.append("a", 0, 5)
        await streams.turn()
        assert await choices.next(3600) == [(0, [TokenEvent(0, 1, (5,))]), (2, [TokenEvent(0, 1, (7,))])]


async def test_silence_is_an_empty_list(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        assert await opened(streams, "ab").next(0) == []


async def test_failing_one_or_all_ends_the_wait(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        choices = opened(streams, "ab")
        waiting = asyncio.ensure_future(choices.next(3600))
        await asyncio.sleep(0)
        choices.subscriptions[1].fail(KeyError())
        with pytest.raises(KeyError):
            await waiting
        choices = opened(streams, "ab")
        choices.fail(ClientGone())
        with pytest.raises(ClientGone):
            await choices.next(3600)


async def test_together_they_hold_no_more_than_one_would(fake_server: RedisServer) -> None:
    with Streams(fake_server, window=4) as streams:
        choices = opened(streams, "abcd")
        for name in "abcd":
            streams.append(name, 0, 1)
            streams.append(name, 1, 2)
        await streams.turn()
        assert all(one.is_lagging for one in choices.subscriptions)
        seen: list[tuple[int, int]] = []
        while len(seen) < 8:
            for number, events in await choices.next(0):
                seen += [(number, token) for event in events for token in event.token_ids]  # type: ignore[union-attr]
            await streams.turn()
        assert sorted(seen) == [(number, token) for number in range(4) for token in (1, 2)]


async def test_closing_ends_the_reading_of_all(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        choices = opened(streams, "ab")
        await streams.turn()
        assert streams.reader.num_feeds == 2
        choices.close()
        await streams.turn()
        assert streams.reader.num_feeds == 0

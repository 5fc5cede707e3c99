"""Whole answers: complete at the terminal entry, cut at a stop string."""

from __future__ import annotations

import asyncio

import pytest

from app.text_edge import scripted_text_edge
from bridge.collect import Answer, collect
from bridge.relay import ClientGone
from tasks.contract import TerminalEvent
from tests.bridge.streams import Streams, run
from tests.conftest import RedisServer


def test_the_answer_is_the_text_of_all_tokens(fake_server: RedisServer) -> None:
    async def test(streams: Streams) -> None:
        subscription = streams.open("a")
        answer = asyncio.ensure_future(collect(subscription, scripted_text_edge().detokenizer(), _never))
        await asyncio.sleep(0)
        streams.append("a", 0, 5)
        await streams.turn()
        streams.append("a", 1, 6)
        streams.end("a", 2)
        await streams.turn()
        assert await answer == Answer("<5><6>", 2, False, TerminalEvent(2, 1, "finished", "stop"))
        await streams.turn()
        assert streams.reader.num_feeds == 0

    run(fake_server, test)


def test_a_stop_string_cuts_the_answer_and_closes_the_request_once(fake_server: RedisServer) -> None:
    closed: list[tuple[str, str]] = []

    async def test(streams: Streams) -> None:
        subscription = streams.open("a")
        detokenizer = scripted_text_edge().detokenizer(["6>"])
        close = lambda state, reason: closed.append((state, reason))  # noqa: E731
        answer = asyncio.ensure_future(collect(subscription, detokenizer, close))
        await asyncio.sleep(0)
        streams.append("a", 0, 5, 6, 7)
        await streams.turn()
        assert closed == [("finished", "stop")]
        streams.append("a", 3, 6)
        streams.end("a", 4)
        await streams.turn()
        assert await answer == Answer("<5><", 2, True, TerminalEvent(4, 1, "finished", "stop"))
        assert closed == [("finished", "stop")]

    run(fake_server, test)


def test_a_stop_string_together_with_the_end_needs_no_closing(fake_server: RedisServer) -> None:
    async def test(streams: Streams) -> None:
        subscription = streams.open("a")
        streams.append("a", 0, 5, 6, 7)
        streams.end("a", 3)
        await streams.turn()
        answer = await collect(subscription, scripted_text_edge().detokenizer(["6>"]), _never)
        assert (answer.text, answer.num_tokens, answer.stopped) == ("<5><", 2, True)

    run(fake_server, test)


def test_what_the_subscription_is_failed_with_is_raised(fake_server: RedisServer) -> None:
    async def test(streams: Streams) -> None:
        subscription = streams.open("a")
        subscription.fail(ClientGone())
        with pytest.raises(ClientGone):
            await collect(subscription, scripted_text_edge().detokenizer(), _never)

    run(fake_server, test)


def _never(state: str, reason: str) -> None:
    raise AssertionError("closed")

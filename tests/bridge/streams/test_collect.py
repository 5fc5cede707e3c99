"""Answers that are not streamed: what ends them, and what is done about their generations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bridge.streams.choices import open_streams
from bridge.streams.collect import EndedEarly, collect
from bridge.streams.relay import ClientGone
from bridge.streams.subscription import Waiting
from tasks.protocol.contract import EndState, TerminalEvent, TokenEvent
from tests.bridge.reading import Streams
from tests.conftest import RedisServer


class Tokens:
    """A sink; token 6 completes a stop string."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.ended: TerminalEvent | None = None

    @property
    def is_satisfied(self) -> bool:
        return 6 in self.token_ids

    def push(self, events: Sequence[TokenEvent]) -> None:
        self.token_ids += [token_id for event in events for token_id in event.token_ids]

    def end(self, end: TerminalEvent) -> None:
        assert self.ended is None
        self.ended = end


class Answer:
    """The choices "a", "b", ... of one answer, and what was done about them."""

    def __init__(self, streams: Streams, num_choices: int = 1) -> None:
        self.done: list[tuple[object, ...]] = []
        self.sinks = [Tokens() for _ in range(num_choices)]
        names = "abcd"[:num_choices]
        for name in names:
            streams.open(name).close()
        self.streams = open_streams(streams.reader, names, Waiting(asyncio.get_running_loop()))
        self.task = asyncio.ensure_future(collect(self.streams, self.sinks, self))

    def close(self, choice: int, state: EndState, reason: str) -> None:
        self.done.append(("close", choice, state, reason))

    def leave(self, choices: Sequence[int]) -> None:
        self.done.append(("leave", *choices))


async def test_a_whole_answer_has_all_tokens(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        answer = Answer(streams)
        streams.append("a", 0, 5)
        await streams.turn()
        streams.append("a", 1, 7)
        streams.end("a", 2)
        await streams.turn()
        await answer.task
        assert answer.sinks[0].token_ids == [5, 7]
        assert answer.sinks[0].ended == TerminalEvent(2, 1, "finished", "stop")
        assert answer.done == []
        await streams.turn()
        assert streams.reader.num_feeds == 0


async def test_a_stop_string_closes_its_choice_once_and_takes_no_more_tokens(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        answer = Answer(streams, 2)
        streams.append("a", 0, 5, 6, 7)
        streams.append("b", 0, 5)
        await streams.turn()
        assert answer.done == [("close", 0, "finished", "stop")]
        streams.append("a", 3, 6)
        streams.end("a", 4)
        streams.append("b", 1, 8)
        streams.end("b", 2)
        await streams.turn()
        await answer.task
        assert [sink.token_ids for sink in answer.sinks] == [[5, 6, 7], [5, 8]]
        assert answer.done == [("close", 0, "finished", "stop")]


async def test_a_stop_string_together_with_the_end_needs_no_closing(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        answer = Answer(streams)
        streams.append("a", 0, 5, 6)
        streams.end("a", 2)
        await streams.turn()
        await answer.task
        assert answer.done == []


async def test_a_choice_that_fails_ends_the_answer_and_the_other_choices(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        answer = Answer(streams, 3)
        streams.append("a", 0, 5)
        streams.end("a", 1)
        streams.end("b", 0, "failed")
        await streams.turn()
        with pytest.raises(EndedEarly) as caught:
            await answer.task
        assert caught.value.end.state == "failed"
        assert answer.done == [("close", 2, "cancelled", "other_choice_failed")]


async def test_what_the_streams_are_failed_with_is_raised_and_what_is_not_over_is_left(
    fake_server: RedisServer,
) -> None:
    with Streams(fake_server) as streams:
        answer = Answer(streams, 3)
        streams.append("a", 0, 5)
        streams.end("a", 1)
        streams.append("b", 0, 6)
        await streams.turn()
        answer.streams.fail(ClientGone())
        with pytest.raises(ClientGone):
            await answer.task
        assert answer.done == [("close", 1, "finished", "stop"), ("leave", 2)]


async def test_a_cancelled_task_leaves(fake_server: RedisServer) -> None:
    with Streams(fake_server) as streams:
        answer = Answer(streams)
        await streams.turn()
        answer.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer.task
        assert answer.done == [("leave", 0)]

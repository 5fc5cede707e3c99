"""One answer as a client sees it: opening, text, ending or one error; and the clean-up, whatever happened."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from bridge.streams.choices import ChoiceStreams
from bridge.streams.relay import ClientGone, Relay
from bridge.streams.sse import KEEP_ALIVE
from bridge.streams.subscription import Subscription, Waiting
from tasks.protocol.contract import EndState, StreamEvent, TerminalEvent, TokenEvent

END = TerminalEvent(2, 1, "finished", "stop")


class Nobody:
    """A reader that reads nothing: the test hands the events over."""

    window = 100

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def add(self, subscription: Subscription, position: bytes, before: object) -> object:
        return "feed"

    def remove(self, feed: object) -> None:
        pass


class Letters:
    """Token 65 is "A"; "Z" completes a stop string; "Y" cannot be rendered; "." gives nothing yet."""

    def __init__(self) -> None:
        self.satisfied: set[int] = set()

    def opening(self) -> bytes:
        return b"["

    def is_satisfied(self, choice: int) -> bool:
        return choice in self.satisfied

    def tokens(self, choice: int, events: list[TokenEvent]) -> bytes:
        text = "".join(chr(token) for event in events for token in event.token_ids)
        if "Y" in text:
            raise ZeroDivisionError
        text, stop, _ = text.partition("Z")
        if stop:
            self.satisfied.add(choice)
        return text.replace(".", "").encode()

    def ended(self, choice: int, end: TerminalEvent) -> bytes:
        return end.state.encode()

    def failed(self, choice: int, end: TerminalEvent) -> bytes:
        return b"?" + end.reason.encode()

    def closing(self) -> bytes:
        return b"]"

    def failure(self, error: Exception) -> bytes:
        return f"!{type(error).__name__}".encode()


class Socket:
    """An outlet."""

    def __init__(self) -> None:
        self.is_ready = True
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


class Answer:
    """An answer of some choices, and what the relay did to its generations."""

    def __init__(self, outlet: Socket | None = None, num_choices: int = 1) -> None:
        self.closed: list[tuple[object, ...]] = []
        """(state, reason) of the first choice, with the number of the choice before it for others; ("left", ...)."""
        waiting = Waiting(asyncio.get_running_loop())
        reader: Any = Nobody()
        subscriptions = [Subscription(reader, f"a{number}", -1, waiting) for number in range(num_choices)]
        self.streams = ChoiceStreams(subscriptions, waiting)
        self.relay = Relay(self.streams, Letters(), self, keep_alive_s=3600, outlet=outlet)

    def close(self, choice: int, state: EndState, reason: str) -> None:
        self.closed.append((choice, state, reason) if choice else (state, reason))

    def leave(self, choices: Sequence[int]) -> None:
        self.closed.append(("left", *choices))

    def come(self, *events: StreamEvent, choice: int = 0) -> None:
        subscription = self.streams.subscriptions[choice]
        subscription.accept(subscription._feed, list(events), b"1-1")

    def say(self, index: int, text: str) -> TokenEvent:
        return TokenEvent(index, 1, tuple(text.encode()))

    async def rest(self) -> bytes:
        return b"".join([part async for part in self.relay])


@pytest.fixture
async def answer() -> Answer:
    return Answer()


async def test_an_answer_is_opening_text_and_ending(answer: Answer) -> None:
    assert await anext(answer.relay) == b"["
    answer.come(answer.say(0, "A"))
    assert await anext(answer.relay) == b"A"
    answer.come(answer.say(1, "B"), END)
    assert await answer.rest() == b"Bfinished]"
    assert answer.closed == []


async def test_a_batch_without_text_sends_nothing(answer: Answer) -> None:
    assert await anext(answer.relay) == b"["
    answer.come(answer.say(0, "."))
    following = asyncio.ensure_future(anext(answer.relay))
    await asyncio.sleep(0)
    assert not following.done()
    answer.come(answer.say(1, "B"))
    assert await following == b"B"


async def test_silence_becomes_keep_alive_comments(answer: Answer) -> None:
    relay = Relay(answer.streams, Letters(), answer, keep_alive_s=0)
    assert [await anext(relay) for _ in range(3)] == [b"[", KEEP_ALIVE, KEEP_ALIVE]


@pytest.mark.parametrize("outlet", [None, Socket()])
async def test_tokens_without_text_for_long_become_keep_alive_comments_too(
    answer: Answer, outlet: Socket | None
) -> None:
    """A client behind a proxy must not be cut off while text is held back."""
    now_s = [0.0]
    relay = Relay(answer.streams, Letters(), answer, keep_alive_s=4, outlet=outlet, clock=lambda: now_s[0])
    heard = b""

    async def read() -> None:
        nonlocal heard
        async for part in relay:
            heard += part

    task = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    for index in range(12):
        now_s[0] += 1
        answer.come(answer.say(index, "A" if index == 5 else "."))
        for _ in range(3):
            await asyncio.sleep(0)
    answer.come(TerminalEvent(12, 1, "finished", "length"))
    await task
    written = outlet.written if outlet is not None else heard
    assert written.replace(b"[", b"").replace(b"finished]", b"") == KEEP_ALIVE + b"A" + KEEP_ALIVE


async def test_a_stop_string_closes_the_request_once_and_later_tokens_are_not_shown(answer: Answer) -> None:
    assert await anext(answer.relay) == b"["
    answer.come(answer.say(0, "AZB"))
    assert await anext(answer.relay) == b"A"
    assert answer.closed == [("finished", "stop")]
    answer.come(answer.say(3, "CZ"))
    answer.come(TerminalEvent(5, 1, "finished", "stop"))
    assert await answer.rest() == b"finished]"
    answer.relay.finish()
    assert answer.closed == [("finished", "stop")]


async def test_a_stop_string_together_with_the_end_needs_no_closing(answer: Answer) -> None:
    answer.come(answer.say(0, "AZ"), TerminalEvent(2, 1, "finished", "length"))
    assert await answer.rest() == b"[Afinished]"
    assert answer.closed == []


async def test_a_client_that_leaves_after_its_stop_string_does_not_make_it_a_cancellation(answer: Answer) -> None:
    assert await anext(answer.relay) == b"["
    answer.come(answer.say(0, "AZ"))
    assert await anext(answer.relay) == b"A"
    answer.relay.finish()
    assert answer.closed == [("finished", "stop")]


async def test_an_answer_that_cannot_be_rendered_ends_with_an_error_and_is_left(answer: Answer) -> None:
    assert await anext(answer.relay) == b"["
    answer.come(answer.say(0, "Y"))
    assert await answer.rest() == b"!ZeroDivisionError"
    assert answer.closed == [("left", 0)]


async def test_a_client_that_left_gets_nothing_and_the_request_is_left_once(answer: Answer) -> None:
    assert await anext(answer.relay) == b"["
    answer.streams.fail(ClientGone())
    assert await answer.rest() == b""
    answer.relay.finish()
    assert answer.closed == [("left", 0)]


async def test_an_answer_that_nobody_iterates_to_its_end_is_left(answer: Answer) -> None:
    assert await anext(answer.relay) == b"["
    await answer.relay.close()
    assert answer.closed == [("left", 0)]
    assert await answer.rest() == b""


async def test_a_cancelled_task_leaves_the_request(answer: Answer) -> None:
    task = asyncio.ensure_future(answer.rest())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answer.closed == [("left", 0)]


async def test_a_finished_answer_is_not_left_by_the_clean_up(answer: Answer) -> None:
    answer.come(END.__class__(0, 1, "finished", "stop"))
    assert await answer.rest() == b"[finished]"
    answer.relay.finish()
    assert answer.closed == []


async def test_tokens_go_straight_to_the_outlet_while_the_task_waits() -> None:
    socket = Socket()
    answer = Answer(socket)
    rest = asyncio.ensure_future(answer.rest())
    await asyncio.sleep(0)
    answer.come(answer.say(0, "A"))
    assert socket.written == b"A"
    answer.come(answer.say(1, "B"))
    assert socket.written == b"AB"
    answer.come(END)
    assert await rest == b"[finished]"


async def test_a_client_that_does_not_keep_up_is_served_by_the_task() -> None:
    socket = Socket()
    answer = Answer(socket)
    rest = asyncio.ensure_future(answer.rest())
    await asyncio.sleep(0)
    answer.come(answer.say(0, "A"))
    socket.is_ready = False
    answer.come(answer.say(1, "B"))
    answer.come(answer.say(2, "C"))
    await asyncio.sleep(0)
    socket.is_ready = True
    answer.come(answer.say(3, "D"), TerminalEvent(4, 1, "finished", "stop"))
    assert socket.written == b"A"
    assert await rest == b"[BCDfinished]"


async def test_tokens_do_not_overtake_what_the_task_has_not_sent() -> None:
    socket = Socket()
    answer = Answer(socket)
    answer.come(answer.say(0, "A"))
    answer.come(answer.say(1, "B"))
    assert socket.written == b""
    assert await anext(answer.relay) == b"["
    answer.come(answer.say(2, "C"))
    assert socket.written == b""
    assert await anext(answer.relay) == b"ABC"


async def test_a_stop_string_on_the_way_to_the_outlet_closes_the_request() -> None:
    socket = Socket()
    answer = Answer(socket)
    rest = asyncio.ensure_future(answer.rest())
    await asyncio.sleep(0)
    answer.come(answer.say(0, "AZ"))
    assert (socket.written, answer.closed) == (b"A", [("finished", "stop")])
    answer.come(answer.say(2, "B"))
    answer.come(TerminalEvent(3, 1, "finished", "stop"))
    assert await rest == b"[finished]"
    assert (socket.written, answer.closed) == (b"A", [("finished", "stop")])


async def test_a_failure_on_the_way_to_the_outlet_is_told_by_the_task() -> None:
    socket = Socket()
    answer = Answer(socket)
    rest = asyncio.ensure_future(answer.rest())
    await asyncio.sleep(0)
    answer.come(answer.say(0, "Y"))
    assert await rest == b"[!ZeroDivisionError"
    assert answer.closed == [("left", 0)]


async def test_choices_are_shown_as_they_come_and_the_answer_closes_after_the_last() -> None:
    answer = Answer(num_choices=2)
    assert await anext(answer.relay) == b"["
    answer.come(answer.say(0, "A"), choice=1)
    assert await anext(answer.relay) == b"A"
    answer.come(TerminalEvent(1, 1, "finished", "length"), choice=1)
    answer.come(answer.say(0, "BC"))
    assert await anext(answer.relay) == b"BCfinished"
    answer.come(END)
    assert await answer.rest() == b"finished]"
    assert answer.closed == []


async def test_a_stop_string_closes_its_choice_only() -> None:
    answer = Answer(num_choices=3)
    assert await anext(answer.relay) == b"["
    answer.come(answer.say(0, "AZ"), choice=1)
    answer.come(answer.say(0, "B"))
    assert await anext(answer.relay) == b"BA"
    assert answer.closed == [(1, "finished", "stop")]


async def test_a_choice_that_fails_ends_the_answer_and_closes_the_others_that_are_not_over() -> None:
    answer = Answer(num_choices=4)
    assert await anext(answer.relay) == b"["
    answer.come(answer.say(0, "A"), TerminalEvent(1, 1, "finished", "stop"))
    answer.come(answer.say(0, "Z"), choice=3)
    answer.come(answer.say(0, "B"), TerminalEvent(1, 1, "failed", "poison"), choice=1)
    answer.come(answer.say(0, "C"), choice=2)
    assert await answer.rest() == b"AfinishedB?poison"
    assert answer.closed == [(2, "cancelled", "other_choice_failed"), (3, "cancelled", "other_choice_failed")]
    answer.relay.finish()
    assert len(answer.closed) == 2


async def test_stopping_one_choice_stops_the_others() -> None:
    answer = Answer(num_choices=2)
    answer.come(TerminalEvent(0, 1, "cancelled", "stopped"))
    assert await answer.rest() == b"[?stopped"
    assert answer.closed == [(1, "cancelled", "stopped")]


async def test_a_client_that_leaves_leaves_the_choices_that_are_not_over() -> None:
    answer = Answer(num_choices=4)
    assert await anext(answer.relay) == b"["
    answer.come(TerminalEvent(0, 1, "finished", "stop"))
    answer.come(answer.say(0, "Z"), choice=2)
    assert await anext(answer.relay) == b"finished"
    answer.streams.fail(ClientGone())
    assert await answer.rest() == b""
    assert answer.closed == [(2, "finished", "stop"), ("left", 1, 3)]


async def test_tokens_of_every_choice_go_straight_to_the_outlet() -> None:
    socket = Socket()
    answer = Answer(socket, num_choices=3)
    rest = asyncio.ensure_future(answer.rest())
    await asyncio.sleep(0)
    for number, letter in enumerate("ABC"):
        answer.come(answer.say(0, letter), choice=number)
    assert socket.written == b"ABC"
    for number in range(3):
        answer.come(TerminalEvent(1, 1, "finished", "length"), choice=number)
    assert await rest == b"[finishedfinishedfinished]"

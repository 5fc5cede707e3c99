"""The publisher, its thread turned by hand, over records that a test makes fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError, OutOfMemoryError, RedisError, ResponseError

from tasks.publish import MAX_UNPUBLISHED_STEPS, Publisher, Unpublishable
from tasks.record import Append, Appended, AppendResult, Refused, RequestRecords, Terminal
from tests.conftest import RedisServer
from tests.tasks.cell import Cell


class Records:
    """Takes appends; first raises what `errors` holds, and always what `bad` says for a request."""

    def __init__(self) -> None:
        self.batches: list[list[Append]] = []
        self.errors: list[RedisError] = []
        self.bad: set[str] = set()

    def append_many(self, appends: Sequence[Append]) -> list[AppendResult]:
        self.batches.append(list(appends))
        if self.errors:
            raise self.errors.pop(0)
        if any(item.request_id in self.bad for item in appends):
            raise ResponseError("ERR no")
        return [Appended(item.first_index + len(item.token_ids)) for item in appends]


class Room:
    def __init__(self, max_unpublished_steps: int = 2) -> None:
        self.records = Records()
        self.settled: list[tuple[str, Any]] = []
        self.pauses: list[float] = []
        self.publisher = Publisher(
            cast(RequestRecords, self.records),
            lambda item, result: self.settled.append((item.request_id, result)),
            max_unpublished_steps=max_unpublished_steps,
            pause=self.pauses.append,
        )


@pytest.fixture
def room() -> Room:
    return Room()


def tokens(request_id: str, first_index: int, *token_ids: int, end: Terminal | None = None) -> Append:
    return Append(request_id, 1, first_index, token_ids, 0, end)


def test_a_step_is_one_call_and_each_append_is_settled(room: Room) -> None:
    room.publisher.publish([tokens("a", 0, 1), tokens("b", 0, 2)])
    assert room.publisher.tick()
    assert len(room.records.batches) == 1
    assert room.settled == [("a", Appended(1)), ("b", Appended(1))]
    assert not room.publisher.tick()


def test_nothing_to_publish_is_no_call(room: Room) -> None:
    room.publisher.publish([])
    assert not room.publisher.tick()
    assert room.records.batches == []


def test_two_waiting_steps_of_one_sequence_become_one_append(room: Room) -> None:
    end = Terminal("finished", "stop")
    room.publisher.publish([tokens("a", 4, 1), tokens("b", 0, 9)])
    room.publisher.publish([tokens("a", 5, 2, 3, end=end)])
    room.publisher.tick()
    assert room.records.batches == [[tokens("a", 4, 1, 2, 3, end=end), tokens("b", 0, 9)]]
    assert [request_id for request_id, _ in room.settled] == ["a", "b"]


def test_while_redis_is_away_the_same_appends_are_sent_again(room: Room) -> None:
    room.records.errors = [ConnectionError("away"), OutOfMemoryError("full"), ConnectionError("away")]
    room.publisher.publish([tokens("a", 0, 1)])
    room.publisher.tick()
    assert room.records.batches == [[tokens("a", 0, 1)]] * 4
    assert room.settled == [("a", Appended(1))]
    assert room.pauses == [0.02, 0.04, 0.08]


def test_one_append_that_redis_refuses_does_not_stop_the_others(room: Room) -> None:
    room.records.bad = {"b"}
    room.publisher.publish([tokens("a", 0, 1), tokens("b", 0, 2), tokens("c", 0, 3)])
    room.publisher.tick()
    assert room.settled == [("a", Appended(1)), ("b", Unpublishable("ERR no")), ("c", Appended(1))]


def test_the_engine_is_held_up_while_the_step_before_is_unpublished() -> None:
    room = Room(max_unpublished_steps=MAX_UNPUBLISHED_STEPS)
    published = threading.Event()

    def engine() -> None:
        for step in range(2):
            room.publisher.publish([tokens("a", step, step)])
        published.set()

    thread = threading.Thread(target=engine)
    thread.start()
    assert not published.wait(0.05)
    room.publisher.tick()
    assert published.wait(10)
    thread.join()
    assert not room.publisher.wait_published(0)
    room.publisher.tick()
    assert room.publisher.wait_published(0)


def test_in_a_hurry_the_engine_is_never_held_up(room: Room) -> None:
    room.publisher.hurry()
    for step in range(5):
        room.publisher.publish([tokens("a", step, step)])
    room.publisher.tick()
    assert room.records.batches[0][0].token_ids == (0, 1, 2, 3, 4)


def test_stopping_ends_the_wait_for_redis() -> None:
    room = Room()
    room.records.errors = [ConnectionError("away")] * 1000
    publisher = Publisher(cast(RequestRecords, room.records), lambda item, result: None)
    publisher.start()
    publisher.publish([tokens("a", 0, 1)])
    publisher.stop(10)
    assert not publisher._thread.is_alive()
    assert publisher.wait_published(0)


def test_the_thread_publishes_by_itself() -> None:
    room = Room()
    room.publisher.start()
    room.publisher.publish([tokens("a", 0, 1)])
    assert room.publisher.wait_published(10)
    room.publisher.stop(10)
    assert room.settled == [("a", Appended(1))]


def test_refusals_of_the_record_are_passed_on(fake_server: RedisServer) -> None:
    cell = Cell(fake_server)
    settled: list[Any] = []
    publisher = Publisher(cell.records, lambda item, result: settled.append(result))
    publisher.publish([tokens("nobody", 0, 1)])
    publisher.tick()
    assert settled == [Refused("missing")]

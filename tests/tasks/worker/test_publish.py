"""The publisher, its thread turned by hand, over records that a test makes fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError, OutOfMemoryError, RedisError, ResponseError

from tasks.protocol import keys
from tasks.protocol.contract import unpack_step
from tasks.protocol.moves import LoggedStep, Published
from tasks.protocol.record import Append, Appended, AppendResult, Refused, RequestRecords, Terminal
from tasks.worker.publish import MAX_UNPUBLISHED_STEPS, Publisher, Unpublishable
from tests.conftest import RedisServer
from tests.tasks.cell import Cell


class Records:
    """Takes appends; first raises what `errors` holds, and always what `bad` says for a request."""

    def __init__(self) -> None:
        self.batches: list[list[Append]] = []
        self.errors: list[RedisError] = []
        self.bad: set[str] = set()
        self.steps: list[LoggedStep] = []
        self.rev = 1
        """Another one: what the worker holds was disturbed."""
        self.is_log_bad = False
        self.before_publish: Callable[[], object] = lambda: None

    def publish(self, appends: Sequence[Append], step: LoggedStep) -> Published:
        self.before_publish()
        self.steps.append(step)
        if self.is_log_bad and step.packed:
            self.batches.append(list(appends))
            raise ResponseError("ERR no log")
        return Published(str(self.rev), step.rev == str(self.rev), self.append_many(appends))

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
            worker="w1",
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
    publisher = Publisher(cast(RequestRecords, room.records), lambda item, result: None, worker="w1")
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
    publisher = Publisher(cell.records, lambda item, result: settled.append(result), worker="w1")
    publisher.publish([tokens("nobody", 0, 1)])
    publisher.tick()
    assert settled == [Refused("missing")]


# -- with a log


def tick(room: Room, *appends: Append) -> None:
    room.publisher.publish(appends)
    room.publisher.tick()


def begun(room: Room) -> Room:
    """Two assignments have published their first token, and the log has the second of both."""
    tick(room, tokens("a", 0, 10), tokens("b", 0, 20))
    tick(room, tokens("a", 1, 11), tokens("b", 1, 21))
    assert room.records.batches[-1] == []
    assert [*unpack_step(room.records.steps[-1].packed)] == [(1, 1, 11), (2, 1, 21)]
    room.records.batches.clear()
    room.records.steps.clear()
    room.settled.clear()
    return room


def test_what_is_only_logged_is_settled_too(room: Room) -> None:
    begun(room)
    tick(room, tokens("a", 2, 12), tokens("b", 2, 22, end=Terminal("finished", "stop")))
    assert room.records.batches == [[tokens("b", 1, 21, 22, end=Terminal("finished", "stop"))]]
    assert sorted(room.settled, key=lambda pair: pair[0]) == [("a", Appended(3)), ("b", Appended(3))]


def test_a_step_sent_again_is_the_same_step(room: Room) -> None:
    begun(room)
    room.records.errors = [ConnectionError("away"), ConnectionError("away")]
    tick(room, tokens("a", 2, 12))
    first, second, third = room.records.steps
    assert first == second == third
    tick(room, tokens("a", 3, 13))
    assert room.records.steps[-1].number == first.number + 1


def test_a_disturbance_is_settled_by_a_second_call_each_for_itself(room: Room) -> None:
    begun(room)
    room.records.rev = 2
    tick(room, tokens("a", 2, 12), tokens("b", 2, 22), tokens("c", 0, 30))
    assert room.records.batches == [[tokens("c", 0, 30)], [tokens("a", 1, 11, 12), tokens("b", 1, 21, 22)]]
    assert room.settled == [("c", Appended(1)), ("a", Appended(3)), ("b", Appended(3))]
    assert [step.rev for step in room.records.steps] == ["1", "2"]
    tick(room, tokens("a", 3, 13), tokens("b", 3, 23), tokens("c", 1, 31))
    assert room.records.batches[-1] == []


def test_the_second_call_is_sent_until_redis_takes_it(room: Room) -> None:
    begun(room)
    room.records.rev = 2

    def fail_second() -> None:
        room.records.errors = [ConnectionError("away")] if len(room.records.steps) in (1, 2) else []

    room.records.before_publish = fail_second
    tick(room, tokens("a", 2, 12))
    assert room.records.batches == [[], *[[tokens("a", 1, 11, 12)]] * 3]
    assert room.settled == [("a", Appended(3))]


def test_a_step_that_redis_refuses_is_sent_one_by_one_with_all_that_only_the_log_has(room: Room) -> None:
    begun(room)
    room.records.is_log_bad = True
    room.records.bad = {"b"}
    tick(room, tokens("a", 2, 12), tokens("b", 2, 22))
    assert room.records.batches[1:] == [[tokens("a", 1, 11, 12)], [tokens("b", 1, 21, 22)]]
    assert room.settled == [("a", Appended(3)), ("b", Unpublishable("ERR no"))]
    room.records.is_log_bad = False
    tick(room, tokens("a", 3, 13))
    assert room.records.batches[-1] == [tokens("a", 3, 13)]
    assert list(room.records.steps[-1].slots.values()) == [3]


def test_a_second_call_that_redis_refuses_is_sent_one_by_one(room: Room) -> None:
    begun(room)
    room.records.rev = 2
    room.records.bad = {"b"}
    tick(room, tokens("a", 2, 12), tokens("b", 2, 22))
    assert room.settled == [("a", Appended(3)), ("b", Unpublishable("ERR no"))]


def test_a_stop_between_the_two_calls_of_a_disturbance_settles_what_was_answered(room: Room) -> None:
    begun(room)
    room.records.rev = 2

    def stop_after_first() -> None:
        if len(room.records.steps) == 1:
            room.publisher.stop(0)
            room.records.errors = [ConnectionError("away")]

    room.records.before_publish = stop_after_first
    tick(room, tokens("a", 2, 12), tokens("c", 0, 30))
    assert room.settled == [("c", Appended(1))]
    assert len(room.records.batches) == 2
    assert room.publisher.wait_published(0)


def test_after_a_step_that_a_stop_gave_up_the_next_does_not_take_its_place(room: Room) -> None:
    begun(room)
    room.publisher.stop(0)
    room.records.errors = [ConnectionError("away")]
    tick(room, tokens("a", 2, 12))
    end = tokens("a", 3, 13, end=Terminal("finished", "stop"))
    tick(room, end)
    assert room.records.batches[-1] == [end]


def test_what_was_forgotten_has_no_place_in_the_log_any_more(room: Room) -> None:
    begun(room)
    room.publisher.forget("a", 1)
    tick(room, tokens("a", 2, 12), tokens("b", 2, 22))
    assert room.records.batches == [[tokens("a", 2, 12)]]


def test_a_publisher_over_redis_logs_and_flushes(fake_server: RedisServer) -> None:
    cell = Cell(fake_server)
    cell.submit()
    cell.claim()
    settled: list[Any] = []
    publisher = Publisher(cell.records, lambda item, result: settled.append(result), worker="w1")
    for index in range(20):
        publisher.publish([tokens("r1", index, index)])
        publisher.tick()
    assert settled == [Appended(index + 1) for index in range(20)]
    assert cell.tokens() == [*range(17)]
    assert cell.redis.xlen(keys.steps("w1")) == 19

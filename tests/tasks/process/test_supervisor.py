"""The supervisor, with children that end when a test says so and pauses that take no time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tasks.process.supervisor import EXIT_CANNOT_SERVE, FIRST_PAUSE_S, LONG_LIFE_S, MAX_PAUSE_S, Supervisor


class Child:
    def __init__(self, status: int, while_it_runs: Callable[[], object]) -> None:
        self.status = status
        self.while_it_runs = while_it_runs
        self.num_terminated = 0
        self.killed = threading.Event()

    def wait(self) -> int:
        self.while_it_runs()
        return self.status

    def terminate(self) -> None:
        self.num_terminated += 1

    def kill(self) -> None:
        self.killed.set()


class Room:
    def __init__(self, kill_after_s: float = 60.0) -> None:
        self.now_s = 0.0
        self.lives: list[tuple[int, Callable[[], object]]] = []
        self.children: list[Child] = []
        self.dead: list[str] = []
        self.pauses: list[float] = []
        self.on_spawn: Callable[[], object] = lambda: None
        ids = self.count()
        self.supervisor = Supervisor(
            self.spawn,
            new_id=lambda: next(ids),
            declare_dead=self.dead.append,
            monotonic=lambda: self.now_s,
            pause=self.pause,
            kill_after_s=kill_after_s,
        )

    @staticmethod
    def count() -> Iterator[str]:
        n = 0
        while True:
            yield f"w{(n := n + 1)}"

    def spawn(self, worker: str) -> Child:
        self.on_spawn()
        if not self.lives:
            self.supervisor.stop()
        status, life = self.lives.pop(0) if self.lives else (0, lambda: None)
        self.children.append(Child(status, life))
        return self.children[-1]

    def pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return False

    def crash(self, times: int, lived_s: float = 0.0) -> None:
        self.lives += [(-9, lambda: setattr(self, "now_s", self.now_s + lived_s))] * times


@pytest.fixture
def room() -> Room:
    return Room()


def test_a_child_that_crashed_is_declared_dead_and_followed_by_another(room: Room) -> None:
    room.crash(2)
    assert room.supervisor.run() == 0
    assert room.dead == ["w1", "w2"], "the third has left by itself"
    assert len(room.children) == 3


def test_the_pause_grows_with_every_crash_up_to_its_limit(room: Room) -> None:
    room.crash(9)
    room.supervisor.run()
    assert room.pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert room.pauses[-1] == MAX_PAUSE_S


def test_a_long_life_forgets_earlier_crashes(room: Room) -> None:
    room.crash(4)
    room.crash(1, lived_s=LONG_LIFE_S)
    room.supervisor.run()
    assert room.pauses[-1] == FIRST_PAUSE_S


def test_a_child_that_cannot_serve_is_not_started_again(room: Room) -> None:
    room.lives = [(EXIT_CANNOT_SERVE, lambda: None)]
    assert room.supervisor.run() == EXIT_CANNOT_SERVE
    assert len(room.children) == 1


def test_stopping_ends_the_child_once_however_often_it_is_asked(room: Room) -> None:
    def stop_twice() -> None:
        room.supervisor.stop()
        room.supervisor.stop()

    room.lives = [(0, stop_twice)]
    assert room.supervisor.run() == 0
    assert room.children[0].num_terminated == 1
    assert room.pauses == []


def test_a_child_that_does_not_end_is_killed() -> None:
    room = Room(kill_after_s=0.01)

    def hang() -> None:
        room.supervisor.stop()
        assert room.children[0].killed.wait(10)

    room.lives = [(-9, hang)]
    assert room.supervisor.run() == 0


def test_a_child_that_ended_is_not_killed(room: Room) -> None:
    room.lives = [(0, room.supervisor.stop)]
    room.supervisor.run()
    assert room.supervisor._killer is not None
    assert room.supervisor._killer.finished.is_set()


def test_a_stop_while_the_child_is_being_started_ends_it(room: Room) -> None:
    room.lives = [(0, lambda: None)]
    room.on_spawn = room.supervisor.stop
    assert room.supervisor.run() == 0
    assert room.children[0].num_terminated == 1


def test_a_stop_during_the_pause_starts_no_other(room: Room) -> None:
    room.crash(1)
    room.supervisor._pause = lambda seconds: True
    assert room.supervisor.run() == 0
    assert len(room.children) == 1


def test_every_death_that_nobody_asked_for_is_reported_and_no_other(room: Room) -> None:
    told: list[int] = []
    room.supervisor._report = told.append
    room.lives = [(-9, lambda: None), (1, lambda: None), (0, room.supervisor.stop)]
    room.supervisor.run()
    assert told == [-9, 1]

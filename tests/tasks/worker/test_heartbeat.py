"""The heartbeat, its thread turned by hand."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError

from tasks.protocol.contract import WorkerInfo, WorkerLoad
from tasks.worker.heartbeat import Heartbeat
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, Cell, info


class Room:
    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.stalled_s = 0.0
        self.fatal: list[str] = []
        self.heartbeat = Heartbeat(
            cell.records,
            info("w9"),
            load=lambda now_ms: WorkerLoad(num_running=3, last_step_ms=now_ms),
            stalled_s=lambda: self.stalled_s,
            clock_ms=lambda: 4711,
            on_fatal=self.fatal.append,
            heartbeat_ms=10,
            lease_ms=60_000,
            stall_limit_s=30,
        )

    def live(self) -> list[tuple[WorkerInfo, WorkerLoad]]:
        return self.cell.records.workers(MODEL)


@pytest.fixture
def room(redis_server: RedisServer) -> Room:
    return Room(Cell(redis_server))


def test_a_heartbeat_makes_the_worker_live_with_its_load(room: Room) -> None:
    assert room.heartbeat.tick()
    assert room.live() == [(info("w9"), WorkerLoad(num_running=3, last_step_ms=4711))]
    assert room.heartbeat.num_live_workers == 1


def test_a_hanging_engine_lets_the_lease_run_out(room: Room) -> None:
    room.stalled_s = 30.0
    assert room.heartbeat.tick()
    room.stalled_s = 30.1
    room.cell.records.expire_lease("w9", MODEL)
    assert not room.heartbeat.tick()
    assert room.live() == []
    assert room.fatal == ["the engine has been in one step for 30 s"]


def test_without_redis_it_keeps_trying_and_says_so_once(
    room: Room, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:

        def away(*args: object) -> int:
            raise ConnectionError("away")

        patch.setattr(room.cell.records, "heartbeat", away)
        assert not room.heartbeat.tick()
        assert not room.heartbeat.tick()
    with caplog.at_level("INFO"):
        assert room.heartbeat.tick()
    said = [record.message for record in caplog.records if record.name == "tasks.worker.heartbeat"]
    assert said == ["Redis is not reachable, trying on: away", "Redis is back after 2 missed heartbeats"]


def test_stopping_ends_the_thread_and_leaves(room: Room) -> None:
    room.heartbeat.tick()
    room.heartbeat.start()
    room.heartbeat.stop(10)
    assert room.live() == []
    assert room.cell.records.expired_workers(10**15) == [(MODEL, "w1")]


def test_a_worker_that_leaves_with_requests_in_its_hands_is_left_to_the_watchdog(room: Room) -> None:
    room.heartbeat.tick()
    room.cell.submit()
    room.cell.claim(worker="w9")
    room.heartbeat.stop(0)
    assert room.live() == []
    assert (MODEL, "w9") in room.cell.records.expired_workers()

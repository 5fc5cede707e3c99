"""The bridge process: who is active, what it does about failures, and how it ends."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from bridge.catalog.catalog import Catalog, CatalogBusy, CatalogError, CatalogTooNew, open_snapshot
from bridge.catalog.recorder import Recorder
from bridge.duties import (
    AGAIN_S,
    HELD_UP_MS,
    PATIENCE_MS,
    RECORD_EVERY_S,
    SAY_AGAIN_MS,
    STANDBY_S,
    USELESS_AGAIN_S,
    Loop,
    RecordDuty,
    WatchDuty,
)
from bridge.main import start_bridge
from bridge.watch.election import LEASE_MS, RENEW_MS, Election
from bridge.watch.watchdog import SLOW_MS, Watchdog
from tasks.process.clients import connect
from tasks.protocol import keys
from tests.bridge.cell import MODEL, Cell
from tokenferry.cell.valkey import Valkey


class Clock:
    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms


class Away:
    """A Redis that can be reached only while `is_there`."""

    def __init__(self, redis: Redis) -> None:
        self._redis, self.is_there = redis, False

    def __getattr__(self, name: str) -> Any:
        if not self.is_there:
            raise ConnectionError("refused")
        return getattr(self._redis, name)


# -- election


def test_the_first_is_active_and_the_second_stands_by(cell: Cell) -> None:
    clock = Clock()
    one, two = (Election(cell.redis, name, monotonic_ms=clock) for name in ("one", "two"))
    one.tick()
    two.tick()
    assert (one.is_active, two.is_active) == (True, False)


def test_a_standby_takes_over_within_a_second_of_a_death(cell: Cell) -> None:
    assert LEASE_MS + RENEW_MS <= 1000
    clock = Clock()
    one, two = (Election(cell.redis, name, monotonic_ms=clock) for name in ("one", "two"))
    one.tick()
    two.tick()
    assert cell.redis.pttl(keys.BRIDGE) <= LEASE_MS
    cell.redis.delete(keys.BRIDGE)  # it has expired
    clock.ms += RENEW_MS
    two.tick()
    assert two.is_active


def test_the_lease_is_renewed_and_asked_for_no_more_often_than_needed(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    election = Election(cell.redis, "one", monotonic_ms=clock)
    asked: list[float] = []
    ask = cell.redis.eval

    def counted(*args: Any) -> Any:
        asked.append(clock.ms)
        return ask(*args)

    monkeypatch.setattr(cell.redis, "eval", counted)
    for clock.ms in range(0, 1000, 50):
        election.tick()
        assert election.is_active
    assert asked == [0, 200, 400, 600, 800]


def test_a_lease_that_cannot_be_renewed_is_believed_in_no_longer_than_it_lasts(cell: Cell) -> None:
    clock = Clock()
    redis = Away(cell.redis)
    redis.is_there = True
    election = Election(redis, "one", monotonic_ms=clock)  # type: ignore[arg-type]
    election.tick()
    redis.is_there = False
    clock.ms = LEASE_MS - 1
    with pytest.raises(ConnectionError):
        election.tick()
    assert election.is_active
    clock.ms = LEASE_MS
    assert not election.is_active


def test_one_that_was_stopped_for_a_while_finds_itself_replaced(cell: Cell) -> None:
    clock = Clock()
    one, two = (Election(cell.redis, name, monotonic_ms=clock) for name in ("one", "two"))
    one.tick()
    cell.redis.delete(keys.BRIDGE)
    two.tick()
    clock.ms += RENEW_MS
    one.tick()
    assert not one.is_active


def test_leaving_lets_a_standby_in_at_once_and_never_takes_the_lease_of_another(cell: Cell) -> None:
    clock = Clock()
    one, two = (Election(cell.redis, name, monotonic_ms=clock) for name in ("one", "two"))
    one.tick()
    one.leave()
    assert not one.is_active
    two.tick()
    assert two.is_active
    one.leave()
    assert cell.redis.get(keys.BRIDGE) == b"two"


# -- the duties, turned by hand


def test_the_watch_goes_on_when_redis_comes_back_and_says_what_happened(
    cell: Cell, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock, redis = Clock(), Away(cell.redis)
    election = Election(redis, "one", monotonic_ms=clock)  # type: ignore[arg-type]
    duty = WatchDuty(election, cell.watchdog, clock)
    for clock.ms in range(0, SAY_AGAIN_MS + 1, 500):
        duty.tick()
    assert caplog.text.count("bridge: Redis fails, trying again: refused") == 2
    redis.is_there = True
    clock.ms += 500
    duty.tick()
    assert "bridge: Redis works again after 10.5 s" in caplog.text
    assert "bridge: active" in caplog.text


def test_after_an_outage_leases_get_time_to_be_renewed_before_anybody_is_taken_for_dead(cell: Cell) -> None:
    clock, redis = Clock(), Away(cell.redis)
    cell.join("w1", 1)
    duty = WatchDuty(Election(redis, "one", monotonic_ms=clock), cell.watchdog, clock)  # type: ignore[arg-type]
    duty.tick()
    redis.is_there = True
    for clock.ms in (300, PATIENCE_MS - 1):
        duty.tick()
        assert cell.records.expired_workers() == [(MODEL, "w1")]
    for clock.ms in (PATIENCE_MS + 400, PATIENCE_MS + 500):  # the first look learns of the model
        duty.tick()
    assert cell.records.expired_workers() == []


def test_a_redis_that_is_always_slow_does_not_stop_the_watch(cell: Cell) -> None:
    clock = Clock()

    def slow_clock() -> float:
        clock.ms += SLOW_MS + 1
        return clock.ms

    cell.join("w1", 1)
    watchdog = Watchdog(cell.redis, cell.records, cell.submitter, is_queue_empty=bool, monotonic_ms=slow_clock)
    duty = WatchDuty(Election(cell.redis, "one", monotonic_ms=lambda: 0.0), watchdog, clock)
    watchdog.deadlines()  # learns of the model
    duty.tick()
    assert cell.records.expired_workers() == [(MODEL, "w1")]
    clock.ms += PATIENCE_MS
    duty.tick()
    assert cell.records.expired_workers() == []


def test_a_watchdog_that_was_held_up_gives_leases_time_to_be_renewed_before_its_next_look(cell: Cell) -> None:
    clock = Clock()
    duty = WatchDuty(Election(cell.redis, "one", monotonic_ms=lambda: 0.0), cell.watchdog, clock)
    duty.tick()
    cell.join("w1", 1)
    cell.watchdog.deadlines()  # learns of the model
    for wait_ms in (HELD_UP_MS + 1, PATIENCE_MS - 1):
        clock.ms += wait_ms
        duty.tick()
        assert cell.records.expired_workers() == [(MODEL, "w1")]
    clock.ms += 1
    duty.tick()
    assert cell.records.expired_workers() == []


def test_a_watchdog_that_is_always_held_up_watches_all_the_same(cell: Cell) -> None:
    clock = Clock()
    duty = WatchDuty(Election(cell.redis, "one", monotonic_ms=lambda: 0.0), cell.watchdog, clock)
    duty.tick()
    for _ in range(2):
        cell.join("w1", 1)
        cell.watchdog.deadlines()
        for _ in range(2):
            clock.ms += PATIENCE_MS
            duty.tick()
        assert cell.records.expired_workers() == []


def test_only_the_active_one_watches(cell: Cell) -> None:
    clock = Clock()
    cell.redis.set(keys.BRIDGE, "another")
    cell.redis.zadd(keys.DUE, {"ghost": 1})
    duty = WatchDuty(Election(cell.redis, "one", monotonic_ms=clock), cell.watchdog, clock)
    duty.tick()
    assert cell.redis.zcard(keys.DUE) == 1
    cell.redis.delete(keys.BRIDGE)
    clock.ms += RENEW_MS
    duty.tick()
    assert cell.redis.zcard(keys.DUE) == 0


class Recording:
    """A RecordDuty over a catalog that opens only if `refusal` is none, in a cell that may be active or not."""

    def __init__(self, redis: Any, folder: Path) -> None:
        self.clock = Clock()
        self.is_active = True
        self.refusal: CatalogError | None = None
        self.opened: list[Catalog] = []
        self.folder = folder
        self.duty = RecordDuty(
            lambda: self.is_active,
            self._open,
            lambda catalog: Recorder(redis, catalog, max_rows=2, clock_ms=lambda: 0),
            self.clock,
        )

    def _open(self) -> Catalog:
        if self.refusal is not None:
            raise self.refusal
        self.opened.append(Catalog(self.folder))
        return self.opened[-1]


@pytest.fixture
def recording(cell: Cell, tmp_path: Path) -> Iterator[Recording]:
    recording = Recording(cell.redis, tmp_path)
    yield recording
    recording.duty.close()


def test_a_full_batch_is_followed_by_the_next_at_once(cell: Cell, recording: Recording) -> None:
    for request_id in "abc":
        cell.fact("submitted", request_id, 1)
    assert [recording.duty.tick() for _ in range(3)] == [0.0, 0.0, RECORD_EVERY_S]  # the first marks the stream
    assert recording.opened[0].position.num_recorded == 3


def test_a_standby_keeps_the_catalog_closed_and_lets_go_of_it_when_replaced(recording: Recording) -> None:
    recording.is_active = False
    assert recording.duty.tick() == STANDBY_S
    assert recording.opened == []
    recording.is_active = True
    recording.duty.tick()
    recording.is_active = False
    recording.duty.tick()
    Catalog(recording.folder).close()  # whoever is active now can open it
    with pytest.raises(CatalogError):
        recording.opened[0].query("SELECT 1")


def test_a_catalog_that_is_busy_is_tried_again_and_said_so(
    recording: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    recording.refusal = CatalogBusy("open in another process: PID 7")
    assert [recording.duty.tick() for _ in range(3)] == [AGAIN_S] * 3
    assert caplog.text.count("PID 7") == 1
    recording.refusal = None
    recording.duty.tick()
    assert "bridge: recording works again" in caplog.text


def test_a_catalog_that_is_too_new_is_an_error_with_the_remedy(
    recording: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    recording.refusal = CatalogTooNew("schema 9: upgrade tokenferry")
    assert recording.duty.tick() == USELESS_AGAIN_S
    assert "nothing is recorded: schema 9: upgrade tokenferry" in caplog.text


def test_a_catalog_that_fails_is_opened_anew(
    cell: Cell, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording.duty.tick()
    cell.fact("submitted", "r1", 1)

    def invalid(*_: object) -> None:
        raise CatalogError("database has been invalidated")

    monkeypatch.setattr(recording.opened[0], "record", invalid)
    assert recording.duty.tick() == AGAIN_S
    recording.duty.tick()
    assert len(recording.opened) == 2
    assert recording.opened[1].position.num_recorded == 1


def test_redis_being_away_leaves_the_catalog_open(cell: Cell, tmp_path: Path) -> None:
    redis = Away(cell.redis)
    recording = Recording(redis, tmp_path)
    assert [recording.duty.tick() for _ in range(2)] == [AGAIN_S] * 2
    redis.is_there = True
    recording.duty.tick()
    assert len(recording.opened) == 1
    recording.duty.close()


def test_at_the_end_what_is_there_is_recorded_and_the_catalog_closed(cell: Cell, recording: Recording) -> None:
    recording.duty.tick()
    for request_id in "abc":
        cell.fact("submitted", request_id, 1)
    recording.duty.close()
    with open_snapshot(recording.folder) as reader:
        assert reader.execute("SELECT count(*) FROM requests").fetchall() == [(3,)]
    Catalog(recording.folder).close()


def test_an_end_without_redis_still_closes_the_catalog(cell: Cell, tmp_path: Path) -> None:
    redis = Away(cell.redis)
    redis.is_there = True
    recording = Recording(redis, tmp_path)
    recording.duty.tick()
    redis.is_there = False
    recording.duty.close()
    Catalog(tmp_path).close()


def test_a_loop_goes_on_after_a_failure_that_nobody_foresaw(caplog: pytest.LogCaptureFixture) -> None:
    ticked_again, closed = threading.Event(), threading.Event()

    class Duty:
        num_ticks = 0

        def tick(self) -> float:
            self.num_ticks += 1
            if self.num_ticks == 1:
                raise ZeroDivisionError
            ticked_again.set()
            return 60.0

        def close(self) -> None:
            closed.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.duties.AGAIN_S", 0.0)
        loop = Loop("test-loop", Duty())  # type: ignore[arg-type]
        assert ticked_again.wait(10)
        assert loop.stop(10)
    assert closed.is_set()
    assert "test-loop: unexpected failure, going on" in caplog.text


# -- the whole thing


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> float:
    """For other threads and processes only. Returns how long it took, in seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "waited in vain"
        time.sleep(0.005)
    return time.monotonic() - start


def test_a_bridge_in_this_process_records_and_reoffers_over_injected_clients(cell: Cell, tmp_path: Path) -> None:
    past_ms = time.time_ns() // 1_000_000 - 10_000
    cell.join("w1", past_ms)  # its lease is over by now
    cell.offer("r1", past_ms)
    cell.claim("r1", "w1", past_ms)
    bridge = start_bridge(cell.redis, cell.queue, cell.records, cell.submitter, data_dir=tmp_path)
    try:
        wait_until(lambda: cell.queued() == [keys.queue_again("m")])
    finally:
        bridge.stop()
    assert not cell.redis.exists(keys.BRIDGE)
    with open_snapshot(tmp_path / "catalog") as reader:
        assert reader.execute("SELECT request_id, state, num_attempts FROM requests").fetchall() == [
            ("r1", "offered", 2)
        ]


RUN = """
import dataclasses, os, sys, logging
from bridge.main import run
from tasks.process.settings import BridgeSettings

logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
run(BridgeSettings.from_env(os.environ))
print("ended", flush=True)
"""


class Process:
    def __init__(self, redis_url: str, data_dir: Path) -> None:
        environ = {**os.environ, "REDIS_URL": redis_url, "DATA_DIR": str(data_dir)}
        self._process = subprocess.Popen([sys.executable, "-c", RUN], env=environ, stdout=subprocess.PIPE, bufsize=0)
        self.said = ""

    def wait_for(self, text: str, timeout_s: float = 20.0) -> None:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while text not in self.said:
                assert selector.select(max(0.0, deadline - time.monotonic())), f"no {text!r} in {self.said!r}"
                chunk = os.read(self._process.stdout.fileno(), 65536)
                assert chunk, f"it ended without {text!r}: {self.said!r}"
                self.said += chunk.decode()

    def terminate(self) -> float:
        start = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        self.wait_for("ended")
        assert self._process.wait(10) == 0
        return time.monotonic() - start

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


def test_a_standby_process_takes_over_from_one_that_was_killed_and_ends_cleanly(
    valkey_url: str, tmp_path: Path
) -> None:
    redis = connect(valkey_url, use="short")
    redis.flushall()
    cell = Cell(redis, connect(valkey_url, use="queue"))
    one, two = Process(valkey_url, tmp_path), None
    try:
        one.wait_for("bridge: active")
        two = Process(valkey_url, tmp_path)
        cell.fact("submitted", "r1", 1, t=time.time_ns() // 1_000_000)
        two.wait_for("bridge: standby")
        one.kill()
        killed = time.monotonic()
        two.wait_for("bridge: active")
        took_over_s = time.monotonic() - killed
        cell.fact("submitted", "r2", 1, t=time.time_ns() // 1_000_000)
        ended_s = two.terminate()
    finally:
        one.close()
        if two is not None:
            two.close()
    assert took_over_s < 2.0  # 1.0 by design, the rest for a busy machine
    assert ended_s < 2.0
    catalog = Catalog(tmp_path / "catalog")
    assert catalog.query("SELECT request_id FROM requests ORDER BY 1") == [("r1",), ("r2",)]
    assert catalog.position.num_recorded == 2
    catalog.close()
    cell.queue.close()
    redis.close()


def test_a_process_that_starts_before_redis_waits_for_it_and_says_so(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tf") as folder:
        valkey = Valkey(Path(folder))
        process = Process(valkey.url, tmp_path)
        try:
            process.wait_for("bridge: Redis fails, trying again")
            with valkey:
                process.wait_for("bridge: active")
                assert process.terminate() < 2.0
        finally:
            process.close()


def test_a_process_ends_in_time_while_redis_is_away(tmp_path: Path) -> None:
    process = Process(f"unix://{tmp_path / 'nowhere.sock'}?db=0", tmp_path)
    try:
        process.wait_for("bridge: Redis fails, trying again")
        assert process.terminate() < 2.0
    finally:
        process.close()

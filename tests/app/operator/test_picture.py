"""What the dashboard makes of a cell: rates, plots and lists, from the live picture and the last facts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.operator.picture import MAX_FAILURES, WINDOW_S, Picture, Seconds
from decode.engine.sampling import SamplingParams
from tasks.observe.live import FACTS_AT_ONCE, LiveCell
from tasks.process.crashes import report_crash
from tasks.protocol import keys
from tasks.protocol.contract import GenerationJob, WorkerLoad
from tasks.protocol.record import Append, RequestRecords, Terminal
from tests.app.web import FINGERPRINT, MODEL, worker_info
from tests.conftest import RedisServer

START_MS = 1_700_000_000_000


class Cell:
    """One worker, and a clock that is turned by hand."""

    def __init__(self, server: RedisServer) -> None:
        self.redis = server.connect()
        self.records = RequestRecords(self.redis)
        self.picture = Picture(LiveCell(self.redis))
        self.now_ms = START_MS
        self.join("w1")

    def join(self, worker: str) -> None:
        self.records.heartbeat(worker_info(worker), WorkerLoad(), 10_000_000, now_ms=self.now_ms)

    def after(self, ms: int) -> None:
        self.now_ms += ms

    def submit(self, request_id: str) -> None:
        job = GenerationJob(request_id, MODEL, (1, 2, 3), SamplingParams(max_tokens=1000), self.now_ms)
        self.records.submit([job], reader=None, max_waiting=5000, now_ms=self.now_ms)

    def claim(self, request_id: str, attempt: int = 1, worker: str = "w1") -> None:
        self.records.claim(request_id, attempt, worker, FINGERPRINT, now_ms=self.now_ms)

    def append(
        self, request_id: str, first: int, count: int, *, attempt: int = 1, end: Terminal | None = None
    ) -> None:
        tokens = tuple(range(count))
        self.records.append_many([Append(request_id, attempt, first, tokens, terminal=end)], now_ms=self.now_ms)

    def begin(self, request_id: str) -> None:
        self.submit(request_id)
        self.claim(request_id)

    def look(self) -> dict[str, Any]:
        return self.picture.look(now_ms=self.now_ms)

    def look_anew(self) -> dict[str, Any]:
        """As a page that is opened now."""
        return Picture(LiveCell(self.redis)).look(now_ms=self.now_ms)


FINISHED = Terminal("finished", "length")


@pytest.fixture
def cell(fake_server: RedisServer) -> Cell:
    return Cell(fake_server)


def test_tokens_of_a_running_request_are_counted_in_the_seconds_in_which_they_came(cell: Cell) -> None:
    cell.begin("a")
    cell.append("a", 0, 1)
    cell.look()
    cell.after(2000)
    cell.append("a", 1, 40)
    cell.look()
    cell.after(1000)
    tokens = cell.look()["tokens"]
    assert tokens[-3:] == [21.0, 20.0, 0.0]
    assert sum(tokens) == 41


def test_a_requests_rate_settles_at_what_it_is(cell: Cell) -> None:
    cell.begin("a")
    cell.append("a", 0, 1)
    cell.look()
    for n in range(12):
        cell.after(1000)
        cell.append("a", 1 + 30 * n, 30)
        rate = cell.look()["requests"][0]["tokens_per_s"]
    assert rate == pytest.approx(30, rel=0.05)


def test_the_last_tokens_of_a_request_that_ended_between_two_looks_count_once(cell: Cell) -> None:
    cell.begin("a")
    cell.append("a", 0, 10)
    cell.look()
    cell.after(500)
    cell.append("a", 10, 5, end=FINISHED)
    cell.after(1500)
    seen = cell.look()
    assert sum(seen["tokens"]) == 15
    cell.after(1000)
    assert sum(cell.look()["tokens"]) == 15
    assert seen["requests"] == []
    assert [(one["request_id"], one["num_tokens"], one["state"]) for one in seen["ended"]] == [("a", 15, "finished")]


def test_a_page_that_is_opened_late_has_the_plots_of_before(cell: Cell) -> None:
    cell.begin("a")
    cell.after(300)
    cell.append("a", 0, 1)
    cell.after(3700)
    cell.append("a", 1, 73, end=FINISHED)
    cell.after(2000)
    seen = cell.look_anew()
    assert sum(seen["tokens"]) == pytest.approx(74, abs=0.5)
    assert max(seen["tokens"]) <= 21
    assert seen["first_tokens"] == [(START_MS + 300, 300)]
    assert seen["first_token_median_ms"] == 300
    assert seen["num_ended"] == {"cancelled": 0, "failed": 0, "finished": 1}


def test_a_look_takes_each_fact_once(cell: Cell) -> None:
    cell.look()
    cell.begin("a")
    cell.append("a", 0, 1, end=FINISHED)
    for _ in range(3):
        seen = cell.look()
    assert seen["num_ended"]["finished"] == 1
    assert len(seen["first_tokens"]) == 1


def test_more_facts_than_one_piece_are_all_taken(cell: Cell) -> None:
    cell.look()
    for n in range(FACTS_AT_ONCE // 2):
        cell.submit(f"r{n}")
        cell.records.close(f"r{n}", "cancelled", "disconnect", now_ms=cell.now_ms)
    cell.begin("last")
    cell.append("last", 0, 1, end=FINISHED)
    assert cell.look()["num_ended"] == {"cancelled": FACTS_AT_ONCE // 2, "failed": 0, "finished": 1}


def test_a_stream_that_was_emptied_and_begun_anew_is_followed_again(cell: Cell) -> None:
    cell.begin("a")
    cell.look()
    cell.redis.flushall()
    cell.join("w2")
    assert [one["worker"] for one in cell.look()["workers"]] == ["w2"]


def test_failures_are_listed_with_their_reasons_the_latest_first_and_only_so_many(cell: Cell) -> None:
    for n in range(MAX_FAILURES + 3):
        cell.begin(f"r{n}")
        cell.after(1000)
        cell.append(f"r{n}", 0, 0, end=Terminal("failed", "engine_error", "out of memory"))
    failures = [one for one in cell.look()["lately"] if one["kind"] == "failed"]
    assert len(failures) == MAX_FAILURES
    latest = failures[0]
    assert (latest["request_id"], latest["reason"]) == (f"r{MAX_FAILURES + 2}", "engine_error")
    assert latest["worker"] == "w1"
    assert latest["message"] == "out of memory"


def test_a_move_to_another_worker_is_listed_with_the_worker_that_was_lost(cell: Cell) -> None:
    cell.begin("a")
    cell.append("a", 0, 7)
    cell.join("w2")
    cell.records.expire_lease("w1", MODEL)
    cell.records.reoffer("a", 1, "worker_lost", now_ms=cell.now_ms)
    cell.records.leave("w1", MODEL, now_ms=cell.now_ms)
    cell.claim("a", attempt=2, worker="w2")
    seen = cell.look()
    kinds = {one["kind"]: one for one in seen["lately"]}
    assert (kinds["lost"]["request_id"], kinds["lost"]["worker"], kinds["lost"]["num_tokens"]) == ("a", "w1", 7)
    assert kinds["worker_left"]["worker"] == "w1"
    assert kinds["worker_joined"]["worker"] in ("w1", "w2")
    assert (seen["requests"][0]["worker"], seen["requests"][0]["attempt"]) == ("w2", 2)


def test_what_is_older_than_the_plots_is_forgotten(cell: Cell) -> None:
    cell.begin("a")
    cell.append("a", 0, 9, end=FINISHED)
    assert sum(cell.look()["num_ended"].values()) == 1
    cell.after((WINDOW_S + 2) * 1000)
    seen = cell.look()
    assert (sum(seen["tokens"]), seen["first_tokens"], sum(seen["num_ended"].values())) == (0, [], 0)
    assert seen["first_token_median_ms"] is None


def test_an_entry_that_is_no_fact_harms_nobody(cell: Cell) -> None:
    cell.redis.xadd(keys.EVENTS, {"k": "ended", "t": "not a time"})
    cell.redis.xadd(keys.EVENTS, {"nothing": b"\xff"})
    cell.begin("a")
    cell.append("a", 0, 1, end=FINISHED)
    assert cell.look()["num_ended"]["finished"] == 1


@given(st.integers(1, 10_000), st.integers(0, 200_000), st.integers(0, 60_000))
def test_spreading_neither_loses_nor_invents(amount: int, back_ms: int, later_ms: int) -> None:
    seconds = Seconds()
    seconds.spread(amount, START_MS - back_ms, START_MS)
    found = seconds.last(START_MS + 1000 + later_ms % 30_000)
    assert sum(found) == pytest.approx(amount, abs=WINDOW_S * 0.051)
    assert min(found) >= 0


def test_what_died_or_could_not_start_is_in_the_picture_with_its_reason(redis_server: RedisServer) -> None:
    cell = Cell(redis_server)
    cell.now_ms = LiveCell(cell.redis).look().at_ms
    assert cell.look()["crashes"] == []
    report_crash(cell.redis, "worker", 7, "cannot serve: no such model", is_over=True)
    [told] = cell.look()["crashes"]
    assert "(supervisor 7) ended for good" in told
    assert told.endswith("cannot serve: no such model")

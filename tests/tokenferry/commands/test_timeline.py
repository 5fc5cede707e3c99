"""The life of one request: while it runs, after a failover, from the catalog alone, from Redis alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from bridge.catalog.catalog import Catalog
from bridge.catalog.recorder import Recorder
from tasks.protocol import keys
from tests.bridge.cell import Cell
from tests.conftest import RedisServer
from tokenferry.commands.timeline import Lives, lines_of, moments, show_request
from tokenferry.errors import ForPeople


@pytest.fixture
def cell(redis_server: RedisServer) -> Cell:
    return Cell(redis_server.connect("short"), redis_server.connect("queue"))


def snapshot(cell: Cell, folder: Path) -> None:
    """What the bridge does: everything so far is recorded, and leaves the stream."""
    catalog = Catalog(folder)
    recorder = Recorder(cell.redis, catalog, clock_ms=lambda: 2000)
    while recorder.record_batch():
        pass
    recorder.record_batch()
    catalog.snapshot()
    catalog.close()
    assert cell.redis.xlen(keys.EVENTS) == 0


def fail_over(cell: Cell) -> None:
    """w1 dies after two tokens; w2 goes on and publishes one more."""
    cell.join("w1", 1000)
    cell.join("w2", 1400)
    cell.watchdog.tick(1400)
    cell.offer("r1", 1000)
    cell.claim("r1", "w1", 1010)
    cell.publish("r1", 1, 0, (7, 8), 1020, cached=1)
    cell.watchdog.tick(1500)
    cell.claim("r1", "w2", 1510, attempt=2)
    cell.publish("r1", 2, 2, (9,), 1520, cached=3)


def story(lives: Lives, request_id: str = "r1") -> list[tuple[int, str, str]]:
    return [(moment.at_ms, moment.what, moment.details) for moment in moments(lives.of(request_id))]


MOVED = [
    (1000, "submitted", "attempt 1"),
    (1010, "claimed", "by w1 (h, cpu, fp32)"),
    (1020, "first token", "1 of 3 prompt tokens were cached"),
    (1500, "lost", "by w1 (h, cpu, fp32), 2 tokens are safe: worker_lost"),
    (1500, "offered again", "attempt 2: worker_lost"),
    (1510, "claimed", "by w2 (h, cpu, fp32), goes on after 2 tokens"),
]
FINISHED = (1530, "finished", "stop, 3 tokens")


def test_a_move_is_told_with_its_reason_and_what_was_safe(cell: Cell, tmp_path: Path) -> None:
    fail_over(cell)
    cell.publish("r1", 2, 3, (), 1530, end=True)
    snapshot(cell, tmp_path)
    assert story(Lives(tmp_path, cell.redis)) == [*MOVED, FINISHED]


def test_what_the_snapshot_does_not_have_yet_comes_from_redis(cell: Cell, tmp_path: Path) -> None:
    cell.join("w1", 1000)
    cell.join("w2", 1000)
    snapshot(cell, tmp_path)  # only the workers are in it
    fail_over(cell)
    lives = Lives(tmp_path, cell.redis)
    assert story(lives) == MOVED
    assert lives.of("r1").is_running
    assert lives.of("r1").request["num_output_tokens"] == 3


def test_at_any_moment_of_the_bridge_the_story_is_whole(cell: Cell, tmp_path: Path) -> None:
    cell.join("w1", 1000)
    cell.join("w2", 1400)
    cell.watchdog.tick(1400)
    cell.offer("r1", 1000)
    cell.claim("r1", "w1", 1010)
    snapshot(cell, tmp_path)
    cell.publish("r1", 1, 0, (7, 8), 1020, cached=1)
    cell.watchdog.tick(1500)
    cell.claim("r1", "w2", 1510, attempt=2)
    cell.publish("r1", 2, 2, (9,), 1530, end=True, cached=3)
    assert story(Lives(tmp_path, cell.redis)) == [*MOVED, FINISHED]


def test_without_a_catalog_redis_tells_it_and_that_is_said(cell: Cell, tmp_path: Path) -> None:
    fail_over(cell)
    life = Lives(tmp_path, cell.redis).of("r1")
    assert [moment.what for moment in moments(life)] == [what for _, what, _ in MOVED]
    assert "without the catalog" in life.notes[0]


def test_a_request_whose_facts_are_recorded_and_not_in_the_snapshot_is_told_by_its_record(
    cell: Cell, tmp_path: Path
) -> None:
    cell.join("w1", 1000)
    snapshot(cell, tmp_path)
    cell.offer("r1", 1000)
    cell.claim("r1", "w1", 1010)
    cell.redis.delete(keys.EVENTS)
    assert story(Lives(tmp_path, cell.redis)) == MOVED[:2]


class Away:
    """A Redis that does not answer."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("refused")


def away() -> Redis:
    return Away()  # type: ignore[return-value]


def test_without_redis_the_catalog_tells_it_and_that_is_said(cell: Cell, tmp_path: Path) -> None:
    fail_over(cell)
    snapshot(cell, tmp_path)
    life = Lives(tmp_path, away()).of("r1")
    assert [moment.what for moment in moments(life)] == [what for _, what, _ in MOVED]
    assert "Redis does not answer: refused" in life.notes[0]


def test_an_unknown_request_is_refused_with_the_nearest(cell: Cell, tmp_path: Path) -> None:
    cell.join("w1", 1000)
    cell.offer("chatcmpl-abc", 1000)
    snapshot(cell, tmp_path)
    with pytest.raises(ForPeople, match="did you mean chatcmpl-abc"):
        Lives(tmp_path, cell.redis).of("chatcmpl-a")
    with pytest.raises(ForPeople, match="tokenferry requests"):
        Lives(tmp_path, cell.redis).of("nope")


def test_an_unknown_request_is_refused_with_what_could_not_be_asked(tmp_path: Path) -> None:
    with pytest.raises(ForPeople, match=r"without the catalog.*Redis does not answer"):
        Lives(tmp_path, away()).of("r1")


def test_a_request_that_waits_has_been_submitted_and_no_more(cell: Cell, tmp_path: Path) -> None:
    cell.join("w1", 1000)
    cell.offer("r1", 1000)
    assert story(Lives(tmp_path, cell.redis)) == [(1000, "submitted", "attempt 1")]


def test_a_failure_is_told_with_its_message(cell: Cell, tmp_path: Path) -> None:
    cell.join("w1", 1000)
    cell.offer("r1", 1000)
    cell.records.close("r1", "failed", "no_worker", "no worker could take it", now_ms=1100)
    snapshot(cell, tmp_path)
    assert story(Lives(tmp_path, cell.redis))[-1] == (1100, "failed", "no_worker, 0 tokens: no worker could take it")


def test_the_screen_has_who_asked_times_since_the_start_and_how_far_it_is(cell: Cell, tmp_path: Path) -> None:
    fail_over(cell)
    life = Lives(tmp_path, cell.redis).of("r1")
    lines = lines_of(life, moments(life), now_ms=2000)
    assert lines[0] == "r1  streaming"
    assert lines[1] == "m, default"
    assert lines[2] == "prompt 3 tokens, output 3 tokens"
    lost = next(line for line in lines if "  lost " in line)
    assert lost.split("  lost ")[0].split()[1:] == ["500", "ms", "(+480", "ms)"]
    assert lines[-1].endswith("now           3 of at most 9 tokens")


def test_as_json_it_is_the_rows_and_the_timeline(
    cell: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_over(cell)
    snapshot(cell, tmp_path)
    assert show_request(Lives(tmp_path, cell.redis), "r1", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["is_running"] is True
    assert [attempt["outcome"] for attempt in told["attempts"]] == ["lost", None]
    assert told["timeline"][3]["since_ms"] == 500

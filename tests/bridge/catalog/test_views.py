"""The catalog's views, each over a small day whose figures can be checked by hand."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from bridge.catalog.catalog import Catalog, Position, ask_snapshot
from bridge.catalog.facts import Fact, fold
from bridge.catalog.views import VIEWS

DAY_MS = 86_400_000
MONDAY, TUESDAY = date(1970, 1, 5), date(1970, 1, 6)
WORKER = {"host": "h", "device": "cpu", "fingerprint": "f", "max_num_seqs": 2, "started_ms": 4 * DAY_MS}


def request(request_id: str, at_ms: int, *, user: str = "", ttft_ms: int = 50, took_ms: int = 150) -> list[Fact]:
    details = {"prompt_tokens": 10, "class": "default", "end_user": user}
    end = {"state": "finished", "reason": "stop", "next_index": 11, "cached": 5}
    return [
        Fact("submitted", at_ms, request_id, 1, model="m", details=details),
        Fact("claimed", at_ms + 20, request_id, 1, "w1", "m", {"next_index": 0}),
        Fact("first_token", at_ms + ttft_ms, request_id, 1, "w1", "m", {"cached": 5}),
        Fact("ended", at_ms + took_ms, request_id, 1, "w1", "m", end),
    ]


def moved(request_id: str, at_ms: int) -> list[Fact]:
    """Lost by w1 after 4 tokens, and failed by w2."""
    lost = {"reason": "worker_lost", "next_index": 4}
    end = {"state": "failed", "reason": "engine_error", "message": "out of memory", "next_index": 4}
    return [
        *request(request_id, at_ms)[:3],
        Fact("lost", at_ms + 100, request_id, 1, "w1", "m", lost),
        Fact("reoffered", at_ms + 100, request_id, 2, "", "m", lost),
        Fact("claimed", at_ms + 130, request_id, 2, "w2", "m", {"next_index": 4}),
        Fact("ended", at_ms + 200, request_id, 2, "w2", "m", end),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalog")
    catalog = Catalog(folder)
    monday, tuesday = 4 * DAY_MS, 5 * DAY_MS
    facts = [
        Fact("worker_joined", monday, worker="w1", model="m", details=WORKER),
        *request("r1", monday, user="ann"),
        *request("r2", monday + 1000, user="ann", ttft_ms=60, took_ms=260),
        *request("r3", tuesday, user="bob"),
        *moved("r4", tuesday + 1000),
        Fact("worker_left", monday + 1000, worker="w1", model="m"),
    ]
    catalog.record(fold(facts), Position())
    catalog.snapshot()
    catalog.close()
    return folder


def ask(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    return ask_snapshot(folder, sql).rows


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_answers_over_an_empty_catalog_too(view: str, tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.snapshot()
    catalog.close()
    assert ask(tmp_path, f"FROM {view}") == []


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_documented(view: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "catalog.md").read_text()
    assert f"`{view}`" in page


def test_usage_is_by_day_model_and_user(folder: Path) -> None:
    assert ask(folder, "FROM usage") == [
        (MONDAY, "m", "", "ann", 2, 2, 20, 10, 22),
        (TUESDAY, "m", "", "", 0 + 1, 0, 10, 5, 4),
        (TUESDAY, "m", "", "bob", 1, 1, 10, 5, 11),
    ]


def test_latency_has_the_percentiles_of_waiting_first_token_and_end(folder: Path) -> None:
    columns = "day, num_requests, queue_p50_ms, ttft_p50_ms, ttft_p99_ms, duration_p50_ms, duration_p95_ms"
    assert ask(folder, f"SELECT {columns} FROM latency") == [
        (MONDAY, 2, 20, 50, 60, 150, 260),
        (TUESDAY, 2, 20, 50, 50, 150, 200),
    ]


def test_failures_are_by_reason_with_the_latest_one(folder: Path) -> None:
    assert ask(folder, "FROM failures") == [
        (TUESDAY, "m", "failed", "engine_error", 1, "r4", "out of memory"),
    ]


def test_losses_are_by_worker_with_the_pause_that_followed(folder: Path) -> None:
    assert ask(folder, "FROM losses") == [(TUESDAY, "w1", "lost", "worker_lost", 1, 4, 30, 30)]


def test_the_cache_hit_rate_is_of_prompt_tokens(folder: Path) -> None:
    assert ask(folder, "FROM cache_hits") == [(MONDAY, "m", 2, 20, 10, 0.5), (TUESDAY, "m", 2, 20, 10, 0.5)]


def test_utilisation_is_the_share_of_its_places_that_a_worker_used(folder: Path) -> None:
    columns = "worker, is_alive, life_ms, num_attempts, num_let_down, num_tokens, busy_share"
    # 130 + 240 + 130 ms of answers and 80 ms until it was lost, of 2 places for 1000 ms
    assert ask(folder, f"SELECT {columns} FROM utilisation") == [("w1", False, 1000, 4, 1, 37, 0.29)]


def test_the_times_of_a_request_and_its_rate_are_there(folder: Path) -> None:
    sql = "SELECT queue_ms, ttft_ms, duration_ms, tokens_per_s FROM request_times WHERE request_id = 'r2'"
    assert ask(folder, sql) == [(20, 60, 260, 50.0)]


def test_the_times_of_an_attempt_say_how_long_it_was_offered_held_and_missed(folder: Path) -> None:
    sql = "SELECT attempt, offered_for_ms, held_ms, num_tokens, pause_ms FROM attempt_times WHERE request_id = 'r4'"
    assert ask(folder, f"{sql} ORDER BY 1") == [(1, 20, 80, 4, 30), (2, 30, 70, 0, None)]

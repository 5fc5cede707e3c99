"""The minutes are what a slow count of the requests says, whatever came twice, late, or was forgotten since."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.catalog.catalog import Catalog, Position
from bridge.catalog.facts import Fact, fold
from bridge.catalog.minutes import COLUMNS, MINUTE_MS, touched_by
from bridge.catalog.tables import DERIVED


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path)
    yield catalog
    catalog.close()


def record(catalog: Catalog, *facts: Fact) -> None:
    catalog.record(fold(facts), Position())


def life(request_id: str, at_ms: int, *, state: str = "finished", took_ms: int = 100, model: str = "m") -> list[Fact]:
    return [
        Fact("submitted", at_ms, request_id, 1, model=model, details={"prompt_tokens": 7}),
        Fact("claimed", at_ms + 3, request_id, 1, "w", model),
        Fact("first_token", at_ms + 10, request_id, 1, "w", model, {"cached": 4}),
        Fact(
            "ended",
            at_ms + took_ms,
            request_id,
            1,
            "w",
            model,
            {"state": state, "reason": "stop", "next_index": 20, "cached": 4},
        ),
    ]


def minutes(catalog: Catalog, columns: str = "*") -> list[tuple[Any, ...]]:
    """As a snapshot has them."""
    catalog.snapshot()
    return catalog.query(f"SELECT {columns} FROM minutes ORDER BY minute_ms, model")


def test_a_minute_sums_what_ended_in_it(catalog: Catalog) -> None:
    record(catalog, *life("a", 0), *life("b", 200, state="failed", took_ms=300), *life("c", MINUTE_MS - 50))
    row = dict(zip(COLUMNS, minutes(catalog, ", ".join(COLUMNS))[0], strict=True))
    assert row == {
        "minute_ms": 0,
        "model": "m",
        "num_requests": 2,
        "num_finished": 1,
        "num_cancelled": 0,
        "num_failed": 1,
        "num_prompt_tokens": 14,
        "num_cached_tokens": 8,
        "num_output_tokens": 40,
        "num_attempts": 2,
        "queue_count": 2,
        "queue_sum_ms": 6,
        "queue_p50_ms": 3,
        "queue_p95_ms": 3,
        "queue_max_ms": 3,
        "ttft_count": 2,
        "ttft_sum_ms": 20,
        "ttft_p50_ms": 10,
        "ttft_p95_ms": 10,
        "ttft_max_ms": 10,
        "duration_count": 2,
        "duration_sum_ms": 400,
        "duration_p50_ms": 100,
        "duration_p95_ms": 300,
        "duration_max_ms": 300,
    }
    assert minutes(catalog, "minute_ms, num_requests") == [(0, 2), (MINUTE_MS, 1)]


def test_models_are_counted_apart(catalog: Catalog) -> None:
    record(catalog, *life("a", 0), *life("b", 0, model="other"))
    assert minutes(catalog, "model, num_requests") == [("m", 1), ("other", 1)]


def test_what_never_got_a_worker_counts_without_the_times_it_does_not_have(catalog: Catalog) -> None:
    submitted, _, _, ended = life("a", 0, state="failed")
    record(catalog, submitted, ended)
    assert minutes(catalog, "num_failed, ttft_count, ttft_sum_ms, ttft_p50_ms, duration_count") == [
        (1, 0, 0, None, 1)
    ]


def test_a_minute_is_counted_on_when_its_requests_end_in_several_batches(catalog: Catalog) -> None:
    for n in range(3):
        record(catalog, *life(f"r{n}", n))
    assert minutes(catalog, "num_requests") == [(3,)]


def test_a_batch_that_is_recorded_twice_counts_once(catalog: Catalog) -> None:
    for _ in range(2):
        record(catalog, *life("a", 0))
    assert minutes(catalog, "num_requests, num_output_tokens") == [(1, 20)]


def test_a_minute_outlives_its_requests_and_does_not_shrink_with_them(catalog: Catalog) -> None:
    for n in range(4):
        record(catalog, *life(f"r{n}", n))
    catalog.shrink_to(1)
    record(catalog, *life("late", 9))
    assert minutes(catalog, "num_requests") == [(4,)]


def test_a_minute_that_was_touched_before_a_crash_is_counted_after_it(tmp_path: Path) -> None:
    first = Catalog(tmp_path)
    record(first, *life("a", 0))
    first.close()  # no snapshot
    again = Catalog(tmp_path)
    assert minutes(again, "num_requests") == [(1,)]
    again.close()


def test_minutes_are_forgotten_with_their_time(catalog: Catalog) -> None:
    record(catalog, *life("a", 0), *life("b", 2 * MINUTE_MS))
    catalog.forget_before(MINUTE_MS)
    assert minutes(catalog, "minute_ms") == [(2 * MINUTE_MS,)]


def test_a_batch_in_which_nothing_ended_touches_no_minute() -> None:
    assert touched_by(fold(life("a", 0)[:3])) == []


def test_the_columns_of_minutes_are_those_of_its_table() -> None:
    assert DERIVED["minutes"] == (("minute_ms", "model"), COLUMNS)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 3 * MINUTE_MS), st.sampled_from(["finished", "failed"])),
        min_size=1,
        max_size=12,
        unique_by=lambda one: one[0],
    ),
    st.integers(1, 7),
    st.integers(0, 5),
)
def test_however_facts_are_cut_into_batches_and_repeated_the_minutes_are_exact(
    lives: list[tuple[int, int, str]], size: int, back: int
) -> None:
    facts = [fact for number, at_ms, state in lives for fact in life(f"r{number}", at_ms, state=state)]
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog(Path(folder))
        for start in range(0, len(facts), size):
            record(catalog, *facts[max(0, start - back) : start + size])
        found = {row[0]: row[1:] for row in minutes(catalog, "minute_ms, num_requests, num_failed")}
        catalog.close()
    expected: dict[int, tuple[int, int]] = {}
    for _, at_ms, state in lives:
        minute = (at_ms + 100) // MINUTE_MS * MINUTE_MS
        total, failed = expected.get(minute, (0, 0))
        expected[minute] = (total + 1, failed + (state == "failed"))
    assert found == expected

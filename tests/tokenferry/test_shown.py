"""Times, amounts and tables, spelled for people and for programs."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal

import pytest

from tokenferry.shown import bar, print_json, spelled, spelled_duration, spelled_time, table_lines


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1.00 s"),
        (9_994, "9.99 s"),
        (12_340, "12.3 s"),
        (60_000, "1 min 0 s"),
        (125_000, "2 min 5 s"),
        (3_600_000, "1 h 0 min"),
        (11_520_000, "3 h 12 min"),
        (86_400_000, "1 d 0 h"),
        (2 * 86_400_000 + 3 * 3_600_000, "2 d 3 h"),
        (400 * 86_400_000, "400 d 0 h"),
    ],
)
def test_a_duration_has_the_unit_that_fits_it(ms: int, text: str) -> None:
    assert spelled_duration(ms) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "yes"),
        (False, "no"),
        (1234, "1,234"),
        (1_700_000_000_000, "1700000000000"),
        (0.12345, "0.1235"),
        (Decimal("1234.5"), "1,234"),
        ("two\nlines", "two\\nlines"),
        (date(2026, 1, 2), "2026-01-02"),
    ],
)
def test_a_cell_is_spelled_for_people(value: object, text: str) -> None:
    assert spelled(value) == text


def test_a_table_aligns_numbers_right_and_texts_left_and_cuts_nothing() -> None:
    lines = table_lines(["name", "n"], [["long enough " * 30, 1], ["猫", 1000]])
    assert lines[0] == "name" + " " * (360 - 4) + "  " + "    n"
    assert lines[1] == "long enough " * 30 + "  " + "    1"
    assert lines[2] == "猫" + " " * 358 + "  1,000"


def test_a_table_without_rows_is_its_headings() -> None:
    assert table_lines(["a", "b"], []) == ["a  b"]


@pytest.mark.parametrize(
    ("share", "text"), [(0, "    "), (1, "████"), (2, "████"), (-1, "    "), (0.5, "██  "), (0.28, "█▏  ")]
)
def test_a_bar_is_as_wide_as_asked_and_full_to_its_share(share: float, text: str) -> None:
    assert bar(share, 4) == text


def test_json_has_whole_numbers_as_such_and_days_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"a": Decimal("7"), "b": Decimal("7.5"), "c": date(2026, 1, 2)}], is_line=True)
    printed = capsys.readouterr().out
    assert json.loads(printed) == [{"a": 7, "b": 7.5, "c": "2026-01-02"}]
    assert printed.count("\n") == 1


def test_a_time_of_another_day_has_its_date() -> None:
    now_ms = 1_800_000_000_000
    assert len(spelled_time(now_ms, now_ms)) == len("12:34:56")
    assert len(spelled_time(now_ms - 3 * 86_400_000, now_ms)) == len("2026-01-02 12:34:56")

"""How rows, times and amounts look: as a table for people, or as JSON for programs.

Owns the spelling. Refuses to know what is shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import orjson
from rich.cells import cell_len

_DAY_MS = 86_400_000


def print_json(value: Any, *, is_line: bool = False) -> None:
    """One JSON document; `is_line`: on one line, so that many can follow each other."""
    option = orjson.OPT_APPEND_NEWLINE | (0 if is_line else orjson.OPT_INDENT_2)
    sys.stdout.write(orjson.dumps(value, default=_plain, option=option).decode())
    sys.stdout.flush()


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table as wide as it needs to be: long lines are for the terminal to fold or a pager to scroll."""
    for line in table_lines(columns, rows):
        print(line)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Headings and rows; columns of numbers are aligned at their right."""
    cells = [list(columns), *([spelled(value) for value in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    are_numbers = [
        any(isinstance(row[number], int | float | Decimal) for row in rows) for number in range(len(columns))
    ]

    def line(row: Sequence[str]) -> str:
        padded = (
            " " * (width - cell_len(cell)) + cell if is_number else cell + " " * (width - cell_len(cell))
            for cell, width, is_number in zip(row, widths, are_numbers, strict=True)
        )
        return "  ".join(padded).rstrip()

    return [line(row) for row in cells]


def spelled(value: Any) -> str:
    """One cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**9 else str(value)
    if isinstance(value, float | Decimal):
        number = float(value)
        return f"{number:,.4g}" if abs(number) < 1000 else f"{number:,.0f}"
    return str(value).replace("\n", "\\n")


def spelled_duration(ms: float) -> str:
    """3 ms, 1.52 s, 2 min 5 s, 3 h 12 min, 2 d 3 h."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    for unit, size, smaller, part in (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86_400, "h", 3600)):
        if seconds < size * (60 if unit == "min" else 24) or unit == "d":
            whole, rest = divmod(int(seconds), size)
            return f"{whole} {unit} {rest // part} {smaller}"
    raise AssertionError(ms)


def spelled_time(epoch_ms: int, now_ms: int) -> str:
    """The time of the day here, with the date when that is another day."""
    then = time.localtime(epoch_ms / 1000)
    is_today = time.localtime(now_ms / 1000)[:3] == then[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", then)


def bar(share: float, width: int) -> str:
    """A bar of `width` characters, filled to `share` (0 to 1) in eighths of a character."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def _plain(value: Any) -> Any:
    """What DuckDB gives and JSON does not have."""
    match value:
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case Mapping():
            return dict(value)
        case _:
            return str(value)

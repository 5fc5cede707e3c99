"""`tokenferry requests`, `sql` and `export`: what the catalog says, while the server runs or after.

Owns the questions of `requests` and how answers are shown. Reads the bridge's snapshot only; refuses to know how it
is made (`bridge.catalog.catalog`).
"""

from __future__ import annotations

import difflib
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.catalog.catalog import CatalogError, QueryResult, ask_snapshot, export_snapshot
from tokenferry.errors import ForPeople
from tokenferry.shown import print_json, print_rows, spelled, spelled_time

FOLLOW_S = 1.0
MAX_FOLLOWED = 1_000
"""The latest requests, whose changes `--follow` shows."""
SLOW_MS = 1_000
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_COLUMNS = (
    "request_id, model, state, reason, service_class, num_attempts, num_prompt_tokens, num_cached_tokens,"
    " num_output_tokens, queue_ms, ttft_ms, duration_ms, worker, submitted_ms, ended_ms, updated_ms, message"
)
_HEADINGS = {
    "request_id": "request",
    "model": "model",
    "state": "state",
    "reason": "reason",
    "num_attempts": "attempts",
    "num_prompt_tokens": "prompt",
    "num_cached_tokens": "cached",
    "num_output_tokens": "output",
    "queue_ms": "queue ms",
    "ttft_ms": "ttft ms",
    "duration_ms": "whole ms",
    "worker": "worker",
}

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which requests."""

    model: str = ""
    state: str = ""
    since_ms: int | None = None
    """Not older than that, in milliseconds before now."""
    slow_ms: int | None = None
    """The first token came later, or has not come for as long."""
    limit: int = 20

    def condition(self, now_ms: int) -> tuple[str, list[Any]]:
        """An SQL condition over `request_times`, and its parameters."""
        parts, parameters = ["true"], list[Any]()
        if self.model:
            parts.append("model = ?")
            parameters.append(self.model)
        if self.state:
            parts.append("state = ?")
            parameters.append(self.state)
        if self.since_ms is not None:
            parts.append("submitted_ms >= ?")
            parameters.append(now_ms - self.since_ms)
        if self.slow_ms is not None:
            parts.append("coalesce(ttft_ms, duration_ms, ? - submitted_ms) >= ?")
            parameters += [now_ms, self.slow_ms]
        return " AND ".join(parts), parameters


def duration_ms(text: str) -> int:
    """ "90s", "10m", "2h", "1d" in milliseconds. Raises ForPeople."""
    found = re.fullmatch(r"(\d{1,9})(ms|s|m|h|d)", text.strip())
    if found is None:
        raise ForPeople(f"a time such as 30s, 10m, 2h or 7d is needed, not {text!r}")
    return int(found[1]) * _UNITS_MS[found[2]]


class History:
    """The commands over one catalog folder."""

    def __init__(self, directory: Path, *, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._directory = directory
        self._clock_ms = clock_ms

    def requests(self, wanted: Wanted) -> list[Record]:
        """The latest `limit` that are wanted, in the order of their submission. Raises ForPeople."""
        condition, parameters = wanted.condition(self._clock_ms())
        sql = (
            f"FROM (SELECT {_COLUMNS} FROM request_times WHERE {condition}"
            " ORDER BY submitted_ms DESC, request_id DESC LIMIT ?) ORDER BY submitted_ms, request_id"
        )
        found = self.ask(sql, [*parameters, wanted.limit]).records
        if not found and wanted.model:
            self._require_model(wanted.model)
        return found

    def changes(self, wanted: Wanted, known: dict[str, tuple[str, int]]) -> list[Record]:
        """The wanted requests whose state or number of attempts is not as `known`, which is brought up to date."""
        changed = []
        for record in self.requests(wanted):
            now = record["state"], record["num_attempts"]
            if known.get(record["request_id"]) != now:
                known[record["request_id"]] = now
                changed.append(record)
        return changed

    def ask(self, sql: str, parameters: Sequence[Any] = ()) -> QueryResult:
        """Raises ForPeople."""
        try:
            return ask_snapshot(self._directory, sql, parameters)
        except CatalogError as error:
            raise ForPeople(str(error)) from error

    def export(self, target: Path) -> list[Path]:
        """Raises ForPeople."""
        try:
            return export_snapshot(self._directory, target)
        except CatalogError as error:
            raise ForPeople(str(error)) from error

    def _require_model(self, model: str) -> None:
        known = [name for (name,) in self.ask("SELECT DISTINCT model FROM requests WHERE model IS NOT NULL").rows]
        if model not in known:
            near = difflib.get_close_matches(model, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it knows {', '.join(sorted(known)) or 'none yet'}"
            raise ForPeople(f"the catalog has no request for the model {model!r}: {hint}")


def show_requests(
    history: History,
    wanted: Wanted,
    *,
    as_json: bool,
    follow: bool = False,
    wait: Callable[[float], None] = time.sleep,
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> int:
    """The command. With `follow`, a line for every change until Ctrl-C."""
    known: dict[str, tuple[str, int]] = {}
    followed = replace(wanted, limit=max(wanted.limit, MAX_FOLLOWED))
    records = history.changes(followed, known)[-wanted.limit :] if follow else history.requests(wanted)
    if as_json and not follow:
        print_json(records)
        return 0
    if not as_json:
        if not records and not follow:
            print("no such request in the catalog", file=sys.stderr)
            return 0
        _print_records(records, clock_ms())
    while follow:
        for record in records if as_json else ():
            print_json(record, is_line=True)
        wait(FOLLOW_S)
        records = history.changes(followed, known)
        if not as_json:
            for record in records:
                print(_line(record, clock_ms()), flush=True)
    return 0


def show_sql(history: History, sql: str, *, as_json: bool) -> int:
    """The command."""
    answer = history.ask(sql)
    if as_json:
        print_json(answer.records)
    else:
        print_rows(answer.columns, answer.rows)
    return 0


def show_export(history: History, target: Path, *, as_json: bool) -> int:
    """The command."""
    paths = [str(path) for path in history.export(target)]
    if as_json:
        print_json(paths)
    else:
        print("\n".join(paths))
    return 0


def _print_records(records: Sequence[Record], now_ms: int) -> None:
    rows = [
        [spelled_time(record["submitted_ms"] or 0, now_ms), *(record[name] for name in _HEADINGS)]
        for record in records
    ]
    print_rows(["submitted", *_HEADINGS.values()], rows)


def _line(record: Record, now_ms: int) -> str:
    """A change, for `--follow`."""
    parts = [spelled_time(record["updated_ms"], now_ms), record["request_id"], record["model"] or "", record["state"]]
    if record["reason"]:
        parts.append(f"({record['reason']})")
    if record["num_attempts"] > 1:
        parts.append(f"attempt {record['num_attempts']}")
    if record["ended_ms"]:
        parts.append(f"{record['num_output_tokens'] or 0} tokens in {record['duration_ms']} ms")
        if record["ttft_ms"] is not None:
            parts.append(f"first after {record['ttft_ms']} ms")
    if record["message"]:
        parts.append(spelled(record["message"]))
    return "  ".join(parts)

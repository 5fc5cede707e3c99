"""`tokenferry request ID`: the whole life of one request on one screen, while it runs or after.

Owns how catalog, late facts and the live record become one story, and how it is told. The catalog's snapshot is some
seconds old; what came since is in the events stream and in the request's record, both in Redis. Refuses to change
anything.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from bridge.catalog.catalog import CatalogError, QueryResult, ask_snapshot
from bridge.catalog.facts import MalformedFact, Rows, fold, parse_fact
from bridge.catalog.tables import FIRST_KEPT
from tasks.observe.live import LiveCell
from tasks.protocol.moves import END_STATES, RecordState
from tasks.protocol.record import RequestRecords
from tokenferry.errors import ForPeople
from tokenferry.shown import print_json, spelled, spelled_duration

MAX_FACTS = 20_000
"""How far back the events stream is searched for facts that are not in the snapshot yet."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Moment:
    at_ms: int
    what: str
    details: str


@dataclass(frozen=True, slots=True)
class Life:
    """All that is known of one request."""

    request: Row
    attempts: list[Row]
    workers: dict[str, Row]
    choices: list[Row]
    """The other choices of the same answer."""
    is_running: bool
    notes: tuple[str, ...] = ()
    """What could not be looked at."""


class Lives:
    """Looks requests up. Raises ForPeople."""

    def __init__(self, directory: Path, redis: Redis) -> None:
        self._directory = directory
        self._redis = redis

    def of(self, request_id: str) -> Life:
        """Raises ForPeople when nothing is known of it."""
        notes = []
        requests, attempts = {}, {}
        workers: dict[str, Row] = {}
        choices: list[Row] = []
        try:
            requests = self._rows("requests", ("request_id",), request_id)
            attempts = self._rows("attempts", ("request_id", "attempt"), request_id)
            workers = {row["worker"]: row for row in self._ask("FROM workers").records}
            choices = self._ask(
                "SELECT request_id, state, num_output_tokens FROM requests WHERE request_id != $1 AND answer_id ="
                " (SELECT answer_id FROM requests WHERE request_id = $1) ORDER BY length(request_id), request_id",
                [request_id],
            ).records
        except CatalogError as error:
            notes.append(f"without the catalog: {error}")
        try:
            for rows in self._live(request_id):
                merge(requests, rows.get("requests", ()), ("request_id",), FIRST_KEPT["requests"])
                merge(attempts, rows.get("attempts", ()), ("request_id", "attempt"), FIRST_KEPT["attempts"])
        except RedisError as error:
            notes.append(f"without what is not in the catalog yet, because Redis does not answer: {error}")
        if not requests:
            raise ForPeople(self._unknown(request_id, notes))
        (request,) = requests.values()
        return Life(
            request=request,
            attempts=[attempts[key] for key in sorted(attempts)],
            workers=workers,
            choices=choices,
            is_running=request.get("state") not in END_STATES,
            notes=tuple(notes),
        )

    def _rows(self, table: str, key: Sequence[str], request_id: str) -> dict[tuple[Any, ...], Row]:
        found = self._ask(f"FROM {table} WHERE request_id = ?", [request_id]).records
        return {tuple(row[name] for name in key): row for row in found}

    def _ask(self, sql: str, parameters: Sequence[Any] = ()) -> QueryResult:
        return ask_snapshot(self._directory, sql, parameters)

    def _live(self, request_id: str) -> list[Rows]:
        """What Redis has: the facts that are in its stream still, then the record itself."""
        facts = []
        for _, fields in LiveCell(self._redis).facts_of(request_id, MAX_FACTS):
            try:
                facts.append(parse_fact(fields))
            except MalformedFact:  # the recorder says so; here it tells nothing
                continue
        state = RequestRecords(self._redis).state(request_id)
        return [fold(facts), *([] if state is None else [rows_of_record(request_id, state)])]

    def _unknown(self, request_id: str, notes: Iterable[str]) -> str:
        lines = [f"nothing is known of a request {request_id!r}"]
        try:
            near = self._ask(
                "SELECT request_id FROM requests WHERE starts_with(request_id, $1)"
                " ORDER BY submitted_ms DESC LIMIT 3",
                [request_id],
            ).rows
        except CatalogError:  # among the notes
            near = []
        if near:
            lines.append(f"did you mean {' or '.join(row[0] for row in near)}?")
        else:
            lines.append("`tokenferry requests` lists the latest")
        return "; ".join([*lines, *notes])


def rows_of_record(request_id: str, state: RecordState) -> Rows:
    """What the live record says, as rows of the catalog. Zero times have not happened."""
    is_claimed = state.claimed_ms >= state.offered_ms and state.worker != ""
    return {
        "requests": [
            {
                "request_id": request_id,
                "model": state.model,
                "state": state.state,
                "reason": state.reason or None,
                "worker": state.worker or None,
                "num_attempts": state.attempt,
                "num_output_tokens": state.next_index,
                "num_cached_tokens": state.num_cached_tokens if state.first_token_ms else None,
                "submitted_ms": state.submitted_ms,
                "claimed_ms": state.claimed_ms or None,
                "first_token_ms": state.first_token_ms or None,
                "ended_ms": state.ended_ms or None,
            }
        ],
        "attempts": [
            {
                "request_id": request_id,
                "attempt": state.attempt,
                "worker": state.worker or None,
                "offered_ms": state.offered_ms,
                "claimed_ms": state.claimed_ms if is_claimed else None,
                "ended_ms": state.ended_ms or None,
                "outcome": state.state if state.is_over else None,
                "reason": (state.reason or None) if state.is_over else None,
            }
        ],
    }


def merge(
    known: dict[tuple[Any, ...], Row],
    rows: Iterable[Mapping[str, Any]],
    key: Sequence[str],
    first_kept: frozenset[str],
) -> None:
    """Brings `known` up to date, by the catalog's own rule: a column that a row does not have stays as it is."""
    for row in rows:
        target = known.setdefault(tuple(row[name] for name in key), {})
        for name, value in row.items():
            if value is not None and not (name in first_kept and target.get(name) is not None):
                target[name] = value


def moments(life: Life) -> list[Moment]:
    """The story, in order."""
    request, found = life.request, []
    for attempt in life.attempts:
        number = attempt["attempt"]
        if (at_ms := attempt.get("offered_ms")) is not None:
            why = attempt.get("offer_reason")
            what = "submitted" if number == 1 else "offered again"
            found.append(Moment(at_ms, what, f"attempt {number}" + (f": {why}" if why else "")))
        if (at_ms := attempt.get("claimed_ms")) is not None:
            kept = f", goes on after {attempt['first_index']} tokens" if attempt.get("first_index") else ""
            found.append(Moment(at_ms, "claimed", f"by {_worker(life, attempt.get('worker'))}{kept}"))
        if (at_ms := request.get("first_token_ms")) is not None and _has(attempt, at_ms, life.attempts):
            cached, prompt = attempt.get("num_cached_tokens"), request.get("num_prompt_tokens")
            share = f"{cached} of {prompt} prompt tokens were cached" if prompt and cached is not None else ""
            found.append(Moment(at_ms, "first token", share))
        if attempt.get("outcome") in ("released", "lost"):
            found.append(
                Moment(
                    attempt["ended_ms"],
                    attempt["outcome"],
                    f"by {_worker(life, attempt.get('worker'))}, {attempt.get('next_index') or 0} tokens are safe:"
                    f" {attempt.get('reason') or 'no reason given'}",
                )
            )
    if (at_ms := request.get("ended_ms")) is not None:
        message = f": {request['message']}" if request.get("message") else ""
        tokens = f", {request.get('num_output_tokens') or 0} tokens"
        found.append(Moment(at_ms, request["state"], f"{request.get('reason') or ''}{tokens}{message}"))
    return sorted(found, key=lambda moment: moment.at_ms)  # stable: what happened at once stays in its order


def _has(attempt: Row, at_ms: int, attempts: Sequence[Row]) -> bool:
    """Whether the first token of the request came in this attempt."""
    holders = [one["attempt"] for one in attempts if (one.get("claimed_ms") or at_ms + 1) <= at_ms]
    return bool(holders) and attempt["attempt"] == max(holders)


def _worker(life: Life, worker: str | None) -> str:
    if not worker:
        return "nobody"
    row = life.workers.get(worker)
    if row is None:
        return worker
    about = [str(row[name]) for name in ("host", "device", "variant") if row.get(name)]
    return f"{worker} ({', '.join(about)})"


def show_request(
    lives: Lives,
    request_id: str,
    *,
    as_json: bool,
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> int:
    """The command. Raises ForPeople."""
    life = lives.of(request_id)
    story = moments(life)
    for note in life.notes:
        print(f"tokenferry: {note}", file=sys.stderr)
    if as_json:
        told = [
            {"at_ms": one.at_ms, "since_ms": one.at_ms - story[0].at_ms, "what": one.what, "details": one.details}
            for one in story
        ]
        print_json(
            {"request": life.request, "attempts": life.attempts, "choices": life.choices, "timeline": told}
            | {"is_running": life.is_running}
        )
        return 0
    print("\n".join(lines_of(life, story, clock_ms())))
    return 0


def lines_of(life: Life, story: Sequence[Moment], now_ms: int) -> list[str]:
    """The screen."""
    request = life.request
    lines = [f"{request['request_id']}  {request.get('state')}"]
    if request.get("reason"):
        lines[0] += f" ({request['reason']})"
    lines += [line for line in (_about(request), _amounts(request)) if line]
    for choice in life.choices:
        lines.append(f"with {choice['request_id']}  {choice['state']}, {choice['num_output_tokens'] or 0} tokens")
    lines.append("")
    start_ms = story[0].at_ms if story else now_ms
    before_ms = start_ms
    for moment in story:
        lines.append(_moment(moment.at_ms, start_ms, before_ms, moment.what, moment.details))
        before_ms = moment.at_ms
    if life.is_running:
        done, limit = request.get("num_output_tokens") or 0, request.get("max_tokens")
        progress = f"{done} of at most {limit} tokens" if limit else f"{done} tokens"
        lines.append(_moment(max(now_ms, before_ms), start_ms, before_ms, "now", progress))
    return lines


def _moment(at_ms: int, start_ms: int, before_ms: int, what: str, details: str) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(at_ms / 1000)) + f".{at_ms % 1000:03}"
    step = f"(+{spelled_duration(at_ms - before_ms)})" if at_ms != before_ms else ""
    return f"{clock}  {spelled_duration(at_ms - start_ms):>10}  {step:>12}  {what:<13} {spelled(details)}".rstrip()


def _about(request: Row) -> str:
    parts = [request.get("model") or "", request.get("kind") or "", request.get("service_class") or ""]
    parts.append("streamed" if request.get("is_streamed") else "")
    parts.append("with an idempotency key" if request.get("is_idempotent") else "")
    parts.append(f"API key {request['api_key']}" if request.get("api_key") else "")
    parts.append(f"user {request['end_user']}" if request.get("end_user") else "")
    return ", ".join(part for part in parts if part)


def _amounts(request: Row) -> str:
    parts = []
    if (prompt := request.get("num_prompt_tokens")) is not None:
        parts.append(f"prompt {prompt} tokens")
    if done := request.get("num_output_tokens"):
        parts.append(f"output {done} tokens")
        first_ms, end_ms = request.get("first_token_ms"), request.get("ended_ms")
        if done > 1 and first_ms is not None and end_ms is not None and end_ms > first_ms:
            parts.append(f"{(done - 1) * 1000 / (end_ms - first_ms):.1f} a second")
    return ", ".join(parts)

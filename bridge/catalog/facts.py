"""Lifecycle facts: entries of the events stream to typed facts, and a batch of facts to rows of the catalog.

Owns what each kind of fact says about a request, an attempt, a worker and a model. Refuses to know where facts come
from (`bridge.catalog.recorder`) and how rows are kept (`bridge.catalog.catalog`): all of it is a pure function of its
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from bridge.catalog.tables import FIRST_KEPT, TABLES

MAX_TEXT = 4096
"""Longest text taken from a fact; a longer one is cut, because a catalog row must stay small."""
_MAX_INT32 = 2**31 - 1

Value = str | int | None
Row = dict[str, Value]
Rows = dict[str, list[Row]]
"""Table name to its rows. A column that a row does not name is one that this batch has nothing to say about."""


class MalformedFact(ValueError):
    """An entry of the events stream that is not a fact; the message says what is wrong. The caller skips it."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that happened. `request_id`, `worker` and `model` are empty where the kind has none."""

    kind: str
    at_ms: int
    request_id: str = ""
    attempt: int = 0
    worker: str = ""
    model: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def parse_fact(fields: Mapping[bytes, bytes]) -> Fact:
    """One stream entry's fields to a fact. Raises MalformedFact.

    A kind that this version does not know is a fact all the same (it has no rows): a newer process may be writing.
    """
    try:
        texts = {name.decode(): value.decode() for name, value in fields.items()}
    except UnicodeDecodeError as error:
        raise MalformedFact(f"not UTF-8 text: {error}") from error
    fact = Fact(
        kind=texts.get("k", ""),
        at_ms=_number(texts, "t", 2**53),
        request_id=texts.get("id", ""),
        attempt=_number(texts, "a", _MAX_INT32) if texts.get("a") else 0,
        worker=texts.get("w", ""),
        model=texts.get("m", ""),
        details=_details(texts.get("d", "")),
    )
    if not fact.kind:
        raise MalformedFact("no kind")
    for name in ("request_id", "worker", "model"):
        text = getattr(fact, name)
        if len(text) > MAX_TEXT or "\0" in text:
            raise MalformedFact(f"{name}: longer than {MAX_TEXT} characters, or holds a NUL")
    needed = _NEEDS.get(fact.kind, ())
    if missing := [name for name in needed if not getattr(fact, name)]:
        raise MalformedFact(f"{fact.kind} without {', '.join(missing)}")
    return fact


_OF_AN_ATTEMPT = ("request_id", "attempt")
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "submitted": _OF_AN_ATTEMPT,
    "claimed": (*_OF_AN_ATTEMPT, "worker"),
    "first_token": _OF_AN_ATTEMPT,
    "released": _OF_AN_ATTEMPT,
    "lost": _OF_AN_ATTEMPT,
    "reoffered": _OF_AN_ATTEMPT,
    "ended": _OF_AN_ATTEMPT,
    "worker_joined": ("worker", "model"),
    "worker_left": ("worker",),
}
KINDS = frozenset(_NEEDS)


def _number(texts: Mapping[str, str], name: str, largest: int) -> int:
    text = texts.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 18 and int(text) <= largest):
        raise MalformedFact(f"{name}: not a whole number of 0 to {largest}: {text[:40]!r}")
    return int(text)


def _details(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        details = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise MalformedFact(f"d: {error}") from error
    if not isinstance(details, dict):
        # An empty table becomes [] in the JSON of Redis's Lua.
        if details == []:
            return {}
        raise MalformedFact(f"d: not an object: {text[:40]!r}")
    return details


def fold(facts: Iterable[Fact]) -> Rows:
    """A batch of facts, in stream order, to at most one row for each key of each table.

    Folding is idempotent together with the catalog's upsert: a batch written twice changes nothing.
    """
    rows: dict[str, dict[tuple[Value, ...], Row]] = {table: {} for table in TABLES}
    for fact in facts:
        for table, key, columns in _changes(fact):
            row = rows[table].setdefault(tuple(key.values()), dict(key))
            for name, value in columns.items():
                if value is not None and not (name in FIRST_KEPT[table] and name in row):
                    row[name] = value
    return {table: list(by_key.values()) for table, by_key in rows.items()}


_Change = tuple[str, Row, Row]


def _changes(fact: Fact) -> list[_Change]:
    """What one fact says, as (table, key, columns); a column of None says nothing."""
    match fact.kind:
        case "worker_joined" | "worker_left":
            return _worker_changes(fact)
        case kind if kind in KINDS:
            request, attempt = _request_columns(fact), _attempt_columns(fact)
            of_request: Row = {"request_id": fact.request_id}
            return [
                ("requests", of_request, {"updated_ms": fact.at_ms, "model": fact.model or None, **request}),
                ("attempts", {**of_request, "attempt": fact.attempt}, {"updated_ms": fact.at_ms, **attempt}),
            ]
        case _:
            return []


def _request_columns(fact: Fact) -> Row:
    details = fact.details
    match fact.kind:
        case "submitted":
            return {
                "state": "offered",
                "submitted_ms": fact.at_ms,
                "num_attempts": fact.attempt,
                "num_prompt_tokens": _int(details, "prompt_tokens"),
                "max_tokens": _int(details, "max_tokens"),
                "answer_id": _text(details, "answer"),
                "num_choices": _int(details, "choices"),
                "kind": _text(details, "kind"),
                "service_class": _text(details, "class"),
                "api_key": _text(details, "api_key"),
                "end_user": _text(details, "end_user"),
                "is_streamed": _yes(details, "stream"),
                "is_idempotent": _yes(details, "idempotent"),
            }
        case "claimed":
            return {
                "state": "streaming" if _int(details, "next_index") else "claimed",  # goes on where another left
                "claimed_ms": fact.at_ms,
                "worker": fact.worker,
                "fingerprint": _text(details, "fingerprint"),
                "num_attempts": fact.attempt,
            }
        case "first_token":
            return {
                "state": "streaming",
                "first_token_ms": fact.at_ms,
                "num_cached_tokens": _int(details, "cached"),
            }
        case "reoffered":
            return {"state": "offered", "num_attempts": fact.attempt}
        case "ended":
            return {
                "state": _text(details, "state"),
                "reason": _text(details, "reason"),
                "message": _text(details, "message"),
                "ended_ms": fact.at_ms,
                "num_output_tokens": _int(details, "next_index"),
                "num_cached_tokens": _int(details, "cached"),
            }
        case _:
            return {}


def _attempt_columns(fact: Fact) -> Row:
    details = fact.details
    match fact.kind:
        case "submitted" | "reoffered":
            return {"offered_ms": fact.at_ms, "offer_reason": _text(details, "reason")}
        case "claimed":
            return {
                "claimed_ms": fact.at_ms,
                "worker": fact.worker,
                "fingerprint": _text(details, "fingerprint"),
                "first_index": _int(details, "next_index"),
            }
        case "first_token":
            return {
                "first_token_ms": fact.at_ms,
                "worker": fact.worker or None,
                "num_cached_tokens": _int(details, "cached"),
            }
        case "released" | "lost" | "ended":
            return {
                "ended_ms": fact.at_ms,
                "worker": fact.worker or None,
                "outcome": _text(details, "state") if fact.kind == "ended" else fact.kind,
                "reason": _text(details, "reason"),
                "next_index": _int(details, "next_index"),
                "num_cached_tokens": _int(details, "cached"),
            }
        case _:
            return {}


def _worker_changes(fact: Fact) -> list[_Change]:
    key: Row = {"worker": fact.worker}
    details = fact.details
    if fact.kind == "worker_left":
        return [("workers", key, {"left_ms": fact.at_ms, "updated_ms": fact.at_ms})]
    fingerprint = _text(details, "fingerprint")
    what: Row = {"variant": _text(details, "variant"), "max_model_len": _int(details, "max_model_len")}
    worker: Row = {
        "model": fact.model,
        "fingerprint": fingerprint,
        "host": _text(details, "host"),
        "pid": _int(details, "pid"),
        "device": _text(details, "device"),
        "max_num_seqs": _int(details, "max_num_seqs"),
        "kv_cache_tokens": _int(details, "kv_cache_tokens"),
        "started_ms": _int(details, "started_ms"),
        "joined_ms": fact.at_ms,
        "updated_ms": fact.at_ms,
        **what,
    }
    seen: Row = {
        "architecture": _text(details, "architecture"),
        "first_seen_ms": fact.at_ms,
        "updated_ms": fact.at_ms,
        **what,
    }
    return [
        ("workers", key, worker),
        ("models", {"model": fact.model, "fingerprint": fingerprint or ""}, seen),
    ]


def _text(details: Mapping[str, Any], name: str) -> str | None:
    value = details.get(name)
    return value[:MAX_TEXT].replace("\0", "") if isinstance(value, str) and value else None


def _yes(details: Mapping[str, Any], name: str) -> bool:
    """Whoever writes facts leaves out what is no."""
    return details.get(name) in (1, True)


def _int(details: Mapping[str, Any], name: str) -> int | None:
    value = details.get(name)
    return int(value) if isinstance(value, int | float) and abs(value) < 2**53 else None

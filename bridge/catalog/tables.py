"""The catalog's schema, as data: tables, keys, columns, and which columns keep their first value.

Columns that end in `_ms` are epoch milliseconds by the clock of Redis. Adding a column needs nothing else: an
existing file gets it when it is opened. Any other change raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping

from bridge.catalog.minutes import COLUMNS

SCHEMA_VERSION = 1

TABLES: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "requests": (
        ("request_id",),
        {
            "request_id": "VARCHAR",
            "model": "VARCHAR",
            "state": "VARCHAR",  # offered, claimed, streaming, finished, cancelled, failed
            "reason": "VARCHAR",  # of its end: stop, length, disconnect, poison, ...
            "message": "VARCHAR",  # why it failed, for people
            "worker": "VARCHAR",  # the latest that claimed it
            "fingerprint": "VARCHAR",  # of that worker
            "answer_id": "VARCHAR",  # the id that the client has: choices have ids of their own
            "num_choices": "INTEGER",  # of that answer
            "kind": "VARCHAR",  # chat, completion
            "service_class": "VARCHAR",  # priority, default, flex
            "api_key": "VARCHAR",  # its name
            "end_user": "VARCHAR",  # the request's `user`
            "is_streamed": "BOOLEAN",
            "is_idempotent": "BOOLEAN",
            "max_tokens": "BIGINT",
            "num_attempts": "INTEGER",
            "num_prompt_tokens": "INTEGER",
            "num_output_tokens": "INTEGER",
            "num_cached_tokens": "INTEGER",
            "submitted_ms": "BIGINT",
            "claimed_ms": "BIGINT",  # first claim
            "first_token_ms": "BIGINT",
            "ended_ms": "BIGINT",
            "updated_ms": "BIGINT",
        },
    ),
    "attempts": (
        ("request_id", "attempt"),
        {
            "request_id": "VARCHAR",
            "attempt": "INTEGER",
            "worker": "VARCHAR",
            "fingerprint": "VARCHAR",
            "outcome": "VARCHAR",  # released, lost, finished, cancelled, failed; null while it runs
            "offer_reason": "VARCHAR",  # why it was offered again: worker_lost, message_lost, ...
            "reason": "VARCHAR",  # of its outcome
            "first_index": "INTEGER",  # output tokens that existed when it was claimed
            "next_index": "INTEGER",  # output tokens that existed when it ended
            "num_cached_tokens": "INTEGER",
            "offered_ms": "BIGINT",
            "claimed_ms": "BIGINT",
            "first_token_ms": "BIGINT",
            "ended_ms": "BIGINT",
            "updated_ms": "BIGINT",
        },
    ),
    "workers": (
        ("worker",),
        {
            "worker": "VARCHAR",
            "model": "VARCHAR",
            "fingerprint": "VARCHAR",
            "variant": "VARCHAR",
            "host": "VARCHAR",
            "pid": "INTEGER",
            "device": "VARCHAR",
            "max_model_len": "INTEGER",
            "max_num_seqs": "INTEGER",
            "kv_cache_tokens": "BIGINT",
            "started_ms": "BIGINT",
            "joined_ms": "BIGINT",  # latest: a worker that was stopped for a while joins again
            "left_ms": "BIGINT",
            "updated_ms": "BIGINT",
        },
    ),
    "models": (
        ("model", "fingerprint"),
        {
            "model": "VARCHAR",
            "fingerprint": "VARCHAR",
            "architecture": "VARCHAR",
            "variant": "VARCHAR",
            "max_model_len": "INTEGER",
            "first_seen_ms": "BIGINT",
            "updated_ms": "BIGINT",
        },
    ),
}
"""Table name to its key and its columns: what facts are recorded in."""

DERIVED: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {"minutes": (("minute_ms", "model"), COLUMNS)}
"""The same for what is counted from the others."""

FIRST_KEPT: Mapping[str, frozenset[str]] = {
    "requests": frozenset({"submitted_ms", "claimed_ms", "first_token_ms"}),
    # An attempt that was lost, and whose request fails for that reason, stays "lost".
    "attempts": frozenset({"offered_ms", "claimed_ms", "first_token_ms", "ended_ms", "outcome", "reason"}),
    "workers": frozenset(),
    "models": frozenset({"first_seen_ms"}),
}
"""Columns whose first value stands; of every other column the latest does."""

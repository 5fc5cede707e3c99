"""The minutes table: what ended in each minute, by model.

Owns which minutes a batch of facts touches, and the statement that counts such minutes anew from their requests. A
touched minute is noted in the transaction that records its facts, and counted with the next snapshot: so minutes are
exact whatever was killed, and recording a batch twice changes nothing. Requests never un-end: a count that would
shrink means that requests were forgotten to save space, and then the minute stays as it was.

PERF: counting costs 16 ms for 75,000 requests a minute, so it is done for a snapshot, not for every batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MINUTE_MS = 60_000

_SUMS = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_attempts")
_TIMES = {
    "queue": "claimed_ms - submitted_ms",
    "ttft": "first_token_ms - submitted_ms",
    "duration": "ended_ms - submitted_ms",
}

COLUMNS = {
    "minute_ms": "BIGINT",  # its begin
    "model": "VARCHAR",
    "num_requests": "BIGINT",
    "num_finished": "BIGINT",
    "num_cancelled": "BIGINT",
    "num_failed": "BIGINT",
    **dict.fromkeys(_SUMS, "BIGINT"),
    **{
        f"{name}_{what}": "BIGINT"
        for name in _TIMES
        for what in ("count", "sum_ms", "p50_ms", "p95_ms", "max_ms")  # of those that got so far
    },
}


def _refresh() -> str:
    counts = [f"count(*) FILTER (state = '{state}') AS num_{state}" for state in ("finished", "cancelled", "failed")]
    sums = [f"coalesce(sum({name}), 0) AS {name}" for name in _SUMS]
    times = [
        f"count({sql}) AS {name}_count, coalesce(sum({sql}), 0) AS {name}_sum_ms,"
        f" quantile_disc({sql}, 0.5) AS {name}_p50_ms, quantile_disc({sql}, 0.95) AS {name}_p95_ms,"
        f" max({sql}) AS {name}_max_ms"
        for name, sql in _TIMES.items()
    ]
    minute = f"ended_ms - ended_ms % {MINUTE_MS}"
    selected = [f"{minute} AS minute_ms", "coalesce(model, '') AS model", "count(*) AS num_requests"]
    sets = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS if name not in ("minute_ms", "model"))
    return (
        f"INSERT INTO minutes BY NAME SELECT {', '.join([*selected, *counts, *sums, *times])} FROM requests"
        f" WHERE ended_ms >= (SELECT min(minute_ms) FROM minutes_due)"
        f" AND {minute} IN (SELECT minute_ms FROM minutes_due) GROUP BY 1, 2"
        f" ON CONFLICT (minute_ms, model) DO UPDATE SET {sets} WHERE excluded.num_requests >= minutes.num_requests"
    )


CREATE_DUE = "CREATE TABLE IF NOT EXISTS minutes_due (minute_ms BIGINT)"
NOTE_DUE = "INSERT INTO minutes_due SELECT unnest(?::BIGINT[])"
"""Parameter: `touched_by`."""
COUNT_DUE = (_refresh(), "DELETE FROM minutes_due")


def touched_by(rows: Mapping[str, Sequence[Mapping[str, object]]]) -> list[int]:
    """The begins of the minutes in which something of `rows` ended."""
    ends = (row.get("ended_ms") for row in rows.get("requests", ()))
    return sorted({end - end % MINUTE_MS for end in ends if isinstance(end, int)})

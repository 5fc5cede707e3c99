"""The minutes table: what ended in each minute, by model, kept up with every batch of facts.

Owns which minutes a batch touches, and the statement that counts such a minute anew from its requests. So a minute is
exact whatever was killed, and recording a batch twice changes nothing. Requests never un-end: a count that would
shrink means that requests were forgotten to save space, and then the minute stays as it was.
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
        f" WHERE ended_ms BETWEEN ? AND ? AND list_contains(?::BIGINT[], {minute}) GROUP BY 1, 2"
        f" ON CONFLICT (minute_ms, model) DO UPDATE SET {sets} WHERE excluded.num_requests >= minutes.num_requests"
    )


REFRESH = _refresh()
"""Parameters: `touched_by`."""


def touched_by(rows: Mapping[str, Sequence[Mapping[str, object]]]) -> list[object]:
    """The earliest and the latest moment of the minutes in which something of `rows` ended, and their begins.

    Empty when nothing ended.
    """
    ends = (row.get("ended_ms") for row in rows.get("requests", ()))
    begins = sorted({end - end % MINUTE_MS for end in ends if isinstance(end, int)})
    return [begins[0], begins[-1] + MINUTE_MS - 1, begins] if begins else []

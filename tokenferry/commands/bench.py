"""`tokenferry bench`: how fast a server on this machine is, as a table and a plot.

Owns what is run and how it is shown. The load itself, and what its figures mean, is in `tokenferry.load`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from tokenferry.errors import ForPeople
from tokenferry.load import LOOPBACK, Load, Target, first_model, run
from tokenferry.shown import bar, print_json, print_rows

MAX_CONCURRENCY = 1024
WIDTH = 40
COLUMNS = {
    "concurrency": "streams",
    "requests": "requests",
    "wall_s": "seconds",
    "output_tokens_per_s": "tokens/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p95_ms": "p95 ms",
    "itl_p50_ms": "gap p50 ms",
    "itl_p95_ms": "p95 ms",
    "cached_tokens": "cached",
    "errors": "errors",
}

Row = dict[str, Any]
Run = Callable[[Target, str, int, Load], Row]


def bench(options: argparse.Namespace, base_url: str, *, run: Run = run) -> int:
    """The command: 1 when a request failed. Raises ForPeople."""
    url = urlsplit(base_url)
    if url.hostname not in LOOPBACK:
        raise ForPeople(f"--base-url must be on this machine (127.0.0.1 or localhost), not {base_url!r}")
    if any(not 1 <= number <= MAX_CONCURRENCY for number in options.concurrency):
        raise ForPeople(f"--concurrency takes numbers from 1 to {MAX_CONCURRENCY}")
    try:
        model = options.model or first_model(base_url, options.api_key)
    except (OSError, LookupError) as error:
        raise ForPeople(
            f"no server with a model answers at {base_url} ({error}): `tokenferry doctor` helps"
        ) from error
    target = Target(url.hostname, url.port or 80, url.path, model, options.api_key)
    rows = []
    offset = 0
    for concurrency in options.concurrency:
        if not options.json:
            print(f"{model}, {options.kind} prompts, {concurrency} streams ...", file=sys.stderr)
        # Every run has prompts of its own.
        load = Load(options.requests, options.max_tokens, offset=offset)
        rows.append(run(target, options.kind, concurrency, load))
        offset += rows[-1]["requests"]
    if options.json:
        print_json(rows)
    else:
        show(rows)
    return int(any(row["errors"] for row in rows))


def show(rows: Sequence[Row]) -> None:
    """The table, and how the rate grows with the streams."""
    print_rows(list(COLUMNS.values()), [[row[name] for name in COLUMNS] for row in rows])
    print()
    print("\n".join(plot(rows)))
    for row in rows:
        for error in row["first_errors"]:
            print(f"{row['concurrency']} streams: {error}", file=sys.stderr)


def plot(rows: Sequence[Row]) -> list[str]:
    """Tokens a second, a bar for each number of streams."""
    most = max((row["output_tokens_per_s"] for row in rows), default=0) or 1
    return [
        f"{row['concurrency']:>5} streams {bar(row['output_tokens_per_s'] / most, WIDTH)}"
        f" {row['output_tokens_per_s']:,.0f} tokens/s"
        for row in rows
    ]

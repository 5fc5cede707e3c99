"""The load generator of `tokenferry bench` (`tokenferry.load`), for reports.

python -m bench.load --kind short -c 16        one JSON line
python -m bench.load --all                     every kind at 1, 4, 16 and 32 streams, as a table
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import orjson

from tokenferry.load import CONCURRENCY, KINDS, LOOPBACK, Load, Target, first_model, run


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    columns = ["kind", "concurrency", "output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms"]
    columns += ["cached_tokens", "errors", "client_cpu_share"]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row[column]) for column in columns) + " |")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description="Load an OpenAI chat server.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1", help="on this machine only")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--kind", choices=(*KINDS, "prefill"), default="short")
    parser.add_argument("-c", "--concurrency", type=int, default=1, metavar="N", help="streams open at once")
    parser.add_argument("-n", "--requests", type=int, default=0, metavar="N", help="default: N streams, at least 4")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--offset", type=int, default=0, help="number of the first request: another one, other prompts"
    )
    parser.add_argument("--extra", default="{}", help="JSON merged into every request; null takes a field away")
    parser.add_argument("--key", default="", help="API key")
    parser.add_argument("--all", action="store_true", help="every kind at 1, 4, 16 and 32 streams, as a table")
    options = parser.parse_args(arguments)
    if urlsplit(options.base_url).hostname not in LOOPBACK:
        parser.error("--base-url: this program loads servers on this machine only")
    if not 1 <= options.concurrency <= 1024:
        parser.error("--concurrency: 1 to 1024")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    url = urlsplit(options.base_url.rstrip("/"))
    try:
        model = options.model or first_model(options.base_url.rstrip("/"), options.key)
    except OSError as error:
        print(f"{options.base_url}: {error}", file=sys.stderr)
        return 1
    target = Target(url.hostname or "127.0.0.1", url.port or 80, url.path, model, options.key)
    extra = orjson.loads(options.extra)
    load = Load(options.requests, options.max_tokens, options.timeout, options.seed, options.offset, extra)
    if not options.all:
        row = run(target, options.kind, options.concurrency, load)
        print(orjson.dumps(row).decode())
        return 1 if row["errors"] else 0
    rows = []
    for kind in KINDS:
        for concurrency in CONCURRENCY:
            rows.append(run(target, kind, concurrency, load))
            load = replace(load, offset=load.offset + rows[-1]["requests"])
            print(orjson.dumps(rows[-1]).decode(), file=sys.stderr)
    print_table(rows)
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

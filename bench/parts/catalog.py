"""How many facts a second the recorder moves from Redis into DuckDB, what each costs, and what a snapshot costs.

    python -m bench.parts.catalog                    # as fast as it can: 40,000 facts that wait in the stream
    python -m bench.parts.catalog --rate 5000        # does it keep up, and with how much CPU
    python -m bench.parts.catalog --facts 4000000    # a large catalog: what a snapshot of it takes

Runs the embedded Valkey in a temporary folder. A request is four facts: submitted, claimed, first_token, ended.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from redis import Redis

from bridge.catalog.catalog import Catalog
from bridge.catalog.recorder import Recorder
from bridge.duties import RECORD_EVERY_S
from tasks.process.clients import connect
from tasks.protocol import keys
from tokenferry.cell.valkey import Valkey

KINDS = (
    ("submitted", '{"prompt_tokens":64}'),
    ("claimed", '{"next_index":0,"waited_ms":3,"fingerprint":"f"}'),
    ("first_token", '{"cached":32}'),
    ("ended", '{"state":"finished","reason":"stop","next_index":128,"cached":32}'),
)


def write(redis: Redis, first: int, end: int) -> None:
    """Facts `first` to `end`, as the scripts write them."""
    now_ms = time.time_ns() // 1_000_000
    with redis.pipeline(transaction=False) as pipe:
        for n in range(first, end):
            kind, details = KINDS[n % 4]
            fact = {
                "k": kind,
                "id": f"chatcmpl-{n // 4:024x}",
                "a": 1,
                "w": "w1",
                "m": "m",
                "t": now_ms,
                "d": details,
            }
            pipe.xadd(keys.EVENTS, fact)  # type: ignore[arg-type]
        pipe.execute()


def write_at_rate(url: str, num_facts: int, rate: int) -> None:
    redis = connect(url, use="short")
    start = time.monotonic()
    for first in range(0, num_facts, 250):
        time.sleep(max(0.0, start + first / rate - time.monotonic()))
        write(redis, first, min(first + 250, num_facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=int, default=40_000)
    parser.add_argument("--rate", type=int, default=0, help="facts a second that come in; 0: all are there already")
    parser.add_argument("--write-to", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_to:
        write_at_rate(options.write_to, options.facts, options.rate)
        return
    with tempfile.TemporaryDirectory(prefix="tf") as folder, Valkey(Path(folder)) as valkey:
        measure(valkey.url, Path(folder), options.facts, options.rate)


def measure(url: str, folder: Path, num_facts: int, rate: int) -> None:
    redis = connect(url, use="short")
    catalog = Catalog(folder / "catalog")
    recorder = Recorder(redis, catalog, clock_ms=lambda: time.time_ns() // 1_000_000)
    recorder.tick()
    writer = None
    if rate:
        command = [sys.executable, "-m", "bench.parts.catalog", "--write-to", url, "--facts", str(num_facts)]
        writer = subprocess.Popen([*command, "--rate", str(rate)])
    else:
        for first in range(0, num_facts, 10_000):
            write(redis, first, min(first + 10_000, num_facts))
    start, start_cpu = time.monotonic(), time.process_time()
    longest_wait = 0
    while catalog.position.num_recorded < num_facts:
        if not recorder.tick():
            time.sleep(RECORD_EVERY_S if rate else 0.0)
        longest_wait = max(longest_wait, int(redis.xlen(keys.EVENTS)))
    wall_s, cpu_s = time.monotonic() - start, time.process_time() - start_cpu
    if writer is not None:
        writer.wait()
        print(f"most facts that waited: {longest_wait}")
    snapshot_start = time.monotonic()
    catalog.snapshot()
    snapshot_s = time.monotonic() - snapshot_start
    catalog.close()
    size = (folder / "catalog" / "catalog.duckdb").stat().st_size
    print(f"{num_facts} facts, {num_facts // 4} requests: {num_facts / wall_s:,.0f} facts/s")
    print(f"CPU: {cpu_s / num_facts * 1e6:.0f} us a fact, {cpu_s / wall_s:.0%} of one processor")
    print(f"snapshot: {snapshot_s * 1000:.0f} ms; file: {size / 1e6:.1f} MB", end="; ")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()

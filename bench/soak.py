"""`make soak MINUTES=n`: the driver for a long time, the figures of single faults, and a report of it all.

    python -m bench.soak --minutes 10 --report bench/RELIABILITY.md

Everything stays on the loopback address and in a temporary folder, and ends with this process. The exit status is 1
when a promise was broken; the seed that is printed repeats the schedule.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.failover import (
    GREEDY,
    SAMPLED,
    Gaps,
    flood,
    measure_failover,
    measure_neighbours,
    measure_refusals,
    memory_kb,
    percentile,
)
from decode.checkpoint.names import DEFAULT_MODEL, ModelError, resolve
from tasks.process.settings import Settings
from tests.faults.cell import FaultyCell
from tests.faults.driver import Driver, Report
from tests.faults.schedule import KINDS

ROUND_S = 20.0
NUM_TURNS = 5
LINKS = ("web.2", "worker.2", "worker.3", "bridge")
SCRIPTED = {"SCRIPTED_STEP_MS": "10", "MAX_NUM_SEQS": "8", "STREAM_TTL_S": "60"}
REAL = {"NUM_THREADS": "1", "KV_CACHE_TOKENS": "8192", "MAX_NUM_SEQS": "8"}


@dataclass(slots=True)
class Figures:
    """All that the report says."""

    minutes: float
    seed: int
    mixed: Report | None = None
    gaps: list[Gaps] = field(default_factory=list)
    neighbours_read_s: list[float] = field(default_factory=list)
    """The p99 of each turn."""
    neighbours_deaf_s: list[float] = field(default_factory=list)
    flood: dict[str, float] = field(default_factory=dict)
    refusals_s: list[float] = field(default_factory=list)
    memory_kb: list[tuple[str, int, int]] = field(default_factory=list)
    keys_before: tuple[int, int] = (0, 0)
    """Those that never expire, and those that do."""
    keys_after: tuple[int, int] = (0, 0)
    single_loads: list[float] = field(default_factory=list)
    """Load averages after each measurement of single faults, and after each round of mixed ones."""
    loads: list[float] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of mixed faults (default 10)")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kills", type=int, default=12, help="for each way to die (default 12)")
    parser.add_argument("--real-kills", type=int, default=3, help="for each way of sampling (default 3)")
    parser.add_argument("--report", type=Path, default=None, help="write the report here")
    options = parser.parse_args(argv)
    if not 0 < options.minutes <= 600:
        parser.error("--minutes must be more than 0 and at most 600")
    # A SIGTERM unwinds, so that every process is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    figures = Figures(options.minutes, seed)
    try:
        _single_faults(figures, options.kills, options.real_kills)
        _mixed(figures)
    finally:
        text = render(figures)
        print(text)
        if options.report is not None:
            options.report.write_text(text)
    assert figures.mixed is not None
    broken = figures.mixed.broken_kinds.total()
    broken += sum(gaps.num_wrong + gaps.failed.total() for gaps in figures.gaps)
    return 1 if broken or figures.keys_after[0] > figures.keys_before[0] else 0


def _single_faults(figures: Figures, num_kills: int, num_real_kills: int) -> None:
    rng = random.Random(figures.seed)
    if num_kills:
        with tempfile.TemporaryDirectory(prefix="tf-") as folder:
            environ = {**SCRIPTED, "MAX_NUM_BATCHED_TOKENS": "64"}
            with FaultyCell(Path(folder), num_workers=2, environ=environ) as cell:
                for what, whole, before in (
                    ("engine process, in mid-stream", False, False),
                    ("engine process, before the first token", False, True),
                    ("whole worker, in mid-stream", True, False),
                    ("whole worker, before the first token", True, True),
                ):
                    print(f"{num_kills} kills: {what}", flush=True)
                    figures.gaps.append(
                        asyncio.run(
                            measure_failover(cell, what, num_kills, rng, whole=whole, before_first_token=before)
                        )
                    )
                    figures.single_loads.append(os.getloadavg()[0])
                print("clients that never read", flush=True)
                # In turns: one pair differs by more than what is looked for.
                for _ in range(NUM_TURNS):
                    for read, p99s in ((True, figures.neighbours_read_s), (False, figures.neighbours_deaf_s)):
                        p99s.append(percentile(asyncio.run(measure_neighbours(cell, 10, read=read)), 0.99))
                print("a flood", flush=True)
                figures.flood = asyncio.run(flood(cell, 2_000))
                cell.wait_quiet(60)
                print("a full queue", flush=True)
                figures.refusals_s = asyncio.run(measure_refusals(cell, 256, 300))
    if num_real_kills and _has_model():
        with tempfile.TemporaryDirectory(prefix="tf-") as folder:
            with FaultyCell(Path(folder), model=DEFAULT_MODEL, num_workers=2, environ=REAL, start_s=180) as cell:
                for what, fields in (("greedy", GREEDY), ("seeded sampling with a penalty", SAMPLED)):
                    print(f"{num_real_kills} kills, {DEFAULT_MODEL}, {what}", flush=True)
                    title = f"engine process, in mid-stream, {DEFAULT_MODEL}, {what}"
                    figures.gaps.append(
                        asyncio.run(measure_failover(cell, title, num_real_kills, rng, max_tokens=60, fields=fields))
                    )


def _has_model() -> bool:
    try:
        resolve(DEFAULT_MODEL, Settings.from_env(os.environ).cache_dir)
    except ModelError as error:
        print(f"without the real model: {error}", file=sys.stderr)
        return False
    return True


def _mixed(figures: Figures) -> None:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        with FaultyCell(Path(folder), num_workers=3, num_web=2, links=LINKS, environ=SCRIPTED) as cell:
            driver = Driver(cell, figures.seed, every_s=1.5, say=lambda line: print(line, flush=True))
            figures.mixed = driver.report
            asyncio.run(driver.round(5.0))
            figures.keys_before = _num_keys(cell)
            names = [*cell.web_names, "bridge", *cell.worker_names]
            before = _memory(cell, names)
            ends_s = time.monotonic() + figures.minutes * 60
            while time.monotonic() < ends_s:
                asyncio.run(driver.round(min(ROUND_S, max(5.0, ends_s - time.monotonic()))))
                figures.loads.append(os.getloadavg()[0])
            figures.keys_after = _num_keys(cell)
            after = _memory(cell, names)
            figures.memory_kb = [(name, before[name], after[name]) for name in before]


def _memory(cell: FaultyCell, names: list[str]) -> dict[str, int]:
    found = {name: memory_kb(cell.wait_pid_at_work(name)) for name in names}
    assert cell.valkey.process is not None
    return {**found, "Valkey": memory_kb(cell.valkey.process.pid)}


def _num_keys(cell: FaultyCell) -> tuple[int, int]:
    """Keys that never expire and keys that do, in both databases, once those of requests have expired.

    Messages that a killed worker had fetched are dropped a minute after its death (`tasks.worker.consumer`).
    """
    deadline_s = time.monotonic() + 150
    while time.monotonic() < deadline_s and (
        any(cell.redis.scan_iter("tf:{*}:*", count=1000)) or any(key.endswith(".msgs") for key in cell.queue_keys())
    ):
        time.sleep(0.5)
    lifetimes = cell.lifetimes_ms()
    names = sorted(name for name, ms in lifetimes.items() if ms < 0)
    print(f"keys that never expire: {names}", flush=True)
    return len(names), len(lifetimes) - len(names)


# -- the report


def render(figures: Figures) -> str:
    lines = [HEAD.format(minutes=f"{figures.minutes:g}", seed=figures.seed, machine=_machine())]
    for what, loads in (("single", figures.single_loads), ("mixed", figures.loads)):
        if loads:
            lines[0] += f"\nLoad average during the {what} faults: {min(loads):.1f} to {max(loads):.1f}."
    lines += _mixed_part(figures) + _gap_part(figures) + _rest(figures)
    return "\n".join(lines).rstrip() + "\n"


HEAD = """# Reliability: what was done to the server, and what came of it

```sh
make soak MINUTES={minutes} SEED={seed}
```

[`soak.py`](soak.py) wrote this file. Clients ask for answers of the scripted model, of
which every token is known in advance, while processes are killed and frozen and Redis is restarted, stalled and cut
off, at moments drawn from the seed. After each round the text that every client saw, the stream of every request in
Redis and all books of the system are compared with what they have to be. `make test` runs a short round of the same.

Machine: {machine}."""


def _machine() -> str:
    model = "unknown processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*: (.+)", cpuinfo.read_text())):
        model = found.group(1)
    return f"{os.cpu_count()} cores ({model}), {platform.system()}, Python {platform.python_version()}"


def _mixed_part(figures: Figures) -> list[str]:
    report = figures.mixed
    if report is None:
        return []
    broken = report.broken_kinds
    lines = [
        "",
        "## Mixed faults",
        "",
        "Three workers, two web processes, a bridge and Valkey with its append-only file; 16 clients, streamed and"
        " whole answers, stop strings, clients that leave and clients that read slowly; a fault each 1.5 s or so.",
        "",
        "| rounds | requests | tokens at clients | lost | repeated | reordered | hung | wrong ends | left behind |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| {report.num_rounds} | {report.num_requests:,} | {report.num_tokens:,} | {broken['lost']} "
        f"| {broken['repeated']} | {broken['reordered']} | {broken['hung']} | {broken['end']} "
        f"| {broken['leftover']} |",
        "",
        "*lost*: a clean end before the text was complete, or an accepted answer that is not known any more."
        " *repeated*, *reordered*: tokens that came twice, or are not the expected ones. *hung*: no end within 60 s."
        " *wrong ends*: not exactly one terminal entry in Redis, or an error that no fault of that time explains."
        " *left behind*: after a round, slots, blocks, queue entries or readers that belong to nobody.",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {kind.name} | {report.faults[kind.name]} |" for kind in KINDS),
        "",
        "| client | requests |",
        "|---|---|",
        *(f"| {HABITS[habit]} | {report.habits[habit]:,} |" for habit in HABITS),
        "",
        "| what the clients saw | requests |",
        "|---|---|",
        *(f"| {ENDS[end]} | {report.ends[end]:,} |" for end in ENDS),
        "",
        "The errors of these, by code:",
        "",
        "| error | times |",
        "|---|---|",
        *(f"| `{code}` | {count:,} |" for code, count in sorted(report.errors.items())),
    ]
    if report.broken:
        lines += ["", "Broken promises:", "", *(f"- {line}" for line in report.broken)]
    lines += [
        "",
        "The longest silence at the clients of a worker that died or froze during these rounds, other faults at the"
        " same time and busy cores included, in seconds:",
        "",
        "| | streams | p50 | p99 | max |",
        "|---|---|---|---|---|",
        *(_gap_line(how, gaps_s) for how, gaps_s in sorted(report.gaps_s.items())),
    ]
    return lines


HABITS = {
    "plain": "asks once, streamed or not; some leave, some read slowly",
    "resume": "leaves or is cut off, and reads on from its last event at any web process until it has everything",
    "retry": "asks again with the same `Idempotency-Key`",
    "stop": "stops the answer from another connection",
    "background": "asks with `background`, and comes for the answer later",
}
ENDS = {
    "done": "the whole expected answer",
    "error": "its beginning, then an error event",
    "refused": "an error response",
    "left": "(the client left on purpose)",
    "cut": "the connection broke (its web process was killed)",
    "unreached": "nobody listened (its web process was being started)",
    "hung": "nothing within 60 s",
}


def _gap_line(what: str, gaps_s: list[float], extra: str = "") -> str:
    p50, p99 = percentile(gaps_s, 0.5), percentile(gaps_s, 0.99)
    return f"| {what} | {len(gaps_s)}{extra} | {p50:.2f} | {p99:.2f} | {max(gaps_s, default=float('nan')):.2f} |"


def _gap_part(figures: Figures) -> list[str]:
    if not figures.gaps:
        return []
    return [
        "",
        "## Failover",
        "",
        "Two workers, four streams: greedy, sampled with a penalty, two choices, and with a stop string (of the real"
        " model, all as the row says); one worker is killed with SIGKILL, nothing else happens. From the kill to the"
        " next token at the client, in seconds, of every stream that the dead worker had. Each text is compared"
        " with the same request undisturbed. A killed *engine process* is seen by its supervisor, which says so; a"
        " killed *whole worker* is found when its lease of 500 ms runs out. Before the first token the prompt (1,500"
        " tokens, 64 a step of 10 ms) is read again by the next worker, which is part of the figure. *Wrong texts*:"
        " another text, or a clean end before it was complete. *Errors*: answers that ended with an error event.",
        "",
        "| killed | kills | streams | p50 | p99 | max | wrong texts | errors |",
        "|---|---|---|---|---|---|---|---|",
        *(
            _gap_line(f"{gaps.what} | {gaps.num_kills}", gaps.seconds)
            + f" {gaps.num_wrong} | {', '.join(f'{count} {code}' for code, count in gaps.failed.items()) or 0} |"
            for gaps in figures.gaps
        ),
    ]


def _rest(figures: Figures) -> list[str]:
    lines: list[str] = []
    if figures.flood:
        seen = figures.flood
        lines += [
            "",
            "## Overload",
            "",
            f"2,000 requests at once at two workers with 8 slots each and a queue of 256: {seen['finished']:,.0f}"
            f" answered completely (the last one after {seen['finished max s']:.1f} s), {seen['refused']:,.0f}"
            f" refused with 429, {seen['other']:.0f} otherwise. The web process used {seen['server cpu s']:.1f} s of"
            f" processor time for all of it, and grew by {seen['memory kb'] / 1024:.0f} MB. All come at the same"
            " moment and are refused one after the other, so most of the time is waiting for those before:",
            "",
            "| until the 429 | p50 | p99 |",
            "|---|---|---|",
            f"| inside the server, since it read the request's head | {seen['refused inside p50 s'] * 1000:.0f} ms |"
            f" {seen['refused inside p99 s'] * 1000:.0f} ms |",
            "| at the client, which makes 2,000 connections from one process on the same cores, since it began |"
            f" {seen['refused p50 s'] * 1000:.0f} ms | {seen['refused p99 s'] * 1000:.0f} ms |",
        ]
        if figures.refusals_s:
            p50, p99 = (percentile(figures.refusals_s, share) * 1000 for share in (0.5, 0.99))
            lines.append(
                f"| at a client that asks again and again, with a new connection each time, while 256 wait and 16 are"
                f" answered ({len(figures.refusals_s)} refusals) | {p50:.1f} ms | {p99:.1f} ms |"
            )
    if figures.neighbours_read_s:
        read, deaf = map(statistics.median, (figures.neighbours_read_s, figures.neighbours_deaf_s))
        lines += [
            "",
            "## Clients that never read",
            "",
            f"Inter-token time p99 of four streams beside ten others: {read * 1000:.1f} ms while those are read,"
            f" {deaf * 1000:.1f} ms while nobody reads them (medians of {NUM_TURNS} turns): a ratio of"
            f" {deaf / read:.2f}.",
        ]
    if figures.memory_kb:
        lines += [
            "",
            "## Bounded life",
            "",
            "Keys in Redis, once what is kept of requests for STREAM_TTL_S has expired: "
            f"{figures.keys_before[0]} that never expire before the mixed faults and {figures.keys_after[0]} after"
            f" them; {figures.keys_before[1]} and {figures.keys_after[1]} that do (books of dead processes)."
            " Memory in MB, of processes that were started again and again meanwhile:",
            "",
            "| process | before | after |",
            "|---|---|---|",
            *(f"| {name} | {a / 1024:.0f} | {b / 1024:.0f} |" for name, a, b in figures.memory_kb),
        ]
    return lines


if __name__ == "__main__":
    sys.exit(main())

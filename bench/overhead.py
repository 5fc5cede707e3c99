"""What the product costs around an engine that costs nothing: `python -m bench.overhead --help`.

A whole cell of separate processes (Valkey, web, bridge, one worker with the scripted engine), and two figures:

- requests: at a steady rate, open loop (Poisson arrivals, a new connection each), the time from sending a request to
  its first event with text: HTTP in, queue, claim, one engine step without cost, append, read, relay
- Redis: CPU of the Valkey process for each streamed token at many streams, with the step time of a processor and with
  that of a card, less what it uses while the same cell is idle, and the commands that it was given

Owns both loads and what is read from Redis about itself. Refuses to know how anything works inside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import cpu_s, descendants
from tokenferry.cell.group import HOST, Cell
from tokenferry.load import Tally, Target, drive, encode_request, one_answer, percentile_ms

MODEL = "scripted"
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RedisUse:
    """What a Valkey process has done since it started."""

    cpu_s: float
    calls: dict[str, int]
    command_us: dict[str, float]

    def since(self, earlier: RedisUse) -> RedisUse:
        return RedisUse(
            self.cpu_s - earlier.cpu_s,
            {name: count - earlier.calls.get(name, 0) for name, count in self.calls.items()},
            {name: spent - earlier.command_us.get(name, 0.0) for name, spent in self.command_us.items()},
        )


def redis_use(redis: Any) -> RedisUse:
    """CPU of all its threads from /proc (INFO counts it in ticks of 10 ms), commands from INFO commandstats."""
    stats = redis.info("commandstats")
    names = {name: name.removeprefix("cmdstat_") for name in stats}
    return RedisUse(
        cpu_s(int(redis.info("server")["process_id"])),
        {short: int(stats[name]["calls"]) for name, short in names.items()},
        {short: float(stats[name]["usec"]) for name, short in names.items()},
    )


def body_of(number: int, max_tokens: int) -> dict[str, Any]:
    """A small request; another prompt for each number, so that no prefix is found."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{number}: what does the river say to the ferry?"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def arrivals(rate: float, duration_s: float, seed: int) -> list[float]:
    """Times from 0 to `duration_s` at which requests are sent: a Poisson process, the same for the same seed."""
    rng = random.Random(seed)
    times: list[float] = []
    at_s = rng.expovariate(rate)
    while at_s < duration_s:
        times.append(at_s)
        at_s += rng.expovariate(rate)
    return times


async def open_loop(target: Target, times: Sequence[float], first_number: int, max_tokens: int) -> Tally:
    """One request at each of `times`, whatever became of the earlier ones."""
    tally = Tally()
    started_s = time.perf_counter()

    async def one(number: int, at_s: float) -> None:
        request = encode_request(target, body_of(number, max_tokens))
        await asyncio.sleep(max(0.0, started_s + at_s - time.perf_counter()))
        await one_answer(target, request, tally, TIMEOUT_S)

    await asyncio.gather(*(one(first_number + number, at_s) for number, at_s in enumerate(times)))
    return tally


def processes(one: Cell) -> dict[str, list[int]]:
    """The process ids of each part of a cell; ours, the client's, among them."""
    parts = {process.name.partition(".")[0]: descendants(process.popen.pid) for process in one.processes}
    return {**parts, "redis": [int(one.redis.info("server")["process_id"])], "client": [os.getpid()]}  # type: ignore[index]


def cpu_by_part(parts: dict[str, list[int]]) -> dict[str, float]:
    return {name: sum(map(cpu_s, pids)) for name, pids in parts.items()}


def request_overhead(one: Cell, target: Target, rate: float, duration_s: float) -> dict[str, Any]:
    asyncio.run(open_loop(target, arrivals(rate, 2.0, 1), 0, 4))  # the first ones find nothing warm
    times = arrivals(rate, duration_s, 2)
    parts = processes(one)
    before = cpu_by_part(parts)
    tally = asyncio.run(open_loop(target, times, 10_000, 4))
    after = cpu_by_part(parts)
    return {
        "cpu_ms_per_request": {name: round((after[name] - before[name]) * 1000 / len(times), 2) for name in parts},
        "requests_per_s": rate,
        "requests": len(times),
        "p50_ms": percentile_ms(tally.ttfts, 0.5),
        "p90_ms": percentile_ms(tally.ttfts, 0.9),
        "p99_ms": percentile_ms(tally.ttfts, 0.99),
        "worst_ms": percentile_ms(tally.ttfts, 1.0),
        "errors": sum(tally.errors.values()),
        "first_errors": list(tally.errors)[:3],
    }


def redis_per_token(
    target: Target, redis: Any, streams: int, tokens: int, step_ms: float, idle_s: float
) -> dict[str, Any]:
    """The load, then the same cell idle for `idle_s`."""
    requests = [encode_request(target, body_of(20_000 + number, tokens)) for number in range(streams)]
    before, began_s = redis_use(redis), time.monotonic()
    tally = asyncio.run(drive(target, requests, streams, TIMEOUT_S))
    busy, busy_s = redis_use(redis).since(before), time.monotonic() - began_s
    before = redis_use(redis)
    time.sleep(idle_s)
    idle = redis_use(redis).since(before)
    num_tokens = tally.num_output_tokens
    idle_share = idle.cpu_s / idle_s
    own_calls = {name: count - idle.calls.get(name, 0) * busy_s / idle_s for name, count in busy.calls.items()}
    return {
        "streams": streams,
        "step_ms": step_ms,
        "tokens": num_tokens,
        "redis_us_per_token": per_token_us(busy.cpu_s - idle_share * busy_s, num_tokens),
        "redis_us_per_token_with_idle": per_token_us(busy.cpu_s, num_tokens),
        "redis_idle_share": round(idle_share, 4),
        "calls_per_token": {
            name: round(count / num_tokens, 3)
            for name, count in sorted(own_calls.items(), key=lambda item: -item[1])
            if count / max(1, num_tokens) >= 0.002
        },
        "command_us_per_token": {
            name: per_token_us(spent / 1e6, num_tokens)
            for name, spent in sorted(busy.command_us.items(), key=lambda item: -item[1])
            if spent / max(1, num_tokens) >= 0.05
        },
        "errors": sum(tally.errors.values()),
    }


def per_token_us(seconds: float, num_tokens: int) -> float:
    return round(seconds * 1e6 / max(1, num_tokens), 2)


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Requests, and Redis for each step time; each with a cell of its own."""
    with cell(step_ms=0.0) as (one, target):
        requests = request_overhead(one, target, options.rate, options.duration_s)
    redis = []
    for step_ms in options.step_ms:
        with cell(step_ms=step_ms) as (one, target):
            redis.append(redis_per_token(target, one.redis, options.streams, options.tokens, step_ms, options.idle_s))
    return requests, redis


class cell:
    """`with cell(step_ms=20) as (cell, target)`: a scripted cell in a folder of its own."""

    def __init__(self, *, step_ms: float, num_workers: int = 1, **environ: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tokenferry-bench-")
        settings = {"SCRIPTED_STEP_MS": f"{step_ms:g}", "LOG_LEVEL": "warning", "PREFLIGHT_FORCE": "1", **environ}
        self._cell = Cell(Path(self._folder.name), model=MODEL, num_workers=num_workers, environ=settings)

    def __enter__(self) -> tuple[Cell, Target]:
        self._cell.__enter__()
        return self._cell, Target(HOST, self._cell.port, "/v1", MODEL, "")

    def __exit__(self, *error: Any) -> None:
        self._cell.__exit__(*error)
        self._folder.cleanup()


def table(requests: dict[str, Any], redis: Sequence[dict[str, Any]]) -> str:
    cpu = ", ".join(f"{name} {spent:.1f}" for name, spent in requests["cpu_ms_per_request"].items())
    rows = [
        (
            f"request overhead at {requests['requests_per_s']:g} requests/s, median",
            f"{requests['p50_ms']:.1f} ms",
            "5",
        ),
        (f"p90, of {requests['requests']} requests", f"{requests['p90_ms']:.1f} ms", ""),
        ("p99", f"{requests['p99_ms']:.1f} ms", "15"),
        ("the slowest", f"{requests['worst_ms']:.1f} ms", ""),
        ("CPU of one request, ms", cpu, ""),
        *(_redis_row(load) for load in redis),
        ("Redis CPU while the cell is idle", f"{redis[0]['redis_idle_share']:.1%} of a core", ""),
        ("failed requests", str(requests["errors"] + sum(load["errors"] for load in redis)), "0"),
    ]
    lines = ["| what | measured | no more than |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    for load in redis:
        calls = ", ".join(f"{name} {count:g}" for name, count in load["calls_per_token"].items() if count >= 0.01)
        spent = ", ".join(f"{name} {us:g}" for name, us in load["command_us_per_token"].items())
        lines += [
            "",
            f"At {load['step_ms']:g} ms a step, Redis commands a token, those of the idle cell subtracted: {calls}.",
            f"Microseconds of its commands a token (evalsha holds those of the commands inside): {spent}.",
        ]
    return "\n".join(lines)


def _redis_row(load: dict[str, Any]) -> tuple[str, str, str]:
    what = f"Redis CPU a token, {load['streams']} streams, {load['step_ms']:g} ms a step"
    with_idle = f"{load['redis_us_per_token_with_idle']:.1f} with its idle work"
    return what, f"{load['redis_us_per_token']:.1f} us ({with_idle})", "8"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--duration-s", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[20.0, 2.0], help="of the engine, one or several")
    parser.add_argument("--idle-s", type=float, default=10.0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    requests, redis = measure(parse_arguments(sys.argv[1:] if arguments is None else arguments))
    print(json.dumps({"requests": requests, "redis": redis}))
    print(table(requests, redis))
    return 1 if any(figure["errors"] for figure in (requests, *redis)) else 0


if __name__ == "__main__":
    sys.exit(main())

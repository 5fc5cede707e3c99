"""What died lately, and why: left in Redis by whoever saw it, for `top`, `doctor` and the dashboard.

Owns the stream `tf:crashes` and the words for an exit status. A process that never came to serve has no lease and no
fact: this is the only place where it can be seen. Refuses to know what is done about it: the supervisor starts again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from tasks.process.supervisor import EXIT_FATAL
from tasks.protocol import keys

log = logging.getLogger(__name__)

KEPT = 200
LATELY_MS = 600_000
"""How long somebody who looks is told of it."""
TTL_S = 86_400
MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class Crashes:
    """What died lately under one supervisor."""

    process: str
    """What it is: worker, web or bridge."""
    host: str
    supervisor_pid: int
    num_times: int
    last_ms: int
    """By the clock of Redis."""
    reason: str
    """Of the last time."""
    is_over: bool
    """It ended for good: nobody starts it again."""


def reason_of(status: int) -> str:
    """An exit status in words. Negative: the signal that ended the process, as `subprocess` has it."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"killed by {name}" + (": by somebody, or for want of memory" if status == -signal.SIGKILL else "")
    if status == EXIT_FATAL:
        return "one step took longer than STALL_LIMIT_S, or its books were wrong (status 70)"
    return f"ended with status {status}: its last log lines say why"


def report_crash(redis: Redis, process: str, supervisor_pid: int, reason: str, *, is_over: bool = False) -> None:
    """Never in the way: without Redis it is only logged."""
    fields = {
        "process": process,
        "host": socket.gethostname(),
        "pid": str(supervisor_pid),
        "reason": reason[:MAX_REASON],
        "over": "1" if is_over else "0",
    }
    client: Any = redis  # redis-py's reply types fit neither RESP version
    try:
        with client.pipeline(transaction=False) as pipe:
            pipe.xadd(keys.CRASHES, fields, maxlen=KEPT, approximate=False)
            pipe.expire(keys.CRASHES, TTL_S)
            pipe.execute()
    except RedisError as error:
        log.warning("that a %s died (%s) cannot be told to others: %s", process, reason, error)


def report_death(redis: Redis, process: str, status: int) -> None:
    """For supervisors, which start another one now."""
    report_crash(redis, process, os.getpid(), reason_of(status))


def recent_crashes(redis: Redis, now_ms: int) -> tuple[Crashes, ...]:
    """By supervisor, the latest first. Raises redis.exceptions.RedisError."""
    client: Any = redis
    found: dict[tuple[str, str, int], Crashes] = {}
    for entry_id, fields in client.xrevrange(keys.CRASHES, min=str(max(0, now_ms - LATELY_MS)), count=KEPT):
        text = {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
        who = text["process"], text["host"], int(text["pid"])
        known = found.get(who)
        found[who] = Crashes(
            *who,
            num_times=1 if known is None else known.num_times + 1,
            last_ms=int(entry_id.decode().partition("-")[0]) if known is None else known.last_ms,
            reason=text["reason"] if known is None else known.reason,
            is_over=text["over"] == "1" if known is None else known.is_over,
        )
    return tuple(found.values())


def told(crashes: Crashes, now_ms: int) -> str:
    """One line for a person."""
    ago = f"{max(0, now_ms - crashes.last_ms) // 1000} s ago"
    who = f"{crashes.process} on {crashes.host} (supervisor {crashes.supervisor_pid})"
    if crashes.is_over:
        return f"{who} ended for good {ago}: {crashes.reason}"
    if crashes.num_times == 1:
        return f"{who} died {ago} and was started again: {crashes.reason}"
    return f"{who} died {crashes.num_times} times in 10 minutes, last {ago}: {crashes.reason}"

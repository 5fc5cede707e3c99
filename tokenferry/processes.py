"""The lines of the Procfile: what each process does with its environment before its composition root takes over.

Owns what a process manager gets wrong for us (the port numbers that honcho hands out) and the logging format.
Refuses to know what the processes do: `app.main`, `tasks.worker`, `bridge.main` and `tokenferry.valkey` do.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping

from tasks.settings import BridgeSettings, WebSettings, WorkerSettings, data_dir
from tokenferry.valkey import keep_running

HONCHO_PORT = 5000
"""What honcho takes as the base port when nobody said one. We read it as: not set."""
DEFAULT_PORT = 8080
BASE_PORT = "TOKENFERRY_BASE_PORT"
"""Set by `tokenferry serve`, which knows what the person asked for, whatever a process manager makes of PORT."""


def web() -> int:
    environ = web_environ(os.environ)
    settings = WebSettings.from_env(environ)
    log_to_stderr(settings.log_level)
    from app.main import run

    run(settings)
    return 0


def worker() -> int:
    settings = WorkerSettings.from_env(os.environ)
    log_to_stderr(settings.log_level)
    from tasks.worker import main

    return int(main() or 0)


def bridge() -> int:
    settings = BridgeSettings.from_env(os.environ)
    log_to_stderr(settings.log_level)
    from bridge.main import run

    run(settings)
    return 0


def redis() -> int:
    """The embedded Valkey, or nothing when REDIS_URL names another server (but stay: honcho ends with its first)."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.set())
    if os.environ.get("REDIS_URL", "").strip():
        _say("REDIS_URL is set: the embedded Valkey is not needed")
        stop.wait()
        return 0
    keep_running(data_dir(os.environ), stop, _say)
    return 0


def web_environ(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with the port that this web process should take.

    honcho gives the first process of a type the base port and the next ones the numbers after it, but its base is
    5000 when nobody chose one, where ours is 8080.
    """
    name, _, ordinal = environ.get("HONCHO_PROCESS_NAME", "").rpartition(".")
    if not name or not ordinal.isdigit():
        return environ
    number = int(ordinal) - 1
    if (base := environ.get(BASE_PORT, "")).isdigit():
        return {**environ, "PORT": str(int(base) + number)}
    if environ.get("PORT") == str(HONCHO_PORT + number):
        return {**environ, "PORT": str(DEFAULT_PORT + number)}
    return environ


def log_to_stderr(level: str) -> None:
    """One event a line. A process manager adds its own clock, so ours stays out under one."""
    under_manager = "HONCHO_PROCESS_NAME" in os.environ
    clock = "" if under_manager else "%(asctime)s "
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format=f"{clock}%(levelname)s %(name)s %(message)s", force=True
    )


def _say(line: str) -> None:
    print(line, flush=True)

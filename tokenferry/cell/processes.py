"""The lines of the Procfile: what each process does with its environment before its composition root takes over.

Owns what a process manager gets wrong for us: the port numbers that honcho hands out, and that it ends everything
when one process dies. What the processes do is in `app.main`, `tasks.worker`, `bridge.main` and
`tokenferry.cell.valkey`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from decode.checkpoint.names import ModelError
from decode.errors import DecodeError
from tasks.process.logs import log_to_stderr
from tasks.process.settings import BridgeSettings, Settings, SettingsError, WebSettings, WorkerSettings
from tasks.process.supervisor import EXIT_CANNOT_SERVE, Child, Supervisor, end_with, run_until_signal
from tasks.worker.__main__ import report_to
from tokenferry.cell.valkey import keep_running
from tokenferry.errors import ForPeople

log = logging.getLogger(__name__)

HONCHO_PORT = 5000
"""What honcho takes as the base port when nobody said one. We read it as: not set."""
DEFAULT_PORT = 8080
CHILD_OF = "TOKENFERRY_CHILD_OF"
"""Set for a supervised process: the process id of its supervisor."""


def web() -> int:
    """Raises SettingsError."""
    settings = WebSettings.from_env(web_environ(os.environ))

    def run() -> None:
        from app.main import run

        run(settings)

    return supervised("web", settings, run)


def worker() -> int:
    settings = WorkerSettings.from_env(os.environ)
    log_to_stderr(settings.log_level, settings.log_format, os.environ)
    from tasks.worker.__main__ import main

    return int(main() or 0)


def bridge() -> int:
    """Raises SettingsError."""
    settings = BridgeSettings.from_env(os.environ)

    def run() -> None:
        from bridge.main import run

        run(settings)

    return supervised("bridge", settings, run)


def redis() -> int:
    """The embedded Valkey, or nothing when REDIS_URL names another server (but stay: honcho ends with its first)."""
    settings = Settings.from_env(os.environ)
    log_to_stderr(settings.log_level, settings.log_format, os.environ)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.set())
    run_redis(settings.data_dir, os.environ, stop)
    return 0


def run_redis(data_dir: Path, environ: Mapping[str, str], stop: threading.Event) -> None:
    """Until `stop`. Raises ValkeyError."""
    if environ.get("REDIS_URL", "").strip():
        log.info("REDIS_URL is set: the embedded Valkey is not needed")
        stop.wait()
    else:
        keep_running(data_dir, stop, log.info)


def supervised(command: str, settings: Settings, run: Callable[[], None]) -> int:
    """Keep a child alive that runs the same command, or, in that child, `run`. Returns the exit status.

    honcho ends everything as soon as one of its processes ends; so the processes that it sees only supervise, and a
    crash or a `kill -9` of one that works is over in a second.
    """
    log_to_stderr(settings.log_level, settings.log_format, os.environ)
    if (parent := os.environ.get(CHILD_OF, "")) == str(os.getppid()):
        end_with(int(parent))
        return _work(run)
    environ = {**os.environ, CHILD_OF: str(os.getpid())}
    return run_until_signal(supervisor_of(command, settings.redis_url, partial(subprocess.Popen, env=environ)))


def supervisor_of(command: str, redis_url: str, spawn: Callable[[list[str]], Child]) -> Supervisor:
    """Keeps `command` running. `spawn` starts it, with `CHILD_OF` in its environment."""
    return Supervisor(
        lambda name: spawn([sys.executable, "-m", "tokenferry.cli", command]),
        new_id=lambda: command,
        report=report_to(redis_url, command),
    )


def _work(run: Callable[[], None]) -> int:
    """What would fail again is told, and ends the supervisor too."""
    try:
        run()
    except (SettingsError, ModelError, DecodeError, ForPeople, SystemExit) as error:
        print(f"tokenferry: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_SERVE
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
    if environ.get("PORT") == str(HONCHO_PORT + number):
        return {**environ, "PORT": str(DEFAULT_PORT + number)}
    return environ

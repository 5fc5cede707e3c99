"""The lines of the Procfile: what each process does with its environment before its composition root takes over.

Owns what a process manager gets wrong for us (the port numbers that honcho hands out, and that it ends everything
when one process dies).
Refuses to know what the processes do: `app.main`, `tasks.worker`, `bridge.main` and `tokenferry.cell.valkey` do.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from decode.checkpoint.names import ModelError
from decode.errors import DecodeError
from tasks.process.clients import connect
from tasks.process.crashes import report_death
from tasks.process.logs import log_to_stderr
from tasks.process.settings import BridgeSettings, Settings, SettingsError, WebSettings, WorkerSettings
from tasks.process.supervisor import EXIT_CANNOT_SERVE, Supervisor
from tokenferry.cell.valkey import keep_running, stop_with_parent
from tokenferry.errors import ForPeople

log = logging.getLogger(__name__)

HONCHO_PORT = 5000
"""What honcho takes as the base port when nobody said one. We read it as: not set."""
DEFAULT_PORT = 8080
CHILD_OF = "TOKENFERRY_CHILD_OF"
"""Set for a supervised process: the process id of its supervisor."""
BASE_PORT = "TOKENFERRY_BASE_PORT"
"""Set by `tokenferry serve`, which knows what the person asked for, whatever a process manager makes of PORT."""


def web() -> int:
    """Raises SettingsError."""
    settings = WebSettings.from_env(web_environ(os.environ))
    log_to_stderr(settings.log_level, settings.log_format, os.environ)

    def run() -> None:
        from app.main import run

        run(settings)

    return supervised("web", run)


def worker() -> int:
    settings = WorkerSettings.from_env(os.environ)
    log_to_stderr(settings.log_level, settings.log_format, os.environ)
    from tasks.worker.__main__ import main

    return int(main() or 0)


def bridge() -> int:
    """Raises SettingsError."""
    settings = BridgeSettings.from_env(os.environ)
    log_to_stderr(settings.log_level, settings.log_format, os.environ)

    def run() -> None:
        from bridge.main import run

        run(settings)

    return supervised("bridge", run)


def redis() -> int:
    """The embedded Valkey, or nothing when REDIS_URL names another server (but stay: honcho ends with its first)."""
    settings = Settings.from_env(os.environ)
    log_to_stderr(settings.log_level, settings.log_format, os.environ)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.set())
    if os.environ.get("REDIS_URL", "").strip():
        log.info("REDIS_URL is set: the embedded Valkey is not needed")
        stop.wait()
        return 0
    keep_running(settings.data_dir, stop, log.info)
    return 0


def supervised(command: str, run: Callable[[], None]) -> int:
    """Keep a child alive that runs the same command, or, in that child, `run`. Returns the exit status.

    honcho ends everything as soon as one of its processes ends; so the processes that it sees only supervise, and a
    crash or a `kill -9` of one that works is over in a second.
    """
    if os.environ.get(CHILD_OF) == str(os.getppid()):
        return _work(run)

    def spawn(name: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, CHILD_OF: str(os.getpid())}
        child = [sys.executable, "-m", "tokenferry.cli", command]
        return subprocess.Popen(child, env=environ, preexec_fn=stop_with_parent)

    redis = connect(Settings.from_env(os.environ).redis_url, use="short", max_connections=1)
    supervisor = Supervisor(
        spawn, lambda name: None, new_id=lambda: command, report=lambda status: report_death(redis, command, status)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: supervisor.stop())
    return supervisor.run()


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
    if (base := environ.get(BASE_PORT, "")).isdigit():
        return {**environ, "PORT": str(int(base) + number)}
    if environ.get("PORT") == str(HONCHO_PORT + number):
        return {**environ, "PORT": str(DEFAULT_PORT + number)}
    return environ

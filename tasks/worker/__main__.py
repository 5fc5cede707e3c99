"""The worker process: a supervisor, and under it the engine process that does the work.

Composition root: reads settings, builds clients, handles signals. `python -m tasks.worker` supervises
`python -m tasks.worker --engine <worker id> <pid of the supervisor>`. The one-process composition uses
`tasks.worker.assembly` instead.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from tasks.process.logs import log_to_stderr
from tasks.process.memory import settle
from tasks.process.settings import SettingsError, WorkerSettings
from tasks.process.supervisor import (
    EXIT_CANNOT_SERVE,
    EXIT_FATAL,
    Child,
    Supervisor,
    end_with,
    new_name,
    run_until_signal,
)
from tasks.worker.loading import CANNOT_SERVE, load_for, model_name

log = logging.getLogger(__name__)

EXIT_AFTER_S = 3.8
"""A drain that takes longer than this is cut off: the watchdog re-offers what is left."""
EXIT_CUT_OFF = 75
"""Unlike 0: the lease is still there, and the supervisor ends it."""


def main(argv: Sequence[str] = ()) -> int:
    """Returns the exit status."""
    try:
        settings = WorkerSettings.from_env(os.environ)
    except SettingsError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_CANNOT_SERVE
    if not logging.getLogger().handlers:  # our caller may have set logging up
        log_to_stderr(settings.log_level, settings.log_format, os.environ)
    if not argv:
        prepare_for_a_death()
        return run_until_signal(supervisor_of(settings, subprocess.Popen))
    worker, supervisor_pid = argv[1], int(argv[2])
    return run_engine(settings, worker, supervisor_pid)


def prepare_for_a_death() -> None:
    """Imports what a death needs: 0.2 s that requests would wait for. 14 MB: only where another worker goes on."""
    importlib.import_module("tasks.process.crashes")
    importlib.import_module("tasks.protocol.record")


def report_to(redis_url: str, process: str) -> Callable[[int], None]:
    """What tells others that a supervised `process` has ended with a status that nobody asked for."""

    def report(status: int) -> None:
        from tasks.process.clients import connect
        from tasks.process.crashes import report_death

        with connect(redis_url, use="short") as redis:
            report_death(redis, process, status)

    return report


def supervisor_of(settings: WorkerSettings, spawn: Callable[[list[str]], Child]) -> Supervisor:
    """Keeps one engine process running. `spawn` starts a command. Modules are imported when there is a death."""

    def declare_dead(worker: str) -> None:
        from redis.exceptions import RedisError

        from tasks.process.clients import connect
        from tasks.protocol.record import RequestRecords

        try:
            with connect(settings.redis_url, use="short") as redis:
                RequestRecords(redis).expire_lease(worker, model_name(settings))
        except RedisError as error:
            log.warning("%s is dead, its lease has to run out by itself: %s", worker, error)

    return Supervisor(
        lambda worker: spawn([sys.executable, "-m", "tasks.worker", "--engine", worker, str(os.getpid())]),
        new_id=new_name,
        declare_dead=declare_dead,
        report=report_to(settings.redis_url, "worker"),
    )


def run_engine(settings: WorkerSettings, worker: str, supervisor_pid: int) -> int:
    """Load the engine and serve until SIGTERM. Until it serves, SIGTERM and SIGINT simply end the process."""
    # Not at the top: a process that only supervises does without these.
    from tasks.process.clients import connect
    from tasks.process.crashes import report_crash
    from tasks.process.tracing import open_tracer
    from tasks.worker.assembly import describe_worker, start_worker

    end_with(supervisor_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        tracer = open_tracer(os.environ, "worker", worker)
        engine = load_for(settings, os.environ)
    except (*CANNOT_SERVE, SettingsError) as error:
        log.error("cannot serve: %s", error)
        redis = connect(settings.redis_url, use="short")
        report_crash(redis, "worker", supervisor_pid, f"cannot serve: {error}", is_over=True)
        return EXIT_CANNOT_SERVE
    settle()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopping.set())
    running = start_worker(
        engine,
        describe_worker(
            engine,
            model=model_name(settings),
            device=settings.device,
            worker=worker,
        ),
        redis=connect(settings.redis_url, use="short"),
        blocking=connect(settings.redis_url, use="blocking", max_connections=2),
        queue=connect(settings.redis_url, use="queue"),
        heartbeat_ms=settings.heartbeat_ms,
        lease_ms=settings.lease_ms,
        stall_limit_s=settings.stall_limit_s,
        stream_ttl_s=settings.stream_ttl_s,
        on_fatal=_exit_fatal,
        tracer=tracer,
    )
    stopping.wait()
    cutter = threading.Timer(EXIT_AFTER_S, os._exit, (EXIT_CUT_OFF,))
    cutter.daemon = True
    cutter.start()
    running.stop()
    return 0


def _exit_fatal(message: str) -> None:
    """End at once, without unwinding: a thread may hang in the engine for ever."""
    log.critical("ending this process: %s", message)
    logging.shutdown()
    os._exit(EXIT_FATAL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

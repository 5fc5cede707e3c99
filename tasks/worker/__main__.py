"""The worker process: a supervisor, and under it the engine process that does the work.

Composition root: reads settings, builds clients, handles signals. `python -m tasks.worker` supervises
`python -m tasks.worker --engine <worker id> <pid of the supervisor>`. The one-process composition uses
`tasks.worker.assembly` instead.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from redis.exceptions import RedisError

from tasks.process.clients import connect
from tasks.process.crashes import report_crash, report_death
from tasks.process.logs import log_to_stderr
from tasks.process.settings import SettingsError, WorkerSettings
from tasks.process.supervisor import EXIT_CANNOT_SERVE, EXIT_FATAL, Child, Supervisor
from tasks.process.tracing import open_tracer
from tasks.protocol.record import RequestRecords
from tasks.worker.assembly import RunningWorker, describe_worker, new_worker_id, start_worker
from tasks.worker.loading import CANNOT_SERVE, load_for, model_name

log = logging.getLogger(__name__)

EXIT_AFTER_S = 3.8
"""A drain that takes longer than this is cut off: the watchdog re-offers what is left."""

__all__ = ["RunningWorker", "describe_worker", "main", "run_engine", "start_worker", "supervise"]


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
        return supervise(settings)
    worker, supervisor_pid = argv[1], int(argv[2])
    return run_engine(settings, worker, supervisor_pid)


def supervise(settings: WorkerSettings) -> int:
    """Keep one engine process running until SIGTERM or SIGINT."""
    redis = connect(settings.redis_url, use="short", max_connections=2)
    records = RequestRecords(redis)
    model = model_name(settings)

    def spawn(worker: str) -> Child:
        command = [sys.executable, "-m", "tasks.worker", "--engine", worker, str(os.getpid())]
        return subprocess.Popen(command)

    def declare_dead(worker: str) -> None:
        try:
            records.expire_lease(worker, model)
        except RedisError as error:
            log.warning("%s is dead, its lease has to run out by itself: %s", worker, error)

    supervisor = Supervisor(
        spawn, declare_dead, new_id=new_worker_id, report=lambda status: report_death(redis, "worker", status)
    )

    def on_signal(number: int, frame: FrameType | None) -> None:
        supervisor.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return supervisor.run()


def run_engine(settings: WorkerSettings, worker: str, supervisor_pid: int) -> int:
    """Load the engine and serve until SIGTERM. Until it serves, SIGTERM and SIGINT simply end the process."""
    _die_with(supervisor_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        tracer = open_tracer(os.environ, "worker", worker)
        engine = load_for(settings, os.environ)
    except (*CANNOT_SERVE, SettingsError) as error:
        log.error("cannot serve: %s", error)
        redis = connect(settings.redis_url, use="short")
        report_crash(redis, "worker", supervisor_pid, f"cannot serve: {error}", is_over=True)
        return EXIT_CANNOT_SERVE
    # What is there now stays: looking at it again would cost a step 20 ms now and then.
    gc.collect()
    gc.freeze()
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
    cutter = threading.Timer(EXIT_AFTER_S, os._exit, (0,))
    cutter.daemon = True
    cutter.start()
    running.stop()
    return 0


def _exit_fatal(message: str) -> None:
    """End at once, without unwinding: a thread may hang in the engine for ever."""
    log.critical("ending this process: %s", message)
    logging.shutdown()
    os._exit(EXIT_FATAL)


def _die_with(parent_pid: int) -> None:
    """Have the kernel send us SIGTERM when the supervisor dies, however it does (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

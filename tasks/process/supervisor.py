"""The supervisor: keeps one engine process alive, and makes its death known at once.

Owns the restarts and the passing on of signals. Refuses to know what the child does, except that `EXIT_CANNOT_SERVE`
means that starting it again would not help.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tasks.process.crashes import EXIT_CANNOT_SERVE, EXIT_FATAL

log = logging.getLogger(__name__)

__all__ = ["EXIT_CANNOT_SERVE", "EXIT_FATAL", "Child", "Supervisor"]

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
LONG_LIFE_S = 30.0
"""A child that lived this long starts again after the first pause."""
KILL_AFTER_S = 4.3


class Child(Protocol):
    """What the supervisor needs of `subprocess.Popen`."""

    def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Supervisor:
    """`run` is the main thread's; `stop` is for its signal handlers."""

    def __init__(
        self,
        spawn: Callable[[str], Child],
        declare_dead: Callable[[str], None],
        *,
        new_id: Callable[[], str],
        report: Callable[[int], None] = lambda status: None,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], bool] | None = None,
        kill_after_s: float = KILL_AFTER_S,
    ) -> None:
        """`spawn` starts the worker of that id; `declare_dead` ends the lease that it may have left behind; `report`
        tells others of an exit status that nobody asked for.

        `pause` returns True when it was cut short by `stop`.
        """
        self._spawn = spawn
        self._declare_dead = declare_dead
        self._new_id = new_id
        self._report = report
        self._monotonic = monotonic
        self._kill_after_s = kill_after_s
        self._stopping = threading.Event()
        self._pause = pause or self._stopping.wait
        self._child: Child | None = None
        self._killer: threading.Timer | None = None

    def run(self) -> int:
        """Until `stop`, or until the child says that it cannot serve. Returns the exit status."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            worker, started_s = self._new_id(), self._monotonic()
            status = self._run_child(worker)
            self._declare_dead(worker)
            if self._stopping.is_set():
                return 0
            if status == EXIT_CANNOT_SERVE:
                return status
            if self._monotonic() - started_s >= LONG_LIFE_S:
                pause_s = FIRST_PAUSE_S
            log.error("%s ended with status %d, starting another in %.1f s", worker, status, pause_s)
            self._report(status)
            if self._pause(pause_s):
                return 0
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return 0

    def stop(self) -> None:
        """End the child, and do not start another. The first call counts, later ones change nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._child is not None:
            self._end(self._child)

    def _run_child(self, worker: str) -> int:
        child = self._child = self._spawn(worker)
        if self._stopping.is_set():  # while it was being spawned, when there was nothing to end yet
            self._end(child)
        status = child.wait()
        self._child = None
        if self._killer is not None:
            self._killer.cancel()
        return status

    def _end(self, child: Child) -> None:
        child.terminate()
        self._killer = threading.Timer(self._kill_after_s, child.kill)
        self._killer.daemon = True
        self._killer.start()

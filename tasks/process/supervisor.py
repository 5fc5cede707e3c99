"""The supervisor: keeps one process alive, and makes its death known at once.

Owns the restarts, the passing on of signals, and that a child ends with its parent. The exit status
`EXIT_CANNOT_SERVE` means that starting the child again would not help. Imports nothing that is large: there is a
process for each supervisor under a process manager, and all that it does is wait.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol
from uuid import uuid4

log = logging.getLogger(__name__)

EXIT_CANNOT_SERVE = 78
EXIT_FATAL = 70
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
    """`run` blocks a thread; `stop` is for signal handlers and other threads."""

    def __init__(
        self,
        spawn: Callable[[str], Child],
        *,
        new_id: Callable[[], str],
        declare_dead: Callable[[str], None] = lambda name: None,
        report: Callable[[int], None] = lambda status: None,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], bool] | None = None,
        kill_after_s: float = KILL_AFTER_S,
    ) -> None:
        """`spawn` starts a child of that name; `declare_dead` ends the lease that a worker may have left behind;
        `report` tells others of an exit status that nobody asked for.

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
            name, started_s = self._new_id(), self._monotonic()
            status = self._run_child(name)
            if status != 0:  # otherwise it has left by itself
                self._declare_dead(name)
            if self._stopping.is_set():
                return 0
            if status == EXIT_CANNOT_SERVE:
                return status
            if self._monotonic() - started_s >= LONG_LIFE_S:
                pause_s = FIRST_PAUSE_S
            log.error("%s ended with status %d, starting another in %.1f s", name, status, pause_s)
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

    def _run_child(self, name: str) -> int:
        child = self._child = self._spawn(name)
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


def run_until_signal(supervisor: Supervisor) -> int:
    """For the main thread: SIGTERM and SIGINT stop the supervisor. Returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: supervisor.stop())
    return supervisor.run()


def new_name() -> str:
    """Of a process: no other has it, on this machine or elsewhere."""
    return f"{socket.gethostname()}-{uuid4().hex[:8]}"


def end_with_parent() -> None:
    """In a child: ask the kernel for SIGTERM when the thread that started us ends (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def end_with(parent_pid: int) -> None:
    """As `end_with_parent`; a parent that has died before ends us at once."""
    end_with_parent()
    if os.getppid() != parent_pid:
        os._exit(0)

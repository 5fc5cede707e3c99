"""What `tokenferry serve` runs: Valkey, web, workers and bridge as children of one process, which supervises them.

Owns the threads that wait for the children, the lines that they write, and the end of all. How a child is started
again is in `tasks.process.supervisor`, what it does in `tokenferry.cell.processes`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import IO, TextIO

from tasks.process.logs import PROCESS_NAME
from tasks.process.supervisor import EXIT_CANNOT_SERVE, Child
from tasks.worker.__main__ import prepare_for_a_death
from tasks.worker.__main__ import supervisor_of as supervisor_of_worker
from tokenferry.cell.plan import Plan
from tokenferry.cell.processes import CHILD_OF, run_redis, supervisor_of
from tokenferry.cell.valkey import ValkeyError

COLOURS = (36, 33, 35, 32, 34)
"""Of the names before the lines on a terminal; ANSI."""


class Output:
    """The lines of the children, each after the name of its process, on a stream that may be closed meanwhile."""

    def __init__(self, stream: TextIO, names: list[str], *, has_prefix: bool) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        width = max(map(len, names))
        self._prefixes = {name: f"{name:{width}} | " if has_prefix else "" for name in names}
        if has_prefix and stream.isatty():
            for number, name in enumerate(names):
                colour = COLOURS[number % len(COLOURS)]
                self._prefixes[name] = f"\x1b[{colour}m{self._prefixes[name]}\x1b[0m"

    def copy(self, name: str, lines: IO[bytes]) -> None:
        """Until the child closes its end. Always read to the end: a full pipe would stop the child."""
        with lines:
            for line in lines:
                # Nobody reads any more, and that is no reason to stop serving.
                with self._lock, contextlib.suppress(OSError, ValueError):
                    self._stream.write(self._prefixes[name] + line.decode(errors="replace"))
                    self._stream.flush()


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    run: Callable[[], int]
    stop: Callable[[], None]


class Served:
    """`run` blocks the main thread; `stop` is for its signal handlers."""

    def __init__(self, plan: Plan, environ: Mapping[str, str], num_web: int, stream: TextIO) -> None:
        self._plan = plan
        self._environ = {
            # Our name under a process manager is not our children's: they would read its base port into PORT.
            **{name: value for name, value in environ.items() if name != "HONCHO_PROCESS_NAME"},
            "NUM_THREADS": str(plan.num_threads),
            "PYTHONUNBUFFERED": "1",
            CHILD_OF: str(os.getpid()),
        }
        webs = [f"web.{number}" for number in range(1, num_web + 1)]
        workers = [f"worker.{number}" for number in range(1, plan.num_workers + 1)]
        self._output = Output(stream, [*webs, *workers, "bridge"], has_prefix=plan.web.log_format == "text")
        self._ended: SimpleQueue[int] = SimpleQueue()
        url = plan.web.redis_url
        if plan.num_workers > 1:
            prepare_for_a_death()
        self._parts = [self._redis_part()]
        for number, name in enumerate(webs):
            port = {"PORT": str(plan.web.port + number)}
            supervisor = supervisor_of("web", url, partial(self._spawn, name, port))
            self._parts.append(Part(name, supervisor.run, supervisor.stop))
        for name in workers:
            supervisor = supervisor_of_worker(plan.worker, partial(self._spawn, name, {}))
            self._parts.append(Part(name, supervisor.run, supervisor.stop))
        supervisor = supervisor_of("bridge", url, partial(self._spawn, "bridge", {}))
        self._parts.append(Part("bridge", supervisor.run, supervisor.stop))

    def run(self) -> int:
        """Until `stop`, or until a part ends by itself. Returns the exit status."""
        threads = [threading.Thread(target=self._run_part, args=(part,), name=part.name) for part in self._parts]
        for thread in threads:
            thread.start()
        status = self._ended.get()
        for part in self._parts:
            part.stop()
        for thread in threads:
            thread.join()
        return status

    def stop(self) -> None:
        self._ended.put(0)

    def _run_part(self, part: Part) -> None:
        status = 1
        try:
            status = part.run()
        finally:
            self._ended.put(status)

    def _redis_part(self) -> Part:
        stop = threading.Event()

        def run() -> int:
            try:
                run_redis(self._plan.data_dir, self._environ, stop)
            except ValkeyError as error:
                print(f"tokenferry: {error}", file=sys.stderr, flush=True)
                return EXIT_CANNOT_SERVE
            return 0

        return Part("redis", run, stop.set)

    def _spawn(self, name: str, environ: Mapping[str, str], command: list[str]) -> Child:
        """A session of its own: a Ctrl-C reaches us alone, and we stop each child once."""
        child = subprocess.Popen(
            command,
            env={**self._environ, PROCESS_NAME: name, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert child.stdout is not None
        # Not a loop of ours: it ends with the output of its child.
        threading.Thread(target=self._output.copy, args=(name, child.stdout), daemon=True).start()
        return child

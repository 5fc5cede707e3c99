"""A whole cell as child processes over one folder: Valkey, web, bridge and workers, each with a log in the folder.

Owns starting them, asking whether they are there, and always ending them. Refuses to know who watches: the demo, the
end-to-end tests and the fault driver do. People's servers are run by `tokenferry.cell.served` instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from redis import Redis

from tasks.process.clients import connect
from tasks.process.supervisor import end_with_parent
from tasks.protocol.contract import WorkerInfo
from tasks.protocol.record import RequestRecords
from tokenferry.cell.plan import is_ready
from tokenferry.cell.valkey import Valkey
from tokenferry.errors import ForPeople

HOST = "127.0.0.1"
END_S = 8.0
"""How long a process may take to end after SIGTERM; all of ours promise less than 4 s."""


class Process:
    """One line of the Procfile, in a session of its own, as a process manager would run it."""

    def __init__(self, name: str, command: str, environ: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tokenferry.cli", command],
                env=dict(environ),
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def kill(self) -> None:
        """SIGKILL to the group: supervisor and what it supervises are gone at once, as with their machine."""
        self.signal_group(signal.SIGKILL)
        self.popen.wait()

    def end(self) -> int:
        """SIGTERM to the group, SIGKILL when that takes too long. Returns the exit status."""
        self.signal_group(signal.SIGCONT)
        self.signal_group(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(END_S)
        self.signal_group(signal.SIGKILL)
        return self.popen.wait()


class Cell:
    """`with Cell(folder, model="scripted", num_workers=2) as cell: cell.base_url`. Ready inside the block."""

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        num_workers: int = 1,
        num_web: int = 1,
        environ: Mapping[str, str] | None = None,
        start_s: float = 60.0,
    ) -> None:
        """`environ` is added to ours. Nothing is started yet."""
        self.folder = folder
        self.model = model
        self.num_workers = num_workers
        self.start_s = start_s
        self.ports = [free_port() for _ in range(num_web)]
        """One for each web process, in the order of `web_names`."""
        self.valkey = Valkey(folder)
        self.environ = {
            **{name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "HONCHO_PROCESS_NAME")},
            "HOST": HOST,
            "DATA_DIR": str(folder),
            "MODEL": model,
            **(environ or {}),
        }
        self.processes: list[Process] = []
        self.redis: Redis = connect(self.valkey.url, use="short")
        self.records = RequestRecords(self.redis)

    @property
    def port(self) -> int:
        """Of the first web process."""
        return self.ports[0]

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    @property
    def web_names(self) -> list[str]:
        return ["web", *(f"web.{number}" for number in range(2, len(self.ports) + 1))]

    @property
    def worker_names(self) -> list[str]:
        return [f"worker.{number}" for number in range(1, self.num_workers + 1)]

    def environ_of(self, name: str) -> Mapping[str, str]:
        """What the process of that name is started with."""
        if name in self.web_names:
            return {**self.environ, "PORT": str(self.ports[self.web_names.index(name)])}
        return self.environ

    def start(self, name: str, command: str, **environ: str) -> Process:
        """Start a process, with `environ` added. It ends with the thread that starts it (Linux)."""
        process = Process(name, command, {**self.environ_of(name), **environ}, self.folder)
        self.processes.append(process)
        return process

    def process(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    def end(self, name: str) -> int:
        """End the process of that name in good order. Returns its exit status."""
        process = self.process(name)
        self.processes.remove(process)
        return process.end()

    def kill(self, name: str) -> None:
        """SIGKILL the process of that name and what it supervises. Nothing starts it again."""
        process = self.process(name)
        self.processes.remove(process)
        process.kill()

    def restart_redis(self) -> None:
        """SIGKILL Valkey and start it again over its append-only file; back when it answers."""
        self.valkey.kill()
        self.valkey.start()
        self.valkey.wait_until_ready()

    def workers(self) -> list[WorkerInfo]:
        """The live ones."""
        return [info for info, _ in self.records.workers()]

    def is_complete(self) -> bool:
        """Every worker has joined and the web process would take a request."""
        return all(is_ready(HOST, port) for port in self.ports) and len(self.workers()) == self.num_workers

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        """Raises ForPeople, with the end of every log, when a process ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = [process.name for process in self.processes if process.popen.poll() is not None]
            if ended:
                raise ForPeople(f"{', '.join(ended)} ended before: {what}\n{self.logs()}")
            if time.monotonic() > deadline:
                raise ForPeople(f"not within {timeout_s:.0f} s: {what}\n{self.logs()}")
            time.sleep(0.01)

    def logs(self) -> str:
        """The last lines of every process."""
        parts = []
        for log in sorted(self.folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-25:]
            parts.append(f"--- {log.name}\n" + "\n".join(lines))
        return "\n".join(parts)

    def __enter__(self) -> Cell:
        try:
            self.valkey.start()
            for name in self.web_names:
                self.start(name, "web")
            self.start("bridge", "bridge")
            for name in self.worker_names:
                self.start(name, "worker")
            self.wait_until(self.is_complete, "the cell is ready", self.start_s)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process, Valkey last."""
        for process in self.processes:
            process.signal_group(signal.SIGCONT)
            process.signal_group(signal.SIGTERM)
        while self.processes:
            self.processes.pop().end()
        self.redis.close()
        self.valkey.stop()


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port

"""A whole cell on this machine for one test: real Valkey, real processes, a folder and a port of its own.

Owns starting, finding, killing and always ending the processes. Waits are bounded and wait for a condition; when one
is not met in time the end of every log is in the failure.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from openai import OpenAI
from redis import Redis

from tasks.clients import connect
from tasks.contract import WorkerInfo
from tasks.record import RequestRecords
from tokenferry.valkey import Valkey

START_S = 60.0
"""Bound for a process to be there; a loaded machine takes long to import torch."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """One line of the Procfile, in a session of its own, as honcho would run it."""

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
            )

    def signal_group(self, number: int) -> None:
        try:
            os.killpg(self.popen.pid, number)
        except ProcessLookupError:
            pass

    def end(self, timeout_s: float = 8.0) -> int:
        """SIGTERM to the group as honcho sends it, SIGKILL when that takes too long. Returns the exit status."""
        self.signal_group(signal.SIGTERM)
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        self.signal_group(signal.SIGKILL)
        return self.popen.wait()


class Cell:
    """`with Cell(folder, num_workers=2) as cell: cell.client().chat...`"""

    def __init__(
        self, folder: Path, *, model: str = "scripted", num_workers: int = 1, environ: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.model = model
        self.num_workers = num_workers
        self.port = free_port()
        self.valkey = Valkey(folder)
        inherited = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "WORKERS")}
        self.environ = {
            **inherited,
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "DATA_DIR": str(folder),
            "MODEL": model,
            "PREFLIGHT_FORCE": "1",
            **(environ or {}),
        }
        self.processes: list[Process] = []
        self.redis: Redis = connect(self.valkey.url, use="short")
        self.records = RequestRecords(self.redis)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, *, timeout_s: float = 60.0) -> OpenAI:
        """Never retries, so that a test sees what the server said."""
        return OpenAI(base_url=self.base_url, api_key="local", max_retries=0, timeout=timeout_s)

    def start(self, name: str, command: str) -> Process:
        process = Process(name, command, self.environ, self.folder)
        self.processes.append(process)
        return process

    def end(self, name: str) -> int:
        """End the process of this name in good order."""
        process = next(process for process in self.processes if process.name == name)
        self.processes.remove(process)
        return process.end()

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def is_ready(self) -> bool:
        try:
            return self.get("/readyz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def workers(self) -> list[WorkerInfo]:
        """The live ones."""
        return [info for info, _ in self.records.workers()]

    def num_held(self) -> int:
        """Requests that live workers hold."""
        return sum(len(self.records.held(info.worker)) for info in self.workers())

    def kill_engine_of(self, request_id: str) -> WorkerInfo:
        """SIGKILL the engine process that has this request."""
        state = self.records.state(request_id)
        assert state is not None, f"{request_id} has no record"
        holder = next(info for info in self.workers() if info.worker == state.worker)
        os.kill(holder.pid, signal.SIGKILL)
        return holder

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for process in self.processes:
                assert process.popen.poll() is None, f"{process.name} ended before {what}\n{self.logs()}"
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s\n{self.logs()}"
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
            self.start("web", "web")
            self.start("bridge", "bridge")
            for number in range(1, self.num_workers + 1):
                self.start(f"worker.{number}", "worker")
            self.wait_until(lambda: self.is_ready() and len(self.workers()) == self.num_workers, "ready", START_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for process in self.processes:
            process.signal_group(signal.SIGTERM)
        while self.processes:
            self.processes.pop().end()
        self.redis.close()
        self.valkey.stop()

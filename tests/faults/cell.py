"""The cell that faults are injected into: every process reaches Valkey over a link of its own, if that is wanted.

Owns the links and the kills by kind. Refuses to choose: tests and the driver do.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tasks.process.clients import connect
from tasks.protocol.contract import WorkerInfo
from tests.e2e.harness import TestedCell
from tests.faults.proxy import Link, Proxy


class FaultyCell(TestedCell):
    """`with FaultyCell(folder, links=("worker.1",)) as cell: cell.link("worker.1").stall()`."""

    __test__ = False

    def __init__(
        self,
        folder: Path,
        *,
        links: tuple[str, ...] = (),
        environ_by_name: Mapping[str, Mapping[str, str]] | None = None,
        **options: Any,
    ) -> None:
        """`links` names the processes that reach Valkey through the proxy; the others use its socket.

        `environ_by_name`: what single processes are started with besides.
        """
        super().__init__(folder, **options)
        self._stack = ExitStack()
        self.linked = links
        self._environ_by_name = environ_by_name or {}
        self._proxy = self._stack.enter_context(Proxy(self.valkey.socket)) if links else None

    def __enter__(self) -> FaultyCell:
        super().__enter__()
        return self

    def link(self, name: str) -> Link:
        assert self._proxy is not None
        return self._proxy.link(name)

    def environ_of(self, name: str) -> Mapping[str, str]:
        environ = {**super().environ_of(name), **self._environ_by_name.get(name, {})}
        return {**environ, "REDIS_URL": self.link(name).url} if name in self.linked else environ

    def listens(self, name: str) -> bool:
        """Whether the web process of that name answers at all."""
        try:
            return self.get("/livez", self.web_names.index(name)) == 200
        except OSError:
            return False

    def command_of(self, name: str) -> str:
        """The line of the Procfile that a process name runs."""
        return name.partition(".")[0]

    def replace(self, name: str) -> None:
        """A process manager's part: start the process of that name, which has ended."""
        self.start(name, self.command_of(name))

    def engine_of(self, name: str) -> WorkerInfo | None:
        """The live engine under the worker process of that name."""
        pid = self.pid_at_work(name)
        return next((info for info in self.workers() if info.pid == pid), None)

    def signal_at_work(self, name: str, number: int) -> int | None:
        """Signal the process that works under `name`; its id, or None if there is none."""
        pid = self.pid_at_work(name)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    def queue_keys(self) -> list[str]:
        """What Dramatiq keeps, besides the list of who is alive."""
        with connect(self.valkey.url, use="queue") as client:
            return sorted(key.decode() for key in client.scan_iter("*") if b"__heartbeats__" not in key)

    def lifetimes_ms(self) -> dict[str, int]:
        """Every key of both databases with its time to live; below 0: for ever."""
        found: dict[str, int] = {}
        for use in ("short", "queue"):
            with connect(self.valkey.url, use=use) as client:
                for key in client.scan_iter("*", count=1000):
                    found[f"{use} {key.decode()}"] = int(client.pttl(key))  # type: ignore[arg-type]
        return found

    def is_complete(self) -> bool:
        """Every worker process has a live engine: the lease of a dead one may still be there."""
        return super().is_complete() and all(self.engine_of(name) is not None for name in self.worker_names)

    def wait_complete(self, timeout_s: float = 60.0) -> None:
        self.wait_until(self.is_complete, "the cell is whole again", timeout_s)

    def stop(self) -> None:
        if self.valkey.process is not None:
            self.valkey.process.send_signal(signal.SIGCONT)
        for process in self.processes:
            process.signal_group(signal.SIGCONT)
        super().stop()
        self._stack.close()

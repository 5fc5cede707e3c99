"""The worker as processes, over a real server: signals, crashes, and a Redis that goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decode.scripted import SCRIPTED_MAX_MODEL_LEN, generate
from tasks.observe.live import LiveCell
from tasks.process.clients import connect
from tasks.process.supervisor import EXIT_CANNOT_SERVE
from tasks.protocol import keys
from tasks.protocol.broker import build_broker
from tasks.protocol.contract import GenerationJob, TerminalEvent, TokenEvent, WorkerInfo, decode_entry
from tasks.protocol.record import Reoffer, RequestRecords
from tasks.protocol.submit import Submitter
from tests.tasks.cell import job
from tokenferry.cell.valkey import Valkey

WAIT_S = 20.0
MODEL = "scripted"


class Processes:
    """Workers as process managers start them, over a Valkey of their own."""

    def __init__(self, folder: Path) -> None:
        self.valkey = Valkey(folder)
        self.valkey.start()
        self.valkey.wait_until_ready()
        self.redis: Any = connect(self.valkey.url, use="short")
        self.records = RequestRecords(self.redis)
        self.submitter = Submitter(self.records, build_broker(connect(self.valkey.url, use="queue")), self.redis)
        self.log = folder / "worker.log"
        self.popens: list[subprocess.Popen[bytes]] = []

    def start(self, **environ: str) -> subprocess.Popen[bytes]:
        known = {
            "MODEL": MODEL,
            "REDIS_URL": self.valkey.url,
            "PREFLIGHT_FORCE": "1",
            "SCRIPTED_STEP_MS": "2",
            "KV_CACHE_TOKENS": "16384",
        }
        with self.log.open("ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", "tasks.worker"],
                env={**os.environ, **known, **environ},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.popens.append(popen)
        return popen

    def live(self) -> list[WorkerInfo]:
        return [info for info, _ in self.records.workers(MODEL)]

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        turn = threading.Event()
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.log.read_text()}"
            turn.wait(0.01)

    def wait_live(self, num_workers: int = 1) -> list[WorkerInfo]:
        self.wait_until(lambda: len(self.live()) == num_workers, f"{num_workers} live workers")
        return self.live()

    def wait_tokens(self, request_id: str, num_tokens: int) -> None:
        def there() -> bool:
            state = self.records.state(request_id)
            return state is not None and (state.next_index >= num_tokens or state.is_over)

        self.wait_until(there, f"{num_tokens} tokens of {request_id}")

    def assert_exact(self, job: GenerationJob) -> None:
        """The whole stream is what the scripted model says, in order, with one end."""
        entries = self.redis.xrange(keys.out(job.request_id))
        events = [decode_entry(entry, fields) for entry, fields in entries]
        expected = generate(job.prompt_token_ids, job.sampling, SCRIPTED_MAX_MODEL_LEN)[0]
        tokens: list[int] = []
        for event in events[:-1]:
            assert isinstance(event, TokenEvent)
            assert event.index == len(tokens)
            tokens.extend(event.token_ids)
        assert isinstance(events[-1], TerminalEvent)
        assert tokens == expected

    def end(self) -> None:
        for popen in self.popens:
            try:
                os.killpg(popen.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            popen.wait()
        self.valkey.kill()


@pytest.fixture
def processes() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory(prefix="tf") as folder:
        made = Processes(Path(folder))
        yield made
        made.end()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_engine_is_declared_dead_at_once_and_replaced(processes: Processes) -> None:
    processes.start(LEASE_MS="600000")
    [first] = processes.wait_live()
    made = job("r1", model=MODEL, max_tokens=300)
    processes.submitter.submit([made], reader=None, max_waiting=9)
    processes.wait_tokens("r1", 5)
    os.kill(first.pid, signal.SIGKILL)
    processes.wait_until(lambda: processes.records.expired_workers(), "the lease of ten minutes is over")
    reoffer = processes.records.reoffer("r1", 1, "worker_lost")
    assert isinstance(reoffer, Reoffer)
    processes.submitter.requeue(reoffer)
    processes.wait_tokens("r1", 300)
    processes.wait_until(lambda: processes.records.state("r1").is_over, "the end")  # type: ignore[union-attr]
    [second] = processes.live()
    assert second.worker != first.worker
    processes.assert_exact(made)


def test_a_worker_that_was_stopped_for_longer_than_its_lease_is_fenced_out(processes: Processes) -> None:
    processes.start()
    [first] = processes.wait_live()
    made = job("r1", model=MODEL, max_tokens=300)
    processes.submitter.submit([made], reader=None, max_waiting=9)
    processes.wait_tokens("r1", 5)
    os.kill(first.pid, signal.SIGSTOP)
    processes.wait_until(lambda: processes.records.expired_workers(), "the lease runs out")
    processes.start()
    processes.wait_live()
    reoffer = processes.records.reoffer("r1", 1, "worker_lost")
    assert isinstance(reoffer, Reoffer)
    processes.submitter.requeue(reoffer)
    processes.wait_tokens("r1", 100)
    os.kill(first.pid, signal.SIGCONT)
    processes.wait_until(lambda: processes.records.state("r1").is_over, "the end")  # type: ignore[union-attr]
    processes.wait_live(2)
    processes.assert_exact(made)
    processes.wait_until(lambda: "fenced out, stale" in processes.log.read_text(), "the first one notices")


def test_one_or_two_sigterms_drain_the_worker_within_four_seconds(processes: Processes) -> None:
    popen = processes.start(SCRIPTED_STEP_MS="20")
    [info] = processes.wait_live()
    processes.submitter.submit([job("long", model=MODEL, max_tokens=5000)], reader=None, max_waiting=9)
    processes.wait_tokens("long", 3)
    started_s = time.monotonic()
    for _ in range(2):  # to the whole group, as honcho does
        os.killpg(popen.pid, signal.SIGTERM)
    assert popen.wait(WAIT_S) == 0
    assert time.monotonic() - started_s < 4
    state = processes.records.state("long")
    assert state is not None
    assert (state.state, state.attempt) == ("offered", 2)
    assert state.next_index > 3
    assert processes.live() == []
    assert not is_alive(info.pid)
    assert processes.records.held(info.worker) == []


def test_the_engine_dies_with_its_supervisor(processes: Processes) -> None:
    popen = processes.start()
    [info] = processes.wait_live()
    popen.kill()
    processes.wait_until(lambda: not is_alive(info.pid), "the engine process ends")


def test_a_restart_of_redis_loses_nothing(processes: Processes) -> None:
    processes.start()
    processes.wait_live()
    made = job("r1", model=MODEL, max_tokens=400)
    processes.submitter.submit([made], reader=None, max_waiting=9)
    processes.wait_tokens("r1", 20)
    processes.valkey.kill()
    processes.valkey.start()
    processes.valkey.wait_until_ready()
    processes.wait_tokens("r1", 400)
    processes.wait_until(lambda: processes.records.state("r1").is_over, "the end")  # type: ignore[union-attr]
    processes.assert_exact(made)
    processes.submitter.submit([job("r2", model=MODEL, max_tokens=2)], reader=None, max_waiting=9)
    processes.wait_tokens("r2", 2)


def test_a_worker_that_finds_no_redis_keeps_trying_and_says_so(processes: Processes) -> None:
    processes.valkey.kill()
    popen = processes.start()
    processes.wait_until(lambda: "Redis is not reachable" in processes.log.read_text(), "it says so")
    processes.valkey.start()
    processes.valkey.wait_until_ready()
    processes.wait_live()
    processes.valkey.kill()
    os.killpg(popen.pid, signal.SIGTERM)
    started_s = time.monotonic()
    assert popen.wait(WAIT_S) == 0
    assert time.monotonic() - started_s < 4.5


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"MAX_NUM_SEQS": "none"}, "MAX_NUM_SEQS must be"),
        ({"MODEL": "/no/such/model"}, "/no/such/model"),
        ({"PREFLIGHT_FORCE": "0", "PREFLIGHT_MIN_MEMORY_MB": "999999999"}, "available memory"),
    ],
)
def test_what_cannot_be_served_ends_the_worker_with_the_reason(
    processes: Processes, environ: dict[str, str], said: str
) -> None:
    assert processes.start(**environ).wait(WAIT_S) == EXIT_CANNOT_SERVE
    assert said in processes.log.read_text()
    if "MAX_NUM_SEQS" not in environ:  # then nothing that was set can be trusted, not even where Redis is
        [crash] = LiveCell(processes.redis).look().crashes
        assert (crash.process, crash.is_over) == ("worker", True)
        assert said in crash.reason


def test_an_engine_that_is_killed_again_and_again_is_seen_by_who_looks_at_the_cell(processes: Processes) -> None:
    popen = processes.start()
    live = LiveCell(processes.redis)
    for num_times in (1, 2):
        [info] = processes.wait_live()
        os.kill(info.pid, signal.SIGKILL)
        processes.wait_until(
            lambda wanted=num_times: sum(one.num_times for one in live.look().crashes) == wanted,  # type: ignore[misc]
            "it is told",
        )
    [crash] = live.look().crashes
    assert (crash.supervisor_pid, crash.num_times, crash.is_over) == (popen.pid, 2, False)
    assert crash.reason.startswith("killed by SIGKILL")

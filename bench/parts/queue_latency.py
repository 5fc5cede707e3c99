"""What the queue costs: from submit to the start of the actor on an idle worker, and what an idle worker burns.

    python -m bench.parts.queue_latency [--requests 200] [--idle-s 10]

Starts an embedded Valkey and one worker process with the scripted engine (steps take no time), then, one request at a
time with a pause in between, measures how long after the call of `Submitter.submit`

- its `claimed` fact can be read (the actor thread has started and owns the assignment), and
- its first token can be read.

Both include this process' own wake-up, so they are upper bounds. Idle CPU is the time that the worker's two processes
(supervisor and engine) use while nothing is asked of them, in per cent of one processor.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from decode.engine.sampling import SamplingParams
from tasks.process.clients import connect
from tasks.protocol import keys
from tasks.protocol.broker import build_broker
from tasks.protocol.contract import GenerationJob, WorkerInfo
from tasks.protocol.record import RequestRecords
from tasks.protocol.submit import Submitter
from tokenferry.cell.valkey import Valkey

MODEL = "scripted"
PAUSE_S = 0.02


class Bench:
    def __init__(self, url: str) -> None:
        self.redis: Any = connect(url, use="short")
        self.blocking: Any = connect(url, use="blocking")
        self.records = RequestRecords(self.redis)
        self.submitter = Submitter(self.records, build_broker(connect(url, use="queue")), self.redis)

    def wait_for_worker(self) -> WorkerInfo:
        deadline = time.monotonic() + 20
        while not (workers := self.records.workers(MODEL)):
            if time.monotonic() > deadline:
                raise SystemExit("the worker did not start")
            time.sleep(0.02)
        return workers[0][0]

    def one(self, request_id: str) -> tuple[float, float]:
        """Milliseconds from the submit until the claim, and the first token, can be read."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        job = GenerationJob(request_id, MODEL, tuple(range(100, 164)), sampling, 0)
        last = self.redis.xinfo_stream(keys.EVENTS)["last-generated-id"]
        started_s = time.perf_counter()
        self.submitter.submit([job], reader=None, max_waiting=100)
        claimed_s = 0.0
        while True:
            for _, entries in self.blocking.xread({keys.EVENTS: last}, block=2000):
                for entry_id, fields in entries:
                    last = entry_id
                    if fields[b"k"] == b"claimed":
                        claimed_s = time.perf_counter()
                    elif fields[b"k"] == b"first_token":
                        return (claimed_s - started_s) * 1000, (time.perf_counter() - started_s) * 1000


def cpu_s(pid: int) -> float:
    """Processor time that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(name: str, values: list[float]) -> None:
    cuts = quantiles(values, n=100)
    print(f"{name:<28} median {median(values):6.2f} ms   p95 {cuts[94]:6.2f} ms   worst {max(values):6.2f} ms")


def measure(url: str, supervisor_pid: int, num_requests: int, idle_s: float) -> None:
    bench = Bench(url)
    info = bench.wait_for_worker()
    for n in range(20):
        bench.one(f"warm-{n}")
    claimed, first = [], []
    for n in range(num_requests):
        time.sleep(PAUSE_S)
        claimed_ms, first_ms = bench.one(f"r-{n}")
        claimed.append(claimed_ms)
        first.append(first_ms)
    show("submit to actor start", claimed)
    show("submit to first token", first)
    before_s = cpu_s(info.pid), cpu_s(supervisor_pid)
    time.sleep(idle_s)
    after_s = cpu_s(info.pid), cpu_s(supervisor_pid)
    for name, before, after in zip(("engine", "supervisor"), before_s, after_s, strict=True):
        print(f"idle {name:<23} {100 * (after - before) / idle_s:5.2f} % of one processor")
    print(
        f"threads of the engine process: {num_threads(info.pid)}, connections: {len(bench.redis.client_list()) - 3}"
    )


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--idle-s", type=float, default=10.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tf") as folder, Valkey(Path(folder)) as valkey:
        environ = {**os.environ, "MODEL": MODEL, "REDIS_URL": valkey.url, "SCRIPTED_STEP_MS": "0"}
        worker = subprocess.Popen(
            [sys.executable, "-m", "tasks.worker"], env={**environ, "LOG_LEVEL": "warning", "PREFLIGHT_FORCE": "1"}
        )
        try:
            measure(valkey.url, worker.pid, args.requests, args.idle_s)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait()


if __name__ == "__main__":
    main()

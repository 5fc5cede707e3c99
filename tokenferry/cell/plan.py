"""Whether this machine can take the configured workers: the model's needs beside what the machine has.

Owns the estimate for a configuration and the `tokenferry preflight` command. Refuses to know how the machine is read
and judged (`tasks.process.preflight`).
"""

from __future__ import annotations

import http.client
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from decode.checkpoint.checkpoint import open_checkpoint
from decode.checkpoint.names import SCRIPTED, ModelDamaged, ModelMissing, resolve, served_name
from decode.threads import choose_num_threads
from tasks.process.preflight import SCRIPTED_MB, Thresholds, examine, memory_needed_mb, read_machine, require
from tasks.process.settings import BridgeSettings, SettingsError, WebSettings, WorkerSettings
from tokenferry.errors import ForPeople
from tokenferry.progress import PullProgress
from tokenferry.pull import pull
from tokenferry.shown import print_json

TYPICAL_MB = 3000
"""Assumed for a model that is not here to be looked at."""


def memory_for(worker: WorkerSettings, checkpoint: Path | None) -> int:
    """Megabytes of one worker; no checkpoint means the scripted engine. Raises CheckpointError."""
    if checkpoint is None:
        return SCRIPTED_MB
    return memory_needed_mb(open_checkpoint(checkpoint).config, worker.variant, worker.kv_cache_tokens)


def threads_for(num_workers: int) -> int:
    """Threads of one worker, so that several do not fight for the same processors; 0: let the worker choose."""
    return max(1, choose_num_threads() // num_workers) if num_workers > 1 else 0


def preflight(environ: Mapping[str, str], *, as_json: bool = False) -> int:
    """Show every figure beside its threshold. Raises SettingsError, ModelError, CheckpointError, PreflightRefused."""
    worker = WorkerSettings.from_env(environ)
    workers = max(1, worker.workers)
    console = Console(file=sys.stderr if as_json else None)
    try:
        checkpoint = None if worker.model == SCRIPTED else resolve(worker.model, worker.cache_dir)
        needed_mb = memory_for(worker, checkpoint)
    except ModelMissing as missing:
        console.print(f"{missing}. Until then {TYPICAL_MB:,} MB are assumed.\n", highlight=False, soft_wrap=True)
        needed_mb = TYPICAL_MB
    thresholds = Thresholds.from_env(environ, needed_mb * workers)
    reading = read_machine()
    if as_json:
        print_json([asdict(finding) for finding in examine(reading, thresholds)])
        require(reading, thresholds)
        return 0
    table = Table("figure", "found", "needed", "", box=None, header_style="bold", pad_edge=False)
    for finding in examine(reading, thresholds):
        table.add_row(finding.what, finding.found, finding.needed, "ok" if finding.passed else "short")
    console.print(
        f"{worker.model}, {worker.variant}, {workers} worker(s) of about {needed_mb:,} MB\n", highlight=False
    )
    console.print(table, highlight=False)
    require(reading, thresholds)
    return 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run, decided before anything is started."""

    web: WebSettings
    worker: WorkerSettings
    num_workers: int
    num_threads: int
    model: str
    """The name that clients use."""
    checkpoint: Path | None
    memory_mb: int
    """What one worker is expected to take."""
    data_dir: Path
    own_redis: bool

    @property
    def origin(self) -> str:
        return origin(self.web.host, self.web.port)


def make_plan(environ: Mapping[str, str]) -> Plan:
    """Read every setting, find the model, look at the machine.

    Raises SettingsError, ModelError (after trying to pull the model), CheckpointError, PreflightRefused.
    """
    web, worker = WebSettings.from_env(environ), WorkerSettings.from_env(environ)
    BridgeSettings.from_env(environ)
    checkpoint = None if worker.model == SCRIPTED else find_model(worker.model, worker.cache_dir)
    memory_mb = memory_for(worker, checkpoint)
    require(read_machine(), Thresholds.from_env(environ, memory_mb * max(1, worker.workers)))
    return Plan(
        web=web,
        worker=worker,
        num_workers=worker.workers,
        num_threads=worker.num_threads or threads_for(worker.workers),
        model=served_name(worker.model),
        checkpoint=checkpoint,
        memory_mb=memory_mb,
        data_dir=web.data_dir,
        own_redis=not environ.get("REDIS_URL", "").strip(),
    )


def find_model(name: str, cache_dir: Path) -> Path:
    """The checkpoint behind MODEL; a model that is not here yet is pulled. Raises ModelError."""
    try:
        return resolve(name, cache_dir)
    except (ModelMissing, ModelDamaged):
        with PullProgress() as progress:
            return pull(name, cache_dir, progress=progress)


def require_free_port(host: str, port: int) -> None:
    """Raises ForPeople when somebody listens there, SettingsError when the address is not ours to take."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == 99:
                raise SettingsError(f"HOST must be an address of this machine, not {host!r} ({error})") from error
            raise ForPeople(f"port {port} on {host} is taken ({error}): choose another with PORT=...") from error


def origin(host: str, port: int) -> str:
    """The URL of a server that listens on `host`, as seen from this machine."""
    address = reachable(host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def reachable(host: str) -> str:
    """The address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def is_ready(host: str, port: int) -> bool:
    """Whether `/readyz` says that a request would be answered now."""
    connection = http.client.HTTPConnection(reachable(host), port, timeout=2)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()

"""Whether this machine can take the configured workers: the model's needs beside what the machine has.

Owns the estimate for a configuration and the `tokenferry preflight` command. Refuses to know how the machine is read
and judged (`tasks.preflight`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from decode.checkpoint import open_checkpoint
from decode.factory import choose_num_threads
from decode.registry import ModelMissing, resolve
from tasks.loading import SCRIPTED
from tasks.preflight import SCRIPTED_MB, Thresholds, examine, memory_needed_mb, read_machine, require
from tasks.settings import WorkerSettings, num_workers
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
    workers = max(1, num_workers(environ))
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

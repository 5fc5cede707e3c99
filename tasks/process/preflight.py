"""Whether this machine can take a model now: memory, swap and load against thresholds, before weights are loaded.

Owns the thresholds, their defaults for a model, and the reading of the machine. Refuses to know who asks (a worker at
start, `tokenferry preflight`) and what happens after a refusal. Decisions are pure: a reading and thresholds give
findings; `require` turns failed ones into `PreflightRefused`, whose message holds the figures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from decode.checkpoint.config import ModelConfig
from tasks.process.settings import SettingsError

PROCESS_MB = 600
"""Python, torch and the working buffers of one step, over weights and KV cache."""
SCRIPTED_MB = 100
"""A worker with the scripted engine: no torch, no weights."""


class PreflightRefused(RuntimeError):
    """The machine is too small or too busy for what was asked; the message says what was found and what is needed."""


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """What the machine says. None: this system does not tell."""

    available_memory_mb: int | None
    total_swap_mb: int
    free_swap_mb: int
    load_per_cpu: float | None
    """Processes that want a processor, averaged over one minute, for each processor we may use."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What must hold. Each can be changed alone; `force` reports but never refuses."""

    min_memory_mb: int
    min_swap_mb: int = 0
    max_load_per_cpu: float = 16.0
    force: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str], min_memory_mb: int) -> Thresholds:
        """`min_memory_mb` is the default for the model in question. Raises SettingsError naming the variable."""
        default = cls(min_memory_mb)
        return cls(
            min_memory_mb=int(_number(environ, "PREFLIGHT_MIN_MEMORY_MB", default.min_memory_mb)),
            min_swap_mb=int(_number(environ, "PREFLIGHT_MIN_SWAP_MB", default.min_swap_mb)),
            max_load_per_cpu=_number(environ, "PREFLIGHT_MAX_LOAD_PER_CPU", default.max_load_per_cpu),
            force=_switch(environ, "PREFLIGHT_FORCE"),
        )


BYTES_PER_VALUE = {"fp32": 4.0, "bf16": 2.0}
QUANTISED_BYTES = 1.125
"""Eight bits and a scale for each 32 of them: the most that a quantised variant keeps of a weight, key or value."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison: `found` and `needed` are ready to be shown to a person."""

    what: str
    found: str
    needed: str
    passed: bool


def memory_needed_mb(config: ModelConfig, variant: str, kv_cache_tokens: int) -> int:
    """Memory of one worker with this model: weights in `variant`, the KV cache, and the process itself."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    num_bytes = BYTES_PER_VALUE.get(variant, QUANTISED_BYTES)
    weights = config.num_layers * layer + embeddings
    kv_cache = kv_cache_tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    return PROCESS_MB + int((weights + kv_cache) * num_bytes) // 1_000_000


def read_machine(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MachineFigures:
    """Ask the operating system; a container's memory limit counts when it is the tighter one."""
    memory = _meminfo(proc / "meminfo")
    available = memory.get("MemAvailable")
    if (left := _cgroup_left_mb(cgroup)) is not None:
        available = left if available is None else min(available, left)
    try:
        load = os.getloadavg()[0] / max(1, _num_cpus())
    except OSError:
        load = None
    return MachineFigures(available, memory.get("SwapTotal", 0), memory.get("SwapFree", 0), load)


def examine(reading: MachineFigures, thresholds: Thresholds) -> tuple[Finding, ...]:
    """Compare every figure that the system gives. Free swap counts only where there is swap."""
    findings = []
    if reading.available_memory_mb is not None:
        enough = reading.available_memory_mb >= thresholds.min_memory_mb
        found, needed = f"{reading.available_memory_mb:,} MB", f"at least {thresholds.min_memory_mb:,} MB"
        findings.append(Finding("available memory", found, needed, enough))
    if reading.total_swap_mb:
        enough = reading.free_swap_mb >= thresholds.min_swap_mb
        found, needed = f"{reading.free_swap_mb:,} MB", f"at least {thresholds.min_swap_mb:,} MB"
        findings.append(Finding("free swap", found, needed, enough))
    if reading.load_per_cpu is not None:
        quiet = reading.load_per_cpu <= thresholds.max_load_per_cpu
        found, needed = f"{reading.load_per_cpu:.2f}", f"at most {thresholds.max_load_per_cpu:.2f}"
        findings.append(Finding("load per processor (one minute)", found, needed, quiet))
    if thresholds.force:
        return tuple(replace(finding, passed=True) for finding in findings)
    return tuple(findings)


def require(reading: MachineFigures, thresholds: Thresholds) -> tuple[Finding, ...]:
    """The findings, all passed. Raises PreflightRefused with every figure that is short, and how to change it."""
    findings = examine(reading, thresholds)
    short = [
        f"{finding.what} is {finding.found}, needed {finding.needed}" for finding in findings if not finding.passed
    ]
    if short:
        raise PreflightRefused(
            "this machine cannot take the model now: " + "; ".join(short) + ". Thresholds: PREFLIGHT_MIN_MEMORY_MB, "
            "PREFLIGHT_MIN_SWAP_MB, PREFLIGHT_MAX_LOAD_PER_CPU; PREFLIGHT_FORCE=1 turns all off"
        )
    return findings


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise SettingsError(f"{name} must be a number, 0 or more, not {text!r}")
    return value


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip().lower()
    if text not in ("", "0", "1", "false", "true", "no", "yes"):
        raise SettingsError(f"{name} must be 0 or 1, not {text!r}")
    return text in ("1", "true", "yes")


def _meminfo(path: Path) -> dict[str, int]:
    """Name -> MB. Empty where there is no such file (not Linux)."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: int(value.split()[0]) // 1024 for name, _, value in pairs if value.strip().endswith("kB")}


def _cgroup_left_mb(folder: Path) -> int | None:
    """What a control group (version 2) still allows: its limit less what is in use and not reclaimable."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(0, int(limit) - used + int(stat.get("inactive_file", 0))) >> 20
    except (OSError, ValueError):
        return None


def _num_cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1

"""On what a figure was measured, in one line, and what a process has used: for the reports of all benchmarks.

Owns reading /proc (Linux). Refuses to know what is measured.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """Processors, their name and kind of vectors, Python."""
    return (
        f"{len(os.sched_getaffinity(0))} processors, {processor()} ({vectors()}), Python {platform.python_version()}"
    )


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    return _field(cpuinfo, "model name") or platform.machine()


def vectors(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The widest instructions that decide the speed of a decoder on a CPU."""
    flags = (_field(cpuinfo, "flags") or "").split()
    names = {
        "amx_int8": "AMX",
        "avx512_vnni": "AVX-512 with VNNI",
        "avx512f": "AVX-512",
        "avx_vnni": "AVX2 with VNNI",
        "avx2": "AVX2",
    }
    return next((name for flag, name in names.items() if flag in flags), "no vectors that we know")


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether it multiplies bfloat16; others take them apart first."""
    return bool({"avx512_bf16", "amx_bf16"}.intersection((_field(cpuinfo, "flags") or "").split()))


def _field(cpuinfo: Path, name: str) -> str | None:
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process, to the nanosecond."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[0])
        except OSError:  # the thread has ended meanwhile
            continue
    return total / 1e9


def memory_mb(pid: int) -> float:
    """Resident memory of a process, shared pages counted by their share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, and itself."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found.extend(parents.get(parent, ()))
    return found

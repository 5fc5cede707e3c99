"""How many threads a step should have on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def choose_num_threads(system: Path = Path("/sys")) -> int:
    """Physical cores that this process may use, and no more than its cgroup's processor quota.

    Threads of one core share its vector units, and threads beyond the quota are stopped while the others wait.
    """
    processors = os.sched_getaffinity(0)
    siblings = (system / f"devices/system/cpu/cpu{n}/topology/thread_siblings_list" for n in processors)
    cores = {path.read_text().strip() if path.exists() else str(path) for path in siblings}
    quota_file = system / "fs/cgroup/cpu.max"
    quota, _, period = quota_file.read_text().partition(" ") if quota_file.exists() else ("max", "", "")
    limit = len(cores) if quota == "max" else int(quota) // int(period)
    return max(1, min(len(cores), limit))

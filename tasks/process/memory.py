"""The memory of a process that has loaded what it needs and begins to serve."""

from __future__ import annotations

import ctypes
import gc
import sys


def settle() -> None:
    """What is there now stays: the collector need not look at it again, which would cost a step 20 ms now and then.

    What loading has freed goes back to the system (glibc keeps it otherwise).
    """
    gc.collect()
    gc.freeze()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)

"""A short round of everything at once: all kinds of clients, two web processes, three workers, and all faults."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import pytest

from tests.faults.cell import FaultyCell
from tests.faults.driver import Driver

pytestmark = pytest.mark.e2e

LINKS = ("web.2", "worker.2", "worker.3", "bridge")
ENVIRON = {"SCRIPTED_STEP_MS": "10", "MAX_NUM_SEQS": "8", "STREAM_TTL_S": "120"}


def test_whatever_fails_every_answer_is_exact_or_ends_in_an_error_and_nothing_is_left_behind() -> None:
    seed = random.randrange(1 << 32)
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        with FaultyCell(Path(folder), num_workers=3, num_web=2, links=LINKS, environ=ENVIRON) as cell:
            driver = Driver(cell, seed, every_s=0.6)
            asyncio.run(driver.round(9.0))
    report = driver.report
    assert report.broken == []
    assert report.num_requests > 30
    assert report.faults.total() > 3

"""Cells are slow to start, so tests that leave one as they found it share it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import TestedCell


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a Unix socket, whatever pytest's own folder is."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def cell(short_folder: Path) -> Iterator[TestedCell]:
    """Two scripted workers, a token every few milliseconds."""
    with TestedCell(short_folder, num_workers=2, environ={"SCRIPTED_STEP_MS": "5", "MAX_NUM_SEQS": "8"}) as running:
        yield running


@pytest.fixture
def rng() -> random.Random:
    """Random numbers whose seed is in the output of a test that fails."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)

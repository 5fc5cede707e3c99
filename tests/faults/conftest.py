"""What the tests of single faults share: cells over short folders, and the oracle."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cell import FaultyCell
from tests.faults.oracle import Oracle

CellMaker = Callable[..., FaultyCell]


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def make_module_cell() -> Iterator[CellMaker]:
    yield from _making()


@pytest.fixture
def make_cell() -> Iterator[CellMaker]:
    """Cells that are over with the test. Options are environment variables in capitals, and those of `FaultyCell`."""
    yield from _making()


def _making() -> Iterator[CellMaker]:
    with ExitStack() as stack:

        def make(**options: Any) -> FaultyCell:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tf-"))
            environ = {"SCRIPTED_STEP_MS": "5", "MAX_NUM_SEQS": "8"}
            environ |= {name: str(options.pop(name)) for name in list(options) if name.isupper()}
            return stack.enter_context(FaultyCell(Path(folder), environ=environ, **options))

        yield make

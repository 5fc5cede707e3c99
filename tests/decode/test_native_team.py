"""The team of threads when one of them loses its core in the middle of its work."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from decode.native_build import SOURCES

COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_member_stuck_in_a_chunk_holds_nobody_up_and_publishes_nothing_late(tmp_path: Path) -> None:
    program = tmp_path / "late_member"
    source = Path(__file__).with_name("late_member.cpp")
    command = [str(COMPILER), "-O1", "-std=c++20", "-pthread", f"-I{SOURCES}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    # Without a second hand on the chunk the first job would never end.
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["40", "40"]

"""The team of threads when one of them loses its core in the middle of its work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from decode.native.build import SOURCES

COMPILER = shutil.which("g++") or shutil.which("clang++")


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def output_of(name: str, directory: Path) -> str:
    """What the program tests/decode/`name`.cpp prints; it must end well and soon."""
    program, source = directory / name, Path(__file__).with_name(f"{name}.cpp")
    command = [str(COMPILER), "-O1", "-std=c++20", "-pthread", f"-I{SOURCES}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=True).stdout


@needs_compiler
def test_a_member_stuck_in_a_chunk_holds_nobody_up_and_publishes_nothing_late(tmp_path: Path) -> None:
    # Without a second hand on the chunk the first job would never end.
    assert output_of("late_member", tmp_path).split() == ["40", "40"]


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the address space")
def test_threads_that_are_not_to_be_had_are_an_error_and_not_the_end_of_the_program(tmp_path: Path) -> None:
    assert output_of("few_threads", tmp_path) == "refused"

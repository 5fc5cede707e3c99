"""The report of all own figures: its sections, their commands, and the table of the loads."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from bench.own import PARTS, load_table, main, report

ROW: dict[str, Any] = {
    "output_tokens_per_s": 140.4,
    "ttft_p50_ms": 38.2,
    "ttft_p95_ms": 1040.0,
    "itl_p50_ms": 6.2,
    "itl_p95_ms": 9.1,
    "cached_tokens": 16,
    "prompt_tokens": 1336,
    "errors": 0,
    "peak_mb": 500,
    "ready_s": 2.6,
}


def test_the_loads_are_a_table_with_the_last_memory_and_the_first_start() -> None:
    prefill = ROW | {"prompt_tokens_per_s": 1447.0, "itl_p50_ms": None, "itl_p95_ms": None, "peak_mb": 909}
    lines = load_table({"1 short": ROW, "1 prefill": prefill}).splitlines()
    assert lines[2] == "| 1 short | 140 | 38 / 1,040 | 6.2 / 9.1 | 16 of 1,336 | 0 |"
    assert lines[3] == "| 1 prefill | 1,447 | 38 / 1,040 |  | 16 of 1,336 | 0 |"
    assert lines[-1] == "Peak memory of all processes 909 MB; start to ready 2.6 s."


def test_a_load_at_which_everything_failed_says_so() -> None:
    failed = ROW | {"output_tokens_per_s": 0.0, "errors": 4}
    failed |= dict.fromkeys(["ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms"])
    assert "| 1 short | failed |  |  | 16 of 1,336 | 4 |" in load_table({"1 short": failed})


def test_every_section_has_its_command_and_every_command_is_a_program() -> None:
    text = report([(part, f"figures of {part.name}") for part in PARTS], 0.5, "2026-01-31")
    for part in PARTS:
        assert f"## {part.title}\n\n`{part.command}`\n\nfigures of {part.name}\n" in text
        assert callable(import_module(part.command.split()[2]).main)
    assert "Load average when it began: 0.5." in text


def test_a_part_that_is_not_known_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "load,luck"])
    assert "--only: no part named luck" in capsys.readouterr().err

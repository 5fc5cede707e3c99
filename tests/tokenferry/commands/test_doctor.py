"""The doctor: every finding that is not fine says what to do, and what is wrong is an exit status."""

from __future__ import annotations

import http.server
import json
import resource
import shutil
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from tasks.process.crashes import report_crash
from tasks.protocol import keys
from tests.bridge.cell import MODEL, Cell
from tests.conftest import RedisServer
from tokenferry.cell.one_process import open_server
from tokenferry.cli import main
from tokenferry.commands.doctor import (
    Finding,
    check_cell,
    check_checkpoint,
    check_device,
    check_machine,
    check_port,
    check_redis,
    graded,
    show_doctor,
)

GOOD = {"redis_version": "7.2.4", "aof_enabled": 1, "maxmemory_policy": "noeviction", "maxmemory": 0}


class Server:
    """A Redis that says of itself what a test wants."""

    def __init__(self, *, ahead_s: float = 0.0, **info: Any) -> None:
        self._info = {**GOOD, **info}
        self._time = 1000.0 + ahead_s

    def ping(self) -> bool:
        return True

    def time(self) -> tuple[int, int]:
        return int(self._time), round(self._time % 1 * 1e6)

    def info(self) -> dict[str, Any]:
        return self._info


def of(findings: Iterable[Finding]) -> dict[str, Finding]:
    found = list(findings)
    assert all(bool(one.advice) == (one.status != "ok") for one in found)
    return {one.what: one for one in found}


def redis_findings(**options: Any) -> dict[str, Finding]:
    return of(check_redis(Server(**options), clock_s=lambda: 1000.0))  # type: ignore[arg-type]


def test_a_good_redis_is_fine_in_every_way() -> None:
    assert {what: one.status for what, one in redis_findings().items()} == {
        "Redis": "ok",
        "Redis persistence": "ok",
        "Redis eviction": "ok",
        "Redis latency": "ok",
        "clock": "ok",
    }


def test_the_embedded_server_is_fine_in_every_way(real_server: RedisServer) -> None:
    found = of(check_redis(real_server.connect()))
    assert {one.status for what, one in found.items() if what != "Redis latency"} == {"ok"}
    assert "Valkey" in found["Redis"].found


@pytest.mark.parametrize(
    ("options", "what", "status", "advice"),
    [
        ({"redis_version": "6.2.1"}, "Redis", "wrong", "take Redis 7"),
        ({"aof_enabled": 0}, "Redis persistence", "wrong", "appendonly yes"),
        ({"aof_last_write_status": "err"}, "Redis persistence", "wrong", "disk"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": 10**9}, "Redis eviction", "wrong", "noeviction"),
        ({"maxmemory_policy": "allkeys-lru"}, "Redis eviction", "warning", "noeviction"),
        ({"ahead_s": 0.7}, "clock", "warning", "NTP"),
        ({"ahead_s": -60}, "clock", "wrong", "NTP"),
    ],
)
def test_what_is_not_right_about_redis_is_found(options: dict[str, Any], what: str, status: str, advice: str) -> None:
    finding = redis_findings(**options)[what]
    assert finding.status == status
    assert advice in finding.advice


def test_a_redis_that_does_not_answer_is_one_finding() -> None:
    def refuse() -> None:
        raise ConnectionError("refused")

    (finding,) = check_redis(SimpleNamespace(ping=refuse))  # type: ignore[arg-type]
    assert finding.status == "wrong"
    assert "REDIS_URL" in finding.advice


def test_a_figure_is_graded_by_two_limits() -> None:
    assert [graded("x", value, 5, 50, "", "do").status for value in (5, 50, 51)] == ["ok", "warning", "wrong"]


def test_a_cell_without_workers_is_a_warning_and_one_without_a_bridge_is_wrong(redis_server: RedisServer) -> None:
    cell = Cell(redis_server.connect("short"), redis_server.connect("queue"))
    assert {what: one.status for what, one in of(check_cell(cell.redis, 2)).items()} == {"workers": "warning"}
    seconds, _ = cell.redis.time()
    cell.join("w1", int(seconds) * 1000 + 100_000)
    assert of(check_cell(cell.redis, 2))["bridge"].status == "wrong"
    cell.redis.set(keys.BRIDGE, "b")
    found = of(check_cell(cell.redis, 2))
    assert (found["workers"].status, found["bridge"].status) == ("ok", "ok")


def test_a_full_queue_is_a_warning_and_one_with_room_is_not(redis_server: RedisServer) -> None:
    cell = Cell(redis_server.connect("short"), redis_server.connect("queue"))
    seconds, _ = cell.redis.time()
    cell.join("w1", int(seconds) * 1000 + 100_000)
    cell.offer("a", now_ms=int(seconds) * 1000)
    what = f"queue of {MODEL}, default"
    assert of(check_cell(cell.redis, 2))[what].status == "ok"
    full = of(check_cell(cell.redis, 1))[what]
    assert full.status == "warning"
    assert "1 of at most 1 wait for a worker" in full.found


def test_a_worker_that_never_came_to_serve_is_found_with_its_reason(redis_server: RedisServer) -> None:
    cell = Cell(redis_server.connect("short"), redis_server.connect("queue"))
    report_crash(cell.redis, "worker", 7, "cannot serve: no such model", is_over=True)
    finding = of(check_cell(cell.redis, 2))["a process died"]
    assert "cannot serve: no such model" in finding.found
    assert "start it again" in finding.advice


def test_a_model_that_is_not_here_says_how_to_get_it(tmp_path: Path) -> None:
    (finding,) = of(check_checkpoint("smollm2-135m-instruct", tmp_path)).values()
    assert finding.status == "wrong"
    assert "tokenferry pull smollm2-135m-instruct" in finding.advice


def test_scripted_needs_no_model(tmp_path: Path) -> None:
    assert of(check_checkpoint("scripted", tmp_path))["model"].status == "ok"


@pytest.mark.parametrize(("variant", "status"), [("auto", "warning"), ("q4", "wrong"), ("bf16", "warning")])
def test_without_a_compiler_native_variants_are_wrong_and_others_slow(
    variant: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    finding = of(check_device("cpu", variant))["device"]
    assert finding.status == status
    assert "g++" in finding.advice


def test_a_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "clang++" else None)
    assert "/bin/clang++" in of(check_device("cpu", "q4"))["device"].found


def test_a_free_port_is_fine_and_one_that_another_program_has_is_wrong() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        handler = http.server.BaseHTTPRequestHandler
        with http.server.HTTPServer(("127.0.0.1", 0), handler) as other:
            thread = threading.Thread(target=other.serve_forever)
            thread.start()
            try:
                finding = of(check_port("127.0.0.1", other.server_port))["port"]
            finally:
                other.shutdown()
                thread.join()
    assert finding.status == "wrong"
    assert "PORT" in finding.advice
    assert of(check_port("127.0.0.1", port))["port"].found == f"{port} on 127.0.0.1 is free"


def test_a_port_that_our_own_server_has_is_fine(tmp_path: Path) -> None:
    with open_server(model="scripted") as server:
        host, port = server.base_url.split("/")[2].split(":")
        assert "tokenferry server answers" in of(check_port(host, int(port)))["port"].found


@pytest.mark.parametrize(("files", "status"), [(65_536, "ok"), (1024, "warning"), (100, "wrong")])
def test_few_files_that_may_be_open_are_found(
    files: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, 99_999))
    assert of(check_machine(tmp_path))["open files"].status == status


@pytest.mark.parametrize(("free_mb", "status"), [(10_000, "ok"), (1_000, "warning"), (100, "wrong")])
def test_a_full_disk_is_found_also_before_its_folder_exists(
    free_mb: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_mb * 1_000_000))
    assert of(check_machine(tmp_path / "not" / "there"))["disk"].status == status


FINDINGS = [Finding("a", "ok", "fine [sic]"), Finding("b", "warning", "so so", "do this")]


def test_a_warning_is_no_failure_and_a_wrong_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_doctor(FINDINGS, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "fine [sic]" in shown
    assert "-> do this" in shown
    assert show_doctor([*FINDINGS, Finding("c", "wrong", "broken", "mend it")], as_json=False) == 1


def test_the_findings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_doctor([Finding("c", "wrong", "broken", "mend it")], as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"what": "c", "status": "wrong", "found": "broken", "advice": "mend it"}
    ]


def test_all_checks_together_need_neither_redis_nor_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TOKENFERRY_CACHE", str(tmp_path))
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert main(["doctor", "--json"]) == 1
    found = {one["what"]: one["status"] for one in json.loads(capsys.readouterr().out)}
    assert (found["Redis"], found["model"]) == ("wrong", "wrong")
    assert {"device", "port", "open files", "disk"} <= found.keys()

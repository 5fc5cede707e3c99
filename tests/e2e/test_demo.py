"""The demo is a test: it shows what it promises, in seconds, and no process of it ever loads torch."""

from __future__ import annotations

import io
import re
import tempfile
import time
from pathlib import Path

import pytest
from rich.console import Console

from tokenferry.commands.demo import run

pytestmark = pytest.mark.e2e


def test_the_demo_shows_two_workers_a_cache_hit_and_an_unharmed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFLIGHT_FORCE", "1")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # every child writes what it imports into its log
    shown = io.StringIO()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        status = run(Path(folder), Console(file=shown, width=200))
        logs = {log.name: log.read_text(errors="replace") for log in Path(folder).glob("*.log")}
    text = shown.getvalue()

    assert status == 0, text
    assert time.monotonic() - started_s < 60
    assert "with 2 workers" in text
    told = re.findall(r"worker (\S+(?: -> \S+)?), (\d+) cached tokens", text)
    assert len(told) == 4
    assert any(int(cached) > 0 for _, cached in told[1:3])
    assert " -> " in told[3][0]
    answers = [line.replace(" [killed] ", "") for line in text.splitlines() if re.match(r"<\d+>", line)]
    assert len(answers) == 4
    assert len(set(answers)) == 1
    assert re.fullmatch(r"(<\d+>){24}", answers[0])

    for name in ("web.log", "bridge.log", "worker.1.log", "worker.2.log"):
        assert "tasks.protocol.record" in logs[name], f"{name} shows no imports"
        assert not re.search(r"\| +torch$", logs[name], re.MULTILINE), f"{name} loaded torch"

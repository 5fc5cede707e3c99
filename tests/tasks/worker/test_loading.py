"""How a worker loads its model, and what it says meanwhile."""

from __future__ import annotations

import pytest

from tasks.process.settings import WorkerSettings
from tasks.worker.loading import QUIET_S, WeightsLog, load_for
from tests.decode.native.reference import tiny_checkpoint


def said(caplog: pytest.LogCaptureFixture, num_tensors: int, s_per_tensor: float) -> list[str]:
    caplog.set_level("INFO")
    clock_s = [0.0]
    progress = WeightsLog("m", lambda: clock_s[0])
    for done in range(1, num_tensors + 1):
        clock_s[0] += s_per_tensor
        progress(done, num_tensors)
    return [record.getMessage() for record in caplog.records]


def test_slow_loading_is_told_at_every_quarter(caplog: pytest.LogCaptureFixture) -> None:
    lines = said(caplog, 8, QUIET_S)
    assert lines == [f"m: {percent} % of the weights are there" for percent in (25, 50, 75, 100)]


def test_quick_loading_is_not_told_on_the_way(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, 8, QUIET_S / 10) == []


@pytest.mark.parametrize(("value", "is_on"), [("", True), ("off", False)])
def test_an_engine_drafts_unless_it_is_turned_off(value: str, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr("decode.factory.load_engine", lambda _, **settings: asked.update(settings))
    environ = {"MODEL": str(tiny_checkpoint("llama").path), "PROMPT_LOOKUP": value, "PREFLIGHT_FORCE": "1"}
    load_for(WorkerSettings.from_env(environ), environ)
    assert asked["prompt_lookup"] is is_on

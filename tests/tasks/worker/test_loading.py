"""What a person sees of a worker that loads its model: a bar on a terminal of its own, lines elsewhere."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from tasks.process.logs import TextLines
from tasks.process.settings import WorkerSettings
from tasks.process.weights_bar import AFTER_S, EVERY_S, WeightsBar
from tasks.worker.loading import QUIET_S, WeightsLog, is_ours, load_for, weights_progress
from tests.decode.native.reference import tiny_checkpoint

ERASE = "\r\x1b[K"
WAIT_S = 30


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


def seen(written: str) -> list[str]:
    """The lines that a terminal shows after this."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written)
    return [line.rpartition(ERASE)[2].rstrip("\r") for line in plain.split("\n")]


class Terminal:
    """A bar on a terminal that only remembers, with a clock that is turned, beside a handler that logs there."""

    def __init__(self, model: str = "m", width: int = 80) -> None:
        self.now_s = 0.0
        self.file = io.StringIO()
        console = Console(file=self.file, force_terminal=True, width=width, color_system=None, _environ={})
        self.bar = WeightsBar(model, console, lambda: self.now_s)
        self.handler = logging.StreamHandler(self.file)
        self.handler.setFormatter(TextLines(has_clock=False))

    def lines(self) -> list[str]:
        return seen(self.file.getvalue())


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    logging.getLogger().addHandler(made.handler)
    yield made
    logging.getLogger().removeHandler(made.handler)


def test_a_bar_stays_on_its_line_and_is_gone_at_the_end(terminal: Terminal) -> None:
    with terminal.bar as bar:
        for done, percent in ((1, "25%"), (3, "75%")):
            terminal.now_s += AFTER_S
            bar(done, 4)
            [line] = terminal.lines()
            assert line.startswith("loading m ")
            assert percent in line
    assert terminal.lines() == [""]


def test_a_bar_is_not_drawn_for_a_moment_and_not_for_every_tensor(terminal: Terminal) -> None:
    with terminal.bar as bar:
        terminal.now_s = AFTER_S / 2
        bar(1, 1000)
        assert terminal.file.getvalue() == ""
        terminal.now_s = AFTER_S
        for done in range(2, 900):
            bar(done, 1000)
        terminal.now_s += EVERY_S
        bar(900, 1000)
    assert terminal.file.getvalue().count("loading m") == 2


def test_a_line_that_is_logged_meanwhile_is_whole_and_the_bar_goes_on_below(terminal: Terminal) -> None:
    log = logging.getLogger("t")
    with terminal.bar as bar:
        terminal.now_s = 1.0
        bar(1, 4)
        log.warning("hello")
        assert terminal.lines() == ["WARNING t hello", ""]
        terminal.now_s = 2.0
        bar(2, 4)
        first, last = terminal.lines()
        assert first == "WARNING t hello"
        assert "50%" in last
    log.warning("bye")
    assert terminal.lines() == ["WARNING t hello", "WARNING t bye", ""]


def test_a_bar_leaves_its_line_when_loading_fails(terminal: Terminal) -> None:
    def load() -> None:
        with terminal.bar as bar:
            terminal.now_s = 1.0
            bar(1, 4)
            raise MemoryError

    with pytest.raises(MemoryError):
        load()
    assert terminal.lines() == [""]
    assert terminal.handler.filters == []


def test_a_long_path_does_not_make_a_second_line() -> None:
    terminal = Terminal("/models/[7b]/" + "x" * 200, width=60)
    terminal.now_s = 1.0
    terminal.bar(1, 4)
    [line] = terminal.lines()
    assert line.startswith("loading /models/[7b]/x")
    assert len(line) <= 60


def test_a_bar_outlives_its_terminal() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    times = iter([0.0, AFTER_S])
    with WeightsBar("m", Console(file=Closed(), force_terminal=True), lambda: next(times)) as bar:
        bar(1, 4)


def test_where_there_is_no_terminal_there_are_lines() -> None:
    assert isinstance(weights_progress("m", "text", io.StringIO()), WeightsLog)


def test_a_terminal_that_is_not_ours_is_somebody_else_s() -> None:
    """As for a process that a terminal does not control, which has no foreground to be in."""
    main, ours = pty.openpty()
    with open(main, "rb"), open(ours, "w") as stream:
        assert stream.isatty()
        assert not is_ours(stream)


LOADER = """
import logging, os, sys
from tasks.worker import loading
from tasks.process import weights_bar
from tasks.process.logs import log_to_stderr

os.dup2(os.open(sys.argv[1], os.O_RDWR), 2)  # of a session without one, this becomes the terminal
form, place = sys.argv[2:]
if place == "background" and (child := os.fork()):
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if place == "background":
    os.setpgid(0, 0)
loading.QUIET_S = weights_bar.AFTER_S = weights_bar.EVERY_S = 0
log_to_stderr("info", form, {})
with loading.weights_progress("m", form, sys.stderr) as progress:
    for done in range(1, 5):
        progress(done, 4)
"""


def shown_on_a_terminal(form: str = "text", place: str = "foreground", term: str = "xterm") -> str:
    main, theirs = pty.openpty()
    environ = {**os.environ, "TERM": term}
    command = [sys.executable, "-c", LOADER, os.ttyname(theirs), form, place]
    process = subprocess.Popen(command, env=environ, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        assert process.wait(WAIT_S) == 0
        # All of it is there, and less than what a terminal holds.
        return os.read(main, 65_536).decode()
    finally:
        process.kill()
        os.close(theirs)
        os.close(main)


def test_on_a_terminal_of_its_own_a_worker_shows_a_bar() -> None:
    written = shown_on_a_terminal()
    assert "loading m" in written
    assert all(f"{percent}%" in re.sub(r"\x1b\[[0-9;]*m", "", written) for percent in (25, 50, 75, 100))
    assert seen(written) == [""]
    assert "\x1b[?25l" not in written, "the cursor is not hidden"


@pytest.mark.parametrize(
    ("form", "place", "term"),
    [("json", "foreground", "xterm"), ("text", "background", "xterm"), ("text", "foreground", "dumb")],
)
def test_in_the_background_on_a_dumb_terminal_and_as_json_there_are_lines(form: str, place: str, term: str) -> None:
    written = shown_on_a_terminal(form, place, term)
    assert "\x1b" not in written
    assert written.count("of the weights are there") == 4


@pytest.mark.parametrize(("value", "is_on"), [("", True), ("off", False)])
def test_an_engine_drafts_unless_it_is_turned_off(value: str, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr("decode.factory.load_engine", lambda _, **settings: asked.update(settings))
    environ = {"MODEL": str(tiny_checkpoint("llama").path), "PROMPT_LOOKUP": value, "PREFLIGHT_FORCE": "1"}
    load_for(WorkerSettings.from_env(environ), environ)
    assert asked["prompt_lookup"] is is_on

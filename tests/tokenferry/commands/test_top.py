"""The live picture: what it shows of a cell, and that it ends cleanly."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ConnectionError
from rich.console import Console

from tasks.observe.live import LiveCell, LiveRequest, LiveWorker, Overview, Queue
from tasks.process.crashes import Crashes
from tasks.protocol.contract import WorkerInfo, WorkerLoad
from tests.bridge.cell import Cell
from tests.conftest import RedisServer
from tokenferry.commands.top import MAX_SHOWN, picture, show_top, tokens_per_s
from tokenferry.errors import ForPeople

INFO = WorkerInfo("w1", 1, "h", "cpu", "m", "f", "q4", 1000, 8, 1600, 0)
LOAD = WorkerLoad(num_running=3, num_waiting=1, num_free_blocks=25, num_blocks=100, last_step_ms=9_990)
REQUEST = LiveRequest("r1", "m", "default", "streaming", "w1", 2, 50, 0, 4000, 4000, 4500, 5000, 7, 100)
NOW = Overview(
    at_ms=10_000,
    workers=(LiveWorker(INFO, LOAD, True, 3),),
    queues=(Queue("m", "default", 0, 0), Queue("m", "flex", 4, 7_500)),
    requests=(REQUEST,),
    num_running=1,
)


def shown(now: Overview, before: Overview | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=160)
    console.print(picture(now, before))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_on_a_narrow_terminal_nothing_that_matters_is_cut() -> None:
    long = replace(REQUEST, request_id="chatcmpl-" + "a" * 32, worker="machine-1a2b3c4d")
    now = replace(
        NOW, requests=(long,), workers=(LiveWorker(replace(INFO, worker="machine-1a2b3c4d"), LOAD, True, 3),)
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(picture(now, replace(now, at_ms=9_000), console.width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert line_with(lines, "3/8").split() == [
        "machine-1a2b3c4d",
        "cpu",
        "m",
        "3/8",
        "▕██████",
        "▏",
        "75%",
        "10",
        "ms",
    ]
    assert "50/100" in line_with(lines, "chatcmpl-aaa")
    assert max(map(len, lines)) <= 80


def line_with(lines: list[str], text: str) -> str:
    (found,) = [line for line in lines if text in line]
    return found


def test_a_worker_has_its_load_its_cache_as_a_bar_and_the_age_of_its_last_step() -> None:
    line = line_with(shown(NOW), "q4")
    assert line.split()[:6] == ["w1", "cpu", "m", "(q4)", "3/8", "1"]
    assert "▕████████████    ▏ 75%" in line
    assert line.endswith("10 ms")


def test_a_worker_whose_lease_is_over_says_so() -> None:
    gone = replace(NOW, workers=(LiveWorker(INFO, LOAD, False, 3),))
    assert "lease is over" in line_with(shown(gone), "q4")


def test_only_queues_in_which_somebody_waits_are_shown_with_their_age() -> None:
    lines = shown(NOW)
    assert line_with(lines, "flex").split() == ["m", "flex", "4", "2.50", "s"]
    assert not any("default" in line for line in lines)


def test_a_request_has_its_age_its_attempt_and_its_progress() -> None:
    line = line_with(shown(NOW), "r1")
    assert line.split()[:7] == ["r1", "streaming", "w1", "2", "6.00", "s", "7"]
    assert "▕████████        ▏50/100" in line


def test_a_request_whose_limit_is_not_known_has_its_tokens() -> None:
    unknown = replace(REQUEST, max_tokens=None, num_prompt_tokens=None)
    assert line_with(shown(replace(NOW, requests=(unknown,))), "r1").split()[-1] == "50"


def test_two_looks_give_the_rate() -> None:
    before = replace(NOW, at_ms=9_500, requests=(replace(REQUEST, num_tokens=30),))
    assert tokens_per_s(before, NOW) == {"r1": 40.0}
    lines = shown(NOW, before)
    assert "40 tokens/s" in lines[0]
    assert line_with(lines, "r1").split()[-1] == "40"


def test_a_request_that_has_come_since_has_no_rate_yet() -> None:
    assert tokens_per_s(replace(NOW, at_ms=9_500, requests=()), NOW) == {}
    assert tokens_per_s(None, NOW) == {}


def test_without_a_live_worker_the_picture_says_what_that_means() -> None:
    assert any("no worker is live" in line for line in shown(replace(NOW, workers=())))


def test_a_worker_that_never_came_to_serve_is_told_with_its_reason() -> None:
    crash = Crashes("worker", "h", 7, 1, 9_000, "cannot serve: no such model", True)
    told = "worker on h (supervisor 7) ended for good 1 s ago: cannot serve: no such model"
    assert told in shown(replace(NOW, crashes=(crash,)))


def test_what_has_no_room_is_counted() -> None:
    many = tuple(replace(REQUEST, request_id=f"r{n}") for n in range(MAX_SHOWN + 5))
    assert "and 9 more" in shown(replace(NOW, requests=many, num_running=MAX_SHOWN + 5))


def test_the_picture_of_a_real_cell(redis_server: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    cell = Cell(redis_server.connect("short"), redis_server.connect("queue"))
    seconds, _ = cell.redis.time()
    cell.join("w1", int(seconds) * 1000 + 100_000)
    cell.offer("r1", int(seconds) * 1000)
    cell.claim("r1", "w1", int(seconds) * 1000)
    assert show_top(LiveCell(cell.redis).look, once=True, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert [worker["worker"] for worker in told["workers"]] == ["w1"]
    assert [(one["request_id"], one["state"], one["max_tokens"]) for one in told["requests"]] == [
        ("r1", "claimed", 9)
    ]
    assert (told["num_running"], told["num_waiting"], told["tokens_per_s"]) == (1, 0, None)


class Looks:
    """One look after the other; Ctrl-C in the wait after the last."""

    def __init__(self, *looks: Overview) -> None:
        self._looks = list(looks)

    def look(self) -> Overview:
        return self._looks.pop(0)

    def wait(self, _: float) -> None:
        if not self._looks:
            raise KeyboardInterrupt


def test_as_json_it_is_a_line_each_second_until_it_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    looks = Looks(NOW, replace(NOW, at_ms=11_000, requests=(replace(REQUEST, num_tokens=60),)))
    assert show_top(looks.look, once=False, as_json=True, wait=looks.wait) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["tokens_per_s"] for line in lines] == [None, 10.0]


def test_on_a_terminal_the_screen_is_given_back_at_the_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    looks = Looks(NOW, NOW)
    assert show_top(looks.look, once=False, as_json=False, console=console, wait=looks.wait) == 0
    written: Any = console.file
    assert written.getvalue().count("\x1b[?1049h") == 1
    assert written.getvalue().count("\x1b[?1049l") == 1


def test_a_redis_that_does_not_answer_is_one_line() -> None:
    def look() -> Overview:
        raise ConnectionError("refused")

    with pytest.raises(ForPeople, match="tokenferry doctor"):
        show_top(look, once=True, as_json=False)

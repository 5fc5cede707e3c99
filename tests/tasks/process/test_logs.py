"""What a line of the log looks like, as text and as JSON."""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
import pytest

from tasks.process.logs import JsonLines, TextLines, log_to_stderr


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("app.access", logging.INFO, "file.py", 1, message, args, None)
    made.__dict__.update(extra)
    return made


def as_json(made: logging.LogRecord, process: str = "") -> dict[str, Any]:
    line = JsonLines(process).format(made)
    assert "\n" not in line
    found: dict[str, Any] = orjson.loads(line)
    return found


def failed(message: str) -> logging.LogRecord:
    made = record(message)
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def test_a_json_line_has_the_request_and_the_numbers_as_fields() -> None:
    line = as_json(record("%s attempt=%d: released, %s", "chatcmpl-1.2", 3, "drain"), "worker.1")
    assert line["request_id"] == "chatcmpl-1.2"
    assert line["attempt"] == 3
    assert (line["level"], line["logger"], line["process"]) == ("info", "app.access", "worker.1")
    assert line["message"] == "chatcmpl-1.2 attempt=3: released, drain"


def test_given_fields_go_over_those_found_in_the_message() -> None:
    line = as_json(record("- GET /x a=1", fields={"request_id": "mine", "a": 2.5}))
    assert (line["request_id"], line["a"]) == ("mine", 2.5)


def test_a_message_cannot_overwrite_what_the_line_is_about() -> None:
    assert as_json(record("level=debug logger=evil"))["level"] == "info"


def test_numbers_are_numbers_in_json() -> None:
    line = as_json(record("ms=1.5 num=12 name=x-1 big=123456789012345678901"))
    assert (line["ms"], line["num"], line["name"], line["big"]) == (1.5, 12, "x-1", "123456789012345678901")


def test_an_event_is_one_line_whatever_is_in_it() -> None:
    assert (
        TextLines(has_clock=False).format(record("a\nb\x1b[2Jc\u2028d")) == "INFO app.access a\\nb\\x1b[2Jc\\u2028d"
    )


def test_a_traceback_follows_indented_in_text_and_is_a_field_in_json() -> None:
    first, *rest = TextLines(has_clock=False).format(failed("broke")).split("\n")
    assert first == "INFO app.access broke"
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert "ValueError: bad\nthing" in as_json(failed("broke"))["exception"]


@pytest.mark.parametrize(("environ", "has_clock"), [({}, True), ({"HONCHO_PROCESS_NAME": "web.1"}, False)])
def test_the_clock_stays_out_under_a_process_manager(
    environ: dict[str, str], has_clock: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        log_to_stderr("info", "text", environ)
        logging.getLogger("x").info("here")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    line = capsys.readouterr().err
    assert line.endswith("INFO x here\n")
    assert line.startswith("INFO") is not has_clock

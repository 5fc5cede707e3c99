"""How every process says what happens: one line an event, as text or as JSON, on standard error.

Owns the two formats. Refuses to know what is said. Messages begin with the id of their request, if they are about
one, and have their numbers as `name=value`; in JSON both are fields of their own. Whoever logs sees to it that no
text of a client or a model is in a message; that a line is one line is seen to here.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

FIELDS = "fields"
"""Name of an `extra` whose entries become fields in JSON (the text has them in its message)."""

PROCESS_NAME = "TOKENFERRY_PROCESS"
"""Set by `tokenferry serve`: the name of a process among its processes."""

_REQUEST_ID = re.compile(r"(?:chatcmpl|cmpl|req)-[\w.-]+")
_PAIR = re.compile(r"(?<!\S)([a-z_]+)=([^\s,;]+?)(?=[,;:]?(?:\s|$))")
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,9})?")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def log_to_stderr(level: str, form: str, environ: Mapping[str, str]) -> None:
    """`form` is "text" or "json". A process manager has a clock of its own, so in text ours stays out under one."""
    process = environ.get(PROCESS_NAME) or environ.get("HONCHO_PROCESS_NAME", "")
    formatter = JsonLines(process) if form == "json" else TextLines(has_clock=not process)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextLines(logging.Formatter):
    """Level, logger and message; a traceback follows in lines of its own, indented."""

    def __init__(self, *, has_clock: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s" if has_clock else "%(levelname)s")

    def format(self, record: logging.LogRecord) -> str:
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        line = f"{self.formatMessage(record)} {record.name} {_one_line(record.getMessage())}"
        trace = _trace(self, record)
        return line if not trace else line + "".join(f"\n    {_one_line(part)}" for part in trace.split("\n"))


class JsonLines(logging.Formatter):
    """One object a line: `time`, `level`, `logger`, `process`, `request_id` if there is one, `message`, fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if self._process:
            line["process"] = self._process
        if found := _REQUEST_ID.match(message):
            line["request_id"] = found.group()
        line["message"] = message
        for name, value in _PAIR.findall(message):
            line.setdefault(name, _value(value))
        line |= getattr(record, FIELDS, {})
        if trace := _trace(self, record):
            line["exception"] = trace
        return orjson.dumps(line, default=str).decode("utf-8", "replace")


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def _one_line(text: str) -> str:
    return _CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def _value(text: str) -> str | int | float:
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    return text

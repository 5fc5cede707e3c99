"""How far reading and repacking weights is, as a bar on a terminal.

Owns how it is drawn, and the look of every bar (`bar_columns`, for downloads too). Refuses to know whether there
should be one (`tasks.worker.loading`), and is imported by a worker only where there is.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

AFTER_S = 0.5
"""What is over sooner has no bar."""
EVERY_S = 0.1
_ERASE = "\r\x1b[K"


def bar_on(stream: TextIO, model: str) -> WeightsBar | None:
    """None: nothing can be drawn there."""
    console = Console(file=stream)
    return WeightsBar(model, console) if console.is_terminal and not console.is_dumb_terminal else None


def bar_columns(amount: ProgressColumn) -> tuple[ProgressColumn, ...]:
    return TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn()


class WeightsBar:
    """The last line of a terminal, drawn anew in its place, and gone at the end. What is logged meanwhile makes it
    give way.

    No thread draws and the cursor stays as it is: a signal may end the process at any moment of loading, and must
    not leave the terminal without one.
    """

    def __init__(self, model: str, console: Console, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._monotonic = monotonic
        self._bars = Progress(*bar_columns(TaskProgressColumn()), console=console, auto_refresh=False)
        self._task = self._bars.add_task(f"loading {model}", total=None)
        self._next_s = monotonic() + AFTER_S
        self._is_drawn = False

    def __call__(self, num_done: int, num_tensors: int) -> None:
        self._bars.update(self._task, completed=num_done, total=num_tensors)
        if (now_s := self._monotonic()) >= self._next_s:
            self._next_s = now_s + EVERY_S
            self._draw()

    def __enter__(self) -> WeightsBar:
        for handler in logging.getLogger().handlers:
            handler.addFilter(self._give_way)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self._give_way)
        self._erase()

    def _give_way(self, record: logging.LogRecord) -> bool:
        self._erase()
        return True

    def _draw(self) -> None:
        with _a_terminal_that_may_close():
            with self._console.capture() as drawn:
                self._console.print(self._bars.get_renderable())
            self._write(_ERASE + drawn.get().partition("\n")[0])
            self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            with _a_terminal_that_may_close():
                self._write(_ERASE)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def _a_terminal_that_may_close() -> contextlib.suppress:
    """One that was closed meanwhile is no reason not to serve."""
    return contextlib.suppress(OSError)

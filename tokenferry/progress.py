"""How a pull looks to a person: one bar a stage on a terminal, a line now and then elsewhere.

Owns the drawing. Refuses to know what is pulled.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

QUARTER = 25
"""Percent between two lines where there is no terminal."""


class PullProgress:
    """A `tokenferry.pull.Progress`: `with PullProgress() as progress: pull(name, cache, progress=progress)`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._title, self._total, self._said = "", 0, 0

    def stage(self, title: str, total: int) -> None:
        self._title, self._total, self._said = title, total, 0
        self._task = self._bars.add_task(title, total=total or None)
        if not self._console.is_terminal:
            size = f" ({total / 1e6:,.0f} MB)" if total else ""
            self._console.print(f"{title}{size}", highlight=False)

    def done(self, num_bytes: int) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=num_bytes)
        percent = 100 * num_bytes // self._total if self._total else 0
        if not self._console.is_terminal and percent >= self._said + QUARTER:
            self._said = percent // QUARTER * QUARTER
            self._console.print(f"{self._title}: {self._said} %", highlight=False)

    def __enter__(self) -> PullProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

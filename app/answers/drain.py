"""What is being sent to clients, and its end when the process shuts down.

Owns which answers are open, and the drain.
"""

from __future__ import annotations

import asyncio
import logging

from app.errors import ShuttingDown, shutting_down
from bridge.streams.choices import ChoiceStreams
from tasks.observe.metrics import OPEN_STREAMS, Meter

log = logging.getLogger(__name__)


class OpenAnswers:
    """What is being sent to a client and is not over."""

    def __init__(self, meter: Meter) -> None:
        meter.ask(OPEN_STREAMS, value=lambda: len(self._open))
        self.is_draining = False
        self._is_drained = False
        self._open: set[ChoiceStreams] = set()
        self._emptied: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._open)

    def check_accepting(self) -> None:
        """Raises ApiError once the drain has begun."""
        if self.is_draining:
            raise shutting_down()

    def add(self, streams: ChoiceStreams) -> None:
        self._open.add(streams)
        if self._is_drained:
            # Admitted while the drain ended: it would be cut off without a word.
            streams.fail(ShuttingDown())

    def discard(self, streams: ChoiceStreams) -> None:
        self._open.discard(streams)
        if self._emptied is not None and not self._open:
            self._emptied.set()

    async def drain(self, budget_s: float) -> None:
        """Accepts nothing more; lets open answers finish within the budget, then ends them with an error event."""
        self.is_draining = True
        if self._open:
            await self._empty(budget_s)
        self._is_drained = True
        for streams in list(self._open):
            streams.fail(ShuttingDown())

    async def _empty(self, budget_s: float) -> None:
        self._emptied = asyncio.Event()
        try:
            await asyncio.wait_for(self._emptied.wait(), budget_s)
        except TimeoutError:
            log.info("%d answers did not finish within %g s", len(self._open), budget_s)

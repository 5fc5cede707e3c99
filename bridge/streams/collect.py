"""The streams of one answer to its end, for responses that are not streamed.

Owns when an answer is complete. Refuses to know what becomes of the tokens: each choice has a sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bridge.streams.choices import ChoiceStreams
from bridge.streams.relay import Control, close_others
from tasks.protocol.contract import TerminalEvent, TokenEvent


class Sink(Protocol):
    """Takes the tokens of one choice."""

    @property
    def is_satisfied(self) -> bool:
        """The choice is complete whatever the worker does next (a stop string was found)."""

    def push(self, events: Sequence[TokenEvent]) -> None: ...
    def end(self, end: TerminalEvent) -> None: ...


class EndedEarly(Exception):
    """A choice ended without finishing; `end` says how."""

    def __init__(self, end: TerminalEvent) -> None:
        super().__init__(end.reason)
        self.end = end


async def collect(streams: ChoiceStreams, sinks: Sequence[Sink], control: Control, *, poll_s: float = 60.0) -> None:
    """Reads until every sink has its end. A stop string ends its choice there.

    Raises EndedEarly once a choice has ended without finishing, or what the streams were failed with. Whatever is
    not over then is closed or left.
    """
    still_open, satisfied = set(range(len(sinks))), set[int]()
    try:
        while still_open:
            for choice, events in await streams.next(poll_s):
                end = events.pop() if isinstance(events[-1], TerminalEvent) else None
                if events and choice not in satisfied:
                    sinks[choice].push(events)  # type: ignore[arg-type]
                    if sinks[choice].is_satisfied:
                        satisfied.add(choice)
                        if end is None:
                            control.close(choice, "finished", "stop")
                if isinstance(end, TerminalEvent):
                    still_open.discard(choice)
                    sinks[choice].end(end)
                    if end.state != "finished" and choice not in satisfied:
                        raise EndedEarly(end)
    except EndedEarly as early:
        close_others(control, still_open - satisfied, early.end)
        raise
    except BaseException:
        if left := sorted(still_open - satisfied):
            control.leave(left)
        raise
    finally:
        streams.close()

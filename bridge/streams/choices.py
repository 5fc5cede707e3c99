"""The streams of all choices of one answer, waited for as one.

Owns the fan-in: one wait over as many subscriptions as the answer has choices. Refuses to know what a choice is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bridge.streams.reader import Reader
from bridge.streams.subscription import Subscription, Waiting
from tasks.protocol.contract import StreamEvent


class ChoiceStreams:
    """Use: `next` until every choice has given its TerminalEvent, then or earlier `close`."""

    def __init__(self, subscriptions: Sequence[Subscription], waiting: Waiting) -> None:
        """`subscriptions` were made with `waiting`."""
        self.subscriptions = tuple(subscriptions)
        self._waiting = waiting

    @property
    def request_id(self) -> str:
        """Of the answer, which is that of its first choice."""
        return self.subscriptions[0].request_id

    def __len__(self) -> int:
        return len(self.subscriptions)

    def on_first_token(self, callback: Callable[[], None]) -> None:
        """`callback` is called when the first tokens of a choice are there, once for each."""
        for one in self.subscriptions:
            one.on_first_token = callback

    async def next(self, timeout_s: float) -> list[tuple[int, list[StreamEvent]]]:
        """The events that are there, with the number of their choice; waits for the first.

        An empty list after `timeout_s` without any. Raises what one of them was failed with, at once.
        """
        if not any(one.is_ready for one in self.subscriptions):
            await self._waiting.wait(timeout_s)
        return [(number, one.take()) for number, one in enumerate(self.subscriptions) if one.is_ready]

    def fail(self, error: Exception) -> None:
        """Every wait, this one and later ones, raises `error`. The first error stays."""
        for one in self.subscriptions:
            one.fail(error)

    def close(self) -> None:
        """No further reads. Idempotent."""
        for one in self.subscriptions:
            one.close()


def open_streams(reader: Reader, request_ids: Sequence[str], waiting: Waiting) -> ChoiceStreams:
    """From the first token of each. Together they hold no more than the stream of one."""
    share = len(request_ids)
    return ChoiceStreams([reader.subscribe(request_id, -1, waiting, share) for request_id in request_ids], waiting)

"""One request's stream to one whole answer, for responses that are not streamed.

Owns when an answer is complete. Refuses to know how the answer is shown and where the text comes from (a
detokenizer is handed in).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bridge.subscription import Subscription
from tasks.contract import TerminalEvent


class TextSource(Protocol):
    """Token ids to text (`app.detokenizer.Detokenizer`)."""

    num_tokens_used: int

    @property
    def stopped(self) -> bool: ...
    def push(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """`num_tokens` counts the output tokens up to the end, or up to the one that completed a stop string."""

    text: str
    num_tokens: int
    stopped: bool
    end: TerminalEvent


async def collect(
    subscription: Subscription,
    source: TextSource,
    close_request: Callable[[str, str], None],
    *,
    poll_s: float = 60.0,
) -> Answer:
    """Reads to the terminal entry. A stop string ends the generation there.

    Raises what the subscription was failed with; the caller closes the request then.
    """
    parts: list[str] = []
    was_stopped = False
    try:
        while True:
            for event in await subscription.next(poll_s):
                if isinstance(event, TerminalEvent):
                    parts.append(source.finish())
                    num_tokens = source.num_tokens_used if source.stopped else event.index
                    return Answer("".join(parts), num_tokens, source.stopped, event)
                if not was_stopped:
                    parts.append(source.push(event.token_ids))
            if source.stopped and not was_stopped:
                was_stopped = True
                close_request("finished", "stop")
    finally:
        subscription.close()

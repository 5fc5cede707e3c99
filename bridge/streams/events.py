"""What a reader of a stream has to do with its events, whoever it is: cut away what it knows, and give up."""

from __future__ import annotations

from tasks.protocol.contract import TokenEvent


class StreamLost(Exception):
    """The rest of a stream cannot be read; the message says why. The caller must tell its client."""


def from_index(event: TokenEvent, index: int) -> TokenEvent | None:
    """Its tokens from `index` on, which is not before its first; None if it has none."""
    num_known = index - event.index
    if num_known >= len(event.token_ids):
        return None
    return TokenEvent(index, event.attempt, event.token_ids[num_known:], event.logprobs[num_known:])

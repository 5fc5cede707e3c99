"""Log probabilities in OpenAI's JSON.

Owns how a token is shown: its text, and its true bytes, which may be a part of a character. Refuses to know which
tokens are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import orjson

from decode.engine.sampling import TokenLogprobs


class Entry(NamedTuple):
    """One token of an answer."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int
    """Where its text begins in the text of the choice, in characters."""


VERY_UNLIKELY = -9999.0
"""What OpenAI gives in the place of minus infinity, which JSON does not have."""


class TokenNames(dict[int, bytes]):
    """The members `token` and `bytes` of each token id, as JSON: for all answers of a model."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self.token_bytes = token_bytes

    def __missing__(self, token_id: int) -> bytes:
        data = self.token_bytes(token_id)
        text = orjson.dumps(data.decode("utf-8", "replace"))
        name = b'"token":%b,"bytes":%b' % (text, orjson.dumps(list(data)) if data else b"null")
        self[token_id] = name
        return name

    def text(self, token_id: int) -> str:
        """For people: U+FFFD stands for what is only a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def entry(self, entry: Entry) -> bytes:
        """One element of `logprobs.content` of a chat."""
        # PERF: with 20 tokens beside it this is nearly all that a token costs.
        top = b",".join(
            [
                b'{%b,"logprob":%.6f}' % (self[token_id], logprob if logprob > VERY_UNLIKELY else VERY_UNLIKELY)
                for token_id, logprob in entry.logprobs.top
            ]
        )
        own = finite(entry.logprobs.logprob)
        return b'{%b,"logprob":%.6f,"top_logprobs":[%b]}' % (self[entry.token_id], own, top)


def finite(logprob: float) -> float:
    """Rounded to about what a 32-bit number holds; a number that JSON has."""
    return round(logprob, 6) if logprob > VERY_UNLIKELY else VERY_UNLIKELY

"""Log probabilities in OpenAI's JSON.

Owns how a token is shown: its text, and its true bytes, which may be a part of a character. Refuses to know which
tokens are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import orjson

from decode.sampling import TokenLogprobs


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
        top = b",".join([b"{%b}" % self._pair(*pair) for pair in entry.logprobs.top])
        return b'{%b,"top_logprobs":[%b]}' % (self._pair(entry.token_id, entry.logprobs.logprob), top)

    def _pair(self, token_id: int, logprob: float) -> bytes:
        return b'%b,"logprob":%b' % (self[token_id], orjson.dumps(finite(logprob)))


def finite(logprob: float) -> float:
    """Rounded to what a 32-bit number holds; a number that JSON has."""
    return round(logprob, 6) if logprob > VERY_UNLIKELY else VERY_UNLIKELY

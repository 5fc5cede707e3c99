"""Token ids to text, piece by piece, for one answer.

Owns the incremental UTF-8 decoding, the leading-space rule and the count of tokens used. Refuses to know how a
token got its bytes (`app.text.tokenizer`) and how stop strings are matched (`app.text.stop_strings`).

Promise: all pieces joined are exactly the one-shot decode of all token ids, cut before the first complete stop
string. A piece never contains half a character, nor U+FFFD for a character that a later token completes; the text
before an incomplete character is not held back with it. The one-shot decode is: the bytes of all tokens, joined,
read as UTF-8, where every maximal invalid part becomes one U+FFFD (Unicode, section 3.9, "substitution of maximal
subparts"; `bytes.decode("utf-8", "replace")` in Python).
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence

from app.text.stop_strings import StopStrings

_Utf8Decoder = getincrementaldecoder("utf-8")


class TokenTexts(dict[int, str | bytes]):
    """What each token id contributes: str if its bytes are whole characters, else the raw bytes.

    Filled on demand and shared by all detokenizers of a model. Ids without text (control tokens, padding rows of
    the output layer) give the empty string.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | bytes:
        data = self._token_bytes(token_id)
        piece: str | bytes
        try:
            piece = data.decode("utf-8")
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece


class Detokenizer:
    """The text of one answer. `push` gives safe text, `finish` the rest; after a stop string both give nothing.

    `strip_leading_space`: the tokenizer puts a space before every text, so one space at the start of the answer
    is not part of it.
    """

    def __init__(self, texts: TokenTexts, stop: Sequence[str] = (), *, strip_leading_space: bool = False) -> None:
        self.num_tokens_used = 0
        """Tokens pushed, up to and including the one that completed a stop string."""
        self._texts = texts
        self._stop = StopStrings(stop) if stop else None
        self._decoder = _Utf8Decoder("replace")
        self._has_pending_bytes = False
        self._strips = strip_leading_space

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; the answer ends before it."""
        return self._stop is not None and self._stop.matched

    @property
    def num_held(self) -> int:
        """Characters that are held back, because they may become a stop string."""
        return 0 if self._stop is None else self._stop.num_held

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next output tokens; returns the text that can be sent now."""
        stop = self._stop
        if stop is None:
            self.num_tokens_used += len(token_ids)
            if len(token_ids) == 1:
                return self._decode(token_ids[0])
            return "".join([self._decode(token_id) for token_id in token_ids])
        safe = ""
        for token_id in token_ids:
            if stop.matched:
                break
            self.num_tokens_used += 1
            text = self._decode(token_id)
            if text:
                safe += stop.push(text)
        return safe

    def finish(self) -> str:
        """The end of the answer: what was held back, with U+FFFD for a character that was never completed."""
        if self.stopped:
            return ""
        tail = self._strip(self._decoder.decode(b"", final=True))
        if self._stop is None:
            return tail
        return self._stop.push(tail) + self._stop.finish()

    def _decode(self, token_id: int) -> str:
        piece = self._texts[token_id]
        # PERF: nearly every token is whole characters and needs no decoder.
        if isinstance(piece, str) and not self._has_pending_bytes:
            return self._strip(piece) if self._strips else piece
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        self._has_pending_bytes = bool(self._decoder.getstate()[0])
        return self._strip(text)

    def _strip(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text

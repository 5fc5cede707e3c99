"""Text to token ids and token ids to bytes, for one checkpoint.

Owns the `Tokenizer` that the rest of the text edge uses, and which tokens text may give. Refuses to know where a
tokenizer comes from (`app.text.hf`, `app.text.gguf`), how token strings become bytes (`decode.checkpoint.vocabulary`)
and what roles and templates are (`app.text.templates`).

SAFETY: text is encoded by a tokenizer that does not have the control tokens at all, so no text can produce one.
Control tokens are recognised by `Tokenizer.encode_pieces` only, and only in pieces that a template wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import tokenizers

from app.dialect.conversation import Piece


class TokenizerError(ValueError):
    """The checkpoint's tokenizer or chat template cannot be used; the message says which part and why."""


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that templates may write and text may not. `eats_*`: it swallows the white space beside it."""

    token_id: int
    eats_left: bool = False
    eats_right: bool = False


@dataclass(frozen=True)
class Tokenizer:
    """One checkpoint's tokenizer. Safe to share between threads."""

    encode_first: Callable[[str], list[int]]
    """Ordinary text that starts a prompt to ids; never gives a control token, never adds BOS."""
    encode_later: Callable[[str], list[int]]
    """The same for text that follows a control token."""
    token_bytes: Callable[[int], bytes]
    """What an output token adds to the answer; empty for special tokens and for ids that do not exist."""
    control_tokens: Mapping[str, ControlToken]
    prompt_prefix: tuple[int, ...] = ()
    """What a plain prompt begins with: BOS, where the checkpoint wants it."""
    strip_leading_space: bool = False
    """The tokenizer puts a space before every text, so a decoded answer loses one."""
    template_tokens: Mapping[str, str] = field(default_factory=dict)
    """Token texts by the names that templates use: `bos_token`, `eos_token`, ..."""

    def encode(self, text: str) -> list[int]:
        """A plain prompt: the prefix and the text, in which control tokens are not recognised."""
        return [*self.prompt_prefix, *self.encode_first(text)]

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """A rendered prompt to ids. Control tokens are recognised in scaffold pieces, one piece at a time.

        Text between two control tokens is encoded as a whole, wherever it came from, so the ids are those of the
        rendered string as long as no message contains the text of a control token.
        """
        ids: list[int] = []
        run: list[str] = []
        previous: ControlToken | None = None
        for text, is_scaffold in pieces:
            if not is_scaffold:
                run.append(text)
                continue
            for part in self._split(text):
                if isinstance(part, str):
                    run.append(part)
                    continue
                self._encode_run("".join(run), previous, part, ids)
                ids.append(part.token_id)
                previous = part
                run.clear()
        self._encode_run("".join(run), previous, None, ids)
        return ids

    def _encode_run(self, text: str, left: ControlToken | None, right: ControlToken | None, ids: list[int]) -> None:
        if left and left.eats_right:
            text = text.lstrip()
        if right and right.eats_left:
            text = text.rstrip()
        if text:
            ids.extend((self.encode_later if left else self.encode_first)(text))

    @cached_property
    def _split(self) -> Callable[[str], tuple[str | ControlToken, ...]]:
        """Cuts scaffold at control tokens, the longest first. Scaffold repeats, so the cuts are remembered."""
        tokens = dict(self.control_tokens)
        if not tokens:
            return lambda text: (text,)
        first_characters = re.escape("".join(sorted({token[0] for token in tokens})))
        alternatives = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        pattern = re.compile(f"(?=[{first_characters}])({alternatives})")

        def split(text: str) -> tuple[str | ControlToken, ...]:
            return tuple(tokens.get(part, part) for part in pattern.split(text) if part)

        return lru_cache(maxsize=256)(split)


_HTML_NAMES = """
    a abbr article aside b blockquote body br button caption code col dd del div dl dt em figcaption figure footer
    form h1 h2 h3 h4 h5 h6 head header hr html i iframe img input ins label li link main mark meta nav ol option p
    pre q s samp script section select small span strong style sub summary sup svg table tbody td textarea tfoot
    th thead time title tr u ul var video
"""
_HTML_TAG = re.compile(f"</?({'|'.join(_HTML_NAMES.split())})>")


def is_plain_text_token(content: str) -> bool:
    """Whether an added token is only a shorthand for common text (runs of white space, HTML tags).

    Such tokens may come from a message. Everything else that a checkpoint adds beside its vocabulary (turn, tool
    and thinking markers, image slots, ...) is a control token, whether or not it is flagged as special.
    """
    return not content.strip() or not content.strip("▁") or _HTML_TAG.fullmatch(content) is not None


def encoder(core: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
    """Text to ids by a tokenizer of the library.

    PERF: a batch of one, because `encode` keeps the interpreter's lock: a prompt of 400 KB in a worker thread held up
    every stream of the process for a second.
    """

    def encode(text: str) -> list[int]:
        [encoding] = core.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    return encode

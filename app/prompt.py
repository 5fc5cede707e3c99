"""A prompt on its way from messages to token ids, as data.

Owns the types that the text edge passes around. Refuses to know how they are made (`app.templates`) and encoded
(`app.tokenizer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PromptError(ValueError):
    """The messages cannot become a prompt; the client is told `message` and the request field `param`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. `content` is text only; list content was flattened and null made empty by `app.openai_in`."""

    role: str
    content: str


class Piece(NamedTuple):
    """A part of a rendered prompt. Control tokens are recognised in scaffold, which a template wrote itself, and
    never in what came from a message."""

    text: str
    is_scaffold: bool

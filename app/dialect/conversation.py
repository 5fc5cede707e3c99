"""A prompt on its way from messages to token ids, as data.

Owns the types that the text edge passes around. Refuses to know how they are made (`app.text.templates`) and encoded
(`app.text.tokenizer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class PromptError(ValueError):
    """The messages cannot become a prompt; the client is told `message` and the request field `param`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message


class PromptTooLong(PromptError):
    """The prompt has more than `num_tokens` tokens, which is more than any worker can take (`limit`)."""

    def __init__(self, param: str, limit: int, num_tokens: int) -> None:
        super().__init__(param, f"the prompt has more than {num_tokens} tokens, and the model takes {limit}")
        self.limit = limit
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant has made. `arguments` are as the model wrote them, so JSON as a rule."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. `content` is text only; list content was flattened and null made empty by `app.contract.chat`."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant's turn."""
    tool_call_id: str = ""
    """Of a tool's turn: which call this is the result of."""
    reasoning: str = ""
    """What the model thought before an assistant's turn; for templates that show it again."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    definition: Mapping[str, Any]
    """As the client gave it, in OpenAI's shape: what templates are used to."""
    arguments_schema: Mapping[str, Any]
    """What arguments have to follow (`app.grammar.schema`)."""


class Piece(NamedTuple):
    """A part of a rendered prompt. Control tokens are recognised in scaffold, which a template wrote itself, and
    never in what came from a message."""

    text: str
    is_scaffold: bool


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)

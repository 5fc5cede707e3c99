"""Chat messages to prompts."""

from __future__ import annotations

from dataclasses import dataclass


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

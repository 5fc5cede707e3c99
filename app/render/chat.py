"""How the chat endpoint writes an answer: the shape of a chunk and of a whole choice.

Owns `Shape`, what every kind of answer has to say about its JSON, and the one for chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from app.dialect.parts import AnswerPart, Content, Reasoning, ToolArguments, ToolStart
from app.render.logprobs import Entry, TokenNames
from app.render.spec import AnswerSpec

NULL = b"null"


class Shape(Protocol):
    """What differs between a chat and a completion."""

    @property
    def chunk_object(self) -> str: ...
    @property
    def whole_object(self) -> str: ...
    @property
    def around_content(self) -> tuple[bytes, bytes]:
        """What `member` puts before and after the JSON of a text that is all content."""

    def opening(self, choice: int) -> bytes:
        """The member of a choice that says that it begins; empty if nothing does."""

    def about_prompt(self) -> dict[str, Any]:
        """What is said of the prompt beside the choices, in a whole answer and in the first chunk of a stream."""

    def member(self, parts: Sequence[AnswerPart]) -> bytes:
        """The member of a choice that holds these parts, as JSON with its name. There may be none."""

    def logprobs(self, entries: Sequence[Entry]) -> bytes:
        """As JSON."""

    def whole(self, choice: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """The members of a whole choice that hold its parts."""


class ChatShape:
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    around_content = (b'"delta":{"content":', b"}")

    def __init__(self, names: TokenNames, spec: AnswerSpec) -> None:
        self._names = names
        self._spec = spec

    def opening(self, choice: int) -> bytes:
        return b'"delta":{"role":"assistant","content":"","refusal":null}'

    def about_prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._spec.prompt_token_ids[0]} if self._spec.shows_token_ids else {}

    def member(self, parts: Sequence[AnswerPart]) -> bytes:
        if len(parts) == 1 and isinstance(parts[0], Content):
            return b'"delta":{"content":%b}' % orjson.dumps(parts[0].text)
        # NOTE: one delta for all of them, because an event id cannot name a place between them.
        delta: dict[str, Any] = {}
        if thought := "".join(part.text for part in parts if isinstance(part, Reasoning)):
            delta["reasoning_content"] = thought
        if content := "".join(part.text for part in parts if isinstance(part, Content)):
            delta["content"] = content
        if calls := _calls(parts):
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls.items()]
        return b'"delta":' + orjson.dumps(delta)

    def logprobs(self, entries: Sequence[Entry]) -> bytes:
        return b'{"content":[%b],"refusal":null}' % b",".join([self._names.entry(entry) for entry in entries])

    def whole(self, choice: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        calls = _calls(parts)
        content = "".join(part.text for part in parts if isinstance(part, Content))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
            "annotations": [],
        }
        if thought := "".join(part.text for part in parts if isinstance(part, Reasoning)):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = list(calls.values())
        return {"message": message}


def _calls(parts: Sequence[AnswerPart]) -> dict[int, dict[str, Any]]:
    """The calls that these parts begin or continue, by index."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, ToolStart):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, ToolArguments):
            call = calls.setdefault(part.index, {"function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    return calls

"""The `messages` of a chat request: OpenAI's shapes to plain turns of text.

Owns which roles and content parts are taken. Refuses to know how turns are rendered (`app.text_edge`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.errors import ApiError, invalid
from app.json_kinds import Text
from app.text_edge import ChatMessage

ROLES = ("system", "developer", "user", "assistant", "tool")

_TEXT = Text()


@dataclass(frozen=True, slots=True)
class Messages:
    """A non-empty list of messages; read as a tuple of `ChatMessage`."""

    def read(self, value: Any, param: str) -> tuple[ChatMessage, ...]:
        if not isinstance(value, list):
            raise invalid(param, f"{param} must be a list of messages.", "invalid_type")
        if not value:
            raise invalid(param, f"{param} must have at least one message.")
        return tuple(_message(entry, f"{param}[{number}]") for number, entry in enumerate(value))

    def schema(self) -> dict[str, Any]:
        part = {
            "type": "object",
            "required": ["type", "text"],
            "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
        }
        content = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": part}, {"type": "null"}]}
        message = {
            "type": "object",
            "required": ["role"],
            "properties": {"role": {"enum": list(ROLES)}, "content": content, "name": {"type": "string"}},
        }
        return {"type": "array", "minItems": 1, "items": message}


def _message(value: Any, param: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be an object.", "invalid_type")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{param}.role", f"{param}.role must be one of {', '.join(ROLES)}.")
    if value.get("name") is not None:
        _TEXT.read(value["name"], f"{param}.name")
    if role == "tool":
        _TEXT.read(value.get("tool_call_id"), f"{param}.tool_call_id")
    content = value.get("content")
    if content is None and role == "assistant" and value.get("tool_calls"):
        return ChatMessage(role, "")
    return ChatMessage(role, _content(content, role, f"{param}.content"))


def _content(value: Any, role: str, param: str) -> str:
    if isinstance(value, list):
        if not value:
            raise invalid(param, f"{param} must have at least one part.")
        return "".join(_part(entry, role, f"{param}[{number}]") for number, entry in enumerate(value))
    if not isinstance(value, str):
        raise invalid(param, f"{param} must be a string or a list of text parts.", "invalid_type")
    return _TEXT.read(value, param)


def _part(value: Any, role: str, param: str) -> str:
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be an object.", "invalid_type")
    match value.get("type"):
        case "text":
            return _TEXT.read(value.get("text"), f"{param}.text")
        case "refusal" if role == "assistant":
            return _TEXT.read(value.get("refusal"), f"{param}.refusal")
        case _:
            raise _not_text(f"{param}.type")


def _not_text(param: str) -> ApiError:
    return invalid(param, f'{param} must be "text": this model reads text only.', "unsupported_value")

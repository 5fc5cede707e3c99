"""The `messages` of a chat request: OpenAI's shapes to plain turns of text, and back.

Owns which roles and content parts are taken. Refuses to know how turns are rendered (`app.text.edge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.contract.kinds import Text
from app.dialect.conversation import ChatMessage, ToolCall
from app.errors import ApiError, invalid

ROLES = ("system", "developer", "user", "assistant", "tool")

_TEXT = Text()
_NAME = Text(min_length=1)


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
        text, name = _TEXT.schema(), {"anyOf": [_TEXT.schema(), {"type": "null"}]}
        function = _object(name=_NAME.schema(), arguments=text)
        call = _object(id=text, function=function)
        call["properties"]["type"] = {"enum": ["function"]}
        calls = {"type": "array", "minItems": 1, "items": call}
        texts, refusal = (
            _object(type={"enum": ["text"]}, text=text),
            _object(type={"enum": ["refusal"]}, refusal=text),
        )
        content, answer = _text_or(texts), _text_or({"anyOf": [texts, refusal]})
        kinds = [
            _object(role={"enum": ["system", "developer", "user"]}, content=content),
            _object(role={"enum": ["assistant"]}, content=answer),
            _object(role={"enum": ["assistant"]}, tool_calls=calls),
            _object(role={"enum": ["tool"]}, content=content, tool_call_id=text),
        ]
        kinds[1]["properties"]["tool_calls"] = {"anyOf": [calls, {"type": "array", "maxItems": 0}, {"type": "null"}]}
        kinds[2]["properties"]["content"] = {"anyOf": [answer, {"type": "array", "maxItems": 0}, {"type": "null"}]}
        for kind in kinds:
            kind["properties"]["name"] = name
        for kind in kinds[1:3]:
            kind["properties"]["reasoning_content"] = name
        return {"type": "array", "minItems": 1, "items": {"anyOf": kinds}}


def shown(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages in OpenAI's shape, as they were understood."""
    return [_shown(message) for message in messages]


def _shown(message: ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["content"] = message.content or None
        found["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    return found


def _object(**members: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(members), "properties": members}


def _text_or(part: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_TEXT.schema(), {"type": "array", "minItems": 1, "items": part}]}


def _message(value: Any, param: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be an object.", "invalid_type")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{param}.role", f"{param}.role must be one of {', '.join(ROLES)}.")
    if value.get("name") is not None:
        _TEXT.read(value["name"], f"{param}.name")
    if role == "tool":
        call_id = _TEXT.read(value.get("tool_call_id"), f"{param}.tool_call_id")
        return ChatMessage(role, _content(value.get("content"), role, f"{param}.content"), tool_call_id=call_id)
    if role == "assistant":
        return _answer(value, param)
    return ChatMessage(role, _content(value.get("content"), role, f"{param}.content"))


def _answer(value: dict[str, Any], param: str) -> ChatMessage:
    """An earlier turn of the model. It may have no content if it has calls."""
    calls = _calls(value["tool_calls"], f"{param}.tool_calls") if value.get("tool_calls") else ()
    thoughts = value.get("reasoning_content")
    reasoning = "" if thoughts is None else _TEXT.read(thoughts, f"{param}.reasoning_content")
    content = value.get("content")
    text = "" if calls and (content is None or content == []) else _content(content, "assistant", f"{param}.content")
    return ChatMessage("assistant", text, calls, reasoning=reasoning)


def _calls(value: Any, param: str) -> tuple[ToolCall, ...]:
    if not isinstance(value, list):
        raise invalid(param, f"{param} must be a list of calls.", "invalid_type")
    return tuple(_call(entry, f"{param}[{number}]") for number, entry in enumerate(value))


def _call(value: Any, param: str) -> ToolCall:
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be an object.", "invalid_type")
    if value.get("type", "function") != "function":
        raise invalid(f"{param}.type", f'{param}.type must be "function".', "unsupported_value")
    function = value.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{param}.function", f"{param}.function must be an object.", "invalid_type")
    return ToolCall(
        _TEXT.read(value.get("id"), f"{param}.id"),
        _NAME.read(function.get("name"), f"{param}.function.name"),
        _TEXT.read(function.get("arguments"), f"{param}.function.arguments"),
    )


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

"""The fields of a chat request that shape its answer: tools, the choice among them, and the format of the response.

Owns what these may hold and how they become checked values. Refuses to know how they are enforced
(`app.grammar.grammars`) and rendered (`app.text.templates`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from app.contract.kinds import Boolean, Text
from app.dialect.conversation import Tool
from app.errors import ApiError, invalid
from app.grammar.grammars import check_schema
from app.grammar.schema import Schema, any_object, no_properties, read_object_schema, read_schema

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 262_144

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_TEXT = Text()
_BOOLEAN = Boolean()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()
    """Only these; empty: any."""
    is_named: bool = False
    """One function was demanded by its name."""


AUTO = ToolChoice()


@dataclass(frozen=True, slots=True)
class Tools:
    """At most 128 functions; read as a tuple of `Tool`."""

    def read(self, value: Any, param: str) -> tuple[Tool, ...]:
        if not isinstance(value, list):
            raise invalid(param, f"{param} must be a list of tools.", "invalid_type")
        if len(value) > MAX_TOOLS:
            raise invalid(param, f"{param} must have at most {MAX_TOOLS} tools.", "array_above_max_length")
        tools: dict[str, Tool] = {}
        num_bytes = 0
        for number, entry in enumerate(value):
            tool = _tool(entry, f"{param}[{number}]")
            if tool.name in tools:
                raise invalid(f"{param}[{number}].function.name", f"{param} has two functions of the same name.")
            tools[tool.name] = tool
            num_bytes += len(json.dumps(tool.definition))
            if num_bytes > MAX_TOOLS_BYTES:
                raise invalid(param, f"{param} must have at most {MAX_TOOLS_BYTES} bytes.", "schema_too_large")
        return tuple(tools.values())

    def schema(self) -> dict[str, Any]:
        function = {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
        }
        tool = {
            "type": "object",
            "required": ["type", "function"],
            "properties": {"type": {"enum": ["function"]}, "function": function},
        }
        return {"type": "array", "maxItems": MAX_TOOLS, "items": tool}


@dataclass(frozen=True, slots=True)
class ToolChoices:
    """none, auto, required, one function by its name, or some of the tools; read as a `ToolChoice`."""

    def read(self, value: Any, param: str) -> ToolChoice:
        match value:
            case "none" | "auto" | "required":
                return ToolChoice(value)
            case {"type": "function"}:
                return ToolChoice("required", (_function_name(value, param),), is_named=True)
            case {"type": "allowed_tools"}:
                return _allowed(value.get("allowed_tools"), f"{param}.allowed_tools")
        raise invalid(
            param,
            f'{param} must be "none", "auto", "required", or an object of type "function" or "allowed_tools".',
        )

    def schema(self) -> dict[str, Any]:
        name = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
        function = {
            "type": "object",
            "required": ["type", "function"],
            "properties": {"type": {"enum": ["function"]}, "function": name},
        }
        allowed = {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "items": function},
            },
        }
        some = {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {"type": {"enum": ["allowed_tools"]}, "allowed_tools": allowed},
        }
        return {"anyOf": [{"enum": ["none", "auto", "required"]}, function, some]}


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """text, json_object or json_schema; read as the schema that the answer has to follow, None for text."""

    def read(self, value: Any, param: str) -> Schema | None:
        if not isinstance(value, dict):
            raise invalid(param, f"{param} must be an object.", "invalid_type")
        match value.get("type"):
            case "text":
                return None
            case "json_object":
                return any_object()
            case "json_schema":
                return _json_schema(value.get("json_schema"), f"{param}.json_schema")
        raise invalid(f"{param}.type", f"{param}.type must be one of text, json_object, json_schema.")

    def schema(self) -> dict[str, Any]:
        named = {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
                "description": {"type": "string"},
                "schema": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
        }
        plain = {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}}
        by_schema = {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {"type": {"enum": ["json_schema"]}, "json_schema": named},
        }
        return {"anyOf": [plain, by_schema]}


def check_tool_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    """Raises ApiError for a choice of tools that are not there."""
    if choice.mode == "required" and not tools:
        raise invalid("tool_choice", "tool_choice may only demand a call when tools are given.")
    names = {tool.name for tool in tools}
    if any(name not in names for name in choice.names):
        raise invalid("tool_choice", "tool_choice names a function that is not among tools.")


def _tool(value: Any, param: str) -> Tool:
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be an object.", "invalid_type")
    if value.get("type") != "function":
        raise invalid(f"{param}.type", f'{param}.type must be "function".', "unsupported_value")
    function = value.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{param}.function", f"{param}.function must be an object.", "invalid_type")
    name = _checked_name(function.get("name"), f"{param}.function.name")
    if function.get("description") is not None:
        _TEXT.read(function["description"], f"{param}.function.description")
    is_strict = function.get("strict") is not None and _BOOLEAN.read(function["strict"], f"{param}.function.strict")
    arguments = _arguments(function.get("parameters"), f"{param}.function.parameters", is_strict)
    kept = ("name", "description", "parameters", "strict")
    shown = {key: function[key] for key in kept if function.get(key) is not None}
    return Tool(name, {"type": "function", "function": shown}, arguments)


def _arguments(parameters: Any, param: str, is_strict: bool) -> Schema:
    if parameters is None:
        return no_properties()
    schema = read_object_schema(parameters, param, drops_unsupported=not is_strict)
    if not is_strict:
        # OpenAI takes any schema then. What the library does not know is left out, and the rest holds.
        schema["x-guidance"] = {"lenient": True}
    check_schema(schema, param)
    return schema


def _allowed(value: Any, param: str) -> ToolChoice:
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be an object.", "invalid_type")
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise invalid(f"{param}.mode", f"{param}.mode must be auto or required.")
    if not isinstance(tools, list) or not tools:
        raise invalid(f"{param}.tools", f"{param}.tools must be a list of at least one tool.", "invalid_type")
    names = tuple(_function_name(tool, f"{param}.tools[{number}]") for number, tool in enumerate(tools))
    return ToolChoice(mode, names)


def _function_name(value: Any, param: str) -> str:
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return _checked_name(name, f"{param}.function.name")
    raise _not_a_function(param)


def _not_a_function(param: str) -> ApiError:
    return invalid(param, f'{param} must be {{"type": "function", "function": {{"name": ...}}}}.')


def _checked_name(value: Any, param: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise invalid(param, f"{param} must have from 1 to 64 of the characters a-z, A-Z, 0-9, _ and -.")
    return value


def _json_schema(value: Any, param: str) -> Schema:
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be an object.", "invalid_type")
    _checked_name(value.get("name"), f"{param}.name")
    if value.get("description") is not None:
        _TEXT.read(value["description"], f"{param}.description")
    if value.get("strict") is not None:
        _BOOLEAN.read(value["strict"], f"{param}.strict")
    if value.get("schema") is None:
        return any_object()
    schema = read_schema(value["schema"], f"{param}.schema")
    check_schema(schema, f"{param}.schema")
    return schema

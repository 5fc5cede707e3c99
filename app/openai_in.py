"""The contract of `POST /v1/chat/completions`: OpenAI's JSON to one checked call, or an `ApiError`.

Owns the table of every documented field, what it may hold and what this server does with it: the check, the
documentation and the schema come from the same table. Pure: bytes in, a value out. Fields that are not in the table
are ignored, and an explicit null is the same as an absent field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from app.errors import ApiError, invalid, malformed
from app.json_kinds import (
    INT32_MAX,
    INT64,
    Anything,
    Boolean,
    Fields,
    Integer,
    Kind,
    Neutral,
    Number,
    OneOf,
    Pairs,
    Text,
    TextOrTexts,
)
from app.openai_messages import Messages
from app.text_edge import ChatMessage

Policy = Literal["applied", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """`refused` fields take only their neutral values; `ignored` fields are checked and then not used."""

    kind: Kind
    policy: Policy = "applied"
    default: Any = None
    is_required: bool = False


def _refused(kind: Kind, *neutral: Any) -> Field:
    return Field(Neutral(kind, neutral), "refused")


def _ignored(kind: Kind) -> Field:
    return Field(kind, "ignored")


_NAME = Text(max_length=512)
_PENALTY = Number(-2, 2)

CHAT_FIELDS: Mapping[str, Field] = {
    "model": Field(Text(max_length=256, min_length=1), is_required=True),
    "messages": Field(Messages(), is_required=True),
    "max_completion_tokens": Field(Integer(1, INT32_MAX)),
    "max_tokens": Field(Integer(1, INT32_MAX)),
    "temperature": Field(Number(0, 2), default=1.0),
    "top_p": Field(Number(0, 1, above=True), default=1.0),
    "seed": Field(Integer(*INT64)),
    "stop": Field(TextOrTexts(Text(max_length=1024, min_length=1), max_items=4), default=()),
    "stream": Field(Boolean(), default=False),
    "stream_options": Field(Fields({"include_usage": Boolean(), "include_obfuscation": Boolean()}), default={}),
    # Extensions, as other servers have them.
    "top_k": Field(Integer(0, INT32_MAX), default=0),
    "min_p": Field(Number(0, 1), default=0.0),
    "ignore_eos": Field(Boolean(), default=False),
    "min_tokens": Field(Integer(0, INT32_MAX), default=0),
    # Not applied: what asks for nothing is taken, anything else is refused.
    "n": _refused(Integer(1, 128), 1),
    "presence_penalty": _refused(_PENALTY, 0.0),
    "frequency_penalty": _refused(_PENALTY, 0.0),
    "logit_bias": _refused(Anything(), {}),
    "logprobs": _refused(Boolean(), False),
    "top_logprobs": _refused(Integer(0, 20), 0),
    "response_format": _refused(Anything(), {"type": "text"}),
    "tools": _refused(Anything(), []),
    "tool_choice": _refused(Anything(), "none", "auto"),
    "functions": _refused(Anything(), []),
    "function_call": _refused(Anything(), "none", "auto"),
    "modalities": _refused(Anything(), ["text"]),
    "audio": _refused(Anything()),
    "web_search_options": _refused(Anything()),
    # Not applied: they do not change what an answer says.
    "parallel_tool_calls": _ignored(Boolean()),
    "metadata": _ignored(Pairs(16, Text(64), Text(512))),
    "user": _ignored(_NAME),
    "store": _ignored(Boolean()),
    "service_tier": _ignored(OneOf(("auto", "default", "flex", "scale", "priority"))),
    "prediction": _ignored(Anything()),
    "reasoning_effort": _ignored(_NAME),
    "verbosity": _ignored(_NAME),
    "prompt_cache_key": _ignored(_NAME),
    "prompt_cache_retention": _ignored(_NAME),
    "safety_identifier": _ignored(_NAME),
}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One checked chat request. None means that the client left it open."""

    model: str
    messages: tuple[ChatMessage, ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    top_k: int
    min_p: float
    ignore_eos: bool
    min_tokens: int


def check_headers(content_type: str | None, content_encoding: str | None) -> None:
    """Raises ApiError unless the body claims to be plain JSON. A missing content type is taken for JSON."""
    if content_encoding and content_encoding.strip().lower() != "identity":
        raise malformed("Compressed request bodies are not supported.", "unsupported_content_encoding")
    media_type = (content_type or "application/json").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise malformed(
            "The request body must be JSON, with content type application/json.", "unsupported_content_type"
        )


def parse_chat(body: bytes) -> ChatCall:
    """Raises ApiError."""
    values = _read(_json_object(body), CHAT_FIELDS)
    options = values["stream_options"]
    if options and not values["stream"]:
        raise invalid("stream_options", "stream_options may only be given when stream is true.")
    max_tokens = values["max_completion_tokens"] or values["max_tokens"]
    if max_tokens is not None and values["min_tokens"] > max_tokens:
        raise invalid("min_tokens", "min_tokens must not be greater than max_completion_tokens.")
    return ChatCall(
        model=values["model"],
        messages=values["messages"],
        max_tokens=max_tokens,
        temperature=values["temperature"],
        top_p=values["top_p"],
        seed=values["seed"],
        stop=values["stop"],
        stream=values["stream"],
        include_usage=options.get("include_usage", False),
        top_k=values["top_k"],
        min_p=values["min_p"],
        ignore_eos=values["ignore_eos"],
        min_tokens=values["min_tokens"],
    )


def _read(raw: dict[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    values = {}
    for name, field in fields.items():
        value = raw.get(name)
        if value is not None:
            values[name] = field.kind.read(value, name)
        elif field.is_required:
            raise ApiError(400, f"{name} is required.", code="missing_required_parameter", param=name)
        else:
            values[name] = field.default
    return values


def _json_object(body: bytes) -> dict[str, Any]:
    if not body:
        raise malformed("The request body is empty; it must be a JSON object.")
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raw = _lenient(body, error)
    if not isinstance(raw, dict):
        raise malformed("The request body must be a JSON object.")
    return raw


def _lenient(body: bytes, strict_error: orjson.JSONDecodeError) -> Any:
    """NaN, the infinities, huge numbers and lone surrogates parse here, so that the field that has them is named."""
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError):
        raise malformed(f"The request body is not valid JSON: {strict_error}") from None

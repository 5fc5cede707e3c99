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
    TokenBiases,
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
_STREAM_OPTIONS = {
    "include_usage": Boolean(),
    "continuous_usage_stats": Boolean(),
    "include_obfuscation": Boolean(),
}

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
    "stream_options": Field(Fields(_STREAM_OPTIONS), default={}),
    "n": Field(Integer(1, 128), default=1),
    "presence_penalty": Field(_PENALTY, default=0.0),
    "frequency_penalty": Field(_PENALTY, default=0.0),
    "logit_bias": Field(TokenBiases(1024, Number(-100, 100)), default=()),
    "logprobs": Field(Boolean(), default=False),
    "top_logprobs": Field(Integer(0, 20)),
    "service_tier": Field(OneOf(("auto", "default", "flex", "scale", "priority")), default="auto"),
    # Extensions, as other servers have them; "background" as in OpenAI's other API.
    "background": Field(Boolean(), default=False),
    "top_k": Field(Integer(0, INT32_MAX), default=0),
    "min_p": Field(Number(0, 1), default=0.0),
    "ignore_eos": Field(Boolean(), default=False),
    "min_tokens": Field(Integer(0, INT32_MAX), default=0),
    # Not applied: what asks for nothing is taken, anything else is refused.
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
    n: int = 1
    num_logprobs: int | None = None
    """How many of the likeliest tokens to show beside each token; None: no log probabilities at all."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    service_tier: str = "auto"
    background: bool = False
    """The answer outlives whoever reads it."""
    continuous_usage: bool = False
    """Every chunk of a stream has the usage so far."""


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
    if values["top_logprobs"] and not values["logprobs"]:
        raise invalid("top_logprobs", "top_logprobs may only be given when logprobs is true.")
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
        n=values["n"],
        num_logprobs=(values["top_logprobs"] or 0) if values["logprobs"] else None,
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        logit_bias=values["logit_bias"],
        service_tier=values["service_tier"],
        background=values["background"],
        continuous_usage=options.get("continuous_usage_stats", False),
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

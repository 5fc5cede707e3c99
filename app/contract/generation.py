"""What the requests that generate have in common: how to sample, when to end, how to be answered.

Owns the fields that `app.contract.chat` (chat) and `app.contract.completion` share, the rules between them, and the
part of a checked call that admission and the answer need. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.contract.fields import Field, ignored
from app.contract.kinds import (
    INT32_MAX,
    INT64,
    Boolean,
    Fields,
    Integer,
    Number,
    OneOf,
    Pairs,
    Text,
    TextOrTexts,
    TokenBiases,
)
from app.errors import ApiError, invalid

MAX_CHOICES = 128
MAX_LOGIT_BIASES = 1024

NAME = Text(max_length=512)
METADATA = Pairs(16, Text(64), Text(512))
_PENALTY = Number(-2, 2)

GENERATION_FIELDS: Mapping[str, Field] = {
    "model": Field(Text(max_length=256, min_length=1), is_required=True),
    "max_tokens": Field(Integer(1, INT32_MAX), note="max_completion_tokens wins over it."),
    "temperature": Field(Number(0, 2), default=1.0, note="0 takes the likeliest token."),
    "top_p": Field(Number(0, 1, above=True), default=1.0),
    "n": Field(Integer(1, MAX_CHOICES), default=1),
    "seed": Field(Integer(*INT64), note="The same seed repeats the same samples, a different one for each choice."),
    "stop": Field(
        TextOrTexts(Text(max_length=1024, min_length=1), max_items=4),
        default=(),
        note="At most 4 strings; never in the answer. An empty list is none.",
    ),
    "presence_penalty": Field(_PENALTY, default=0.0),
    "frequency_penalty": Field(_PENALTY, default=0.0),
    "logit_bias": Field(
        TokenBiases(MAX_LOGIT_BIASES, Number(-100, 100)),
        default=(),
        note=f"At most {MAX_LOGIT_BIASES} tokens, each one of the model's.",
    ),
    "stream": Field(Boolean(), default=False),
    "stream_options": Field(
        Fields({"include_usage": Boolean(), "continuous_usage_stats": Boolean(), "include_obfuscation": Boolean()}),
        default={},
        note="include_usage, and as an extension continuous_usage_stats; nothing is obfuscated. Only with stream.",
    ),
    "service_tier": Field(
        OneOf(("auto", "default", "flex", "scale", "priority", "fast")),
        default="auto",
        note="priority goes before default, and default before flex.",
    ),
    "metadata": ignored(METADATA, "Checked; nothing is kept with an answer."),
    "user": Field(NAME, default="", note="It does not change what an answer says; the operator's catalog has it."),
    "background": Field(Boolean(), default=False, is_extension=True, note="The answer outlives its reader."),
    "return_token_ids": Field(
        Boolean(),
        default=False,
        is_extension=True,
        note="token_ids in each choice has the tokens of the answer, as many as usage counts; prompt_token_ids those "
        "of the prompt: of a chat beside the choices, else in each choice; of a stream in the first chunk.",
    ),
    "top_k": Field(Integer(-1, INT32_MAX), default=0, is_extension=True, note="0 or -1 switches it off."),
    "min_p": Field(Number(0, 1), default=0.0, is_extension=True, note="0 switches it off."),
    "ignore_eos": Field(Boolean(), default=False, is_extension=True, note="For benchmarks."),
    "min_tokens": Field(Integer(0, INT32_MAX), default=0, is_extension=True, note="For benchmarks."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """The checked part that every generating request has. None means that the client left it open."""

    model: str
    max_tokens: int | None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Every chunk of a stream has the usage so far."""
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    num_logprobs: int | None = None
    """How many of the likeliest tokens to show beside each token; None: no log probabilities at all."""
    return_token_ids: bool = False
    """The ids of the prompt and of the answer are shown."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    service_tier: str = "auto"
    background: bool = False
    """The answer outlives whoever reads it."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    end_user: str = ""
    """The client's own name for whom it asks, for the catalog."""


def generation_values(values: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """The arguments of a `GenerationCall` from read fields, without `num_logprobs`. Raises ApiError."""
    options = values["stream_options"]
    if options and not values["stream"]:
        raise invalid("stream_options", "stream_options may only be given when stream is true.")
    continuous_usage = options.get("continuous_usage_stats", False)
    if continuous_usage and not options.get("include_usage"):
        raise invalid(
            "stream_options.continuous_usage_stats",
            "stream_options.continuous_usage_stats may only be true when stream_options.include_usage is true.",
        )
    if max_tokens is not None and values["min_tokens"] > max_tokens:
        raise invalid("min_tokens", "min_tokens must not be greater than the limit of the answer's tokens.")
    same = ("model", "temperature", "top_p", "min_p", "seed", "stop", "stream", "ignore_eos", "min_tokens")
    more = ("n", "presence_penalty", "frequency_penalty", "logit_bias", "background", "return_token_ids")
    return {
        **{name: values[name] for name in (*same, *more)},
        "max_tokens": max_tokens,
        # vLLM's way to switch it off.
        "top_k": max(values["top_k"], 0),
        "include_usage": options.get("include_usage", False),
        "continuous_usage": continuous_usage,
        # OpenAI's two names for one tier.
        "service_tier": "priority" if values["service_tier"] == "fast" else values["service_tier"],
        "metadata": values["metadata"] or {},
        "end_user": values["user"],
    }


def check_vocabulary(call: GenerationCall, vocab_size: int) -> None:
    """Raises ApiError for a bias on a token that the model does not have."""
    for token_id, _ in call.logit_bias:
        if token_id >= vocab_size:
            raise _no_such_token("logit_bias", token_id, vocab_size)


def check_token_ids(token_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raises ApiError for a token that the model does not have."""
    if token_ids and max(token_ids) >= vocab_size:
        raise _no_such_token(param, max(token_ids), vocab_size)


def _no_such_token(param: str, token_id: int, vocab_size: int) -> ApiError:
    return invalid(
        param, f"{param} has token {token_id}, which the model does not have: its tokens are 0 to {vocab_size - 1}."
    )

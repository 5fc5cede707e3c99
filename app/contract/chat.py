"""The contract of `POST /v1/chat/completions`: OpenAI's JSON to one checked call, or an `ApiError`.

Owns the table of every documented field, what it may hold and what this server does with it: the check, the
documentation and the schema come from the same table. Pure: bytes in, a value out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.contract.fields import Field, ignored, read_body, refused
from app.contract.generation import GENERATION_FIELDS, METADATA, NAME, GenerationCall, generation_values
from app.contract.kinds import INT32_MAX, Anything, Boolean, Fields, Integer, Neutral
from app.contract.messages import Messages
from app.contract.tools import AUTO, MAX_TOOLS, ResponseFormat, ToolChoice, ToolChoices, Tools, check_tool_choice
from app.dialect.conversation import ChatMessage, Tool
from app.errors import invalid
from app.grammar.schema import Schema

_TEXT_ONLY = "The model reads and writes text only."
_NO_SEARCH = "This server has no access to the web."
_NO_SUMMARY = "Thoughts are passed on as they are, not summarised: reasoning_content has them."
_CACHE = "Prefixes are cached without being asked, and shared by content."

CHAT_FIELDS: Mapping[str, Field] = {
    "model": GENERATION_FIELDS["model"],
    "messages": Field(Messages(), is_required=True, note="Text only; developer acts as system."),
    "max_completion_tokens": Field(Integer(1, INT32_MAX)),
    **GENERATION_FIELDS,
    "metadata": Field(METADATA, note="Kept with a stored answer, and found by it; without store it is checked only."),
    "logprobs": Field(Boolean(), default=False),
    "top_logprobs": Field(Integer(0, 20), note="Only with logprobs."),
    "response_format": Field(
        ResponseFormat(),
        note="text, json_object and json_schema; a schema is enforced whether or not strict is true. A model that "
        "thinks does so before.",
    ),
    "tools": Field(Tools(), default=(), note=f"At most {MAX_TOOLS} functions."),
    "tool_choice": Field(ToolChoices(), default=AUTO, note="none, auto, required, a function, or allowed_tools."),
    "parallel_tool_calls": Field(Boolean(), default=True, note="false: at most one call in an answer."),
    "store": Field(
        Boolean(),
        default=False,
        note="The finished answer and its messages are kept for 30 days (STORE_DAYS), at most 10000 (STORE_MAX).",
    ),
    # Not applied: what asks for nothing is taken, anything else is refused.
    "functions": refused(Anything(), [], why="Deprecated by OpenAI: use tools."),
    "function_call": refused(Anything(), "none", "auto", why="Deprecated by OpenAI: use tool_choice."),
    "modalities": refused(Anything(), ["text"], why=_TEXT_ONLY),
    "audio": refused(Anything(), why=_TEXT_ONLY),
    "web_search_options": refused(Anything(), why=_NO_SEARCH),
    "moderation": refused(Anything(), why="Nothing is moderated here."),
    "reasoning": Field(
        Fields({"summary": Neutral(Anything(), (), _NO_SUMMARY)}), "refused", is_extension=True, note=_NO_SUMMARY
    ),
    # Not applied: they do not change what an answer says.
    "prediction": ignored(Anything(), "It would only make an answer faster."),
    "reasoning_effort": ignored(NAME, "The models have no such control."),
    "verbosity": ignored(NAME, "The models have no such control."),
    "prompt_cache_key": ignored(NAME, _CACHE),
    "prompt_cache_retention": ignored(NAME, _CACHE),
    "prompt_cache_options": ignored(Anything(), _CACHE),
    "safety_identifier": ignored(NAME, "It does not change what an answer says."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(GenerationCall):
    """One checked chat request."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    json_schema: Schema | None = None
    """What the answer has to follow; None: it is text."""
    store: bool = False
    """The finished answer is kept, and found in a list."""


def parse_chat(body: bytes) -> ChatCall:
    """Raises ApiError."""
    values = read_body(body, CHAT_FIELDS)
    if values["top_logprobs"] and not values["logprobs"]:
        raise invalid("top_logprobs", "top_logprobs may only be given when logprobs is true.")
    check_tool_choice(values["tool_choice"], values["tools"])
    return ChatCall(
        messages=values["messages"],
        tools=values["tools"],
        tool_choice=values["tool_choice"],
        parallel_tool_calls=values["parallel_tool_calls"],
        json_schema=values["response_format"],
        store=values["store"],
        num_logprobs=(values["top_logprobs"] or 0) if values["logprobs"] else None,
        **generation_values(values, values["max_completion_tokens"] or values["max_tokens"]),
    )

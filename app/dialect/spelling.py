"""Tools in words: for chat templates that know nothing of tools, calls and results.

Owns how a conversation with tools is spelled as plain turns of text. Refuses to know templates. All of it is message
text, so none of it can become a control token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from app.dialect.conversation import ChatMessage, Tool, ToolCall
from app.dialect.formats import ToolFormat


def has_tool_turns(messages: Sequence[ChatMessage]) -> bool:
    return any(message.tool_calls or message.role == "tool" for message in messages)


def spelled(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], format: ToolFormat, default_system: str | None
) -> list[ChatMessage]:
    """The same conversation in turns of text alone. `default_system`: what the template says without system text."""
    turns: list[ChatMessage] = []
    for is_results, group in groupby(messages, lambda message: message.role == "tool"):
        if is_results:
            results = (f"{format.result_opening}{one.content}{format.result_closing}" for one in group)
            turns.append(ChatMessage("user", "\n".join(results)))
        else:
            turns += [_with_calls(message, format) for message in group]
    if not tools:
        return turns
    offer = _offer(tools, format)
    if turns[0].role == "system":
        return [ChatMessage("system", f"{turns[0].content}\n\n{offer}"), *turns[1:]]
    return [ChatMessage("system", f"{default_system}\n\n{offer}" if default_system else offer), *turns]


def _with_calls(message: ChatMessage, format: ToolFormat) -> ChatMessage:
    if not message.tool_calls:
        return message
    calls = format.separator.join(_call(call, format) for call in message.tool_calls)
    return ChatMessage(message.role, f"{message.content}\n{calls}" if message.content else calls)


def _call(call: ToolCall, format: ToolFormat) -> str:
    text = f'{{"name": {json.dumps(call.name)}, "{format.arguments_key}": {call.arguments or "{}"}}}'
    return f"{format.opening}\n{text}\n{format.closing}" if format.opening else text


def _offer(tools: Sequence[Tool], format: ToolFormat) -> str:
    lines = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
    return f"{format.before_tools}{lines}{format.after_tools}"

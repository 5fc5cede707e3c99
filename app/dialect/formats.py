"""How models write tool calls: the few conventions that checkpoints were trained on, as data.

Owns the marks around a call, the names of its fields and the words that tell a model about them. Refuses to know how
calls are found in an answer (`app.dialect.calls`), enforced (`app.grammar.grammars`) and rendered
(`app.dialect.spelling`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `{"name": ..., <arguments_key>: {...}}` between `opening` and `closing`.

    Without marks the call is all that an answer says, and begins with it.
    """

    name: str
    arguments_key: str
    opening: str = ""
    closing: str = ""
    separator: str = "\n"
    """Between two calls."""
    result_opening: str = ""
    result_closing: str = ""
    """Around what a call gave, where a template has no shape of its own for it."""
    fences: tuple[str, ...] = ()
    """Lines that may come before a call without marks; a line of three backticks ends it then."""
    before_tools: str = ""
    after_tools: str = ""
    """What a model is told around the list of tools, where a template has no words of its own."""
    written: str = ""
    """What templates that know this format write for a call: a pattern with `NAME` and `ARGUMENTS` in it."""
    turns: str = ""
    """A mark of the templates whose models know this format, though their template does not."""


HERMES = ToolFormat(
    name="hermes",
    arguments_key="arguments",
    opening="<tool_call>",
    closing="</tool_call>",
    result_opening="<tool_response>\n",
    result_closing="\n</tool_response>",
    before_tools=(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    ),
    after_tools=(
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    ),
    written=(
        r'<tool_call>\s*\{\s*("name":\s*"NAME",\s*"arguments":\s*ARGUMENTS|"arguments":\s*ARGUMENTS,\s*"name":\s*"NAME")'
        r"\s*\}\s*</tool_call>"
    ),
)
"""Nous Hermes' and Qwen's; the words are those that Qwen's template has for it."""

LLAMA3 = ToolFormat(
    name="llama3",
    arguments_key="parameters",
    separator="; ",
    before_tools=(
        "Given the following functions, please respond with a JSON for a function call with its proper arguments "
        'that best answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": '
        "dictionary of argument name and its value}. Do not use variables.\n\n"
    ),
    written=r'\{("type":\s*"function",\s*)?"name":\s*"NAME",\s*"parameters":\s*ARGUMENTS\}',
    turns="<|start_header_id|>",
)
"""Llama 3.1's and later ones' JSON calls."""

GEMMA = ToolFormat(
    name="gemma",
    arguments_key="parameters",
    separator="\n",
    result_opening="```tool_output\n",
    result_closing="\n```",
    fences=("```json\n", "```tool_code\n", "```tool_call\n"),
    before_tools=(
        "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format "
        'of {"name": function name, "parameters": dictionary of argument name and its value}\n\n'
        "You SHOULD NOT include any other text in the response if you call a function\n"
    ),
    turns="<start_of_turn>",
)
"""Gemma 3's, as Google's guide to its function calling words it."""

FORMATS: Mapping[str, ToolFormat] = {known.name: known for known in (HERMES, LLAMA3, GEMMA)}


def format_written_as(call: str) -> ToolFormat | None:
    """The format of a template that writes a call so, where `NAME` and `ARGUMENTS` stand for the call's."""
    return next((known for known in FORMATS.values() if known.written and re.search(known.written, call)), None)


def format_of_turns(prompt: str) -> ToolFormat:
    """The format for a model whose template knows no tools and writes prompts like this one."""
    return next((known for known in FORMATS.values() if known.turns and known.turns in prompt), HERMES)

"""What an answer has to follow, and how it has to be read, from what a request asks for and how the model writes.

Owns the choice of a grammar, and which tools the model is shown and may call. Refuses to know how grammars are
written (`app.grammar.grammars`) and answers are read (`app.dialect.calls`, `app.dialect.reasoning`).
"""

from __future__ import annotations

from dataclasses import dataclass

from app.contract.chat import ChatCall
from app.dialect.conversation import Tool
from app.dialect.reasoning import ReasoningFormat
from app.errors import invalid
from app.grammar.grammars import calls_grammar, calls_or_json_grammar, check_grammar, free_grammar, json_grammar
from app.text.templates import ChatFormat


@dataclass(frozen=True, slots=True)
class AnswerRules:
    grammar: str = ""
    """What the output has to follow; empty: nothing."""
    shown_tools: tuple[Tool, ...] = ()
    """What the model is told about."""
    tool_format: str = ""
    tool_names: tuple[str, ...] = ()
    """What may be called."""
    are_calls_enforced: bool = False
    """The grammar sees to it that what begins as a call goes on as one."""
    is_tool_forced: bool = False
    """One function was demanded by its name."""
    reasoning_format: ReasoningFormat = ""


def rules_of(call: ChatCall, format: ChatFormat) -> AnswerRules:
    """Raises ApiError if what is asked for cannot be enforced."""
    choice = call.tool_choice
    if not call.tools or choice.mode == "none":
        grammar = "" if call.json_schema is None else json_grammar(call.json_schema, format.reasoning)
        _check(grammar, "response_format")
        return AnswerRules(grammar, reasoning_format=format.reasoning)
    tools = [tool for tool in call.tools if not choice.names or tool.name in choice.names]
    grammar = _grammar(call, format, tools)
    return AnswerRules(
        grammar=grammar,
        shown_tools=call.tools,
        tool_format=format.tool_format.name,
        tool_names=tuple(tool.name for tool in tools),
        are_calls_enforced=bool(grammar),
        is_tool_forced=choice.is_named,
        reasoning_format=format.reasoning,
    )


def _grammar(call: ChatCall, format: ChatFormat, tools: list[Tool]) -> str:
    """For an answer that may call these tools."""
    functions = [(tool.name, dict(tool.arguments_schema)) for tool in tools]
    choice, reasoning = call.tool_choice, format.reasoning
    is_parallel = call.parallel_tool_calls and not choice.is_named
    if choice.mode == "required":
        grammar = calls_grammar(format.tool_format, functions, reasoning, is_parallel=is_parallel)
        _check(grammar, "tools")
    elif call.json_schema is not None:
        grammar = calls_or_json_grammar(
            format.tool_format, functions, call.json_schema, reasoning, is_parallel=is_parallel
        )
        _check(grammar, "response_format")
    else:
        grammar = free_grammar(format.tool_format, functions, reasoning, is_parallel=is_parallel)
        if check_grammar(grammar):
            # Nothing has to be called, so many large tools are no reason to refuse: calls are read as they come.
            return ""
    return grammar


def _check(grammar: str, param: str) -> None:
    if grammar and (problem := check_grammar(grammar)):
        raise invalid(param, f"{param} cannot be enforced: {problem}", "unsupported_schema")

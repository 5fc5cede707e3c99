"""Grammars for what an answer has to follow: JSON of a schema, tool calls, and both behind what a model thinks.

Owns how they are written for `llguidance`, their limits, and what a client is told about a schema that cannot be
enforced. The worker compiles the same text again (`decode.engine.grammar`). Refuses to know requests
(`app.contract.tools`).

JSON is compact, but for one space that may follow a colon or a comma: models write it so, and unbounded white space
lets a small model go on for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from app.dialect.formats import ToolFormat
from app.dialect.reasoning import CLOSE, OPEN, ReasoningFormat
from app.errors import invalid
from app.grammar.schema import Schema

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES: Final = 262_144
MAX_CALLS: Final = 16
"""In one answer: a small model may well repeat a call for ever."""
Functions = Sequence[tuple[str, Schema]]
"""The names of functions, and what their arguments have to be."""

_JSON_OPTIONS: Final = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}

_ANYTHING: Final = r"/(.|\n)*/"
_GAP: Final = r"/\n{0,2}/"


def check_schema(schema: Schema, param: str) -> None:
    """Raises ApiError if no grammar can be made of it, naming the keyword where one is to blame."""
    grammar = json_grammar(schema, "")
    if problem := _problem_of(grammar) or _dead_end_of(grammar):
        raise invalid(param, f"{param} cannot be enforced: {_told(problem)}", "unsupported_schema")


def check_grammar(grammar: str) -> str:
    """Why a grammar cannot be used; empty: it can."""
    if len(grammar) > MAX_GRAMMAR_BYTES:
        return f"it makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes"
    return _problem_of(grammar)


@lru_cache(maxsize=256)
def _problem_of(grammar: str) -> str:
    # PERF: agents send the same tools with every request.
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    return messages[0] if is_error else ""


@lru_cache(maxsize=256)
def _dead_end_of(grammar: str) -> str:
    """Why nothing at all can follow a grammar, such as a reference to itself."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=_limits())
    matcher.compute_bitmask()
    return "nothing can follow it." if matcher.is_error() else ""


@cache
def _limits() -> LLParserLimits:
    # Not at the top, like the library's other names: it brings 13 MB along, and most requests have no grammar.
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=200_000, max_grammar_size=10_000, verbose_errors=False)


def _told(problem: str) -> str:
    """The library's message, for a client."""
    problem = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", problem)
    for pattern, text in _WORDINGS:
        if found := re.search(pattern, problem, re.DOTALL):
            return found.expand(text)
    return problem.strip().splitlines()[0][:200].rstrip(".") + "."


_WORDINGS: Final = (
    (r'Unimplemented keys: \["(.*?)"', r"the keyword \1 is not supported."),
    (
        r"^oneOf constraints",
        "the keyword oneOf is only supported where no two of its schemas can both match; use anyOf.",
    ),
    (r"^regex parse error.*error: (.*)", r"pattern: \1."),
    (r"^Invalid type: (.*)", r"type: there is no type \1."),
    (r"^Unknown format: (.*)", r"format: \1 is not supported."),
    (r"^Pointer '(.*)' does not exist", r"$ref: there is no #\1 in the schema."),
    (r"^Resource '", "$ref: only references into the schema itself are supported."),
    (r"^(patternProperty .*)", r"patternProperties: \1."),
    (r"(too large|too big|fuel|too many|limit)", "the schema is too large or too deeply combined."),
)
"""What the library says, and what a client is told."""


def json_grammar(schema: Schema, reasoning: ReasoningFormat) -> str:
    """All of the answer is JSON that follows the schema; a block of thoughts may come before."""
    return _grammar([f"answer: {_json(schema)}"], reasoning)


def calls_grammar(format: ToolFormat, functions: Functions, reasoning: ReasoningFormat, *, is_parallel: bool) -> str:
    """All of the answer is calls of these tools: one, or with `is_parallel` one or more."""
    answer = f"answer: call{_further(format, is_parallel)}"
    return _grammar([answer, *_call(format, functions, _text(format.opening))], reasoning)


def calls_or_json_grammar(
    format: ToolFormat, functions: Functions, schema: Schema, reasoning: ReasoningFormat, *, is_parallel: bool
) -> str:
    """All of the answer is calls, or JSON that follows the schema."""
    rules = [f"answer: call{_further(format, is_parallel)} | json", f"json: {_json(schema)}"]
    if format.opening:
        return _grammar([*rules, *_call(format, functions, _text(format.opening))], reasoning)
    # Both begin with a brace, so they have to be JSON alike.
    calls = " | ".join(_json(_call_schema(format, name, arguments)) for name, arguments in functions)
    return _grammar([*rules, f"call: {calls}"], reasoning)


def _call_schema(format: ToolFormat, name: str, arguments: Schema) -> Schema:
    definitions: Schema = {key: arguments[key] for key in ("$defs", "definitions", "x-guidance") if key in arguments}
    inner = {key: value for key, value in arguments.items() if key not in definitions}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, format.arguments_key: inner},
        "required": ["name", format.arguments_key],
        "additionalProperties": False,
        **definitions,
    }


def free_grammar(format: ToolFormat, functions: Functions, reasoning: ReasoningFormat, *, is_parallel: bool) -> str:
    """The answer is text, or calls, or both where calls are marked; what begins as a call goes on as one."""
    rules = _free_marked if format.opening else _free_bare
    return _grammar(rules(format, functions, reasoning, is_parallel), reasoning)


def _free_marked(
    format: ToolFormat, functions: Functions, reasoning: ReasoningFormat, is_parallel: bool
) -> list[str]:
    mark = f"/(.|\\n)*{_regex(format.opening)}(.|\\n)*/"
    return [
        f"answer: call{{0,{MAX_CALLS}}} rest" if is_parallel else f"answer: rest | call {_GAP}",
        "rest: REST",
        f"REST: TEXT & ~{mark}",
        f"TEXT: {_ANYTHING}" + (f" & ~/{_regex(OPEN)}(.|\\n)*/" if reasoning == "think" else ""),
        f"head[lazy]: TEXT {_text(format.opening)}",
        *_call(format, functions, "head"),
    ]


def _free_bare(format: ToolFormat, functions: Functions, reasoning: ReasoningFormat, is_parallel: bool) -> list[str]:
    """Text that does not begin like a call, or calls, in a fence where the format has them."""
    fence = f"({'|'.join(map(_regex, format.fences))})?" if format.fences else ""
    end = "/(\\n```)?/" if fence else ""
    no_gap = " & ~/\\n(.|\\n)*/" if reasoning else ""
    return [
        f"answer: OTHER | call{_further(format, is_parallel)} {end}",
        rf'OTHER: {_ANYTHING} & ~/\s*{fence}\s*\[?\s*\{{\s*"name"(.|\n)*/{no_gap}',
        *_call(format, functions, "", fence),
    ]


def _further(format: ToolFormat, is_parallel: bool) -> str:
    return f" ({_text(format.separator)} call){{0,{MAX_CALLS - 1}}}" if is_parallel else ""


def _call(format: ToolFormat, functions: Functions, opening: str, fence: str = "") -> list[str]:
    """The rule `call`, and one for each tool."""
    names = " | ".join(f"f{number}" for number in range(len(functions)))
    if format.opening:
        rules = [f"call: {opening} /\\n?/ ({names}) /\\n?/ {_text(format.closing)}"]
    else:
        rules = [f"call: {names}"]
    for number, (name, schema) in enumerate(functions):
        head = f'{{"name": "{name}", "{format.arguments_key}": '
        rules.append(f"f{number}: /{fence}{_regex(head)}/ {_json(schema)} {_text('}')}")
    return rules


def _grammar(rules: Sequence[str], reasoning: ReasoningFormat) -> str:
    match reasoning:
        case "think":
            start = [f"start: (thought {_GAP})? answer", f"thought[lazy]: /{_regex(OPEN)}(.|\\n)*{_regex(CLOSE)}/"]
        case "think-open":
            start = [f"start: thought {_GAP} answer", f"thought[lazy]: /(.|\\n)*{_regex(CLOSE)}/"]
        case "":
            start = ["start: answer"]
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_lark("\n".join([*start, *rules]))
    return grammar


def _json(schema: Schema) -> str:
    options = {**_JSON_OPTIONS, **schema.get("x-guidance", {})}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _text(text: str) -> str:
    return json.dumps(text)


def _regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")

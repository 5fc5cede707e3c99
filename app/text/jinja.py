"""A checkpoint's own Jinja chat template, run in a sandbox on placeholders instead of message text.

Owns what such templates may use (the names that Hugging Face's `apply_chat_template` gives them) and how the rendered
prompt is taken apart again. Refuses to know about formats and families (`app.text.templates`).

SAFETY: the template never sees text of a client (of messages, calls and tools), only a placeholder between the text's
own leading and trailing white space (so that `| trim` works as the checkpoint means it). White space is not a control
token, and the text itself is put back as a piece that is not scaffold. In the definitions of tools the words of JSON
Schema are left as they are, because templates compare with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.dialect.conversation import ChatMessage, Piece, Tool, ToolCall
from app.grammar.schema import depth_exceeds
from app.text.tokenizer import TokenizerError

_OPEN, _CLOSE, _ZERO = "\ue000", "\ue001", 0xE010
"""A placeholder is these private-use characters around a text's number in ten further ones: nothing that a template
compares with, changes in case, or cuts at."""
_OPEN_IN_JSON, _OPEN_AS_JSON = "\ue002", "\ue003"
"""Other beginnings of a placeholder: within a string of JSON, and in the place of one whose text is JSON."""
_PLACEHOLDER = re.compile(f"([{_OPEN}{_OPEN_IN_JSON}])([{chr(_ZERO)}-{chr(_ZERO + 9)}]+){_CLOSE}")
_AS_JSON = re.compile(f'"{_OPEN_AS_JSON}([^"]*)"')
_MAX_ARGUMENTS_DEPTH = 64
_SCHEMA_WORDS = frozenset(
    [
        *("type", "function", "name", "description", "parameters", "strict", "properties", "required", "items"),
        *("object", "array", "string", "number", "integer", "boolean", "null", "enum", "const", "default", "format"),
        *("title", "anyOf", "oneOf", "allOf", "$ref", "$defs", "additionalProperties", "minimum", "maximum"),
        *("pattern", "nullable", "minLength", "maxLength", "minItems", "maxItems", "examples", "prefixItems"),
    ]
)
_TO_PLACEHOLDER = {ord("0") + digit: _ZERO + digit for digit in range(10)}
_FROM_PLACEHOLDER = {_ZERO + digit: ord("0") + digit for digit in range(10)}
_DROPS_THINKING = re.compile(r"""\.split\(\s*['"]</think>['"]\s*\)""")


class TemplateRefusal(Exception):
    """The template does not take these messages (it raised, or left some out); the message is the template's."""


class JinjaTemplate:
    """Messages to pieces, as the checkpoint's template says. Raises `TokenizerError` if it is not Jinja."""

    def __init__(self, source: str, template_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TokenizerError(f"the checkpoint's chat template is not valid Jinja: {error}") from error
        self._variables = {"bos_token": "", "eos_token": "", "tools": None, "documents": None, **template_tokens}
        self._drops_thinking = _DROPS_THINKING.search(source) is not None

    def __call__(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[Piece]:
        """Raises `TemplateRefusal` when the template raises, leaves something out or cuts into a text."""
        texts = _Texts()
        contents = self._visible_texts(messages)
        shown: list[dict[str, Any]] = [
            {"role": message.role, "content": texts.show(text, must_be_used=message.role in ("system", "tool"))}
            for message, text in zip(messages, contents, strict=True)
        ]
        names = {call.call_id: call.name for message in messages for call in message.tool_calls}
        for message, fields in zip(messages, shown, strict=True):
            if message.reasoning:
                fields["reasoning_content"] = texts.show(message.reasoning)
            if message.tool_calls:
                fields["tool_calls"] = [texts.show_call(call) for call in message.tool_calls]
            if message.role == "tool":
                fields["tool_call_id"] = texts.show(message.tool_call_id)
                fields["name"] = texts.show(names.get(message.tool_call_id, ""))
        variables: dict[str, Any] = dict(self._variables)
        if tools:
            variables["tools"] = [texts.show_tool(tool) for tool in tools]
        try:
            rendered = self._template.render(messages=shown, add_generation_prompt=True, **variables)
        except TemplateError as error:
            raise TemplateRefusal(error.message or type(error).__name__) from error
        except Exception as error:
            # A template may do with these messages whatever Python cannot.
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error
        return texts.pieces(rendered)

    def _visible_texts(self, messages: Sequence[ChatMessage]) -> list[str]:
        """Message texts, where a thinking model's template shows earlier answers without their thoughts, so too."""
        texts = [message.content for message in messages]
        if self._drops_thinking:
            last_user = max((n for n, message in enumerate(messages) if message.role == "user"), default=0)
            for number in range(last_user):
                if messages[number].role == "assistant" and "</think>" in texts[number]:
                    texts[number] = texts[number].rsplit("</think>", 1)[1].lstrip("\n")
        return texts


class _Arguments(dict[str, Any]):
    """The arguments of a call, as an object that templates may look into; as JSON it is what the model wrote, which
    need not be an object."""

    as_written: str

    def __str__(self) -> str:
        return self.as_written

    def __add__(self, text: str) -> str:
        return self.as_written + text

    def __radd__(self, text: str) -> str:
        return text + self.as_written


class _Texts:
    """The texts of one conversation, and the placeholders that the template is shown in their place."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._must_be_used: set[int] = set()

    def show(self, text: str, *, must_be_used: bool = False) -> str:
        core = text.strip()
        if not core:
            return text
        number = len(self._texts)
        self._texts.append(core)
        if must_be_used:
            self._must_be_used.add(number)
        start = text.index(core[0])
        return f"{text[:start]}{_OPEN}{str(number).translate(_TO_PLACEHOLDER)}{_CLOSE}{text[start + len(core) :]}"

    def show_tool(self, tool: Tool) -> Any:
        definition = self._show_inside(tool.definition)
        definition["function"]["name"] = self.show(tool.name, must_be_used=True)
        return definition

    def show_call(self, call: ToolCall) -> Any:
        name = self.show(call.name, must_be_used=True)
        written = self.show(call.arguments or "{}", must_be_used=True)
        function = {"name": name, "arguments": self._arguments(call.arguments or "{}", written)}
        return {"type": "function", "id": self.show(call.call_id), "function": function}

    def pieces(self, rendered: str) -> list[Piece]:
        """The rendered prompt with its texts put back. Raises `TemplateRefusal`."""
        pieces: list[Piece] = []
        parts = _PLACEHOLDER.split(rendered)
        used: set[int] = set()
        # The pattern has two groups, so every third part is scaffold, and the two behind it are a placeholder's.
        for place in range(0, len(parts), 3):
            if scaffold := parts[place]:
                if any(character in scaffold for character in (_OPEN, _OPEN_IN_JSON, _OPEN_AS_JSON, _CLOSE)):
                    raise TemplateRefusal("the template cuts into the text of a message")
                pieces.append(Piece(scaffold, True))
            if place + 1 < len(parts):
                number = int(parts[place + 2].translate(_FROM_PLACEHOLDER))
                used.add(number)
                text = self._texts[number]
                if parts[place + 1] == _OPEN_IN_JSON:
                    text = json.dumps(text, ensure_ascii=False)[1:-1]
                pieces.append(Piece(text, False))
        if not self._must_be_used <= used:
            raise TemplateRefusal("the template leaves a system message, a tool, a call or its result out")
        return pieces

    def _arguments(self, arguments: str, written: str) -> _Arguments:
        try:
            value = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            value = None
        is_object = isinstance(value, dict) and not depth_exceeds(value, _MAX_ARGUMENTS_DEPTH)
        shown = _Arguments(self._show_inside(value) if is_object else {})
        shown.as_written = written
        return shown

    def _show_inside(self, value: Any) -> Any:
        if isinstance(value, str):
            return value if value in _SCHEMA_WORDS else self.show(value)
        if isinstance(value, Mapping):
            return {self._show_inside(key): self._show_inside(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._show_inside(inner) for inner in value]
        return value


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; the body is what counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    dumped = json.dumps(_with_written_arguments(value), ensure_ascii=False, indent=indent, **options)
    in_json = dumped.replace(_OPEN, _OPEN_IN_JSON)
    return _AS_JSON.sub(lambda found: _OPEN + found[1], in_json)


def _with_written_arguments(value: Any) -> Any:
    """The same value with the arguments of calls as the texts that they are."""
    if isinstance(value, _Arguments):
        return value.as_written.strip().replace(_OPEN, _OPEN_AS_JSON)
    if isinstance(value, dict):
        return {key: _with_written_arguments(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_written_arguments(inner) for inner in value]
    return value

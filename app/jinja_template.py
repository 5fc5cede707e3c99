"""A checkpoint's own Jinja chat template, run in a sandbox on placeholders instead of message text.

Owns what such templates may use (the names that Hugging Face's `apply_chat_template` gives them) and how the rendered
prompt is taken apart again. Refuses to know about formats and families (`app.templates`).

SAFETY: the template never sees message text, only a placeholder between the text's own leading and trailing white
space (so that `| trim` works as the checkpoint means it). White space is not a control token, and the text itself is
put back as a piece that is not scaffold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.prompt import ChatMessage, Piece
from app.tokenizer import TokenizerError

_OPEN, _CLOSE, _ZERO = "\ue000", "\ue001", 0xE010
"""A placeholder is these private-use characters around a message's number in ten further ones: nothing that a
template compares with, changes in case, or cuts at."""
_PLACEHOLDER = re.compile(f"{_OPEN}([{chr(_ZERO)}-{chr(_ZERO + 9)}]+){_CLOSE}")
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
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TokenizerError(f"the checkpoint's chat template is not valid Jinja: {error}") from error
        self._variables = {"bos_token": "", "eos_token": "", "tools": None, "documents": None, **template_tokens}
        self._drops_thinking = _DROPS_THINKING.search(source) is not None

    def __call__(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        """Raises `TemplateRefusal` when the template raises, leaves a system text out or cuts into a text."""
        texts = self._visible_texts(messages)
        shown = [
            {"role": message.role, "content": _placeholder(number, text)}
            for number, (message, text) in enumerate(zip(messages, texts, strict=True))
        ]
        try:
            rendered = self._template.render(messages=shown, add_generation_prompt=True, **self._variables)
        except TemplateError as error:
            raise TemplateRefusal(error.message or type(error).__name__) from error
        pieces: list[Piece] = []
        used: set[int] = set()
        # The pattern has one group, so every second part is a placeholder's number.
        for place, part in enumerate(_PLACEHOLDER.split(rendered)):
            if place % 2:
                number = int(part.translate(_FROM_PLACEHOLDER))
                used.add(number)
                pieces.append(Piece(texts[number].strip(), False))
            elif part:
                if _OPEN in part or _CLOSE in part:
                    raise TemplateRefusal("the template cuts into the text of a message")
                pieces.append(Piece(part, True))
        for number, message in enumerate(messages):
            if message.role == "system" and number not in used and texts[number].strip():
                raise TemplateRefusal("the template leaves the system message out")
        return pieces

    def _visible_texts(self, messages: Sequence[ChatMessage]) -> list[str]:
        """Message texts, where a thinking model's template shows earlier answers without their thoughts, so too."""
        texts = [message.content for message in messages]
        if self._drops_thinking:
            last_user = max((n for n, message in enumerate(messages) if message.role == "user"), default=0)
            for number in range(last_user):
                if messages[number].role == "assistant" and "</think>" in texts[number]:
                    texts[number] = texts[number].rsplit("</think>", 1)[1].lstrip("\n")
        return texts


def _placeholder(number: int, text: str) -> str:
    core = text.strip()
    if not core:
        return text
    start = text.index(core[0])
    return f"{text[:start]}{_OPEN}{str(number).translate(_TO_PLACEHOLDER)}{_CLOSE}{text[start + len(core) :]}"


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; the body is what counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

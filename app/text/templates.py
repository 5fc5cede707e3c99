"""Chat formats: from messages to the pieces of a prompt.

Owns the choice of format for a checkpoint. ChatML and Gemma are rendered directly, everything else by the
checkpoint's own template (`app.text.jinja`). Tools, calls and their results are rendered by a template that knows
them, and put into words for one that does not (`app.dialect.spelling`). Refuses to know about token ids
(`app.text.tokenizer` turns pieces into ids) and about OpenAI's JSON.

A direct format is used only where it gives what the checkpoint's template gives for a set of probe conversations, so
a checkpoint that bends ChatML a little is rendered by its own template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.dialect.conversation import ChatMessage, Piece, PromptError, Tool, ToolCall, text_of
from app.dialect.formats import HERMES, ToolFormat, format_of_turns, format_written_as
from app.dialect.reasoning import ReasoningFormat, reasoning_format_of
from app.dialect.spelling import has_tool_turns, spelled
from app.text.jinja import JinjaTemplate, TemplateRefusal
from app.text.tokenizer import TokenizerError

ChatTemplate = Callable[[Sequence[ChatMessage]], list[Piece]]
"""Takes at least one message with roles system, user, assistant, tool. Raises `PromptError`."""

_SEPARATOR = "\n\n"
"""Between texts that have to share a turn (Gemma's own choice for system text)."""


@dataclass(frozen=True, slots=True)
class ChatMl:
    """`<|im_start|>role`, newline, text, `<|im_end|>`; a default system turn where the checkpoint has one."""

    default_system: str | None

    def __call__(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        pieces: list[Piece] = []
        if self.default_system is not None and messages[0].role != "system":
            pieces.append(Piece(f"<|im_start|>system\n{self.default_system}<|im_end|>\n", True))
        for message in messages:
            pieces.append(Piece(f"<|im_start|>{message.role}\n", True))
            pieces.append(Piece(message.content, False))
            pieces.append(Piece("<|im_end|>\n", True))
        pieces.append(Piece("<|im_start|>assistant\n", True))
        return pieces


@dataclass(frozen=True, slots=True)
class Gemma:
    """`<start_of_turn>role`, newline, trimmed text, `<end_of_turn>`, after one BOS. There are two roles, in turns.

    System text leads the next user turn; neighbours of the same role share a turn, which the checkpoint's own
    template would refuse.
    """

    bos: str

    def __call__(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        pieces = [Piece(self.bos, True)]
        role = ""
        for message in messages:
            text = message.content if message.role == "system" else message.content.strip()
            if role == (role := "model" if message.role == "assistant" else "user"):
                pieces.append(Piece(_SEPARATOR, True))
            else:
                end = "<end_of_turn>\n" if len(pieces) > 1 else ""
                pieces.append(Piece(f"{end}<start_of_turn>{role}\n", True))
            pieces.append(Piece(text, False))
        pieces.append(Piece("<end_of_turn>\n<start_of_turn>model\n", True))
        return pieces


@dataclass(frozen=True, slots=True)
class OwnTemplate:
    """The checkpoint's template; messages that it refuses are offered again in the shape that all templates take."""

    template: JinjaTemplate

    def __call__(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        try:
            return self.template(messages)
        except TemplateRefusal:
            pass
        try:
            return self.template(folded(messages))
        except TemplateRefusal as refusal:
            raise PromptError("messages", f"the model's chat template refuses these messages: {refusal}") from refusal


def folded(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The same conversation with the roles user and assistant alone, in turns; system text leads a user turn."""
    turns: list[ChatMessage] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        if turns and turns[-1].role == role:
            turns[-1] = ChatMessage(role, turns[-1].content + _SEPARATOR + message.content)
        else:
            turns.append(ChatMessage(role, message.content))
    return turns


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """All that is particular to how a checkpoint talks."""

    template: ChatTemplate
    """For conversations without tools."""
    tool_format: ToolFormat = HERMES
    tool_template: JinjaTemplate | None = None
    """The checkpoint's own, if it knows tools."""
    default_system: str | None = None
    """What the template says where there is no system text."""
    reasoning: ReasoningFormat = ""

    def __call__(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[Piece]:
        """Raises `PromptError`."""
        if not tools and not has_tool_turns(messages):
            return self.template(messages)
        if self.tool_template is not None:
            try:
                return self.tool_template(messages, tools)
            except TemplateRefusal:
                pass
        return self.template(spelled(messages, tools, self.tool_format, self.default_system))


def choose_format(source: str, template_tokens: Mapping[str, str]) -> ChatFormat:
    """Of a checkpoint with this Jinja template. Raises `TokenizerError` if the template is not usable."""
    template = choose_template(source, template_tokens)
    own = JinjaTemplate(source, template_tokens)
    greeting = text_of(own([ChatMessage("user", "A")]))
    native = _native_tool_format(own)
    return ChatFormat(
        template=template,
        tool_format=native or format_of_turns(greeting),
        tool_template=own if native else None,
        default_system=template.default_system if isinstance(template, ChatMl) else None,
        reasoning=reasoning_format_of(source, greeting),
    )


def _native_tool_format(own: JinjaTemplate) -> ToolFormat | None:
    """The format in which the template itself writes calls; None if it knows no tools, or writes them otherwise."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": "A"}}, "required": ["a"]}
    definition = {"type": "function", "function": {"name": "offer", "description": "A", "parameters": parameters}}
    tools = [Tool("offer", definition, {})]
    question, call = ChatMessage("user", "A"), ChatMessage("assistant", "", (ToolCall("1", "NAME", '{"a":1}'),))
    try:
        own([question], tools)
        pieces = own([question, call, ChatMessage("tool", "B", (), "1"), question], tools)
    except TemplateRefusal:
        return None
    return format_written_as(text_of(pieces).replace('{"a":1}', "ARGUMENTS"))


def choose_template(source: str, template_tokens: Mapping[str, str]) -> ChatTemplate:
    """The format of a checkpoint with this Jinja template. Raises `TokenizerError` if the template is not usable."""
    own = JinjaTemplate(source, template_tokens)
    try:
        greeting = text_of(own([ChatMessage("user", "A")]))
    except TemplateRefusal as refusal:
        raise TokenizerError(f"the checkpoint's chat template refuses a plain user message: {refusal}") from refusal
    # Templates that look at the date or into the text do something that no probe can show.
    if not re.search(r"strftime_now|</think>", source):
        for candidate in _candidates(greeting, template_tokens):
            if all(_agree(own, candidate, probe) for probe in _PROBES):
                return candidate
    return OwnTemplate(own)


def _candidates(greeting: str, template_tokens: Mapping[str, str]) -> list[ChatTemplate]:
    """The direct formats that could have rendered this single user message."""
    if greeting.startswith("<|im_start|>"):
        default = re.match(r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n", greeting, re.DOTALL)
        return [ChatMl(default[1] if default else None)]
    if "<start_of_turn>" in greeting:
        return [Gemma(template_tokens.get("bos_token", ""))]
    return []


def _probes() -> list[list[ChatMessage]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    conversations = ["u", "su", "uau", "suau", "uauau", "uat", "uatau", "uu", "ssu", "s", "au", "ua", "uaa"]
    # NOTE: no system text amid the turns: Gemma's own template writes a role there that the model does not have.
    texts = ["first text", "second\n\ntext", "third", "fourth", "fifth"]
    padded = ["  padded text \n", "\n\tpadded\n", " again ", "", "\n"]
    return [
        [ChatMessage(roles[letter], text) for letter, text in zip(letters, variant, strict=False)]
        for letters in conversations
        for variant in (texts, padded)
    ]


_PROBES = _probes()


def _agree(own: JinjaTemplate, candidate: ChatTemplate, messages: list[ChatMessage]) -> bool:
    """Whether both give the same prompt; what the checkpoint's template refuses, a direct format may do better."""
    try:
        expected = own(messages)
    except TemplateRefusal:
        return True
    return text_of(candidate(messages)) == text_of(expected)

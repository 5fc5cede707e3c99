"""What a model thinks before it answers, told apart from the answer.

Owns the two forms of it (`ReasoningFormat`), how a template shows which one its model has, and `ReasoningSplitter`.
Refuses to know tokens and tool calls. Parts do not depend on how the text was cut into pieces, and never hold a part
of a mark.
"""

from __future__ import annotations

from typing import Final, Literal

from app.dialect.calls import start_of_prefix, start_of_space, without_half_mark
from app.dialect.parts import AnswerPart, Content, Reasoning, TextMachine

OPEN: Final = "<think>"
CLOSE: Final = "</think>"

ReasoningFormat = Literal["", "think", "think-open"]
"""`think`: the answer may begin with a `<think>` block. `think-open`: the prompt has opened it already."""


def reasoning_format_of(source: str, prompt: str) -> ReasoningFormat:
    """Of a checkpoint whose Jinja template is `source` and whose prompts end as `prompt` does."""
    if prompt.rstrip().endswith(OPEN):
        return "think-open"
    return "think" if CLOSE in source else ""


class ReasoningSplitter:
    """A `TextMachine`. White space around what was thought belongs to the marks."""

    has_tool_calls = False

    def __init__(self, format: ReasoningFormat) -> None:
        self._state: Literal["start", "inside", "behind", "content"] = "inside" if format == "think-open" else "start"
        self._may_open_again = format == "think-open"
        """The prompt has opened the block, and the model does so once more."""
        self._is_empty = True
        self._held = ""

    def push(self, text: str) -> list[AnswerPart]:
        if self._state == "content":
            return [Content(text)] if text else []
        text, self._held = self._held + text, ""
        if self._state == "start":
            begin = text.lstrip()
            if not begin.startswith(OPEN):
                if OPEN.startswith(begin):
                    self._held = text
                    return []
                self._state = "content"
                return [Content(text)]
            self._state = "inside"
            text = begin[len(OPEN) :]
        if self._state == "behind":
            return self._behind(text)
        return self._inside(text)

    def finish(self) -> list[AnswerPart]:
        held, self._held = self._held, ""
        if self._state == "start" and (rest := without_half_mark(held, OPEN)):
            return [Content(rest)]
        if self._state == "inside" and (rest := without_half_mark(held, CLOSE).rstrip()):
            return [Reasoning(rest)]
        return []

    def _inside(self, text: str) -> list[AnswerPart]:
        if self._is_empty:
            text = text.lstrip()
            if self._may_open_again:
                if text != OPEN and OPEN.startswith(text):
                    self._held = text
                    return []
                text = text.removeprefix(OPEN).lstrip()
                self._may_open_again = False
        at = text.find(CLOSE)
        if at >= 0:
            thought = text[: start_of_space(text, at)]
            self._state = "behind"
            return [*([Reasoning(thought)] if thought else []), *self._behind(text[at + len(CLOSE) :])]
        safe = start_of_space(text, start_of_prefix(text, CLOSE))
        self._held = text[safe:]
        if not safe:
            return []
        self._is_empty = False
        return [Reasoning(text[:safe])]

    def _behind(self, text: str) -> list[AnswerPart]:
        text = text.lstrip("\n")
        if not text:
            return []
        self._state = "content"
        return [Content(text)]


class ThinkThenAnswer:
    """A `TextMachine` that looks for calls in what is not thought."""

    def __init__(self, splitter: ReasoningSplitter, answer: TextMachine) -> None:
        self._splitter = splitter
        self._answer = answer

    @property
    def has_tool_calls(self) -> bool:
        return self._answer.has_tool_calls

    def push(self, text: str) -> list[AnswerPart]:
        return self._routed(self._splitter.push(text))

    def finish(self) -> list[AnswerPart]:
        return [*self._routed(self._splitter.finish()), *self._answer.finish()]

    def _routed(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        routed: list[AnswerPart] = []
        for part in parts:
            routed += self._answer.push(part.text) if isinstance(part, Content) else [part]
        return routed

"""What the text of an answer is made of, and the interface of the machines that take it apart.

Owns the closed set of parts, and the machine that leaves text as it is. Refuses to know tokens, stop strings and
JSON. A machine gives the same parts for every cutting of its text, except that neighbouring text may be cut
elsewhere: so an answer can be replayed from its start, in larger pieces, and continued where it was left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the answer says."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what was thought before."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """Call number `index` of this answer begins."""

    index: int
    call_id: str
    """The same on every replay: made of the request, the choice and the index."""
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the arguments of call `index`, which has started."""

    index: int
    text: str


AnswerPart = Content | Reasoning | ToolStart | ToolArguments


class TextMachine(Protocol):
    """Takes the text of one choice, piece by piece. One machine for one answer."""

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call has started."""

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that are certain now."""

    def finish(self) -> list[AnswerPart]:
        """The rest, once the text is over. Nothing is pushed afterwards."""

"""One choice of an answer, from its tokens to its parts: what every way of showing an answer is made from.

Owns the order tokens -> text (`app.text.detokenizer`) -> parts (`app.dialect.parts`), the log probabilities and ids
of tokens that wait to be shown, the counts, and the skipping of what a client has already. Refuses to know JSON and
streams. An answer is continued by replaying it from its first token through the same steps, so it comes out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from app.dialect.calls import ToolCallParser, call_id_of
from app.dialect.formats import FORMATS
from app.dialect.parts import AnswerPart, Content, Reasoning, TextMachine
from app.dialect.reasoning import ReasoningSplitter, ThinkThenAnswer
from app.render.logprobs import Entry
from app.render.spec import AnswerSpec
from app.text.detokenizer import Detokenizer
from decode.engine.sampling import TokenLogprobs
from tasks.protocol.contract import TerminalEvent, TokenEvent

NewMachine = Callable[[AnswerSpec, int], TextMachine | None]


def text_machine(spec: AnswerSpec, choice: int) -> TextMachine | None:
    """What finds the parts in the text of a choice; None where all of it is content."""
    parser = None
    if spec.tool_format:
        parser = ToolCallParser(
            FORMATS[spec.tool_format],
            spec.tool_names,
            partial(call_id_of, spec.request_id, choice),
            is_enforced=spec.are_calls_enforced,
        )
    if not spec.reasoning_format:
        return parser
    splitter = ReasoningSplitter(spec.reasoning_format)
    return splitter if parser is None else ThinkThenAnswer(splitter, parser)


class ChoiceText:
    """Takes the events of one choice in order, from the first on."""

    def __init__(
        self, spec: AnswerSpec, detokenizer: Detokenizer, machine: TextMachine | None = None, seen: int = -1
    ) -> None:
        """`seen` is the index of the last token whose parts are not wanted."""
        self._shows_token_ids = spec.shows_token_ids
        has_only_text = machine is None and spec.num_logprobs is None and not self._shows_token_ids
        self.is_plain = has_only_text and seen < 0
        """Whether `push_text` may be used in the place of `push`."""
        self.num_reasoning_tokens = 0
        self._detokenizer = detokenizer
        self._machine = machine
        self._seen = seen
        self._end_token_ids = frozenset(spec.end_token_ids)
        self._has_end_token = False
        self._num_characters = 0
        self._logprobs: list[Entry] = []
        self._token_ids: list[int] = []
        self._may_reason = bool(spec.reasoning_format)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found: the choice ends before it, and takes no more tokens."""
        return self._detokenizer.stopped

    @property
    def has_tool_calls(self) -> bool:
        return self._machine is not None and self._machine.has_tool_calls

    @property
    def last_index(self) -> int:
        """Of the tokens taken; -1 before the first."""
        return self._detokenizer.num_tokens_used - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the completion: without the one that only says that it is over."""
        return self._detokenizer.num_tokens_used - self._has_end_token

    def push_text(self, events: Sequence[TokenEvent]) -> str:
        """`push` for a choice that `is_plain`: its content."""
        if len(events) == 1:
            token_ids = events[0].token_ids
        else:
            token_ids = tuple([token_id for event in events for token_id in event.token_ids])
        text = self._detokenizer.push(token_ids)
        if token_ids[-1] in self._end_token_ids:
            self._has_end_token = not self._detokenizer.stopped
        return text

    def push(self, events: Sequence[TokenEvent]) -> list[AnswerPart]:
        """The parts that are certain now."""
        if self.is_plain:
            return [Content(text)] if (text := self.push_text(events)) else []
        parts: list[AnswerPart] = []
        for event in events:
            for offset, token_id in enumerate(event.token_ids):
                if self._detokenizer.stopped:
                    return parts
                found = self._push(token_id, event.logprobs[offset] if event.logprobs else None)
                if event.index + offset > self._seen:
                    parts += found
                else:
                    self._logprobs.clear()
                    self._token_ids.clear()
        return parts

    def finish(self) -> list[AnswerPart]:
        """The rest, once there are no more tokens."""
        text = self._detokenizer.finish()
        if self._machine is None:
            return [Content(text)] if text else []
        return [*(self._machine.push(text) if text else []), *self._machine.finish()]

    def take_logprobs(self) -> list[Entry]:
        """Those of the tokens since the last time."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def take_token_ids(self) -> list[int]:
        """Those of the tokens since the last time, as far as they count; empty where they are not to be shown."""
        taken, self._token_ids = self._token_ids, []
        return taken

    def _push(self, token_id: int, logprobs: TokenLogprobs | None) -> list[AnswerPart]:
        offset = self._num_characters + self._detokenizer.num_held
        text = self._detokenizer.push((token_id,))
        self._num_characters += len(text)
        if token_id in self._end_token_ids:
            self._has_end_token = True
        else:
            if logprobs is not None:
                self._logprobs.append(Entry(token_id, logprobs, offset))
            if self._shows_token_ids:
                self._token_ids.append(token_id)
        if self._machine is None:
            return [Content(text)] if text else []
        parts = self._machine.push(text) if text else []
        if self._may_reason:
            self._count_reasoning(parts)
        return parts

    def _count_reasoning(self, parts: list[AnswerPart]) -> None:
        if any(not isinstance(part, Reasoning) for part in parts):
            self._may_reason = False
        elif parts or self.num_reasoning_tokens:
            # Also the tokens of the marks around it, which are no text.
            self.num_reasoning_tokens = self.num_tokens


def finish_reason(spec: AnswerSpec, choice: ChoiceText, reason: str) -> str:
    """Of a choice that has finished, as OpenAI spells it. `reason` is that of its terminal entry."""
    if choice.is_stopped:
        reason = "stop"
    if reason == "stop" and choice.has_tool_calls and not spec.forced_tool:
        return "tool_calls"
    return reason


def is_finished(choice: ChoiceText, end: TerminalEvent) -> bool:
    """Whether the choice is complete; else the whole answer has failed."""
    return end.state == "finished" or choice.is_stopped

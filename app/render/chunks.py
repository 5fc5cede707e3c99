"""The chunks of a streamed answer in OpenAI's JSON.

Owns the order of events and what is common to all of them. A chunk is rendered as constant bytes around the part that
changes, because this runs for every streamed token.

Every event has an id, with which a client comes back for the rest: for each choice, separated by commas, the index
of the last output token whose text is in it or before it, -1 before the first, and -2 before what opens a choice.
What follows the last token of a choice counts on: text that was held back until then, and the finish chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from app.dialect.parts import AnswerPart
from app.errors import ended_early, failed_here
from app.render.chat import NULL, Shape
from app.render.choice import ChoiceText, finish_reason
from app.render.spec import AnswerSpec
from app.render.whole import num_cached_tokens, tier_of, usage, workers_of
from bridge.streams.sse import DONE, comment, frame
from tasks.protocol.contract import TerminalEvent, TokenEvent

UNOPENED = -2
"""In the place of an index: nothing of the choice has been sent."""


class ChunkStream:
    """One streamed answer as events (`bridge.streams.relay.Renderer`), from the start or from where a client left."""

    def __init__(
        self, spec: AnswerSpec, shape: Shape, choices: Sequence[ChoiceText], position: Sequence[int] | None = None
    ) -> None:
        """`position` has for each choice the index that its id had in the last event that the client has; None: it
        has none. `choices` skip the tokens up to there."""
        self._spec = spec
        self._shape = shape
        self._choices = tuple(choices)
        self._position = (UNOPENED,) * len(choices) if position is None else tuple(position)
        # A choice that has nothing new yet stays where the client has it.
        self._ids = list(self._position)
        self._has_one = len(choices) == 1
        self._may_stop = bool(spec.stop)
        self._shows_token_ids = spec.shows_token_ids
        self._ends: dict[int, TerminalEvent] = {}
        self._has_sent = False
        self._unsent = b""
        """Finish chunks that the client has seen: they are sent again if there is nothing else to send."""
        start = {
            "id": spec.request_id,
            "object": shape.chunk_object,
            "created": spec.created_s,
            "model": spec.model,
            "system_fingerprint": spec.system_fingerprint,
            **tier_of(spec),
        }
        self._start = orjson.dumps(start)[:-1] + b","
        self._no_usage = b',"usage":null}' if spec.include_usage else b"}"
        before = b"\ndata: " + self._start
        self._before = [before + b'"choices":[{"index":%d,' % number for number in range(len(choices))]
        self._after = b',"logprobs":null,"finish_reason":null}]' + self._no_usage + b"\n\n"
        before_content, after_content = shape.around_content
        self._before_content = [before + before_content for before in self._before]
        self._after_content = after_content + self._after

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts, as far as choices have ended."""
        return num_cached_tokens(self._spec, self._ends)

    def is_satisfied(self, choice: int) -> bool:
        return self._may_stop and self._choices[choice].is_stopped

    def opening(self) -> bytes:
        data = b""
        told = self._shape.about_prompt()
        about = b"," + orjson.dumps(told)[1:-1] if told else b""
        for number, index in enumerate(self._position):
            if index == UNOPENED:
                self._ids[number] = -1
                if member := self._shape.opening(number):
                    data += self._event(number, member, NULL, NULL, about if number == 0 else b"")
        return data

    def tokens(self, choice: int, events: Sequence[TokenEvent]) -> bytes:
        """One chunk for all tokens of a wake-up; nothing while their text may still change."""
        one = self._choices[choice]
        if one.is_plain and not self._spec.continuous_usage:
            text = one.push_text(events)
            if not text:
                return b""
            # Not before: an event of another choice must not say that a token has been shown that was not.
            self._ids[choice] = index = one.last_index
            self._has_sent = True
            # PERF: `_event`, spelled out.
            before, content, after = self._before_content[choice], orjson.dumps(text), self._after_content
            if self._has_one:
                return b"id: %d%b%b%b" % (index, before, content, after)
            return b"id: %b%b%b%b" % (self._id(), before, content, after)
        parts = one.push(events)
        if not parts:
            return b""
        self._ids[choice] = one.last_index
        return self._parts(choice, parts)

    def ended(self, choice: int, end: TerminalEvent) -> bytes:
        """The rest of the text, and the finish chunk."""
        data = self._rest(choice, end)
        one = self._choices[choice]
        self._ids[choice] += 1
        reason = orjson.dumps(finish_reason(self._spec, one, end.reason))
        has_seen_it = self._ids[choice] <= self._position[choice]
        chunk = self._event(choice, self._shape.member(()), self._logprobs(one), reason)
        if has_seen_it:
            self._unsent += chunk
            return data
        self._has_sent = True
        return data + chunk

    def failed(self, choice: int, end: TerminalEvent) -> bytes:
        return self._rest(choice, end) + self.failure(ended_early(end))

    def closing(self) -> bytes:
        """Usage and `[DONE]`."""
        data = b"" if self._has_sent else self._unsent
        if self._spec.include_usage:
            counts = usage(self._spec, self._choices, self._ends)
            data += frame(self._start + b'"choices":[],"usage":' + orjson.dumps(counts) + b"}", self._id())
        if workers := workers_of(self._ends.values()):
            data += comment(f"worker {workers}")
        return data + frame(DONE, self._id())

    def failure(self, error: Exception) -> bytes:
        return frame(failed_here(error).render(), self._id())

    def _rest(self, choice: int, end: TerminalEvent) -> bytes:
        """The text that was held back, in an event whose id is one more than that of the last token."""
        self._ends[choice] = end
        one = self._choices[choice]
        parts = one.finish()
        self._ids[choice] = one.last_index
        if not parts:
            return b""
        self._ids[choice] += 1
        return self._parts(choice, parts) if self._ids[choice] > self._position[choice] else b""

    def _parts(self, choice: int, parts: Sequence[AnswerPart]) -> bytes:
        self._has_sent = True
        return self._event(choice, self._shape.member(parts), self._logprobs(self._choices[choice]), NULL)

    def _logprobs(self, one: ChoiceText) -> bytes:
        if self._spec.num_logprobs is None:
            return NULL
        entries = one.take_logprobs()
        return self._shape.logprobs(entries) if entries else NULL

    def _event(self, choice: int, member: bytes, logprobs: bytes, reason: bytes, about: bytes = b"") -> bytes:
        """`about` has members of the chunk itself, each behind a comma."""
        before = self._before[choice]
        after = self._after
        if logprobs is not NULL or reason is not NULL or self._spec.continuous_usage or self._shows_token_ids:
            ends = (logprobs, reason, self._token_ids(choice), about, self._usage_so_far())
            after = b',"logprobs":%b,"finish_reason":%b%b}]%b%b\n\n' % ends
        return b"id: %b%b%b%b" % (self._id(), before, member, after)

    def _token_ids(self, choice: int) -> bytes:
        """The member of a choice that has them, where they are wanted."""
        if not self._shows_token_ids:
            return b""
        return b',"token_ids":' + orjson.dumps(self._choices[choice].take_token_ids())

    def _usage_so_far(self) -> bytes:
        if not self._spec.continuous_usage:
            return self._no_usage
        return b',"usage":%b}' % orjson.dumps(usage(self._spec, self._choices, self._ends))

    def _id(self) -> bytes:
        return b",".join([b"%d" % index for index in self._ids])

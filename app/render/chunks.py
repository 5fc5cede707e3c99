"""Answers in OpenAI's JSON: the whole one, and the chunks of a streamed one.

Owns the order and the shape of what is common to all answers, and what a chat puts into a choice (`ChatShape`).
Refuses to know where tokens come from. A chunk is rendered as constant bytes around the part that changes, because
this runs for every streamed token.

Every event has an id, with which a client comes back for the rest: for each choice, separated by commas, the index
of the last output token whose text is in it or before it, -1 before the first, and -2 before what opens a choice.
What follows the last token of a choice counts on: text that was held back until then, and the finish chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import orjson

from app.dialect.parts import AnswerPart, Content, Reasoning, ToolArguments, ToolStart
from app.errors import ended_early, failed_here
from app.render.choice import ChoiceText, finish_reason, is_finished
from app.render.logprobs import Entry, TokenNames
from app.render.spec import AnswerSpec
from bridge.streams.sse import DONE, comment, frame
from tasks.protocol.contract import StreamEvent, TerminalEvent, TokenEvent

NULL = b"null"
UNOPENED = -2
"""In the place of an index: nothing of the choice has been sent."""


class Shape(Protocol):
    """What differs between a chat and a completion."""

    @property
    def chunk_object(self) -> str: ...
    @property
    def whole_object(self) -> str: ...
    @property
    def around_content(self) -> tuple[bytes, bytes]:
        """What `member` puts before and after the JSON of a text that is all content."""

    def opening(self, choice: int) -> bytes:
        """The member of a choice that says that it begins; empty if nothing does."""

    def about_prompt(self) -> dict[str, Any]:
        """What is said of the prompt beside the choices, in a whole answer and in the first chunk of a stream."""

    def member(self, parts: Sequence[AnswerPart]) -> bytes:
        """The member of a choice that holds these parts, as JSON with its name. There may be none."""

    def logprobs(self, entries: Sequence[Entry]) -> bytes:
        """As JSON."""

    def whole(self, choice: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """The members of a whole choice that hold its parts."""


class ChatShape:
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    around_content = (b'"delta":{"content":', b"}")

    def __init__(self, names: TokenNames, spec: AnswerSpec) -> None:
        self._names = names
        self._spec = spec

    def opening(self, choice: int) -> bytes:
        return b'"delta":{"role":"assistant","content":"","refusal":null}'

    def about_prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._spec.prompt_token_ids[0]} if self._spec.shows_token_ids else {}

    def member(self, parts: Sequence[AnswerPart]) -> bytes:
        if len(parts) == 1 and isinstance(parts[0], Content):
            return b'"delta":{"content":%b}' % orjson.dumps(parts[0].text)
        # NOTE: one delta for all of them, because an event id cannot name a place between them.
        delta: dict[str, Any] = {}
        if thought := "".join(part.text for part in parts if isinstance(part, Reasoning)):
            delta["reasoning_content"] = thought
        if content := "".join(part.text for part in parts if isinstance(part, Content)):
            delta["content"] = content
        if calls := _calls(parts):
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls.items()]
        return b'"delta":' + orjson.dumps(delta)

    def logprobs(self, entries: Sequence[Entry]) -> bytes:
        return b'{"content":[%b],"refusal":null}' % b",".join([self._names.entry(entry) for entry in entries])

    def whole(self, choice: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        calls = _calls(parts)
        content = "".join(part.text for part in parts if isinstance(part, Content))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
            "annotations": [],
        }
        if thought := "".join(part.text for part in parts if isinstance(part, Reasoning)):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = list(calls.values())
        return {"message": message}


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
            **_tier(spec),
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


class WholeChoice:
    """Gathers one choice of an answer that is not streamed (`bridge.streams.collect.Sink`)."""

    def __init__(self, text: ChoiceText) -> None:
        self.text = text
        self.parts: list[AnswerPart] = []
        self.end_event: TerminalEvent | None = None

    @property
    def is_satisfied(self) -> bool:
        return self.text.is_stopped

    def push(self, events: Sequence[TokenEvent]) -> None:
        self.parts += self.text.push(events)

    def end(self, end: TerminalEvent) -> None:
        self.parts += self.text.finish()
        self.end_event = end

    def take(self, events: Sequence[StreamEvent]) -> None:
        """All that there is of the choice, from its start."""
        for event in events:
            if isinstance(event, TerminalEvent):
                self.end(event)
            else:
                self.push([event])


Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


def progress(spec: AnswerSpec, shape: Shape, choices: Sequence[WholeChoice], is_claimed: bool) -> dict[str, Any]:
    """How far an answer is, and what is known of it: the whole of it once it is completed."""
    early = next((end for one in choices if (end := one.end_event) and not is_finished(one.text, end)), None)
    status: Status
    if early is not None:
        status = "cancelled" if early.state == "cancelled" else "failed"
    elif all(one.end_event is not None or one.is_satisfied for one in choices):
        status = "completed"
    else:
        status = (
            "in_progress"
            if is_claimed or any(one.end_event or one.text.last_index >= 0 for one in choices)
            else "queued"
        )
    error = {} if early is None else ended_early(early).body()
    return {**completion(spec, shape, choices), "status": status, **error}


def completion(spec: AnswerSpec, shape: Shape, choices: Sequence[WholeChoice]) -> dict[str, Any]:
    """A whole answer; of one that is still going on, what is known. Choices that failed have no finish_reason."""
    ends = {number: one.end_event for number, one in enumerate(choices) if one.end_event is not None}
    return {
        "id": spec.request_id,
        "object": shape.whole_object,
        "created": spec.created_s,
        "model": spec.model,
        "system_fingerprint": spec.system_fingerprint,
        **_tier(spec),
        **shape.about_prompt(),
        "choices": [_whole(spec, shape, number, one) for number, one in enumerate(choices)],
        "usage": usage(spec, [one.text for one in choices], ends),
        **({"metadata": spec.metadata} if spec.store else {}),
    }


def _whole(spec: AnswerSpec, shape: Shape, number: int, one: WholeChoice) -> dict[str, Any]:
    end = one.end_event
    if one.text.is_stopped:
        reason: str | None = finish_reason(spec, one.text, "stop")
    else:
        reason = finish_reason(spec, one.text, end.reason) if end is not None and end.state == "finished" else None
    entries = one.text.take_logprobs()
    return {
        "index": number,
        **shape.whole(number, one.parts),
        "logprobs": None if spec.num_logprobs is None else orjson.Fragment(shape.logprobs(entries)),
        "finish_reason": reason,
        **({"token_ids": one.text.take_token_ids()} if spec.shows_token_ids else {}),
    }


def usage(spec: AnswerSpec, choices: Sequence[ChoiceText], ends: Mapping[int, TerminalEvent]) -> dict[str, Any]:
    """Tokens of all choices. A prompt counts once however many choices it has, and of its cached tokens those count
    that its first choice found: the others find what the first one has just computed."""
    num_completion = sum(one.num_tokens for one in choices)
    return {
        "prompt_tokens": spec.num_prompt_tokens,
        "completion_tokens": num_completion,
        "total_tokens": spec.num_prompt_tokens + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens(spec, ends), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.num_reasoning_tokens for one in choices),
            "audio_tokens": 0,
        },
    }


def num_cached_tokens(spec: AnswerSpec, ends: Mapping[int, TerminalEvent]) -> int:
    firsts = range(0, spec.num_choices, spec.n)
    num_cached = sum(ends[number].num_cached_tokens for number in firsts if number in ends)
    # After a failover a worker finds output tokens of an earlier attempt, too.
    return min(num_cached, spec.num_prompt_tokens)


def workers_of(ends: Iterable[TerminalEvent]) -> str:
    """The workers that finished the choices, each once."""
    return ", ".join(dict.fromkeys(end.worker for end in ends if end.worker))


def _calls(parts: Sequence[AnswerPart]) -> dict[int, dict[str, Any]]:
    """The calls that these parts begin or continue, by index."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, ToolStart):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, ToolArguments):
            call = calls.setdefault(part.index, {"function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    return calls


def _tier(spec: AnswerSpec) -> dict[str, str]:
    """OpenAI says which tier it was when the request had asked for one."""
    return {"service_tier": spec.service_tier} if spec.service_tier else {}

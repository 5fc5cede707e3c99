"""A whole answer as JSON, and how far one is that is still being generated.

Owns what is the same for every kind of answer: identity, usage, tier, status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import orjson

from app.dialect.parts import AnswerPart
from app.errors import ended_early
from app.render.chat import Shape
from app.render.choice import ChoiceText, finish_reason, is_finished
from app.render.spec import AnswerSpec
from tasks.protocol.contract import StreamEvent, TerminalEvent, TokenEvent


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
        **tier_of(spec),
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


def tier_of(spec: AnswerSpec) -> dict[str, str]:
    """OpenAI says which tier it was when the request had asked for one."""
    return {"service_tier": spec.service_tier} if spec.service_tier else {}

"""Answers in OpenAI's JSON: the whole completion, and the chunks of a streamed one.

Owns the shapes. Refuses to know where text comes from. A chunk is rendered as constant bytes around the one part
that changes, because this runs for every streamed token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.errors import ended_early, failed_here
from app.text_edge import Detokenizer
from bridge.collect import Answer
from bridge.sse import DONE, comment, frame
from tasks.contract import TerminalEvent, TokenEvent


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in all parts of one answer."""

    request_id: str
    created_s: int
    model: str
    system_fingerprint: str | None
    num_prompt_tokens: int


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(num_cached_tokens, num_prompt_tokens), "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def completion(head: Head, answer: Answer) -> dict[str, Any]:
    """A whole `chat.completion`. Raises ApiError if the generation did not finish."""
    if answer.end.state != "finished" and not answer.stopped:
        raise ended_early(answer.end)
    return {
        "id": head.request_id,
        "object": "chat.completion",
        "created": head.created_s,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": answer.text, "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "stop" if answer.stopped else answer.end.reason,
            }
        ],
        "usage": usage(head.num_prompt_tokens, answer.num_tokens, answer.end.num_cached_tokens),
    }


class ChunkStream:
    """Renders one streamed answer as events (`bridge.relay.Renderer`).

    Every event carries the index of the last output token whose text is in it or before it as its id, -1 before the
    first: what a client has when it comes back for the rest.
    """

    def __init__(self, head: Head, detokenizer: Detokenizer, include_usage: bool) -> None:
        self._head = head
        self._detokenizer = detokenizer
        self._include_usage = include_usage
        self._last_index = -1
        start = {
            "id": head.request_id,
            "object": "chat.completion.chunk",
            "created": head.created_s,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
        self._start = orjson.dumps(start)[:-1] + b","
        self._end = b',"usage":null}' if include_usage else b"}"
        self._before = b"\ndata: " + self._start + b'"choices":[{"index":0,"delta":{"content":'
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._end + b"\n\n"

    @property
    def is_satisfied(self) -> bool:
        return self._detokenizer.stopped

    def opening(self) -> bytes:
        return self._choice(b'{"role":"assistant","content":"","refusal":null}', b"null")

    def tokens(self, events: Sequence[TokenEvent]) -> bytes:
        """One chunk for all tokens of a wake-up; nothing while their text may still change."""
        if len(events) == 1:
            text = self._detokenizer.push(events[0].token_ids)
        else:
            text = self._detokenizer.push([token for event in events for token in event.token_ids])
        self._last_index = self._detokenizer.num_tokens_used - 1
        return self._text(text) if text else b""

    def ending(self, end: TerminalEvent) -> bytes:
        """The rest of the text and how it ended: finish chunk, usage, `[DONE]`, or one error event."""
        tail = self._detokenizer.finish()
        data = self._text(tail) if tail else b""
        stopped = self._detokenizer.stopped
        if end.state != "finished" and not stopped:
            return data + self.failure(ended_early(end))
        reason = "stop" if stopped else end.reason
        data += self._choice(b"{}", orjson.dumps(reason))
        if self._include_usage:
            num_tokens = self._detokenizer.num_tokens_used if stopped else end.index
            counts = usage(self._head.num_prompt_tokens, num_tokens, end.num_cached_tokens)
            data += frame(self._start + b'"choices":[],"usage":' + orjson.dumps(counts) + b"}", self._last_index)
        if end.worker:
            data += comment(f"worker {end.worker}")
        return data + frame(DONE, self._last_index)

    def failure(self, error: Exception) -> bytes:
        return frame(failed_here(error).render(), self._last_index)

    def _text(self, text: str) -> bytes:
        # PERF: `frame`, spelled out: JSON has no line breaks.
        return b"id: %d%b%b%b" % (self._last_index, self._before, orjson.dumps(text), self._after)

    def _choice(self, delta: bytes, finish_reason: bytes) -> bytes:
        body = b'"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]' % (delta, finish_reason)
        return frame(self._start + body + self._end, self._last_index)

"""Streamed answers: the order and the shape of the events."""

from __future__ import annotations

import re

import pytest

from app.text.edge import TextEdge
from app.text.templates import ChatFormat
from tests.app.web import EOS, FINGERPRINT, MODEL, NUM_PROMPT_TOKENS, START_S, Web, end_of

USAGE = {"include_usage": True}


@pytest.fixture
async def web(outlet: bool) -> Web:
    """Both ways to the client must show the same: through ASGI alone, and with tokens written past it."""
    return Web(outlet=outlet)


def bytes_edge() -> TextEdge:
    """Output id N is the byte N."""
    return TextEdge(
        format=ChatFormat(lambda messages: []),
        encode_pieces=lambda pieces: [1, 2, 3],
        encode=lambda text: [],
        token_bytes=lambda i: bytes([i]),
        eos_token_ids=[EOS],
        vocab_size=256,
    )


async def test_a_stream_is_role_text_one_finish_reason_usage_and_done(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True, stream_options=USAGE)
    worker.append("chatcmpl-1", 0, 101, cached=3)
    await web.turn()
    worker.append("chatcmpl-1", 1, 102, EOS, end="stop", cached=3)
    await web.turn()
    same = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": int(START_S),
        "model": MODEL,
        "system_fingerprint": FINGERPRINT,
    }

    def choice(delta: dict[str, object], reason: str | None = None) -> dict[str, object]:
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        return {**same, "choices": choices, "usage": None}

    usage = {
        "prompt_tokens": NUM_PROMPT_TOKENS,
        "completion_tokens": 2,
        "total_tokens": NUM_PROMPT_TOKENS + 2,
        "prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
    assert exchange.events == [
        (-1, choice({"role": "assistant", "content": "", "refusal": None})),
        (0, choice({"content": "<101>"})),
        (2, choice({"content": "<102>"})),
        (3, choice({}, "stop")),
        (3, {**same, "choices": [], "usage": usage}),
        (3, "[DONE]"),
    ]
    assert exchange.is_over


async def test_a_stream_is_declared_as_events_that_nobody_may_keep_back(web: Web) -> None:
    web.worker()
    exchange = await web.chat(stream=True)
    assert exchange.status == 200
    assert exchange.headers["content-type"].startswith("text/event-stream")
    assert exchange.headers["cache-control"] == "no-cache"
    assert exchange.headers["x-accel-buffering"] == "no"
    assert exchange.headers["x-request-id"] == "chatcmpl-1"


async def test_without_include_usage_no_chunk_has_a_usage_key(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True)
    worker.append("chatcmpl-1", 0, 101, end="length")
    await web.turn()
    assert len(exchange.chunks) == 3
    assert all("usage" not in chunk for chunk in exchange.chunks)
    assert exchange.events[-1] == (1, "[DONE]")


async def test_the_role_is_in_the_first_chunk_only(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True)
    worker.append("chatcmpl-1", 0, 101)
    await web.turn()
    worker.append("chatcmpl-1", 1, 102, end="length")
    await web.turn()
    deltas = [chunk["choices"][0]["delta"] for chunk in exchange.chunks]
    assert [("role" in delta) for delta in deltas] == [True, False, False, False]


async def test_tokens_that_arrive_together_are_one_chunk(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True)
    for index in range(5):
        worker.append("chatcmpl-1", index, 100 + index)
    await web.turn()
    assert exchange.events[1][0] == 4
    assert exchange.chunks[1]["choices"][0]["delta"] == {"content": "<100><101><102><103><104>"}


async def test_half_a_character_waits_for_its_rest_and_text_before_it_does_not(outlet: bool) -> None:
    web = Web(outlet=outlet, text_edges={MODEL: bytes_edge()})
    worker, exchange = await web.claimed_chat(stream=True)
    emoji = "😀".encode()
    worker.append("chatcmpl-1", 0, ord("h"), ord("i"), *emoji[:2])
    await web.turn()
    assert exchange.text == "hi"
    worker.append("chatcmpl-1", 4, emoji[2])
    await web.turn()
    assert exchange.text == "hi"
    worker.append("chatcmpl-1", 5, emoji[3], emoji[0], end="length")
    await web.turn()
    assert exchange.text == "hi😀\ufffd"


async def test_line_separators_in_the_text_do_not_break_the_framing(outlet: bool) -> None:
    web = Web(outlet=outlet, text_edges={MODEL: bytes_edge()})
    worker, exchange = await web.claimed_chat(stream=True)
    text = 'a\n\r\n\u2028data: x\n\nid: 9\r\x00"\\'
    worker.append("chatcmpl-1", 0, *text.encode(), end="length")
    await web.turn()
    assert exchange.text == text


async def test_nothing_of_a_stop_string_is_sent(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True, stop=["2><103", "zzz"], stream_options=USAGE)
    worker.append("chatcmpl-1", 0, 101, 102)
    await web.turn()
    assert exchange.text == "<101><10"
    worker.append("chatcmpl-1", 2, 103, 104)
    await web.turn()
    assert end_of(web) == ("finished", "stop")
    await web.turn()
    assert exchange.text == "<101><10"
    assert exchange.chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert exchange.chunks[-1]["usage"]["completion_tokens"] == 3
    assert exchange.is_over


async def test_text_held_back_for_a_stop_string_is_sent_at_the_end(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True, stop=["2><103"])
    worker.append("chatcmpl-1", 0, 101, 102, end="length")
    await web.turn()
    assert exchange.text == "<101><102>"
    assert [id for id, _ in exchange.events] == [-1, 1, 2, 3, 3]


async def test_a_stop_string_and_the_end_in_one_batch_make_one_clean_end(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True, stop="<102>")
    worker.append("chatcmpl-1", 0, 101, 102, 103, end="length")
    await web.turn()
    assert exchange.text == "<101>"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in exchange.chunks]
    assert reasons == [None, None, "stop"]
    assert exchange.events[-1] == (2, "[DONE]")


async def test_the_worker_is_named_in_a_comment_at_the_end(web: Web) -> None:
    worker = web.worker("w7")
    exchange = await web.chat(stream=True)
    worker.claim("chatcmpl-1")
    worker.append("chatcmpl-1", 0, 101, end="length")
    await web.turn()
    assert re.search(r"\n\n: worker w7\nid: 1\ndata: \[DONE\]\n\n$", exchange.body.decode())


async def test_a_failure_after_the_first_byte_is_an_error_event_and_no_clean_end(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True, stream_options=USAGE)
    worker.append("chatcmpl-1", 0, 101)
    await web.turn()
    worker.append("chatcmpl-1", 1, 102, end="engine_error")
    await web.turn()
    assert exchange.text == "<101><102>"
    index, last = exchange.events[-1]
    assert index == 1
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["code"] == "engine_error"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in exchange.chunks[:-1])
    assert b"[DONE]" not in exchange.body
    assert exchange.is_over


async def test_a_lost_stream_is_an_error_event(web: Web) -> None:
    web.worker()
    exchange = await web.chat(stream=True)
    web.redis.flushall()
    web.now_s += 5
    await web.turn()
    assert exchange.events[-1][1]["error"]["code"] == "stream_lost"
    assert exchange.is_over


async def test_two_streams_do_not_mix(web: Web) -> None:
    worker = web.worker()
    first = await web.chat(stream=True)
    second = await web.chat(stream=True)
    worker.claim("chatcmpl-1")
    worker.claim("chatcmpl-2")
    worker.append("chatcmpl-2", 0, 201)
    worker.append("chatcmpl-1", 0, 101)
    await web.turn()
    assert (first.text, second.text) == ("<101>", "<201>")


async def test_tokens_take_the_outlet_and_the_rest_does_not() -> None:
    web = Web(outlet=True)
    worker, exchange = await web.claimed_chat(stream=True)
    worker.append("chatcmpl-1", 0, 101)
    await web.turn()
    worker.append("chatcmpl-1", 1, 102)
    await web.turn()
    assert exchange.num_writes == 2
    worker.append("chatcmpl-1", 2, 103, end="length")
    await web.turn()
    assert exchange.num_writes == 2
    assert exchange.text == "<101><102><103>"
